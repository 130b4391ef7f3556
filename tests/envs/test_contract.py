"""What every environment of stages/envs must do, whatever its task."""

from __future__ import annotations

import json
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
from stages.frame.types import Ask, Env, Malformed, Message, Scenario, Step, UsageError

NAMES = envs.environments()
SPLITS = ("train", "validation", "test")
# Readable actions of each environment, in an order that brings any episode to its end when gone through again and
# again.
ACTIONS: dict[str, list[str]] = {
    "game24": ["expand 0: 1 + 1 = 2", "submit 0"],
    "math": ["41"],
    "service_desk": ["check photo", "give voucher", "log ledger", "close phone"],
    "sums": ["1 + 1 = 2"],
    "tau_bench": ['{"name": "get_user_details", "arguments": {"user_id": "ann_1"}}', "hello", "bye"],
    "twenty_questions": ["Is it alive?", "What is it?"],
    "wiki_search": ["NAVIGATE nowhere", "FIND(born)", "SAVE_LINE_IDS 1", "BACK", "SUBMIT nothing"],
}

# Environments that ship no data, or need somebody inside: a miniature made by the tests, and a person who talks by
# rule.
_FOLDER = tempfile.TemporaryDirectory()
OPTIONS: dict[str, dict[str, Any]] = {"tau_bench": {"path": tau_small.write(Path(_FOLDER.name))}}
ASK: dict[str, Ask] = {"tau_bench": tau_small.customer}

# Replies that no environment can read, and those of one that reads the whole reply and not an action in it.
UNREADABLE = ("", " ", "hello", "Thought: hm", "Thought: hm\nAction:", "Action: \n", "%%%")
UNREADABLE_TO = {"math": ("", " ", "\n\n")}


def reply(action: str) -> Message:
    return {"role": "assistant", "content": f"Thought: why not.\nAction: {action}"}


def maker(name: str) -> Callable[[], Env]:
    return envs.make_env(name, OPTIONS.get(name, {}), ASK.get(name))


def scenarios(name: str, split: str, n: int | None, seed: int) -> list[Scenario]:
    return envs.scenarios(name, OPTIONS.get(name, {}), split, n, seed)


def first(name: str, split: str = "train") -> Scenario:
    return scenarios(name, split, 1, 0)[0]


def finish(env: Env, name: str) -> list[Step]:
    """Act until the episode is over. An action that does not fit is passed over."""
    steps: list[Step] = []
    for action in ACTIONS[name] * 100:
        try:
            steps.append(env.step(reply(action)))
        except Malformed:
            continue
        if steps[-1].terminated or steps[-1].truncated:
            return steps
    raise AssertionError("the episode never ends")


def test_environments_are_found_and_have_actions_here() -> None:
    assert sorted(ACTIONS) == NAMES
    assert NAMES


@pytest.mark.parametrize("name", NAMES)
def test_same_scenario_gives_the_same_episode(name: str) -> None:
    make = maker(name)
    one, other = make(), make()
    assert one.reset(first(name)) == other.reset(first(name))
    assert finish(one, name) == finish(other, name)
    # A used environment forgets: nothing of the last episode is left after a reset.
    assert one.reset(first(name)) == make().reset(first(name))
    assert finish(one, name) == finish(make_and_reset(make, name), name)


def make_and_reset(make: Callable[[], Env], name: str) -> Env:
    env = make()
    env.reset(first(name))
    return env


@pytest.mark.parametrize("name", NAMES)
def test_environments_of_one_maker_do_not_share_an_episode(name: str) -> None:
    make = maker(name)
    alone = finish(make_and_reset(make, name), name)
    one, other = make_and_reset(make, name), make_and_reset(make, name)
    finish(other, name)
    assert finish(one, name) == alone


@pytest.mark.parametrize("name", NAMES)
def test_messages_and_scenarios_are_json(name: str) -> None:
    env = maker(name)()
    scenario = first(name)
    assert json.loads(json.dumps(dict(scenario.data))) == dict(scenario.data)
    # What comes back from a store is enough to play the same episode.
    stored = Scenario(scenario.task, scenario.split, scenario.id, json.loads(json.dumps(dict(scenario.data))))
    start = env.reset(stored)
    steps = finish(env, name)
    for message in (*start, *(message for step in steps for message in step.messages)):
        assert json.loads(json.dumps(message)) == message
        assert message["role"] in ("user", "tool")
        assert isinstance(message["content"], str)
        assert message["content"]
    assert json.dumps([dict(tool) for tool in env.tools]) is not None
    assert json.dumps([dict(step.info) for step in steps]) is not None
    assert isinstance(env.system, str)
    assert env.system


@pytest.mark.parametrize("name", NAMES)
def test_episode_ends_once_terminated_xor_truncated(name: str) -> None:
    env = maker(name)()
    env.reset(first(name))
    *before, last = finish(env, name)
    assert not any(step.terminated or step.truncated for step in before)
    assert last.terminated != last.truncated
    assert all(0.0 <= step.reward <= 1.0 for step in (*before, last))
    assert all(step.reward == 0.0 for step in before)


@pytest.mark.parametrize("name", NAMES)
def test_step_before_the_start_or_after_the_end_raises(name: str) -> None:
    env = maker(name)()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="reset"):
            env.step(reply(ACTIONS[name][0]))
        env.reset(first(name))
        finish(env, name)


@pytest.mark.parametrize("name", NAMES)
def test_malformed_reply_raises_malformed_and_changes_nothing(name: str) -> None:
    make = maker(name)
    env = make_and_reset(make, name)
    for content in UNREADABLE_TO.get(name, UNREADABLE):
        with pytest.raises(Malformed) as caught:
            env.step({"role": "assistant", "content": content})
        assert str(caught.value)
    assert finish(env, name) == finish(make_and_reset(make, name), name)


MADE = {name: maker(name)() for name in NAMES}
FIRST = {name: first(name) for name in NAMES}
WORDS = [word for actions in ACTIONS.values() for action in actions for word in action.split()]
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
        *UNREADABLE_TO.get(name, UNREADABLE),
        "Action: no such thing",
        'Action: {"name": "no_such_tool", "arguments": {}}',
    ]
    right = [str(reply(action)["content"]) for action in ACTIONS[name]]
    accepted, refused = agree(name, maker(name)(), first(name), [*wrong[: -2 if name == "math" else None], *right * 3])
    assert accepted > 0 and refused > 0


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(PIECES, max_size=12), action=st.integers(0, 9))
def test_readable_and_step_agree_on_any_text_at_any_step(name: str, pieces: list[str], action: int) -> None:
    acts = [str(reply(text)["content"]) for text in ACTIONS[name]]
    agree(
        name,
        MADE[name],
        FIRST[name],
        [*acts[: action % len(acts)], "Action: " + "".join(pieces), acts[action % len(acts)], "".join(pieces)],
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("split", SPLITS)
def test_scenarios_are_deterministic_and_carry_their_task_and_split(name: str, split: str) -> None:
    some = scenarios(name, split, 5, 3)
    assert some == scenarios(name, split, 5, 3)
    assert 0 < len(some) <= 5
    everything = scenarios(name, split, None, 3)
    assert len({s.id for s in everything}) == len(everything)
    assert {(s.task, s.split) for s in everything} == {(name, split)}
    assert {s.id for s in some} <= {s.id for s in everything}


@pytest.mark.parametrize("name", NAMES)
def test_held_out_splits_share_no_scenario_with_train(name: str) -> None:
    found = [{s.id for s in scenarios(name, split, None, 0)} for split in SPLITS]
    assert len(set().union(*found)) == sum(map(len, found))


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
