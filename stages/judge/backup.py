"""The language Bellman backup: real steps after an action, merged with a future from the target network. A correction
then removes what only hindsight knows.

Source: arXiv 2512.04601, section 4 (successor training) and Algorithm 1; several real steps are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stages.frame.contract import Context
from stages.frame.types import Completion, Malformed, Message
from stages.judge.asking import ask_role
from stages.llm.roles import NO_ROOM, Roles, complete_future, mix
from stages.llm.tokens import OUT_OF_CONTEXT
from stages.play.environment import read_action
from stages.play.transitions import Transition

UNREADABLE = "next action"
"""Why a target is dropped whose a' the environment could not read."""


@dataclass(frozen=True)
class Backup:
    """Transitions that follow each other, on their way to a target of the first. `dropped`: why there is none."""

    chain: tuple[Transition, ...]
    weight: float
    next_action: str = ""
    future: str = "none"
    teacher: tuple[tuple[int, ...], tuple[Message, ...]] = ((), ())
    combined: Completion | None = None
    target: Completion | None = None
    dropped: str = ""

    @property
    def t(self) -> Transition:
        """The transition that the target is of."""
        return self.chain[0]


def bellman_backup(context: Context, roles: Roles, drawn: Sequence[Backup]) -> list[Backup]:
    """A fresh a' and f' where the chain ends, then combine and correct from its last transition back to its first.

    With one step, the paper's, the chain is the transition itself: f = B(s, a, r, s', f').
    """
    depths = max((len(b.chain) for b in drawn), default=0)
    bar = context.progress("make targets, role by role", 1 + depths)
    backups = sampled_futures(context, roles, drawn)
    bar.advance()
    for depth in reversed(range(depths)):
        backups = merged(context, roles, backups, depth)
        bar.advance()
    return backups


def sampled_futures(context: Context, roles: Roles, drawn: Sequence[Backup]) -> list[Backup]:
    """a' ~ pi(.|s'), f' ~ M_target(.|s', a') of every chain that does not end its episode."""
    policy, target = context.adapter(learner(context)), target_network(context)
    backups = list(drawn)
    open_ends = [i for i, b in enumerate(backups) if not b.chain[-1].terminal]
    prompts = [roles.policy(backups[i].chain[-1].next_state) for i in open_ends]
    replies = ask_role(context, "policy", prompts, adapter=policy, seed=mix(context.seed, "a'"))
    for i, (_, reply) in zip(open_ends, replies, strict=True):
        try:
            state = backups[i].chain[-1].next_state
            backups[i] = replace(backups[i], next_action=read_action(context, state, reply.text)[1])
        except Malformed:
            backups[i] = dropped(backups[i], reply, UNREADABLE)

    open_ends = [i for i in open_ends if not backups[i].dropped]
    prompts = [successor_prompt(roles, backups[i].chain[-1].next_state, backups[i].next_action) for i in open_ends]
    heat, seed = context.run.roles.target_temperature, mix(context.seed, "f'")
    replies = ask_role(context, "successor", prompts, adapter=target, seed=seed, temperature=heat)
    for i, (_, reply) in zip(open_ends, replies, strict=True):
        try:
            backups[i] = replace(backups[i], future=complete_future(reply))
        except Malformed:
            backups[i] = dropped(backups[i], reply, "future")
    return backups


def dropped(b: Backup, reply: Completion, what: str) -> Backup:
    """For a reply that cannot be read. what: of which kind."""
    return replace(b, dropped=OUT_OF_CONTEXT if reply == NO_ROOM else what)


def merged(context: Context, roles: Roles, backups: Sequence[Backup], depth: int) -> list[Backup]:
    """The future of transition `depth` of every chain that is so long, from what followed it and the future after that."""
    judge = None if context.run.roles.frozen == "base" else target_network(context)
    found = list(backups)

    def told(prompts: Sequence[list[Message]], role: str) -> list[tuple[tuple[int, ...], Completion]]:
        return ask_role(context, role, prompts, adapter=judge, seed=mix(context.seed, role, depth))

    live = [i for i, b in enumerate(found) if depth < len(b.chain) and not b.dropped]
    prompts = [teacher_prompt(roles, found[i].chain[depth], found[i].future) for i in live]
    for i, prompt, (ids, reply) in zip(live, prompts, told(prompts, "combine"), strict=True):
        found[i] = checked(replace(found[i], teacher=(ids, tuple(prompt)), combined=reply, target=reply))
    live = [i for i in live if not found[i].dropped]
    if context.config.correct:
        prompts = [
            roles.prompt("corrector", found[i].chain[depth].state, text=found[i].combined.text)  # type: ignore[union-attr]
            for i in live
        ]
        for i, (_, reply) in zip(live, told(prompts, "corrector"), strict=True):
            found[i] = checked(replace(found[i], target=reply))
    if depth:
        for i in live:
            found[i] = replace(found[i], future=found[i].target.text)  # type: ignore[union-attr]
    return found


def learner(context: Context) -> str:
    """The stage that trained the adapter last: distill, or in a further sweep, where distill is no input, the critic."""
    return "distill" if context.latest("distill") else "critic"


def target_network(context: Context) -> str | None:
    return context.adapter(learner(context), "target")


def successor_prompt(roles: Roles, state: Sequence[Message], action: str) -> list[Message]:
    """The student's prompt x: the conversation and the action, nothing that is known only afterwards."""
    return roles.prompt("successor", state, action=action, thought="")


def teacher_prompt(roles: Roles, t: Transition, future: str) -> list[Message]:
    """The teacher's prompt x+: the real next observation, the step's reward, the future after it, if there is one."""
    return roles.prompt(
        "combine", t.state, action=t.action or "unreadable", thought=t.thought, observation=t.observation, reward=reward_text(t), future=future,
    )  # fmt: skip


def reward_text(t: Transition) -> str:
    """combine's `reward`: the number at the episode's end, "<number> now" of a paid step before it, else "none"."""
    return f"{t.reward:g}" if t.terminal else f"{t.reward:g} now" if t.reward else "none"


def checked(b: Backup) -> Backup:
    """Drop a target that is no whole future: a cut text would teach the successor to stop in mid-sentence."""
    if b.dropped or b.target is None:
        return b
    try:
        complete_future(b.target)
    except Malformed:
        return dropped(b, b.target, "target")
    return b
