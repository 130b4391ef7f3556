"""What `turnwise plan` says beside what a run does: tokens and steps of every stage, work and memory of a training
step.

    python -m benchmarks.checks.plan_check                                  # tiny, demo and desk+self_ac, two iterations each
    python -m benchmarks.checks.plan_check --presets demo --set iterations=1

Tokens: the preset runs in a folder of its own, plainly; what engines read and wrote is what the stages log, and losses
that count are put around the real ones.
assumed: as the plan says it before the run; measured: with the means of that very run put in by name (turns, tokens of
replies, share of Yes, ...), so what is left is what the counting itself gets wrong. Both in shares of what was counted.
Work: matrix products of one step as PyTorch counts them; memory: bytes that autograd keeps for the backward pass,
weights left out. Neither depends on the machine.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.counts import causal_pairs, matmul_flops
from benchmarks.passes import (
    RANK,
    backward,
    grpo_loss,
    grpo_row,
    made_up,
    random_policy,
    table_head,
    table_row,
    with_log_probs,
)
from flows import presets
from flows.cost.estimate import train_flops
from flows.cost.lengths import Lengths, assumed
from flows.cost.machine import Machine
from flows.cost.shapes import DEVICES, read_shape
from flows.cost.work import Rows, Work
from flows.cost.workload import workload
from flows.pipeline import Call, run_pipeline
from flows.workspace import open_workspace
from stages import self_ac
from stages.learn.adapter import base_of
from stages.store.execute import execute
from stages.store.workspace import StageRun, Workspace
from stages.train import passes

COUNTED = ("episodes", "prompts", "read", "generated", "trained", "predicted", "steps")
LOGGED = {
    "episodes": "episodes",
    "steps": "steps",
    "prompts": "requests",
    "read": "read_tokens",
    "generated": "generated_tokens",
}
"""What a stage logs of what is counted."""
SHIPPED = Path("data/base")


@contextmanager
def counting_losses(counts: Counter[str]) -> Iterator[None]:
    """Adds the tokens of every row that a gradient goes through."""
    log_probs, credited = passes.pass_log_probs, self_ac.credited_pass

    def of_rows(model: Any, step: Any) -> Any:
        if torch.is_grad_enabled():
            counts.update(trained=len(step.tree.ids), predicted=len(step.target_K))
        return log_probs(model, step)

    def of_episodes(model: Any, head: Any, part: Any, config: Any, **options: Any) -> Any:
        counts.update(trained=len(part.row.ids), predicted=len(part.row.target_positions))
        return credited(model, head, part, config, **options)

    with ExitStack() as stack:
        stack.enter_context(patch.object(passes, "pass_log_probs", of_rows))
        stack.enter_context(patch.object(self_ac, "credited_pass", of_episodes))
        yield


def counted_run(run: Any, workspace: Workspace) -> tuple[dict[str, Counter[str]], dict[str, list[StageRun]]]:
    """The run, and what it did by stage."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    runs: dict[str, list[StageRun]] = defaultdict(list)

    def step(call: Call) -> StageRun:
        name = call.stage.name
        with counting_losses(counts[name]):
            done = execute(call.stage, run=call.run, inputs=call.inputs, iteration=call.iteration, workspace=workspace)
        counts[name].update({what: int(done.metrics.get(f"{name}/{key}", 0)) for what, key in LOGGED.items()})
        runs[name].append(done)
        return done

    run_pipeline(run, workspace, lambda parent: step)
    return counts, runs


def means(run: Any, workspace: Workspace, runs: Mapping[str, Sequence[StageRun]]) -> list[str]:
    """What the run has for the plan's assumptions, as --assume takes it."""
    turns = workspace.replay.rows("turns", [one.run_id for one in runs["collect"]])
    by_episode: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for turn in turns:
        by_episode[turn["run_id"], turn["episode_id"]].append(turn)
    starts = [mine[0]["prompt_ids"] for mine in by_episode.values()]
    # Trees share what all episodes begin with, and no customer's words.
    differ = (place for place, ids in enumerate(zip(*starts, strict=False)) if len(set(ids)) > 1)
    system = next(differ, min(map(len, starts)))
    steps = [
        len(after["prompt_ids"]) - len(turn["prompt_ids"]) - len(turn["action_ids"])
        for mine in by_episode.values()
        for turn, after in itertools.pairwise(mine)
    ]
    found = {
        "turns": len(turns) / len(by_episode), "system": system, "first": statistics.mean(map(len, starts)) - system,
        "observation": statistics.mean(steps or [0]), "action": statistics.mean(len(turn["action_ids"]) for turn in turns),
    }  # fmt: skip
    if run.method == "nlac":
        made = workspace.replay.rows("targets", [one.run_id for one in runs["targets"]])
        seen = {(turn["episode_id"], turn["turn"]): len(turn["prompt_ids"]) for turn in turns}
        told = statistics.mean(len(row["student_ids"]) - seen[row["episode_id"], row["turn"]] for row in made)
        found["act"] = min(told, assumed(run).act)  # beside the words around it, which no row tells apart
        found["template"] = told - found["act"]
        found["future"] = statistics.mean(len(row["completion_ids"]) for row in made)
        found["yes"] = statistics.mean(one.metrics["refine/yes_rate"] for one in runs["refine"])
    return [f"{name}={value}" for name, value in found.items()]


