"""Evaluate the win rate on held-out scenarios, what was forgotten, and what the critic knows (words or values).

The audit tests whether refine can trust the critic. It compares verdicts and futures with Monte-Carlo returns on the
policy's own actions. Some environments also know the truth: the right action, exact Q*, or the true cause. A self_ac
policy has a value function for free. Its values on the episodes and their uses are measured in `values.py`. An
environment can add numbers of its own (`describe`), such as what doing nothing would win.
Source: ours.

    turnwise rerun evaluate --of RUN --set evaluate.episodes=500
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from stages import envs
from stages.frame.contract import POLICY_STAGES, Config, Context, DataPath, Outputs, Stage, TaskOptions
from stages.frame.types import Episode, Row, UsageError
from stages.judge.audit import audit
from stages.judge.q_audit import q_audit
from stages.judge.values import Critic, Values, best_of, judge_episodes, open_critic, report, values_of
from stages.learn.statistics import pass_hat, share_interval, wilson
from stages.llm.roles import NO_ROOM, Roles, ask, mix, roles_of
from stages.llm.tokens import nothing_fits
from stages.play.played import played as episodes_of
from stages.play.rollout import GIVEN_UP, rollout_settings
from stages.play.tally import check_environment, summary
from stages.play.transitions import episode_rows
from stages.train.rows import read_jsonl


class EvaluateConfig(Config):
    """What to measure, and on how many episodes."""

    split: str = "validation"
    """Scenarios: validation chooses the best adapter, test is reported. [ours]"""
    episodes: int = Field(96, ge=1, description="Episodes, of the test split scenarios. [ours]")
    trials: int = Field(
        1,
        ge=1,
        description="Episodes of each scenario of the test split; pass^k is told for k up to this. [tau-bench; default ours]",
    )
    test_options: TaskOptions = Field(
        default_factory=dict,
        description="Options of the task that differ on the test split: harder problems, or another domain. [ours]",
    )
    temperature: float = Field(1.0, ge=0, description="Sampling temperature of the policy; 0 = greedy. [ours]")
    slots: int = Field(256, ge=1, description="Episodes that run side by side. [ours]")
    attempts: int = Field(3, ge=1, description="Tries of an episode whose environment or simulator failed. [ours]")
    audit_turns: int = Field(96, ge=0, description="Turns on which the critic is audited; 0 = none. [ours]")
    audit_futures: int = Field(1, ge=1, description="Futures a turn that the audit's evaluator reads. [ours]")
    win_words: tuple[str, ...] = Field(
        ("pass", "won"),
        min_length=1,
        description="Words that mark a win in a predicted future, for the audit. The last word from either list counts. [ours]",
    )
    loss_words: tuple[str, ...] = Field(
        ("fail", "lost"),
        min_length=1,
        description="Words that mark a loss in a predicted future. Both lists belong to the task's prompts. [ours]",
    )
    probe_path: DataPath = Field(
        "", description='JSONL file of role rows whose replies are known, for the forgetting probe; "" = none. [ours]'
    )
    probe_rows: int = Field(20, ge=1, description="Probe rows of each role. [ours]")
    value: bool = Field(
        True, description="Read the values of a self_ac policy on these episodes, by one pass a state. [ours]"
    )
    best_of: int = Field(
        1,
        ge=1,
        description="Episodes a scenario, of which V(s_{N-1}) chooses one; metrics named evaluate/ are of the first. [ours]",
    )
    abort_below: float | None = Field(
        None,
        description="Abort an episode, from its second reply on, if V of its state is below this. It counts as not won. [ours]",
    )


def run(context: Context) -> Outputs:
    """Rows of `episodes`, `turns` and `judgements`; plots and tables of the audit as artifacts."""
    config: EvaluateConfig = context.config
    context = on_test(context) if config.split == "test" and config.test_options else context
    task, shared = context.run.task, context.run.roles
    if config.best_of > 1 and config.temperature == 0:
        raise UsageError(
            f"evaluate.best_of: {config.best_of} greedy episodes of a scenario are all the same; set evaluate.temperature above 0"
        )
    trials = config.trials if config.split == "test" else 1
    if config.best_of > 1 and trials > 1:
        raise UsageError(
            f"evaluate.best_of is {config.best_of} and evaluate.trials is {trials}, only one of them can be above 1; set the other to 1"
        )
    roles, policy = roles_of(shared), context.policy_adapter()
    # The scenarios depend on the run's seed alone: every iteration, and every rerun, is judged on the same ones.
    scenarios = envs.scenarios(task.env, task.options, config.split, config.episodes, mix("evaluate", context.run.seed))
    times = config.best_of * trials
    bar = context.progress(f"evaluate on {config.split}", len(scenarios) * times)
    # Opened when it is first asked: before the episodes only where V may end one, since on a GPU it takes memory that
    # the engine wants.
    critic = cache(lambda: open_critic(context, roles) if config.value else None)
    settings = rollout_settings(
        context, policy, seed=context.seed, temperature=config.temperature, slots=config.slots, attempts=config.attempts
    )
    # The first round has the numbers, and with them the seeds, of an evaluation without others: its episodes are the
    # same ones.
    played = episodes_of(
        context, roles, scenarios * times, settings, hopeless=hopeless(config, critic), done=bar.advance
    )
    rounds = [played[i : i + len(scenarios)] for i in range(0, len(played), max(len(scenarios), 1))]
    episodes = played if trials > 1 else rounds[0] if rounds else []
    check_environment(episodes)
    scored = [e for e in episodes if e.outcome.trainable]
    metrics = outcome(context, episodes, trials)
    rows: dict[str, Sequence[Row]] = dict(episode_rows(played, context.iteration))
    files: dict[str, Path] = {}
    if config.audit_turns and (context.latest("critic") or context.latest("q_critic")):
        if context.latest("critic"):
            found = audit(context, roles, scored, config.audit_turns, config.audit_futures)
        else:
            found = q_audit(context, roles, scored, config.audit_turns)
        metrics |= found.metrics
        rows["judgements"], files = found.rows, found.files
    known = values(context, roles, rounds, critic())
    metrics, files = metrics | known.metrics, files | known.files
    if config.probe_path:
        metrics |= probe(context, config.probe_path, config.probe_rows, policy)
    return Outputs(metrics, rows, files)


def outcome(context: Context, episodes: Sequence[Episode], trials: int) -> dict[str, float]:
    """What the episodes themselves tell. context: as `on_test` has it, on the test split."""
    task, scored = context.run.task, [e for e in episodes if e.outcome.trainable]
    metrics = summary(episodes, "evaluate") | win_interval(scored, trials)
    if context.config.abort_below is not None:
        metrics["evaluate/given_up"] = float(sum(e.error == GIVEN_UP for e in episodes))
    told = envs.describe(task.env, task.options, scored)
    return metrics | {f"evaluate/{task.env}/{name}": value for name, value in told.items()}


def win_interval(scored: Sequence[Episode], trials: int) -> dict[str, float]:
    """The 95 % interval of the win rate, clustered by scenario for several trials, and pass^k for each k up to trials.

    pass^k leaves out a scenario with fewer than k episodes that can be scored.
    """
    won: dict[str, list[bool]] = {}
    for e in scored:
        won.setdefault(e.scenario.id, []).append(e.won)
    if trials == 1:
        low, high = wilson(sum(e.won for e in scored), len(scored))
    else:
        low, high = share_interval([e.won for e in scored], [e.scenario.id for e in scored])
    interval = {"evaluate/win_low": low, "evaluate/win_high": high}
    for k in range(1, trials + 1 if trials > 1 else 1):
        if enough := [tries for tries in won.values() if len(tries) >= k]:
            interval[f"evaluate/pass_hat_{k}"] = sum(pass_hat(sum(t), len(t), k) for t in enough) / len(enough)
    return interval


def on_test(context: Context) -> Context:
    """The same context with the task's options as they are on the test split."""
    task = context.run.task
    changed = task.model_copy(update={"options": {**task.options, **context.config.test_options}})
    return replace(context, run=context.run.model_copy(update={"task": changed}))


