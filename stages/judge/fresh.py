"""Fresh actions at states of the replay, for refine to rewrite and pick to choose among, and the row to learn.

Source: arXiv 2512.04601, section 4 (policy improvement): states come from the replay; fresh actions are ours.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import Field

from stages.frame.contract import Config, Context
from stages.frame.types import Completion, Malformed, Message, MissingInput, Row
from stages.judge.asking import ask_role
from stages.judge.refinement import UNREADABLE
from stages.llm.roles import NO_ROOM, Roles, check_student, mix, policy_text
from stages.llm.tokens import OUT_OF_CONTEXT
from stages.play.drawing import Draw, by_priority
from stages.play.environment import read_action
from stages.play.transitions import Candidate, Transition, candidates, known_losses


class StatesConfig(Config):
    """At which states the policy is improved."""

    states: int = Field(128, ge=1, description="States with an action to be learned, an iteration. [ours]")
    tries: int = Field(6, ge=1)
    """Most rounds of drawing states. The first draws all, later ones replace the states that left no row. [ours]"""
    replay_size: int = Field(4000, ge=1, description="Newest transitions whose states can be drawn. [ours]")
    draw: Draw = "turn"
    """Draw states one by one, or by the episode, whose turns share a prefix. [ours]"""
    alpha: float = Field(0.6, ge=0)
    """States by the critic's priorities, p ~ (loss + eps)^alpha; 0 = uniform. [paper: its replay is; exponent ours]"""
    eps: float = Field(0.01, gt=0, description="So that no state is ever given up. [ours]")
    warmup: int = Field(0, ge=0)
    """First iterations without improvement, so that the critic has learned something before the policy follows it. [ours; paper: 0]"""


def states_in_order(context: Context, stage: str, collects: Sequence[str], critics: Sequence[str]) -> list[Candidate]:
    """All states of these collect runs that can be drawn, in the order of the draw. Raises MissingInput without one."""
    config: StatesConfig = context.config
    pool = candidates(context.replay, collects, newest=config.replay_size)
    if not pool:
        raise MissingInput(f"{stage} needs states from collect, found none; collect more episodes")
    losses = known_losses(context.replay, critics)
    return by_priority(pool, losses, config.alpha, config.eps, np.random.default_rng(context.seed), config.draw)


def sampled_actions(
    context: Context, roles: Roles, drawn: Sequence[Transition], adapter: str | None, *, n: int = 1
) -> list[list[tuple[tuple[int, ...], Completion]]]:
    """n replies of the policy in each of these states, with the ids of its prompt."""
    prompts = [roles.policy(t.state) for t in drawn for _ in range(n)]
    replies = ask_role(context, "policy", prompts, adapter=adapter, seed=mix(context.seed, "a"), thoughts=True)
    return [replies[start : start + n] for start in range(0, len(replies), n)]


def too_long(tried: Sequence[Any]) -> set[tuple[str, int]]:
    """Keys of the states that have no room in the model's context, of what was made of them: with `state`, `dropped`."""
    return {one.state.key for one in tried if one.dropped == OUT_OF_CONTEXT}


def unreadable(context: Context, at: Transition, reply: Completion) -> str:
    """Why a reply cannot be an action in the state of `at`, or ""."""
    if reply == NO_ROOM:
        return OUT_OF_CONTEXT
    try:
        read_action(context, at.state, reply.text)
    except Malformed:
        return UNREADABLE
    return "" if reply.finish_reason == "stop" else "action cut short"


def policy_row(
    context: Context,
    roles: Roles,
    at: Transition,
    prompt_ids: Sequence[int],
    learned: Completion,
    *,
    raw: Completion,
    teacher: tuple[Sequence[int], Sequence[Message]],
    privileged: Sequence[str],
    number: int,
    **info: object,
) -> Row:
    """A row of `targets` with role "policy": the policy's own prompt; the teacher's holds what is `privileged`."""
    ids, messages = teacher
    student = context.engine.decode(prompt_ids)
    check_student(student, policy_text(roles, at.state), privileged)
    return {
        "target_id": f"{at.episode_id}-{at.turn}-{context.iteration}-{number}", "role": "policy", "episode_id": at.episode_id,
        "turn": at.turn, "terminal": False, "student_ids": list(prompt_ids), "completion_ids": list(learned.token_ids),
        "teacher_ids": list(ids), "student_prompt": student, "teacher_prompt": json.dumps([m["content"] for m in messages]),
        "raw": raw.text, "completion": learned.text, "weight": 1.0, "info": info,
    }  # fmt: skip
