"""verifiers' classic interface, the library itself: its own rollout and score beside ours. `make test-adapters` runs it
with 0.1.5 and 0.1.7.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

vf = pytest.importorskip("verifiers", reason="verifiers is not installed: make test-adapters")
if not hasattr(vf, "MultiTurnEnv"):
    pytest.skip("this verifiers has no classic interface: make test-adapters", allow_module_level=True)

from datasets import Dataset  # noqa: E402
from openai.types.chat import ChatCompletion  # noqa: E402

from stages import envs  # noqa: E402
from stages.adapters.verifiers_env import FromVerifiers, ToVerifiers, as_verifiers  # noqa: E402
from stages.frame.types import Malformed, Message, Scenario, Step, UsageError  # noqa: E402

QUESTION = [{"role": "user", "content": "What is 6 times 7?"}]
ROW: dict[str, Any] = {"prompt": QUESTION, "answer": "42", "task": "default", "info": {}, "example_id": 7}
CALL = 'Thought: a tool does it\nAction: {"name": "times", "arguments": {"a": 6, "b": 7}}'


def times(a: int, b: int) -> int:
    """The product of two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


def data() -> Any:
    return Dataset.from_list([{"question": "What is 6 times 7?", "answer": "42"}])


class Talk(vf.MultiTurnEnv):  # type: ignore[misc, name-defined]
    """Says "more" until there is an answer."""

    async def is_completed(self, messages: Any, state: Any, **kwargs: Any) -> bool:
        return bool(messages and "boxed" in str(messages[-1]["content"]) and messages[-1]["role"] == "assistant")

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [{"role": "user", "content": "more"}], state


def completion(content: str, calls: Sequence[Message] = ()) -> ChatCompletion:
    message = {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {})
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop", "logprobs": None}
    given = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    return ChatCompletion.model_validate(given)


def theirs(env: Any, replies: Sequence[ChatCompletion]) -> tuple[float, list[Message]]:
    """The library's own rollout and score, with replies in place of a model."""
    waiting: Iterator[ChatCompletion] = iter(replies)

    async def said(*args: Any, **kwargs: Any) -> ChatCompletion:
        return next(waiting)

    async def run() -> tuple[float, list[Message]]:
        env.get_model_response = said
        row = {key: value for key, value in ROW.items() if key != "example_id"}
        messages, state = await env.rollout(client=None, model="m", **row)
        known = {"prompt": QUESTION, "completion": messages, "answer": "42", "state": state, "task": "default"}
        score = await env.rubric.score_rollout(**known, info={}, example_id=7)
        return float(score.reward), messages

    return asyncio.run(run())


def ours(env: Any, replies: Sequence[str]) -> Step:
    played = FromVerifiers(env)
    played.reset(Scenario("v", "train", "x", ROW))
    steps = [played.step({"role": "assistant", "content": reply}) for reply in replies]
    assert not any(step.terminated for step in steps[:-1])
    return steps[-1]


def on_a_thread(function: Callable[[], Step]) -> Step:
    found: list[Step] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_tools_are_told_and_called_and_counted_as_the_library_counts_them() -> None:
    def counted() -> Any:
        rubric = vf.RubricGroup([vf.ToolRubric(tools=[times]), vf.Rubric(funcs=[lambda answer: 0.5])])
        rubric.rubrics[0].reward_weights = [1.0, 10.0]
        return vf.ToolEnv(tools=[times], dataset=data(), rubric=rubric, max_turns=5)

    played = FromVerifiers(counted())
    assert played.reset(Scenario("v", "train", "x", ROW)) == tuple(QUESTION)
    assert played.tools and "times" in played.system and '"name": "<tool>"' in played.system
    with pytest.raises(Malformed, match="not valid JSON"):
        played.step({"role": "assistant", "content": 'Action: {"name": "times"'})
    assert played.step({"role": "assistant", "content": CALL}).messages == (
        {"role": "user", "content": "Tool output: 42"},
    )
    last = played.step({"role": "assistant", "content": "It is 42."})

    call = {"id": "1", "type": "function", "function": {"name": "times", "arguments": '{"a": 6, "b": 7}'}}
    reward, messages = theirs(counted(), [completion("", [call]), completion("It is 42.")])
    assert messages[1]["content"] == "42"
    assert (last.reward, last.terminated) == (reward, True) == (11.5, True)


class Halved(vf.Rubric):  # type: ignore[misc, name-defined]
    """Overrides what verifiers lets it override."""

    async def score_rollout(self, *args: Any, **kwargs: Any) -> Any:
        score = await super().score_rollout(*args, **kwargs)
        score.reward /= 2
        return score


def by_parser(parser: Any, completion: list[Message]) -> float:
    return float(parser.parse_answer(completion) == "42")


