"""Chains the stages of a method over iterations, and keeps the run that stands for the whole.

    turnwise run demo

base -> (collect -> ... -> adapter -> evaluate) x iterations -> final: the adapter with the best validation win rate
(the earliest of equals), on the test split. Plain functions: how a stage is run is a `Step` handed in, so that the same
chain serves plain runs, Prefect (`orchestrate.py`) and the plan that `--dry-run` prints. The parent run in MLflow's
experiment `pipeline` has the curves: step 0 is the base model, step n the state after n iterations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from flows import presets, telling
from flows.datasets import scenario_sets
from flows.registry import METHODS, load_stage, select_inputs
from stages.frame.types import TurnwiseError
from stages.store.notes import run_link
from stages.store.runs import NOTE, flat

if TYPE_CHECKING:
    from flows.presets import RunConfig
    from flows.telling import Asked
    from stages.frame.contract import Stage
    from stages.store.execute import Bar, StageRun, Workspace
    from stages.store.models import Version
    from stages.store.tracking import Status

EXPERIMENT = "pipeline"
SUMMARY = "summary.json"  # artifact of the parent run: what `--json` prints
WIN_RATE = "evaluate/win_rate"
CURVE = "agent"
"""Before the slash in the names of the two curves that a reader wants first. MLflow groups charts by what stands before a metric's last slash, in the order
of the alphabet, and within a group likewise; the names of stages come later."""
LAST = "evaluate"
"""The stage that ends an iteration, and a run."""
TOTALS = (
    "stages_s",
    "cpu_s",
    "episodes",
    "env_steps",
    "generated_tokens",
)  # the four axes of cost, summed over the iterations; evaluation is left out


@dataclass(frozen=True)
class Call:
    """One stage to be run: all that `execute` wants, apart from where."""

    stage: Stage
    run: RunConfig
    inputs: Mapping[str, Sequence[str]]
    iteration: int  # -1 for the base model
    part: str = "iteration"  # "base" | "start" | "iteration" | "final" | "rerun"

    @property
    def title(self) -> str:
        return f"{self.stage.name} {self.part if self.part in ('base', 'start', 'final') else self.iteration}"


Step = Callable[[Call], "StageRun"]


@dataclass(frozen=True)
class Iteration:
    """What one iteration came to. win_rate and its 95 % interval are of the validation split; None where not evaluated."""

    iteration: int
    runs: Mapping[str, str]  # stage -> run id
    metrics: Mapping[str, float]
    seconds: float  # of the stages' own work, evaluation left out; a reused stage counts what it took when it ran
    reused: tuple[str, ...] = ()
    cpu_s: float = 0.0  # as seconds, but processor time

    @property
    def win_rate(self) -> float | None:
        return self.metrics.get(WIN_RATE)


@dataclass(frozen=True)
class Summary:
    """A whole run, as `turnwise run --json` prints it."""

    run_id: str
    preset: str
    status: str
    seconds: float
    base: Mapping[str, Any] = field(default_factory=dict)  # the base model on the test split
    final: Mapping[str, Any] = field(default_factory=dict)  # the best adapter on the test split
    iterations: Sequence[Mapping[str, Any]] = ()


Watcher = Callable[[Iteration], None]
"""Is told of every iteration when it is done, of the base model first (iteration -1)."""


def plain_step(
    workspace: Workspace,
    bar: Bar,
    parent: str | None = None,
    *,
    force: bool = False,
    tags: Mapping[str, str] | None = None,
    of: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> Step:
    """Run stages right here, as runs below the pipeline run `parent` where there is one, with `tags` on each. of: whose
    they are, for their names. say: is told who is waited for.
    """
    from stages.store.execute import execute

    def step(call: Call) -> StageRun:
        return execute(
            call.stage,
            run=call.run,
            inputs=call.inputs,
            iteration=call.iteration,
            workspace=workspace,
            parent=parent,
            name=f"{call.title} of {of}" if of else call.title,
            force=force,
            tags={"part": call.part, **(tags or {})},
            progress=bar,
            say=lambda text: say(f"{call.title}: {text}"),
        )

    return step


def evaluate_base(run: RunConfig, step: Step) -> tuple[StageRun, StageRun]:
    """The base model, before anything is learned: on the test split, and on the split of the curve as its start."""
    stage = load_stage("evaluate")
    base = step(Call(stage, presets.change(run, "evaluate", split="test"), {}, -1, "base"))
    return base, step(Call(stage, run, {}, -1, "start"))


def iterate(run: RunConfig, step: Step, through: str = LAST) -> Iterator[Iteration]:
    """The iterations of the run's method, one after the other; the last one ends with the stage `through`."""
    history: dict[str, list[str]] = {}
    for i in range(run.iterations):
        done: dict[str, StageRun] = {}
        for name in _stages_of(i, run, through):
            stage = load_stage(name)
            done[name] = step(Call(stage, run, _inputs(stage, history), i))
            history.setdefault(name, []).append(done[name].run_id)
        yield Iteration(
            iteration=i,
            runs={name: one.run_id for name, one in done.items()},
            metrics={key: value for one in done.values() for key, value in one.metrics.items()},
            seconds=sum(one.seconds for name, one in done.items() if name != "evaluate"),
            reused=tuple(name for name, one in done.items() if one.reused),
            cpu_s=sum(one.cpu_s for name, one in done.items() if name != "evaluate"),
        )


