"""The scripted engine: ids by content, limits, seeds, planned failures, and a whole episode of every role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages import envs
from stages.envs import service_desk
from stages.frame.react import parse_react
from stages.frame.types import EngineUnavailable, Malformed, Message, Request
from stages.llm.roles import load_roles, parse_evaluation, parse_future
from stages.llm.scripted import END_ID, GARBAGE, VOCABULARY, ScriptedEngine, log_prob, play

CHAT: list[Message] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße, wie geht's?"}]


def ask(engine: ScriptedEngine, text: str, **changes: object) -> Request:
    given = {"max_tokens": 256, "temperature": 1.0, "seed": 1, **changes}
    return Request(engine.encode([{"role": "user", "content": text}]), **given)  # type: ignore[arg-type]


def test_ids_follow_from_the_text_alone_and_give_it_back() -> None:
    one, other = ScriptedEngine(), ScriptedEngine()
    other.encode([{"role": "user", "content": "something else first"}])
    assert one.encode(CHAT) == other.encode(CHAT)
    assert one.decode(one.encode(CHAT)) == "<system>\nBe brief.\n<user>\nGrüße, wie geht's?\n<assistant>\n"
    assert max(one.encode(CHAT)) < VOCABULARY


def test_prompt_and_reply_are_the_beginning_of_the_next_prompt() -> None:
    engine = ScriptedEngine(lambda prompt, request: "Gut.")
    ids = engine.encode(CHAT)
    (reply,) = engine.generate([Request(ids, 99, 1.0, 0)])
    after = engine.encode([*CHAT, {"role": "assistant", "content": reply.text}, {"role": "user", "content": "Ja."}])
    assert after[: len(ids) + len(reply.token_ids)] == ids + reply.token_ids


def test_completion_ends_with_the_end_token_or_at_max_tokens() -> None:
    engine = ScriptedEngine({"hello": "abcdef"})
    whole, cut = engine.generate([ask(engine, "hello"), ask(engine, "hello", max_tokens=3)])
    assert (whole.text, whole.finish_reason, whole.token_ids[-1]) == ("abcdef", "stop", END_ID)
    assert (cut.text, cut.finish_reason, len(cut.token_ids)) == ("abc", "length", 3)


def test_log_probs_are_one_a_token_and_fixed_by_its_id() -> None:
    engine = ScriptedEngine({"hello": "aba"})
    (done,) = engine.generate([ask(engine, "hello")])
    assert done.log_probs == tuple(log_prob(i) for i in done.token_ids)
    assert done.log_probs[0] == done.log_probs[2] != done.log_probs[1]
    assert all(-2 <= log_prob(i) < 0 for i in range(VOCABULARY))


def test_longest_key_wins_and_an_unknown_prompt_is_a_bug_of_the_test() -> None:
    engine = ScriptedEngine({"cat": "short", "cat food": "long"})
    assert [c.text for c in engine.generate([ask(engine, "a cat"), ask(engine, "cat food")])] == ["short", "long"]
    with pytest.raises(LookupError, match="dog"):
        engine.generate([ask(engine, "dog")])


def test_seed_decides_and_batch_order_does_not() -> None:
    engine = ScriptedEngine({"roll": [str(n) for n in range(1000)]})
    requests = [ask(engine, "roll", seed=seed) for seed in range(20)]
    forward = [c.text for c in engine.generate(requests)]
    assert forward == [c.text for c in engine.generate(requests[::-1])][::-1]
    assert len(set(forward)) > 15
    assert {c.text for c in engine.generate([ask(engine, "roll", seed=s, temperature=0.0) for s in range(5)])} == {"0"}


def test_calls_fail_and_answer_garbage_when_told_to() -> None:
    engine = ScriptedEngine({"hello": "fine"}, fail_on=[2], garbage_on=[3])
    request = ask(engine, "hello")
    assert engine.generate([request])[0].text == "fine"
    with pytest.raises(EngineUnavailable, match="call 2"):
        engine.generate([request])
    assert engine.generate([request])[0].text == GARBAGE
    assert engine.generate([request])[0].text == "fine"
    assert (engine.calls, len(engine.requests), len(engine.prompts)) == (4, 4, 4)
    for parse in (parse_react, parse_future, parse_evaluation):
        with pytest.raises(Malformed):
            parse(GARBAGE)


def test_adapter_must_have_been_loaded(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda prompt, request: f"by {request.adapter}")
    with pytest.raises(EngineUnavailable, match="'a1' was never loaded"):
        engine.generate([ask(engine, "x", adapter="a1")])
    engine.load_adapter("a1", tmp_path)
    engine.load_adapter("a1", tmp_path)
    assert engine.generate([ask(engine, "x", adapter="a1")])[0].text == "by a1"


@pytest.mark.parametrize("env", ["service_desk", "twenty_questions"])
def test_default_script_plays_an_episode_and_every_role(env: str) -> None:
    engine, roles = ScriptedEngine(), load_roles(env)
    scenario = envs.scenarios(env, {}, "train", 1, 0)[0]
    game = envs.make_env(env, {})()
    messages = [{"role": "system", "content": game.system}, *game.reset(scenario)]
    over = False
    while not over:
        (reply,) = engine.generate([Request(engine.encode(roles.policy(messages)), 256, 1.0, len(messages))])
        step = game.step({"role": "assistant", "content": reply.text})  # every reply is readable: it never raises
        messages += [{"role": "assistant", "content": reply.text}, *step.messages]
        over = step.terminated or step.truncated

    def said(role: str, **fields: str) -> str:
        return engine.generate([Request(engine.encode(roles.prompt(role, messages[:2], **fields)), 256, 1.0, 3)])[
            0
        ].text

    thought, action = parse_react(str(messages[2]["content"]))
    known = {"action": action, "thought": thought}
    future = said("successor", **known)
    parse_future(future)
    combined = said("combine", observation="o", reward="0", future=future, **known)
    parse_future(combined)
    evaluation = said("evaluator", futures=f"1. {future}", **known)
    parse_evaluation(evaluation)
    refined = said("refiner", evaluation=evaluation, **known)
    assert parse_react(refined)[1].split()[0] == action.split()[0]
    assert said("corrector", text=refined, **known) == refined


@pytest.mark.parametrize("options", [{}, {"requests": 8, "tiers": 6, "steps": 4}, {"describe_tools": True}])
def test_default_script_tries_every_option_of_a_desk_of_any_size(options: dict[str, Any]) -> None:
    system = envs.make_env("service_desk", options)().system
    for done, (tool, _, choices) in enumerate(service_desk.steps_of(service_desk.Options(**options))):
        prompt = f"<system>\n{system}\n<user>\nAna, gold, wants refund for lamp.{' x done.' * done}\n<assistant>\n"
        said = {play(prompt, Request((), 1, 1.0, seed)) for seed in range(200)}
        assert {text.split("Action: ")[1] for text in said} == {f"{tool} {option}" for option in choices}
