"""The critic audit: does it know what it says? Metrics, rows and plots for evaluate."""

from __future__ import annotations

import importlib
import json
import math
import random
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stages import envs
from stages.frame.contract import Context
from stages.frame.own import telling
from stages.frame.types import Episode, Malformed, Row, Turn
from stages.judge.asking import ask_role
from stages.judge.critique import Judgement, judge
from stages.learn.statistics import auroc, bootstrap_interval, calibration, cluster_draws, share_interval, spearman
from stages.llm.last_message import check_last_message
from stages.llm.roles import NO_ROOM, Roles, mix
from stages.llm.tokens import nothing_fits
from stages.play.environment import read_action

RESAMPLES = 400
"""Draws of a bootstrap interval."""


@dataclass(frozen=True)
class Audit:
    """metrics that are defined (a correlation with a constant is none), rows of `judgements`, files by artifact path."""

    metrics: dict[str, float]
    rows: list[Row]
    files: dict[str, Path]


@dataclass(frozen=True)
class Case:
    """One audited (state, action): the critic's word, and what is true of it as far as anyone can tell."""

    episode: Episode
    turn: Turn
    action: str
    judgement: Judgement
    predicted: float  # share of the futures that end well
    own: bool  # the policy's own action, so the episode's return is its Monte-Carlo return


def audit(context: Context, roles: Roles, episodes: Sequence[Episode], n_turns: int, k: int) -> Audit:
    """Judge own actions and, at the same states, the base policy's. Raises UsageError where no prompt fits."""
    pairs, counts = audited(context, roles, episodes, n_turns)
    words = judge(
        context, roles, [(e.messages[: t.state_len], a) for e, t, a, _ in pairs], k=k, seed=mix(context.seed, "audit")
    )
    cases = [
        Case(e, t, a, w, predicted(w, context.config.win_words, context.config.loss_words), own)
        for (e, t, a, own), w in zip(pairs, words, strict=True)
    ]
    if cases and all(c.judgement.out_of_context for c in cases):
        raise nothing_fits("evaluate.audit_turns", len(cases), context.engine.context)
    metrics, table = measures(context, cases)
    counts["audit/out_of_context"] += float(sum(c.judgement.out_of_context for c in cases))
    files = report(context.workdir, cases) | intervals(context.workdir, table)
    return Audit(metrics | counts, [row(c) for c in cases], files)


def measures(context: Context, cases: Sequence[Case]) -> tuple[dict[str, float], list[Row]]:
    """The metrics that are defined, and the table of what has an interval."""
    table = [*against_returns(cases), *against_truth(context, cases)]
    metrics = {one["name"]: one["value"] for one in table}
    metrics["audit/malformed_frac"] = sum(c.judgement.verdict == "malformed" for c in cases) / max(len(cases), 1)
    return {name: value for name, value in metrics.items() if not math.isnan(value)}, table


def audited(
    context: Context, roles: Roles, episodes: Sequence[Episode], n_turns: int
) -> tuple[list[tuple[Episode, Turn, str, bool]], dict[str, float]]:
    """The actions that are audited, with whether they are the policy's own; and how many of the base's are not."""
    check_last_message(context.engine, roles)
    rng = random.Random(context.seed)
    turns = [(e, t) for e in episodes for t in e.turns if not t.malformed]
    turns = rng.sample(turns, min(n_turns, len(turns)))
    others, too_long = base_actions(context, roles, turns)
    pairs = [(e, t, t.action, True) for e, t in turns] + [
        (e, t, a, False) for (e, t), a in zip(turns, others, strict=True) if a
    ]
    return pairs, {"audit/unreadable": float(others.count("") - too_long), "audit/out_of_context": float(too_long)}


def base_actions(context: Context, roles: Roles, turns: Sequence[tuple[Episode, Turn]]) -> tuple[list[str], int]:
    """What the untrained model would do at these states, "" if unreadable; and how many of them do not fit."""
    prompts = [roles.policy(e.messages[: t.state_len]) for e, t in turns]
    replies = ask_role(context, "policy", prompts, adapter=None, seed=mix(context.seed, "base"), temperature=1.0)
    found = []
    for (e, t), (_, reply) in zip(turns, replies, strict=True):
        try:
            found.append(read_action(context, e.messages[: t.state_len], reply.text)[1])
        except Malformed:
            found.append("")
    return found, sum(reply == NO_ROOM for _, reply in replies)