def evaluate_final(run: RunConfig, step: Step, best: Iteration) -> StageRun:
    """The adapter of one iteration on the test split, with the critic of that iteration for the audit."""
    stage = load_stage("evaluate")
    history = {name: [run_id] for name, run_id in best.runs.items()}
    changed = presets.change(run, "evaluate", split="test")
    return step(Call(stage, changed, _inputs(stage, history), best.iteration, "final"))


def _stages_of(iteration: int, run: RunConfig, through: str) -> tuple[str, ...]:
    names = (*METHODS[run.method], LAST)
    if iteration == run.iterations - 1:
        return names[: names.index(through) + 1]
    return names if (iteration + 1) % run.evaluate_every == 0 else names[:-1]


def best_of(rows: Sequence[Iteration]) -> Iteration | None:
    """The evaluated iteration with the highest validation win rate; the earliest of equals."""
    evaluated = [row for row in rows if row.win_rate is not None]
    return max(evaluated, key=lambda row: (row.win_rate, -row.iteration)) if evaluated else None


def _inputs(stage: Stage, history: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: runs for name, runs in select_inputs(stage.name, history).items() if name in stage.inputs}


def run_pipeline(
    run: RunConfig,
    workspace: Workspace,
    make_step: Callable[[str], Step],
    watch: Watcher = lambda row: None,
    *,
    asked: Asked | None = None,
    through: str = LAST,
) -> Summary:
    """The whole run. make_step: from the id of the parent run to how stages are run. asked: how it was asked for.
    through: the last stage of the last iteration.

    Finished stages are reused, so after a kill the same call goes on from the last one that finished. Raises what a
    stage raises; the parent run is then marked FAILED, or KILLED on Ctrl-C, with what had been done by then.
    """
    book = _open_book(run, workspace, asked or telling.Asked())
    run_id = book.summary.run_id
    with book.closing():
        workspace.tracking.write_json(run_id, "config.json", run.model_dump(mode="json"))
        workspace.tracking.params(run_id, {**book.asked.params, **dict(flat(run.model_dump(mode="json")))})
        workspace.tracking.reads(run_id, scenario_sets(run))
        step = make_step(run_id)
        base, start = evaluate_base(run, step)
        rows = [
            Iteration(
                -1, {"evaluate": start.run_id}, start.metrics, start.seconds, ("evaluate",) if start.reused else ()
            )
        ]
        book.add(rows[0])
        book.put(base={**_outcome(base), "run_id": base.run_id})
        watch(rows[0])
        for row in iterate(run, step, through):
            rows.append(row)
            book.add(row)
            watch(row)
        if through == LAST and (best := best_of(rows[1:])):
            final = evaluate_final(run, step, best)
            adapter = best.runs[METHODS[run.method][-1]]
            book.put(final={**_outcome(final), "run_id": final.run_id, "iteration": best.iteration, "adapter": adapter})
            book.register()
    return book.summary


def _outcome(evaluated: StageRun) -> dict[str, Any]:
    """The metrics of one evaluation, named as `--json` prints them: win_rate, win_low, win_high and the rest."""
    return {key.removeprefix("evaluate/"): value for key, value in evaluated.metrics.items()}


