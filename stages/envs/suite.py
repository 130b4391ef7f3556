"""What every environment must do, whatever its task: the contract suite, for those that ship and for one's own.

    turnwise check my.traffic --reply "Action: stop" --reply "Action: go"

A claim is a function that raises Broken where the environment does otherwise, and LeftOut where it cannot be looked at.
The replies are readable ones that, said again and again, bring any episode to its end. The suite is of the environment
alone: no model, no store.
"""

from __future__ import annotations

import json
import random
import string
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from typing import Any, Literal

from stages import envs
from stages.frame.border import failure
from stages.frame.types import Ask, Env, Episode, Malformed, Message, Outcome, Scenario, Step, TurnwiseError

SPLITS = ("train", "validation", "test")
UNREADABLE = ("", " ", "hello", "Thought: hm", "Thought: hm\nAction:", "Action: \n", "%%%")
REPLIES: Mapping[str, Sequence[str]] = {
    "game24": ("expand 0: 1 + 1 = 2", "submit 0"),
    "math": ("41",),
    "service_desk": ("check photo", "give voucher", "log ledger", "close phone"),
    "sums": ("1 + 1 = 2",),
    "tau_bench": ('{"name": "get_user_details", "arguments": {"user_id": "ann_1"}}', "hello", "bye"),
    "twenty_questions": ("Is it alive?", "What is it?"),
    "wide_desk": ("give the cash by mail in march", "lend the cash by mail in march", "bill the cash by mail in march"),
    "wiki_search": ("NAVIGATE nowhere", "FIND(born)", "SAVE_LINE_IDS 1", "BACK", "SUBMIT nothing"),
}
"""Actions of the environments that ship, which bring any episode to its end. A module of one's own exports REPLIES."""
LONGEST = 100
"""Replies after which an episode that is not over is left: an environment may leave its end to task.max_turns."""
ANY_TEXT_S = 5.0
"""How long random texts are tried."""


class Broken(Exception):
    """The environment does otherwise than the claim says."""


class LeftOut(Exception):
    """The claim could not be looked at."""


@dataclass(frozen=True)
class Finding:
    """What came of one claim. said: why it is broken or left out."""

    claim: str
    status: Literal["ok", "broken", "left out"]
    said: str = ""