def predicted(judgement: Judgement, win_words: Sequence[str], loss_words: Sequence[str]) -> float:
    """Share of the predicted futures that end well; one that tells no end counts one half."""
    return sum(ends_well(future, win_words, loss_words) for future in judgement.futures) / len(judgement.futures)


def ends_well(future: str, win_words: Sequence[str], loss_words: Sequence[str]) -> float:
    """1 where the last of these words in the future tells a win, 0 for a loss, 1/2 without one. "not" or "never" before
    a word turns it. Words before the last one say what may happen on the way: "if the lookup fails, ... is won".
    """
    listed = "|".join(re.escape(word.lower()) for word in (*win_words, *loss_words))
    found = re.findall(rf"\b((?:not|never)\s+(?:be\s+|been\s+)?)?({listed})\b", future.lower())
    if not found:
        return 0.5
    turned, word = found[-1]
    return float((word in {one.lower() for one in win_words}) != bool(turned))


def against_returns(cases: Sequence[Case]) -> list[Row]:
    """Own actions only: the return that followed against verdict (1 = Yes) and predicted success, a row a measure."""
    own = [c for c in cases if c.own and c.judgement.verdict != "malformed"]
    if not own:
        return []
    returns = [c.episode.total_reward for c in own]
    won = [int(r >= 1) for r in returns]
    yes = [float(c.judgement.verdict == "yes") for c in own]
    futures = [c.predicted for c in own]
    return [
        order("audit/verdict_return_spearman", spearman, own, yes, returns),
        order("audit/future_return_spearman", spearman, own, futures, returns),
        order("audit/future_return_auroc", auroc, own, futures, won),
        share("audit/yes_rate", own, yes),
        share("audit/yes_rate_won", own, yes, [w == 1 for w in won]),
        share("audit/yes_rate_lost", own, yes, [w == 0 for w in won]),
    ]


def against_truth(context: Context, cases: Sequence[Case]) -> list[Row]:
    """Where the environment has `truth`: verdicts against right or wrong, futures against exact Q*, the cause named."""
    read, facts = truths(context, cases)
    if not read:
        return []
    yes, q = [float(c.judgement.verdict == "yes") for c in read], [f.q for f in facts]
    no, right, wrong = [1 - y for y in yes], [f.optimal for f in facts], [not f.optimal for f in facts]
    return [
        share("audit/verdict_accuracy", read, [float((y == 1) == r) for y, r in zip(yes, right, strict=True)]),
        order("audit/verdict_auroc", auroc, read, yes, [int(r) for r in right]),
        order("audit/verdict_q_spearman", spearman, read, yes, q),
        order("audit/future_q_spearman", spearman, read, [c.predicted for c in read], q),
        share("audit/no_if_right", read, no, right),
        share("audit/no_if_wrong", read, no, wrong),
        share(
            "audit/cause_named",
            read,
            [float(any(f.named_in(t) for t in c.judgement.futures)) for c, f in zip(read, facts, strict=True)],
            wrong,
        ),
        *by_turn(read, no, right),
    ]


def truths(context: Context, cases: Sequence[Case]) -> tuple[list[Case], list[Any]]:
    """The cases of which the environment can tell the truth, and it."""
    task = context.run.task
    truth: Any = getattr(importlib.import_module(envs.module_name(task.env)), "truth", None)
    read, facts = [], []
    for c in cases if truth else ():
        # An action that the environment would not understand is neither right nor wrong.
        with suppress(Malformed), telling("task.env", task.env, "truth"):
            if c.judgement.verdict != "malformed":
                facts.append(truth(task.options, c.episode.scenario, [*past_actions(c), c.action]))
                read.append(c)
    return read, facts


