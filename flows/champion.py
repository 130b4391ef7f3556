"""The champion of a preset: its scheduled runs continue from this adapter. Only a better one replaces it. Ours.

    turnwise run my/nightly.toml --set each_run=champion

It is the version with the alias `champion` of the preset's registered model. A run continues after the champion's
iteration with its own seed. Its best adapter is the `candidate`. Both play the same scenarios with the same seeds;
these chose neither of them. The candidate is promoted if the interval of the difference lies wholly above 0. Without a
champion, the base model takes its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flows import presets, rerun
from flows.pipeline import LAST, Call, Judge, Step
from flows.presets import RunConfig
from flows.registry import load_stage
from flows.telling import Iteration
from stages.frame.types import Outcome, UsageError
from stages.llm.roles import mix
from stages.store.execute import stored_run
from stages.store.models import Version
from stages.store.runs import differences
from stages.store.workspace import StageRun, Workspace

SAME: Any = {"method": True, "sweeps": True, "task": {"env"}, "model": {"path"}}
"""Keys that must equal those of the earlier run."""
RESAMPLES = 10_000


def goes_on(inner: Step, run: RunConfig, workspace: Workspace) -> Step:
    """`inner`, except for iterations before the run's own: these return the earlier run's stage runs. Raises UsageError
    where the two runs do not fit.
    """
    if not run.goes_on_from:
        return inner
    kept = _kept(run, workspace)

    def step(call: Call) -> StageRun:
        old = kept.get((call.iteration, call.stage.name)) if call.part == "iteration" else None
        return stored_run(call.stage, old, call.iteration, workspace.tracking) if old else inner(call)

    return step


def _kept(run: RunConfig, workspace: Workspace) -> dict[tuple[int, str], str]:
    """(iteration, stage) -> the stage run, for iterations before the run's own."""
    old = workspace.tracking.find(run.goes_on_from.partition(":")[0])
    stored = presets.resolve(workspace.tracking.read_json(old, "config.json"))
    theirs, own = (one.model_dump(mode="json", include=SAME) for one in (stored, run))
    if changed := differences(theirs, own):
        key, (before, now) = next(iter(changed.items()))
        raise UsageError(
            f"goes_on_from: run {old[:8]} has {key} = {before}, but this one has {now}. Set the same value, or rename the preset: a new name begins without a champion."
        )
    if run.first_iteration % run.sweeps:
        raise UsageError(
            f"goes_on_from: {run.first_iteration} iterations are no multiple of {run.sweeps} sweeps. Set iterations to a multiple of sweeps."
        )
    rows = [
        row for row in rerun.stored_summary(workspace, old)["iterations"] if 0 <= row["iteration"] < run.first_iteration
    ]
    if len(rows) < run.first_iteration or run.iterations < run.first_iteration:
        raise UsageError(
            f"goes_on_from: wanted the first {run.first_iteration} of {run.iterations} iterations from run {old[:8]}, but it finished {len(rows)}. Name an earlier iteration, or set more iterations."
        )
    return {(row["iteration"], stage): str(run_id) for row in rows for stage, run_id in row["runs"].items()}


def judge(run: RunConfig, workspace: Workspace) -> Judge:
    """How a run ends whose each_run is "champion"."""

    def judged(step: Step, candidate: Version, best: Iteration) -> dict[str, Any]:
        workspace.tracking.models.candidate(candidate)
        if before := workspace.tracking.models.decide(candidate, None, None):
            return before
        while True:  # again only where another run was promoted meanwhile
            champion = workspace.tracking.models.champion(candidate.name)
            against = champion.number if champion else None
            played = {
                part: step(_match(run, version, part, best.iteration, workspace))
                for part, version in (("champion", champion), ("candidate", candidate))
            }
            rates = {part: _won_by_scenario(done.run_id, workspace) for part, done in played.items()}
            verdict = {"against": against, **compared(rates["champion"], rates["candidate"])}
            if decided := workspace.tracking.models.decide(candidate, against, verdict):
                return decided

    return judged


def _match(run: RunConfig, version: Version | None, part: str, iteration: int, workspace: Workspace) -> Call:
    """Seed and iteration fix the scenarios, so both sides have the same ones. None of these chose an adapter."""
    inputs = {workspace.tracking.experiment(version.tags["run"]): [version.tags["run"]]} if version else {}
    changed = presets.change(run, LAST, episodes=run.match_episodes).model_copy(
        update={"seed": mix("champion", run.seed)}
    )
    return Call(load_stage(LAST), changed, inputs, iteration, part)


def _won_by_scenario(run_id: str, workspace: Workspace) -> dict[str, float]:
    """Share of a scenario's episodes that were won. Only episodes that the policy answers for count."""
    won: dict[str, list[bool]] = {}
    for row in workspace.replay.read("episodes", [run_id], ["scenario_id", "outcome", "total_reward"]):
        if Outcome(row["outcome"]).trainable:
            won.setdefault(row["scenario_id"], []).append(row["total_reward"] >= 1)
    return {scenario: sum(each) / len(each) for scenario, each in won.items()}


def compared(champion: Mapping[str, float], candidate: Mapping[str, float]) -> dict[str, Any]:
    """Win rates on the scenarios that both played, their difference with its 95 % interval, and whether it promotes.

    The interval is a percentile bootstrap over scenarios (scipy). Fewer than 2 scenarios promote nothing.
    """
    from scipy.stats import bootstrap

    both = sorted(champion.keys() & candidate.keys())
    pairs = np.array([[champion[one], candidate[one]] for one in both]).reshape(-1, 2)
    if len(both) < 2:
        return {"promoted": False, "scenarios": len(both)}
    differences = pairs[:, 1] - pairs[:, 0]
    found = bootstrap(
        [differences], np.mean, method="percentile", n_resamples=RESAMPLES, batch=500, rng=np.random.default_rng(0)
    ).confidence_interval
    low, high = float(found.low), float(found.high)
    old, new = (float(rate) for rate in pairs.mean(axis=0))
    return {
        "promoted": low > 0,
        "scenarios": len(both),
        "champion": old,
        "candidate": new,
        "difference": new - old,
        "difference_low": low,
        "difference_high": high,
    }
