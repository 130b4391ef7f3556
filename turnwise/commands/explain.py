"""`turnwise explain STAGE --of RUN`: whether a stage would run or be reused, and why."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict
from typing import Any

from flows.look.explain import HASHED, Explained, Near, explained
from flows.report import answer
from flows.rerun import prepare
from flows.workspace import find_home, open_workspace

SHOWN = 56  # characters of a value
HASH = 12  # characters of a hash


def explain(args: Namespace) -> int:
    """turnwise explain STAGE --of RUN"""
    workspace = open_workspace(find_home(args.home))
    again = prepare(args.stage, args.of, workspace, sets=args.set, iteration=args.iteration)
    found = explained(again.call, workspace)
    return answer(args, {"stage": args.stage, "of": again.old, **asdict(found)}, _told(found, again.old))


def _told(found: Explained, of: str) -> list[str]:
    lines = []
    if found.reuse:
        lines.append(f"{found.title} is reused: run {found.reuse[:8]} has its fingerprint.")
    else:
        lines.append(f"{found.title} runs: no finished run has its fingerprint.")
    if found.nearest:
        lines += _told_nearest(found.nearest)
    width = max(len(key) for key in found.fields)
    lines.append(f"\nWhat its fingerprint {found.fingerprint[:HASH]} is made of, with the inputs of run {of[:8]}:")
    for key, value in found.fields.items():
        runs = found.inputs.get(key.removeprefix("inputs."), ()) if key.startswith("inputs.") else ()
        told = [f"{one['run_id'][:8]} ({one['name']})" for one in runs] or [_short(key, value)]
        lines += [f"  {key:<{width}}  {told[0]}", *(f"  {'':<{width}}  {more}" for more in told[1:])]
    return lines


def _told_nearest(near: Near) -> list[str]:
    lines = [f"The nearest one, {near.run_id[:8]} ({near.name}), differs in:"]
    lines += [f"  {key}: {_short(key, old)} -> {_short(key, new)}" for key, (old, new) in near.differs.items()]
    if near.not_kept:
        lines.append(f"  that run did not keep its {', '.join(near.not_kept)}, which may differ, too")
    return lines


def _short(key: str, value: Any) -> str:
    """A value in a line; of hashes and run ids the start."""
    if value is None:
        return "not set"
    if key.startswith("inputs."):
        return ", ".join(run_id[:8] for run_id in value)
    if key == HASHED["model"] or key.startswith(("prompts.", "contents.")):
        return str(value)[:HASH] or "nothing there"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