def planned(works: Sequence[Work]) -> dict[str, float]:
    return {
        "episodes": sum(w.episodes for w in works), "prompts": sum(p.n for w in works for p in w.prompts), "read": sum(w.read for w in works),
        "generated": sum(w.generated for w in works), "trained": sum(w.trained_tokens for w in works), "predicted": sum(w.predicted for w in works),
        "steps": sum(w.steps for w in works),
    }  # fmt: skip


def played(preset: str, sets: Sequence[str], home: Path) -> tuple[Any, dict[str, Counter[str]], Lengths]:
    """The preset's run in a new folder, with the base that ships: its config, what it did, and its means."""
    (home / "mlflow").mkdir(parents=True)
    shutil.copytree(SHIPPED, home / "data" / "base")
    here = Path.cwd()
    try:
        workspace = open_workspace(home)
        workspace.tracking.initialise()
        run = presets.load(preset, sets)
        counts, runs = counted_run(run, workspace)
        return run, counts, assumed(run, means(run, workspace, runs))
    finally:
        os.chdir(here)


def tokens(preset: str, sets: Sequence[str], home: Path) -> None:
    """Rows of the first table for one preset."""
    run, counts, measured = played(preset, sets, home)
    before, after = ([(work.stage, work) for work in workload(run, size)] for size in (assumed(run), measured))
    for stage in counts:
        said = [planned([work for name, work in all_works if name == stage]) for all_works in (before, after)]
        cells = []
        for what in COUNTED:
            n = counts[stage][what]
            cells.append(f"{n}: {said[0][what] / n:.2f}, {said[1][what] / n:.2f}" if n else "")
        table_row(preset, stage, *cells)


def saved_bytes(forward: Callable[[], Any], model: Any) -> int:
    """Bytes that autograd keeps after a forward pass, each piece of memory once, without the model's own weights."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()} | {
        b.untyped_storage().data_ptr() for b in model.buffers()
    }
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = forward()
    found = sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in own)
    del out
    return found


def one_step(checkpointing: bool, dtype: torch.dtype, args: argparse.Namespace) -> None:
    """A row of the second table: a step over made-up episodes on a random Llama with an adapter."""
    model = random_policy(args.width, args.layers, 4 * args.length * args.turns, args.vocabulary)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    row = grpo_row(
        with_log_probs(model, made_up(2, args.turns, args.length, args.length, args.length, args.vocabulary))
    )
    name = str(dtype).removeprefix("torch.")
    run = presets.load("demo", [f"model.gradient_checkpointing={str(checkpointing).lower()}", f"model.dtype={name}"])
    m = Machine(run, read_shape(base_of(model).config.to_dict(), "config"), DEVICES["h100"], 1)
    kept, again = m.shape.activation_bytes(dtype.itemsize, RANK, checkpointing=False)
    memory = saved_bytes(lambda: base_of(model).model(input_ids=row.ids, use_cache=False).last_hidden_state, model)
    if checkpointing:
        base_of(model).gradient_checkpointing_enable({"use_reentrant": False})
    counted = matmul_flops(backward(lambda: grpo_loss(model, row), model))
    length = row.ids.shape[1]
    said = sum(train_flops(m, Rows(2, length, len(row.target_ids) / 2), autocast=False))
    said -= m.shape.attention_flops(
        causal_pairs([length] * 2), 9 if checkpointing else 7
    )  # which PyTorch's counter leaves out on a CPU
    held = f"{memory / 1e6:.1f} MB: {(kept + again) * row.ids.numel() / memory:.3f}" if not checkpointing else ""
    table_row(name, "yes" if checkpointing else "no", f"{counted / 1e9:.2f} GFLOP: {said / counted:.3f}", held)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="*", default=["tiny", "demo", "desk+self_ac"])
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="of every preset, on top of iterations=2",
    )
    parser.add_argument("--width", type=int, default=256, help="of the random Llama whose step is counted")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=100, help="tokens of an action, and of an observation")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.presets:
        print("counted: assumed, measured in shares of it")
        table_head("preset", "stage", *COUNTED)
    for preset in args.presets:
        with tempfile.TemporaryDirectory() as scratch:
            tokens(preset, ["iterations=2", *args.set], Path(scratch, "home"))
    print("\ncounted: planned in shares of it")
    table_head("dtype", "checkpointing", "work of a step", "kept for the backward pass")
    for dtype in (torch.float32, torch.bfloat16):
        for checkpointing in (False, True):
            one_step(checkpointing, dtype, args)


if __name__ == "__main__":
    main()
