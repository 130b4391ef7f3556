"""What every environment of stages/envs must do, whatever its task."""

from __future__ import annotations

import random
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tau_small
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from stages import envs
from stages.envs.suite import CLAIMS, REPLIES, UNREADABLE, Subject, examine, replies_of
from stages.frame.types import Ask, Env, Malformed, Message, Scenario, Step, UsageError

NAMES = envs.environments()
# Environments that ship no data, or need somebody inside: a miniature made by the tests, and a person who talks by
# rule.
_FOLDER = tempfile.TemporaryDirectory()
OPTIONS: dict[str, dict[str, Any]] = {"tau_bench": {"path": tau_small.write(Path(_FOLDER.name))}}
ASK: dict[str, Ask] = {"tau_bench": tau_small.customer}


def maker(name: str) -> Callable[[], Env]:
    return envs.make_env(name, OPTIONS.get(name, {}), ASK.get(name))


def subject(name: str) -> Subject:
    return Subject(name, OPTIONS.get(name, {}), ASK.get(name), replies_of(name))


def test_environments_are_found_and_have_replies_in_the_suite() -> None:
    assert sorted(REPLIES) == NAMES
    assert NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_claim_of_the_suite_holds(name: str) -> None:
    found = list(examine(subject(name)))
    assert [one for one in found if one.status == "broken"] == []
    assert {one.claim for one in found if one.status == "left out"} <= {"describe gives numbers, of no episode, too"}
    assert len(found) == len(CLAIMS)


@pytest.mark.parametrize("name", NAMES)
def test_a_reward_is_a_share_of_one_and_is_paid_at_the_end(name: str) -> None:
    one = subject(name)
    *before, last = one.whole(one.begun())
    assert all(step.reward == 0.0 for step in before)
    assert 0.0 <= last.reward <= 1.0
    assert {(each.task, each.split) for each in one.scenarios("train", None)} == {(name, "train")}


MADE = {name: maker(name)() for name in NAMES}
FIRST = {name: subject(name).first for name in NAMES}
WORDS = [word for actions in REPLIES.values() for action in actions for word in action.split()]
PIECES = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["Thought:", "Action:", "action :", "Observation:", "\n", "?", " ", "{", "}", "%s", "\x00", "give", *WORDS]
    ),
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(PIECES, max_size=12), head=st.sampled_from(["", "Action: ", "Thought: x\nAction: "]))
def test_no_text_raises_anything_but_malformed(name: str, pieces: list[str], head: str) -> None:
    env = MADE[name]
    env.reset(FIRST[name])
    content = head + "".join(pieces)
    for _ in range(3):
        try:
            step = env.step({"role": "assistant", "content": content})
        except Malformed:
            return
        assert not (step.terminated and step.truncated)
        if step.terminated or step.truncated:
            return


@pytest.mark.parametrize("name", NAMES)
def test_no_random_characters_break_a_whole_episode(name: str) -> None:
    env, rng = MADE[name], random.Random(0)
    for _ in range(200):
        env.reset(FIRST[name])
        for _ in range(30):
            text = "".join(rng.choices(string.printable + "äß漢🙂", k=rng.randrange(60)))
            try:
                step = env.step(
                    {"role": "assistant", "content": rng.choice(["", "Action: ", "Thought: a\nAction: "]) + text}
                )
            except Malformed:
                continue
            if step.terminated or step.truncated:
                break


# What a step answers with, instead of Malformed, where the benchmark answers a call that nobody should learn; all other
# environments refuse alike.
ANSWERED = {"tau_bench": "API output: Unknown action"}


def told_and_read(name: str, env: Env, state: list[Message], content: str) -> tuple[bool, Step | None]:
    """(whether `readable` accepts the reply, what `step` makes of it: None = Malformed); the state grows by both."""
    message = {"role": "assistant", "content": content}
    try:
        envs.check_readable(name, OPTIONS.get(name, {}), state, content)
        told = True
    except Malformed:
        told = False
    try:
        step = env.step(message)
    except Malformed as error:
        state += [message, {"role": "user", "content": str(error)}]
        return told, None
    state += [message, *step.messages]
    return told, step


def agree(name: str, env: Env, scenario: Scenario, contents: list[str]) -> tuple[int, int]:
    """Says them all, up to the end; how many were accepted, and refused."""
    state: list[Message] = [{"role": "system", "content": env.system}, *env.reset(scenario)]
    accepted = refused = 0
    for content in contents:
        told, step = told_and_read(name, env, state, content)
        accepted, refused = accepted + told, refused + (not told)
        if not told and step is not None and name in ANSWERED:
            assert str(step.messages[0]["content"]).startswith(ANSWERED[name])
        else:
            assert told == (step is not None), content
        if step is not None and (step.terminated or step.truncated):
            break
    return accepted, refused


@pytest.mark.parametrize("name", NAMES)
def test_what_readable_refuses_step_cannot_read_and_what_step_reads_readable_accepts(name: str) -> None:
    wrong = [
        *(("", " ", "\n\n") if name == "math" else UNREADABLE),
        "Action: no such thing",
        'Action: {"name": "no_such_tool", "arguments": {}}',
    ]
    right = [*replies_of(name)]
    accepted, refused = agree(name, maker(name)(), FIRST[name], [*wrong[: -2 if name == "math" else None], *right * 3])
    assert accepted > 0 and refused > 0


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(PIECES, max_size=12), action=st.integers(0, 9))
def test_readable_and_step_agree_on_any_text_at_any_step(name: str, pieces: list[str], action: int) -> None:
    acts = [*replies_of(name)]
    agree(
        name,
        MADE[name],
        FIRST[name],
        [*acts[: action % len(acts)], "Action: " + "".join(pieces), acts[action % len(acts)], "".join(pieces)],
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_option_has_a_default_and_a_sentence(name: str) -> None:
    config: type[BaseModel] = envs.options_of(name)
    config()
    for key, field in config.model_fields.items():
        assert field.description, key
        assert "[" in field.description, f"{key} names no source"


@pytest.mark.parametrize("name", NAMES)
def test_unknown_option_names_the_nearest_right_one(name: str) -> None:
    key = next(iter(envs.options_of(name).model_fields))
    for call in (lambda o: envs.make_env(name, o), lambda o: envs.scenarios(name, o, "train", 1, 0)):
        with pytest.raises(UsageError, match=rf"did you mean '{key}'\? Options: "):
            call({key[:-1] + "x": 1})
        with pytest.raises(UsageError, match=f"options.{key} of {name}"):
            call({key: object()})


def test_unknown_environment_names_the_nearest_right_one() -> None:
    for call in (lambda name: envs.make_env(name, {}), lambda name: envs.scenarios(name, {}, "train", 1, 0)):
        with pytest.raises(UsageError, match=r"did you mean 'service_desk'\? Known: "):
            call("servicedesk")
        with pytest.raises(UsageError, match=r"there is no environment 'x+'\. Known: "):
            call("xxxx")
        for name in ("objects", "oracle", "os", "../x", "", "__init__"):
            with pytest.raises(UsageError, match="there is no environment"):
                call(name)


def test_environments_import_neither_torch_nor_an_llm() -> None:
    code = "import sys; from stages import envs; envs.environments(); print([m for m in ('torch', 'transformers', 'openai') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
