"""What the successor should have said of (s, a), made from one real step and a sampled rest (stages/judge/backup.py).

    f = B(s, a, r, s', f'),   a' ~ pi(.|s'),   f' ~ M_target(.|s', a')        terminal s': f is made from r and the last
        observation

Source: arXiv 2512.04601, section 4 (successor training) and Algorithm 1; a fresh a', the terminal prompt and the
sampling shares are ours (docs/paper-map.md). Each target keeps two information sets: the student prompt x
(conversation, action) and the teacher prompt x+ (with s', r, f'). Only x reaches a training row.

    turnwise rerun targets --of RUN --set targets.transitions=512
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import numpy as np
from pydantic import Field, model_validator

from stages.frame.contract import Config, Context, Outputs, Stage
from stages.frame.types import MissingInput, Row, TurnwiseError
from stages.judge.backup import UNREADABLE, Backup, bellman_backup, successor_prompt
from stages.learn.priorities import importance_weights, priorities, sample_without_replacement
from stages.learn.statistics import leak_rate
from stages.llm.last_message import check_last_message
from stages.llm.roles import (
    Roles,
    check_student,
    policy_text,
    prompt_text,
    roles_of,
)
from stages.llm.tokens import OUT_OF_CONTEXT, nothing_fits
from stages.play.drawing import Draw, by_episode
from stages.play.transitions import Candidate, Drawable, candidates, in_full, known_losses


class TargetsConfig(Config):
    """Which transitions are backed up, and how."""

    transitions: int = Field(256, ge=1, description="Targets made an iteration. [ours]")
    replay_size: int = Field(20000, ge=1, description="Newest transitions that can be drawn. [ours]")
    draw: Draw = Field(
        "turn",
        description="Transitions are drawn one by one, or by the episode, as many as that gives: its turns share what was said before, in generation and in training. [ours]",
    )
    alpha: float = Field(
        0.6,
        ge=0,
        description="Priority p ~ (loss + eps)^alpha. [paper: prioritised by the critic's loss; exponent ours]",
    )
    eps: float = Field(0.01, gt=0, description="So that no transition is ever given up. [ours]")
    beta: float = Field(
        0.0, ge=0, le=1, description="Importance weights (N p)^-beta undo the preference; 0 = none. [ours]"
    )
    terminal_frac: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of terminal transitions, by priority within each kind; 0 = as they are drawn. [ours]",
    )
    steps: int = Field(
        1,
        ge=1,
        description="Real steps of the episode that are merged before a future is sampled; many = to its end, off-policy. [ours; paper: 1]",
    )
    correct: bool = Field(True, description="CoT correction of the combined future. [paper]")

    @model_validator(mode="after")
    def _kinds_are_of_turns(self) -> Self:
        if self.draw == "episode" and self.terminal_frac:
            raise ValueError('terminal_frac draws terminal turns apart from others; set it to 0 with draw = "episode"')
        return self


D = TypeVar("D", bound=Drawable)


@dataclass(frozen=True)
class Drawn(Generic[D]):
    """What is to be backed up: a transition and those that follow it, before they are read in full."""

    chain: tuple[D, ...]
    weight: float

    @property
    def t(self) -> D:
        return self.chain[0]


def run(context: Context) -> Outputs:
    """Rows of `targets` with role "successor". Raises MissingInput without a transition, TurnwiseError without a
    readable reply, UsageError where no prompt fits.
    """
    config: TargetsConfig = context.config
    roles = roles_of(context.run.roles)
    check_last_message(context.engine, roles)
    pool = usable(candidates(context.replay, context.inputs["collect"], newest=config.replay_size))
    if not pool:
        raise MissingInput(
            f"targets needs transitions from collect, found none in its {len(context.inputs['collect'])} runs; collect more episodes"
        )
    drawn = draw(
        pool,
        known_losses(context.replay, context.inputs.get("critic", ())),
        config,
        np.random.default_rng(context.seed),
    )
    backups = bellman_backup(context, roles, read_in_full(context, drawn))
    kept, too_long = [b for b in backups if not b.dropped], sum(b.dropped == OUT_OF_CONTEXT for b in backups)
    if too_long == len(backups):
        raise nothing_fits("targets", too_long, context.engine.context)
    if not kept:
        raise nothing_readable(backups)
    rows = [target_row(context, roles, b) for b in kept]
    return Outputs(
        {
            "targets/rows": float(len(rows)),
            "targets/dropped": float(len(backups) - len(rows)),
            "targets/unreadable": float(sum(b.dropped == UNREADABLE for b in backups)),
            "targets/out_of_context": float(too_long),
            "targets/terminal_frac": sum(b.t.terminal for b in kept) / max(len(kept), 1),
            "targets/tokens": float(sum(len(b.target.token_ids) for b in kept if b.target)),
            "targets/pool": float(len(pool)),
            **leaks(roles, kept),
        },
        {"targets": rows},
    )


def nothing_readable(backups: Sequence[Backup]) -> TurnwiseError:
    """An engine that talks garbage; as a finished run without targets it would be reused for ever."""
    counts = ", ".join(f"{reason}: {n}" for reason, n in Counter(b.dropped for b in backups).most_common())
    replies = [b.target for b in backups if b.target]
    found = next((f"; for example {reply.text[:60]!r}" for reply in replies), "")
    cut = sum(reply.finish_reason != "stop" for reply in replies)
    if 2 * cut > len(replies):
        advice = f"{cut} of them were cut at their limit: raise roles.max_future_tokens, or roles.max_thought_tokens for a model that thinks first"
    else:
        advice = "Look at the engine's model (does model.path follow instructions?) and its prompts (roles.prompts)"
    wanted = f"targets wanted futures of {len(backups)} transitions"
    return TurnwiseError(
        f"{wanted}, but no reply could be read ({counts}{found}). {advice}, then run the command again"
    )


def usable(pool: Sequence[D]) -> list[D]:
    """Transitions that a critic can learn from: every one but a reply that was unreadable and then mended."""
    return [t for t in pool if t.has_target]


def draw(
    pool: Sequence[D], losses: dict[tuple[str, int], float], config: TargetsConfig, rng: np.random.Generator
) -> list[Drawn[D]]:
    """A prioritised sample without replacement: of transitions, with `terminal_frac` from terminal and other ones apart;
    or of episodes, whose weight is the sum of their transitions'.
    """
    if config.draw == "episode":
        return draw_episodes(pool, losses, config, rng)
    terminal = [i for i, t in enumerate(pool) if t.terminal]
    other = [i for i, t in enumerate(pool) if not t.terminal]
    total = min(config.transitions, len(pool))
    if not config.terminal_frac or not other:
        parts = [(list(range(len(pool))), total)]
    else:
        n_terminal = min(round(total * config.terminal_frac), len(terminal))
        n_other = min(total - n_terminal, len(other))
        parts = [(terminal, n_terminal), (other, n_other)]
    chosen, by_key = [], {t.key: t for t in pool}
    for members, n in parts:
        if n:
            p = priorities(np.array([losses.get(pool[i].key, math.nan) for i in members]), config.alpha, config.eps)
            picked = sample_without_replacement(rng, p, n)
            weights = importance_weights(p, picked, config.beta)
            chosen += [
                Drawn(following(pool[members[j]], by_key, config.steps), float(w))
                for j, w in zip(picked, weights, strict=True)
            ]
    return chosen


def draw_episodes(
    pool: Sequence[D], losses: dict[tuple[str, int], float], config: TargetsConfig, rng: np.random.Generator
) -> list[Drawn[D]]:
    p = priorities(np.array([losses.get(t.key, math.nan) for t in pool]), config.alpha, config.eps)
    chosen, p_E, of = by_episode(pool, p, config.transitions, rng)
    weights = importance_weights(np.array(p_E), np.array(of), config.beta)
    by_key = {t.key: t for t in pool}
    every = [Drawn(following(pool[i], by_key, config.steps), float(w)) for i, w in zip(chosen, weights, strict=True)]
    return every[: config.transitions]  # of the last episode the first turns


def following(t: D, by_key: Mapping[tuple[str, int], D], steps: int) -> tuple[D, ...]:
    """The transition and those that followed it in its episode, at most `steps`; fewer at its end or before an
    unreadable reply.
    """
    chain = [t]
    while len(chain) < steps and not chain[-1].terminal and (after := by_key.get((t.key[0], chain[-1].key[1] + 1))):
        chain.append(after)
    return tuple(chain)


def read_in_full(context: Context, drawn: Sequence[Drawn[Candidate]]) -> list[Backup]:
    """The drawn chains with their texts."""
    read = iter(in_full(context.replay, [t for one in drawn for t in one.chain]))
    return [Backup(tuple(next(read) for _ in one.chain), one.weight) for one in drawn]


def target_row(context: Context, roles: Roles, b: Backup) -> Row:
    assert b.combined is not None and b.target is not None
    action = b.t.action or "unreadable"
    student_ids = context.engine.encode(successor_prompt(roles, b.t.state, action))
    student = context.engine.decode(student_ids)
    template = roles.templates["successor"].format(action=action, thought="")
    known = f"{policy_text(roles, b.t.state)}\n{template}"
    check_student(student, known, [*(t.observation for t in b.chain), b.future if b.future != "none" else ""])
    ids, messages = b.teacher
    return {
        "target_id": f"{b.t.episode_id}-{b.t.turn}-{context.iteration}", "role": "successor", "episode_id": b.t.episode_id, "turn": b.t.turn,
        "terminal": b.t.terminal, "student_ids": list(student_ids), "completion_ids": list(b.target.token_ids),
        "teacher_ids": list(ids), "student_prompt": student, "teacher_prompt": json.dumps([m["content"] for m in messages]),
        "raw": b.combined.text, "completion": b.target.text, "weight": b.weight,
        "info": {"next_action": b.next_action, "future": b.future, "reward": b.t.reward},
    }  # fmt: skip


def leaks(roles: Roles, kept: Sequence[Backup]) -> dict[str, float]:
    """Share of targets that say what only the teacher could know, before and after correction.

    leak: any content word of the observations merged into the target that is not in x; that holds what is to be
    learned, too, so it is compared with `leak_shuffled`, the same against another row's s'. leak_name: capitalised
    names alone, which nobody can learn to foresee.
    """
    if not kept:
        return {}
    before, after = ([c.text for b in kept if (c := getattr(b, part))] for part in ("combined", "target"))
    privileged = ["\n".join(t.observation for t in b.chain) for b in kept]
    known = [prompt_text(successor_prompt(roles, b.t.state, b.t.action)) for b in kept]
    shuffled = privileged[1:] + privileged[:1]
    return {
        "targets/leak_before": leak_rate(before, privileged, known)[0],
        "targets/leak_after": leak_rate(after, privileged, known)[0],
        "targets/leak_shuffled": leak_rate(after, shuffled, known)[0],
        "targets/leak_name_before": leak_rate(names(before), names(privileged), names(known))[0],
        "targets/leak_name_after": leak_rate(names(after), names(privileged), names(known))[0],
    }


def names(texts: Sequence[str]) -> list[str]:
    """Only the capitalised words of each text, role markers ("Future:") aside."""
    return [" ".join(re.findall(r"\b[A-Z][a-z]+\b(?!:)", text)) for text in texts]


STAGE = Stage(
    "targets", 5, TargetsConfig, inputs=("collect", "critic", "distill"), roles=("policy", "successor", "combine", "corrector"), run=run,
    outputs=("targets",),
)  # fmt: skip