def by_id(example_id: int | None = None) -> float:
    return float(example_id or 0)


@pytest.mark.parametrize(
    ("rubric", "wanted"),
    [
        (lambda: Halved(funcs=[by_parser], parser=vf.Parser(extract_fn=lambda text: text[-3:-1])), 0.5),
        # Each rubric of a group has its own parser, which the functions of the flattened group would not get.
        (
            lambda: vf.RubricGroup(
                [
                    vf.Rubric(funcs=[by_parser], parser=vf.Parser(extract_fn=lambda text: text[-3:-1])),
                    vf.Rubric(funcs=[by_parser], weights=[0.25], parser=vf.Parser(extract_fn=lambda text: "42")),
                    Halved(funcs=[lambda answer: 4.0]),
                ]
            ),
            3.25,
        ),
        (lambda: vf.Rubric(funcs=[by_id]), 7.0),
        (vf.MathRubric, 1.0),
    ],
)
def test_every_rubric_gives_the_reward_that_it_gives_there(rubric: Callable[[], Any], wanted: float) -> None:
    replies = ["hm", r"<think>6 times 7</think>\boxed{42}"]  # the parser of 0.1.5 wants a thought
    reward, _ = theirs(Talk(dataset=data(), rubric=rubric()), [completion(text) for text in replies])
    if rubric().get_reward_funcs() != [by_id] or vf.__version__ >= "0.1.6":  # 0.1.5 knows no example_id
        assert reward == wanted
    step = ours(Talk(dataset=data(), rubric=rubric()), replies)
    assert (step.reward, step.terminated) == (wanted, True)


def test_mathematics_is_scored_on_a_worker_thread_too() -> None:
    env = Talk(dataset=data(), rubric=vf.MathRubric())
    assert on_a_thread(lambda: ours(env, [r"<think>hm</think>\boxed{\frac{84}{2}}"])).reward == 1.0
    assert on_a_thread(lambda: ours(env, [r"<think>hm</think>\boxed{41}"])).reward == 0.0


def test_mathematics_that_takes_too_long_is_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    from math_verify import parser

    env = Talk(dataset=data(), rubric=vf.MathRubric())
    FromVerifiers(env)  # lets math-verify run on threads
    monkeypatch.setattr(parser, "extract_target_from_pred", lambda *args, **kwargs: threading.Event().wait(30))
    played = FromVerifiers(env)
    played.reset(Scenario("v", "train", "x", ROW))
    with pytest.raises(RuntimeError, match="could not decide within 5 s"):
        played.step({"role": "assistant", "content": r"<think>hm</think>\boxed{42}"})


def broken(answer: str) -> float:
    raise ConnectionError("the judge is gone")


@pytest.mark.parametrize(
    "rubric",
    [lambda: vf.Rubric(funcs=[broken]), lambda: vf.RubricGroup([vf.Rubric(funcs=[by_parser]), Halved(funcs=[broken])])],
)
def test_a_reward_function_that_raises_is_no_reward(rubric: Callable[[], Any]) -> None:
    assert theirs(Talk(dataset=data(), rubric=rubric()), [completion(r"\boxed{42}")])[0] == 0.0  # what is avoided
    with pytest.raises(ConnectionError, match="the judge is gone"):
        ours(Talk(dataset=data(), rubric=rubric()), [r"\boxed{42}"])


class Ranked(vf.Rubric):  # type: ignore[misc, name-defined]
    async def score_rollouts(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError


def test_a_rubric_that_ranks_episodes_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Ranked\.score_rollouts scores episodes as a group"):
        FromVerifiers(Talk(dataset=data(), rubric=vf.RubricGroup([Ranked(funcs=[broken])])))


def test_its_loop_plays_ours_to_the_end() -> None:
    scenarios = envs.scenarios("twenty_questions", {}, "train", 1, 0)
    env = as_verifiers(ToVerifiers(envs.make_env("twenty_questions", {}), scenarios, max_turns=30))
    row = env.get_dataset()[0]
    asked = ["Action: Is it alive?", f"Action: Is it a {scenarios[0].data['object']}?"]
    waiting = iter(completion(text) for text in asked)

    async def said(*args: Any, **kwargs: Any) -> ChatCompletion:
        return next(waiting)

    async def run() -> tuple[float, list[Message]]:
        env.get_model_response = said
        given = {key: row[key] for key in ("prompt", "answer", "task", "info")}
        messages, state = await env.rollout(client=None, model="m", **given)
        score = await env.rubric.score_rollout(completion=messages, state=state, **given)
        return float(score.reward), messages

    reward, messages = asyncio.run(run())
    assert reward == 1.0 and messages[-1]["content"].endswith("You win.")
