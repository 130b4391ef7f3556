"""The critic audit: does it know what it says? Metrics, rows and plots for evaluate."""

from __future__ import annotations

import importlib
import json
import math
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.frame.contract import Context
from stages.frame.types import Episode, Malformed, Row, Turn
from stages.judge.critique import Judgement, judge
from stages.learn.statistics import auroc, calibration, spearman
from stages.llm.roles import NO_ROOM, Roles, ask, mix
from stages.llm.tokens import nothing_fits
from stages.play.environment import read_action


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
    """Judge the policy's own actions and, at the same states, actions of the base policy, of which more are wrong.
    Raises UsageError where not one prompt of the critic fits.
    """
    rng = random.Random(context.seed)
    turns = [(e, t) for e in episodes for t in e.turns if not t.malformed]
    turns = rng.sample(turns, min(n_turns, len(turns)))
    others, too_long = base_actions(context, roles, turns)
    pairs = [(e, t, t.action, True) for e, t in turns] + [
        (e, t, a, False) for (e, t), a in zip(turns, others, strict=True) if a
    ]
    words = judge(
        context, roles, [(e.messages[: t.state_len], a) for e, t, a, _ in pairs], k=k, seed=mix(context.seed, "audit")
    )
    cases = [
        Case(e, t, a, w, predicted(w, context.config.loss_words), own)
        for (e, t, a, own), w in zip(pairs, words, strict=True)
    ]
    if cases and all(c.judgement.out_of_context for c in cases):
        raise nothing_fits("evaluate.audit_turns", len(cases), context.engine.context)
    metrics = against_returns(cases) | against_truth(context, cases)
    metrics["audit/unreadable"] = float(others.count("") - too_long)
    metrics["audit/out_of_context"] = float(too_long + sum(c.judgement.out_of_context for c in cases))
    metrics["audit/malformed_frac"] = sum(c.judgement.verdict == "malformed" for c in cases) / max(len(cases), 1)
    metrics = {name: value for name, value in metrics.items() if not math.isnan(value)}
    return Audit(metrics, [row(c) for c in cases], report(context.workdir, cases))


def base_actions(context: Context, roles: Roles, turns: Sequence[tuple[Episode, Turn]]) -> tuple[list[str], int]:
    """What the untrained model would do at these states, "" where the environment could not read it; and how many of
    them do not fit.
    """
    s = context.run.roles
    prompts = [roles.policy(e.messages[: t.state_len]) for e, t in turns]
    replies = ask(
        context.engine, prompts, adapter=None, temperature=1.0, max_tokens=s.action_room, seed=mix(context.seed, "base")
    )
    found = []
    for (e, t), (_, reply) in zip(turns, replies, strict=True):
        try:
            found.append(read_action(context, e.messages[: t.state_len], reply.text)[1])
        except Malformed:
            found.append("")
    return found, sum(reply == NO_ROOM for _, reply in replies)


def predicted(judgement: Judgement, loss_words: Sequence[str]) -> float:
    """Share of the predicted futures that end well, that is, hold none of the words that the task's prompts use for a
    loss.
    """
    futures = [future.lower() for future in judgement.futures]
    return sum(not any(word in future for word in loss_words) for future in futures) / len(futures)


def against_returns(cases: Sequence[Case]) -> dict[str, float]:
    """Own actions only: the return that followed against verdict (1 = Yes) and predicted success."""
    own = [c for c in cases if c.own and c.judgement.verdict != "malformed"]
    if not own:
        return {}
    returns = [c.episode.total_reward for c in own]
    won = [int(r >= 1) for r in returns]
    yes = [float(c.judgement.verdict == "yes") for c in own]
    futures = [c.predicted for c in own]
    return {
        "audit/verdict_return_spearman": spearman(yes, returns),
        "audit/future_return_spearman": spearman(futures, returns),
        "audit/future_return_auroc": auroc(futures, won),
        "audit/yes_rate": sum(yes) / len(yes),
        "audit/yes_rate_won": mean([y for y, w in zip(yes, won, strict=True) if w]),
        "audit/yes_rate_lost": mean([y for y, w in zip(yes, won, strict=True) if not w]),
    }


def against_truth(context: Context, cases: Sequence[Case]) -> dict[str, float]:
    """Where the environment's module has `truth`: verdicts against right or wrong, futures against exact Q*, the cause
    named.
    """
    task = context.run.task
    truth: Any = getattr(importlib.import_module(f"stages.envs.{task.env}"), "truth", None)
    read, facts = [], []
    for c in cases if truth else ():
        # An action that the environment would not understand is neither right nor wrong.
        with suppress(Malformed):
            if c.judgement.verdict != "malformed":
                facts.append(truth(task.options, c.episode.scenario, [*past_actions(c), c.action]))
                read.append(c)
    if not read:
        return {}
    yes = [float(c.judgement.verdict == "yes") for c in read]
    wrong = [(c, f) for c, f in zip(read, facts, strict=True) if not f.optimal]
    return {
        "audit/verdict_accuracy": mean([float((y == 1) == f.optimal) for y, f in zip(yes, facts, strict=True)]),
        "audit/verdict_auroc": auroc(yes, [int(f.optimal) for f in facts]),
        "audit/verdict_q_spearman": spearman(yes, [f.q for f in facts]),
        "audit/future_q_spearman": spearman([c.predicted for c in read], [f.q for f in facts]),
        "audit/no_if_right": mean([1 - y for y, f in zip(yes, facts, strict=True) if f.optimal]),
        "audit/no_if_wrong": mean([1 - y for y, f in zip(yes, facts, strict=True) if not f.optimal]),
        "audit/cause_named": mean([float(any(f.named_in(t) for t in c.judgement.futures)) for c, f in wrong]),
        **by_turn(read, [f.optimal for f in facts]),
    }


def by_turn(cases: Sequence[Case], right: Sequence[bool]) -> dict[str, float]:
    """Where in an episode policy and critic go wrong: `audit/turn0/own_right` is the share of right first actions of
    the policy.
    """
    found = {}
    for index in sorted({c.turn.index for c in cases}):
        here = [(c, r) for c, r in zip(cases, right, strict=True) if c.turn.index == index]
        found[f"audit/turn{index}/own_right"] = mean([float(r) for c, r in here if c.own])
        found[f"audit/turn{index}/no_if_right"] = mean([float(c.judgement.verdict == "no") for c, r in here if r])
        found[f"audit/turn{index}/no_if_wrong"] = mean([float(c.judgement.verdict == "no") for c, r in here if not r])
    return found


def past_actions(case: Case) -> list[str]:
    return [t.action for t in case.episode.turns[: case.turn.index] if not t.malformed]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def row(c: Case) -> Row:
    return {
        "episode_id": c.episode.id, "turn": c.turn.index, "state_len": c.turn.state_len, "action": c.action,
        "futures": list(c.judgement.futures), "critique": c.judgement.critique, "verdict": c.judgement.verdict, "refined": "",
        "info": {"own": c.own, "return": c.episode.total_reward},
    }  # fmt: skip


def report(folder: Path, cases: Sequence[Case]) -> dict[str, Path]:
    """Calibration of the predicted success on own actions, as a table and a plot."""
    own = [c for c in cases if c.own and c.judgement.verdict != "malformed"]
    if not own:
        return {}
    bins = calibration([c.predicted for c in own], [int(c.episode.won) for c in own], 5)
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