def by_turn(cases: Sequence[Case], no: Sequence[float], right: Sequence[bool]) -> list[Row]:
    """Where policy and critic go wrong: `audit/turn0/own_right` is the policy's share of right first actions."""
    found = []
    for index in sorted({c.turn.index for c in cases}):
        here = [c.turn.index == index for c in cases]
        own = [h and c.own for h, c in zip(here, cases, strict=True)]
        at_right = [h and r for h, r in zip(here, right, strict=True)]
        at_wrong = [h and not r for h, r in zip(here, right, strict=True)]
        found.append(share(f"audit/turn{index}/own_right", cases, [float(r) for r in right], own))
        found.append(share(f"audit/turn{index}/no_if_right", cases, no, at_right))
        found.append(share(f"audit/turn{index}/no_if_wrong", cases, no, at_wrong))
    return found


def share(name: str, cases: Sequence[Case], values: Sequence[float], where: Sequence[bool] | None = None) -> Row:
    """A measure: the mean of values (0 or 1) over the cases `where`, NaN of none; its interval is by episodes."""
    chosen = [i for i in range(len(cases)) if where is None or where[i]]
    clusters, ys = [cases[i].episode.id for i in chosen], [values[i] for i in chosen]
    return measure(name, sum(ys) / len(ys) if ys else math.nan, share_interval(ys, clusters), clusters)


def order(
    name: str, statistic: Callable[[Any, Any], float], cases: Sequence[Case], x: Sequence[float], y: Sequence[float]
) -> Row:
    """A measure that is no share: of pairs, with the interval of a bootstrap over episodes."""
    clusters, a, b = [c.episode.id for c in cases], np.array(x), np.array(y)
    interval = bootstrap_interval(lambda rows: statistic(a[rows], b[rows]), cluster_draws(clusters, RESAMPLES, 0))
    return measure(name, statistic(a, b), interval, clusters)


def measure(name: str, value: float, interval: tuple[float, float], clusters: Sequence[str]) -> Row:
    """clusters: the episode of each action."""
    found = {"name": name, "value": value, "low": interval[0], "high": interval[1]}
    return found | {"actions": len(clusters), "episodes": len(set(clusters))}


def past_actions(case: Case) -> list[str]:
    return [t.action for t in case.episode.turns[: case.turn.index] if not t.malformed]


def row(c: Case) -> Row:
    return {
        "episode_id": c.episode.id, "turn": c.turn.index, "state_len": c.turn.state_len, "action": c.action,
        "futures": list(c.judgement.futures), "critique": c.judgement.critique, "verdict": c.judgement.verdict, "refined": "",
        "info": {"own": c.own, "return": c.episode.total_reward},
    }  # fmt: skip


def intervals(folder: Path, table: Sequence[Row]) -> dict[str, Path]:
    """Every measure that is defined with its 95 % interval, in which the turns of an episode are one cluster."""
    path = folder / "intervals.json"
    known = [
        {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in one.items()}
        for one in table
        if not math.isnan(one["value"])
    ]
    path.write_text(json.dumps(known, indent=1))
    return {"audit/intervals.json": path} if known else {}


def report(folder: Path, cases: Sequence[Case]) -> dict[str, Path]:
    """Calibration of the predicted success on own actions, as a table and a plot."""
    own = [c for c in cases if c.own and c.judgement.verdict != "malformed"]
    if not own:
        return {}
    bins = calibration([c.predicted for c in own], [int(c.episode.won) for c in own], 5, [c.episode.id for c in own])
    table, plot = folder / "calibration.json", folder / "calibration.png"
    table.write_text(json.dumps(bins, indent=1))
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color="0.8")
    x, y = [b["mean_score"] for b in bins], [b["rate"] for b in bins]
    spread = [[b["rate"] - b["rate_low"] for b in bins], [b["rate_high"] - b["rate"] for b in bins]]
    axes.errorbar(x, y, yerr=spread, fmt="o")
    axes.set(xlabel="predicted success", ylabel="win rate that followed", title="Critic calibration, own actions")
    figure.savefig(plot, dpi=100)
    return {"audit/calibration.json": table, "audit/calibration.png": plot}
