"""Which roles a model can play: one reply of each, and what to do.

turnwise doctor --task desk+qwen05b --model FOLDER
"""

from __future__ import annotations

import os
import tempfile
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flows import presets
from flows.report import Display, emit
from flows.workspace import find_home, make_engine
from stages.frame.contract import Context
from stages.frame.types import printable
from stages.judge.reading import Heard, hear
from stages.llm.roles import prompts_folder, roles_of

N = 10
"""Episodes, and questions to each role."""
ENOUGH = 0.8
"""Share of a role's replies that must be readable: a run drops the others."""
SHOWN = 160  # letters of a reply


def roles(args: Namespace) -> int:
    """Exit status 1 where a role cannot be read."""
    os.chdir(find_home(args.home))
    sets = [*args.set, *([f"model.path={args.model}"] if args.model else [])]
    run = presets.load(args.task or "desk", sets)
    nothing: Any = None
    with tempfile.TemporaryDirectory() as scratch, Display(quiet=args.quiet) as display:
        context = Context(
            config=nothing, run=run, iteration=0, seed=run.seed, inputs={}, replay=nothing, engine=make_engine(run), artifact=nothing,
            workdir=Path(scratch), checkpoints=Path(scratch), progress=display.bar,
        )  # fmt: skip
        episodes, heard = hear(context, roles_of(run.roles), N)
    won = sum(episode.won for episode in episodes)
    bad = [one for one in heard if one.readable < ENOUGH * one.asked]
    advice = advise(run, bad)
    if args.json:
        emit({"episodes": len(episodes), "won": won, "roles": [asdict(one) for one in heard], "advice": advice})
        return 1 if bad else 0
    print(f"{run.model.path} on {run.preset}, prompts {run.roles.prompts}: {won} of {len(episodes)} episodes won\n")
    for one in heard:
        mark = "--" if one in bad else "ok"
        print(f"{mark} {one.role:<10} {one.readable} of {one.asked} replies can be read{_why(one)}")
        print(f"   {printable(' '.join(one.reply.split()))[:SHOWN]!r}")
    print("\n" + "\n".join(advice))
    return 1 if bad else 0


def _why(one: Heard) -> str:
    return f"; this one cannot: {printable(one.wrong)[:SHOWN]}" if one.wrong else ""


def advise(run: Any, bad: list[Heard]) -> list[str]:
    """What to do next, a line each."""
    if not bad:
        return [f"All roles can be read. Run it: turnwise run {run.preset} --set model.path={run.model.path}"]
    names = ", ".join(one.role for one in bad)
    lines = [f"A run would drop most replies of {names}. Each of these may help:"]
    if any("was cut at" in one.wrong for one in bad):
        longer = 2 * run.roles.max_future_tokens
        lines.append(f"- Give the replies more room: --set roles.max_future_tokens={longer}")
    if prompts_folder(plain := f"{run.roles.prompts}_plain").is_dir():
        lines.append(f"- Take prompts in plain English: --set roles.prompts={plain}")
    warm = f"--set roles.prompts={run.roles.prompts} --out data/models/mine"
    lines.append(f"- Warm the model for the roles: turnwise pretrain --set pretrain.base={run.model.path} {warm}")
    lines.append("- Take a method that needs only the policy, such as grpo or rft.")
    return lines
