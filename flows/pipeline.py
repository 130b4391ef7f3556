"""Chains the stages of a method over iterations, and keeps the run that stands for the whole.

    turnwise run demo

base -> (collect -> ... -> adapter -> evaluate) x iterations -> final: the adapter with the best validation win rate
(the earliest of equals), on the test split. The functions take a `Step`, which runs a stage. So the same chain serves
plain runs, Prefect (`orchestration/flow.py`) and the plan of `--dry-run`. The parent run in MLflow's experiment
`pipeline` has the curves: step 0 is the base model, step n the state after n iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from flows import presets
from flows.book import open_book, outcome
from flows.datasets import scenario_sets
from flows.presets import RunConfig
from flows.registry import METHODS, SWEPT, load_stage, select_inputs
from flows.telling import Asked, Iteration, Summary
from stages.frame.contract import Stage
from stages.store.execute import execute, stage_fingerprint
from stages.store.models import Version
from stages.store.runs import flat
from stages.store.workspace import Bar, StageRun, Workspace

LAST = "evaluate"
"""The stage that ends an iteration, and a run."""


@dataclass(frozen=True)
class Call:
    """One stage to be run: all that `execute` wants, apart from where."""

    stage: Stage
    run: RunConfig
    inputs: Mapping[str, Sequence[str]]
    iteration: int  # -1 for the base model
    part: str = "iteration"  # "base" | "start" | "iteration" | "final" | "candidate" | "champion" | "rerun"

    @property
    def title(self) -> str:
        return f"{self.stage.name} {self.iteration if self.part in ('iteration', 'rerun') else self.part}"

    def fingerprint(self, workspace: Workspace) -> str:
        """The fingerprint; a finished run that has it is reused. Raises UsageError as `stage_fingerprint` does."""
        return stage_fingerprint(
            self.stage, run=self.run, inputs=self.inputs, iteration=self.iteration, workspace=workspace
        )


Step = Callable[[Call], "StageRun"]

Ahead = Callable[[Call], None]
"""Begins, beside all else, a stage run that will be asked for later."""

Watcher = Callable[[Iteration], None]
"""Is called after every iteration, first for the base model (iteration -1)."""

Judge = Callable[[Step, "Version", Iteration], Mapping[str, Any]]
"""Decides about the final adapter, given as its registered version and its iteration. Returns a summary's `match`."""


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
    """Run stages in this process, below the pipeline run `parent` if given, with `tags` on each. of: names their
    pipeline in their names. say: is called with what the stage waits for.
    """

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
    """Evaluate the base model on the test split, and on the split of the curve as its start."""
    stage = load_stage("evaluate")
    base = step(Call(stage, presets.change(run, "evaluate", split="test"), {}, -1, "base"))
    return base, step(Call(stage, run, {}, -1, "start"))


def iterate(run: RunConfig, step: Step, through: str = LAST, ahead: Ahead = lambda call: None) -> Iterator[Iteration]:
    """The iterations of the run's method, one after the other; the last one ends with the stage `through`. ahead: begins
    the next iteration's collect, where an older policy plays in it.
    """
    history: dict[str, list[str]] = {}
    for i in range(run.iterations):
        done: dict[str, StageRun] = {}
        for name in stages_of(i, run, through):
            stage = load_stage(name)
            done[name] = step(Call(stage, run, _inputs(stage, history, run), i))
            history[name] = [*history.pop(name, []), done[name].run_id]  # the newest last
            if name == "collect" and run.lag and i + 1 < run.iterations and "collect" in stages_of(i + 1, run):
                soon = {stage: [*runs, "this iteration's"] for stage, runs in history.items() if stage != name}
                ahead(Call(stage, run, _inputs(stage, soon, run), i + 1))
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
    return step(Call(stage, changed, _inputs(stage, history, run), best.iteration, "final"))


def stages_of(iteration: int, run: RunConfig, through: str = LAST) -> tuple[str, ...]:
    """The stages of an iteration, in order. Of `run.sweeps` iterations the first one plays; the last one improves the
    policy and is evaluated. The critic learns in all of them.
    """
    last, place = iteration == run.iterations - 1, iteration % run.sweeps
    names = [
        name
        for name in METHODS[run.method]
        if name in SWEPT or (place == 0 if name == "collect" else place == run.sweeps - 1 or last)
    ]
    if last:
        names.append(LAST)
        return tuple(names[: names.index(through) + 1])
    rounds, unfinished = divmod(iteration + 1, run.sweeps)
    return (*names, LAST) if not unfinished and rounds % run.evaluate_every == 0 else tuple(names)


def best_of(rows: Sequence[Iteration]) -> Iteration | None:
    """The evaluated iteration with the highest validation win rate; the earliest of equals."""
    evaluated = [row for row in rows if row.win_rate is not None]
    return max(evaluated, key=lambda row: (row.win_rate, -row.iteration)) if evaluated else None


def _inputs(stage: Stage, history: dict[str, list[str]], run: RunConfig) -> dict[str, list[str]]:
    found = select_inputs(stage.name, history, run.lag)
    return {name: runs for name, runs in found.items() if name in stage.inputs}


def run_pipeline(
    run: RunConfig,
    workspace: Workspace,
    make_step: Callable[[str], Step],
    watch: Watcher = lambda row: None,
    *,
    asked: Asked | None = None,
    through: str = LAST,
    judge: Judge | None = None,
    make_ahead: Callable[[str], AbstractContextManager[Ahead]] = lambda run_id: nullcontext(lambda call: None),
) -> Summary:
    """The whole run. make_step: from the id of the parent run to its `Step`. asked: how the run was asked for.
    through: the last stage of the last iteration. judge: decides about the final adapter. make_ahead: as make_step.

    Finished stages are reused: after a kill the same call goes on from the last one that finished. Raises what a stage
    raises. The parent run is then FAILED, or KILLED on Ctrl-C, and keeps what was done by then.
    """
    book = open_book(run, workspace, asked or Asked())
    run_id = book.summary.run_id
    with book.closing():
        workspace.tracking.write_json(run_id, "config.json", run.model_dump(mode="json"))
        workspace.tracking.params(run_id, {**book.asked.params, **dict(flat(run.model_dump(mode="json")))})
        workspace.tracking.reads(run_id, scenario_sets(run))
        step = make_step(run_id)
        base, start = evaluate_base(run, step)
        reused = ("evaluate",) if start.reused else ()
        rows = [Iteration(-1, {"evaluate": start.run_id}, start.metrics, start.seconds, reused)]
        book.add(rows[0])
        book.put(base={**outcome(base), "run_id": base.run_id})
        watch(rows[0])
        with make_ahead(run_id) as ahead:
            for row in iterate(run, step, through, ahead):
                rows.append(row)
                book.add(row)
                watch(row)
        if through == LAST and (best := best_of(rows[1 + run.first_iteration :])):
            final = evaluate_final(run, step, best)
            adapter = best.runs[METHODS[run.method][-1]]
            book.put(final={**outcome(final), "run_id": final.run_id, "iteration": best.iteration, "adapter": adapter})
            version = book.register()
            if judge:
                book.decided(judge(step, version, best))
    return book.summary
