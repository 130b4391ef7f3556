"""SAC's critic, a baseline: Q(s, a) is a number, not words. One stage draws, backs up and learns.

    y = r_0 + .. + gamma^(n-1) r_{n-1} + gamma^n Q_target(s_n, a'),   a' ~ pi(.|s_n)         0 past a terminal state
    L = (Q(s, a) - y)^2,   theta_target <- theta_target + rate (theta - theta_target)

n is `steps`. Source: arXiv 2512.04601, the baseline SAC; it gives only the idea. Ours:
NLAC's data and schedule, the draw of targets, the successor's prompt, and the steps and policy rows of critic. Head and adapter share a
target network, and |Q - y| is the transition's priority.

    turnwise run desk+sac
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from stages.frame.contract import Context, Outputs, Stage
from stages.frame.types import Malformed, Row
from stages.judge.asking import ask_role
from stages.judge.backup import UNREADABLE, successor_prompt
from stages.judge.q_values import q_prompts, q_values
from stages.learn.adapter import load_state, trainable_state
from stages.learn.fit import Lists
from stages.learn.later import Later
from stages.llm.last_message import check_last_message
from stages.llm.roles import Roles, check_student, mix, policy_text, roles_of
from stages.llm.tokens import nothing_fits
from stages.play.chains import DrawConfig, drawn_chains
from stages.play.drawing import Draw
from stages.play.environment import read_action
from stages.play.transitions import Transition
from stages.train.history import curves, fit_metrics
from stages.train.model import MixedConfig
from stages.train.network import VALUE, batches_of, followed, mixed_q_loss, open_net, save_net, trained, value_rows
from stages.train.passes import Pass
from stages.train.rows import policy_rows, weighed


class QCriticConfig(DrawConfig, MixedConfig):
    """Which transitions are backed up, and how Q learns them."""

    draw: Draw = "turn"
    """Transitions are drawn, and rows meet in a step, one by one or by the episode. [ours]"""
    gamma: float = Field(1.0, ge=0, le=1, description="Discount a turn. [ours]")
    epochs: int = Field(1, ge=0, description="Passes over the iteration's transitions. [ours]")
    batch: int = Field(48, ge=1, description="Transitions a step. [ours]")
    policy_rows: int = Field(16, ge=0)
    """Policy rows in every step, from the last picks or, at first, its own actions. [ours]"""
    value_weight: float = Field(1.0, gt=0)
    """Weight of the squared error of Q against the likelihood of the policy rows. [ours]"""
    ema_rate: float = Field(0.01, gt=0, le=1, description="EMA rate of the target network, a step. [ours]")


@dataclass(frozen=True)
class QBackup:
    """Transitions that follow each other, and the target for Q of the first.

    prompt_ids: where Q(s, a) is read. next_ids: where Q_target(s_n, a') is; None past a terminal state.
    """

    chain: tuple[Transition, ...]
    weight: float
    prompt_ids: tuple[int, ...] = ()
    next_action: str = ""
    next_ids: tuple[int, ...] | None = None
    later: float = 0.0  # Q_target(s_n, a')
    dropped: str = ""

    @property
    def t(self) -> Transition:
        return self.chain[0]

    def target(self, gamma: float) -> float:
        """y: discounted rewards of the chain, plus the target network's estimate of the rest."""
        return sum(gamma**k * t.reward for k, t in enumerate(self.chain)) + gamma ** len(self.chain) * self.later


def run(context: Context) -> Outputs:
    """Artifacts `adapter`, `target`, `head` and `target_head`, rows of `targets` with role "value" and of `priorities`.

    Raises MissingInput without a transition, UsageError where no prompt fits.
    """
    config: QCriticConfig = context.config
    roles = roles_of(context.run.roles)
    check_last_message(context.engine, roles)
    drawn, n_pool = drawn_chains(context, "q_critic", "q_critic")
    backups = sampled(context, roles, [QBackup(*one) for one in drawn])
    kept = [b for b in backups if not b.dropped]
    if not kept:
        raise nothing_fits("q_critic", len(backups), context.engine.context)
    net, target = open_net(context, context.latest("distill") or context.latest("q_critic"), head=True)
    kept = bootstrapped(net, target, kept)
    stored = [target_row(context, roles, b, b.target(config.gamma)) for b in kept]
    history, errors, target = learn(context, net, target, stored)
    counts = {
        "q_critic/rows": float(len(kept)),
        "q_critic/dropped": float(len(backups) - len(kept)),
        "q_critic/bootstrapped": float(sum(b.next_ids is not None for b in kept)),
        "q_critic/target_mean": sum(row["info"]["q"] for row in stored) / len(stored),
        "q_critic/pool": float(n_pool),
    }
    steps = curves("q_critic", history, ("q_loss", "nll/policy", "grad_norm"))
    priorities = [{"episode_id": key[0], "turn": key[1], "loss": e, "step": s} for key, (e, s) in errors.items()]
    rows = {"targets": stored, "priorities": priorities}
    return Outputs(fit_metrics("q_critic", history) | counts, rows, save_net(context, net, target), steps)


def sampled(context: Context, roles: Roles, drawn: Sequence[QBackup]) -> list[QBackup]:
    """A fresh a' ~ pi(.|s_n) of every chain that does not end its episode, and the prompts of (s, a) and (s_n, a')."""
    found = list(drawn)
    open_ends = [i for i, b in enumerate(found) if not b.chain[-1].terminal]
    prompts = [roles.policy(found[i].chain[-1].next_state) for i in open_ends]
    adapter = context.adapter("distill") or context.adapter("q_critic")
    replies = ask_role(context, "policy", prompts, adapter=adapter, seed=mix(context.seed, "a'"))
    for i, (_, reply) in zip(open_ends, replies, strict=True):
        try:
            action = read_action(context, found[i].chain[-1].next_state, reply.text)[1]
            found[i] = replace(found[i], next_action=action)
        except Malformed:
            found[i] = replace(found[i], dropped=UNREADABLE)
    now = q_prompts(context, roles, [(b.t.state, b.t.action or "unreadable") for b in found])
    then = iter(q_prompts(context, roles, [(found[i].chain[-1].next_state, found[i].next_action) for i in open_ends]))
    after = {i: next(then) for i in open_ends}
    return [
        replace(b, prompt_ids=ids, next_ids=after.get(i))
        if ids and (after.get(i) or i not in after)
        else replace(b, dropped=b.dropped or "out of context")
        for i, (b, ids) in enumerate(zip(found, now, strict=True))
    ]


def bootstrapped(net: Any, target: dict[str, Any], backups: Sequence[QBackup]) -> list[QBackup]:
    """Q_target(s_n, a') of every chain that goes on. The network stays as it is."""
    live = trainable_state(net)
    load_state(net, target)
    model, head = net
    later = iter(q_values(model.eval(), head, [b.next_ids for b in backups if b.next_ids]))
    model.train()
    load_state(net, live)
    return [replace(b, later=next(later)) if b.next_ids else b for b in backups]


def learn(
    context: Context, net: Any, target: dict[str, Any], stored: Sequence[Row]
) -> tuple[list[dict[str, float]], dict[tuple[Any, ...], tuple[float, int]], dict[str, Any]]:
    """(metrics of every step, |Q - y| and step of each row at its last use, the target network after the steps)."""
    config: QCriticConfig = context.config
    rows, wanted = value_rows(stored)
    errors: dict[tuple[Any, ...], tuple[float, int]] = {}
    steps = 0
    bar = context.progress("train Q", config.epochs * -(-len(rows) // config.batch))

    def loss(net: Any, step: Pass) -> Any:
        value, metrics, error = mixed_q_loss(net, step, wanted, weight=config.value_weight, autocast=config.autocast)
        keys = [row.key for row, kind in zip(step.rows, step.kinds, strict=True) if kind == VALUE]

        def told(found: list[float]) -> dict[str, Any]:
            return {"each/error": [[key, abs(e)] for key, e in zip(keys, found, strict=True)]}

        return value, metrics | Later([error], told)

    def each(lists: Lists) -> None:
        errors.update({tuple(key): (e, steps) for key, e in lists["each/error"]})

    def after_step(done: list[dict[str, float]]) -> None:
        nonlocal target, steps
        target = followed(target, net, config.ema_rate)
        steps = len(done)
        bar.advance(1)

    kinds = {VALUE: (rows, config.batch), "policy": (weighed(policy_rows(context), config.weight), config.policy_rows)}
    batches = batches_of(context, net, kinds, main=VALUE, rng=random.Random(context.seed))
    return trained(context, net, batches, loss, after_step, each), errors, target


def target_row(context: Context, roles: Roles, b: QBackup, q: float) -> Row:
    """The student prompt that the successor would have, and the number that belongs to it."""
    student = context.engine.decode(b.prompt_ids)
    prompt = successor_prompt(roles, b.t.state, b.t.action or "unreadable")
    seen = [t.observation for t in b.chain]
    check_student(student, f"{policy_text(roles, b.t.state)}\n{prompt[-1]['content']}", seen)
    return {
        "target_id": f"{b.t.episode_id}-{b.t.turn}-{context.iteration}", "role": VALUE, "episode_id": b.t.episode_id, "turn": b.t.turn,
        "terminal": b.t.terminal, "student_ids": list(b.prompt_ids), "completion_ids": [], "teacher_ids": [], "student_prompt": student,
        "teacher_prompt": json.dumps([]), "raw": "", "completion": f"Q = {q:.3f}", "weight": b.weight,
        "info": {"q": q, "next_action": b.next_action, "later": b.later, "reward": b.t.reward},
    }  # fmt: skip


STAGE = Stage(
    "q_critic", 1, QCriticConfig, inputs=("collect", "q_critic", "pick", "distill"), roles=("policy", "successor"), run=run, trains=True,
    outputs=("targets", "priorities", "adapter/", "target/", "head/", "target_head/"),
)  # fmt: skip