@dataclass(frozen=True)
class Subject:
    """An environment, as the claims see it. replies: whole ones, as a policy says them."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    ask: Ask | None = None
    replies: Sequence[str] = ()

    @cached_property
    def make(self) -> Callable[[], Env]:
        return envs.make_env(self.name, self.options, self.ask)

    def scenarios(self, split: str, n: int | None, seed: int = 0) -> list[Scenario]:
        return envs.scenarios(self.name, self.options, split, n, seed)

    @cached_property
    def first(self) -> Scenario:
        found = self.scenarios("train", 1)
        if not found:
            raise Broken("the split train has no scenario")
        return found[0]

    def begun(self) -> Env:
        env = self.make()
        env.reset(self.first)
        return env

    def played(self, env: Env) -> list[Step]:
        """Acts until the episode is over, or long enough. Raises LeftOut where no reply can be read."""
        steps: list[Step] = []
        for reply in list(self.replies) * (LONGEST // max(1, len(self.replies)) + 1):
            with suppress(Malformed):  # it does not fit here, and is passed over
                steps.append(env.step(said(reply)))
                if over(steps[-1]):
                    break
        if not steps:
            raise LeftOut("wants replies that can be read: --reply TEXT, or REPLIES in the module")
        return steps

    def whole(self, env: Env) -> list[Step]:
        """The same, to the end. Raises LeftOut where none comes."""
        steps = self.played(env)
        if not over(steps[-1]):
            raise LeftOut(f"no episode ended within {len(steps)} replies; task.max_turns has to end it")
        return steps


def replies_of(name: str) -> Sequence[str]:
    """Replies that an environment can read, of the table here or its own REPLIES; () where there are none. Raises
    UsageError for an unknown name, and for REPLIES that are no texts.
    """
    if name in REPLIES:
        return [f"Thought: why not.\nAction: {action}" for action in REPLIES[name]]
    return envs.replies(name)


def said(reply: str) -> Message:
    return {"role": "assistant", "content": reply}


def over(step: Step) -> bool:
    return step.terminated or step.truncated


def has_options(s: Subject) -> None:
    for key, one in envs.options_of(s.name).model_fields.items():
        if one.is_required():
            raise Broken(f"the option {key} has no default")
        if not one.description:
            raise Broken(f"the option {key} has no description, which `turnwise stages` shows")


def has_scenarios(s: Subject) -> None:
    for split in SPLITS:
        some, everything = s.scenarios(split, 5, 3), s.scenarios(split, None, 3)
        if not some:
            raise Broken(f"the split {split} has no scenario")
        if some != s.scenarios(split, 5, 3):
            raise Broken(f"the split {split} is another one when it is asked for again")
        if len({one.id for one in everything}) < len(everything):
            raise Broken(f"two scenarios of the split {split} have one id")
        if not {one.id for one in some} <= {one.id for one in everything}:
            raise Broken(f"the first 5 scenarios of the split {split} are not among all of them")


def has_own_splits(s: Subject) -> None:
    seen: dict[str, str] = {}
    for split in SPLITS:
        for one in s.scenarios(split, None):
            if seen.setdefault(one.id, split) != split:
                raise Broken(f"the scenario {one.id!r} is in {seen[one.id]} and in {split}")


def begins(s: Subject) -> None:
    env = s.make()
    first = env.reset(s.first)
    if not env.system:
        raise Broken("after reset `system` is empty: it tells the policy what the task is")
    _ = env.tools  # checked as it is read
    _speaks(first)


def goes_on(s: Subject) -> None:
    for step in s.played(s.begun()):
        _speaks(step.messages)
        try:
            json.dumps(dict(step.info), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise Broken(f"info of a Step is no JSON: {error}") from None


def _speaks(messages: Sequence[Message]) -> None:
    if not all(message["content"] for message in messages):
        raise Broken("a message is empty; say what is seen, if only that nothing has changed")


def plays_again(s: Subject) -> None:
    one, other = s.make(), s.make()
    if one.reset(s.first) != other.reset(s.first):
        raise Broken("one scenario has two beginnings; draw from scenario.seed or scenario.data, and from nothing else")
    if s.played(one) != s.played(other):
        raise Broken(
            "the same replies to one scenario had two outcomes; draw from scenario.seed, and from nothing else"
        )


def forgets(s: Subject) -> None:
    env, anew = s.begun(), s.make()
    s.played(env)
    if env.reset(s.first) != anew.reset(s.first) or s.played(env) != s.played(anew):
        raise Broken("reset leaves something of the episode before")


def keeps_apart(s: Subject) -> None:
    alone = s.played(s.begun())
    one, other = s.begun(), s.begun()
    s.played(other)
    if s.played(one) != alone:
        raise Broken("two environments of one maker share something: keep it in the object")


def needs_no_more_than_json(s: Subject) -> None:
    stored = Scenario(s.first.task, s.first.split, s.first.id, json.loads(json.dumps(dict(s.first.data))))
    if s.make().reset(stored) != s.make().reset(s.first):
        raise Broken("a scenario that was stored as JSON begins otherwise")


def ends_once(s: Subject) -> None:
    env = s.make()
    for _ in range(2):
        for when in ("before reset", "after the end"):
            if when == "after the end":
                env.reset(s.first)
                s.whole(env)
            try:
                env.step(said(s.replies[0]))
            except Malformed:
                raise Broken(f"step {when} raised Malformed; raise RuntimeError: nobody acts there") from None
            except RuntimeError:
                continue
            raise Broken(f"step {when} acted; raise RuntimeError")


def refuses_and_keeps(s: Subject) -> None:
    env = s.begun()
    for text in UNREADABLE:
        try:
            if over(env.step(said(text))):
                return  # it reads any text
        except Malformed as error:
            if not str(error):
                raise Broken("Malformed without a text: the policy reads it, and has to learn what is wanted") from None
            continue
        env.reset(s.first)
    if s.played(env) != s.played(s.begun()):
        raise Broken("a reply that could not be read has changed the episode")


def reads_any_text(s: Subject) -> None:
    env, rng, until = s.make(), random.Random(0), time.monotonic() + ANY_TEXT_S
    words = [word for reply in s.replies for word in reply.split()] or ["go"]
    for _ in range(200):
        env.reset(s.first)
        for _ in range(10):
            parts = ("".join(rng.choices(string.printable + "äß漢🙂", k=rng.randrange(30))), rng.choice(words))
            text = rng.choice(("", "Action: ", "Thought: a\nAction: ")) + " ".join(rng.sample(parts, 2))
            try:
                if over(env.step(said(text))):
                    break
            except Malformed:
                continue
            except Exception as error:
                raise Broken(f"step raised {failure(error)} at {text[:60]!r}; raise Malformed") from error
        if time.monotonic() > until:
            return


def agrees_with_readable(s: Subject) -> None:
    if not envs.has(s.name, "readable"):
        raise LeftOut("the module exports no `readable`, which stages ask of actions that nobody takes")
    env = s.make()
    state: list[Message] = [{"role": "system", "content": ""}, *env.reset(s.first)]
    state[0]["content"] = env.system
    for text in islice(chain(UNREADABLE, s.replies, UNREADABLE, s.replies), LONGEST):
        read, answer = _read(s, state, text), _answer(env, text)
        if read != (answer is not None):
            raise Broken(f"readable {'accepts' if read else 'refuses'} {text[:60]!r}, and step does not")
        if answer is None:
            continue
        if over(answer):
            break
        state += [said(text), *answer.messages]


def _read(s: Subject, state: Sequence[Message], text: str) -> bool:
    try:
        envs.check_readable(s.name, s.options, state, text)
    except Malformed:
        return False
    return True


def _answer(env: Env, text: str) -> Step | None:
    try:
        return env.step(said(text))
    except Malformed:
        return None


def describes(s: Subject) -> None:
    if not envs.has(s.name, "describe"):
        raise LeftOut("the module exports no `describe`")
    env = s.make()
    messages = [{"role": "system", "content": env.system}, *env.reset(s.first)]
    steps = s.played(env)
    messages += [one for step in steps for one in step.messages]
    outcome = Outcome.SCORED if over(steps[-1]) else Outcome.TRUNCATED
    for episodes in ([], [Episode("e", s.first, None, outcome, tuple(messages), (), 0.0)]):
        envs.describe(s.name, s.options, episodes)


def leaves_no_thread(s: Subject) -> None:
    before = set(threading.enumerate())
    with suppress(LeftOut):
        s.played(s.begun())
    left = [one for one in threading.enumerate() if one not in before and not one.daemon]
    if left:
        raise Broken(
            f"the thread {left[0].name!r} goes on after the episode, and the command would not end; daemon=True"
        )


CLAIMS: Mapping[str, Callable[[Subject], None]] = {
    "every option has a default and a description": has_options,
    "each split has scenarios, in an order that the seed fixes": has_scenarios,
    "no scenario is in two splits": has_own_splits,
    "reset gives messages, and the system message is there": begins,
    "step gives messages, a finite reward, and one end at most": goes_on,
    "one scenario and the same replies give one episode": plays_again,
    "reset forgets the episode before": forgets,
    "two environments of one maker do not share an episode": keeps_apart,
    "a scenario that was stored as JSON begins as before": needs_no_more_than_json,
    "step before reset or after the end raises RuntimeError": ends_once,
    "a reply that cannot be read raises Malformed and changes nothing": refuses_and_keeps,
    "no text raises anything but Malformed": reads_any_text,
    "readable accepts what step can read, and nothing else": agrees_with_readable,
    "describe gives numbers, of no episode, too": describes,
    "no thread is left behind": leaves_no_thread,
}
"""Claim -> what raises Broken where it does not hold."""


def examine(subject: Subject) -> Iterator[Finding]:
    """One finding a claim, in their order. Raises UsageError for an unknown environment or option."""
    envs.checked_options(subject.name, subject.options)
    for claim, holds in CLAIMS.items():
        try:
            holds(subject)
        except LeftOut as why:
            yield Finding(claim, "left out", str(why))
        except Broken as why:
            yield Finding(claim, "broken", str(why))
        except TurnwiseError as error:
            yield Finding(claim, "broken", str(error).partition(" To find more of it")[0])
        except Exception as error:  # foreign code
            yield Finding(claim, "broken", failure(error))
        else:
            yield Finding(claim, "ok")
