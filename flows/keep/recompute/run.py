"""Recomputes each stage of a run, in order, from its stored inputs; then the pipeline run's summary.

Each stage reads only what is stored, not what was recomputed. So a difference comes from the stage that shows it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flows.book import EXPERIMENT
from flows.keep.bundle.write import stage_runs
from flows.keep.recompute import compare, drawn, episodes
from flows.keep.recompute.compare import Compared, Stored
from flows.keep.recompute.mute import mute
from flows.pipeline import Call
from flows.registry import load_stage
from flows.rerun import is_same, prepare, stored_summary
from stages.frame.contract import Context
from stages.frame.types import Dropped, MissingInput, Row, TurnwiseError, UsageError
from stages.store.execute import INGREDIENTS, lineage_inputs
from stages.store.stage_context import context_of
from stages.store.tables import read_parquet
from stages.store.workspace import Workspace, silent

WHOLE, DERIVED, NOT = "whole", "from its draws", "not"
CHECKS: dict[str, Callable[[Context, Stored], Compared]] = {
    "collect": episodes.check_collect,
    "evaluate": episodes.check_evaluate,
    "targets": drawn.check_targets,
    "refine": drawn.check_refine,
    "pick": drawn.check_pick,
    "q_critic": drawn.check_q_critic,
}
"""Stage -> the check of what follows from its draws."""
READING = ("critic", "distill", "rft", "grpo", "sdpo", "self_ac")
"""Stages that read only stored rows, adapters and the base model. They run once more as a whole."""


@dataclass(frozen=True)
class Checked:
    """A recomputed stage run. how: the whole stage, what follows from its draws, or not at all, with `why`.

    same: whether code, prompts, files and base model are unchanged, by its fingerprint. unchecked: metrics and files
    that are only compared with their hashes.
    """

    title: str
    run_id: str
    how: str
    compared: Compared
    unchecked: tuple[str, ...] = ()
    same: bool = True
    why: str = ""

    @property
    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "compared": {**asdict(self.compared), "names": sorted(self.compared.names)}}


def check_run(workspace: Workspace, run_id: str) -> Iterator[Checked]:
    """Stage by stage in the order in which they were made, and last what the pipeline run says of them."""
    for one in stage_runs(workspace, run_id):
        yield check_stage(workspace, one)
    yield check_summary(workspace, run_id)


def check_stage(workspace: Workspace, run_id: str) -> Checked:
    """Recompute one stage run. The result says what is missing. Raises Changed where an artifact was changed."""
    stage = workspace.tracking.experiment(run_id)
    call = prepare(stage, run_id, workspace).call
    title = f"{stage} {_place(workspace, run_id, call)}"
    stored = Stored(
        run_id,
        stage,
        _metrics(workspace, run_id),
        lambda table: workspace.replay.rows(table, [run_id]),
        workspace.tracking.artifact(run_id, ""),
        Path(call.run.model.path).is_dir(),
        workspace.tracking.is_dropped(run_id),
    )
    check, how = (_run_again, WHOLE) if stage in READING else (CHECKS.get(stage), DERIVED)
    try:
        same = is_same(call, run_id, workspace)
    except TurnwiseError:  # a prompt or an environment that this turnwise does not have
        same = False
    if check is None or (how == WHOLE and not stored.has_model):
        why = (
            "nothing in it follows from what is stored" if check is None else f"no base model at {call.run.model.path}"
        )
        return Checked(title, run_id, NOT, Compared(), _others(stored, Compared()), same, why)
    with tempfile.TemporaryDirectory(prefix="turnwise-replay-") as scratch:
        try:
            done = check(_context(call, workspace, Path(scratch)), stored)
        except (Dropped, MissingInput, UsageError) as error:  # weights, a run, or an environment of somebody's own
            return Checked(title, run_id, NOT, Compared(), _others(stored, Compared()), same, str(error))
    done += _in_the_store(workspace, stored)
    return Checked(title, run_id, how, done, _others(stored, done), same)


def _run_again(context: Context, stored: Stored) -> Compared:
    """The stage's metrics, rows and files. Its seed decides its draws, so they must be equal."""
    outputs = load_stage(stored.stage).run(context)
    known = {name: value for name, value in stored.metrics.items() if not name.endswith("_s")}
    done = compare.metrics(stored.metrics, dict.fromkeys(known, float("nan")) | dict(outputs.metrics))
    done += compare.total(compare.rows(table, stored.rows(table), rows) for table, rows in outputs.rows.items())
    return done + compare.left(stored, outputs.files)