def hopeless(
    config: EvaluateConfig, critic: Callable[[], Critic | None]
) -> Callable[[Sequence[tuple[int, ...]]], list[bool]] | None:
    """Maps states to whether V aborts the episode there; None if the option is off. Raises UsageError without a V."""
    if (threshold := config.abort_below) is None:
        return None
    if (opened := critic()) is None:
        raise UsageError(
            "evaluate.abort_below: this run has no values. They need a self_ac policy with a critic, and evaluate.value on"
        )
    return lambda states: [value < threshold for value in values_of(opened, states)]


def values(context: Context, roles: Roles, rounds: Sequence[Sequence[Episode]], critic: Critic | None) -> Values:
    """The values of a self_ac policy on all episodes, and the win rate of the best of n by value."""
    judged, found = None, Values({}, {})
    if critic is not None:
        judged = judge_episodes(critic, context.engine, roles, [e for r in rounds for e in r if e.outcome.trainable])
        found = report(judged, context.workdir)
    return Values(found.metrics | (best_of(rounds, judged) if context.config.best_of > 1 else {}), found.files)


def probe(context: Context, path: str, rows_a_role: int, adapter: str | None) -> dict[str, float]:
    """Share of role prompts that the adapted model still answers exactly, greedily. Raises UsageError if none fits."""
    by_role: dict[str, list[dict[str, Any]]] = {}
    for row in read_jsonl(path):
        by_role.setdefault(row["role"], []).append(row)
    rows = [row for group in by_role.values() for row in group[:rows_a_role]]
    limit = context.run.roles.future_room
    replies = ask(
        context.engine, [r["messages"] for r in rows], role="probe", adapter=adapter, temperature=0.0,
        max_tokens=limit, seed=context.seed,
    )  # fmt: skip
    right: dict[str, list[bool]] = {}
    for row, (_, reply) in zip(rows, replies, strict=True):
        if reply != NO_ROOM:
            right.setdefault(row["role"], []).append(reply.text == row["reply"])
    if rows and not right:
        raise nothing_fits("evaluate.probe_path", len(rows), context.engine.context)
    shares = {role: sum(found) / len(found) for role, found in right.items()}
    counts = {"evaluate/probe_out_of_context": float(sum(reply == NO_ROOM for _, reply in replies))}
    mean = {"evaluate/probe": sum(shares.values()) / len(shares)}
    return {f"evaluate/probe_{role}": share for role, share in shares.items()} | mean | counts


STAGE = Stage(
    "evaluate", 5, EvaluateConfig, inputs=(*POLICY_STAGES, "critic", "q_critic"), roles=("policy", "successor", "evaluator", "value"), run=run,
    outputs=("episodes", "turns", "judgements", "audit/", "values/"), roles_with={"critic": ("successor", "evaluator")}, shares=True,
)  # fmt: skip
