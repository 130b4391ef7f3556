"""Whether a model's replies can be read in each role of a task, before anything is trained. Ours.

The model plays a few episodes. Then each role is asked at steps of these episodes, in the order in which a run asks
them: each hears what the one before it said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stages import envs
from stages.frame.contract import Context
from stages.frame.types import Completion, Episode, Malformed, Message
from stages.judge.asking import ask_role
from stages.judge.backup import successor_prompt, teacher_prompt
from stages.llm.roles import Roles, complete_future, mix, parse_evaluation
from stages.play.environment import environment, read_action
from stages.play.rollout import rollout, rollout_settings
from stages.play.transitions import Transition, transitions_of


@dataclass(frozen=True)
class Heard:
    """A role's replies: how many of those asked can be read; the first that cannot, else the first; and what is wrong."""

    role: str
    readable: int
    asked: int
    reply: str
    wrong: str = ""


def hear(context: Context, roles: Roles, n: int) -> tuple[list[Episode], list[Heard]]:
    """n episodes of the training split, and the roles that the task has prompts for, at n steps of these."""
    task = context.run.task
    scenarios = envs.scenarios(task.env, task.options, "train", n, context.seed)
    settings = rollout_settings(context, None, seed=context.seed)
    episodes = rollout(context.engine, environment(context), scenarios, roles, settings)
    turns = [turn for episode in episodes for turn in episode.turns]
    bad = next((turn.completion.text for turn in turns if turn.malformed), None)
    first = turns[0].completion.text if turns else ""
    readable = sum(not turn.malformed for turn in turns)
    wrong = "" if bad is None else "the environment cannot read an action in it"
    heard = [Heard("policy", readable, len(turns), first if bad is None else bad, wrong)]
    steps = [step for episode in episodes for step in transitions_of(episode)]
    return episodes, heard + _others(context, roles, steps[:: max(1, len(steps) // n)][:n])


def _others(context: Context, roles: Roles, steps: Sequence[Transition]) -> list[Heard]:
    heard: list[Heard] = []

    def ask(role: str, prompts: list[list[Message]], read: Callable[[int, Completion], object]) -> list[str]:
        replies = ask_role(context, role, prompts, adapter=None, seed=mix(context.seed, role))
        heard.append(_heard(role, [reply for _, reply in replies], read))
        return [reply.text for _, reply in replies]

    def future(i: int, reply: Completion) -> object:
        return complete_future(reply)

    if not {"successor", "combine", "evaluator", "refiner", "corrector"} <= roles.templates.keys() or not steps:
        return heard
    acts = [step.action or "unreadable" for step in steps]
    futures = ask("successor", [successor_prompt(roles, s.state, a) for s, a in zip(steps, acts, strict=True)], future)
    later = ["none" if s.terminal else f for s, f in zip(steps, futures, strict=True)]
    merged = ask("combine", [teacher_prompt(roles, s, f) for s, f in zip(steps, later, strict=True)], future)
    ask("corrector", [roles.prompt("corrector", s.state, text=t) for s, t in zip(steps, merged, strict=True)], future)
    asked = list(zip(steps, acts, futures, strict=True))
    said = ask(
        "evaluator", [roles.prompt("evaluator", s.state, action=a, thought="", futures=f) for s, a, f in asked],
        lambda i, reply: parse_evaluation(reply.text),
    )  # fmt: skip
    told = list(zip(steps, acts, map(no, said), strict=True))
    ask(
        "refiner", [roles.prompt("refiner", s.state, action=a, thought=s.thought, evaluation=e) for s, a, e in told],
        lambda i, reply: read_action(context, steps[i].state, reply.text),
    )  # fmt: skip
    return heard


def no(evaluation: str) -> str:
    """The evaluation, or a bare No in place of a Yes: a run asks the refiner of refused actions alone."""
    try:
        return "Optimality: No." if parse_evaluation(evaluation).optimal else evaluation
    except Malformed:
        return evaluation


def _heard(role: str, replies: Sequence[Completion], read: Callable[[int, Completion], object]) -> Heard:
    wrong = {}
    for i, reply in enumerate(replies):
        try:
            read(i, reply)
        except Malformed as error:
            wrong[i] = str(error)
    shown, why = next(iter(wrong.items()), (0, ""))
    return Heard(role, len(replies) - len(wrong), len(replies), replies[shown].text, why)