def check_episode(workspace: Workspace, episode: Row) -> Iterator[Checked]:
    """The stage run that played it, and those with rows of it that have read that run."""
    run_id = episode["run_id"]
    yield check_stage(workspace, run_id)
    for one in workspace.replay.runs_with(episode["episode_id"]):
        read = lineage_inputs(workspace, one).values() if workspace.tracking.is_finished(one) else ()
        if any(run_id in runs for runs in read):
            yield check_stage(workspace, one)


def check_summary(workspace: Workspace, run_id: str) -> Checked:
    """Check the pipeline run's summary: each iteration has its stages' metrics, each total cost is the sum, and the
    final adapter is the best iteration's.
    """
    summary = stored_summary(workspace, run_id)
    parts, sums = [], dict.fromkeys(("episodes", "env_steps", "generated_tokens"), 0.0)
    for row in summary["iterations"]:
        stored = {stage: _metrics(workspace, one) for stage, one in row["runs"].items()}
        metrics = {name: value for one in stored.values() for name, value in one.items()}
        for name, value in metrics.items():
            stage, _, what = name.partition("/")
            if what in sums and stage != "evaluate":
                sums[what] += value
        metrics |= {f"{EXPERIMENT}/{name}": value for name, value in sums.items()}
        where = f"summary.json iteration {row['iteration']}, metric"
        parts += [compare.compare(f"{where} {name}", row["metrics"].get(name), metrics[name]) for name in metrics]
    for part in (part for part in ("base", "final") if summary[part]):
        metrics = _metrics(workspace, summary[part]["run_id"])
        found = {name: metrics[f"evaluate/{name}"] for name in summary[part] if f"evaluate/{name}" in metrics}
        parts += [compare.compare(f"summary.json {part}, {name}", summary[part][name], found[name]) for name in found]
    rows = [row for row in summary["iterations"] if row["iteration"] >= 0 and row["win_rate"] is not None]
    if summary["final"] and rows:
        best = max(rows, key=lambda row: (row["metrics"]["evaluate/win_rate"], -row["iteration"]))
        parts.append(compare.compare("summary.json final, iteration", summary["final"]["iteration"], best["iteration"]))
    done = compare.total(parts) + Compared(what=(f"{len(summary['iterations'])} rows of the summary",))
    return Checked("pipeline", run_id, WHOLE, done)


def _context(call: Call, workspace: Workspace, scratch: Path) -> Context:
    (scratch / "work").mkdir()
    return context_of(
        call.stage, run=call.run, inputs=call.inputs, iteration=call.iteration, workspace=workspace, engine=mute(call.run),
        workdir=scratch / "work", checkpoints=scratch / "checkpoints", progress=silent,
    )  # fmt: skip


def _place(workspace: Workspace, run_id: str, call: Call) -> str:
    part = workspace.tracking.tags(run_id).get("part", "")
    return part if part in ("base", "start", "final") else str(call.iteration)


def _metrics(workspace: Workspace, run_id: str) -> dict[str, float]:
    return dict(workspace.tracking.read_json(run_id, "outputs.json")["metrics"])


def _in_the_store(workspace: Workspace, stored: Stored) -> Compared:
    """MLflow's last values, and DuckDB's rows, against the run's own files."""
    shown = workspace.tracking.metrics(stored.run_id)
    finite = {name: value for name, value in stored.metrics.items() if name in shown and abs(value) < float("inf")}
    done = compare.total(
        compare.compare(f"metric {name} in MLflow", shown[name], value) for name, value in finite.items()
    )
    for file in sorted((stored.artifacts / "rows").glob("*.parquet")):
        kept = read_parquet(file, file.stem)
        rows = [{name: value for name, value in row.items() if name != "run_id"} for row in stored.rows(file.stem)]
        done += Compared(1) if rows == kept else compare.rows(f"{file.stem} in DuckDB", rows, kept)
    return Compared(done.values, done.largest, done.differences)


def _others(stored: Stored, done: Compared) -> tuple[str, ...]:
    """Metrics and files that nothing was compared with."""
    names = [name for name in stored.metrics if not name.endswith("_s") and name not in done.names]
    files = [str(one.relative_to(stored.artifacts)) for one in sorted(stored.artifacts.rglob("*")) if one.is_file()]
    own = ("config.json", "inputs.json", INGREDIENTS, "outputs.json", "sha256.json", "dropped.json")
    return (*names, *(one for one in files if one not in own and not one.startswith("rows/") and one not in done.names))


def first_difference(checked: Sequence[Checked]) -> Checked | None:
    return next((one for one in checked if one.compared.differences), None)
