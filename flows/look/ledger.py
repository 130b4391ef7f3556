"""Shows an episode of a self_ac run's credit ledger: each turn's reward and its share of the loss.

turnwise show RUN --ledger EPISODE
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from flows.book import EXPERIMENT
from flows.look.view.credit import FILE, STAGE, turn_lines
from flows.rerun import stage_run_of
from stages.frame.types import Row, UsageError
from stages.store.execute import lineage_inputs
from stages.store.workspace import Workspace

NAMED = 3  # episodes that an error names
NUMBERS = ("reward", "value", "target", "advantage", "ratio", "share")


def read_ledger(workspace: Workspace, run: str, prefix: str) -> dict[str, Any]:
    """The entries of one episode, its turns' texts as produced, and the sum of all shares of the step.

    run: a run of self_ac, or a pipeline run (its last iteration). Raises UsageError for another run, or unless exactly
    one episode of the ledger starts with the prefix. Raises MissingInput where the run left no ledger.
    """
    run_id = _find(workspace, run)
    path = workspace.tracking.artifact(run_id, FILE)
    episode = _episode(path, prefix, run_id)
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    entries = pq.read_table(path, filters=[("episode", "=", episode)]).to_pylist()
    played = workspace.replay.rows(
        "turns", lineage_inputs(workspace, run_id)["collect"][-1:], where=f"episode_id = '{episode}'"
    )
    loss = pc.sum(pq.read_table(path, columns=["loss_share"])["loss_share"]).as_py()
    return {
        "run_id": run_id,
        "episode": episode,
        "loss": loss,
        "texts": {turn["turn"]: turn["text"] for turn in played},
        "entries": entries,
    }


def ledger_table(found: Mapping[str, Any]) -> RenderableType:
    """One line a turn and one for the end state. Ratios that differ within a turn are shown as a span."""
    title = f"episode {found['episode']}  first step of {STAGE} run {found['run_id'][:8]}"
    table = Table(expand=True)
    table.add_column("turn", justify="right")
    table.add_column("text", ratio=1, overflow="fold")
    for name in ("tokens", *NUMBERS):
        table.add_column(name, justify="right", no_wrap=True)
    lines = turn_lines(found["entries"], found["texts"])
    for line in lines:
        numbers = [_cell(line, name) for name in NUMBERS]
        table.add_row(str(line["turn"]), Text(line["text"]), str(line["tokens"] or ""), *numbers)
    mine = sum(line["share"] for line in lines)
    rewards = sum(line["reward"] for line in lines if not line["first_turn"])
    loss = f"share: part of the actor's loss of the step, {found['loss'] + 0.0:.4g}; this episode's: {mine + 0.0:.4g}."
    return Group(Rule(Text(title)), table, Text(f"rewards sum to {rewards:g}. target: mean over n. {loss}"))


def _cell(line: Row, name: str) -> str:
    value = line[name]
    if name == "ratio":
        low, high = (f"{bound(value, default=0.0):.3f}" for bound in (min, max))
        shown = low if low == high else f"{low}..{high}"
        return f"{shown}{' clipped' if line['clipped'] else ''}" if value else ""
    if value is None or (name == "share" and not line["tokens"]):
        return ""
    return f"{value + 0.0:.4g}"  # -0.0 + 0.0 is 0.0


def _find(workspace: Workspace, run: str) -> str:
    run_id = workspace.tracking.find(run)
    if stage_run := stage_run_of(STAGE, run_id, workspace):
        return stage_run
    experiment = workspace.tracking.experiment(run_id)
    found = "one that has none yet" if experiment == EXPERIMENT else f"a run of {experiment}"
    raise UsageError(
        f"--ledger: wanted a run of {STAGE}, or a pipeline run with one, found {found}. See: turnwise runs --stage {STAGE}"
    )


def _episode(path: Path, prefix: str, run_id: str) -> str:
    import pyarrow.parquet as pq

    known: list[str] = pq.read_table(path, columns=["episode"])["episode"].unique().to_pylist()
    found = [name for name in known if name.startswith(prefix)]
    if len(found) == 1 or prefix in found:
        return prefix if prefix in found else found[0]
    if found:
        raise UsageError(
            f"--ledger: {prefix!r} is the start of {len(found)} episodes ({', '.join(found[:NAMED])}, ...). Give more characters"
        )
    some = f"{len(known)} episodes, those of its first step: {', '.join(known[:NAMED])}{', ...' if len(known) > NAMED else ''}"
    raise UsageError(f"--ledger: no episode in the ledger of run {run_id[:8]} starts with {prefix!r}; it has {some}")
