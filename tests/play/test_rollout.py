"""Rollouts: whose failure is whose, what is tried again, and that neither slots nor neighbours change an episode."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
from rollout_play import MIXED, ROLES, SETTINGS, Toy, scenario, speak, toy, without_time

from stages.frame.sections import RolesConfig, TaskConfig
from stages.frame.types import EngineUnavailable, Episode, Message, Outcome, Request, Scenario, Step, TurnwiseError
from stages.llm.roles import Roles
from stages.llm.scripted import ScriptedEngine
from stages.play.rollout import GIVEN_UP, rollout, rollout_settings
from stages.play.tally import check_environment, summary


def one(*events: str, earlier: Sequence[Sequence[str]] = (), **changes: Any) -> Episode:
    (episode,) = rollout(
        ScriptedEngine(speak), toy(), [scenario("s", *events, earlier=earlier)], ROLES, replace(SETTINGS, **changes)
    )
    return episode


@pytest.mark.parametrize(
    ("events", "outcome", "turns", "reward"),
    [
        (["win"], Outcome.SCORED, 1, 1.0),
        (["say", "say", "lose"], Outcome.SCORED, 3, 0.0),
        (["say", "malformed", "win"], Outcome.SCORED, 3, 1.0),
        (["malformed", "say", "malformed"], Outcome.POLICY_FAILED, 3, 0.0),
        (["say", "cut"], Outcome.TRUNCATED, 2, 0.0),
        (["say"] * 9, Outcome.TRUNCATED, 4, 0.0),
        (["say", "say", "say", "malformed"], Outcome.TRUNCATED, 4, 0.0),
        (["say", "say", "say", "win"], Outcome.SCORED, 4, 1.0),  # over in its last turn is over, not cut
        (
            ["say", "malformed", "say", "malformed"],
            Outcome.POLICY_FAILED,
            4,
            0.0,
        ),  # failed in its last turn is failed, not cut
        (["say", "raise"], Outcome.ENV_FAILED, 1, 0.0),
        (["reset raise"], Outcome.ENV_FAILED, 0, 0.0),
        (["say", "simulator"], Outcome.SIMULATOR_FAILED, 1, 0.0),
        (["oracle down"], Outcome.SIMULATOR_FAILED, 0, 0.0),
        (["reset simulator"], Outcome.SIMULATOR_FAILED, 0, 0.0),
        (["reset oracle down"], Outcome.SIMULATOR_FAILED, 0, 0.0),
    ],
)
def test_outcomes(events: list[str], outcome: Outcome, turns: int, reward: float) -> None:
    episode = one(*events)
    assert (episode.outcome, len(episode.turns), episode.total_reward) == (outcome, turns, reward)
    ended = outcome in (Outcome.SCORED, Outcome.POLICY_FAILED)
    flags = [(t.terminated, t.truncated) for t in episode.turns]
    if outcome.trainable:
        assert flags == [(False, False)] * (turns - 1) + [(ended, not ended)]
        assert episode.attempts == 1
    else:
        assert flags == [(False, False)] * turns
        assert episode.attempts == SETTINGS.attempts
        assert episode.error


@pytest.mark.parametrize(
    ("events", "outcome", "turns"),
    [
        (["say"] * 9, Outcome.SCORED, 4),
        (["say", "say", "say", "malformed"], Outcome.SCORED, 4),
        (["say", "cut"], Outcome.TRUNCATED, 2),
        (["say", "say", "say", "cut"], Outcome.TRUNCATED, 4),  # the environment's own word stands
        (["say", "malformed", "say", "malformed"], Outcome.POLICY_FAILED, 4),
    ],
)
def test_a_limit_that_the_task_counts_as_lost_ends_an_episode(events: list[str], outcome: Outcome, turns: int) -> None:
    episode = one(*events, limit_ends=True)
    assert (episode.outcome, len(episode.turns), episode.total_reward) == (outcome, turns, 0.0)
    cut = outcome == Outcome.TRUNCATED
    assert [(t.terminated, t.truncated) for t in episode.turns] == [(False, False)] * (turns - 1) + [(not cut, cut)]


def test_the_task_s_config_says_what_its_limit_is() -> None:
    for at_limit in ("truncated", "terminated"):
        run = SimpleNamespace(task=TaskConfig(at_limit=at_limit), roles=RolesConfig())
        context: Any = SimpleNamespace(run=run)
        assert rollout_settings(context, None, seed=0).limit_ends == (at_limit == "terminated")


@pytest.mark.parametrize("n", range(1, 33))
def test_an_episode_that_is_paid_by_shares_is_won_with_all_of_them_and_with_no_fewer(n: int) -> None:
    """Of 1 / n. Added one by one they are less than 1 for 6, 7, 10 and most n from 13 on."""
    turn = one("win").turns[0]
    paid = [replace(turn, index=k, reward=1 / n) for k in range(n)]
    assert replace(one("win"), turns=tuple(paid)).won
    assert not replace(one("win"), turns=(*paid[1:], replace(turn, reward=0.0))).won


def test_an_error_keeps_its_name() -> None:
    assert one("raise").error == "KeyError: 'door'"
    assert one("simulator").error == "the user is silent"


def test_an_unreadable_reply_is_a_turn_that_is_told_what_was_wrong() -> None:
    replies = iter(["mumble", "Action: go"])
    engine = ScriptedEngine(lambda prompt, request: next(replies))
    (episode,) = rollout(engine, toy(), [scenario("s", "win")], ROLES, SETTINGS)
    assert [(t.malformed, t.action, t.observation) for t in episode.turns] == [
        (True, "", "no 'Action:' in the reply"),
        (False, "go", "win after on: go"),
    ]
    assert episode.outcome == Outcome.SCORED
    assert [m["content"] for m in episode.messages[2:4]] == ["mumble", "no 'Action:' in the reply"]


@pytest.mark.parametrize("allowance", [0, 1, 2])
def test_malformed_allowance_is_how_many_are_forgiven(allowance: int) -> None:
    for n in range(4):
        episode = one(*["malformed"] * n, "win", malformed_allowance=allowance)
        assert (episode.outcome == Outcome.SCORED) == (n <= allowance)
        assert sum(t.malformed for t in episode.turns) == min(n, allowance + 1)


def test_what_the_policy_did_not_cause_is_tried_again_from_the_start() -> None:
    again = one("say", "win", earlier=[["say", "say", "simulator"], ["reset raise"]])
    assert (again.outcome, again.attempts, len(again.turns), again.error) == (Outcome.SCORED, 3, 2, "")
    assert again.messages[1]["content"] == "start s"
    gone = one("say", "win", earlier=[["simulator"]] * 3)
    assert (gone.outcome, gone.attempts) == (Outcome.SIMULATOR_FAILED, 3)


def test_what_the_policy_caused_is_never_tried_again() -> None:
    engine = ScriptedEngine(lambda prompt, request: "mumble")
    (episode,) = rollout(engine, toy(), [scenario("s", "win")], ROLES, SETTINGS)
    assert (episode.outcome, episode.attempts, engine.calls) == (Outcome.POLICY_FAILED, 1, 2)


def test_another_attempt_draws_other_replies() -> None:
    engine = ScriptedEngine(speak)
    rollout(engine, toy(), [scenario("s", "win", earlier=[["raise"]] * 2)], ROLES, SETTINGS)
    assert len({r.seed for r in engine.requests}) == len(engine.requests) == 3


def test_a_policy_engine_that_is_down_ends_the_stage() -> None:
    with pytest.raises(EngineUnavailable):
        rollout(ScriptedEngine(speak, fail_on=[2]), toy(), [scenario("s", "say", "win")], ROLES, SETTINGS)


@pytest.mark.parametrize("slots", [1, 2, 3, 100])
def test_slots_do_not_change_the_episodes(slots: int) -> None:
    together = rollout(ScriptedEngine(speak), toy(), MIXED, ROLES, SETTINGS)
    found = rollout(ScriptedEngine(speak), toy(), MIXED, ROLES, replace(SETTINGS, slots=slots))
    assert [without_time(e) for e in found] == [without_time(e) for e in together]
    assert [e.scenario.id for e in found] == list("abcdefg")
    assert len({t.completion.text for e in found for t in e.turns}) > 5


def test_neighbours_do_not_change_an_episode() -> None:
    whole = rollout(ScriptedEngine(speak), toy(), MIXED, ROLES, SETTINGS)
    beside_others = [MIXED[0], *(scenario("z", "win") for _ in MIXED[1:-1]), MIXED[-1]]
    found = rollout(ScriptedEngine(speak), toy(), beside_others, ROLES, SETTINGS)
    assert [without_time(found[i]) for i in (0, -1)] == [without_time(whole[i]) for i in (0, -1)]


def test_one_scenario_many_times_is_many_different_episodes() -> None:
    found = rollout(ScriptedEngine(speak), toy(), [MIXED[0]] * 6, ROLES, SETTINGS)
    assert len({e.id for e in found}) == 6
    assert len({e.turns[0].completion.text for e in found}) > 1
    assert {e.id for e in found}.isdisjoint(
        e.id for e in rollout(ScriptedEngine(speak), toy(), [MIXED[0]] * 6, ROLES, replace(SETTINGS, seed=6))
    )


def test_a_finished_episode_is_replaced_at_once() -> None:
    """Two slots, one episode of 4 turns and four of 1: 4 calls; filled in pairs that wait for each other it would be 6."""
    engine = ScriptedEngine(speak)
    short = [scenario(f"s{i}", "win") for i in range(4)]
    sizes = []
    generate = engine.generate

    def counted(requests: Sequence[Request]) -> Any:
        sizes.append(len(requests))
        return generate(requests)

    engine.generate = counted  # type: ignore[method-assign]
    rollout(engine, toy(), [scenario("long", "say", "say", "say", "win"), *short], ROLES, replace(SETTINGS, slots=2))
    assert sizes == [2, 2, 2, 2]


def test_every_episode_is_reported_done_once() -> None:
    seen: list[int] = []
    rollout(ScriptedEngine(speak), toy(), MIXED, ROLES, replace(SETTINGS, slots=2), done=seen.append)
    assert seen == [1] * len(MIXED)


def test_ids_and_log_probs_recorded_are_those_produced() -> None:
    engine = models.Recorder(speak)
    engine.load_adapter("mine", Path("x"))
    settings = replace(SETTINGS, adapter="mine")
    episodes = rollout(engine, toy(), MIXED, Roles("toy", {"policy": "Be brief."}), settings)
    produced = {
        (r.prompt_ids, c.token_ids, c.log_probs) for r, c in zip(engine.requests, engine.completions, strict=True)
    }
    for episode in episodes:
        for turn in episode.turns:
            assert (turn.prompt_ids, turn.completion.token_ids, turn.completion.log_probs) in produced
            state: list[Message] = list(episode.messages[: turn.state_len])
            state[0] = {"role": "system", "content": "Toy.\n\nBe brief."}
            assert turn.prompt_ids == engine.encode(state)
            assert episode.messages[turn.state_len] == {"role": "assistant", "content": turn.completion.text}
            assert engine.decode(turn.completion.token_ids) == turn.completion.text
    assert {r.adapter for r in engine.requests} == {"mine"} == {e.adapter for e in episodes}
    assert {(r.max_tokens, r.temperature) for r in engine.requests} == {(100, 1.0)}


class Slow(Toy):
    """Each step and reset waits until three environments wait, or half a minute is over."""

    meeting = threading.Barrier(3)

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        self.meeting.wait(30)
        return super().reset(scenario)

    def step(self, message: Message) -> Step:
        self.meeting.wait(30)
        return super().step(message)


def test_environments_that_wait_do_so_side_by_side_and_their_episodes_are_the_same() -> None:
    tries: Counter[str] = Counter()
    starts = [
        scenario("a", "say", "win"),
        scenario("b", "say", "lose"),
        scenario("c", "say", "malformed", "win"),
        *[scenario("d", "win")] * 2,
    ]
    alone = rollout(ScriptedEngine(speak), toy(), starts[:2], ROLES, SETTINGS)
    forced = [["Action: x"], [], [], [], []]
    expected = rollout(ScriptedEngine(speak), toy(), starts, ROLES, SETTINGS, forced=forced)
    found = rollout(ScriptedEngine(speak), toy(), starts, ROLES, replace(SETTINGS, workers=4), forced=forced)
    assert [without_time(e) for e in found] == [without_time(e) for e in expected]
    met = rollout(
        ScriptedEngine(speak),
        lambda: Slow(tries),
        [*starts[:2], scenario("e", "cut", "win")],
        ROLES,
        replace(SETTINGS, workers=3, slots=3, max_turns=1),
    )
    assert [e.turns[0].observation for e in met[:2]] == [e.turns[0].observation for e in alone]


def test_forced_replies_are_said_first_and_the_policy_goes_on() -> None:
    engine = models.Recorder(speak)
    forced = [["Thought: a Action: one", "Action: two"], []]
    found = rollout(
        engine, toy(), [scenario("a", "say", "say", "say", "win"), scenario("b", "win")], ROLES, SETTINGS, forced=forced
    )
    first, second = found
    assert [t.action for t in first.turns[:2]] == ["one", "two"]
    assert [t.completion.token_ids == () for t in first.turns] == [True, True, False, False]
    assert first.turns[2].prompt_ids == engine.encode(first.messages[:6])
    assert (first.outcome, first.total_reward) == (Outcome.SCORED, 1.0)
    assert len(second.turns) == 1
    assert all(t.completion.token_ids for t in second.turns)


def test_forced_replies_can_end_an_episode_and_are_said_again_in_another_attempt() -> None:
    engine = ScriptedEngine(speak)
    ended, failed, again = rollout(
        engine, toy(), [scenario("a", "win", "say"), scenario("b", "malformed", "malformed"), scenario("c", "say", "win", earlier=[["raise"]])],
        ROLES, SETTINGS, forced=[["Action: x", "Action: never said"], ["mumble", "mumble"], ["Action: x", "Action: y"]],
    )  # fmt: skip
    assert engine.calls == 0
    assert (ended.outcome, len(ended.turns)) == (Outcome.SCORED, 1)
    assert failed.outcome == Outcome.POLICY_FAILED
    assert (again.outcome, again.attempts, [t.action for t in again.turns]) == (Outcome.SCORED, 2, ["x", "y"])


def test_a_hopeless_episode_is_given_up_from_its_second_reply_on_and_the_others_are_as_without() -> None:
    starts = [
        scenario("a", "say", "say", "win"),
        scenario("b", "say", "win"),
        scenario("c", "win"),
        scenario("d", "say", "lose"),
    ]
    engine = models.Recorder(speak)
    alone = [without_time(e) for e in rollout(engine, toy(), starts, ROLES, SETTINGS)]
    asked: list[tuple[int, ...]] = []

    def hopeless(states: Sequence[tuple[int, ...]]) -> list[bool]:
        asked.extend(states)
        return ["start b" in engine.decode(ids) for ids in states]

    a, b, c, d = (
        without_time(e) for e in rollout(engine, toy(), starts, ROLES, replace(SETTINGS, slots=2), hopeless=hopeless)
    )
    assert [a, c, d] == [alone[0], alone[2], alone[3]]
    assert (b.outcome, b.total_reward, b.error, len(b.turns)) == (Outcome.TRUNCATED, 0.0, GIVEN_UP, 1)
    assert b.turns[0] == replace(alone[1].turns[0], truncated=True)
    assert sorted(asked) == sorted(
        [a.turns[1].prompt_ids, a.turns[2].prompt_ids, alone[1].turns[1].prompt_ids, d.turns[1].prompt_ids]
    )


def test_summary_counts_and_takes_rates_over_what_the_policy_answers_for() -> None:
    """By hand: a, b, c, d, e, g count (f failed): wins a, e, g; turns 3 + 1 + 2 + 4 + 1 + 2; malformed 2."""
    episodes = rollout(ScriptedEngine(speak), toy(), MIXED, ROLES, SETTINGS)
    found = summary(episodes, "x")
    assert found["x/episodes"] == 7
    assert found["x/retries"] == 1 + 2
    assert found["x/win_rate"] == found["x/return"] == 3 / 6
    assert found["x/env_steps"] == 13
    assert found["x/turns"] == pytest.approx(13 / 6)
    assert found["x/malformed_frac"] == pytest.approx(2 / 13)
    counts = {outcome: found[f"x/{outcome}"] for outcome in Outcome}
    assert counts == {"scored": 4, "policy_failed": 1, "truncated": 1, "env_failed": 1, "simulator_failed": 0}
    # One token a character and one for the end, of every reply but the one that f's and e's failed attempts threw away.
    assert found["x/tokens"] == sum(
        len(t.completion.text) + 1 for e in episodes if e.outcome.trainable for t in e.turns
    )


def test_a_chain_of_thought_counts_once_towards_max_turns_and_once_as_a_step() -> None:
    """Three replies of two factors, then cut; and one, an unreadable one, a win: 3 + 3 replies, 6 + 5 turns."""
    engine = ScriptedEngine(lambda prompt, request: "Hm.\n\nGo on.")
    episodes = rollout(
        engine,
        toy(),
        [scenario("a", *["say"] * 9), scenario("b", "say", "malformed", "win")],
        ROLES,
        replace(SETTINGS, agent="cot", max_turns=3),
    )
    cut, won = episodes
    assert (cut.outcome, len(cut.turns), won.outcome, len(won.turns)) == (Outcome.TRUNCATED, 6, Outcome.SCORED, 5)
    assert [t.truncated for t in cut.turns] == [False] * 5 + [True]
    assert [t.state_len for t in cut.turns] == [2, 2, 4, 4, 6, 6]
    assert [t.index for t in won.turns] == list(range(5))
    assert [t.observation != "" for t in cut.turns] == [False, True] * 3
    assert len({r.seed for r in engine.requests}) == len(engine.requests) == 6
    found = summary(episodes, "x")
    assert (found["x/env_steps"], found["x/turns"], found["x/malformed_frac"]) == (6, 11 / 2, 1 / 6)
    assert found["x/tokens"] == 6 * (len("Hm.\n\nGo on.") + 1)


def test_no_episode_or_none_that_counts_is_one_sentence() -> None:
    check_environment(rollout(ScriptedEngine(speak), toy(), MIXED, ROLES, SETTINGS))
    with pytest.raises(TurnwiseError, match=r"env_failed on all 2, first error: KeyError: 'door'"):
        check_environment([one("raise"), one("reset raise")])
    with pytest.raises(TurnwiseError, match="no scenario for this split"):
        check_environment([])