def _open_book(run: RunConfig, workspace: Workspace, asked: Asked) -> _Book:
    """Start the parent run, which tells from now on what it is."""
    from stages.store.execute import code_version

    name, commit = telling.run_name(run, asked), code_version()
    source = {
        "mlflow.source.name": asked.command,
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": commit["git_commit"],
    }
    note = telling.note(run, asked, commit, Summary("", run.preset, "RUNNING", 0.0), workspace.tracking.link)
    tags = {
        "preset": run.preset,
        "method": run.method,
        "seed": str(run.seed),
        **commit,
        **(source if asked.command else {}),
        **asked.tags,
        NOTE: note,
    }
    run_id = workspace.tracking.start(EXPERIMENT, name, tags)
    return _Book(run, workspace, asked, commit, Summary(run_id, run.preset, "RUNNING", 0.0))


class _Book:
    """The parent run's curves and its summary, kept up to date so that a killed run can be shown and rerun from."""

    def __init__(
        self, run: RunConfig, workspace: Workspace, asked: telling.Asked, commit: Mapping[str, str], summary: Summary
    ) -> None:
        self.run, self.asked, self.commit, self.summary = run, asked, commit, summary
        self._tracking = workspace.tracking
        self._model: Version | None = None
        self._started = time.perf_counter()
        self._totals = dict.fromkeys(TOTALS, 0.0)

    @property
    def note(self) -> str:
        return telling.note(self.run, self.asked, self.commit, self.summary, self._tracking.link, self._model)

    def register(self) -> None:
        """Make the final adapter a version of the preset's registered model."""
        final, run_id = self.summary.final, self.summary.run_id
        text = f"The adapter of {run_link(METHODS[self.run.method][-1], final['adapter'], self._tracking.link)}, chosen by {run_link(EXPERIMENT, run_id, self._tracking.link)}."
        figures = telling.figures(self.run, self.asked, self.commit, self.summary)
        self._model = self._tracking.register(
            self.run.preset or EXPERIMENT, run_id, (final["adapter"], "adapter"), figures=figures, note=text
        )

    def put(self, **changes: Any) -> None:
        self.summary = replace(self.summary, seconds=round(time.perf_counter() - self._started, 3), **changes)
        self._tracking.write_json(self.summary.run_id, SUMMARY, asdict(self.summary))
        for part, tested in ((part, changes[part]) for part in ("base", "final") if part in changes):
            numbers = {f"{part}/{key}": value for key, value in tested.items() if isinstance(value, float)}
            self._tracking.log(
                self.summary.run_id,
                {f"{CURVE}/win_rate_on_test": tested["win_rate"], **numbers},
                tested.get("iteration", -1) + 1,
            )

    def add(self, row: Iteration) -> None:
        """An iteration's metrics at step iteration + 1, with running totals, so that win rates can be drawn against
        cost.
        """
        plain = {
            "iteration": row.iteration,
            **_outcome_of(row),
            "seconds": round(row.seconds, 3),
            "reused": list(row.reused),
            "runs": dict(row.runs),
        }
        self._totals["stages_s"] += row.seconds if row.iteration >= 0 else 0.0  # the base model's is an evaluation
        self._totals["cpu_s"] += row.cpu_s
        for key, value in row.metrics.items():
            stage, _, what = key.partition("/")
            if what in TOTALS and stage != "evaluate":
                self._totals[what] += value
        totals = {f"{EXPERIMENT}/{key}": value for key, value in self._totals.items()}
        first = {} if row.win_rate is None else {f"{CURVE}/win_rate": row.win_rate}
        self._tracking.log(self.summary.run_id, {**first, **row.metrics, **totals}, row.iteration + 1)
        self.put(iterations=[*self.summary.iterations, {**plain, "metrics": {**row.metrics, **totals}}])

    @contextmanager
    def closing(self) -> Iterator[None]:
        run_id = self.summary.run_id
        try:
            yield
            self.put(status="FINISHED")
            self._tracking.note(run_id, self.note)
            self._tracking.finish(run_id)
        except BaseException as error:
            status: Status = "FAILED" if isinstance(error, Exception) else "KILLED"
            # The disk that stopped a stage may stop this too: then the run stays RUNNING until its process is found
            # gone.
            with suppress(TurnwiseError, OSError):
                self.put(status=status)
                self._tracking.note(run_id, self.note)
                self._tracking.finish(run_id, status, f"{type(error).__name__}: {error}")
            raise


def _outcome_of(row: Iteration) -> dict[str, Any]:
    return {key: row.metrics.get(f"evaluate/{key}") for key in ("win_rate", "win_low", "win_high")}
