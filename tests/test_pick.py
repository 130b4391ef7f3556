"""Picking: which of the sampled actions is learned, by hand, and what the critic is asked of each.

The engine is scripted with the desk's own rules, so that it is known which action is right.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
from refine_play import INPUTS, OPTIONS, Often, Play, Seeing, asked, bench_of

from stages import pick
from stages.frame.types import Completion, MissingInput, Outcome, Request, SimulatorError
from stages.judge.critique import Judgement
from stages.judge.q_values import QCritic
from stages.llm.scripted import GARBAGE
from stages.pick import Choice, Option, PickConfig, chances, with_best_judged
from stages.play.transitions import transitions


def run(
    bench: models.Bench, seed: int = 0, **config: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, float]]:
    outputs = bench.run(pick.STAGE, PickConfig(**({"states": 20} | config)), INPUTS, seed=seed)
    rows, judgements = ([dict(r) for r in outputs.rows[table]] for table in ("targets", "judgements"))
    return rows, judgements, dict(outputs.metrics)


class Sampling(Seeing):
    """A policy that is right in so many of ten replies, by the request's seed; its critic sees which."""

    def __init__(self, right: int, **options: Any) -> None:
        super().__init__(**options)
        self.right = right

    def __call__(self, prompt: str, request: Request) -> str:
        if models.role_of(prompt) == "policy":
            kind = "right" if request.seed % 10 < self.right else "wrong"
            return f"Thought: {request.seed % 1000}. Action: {self.action(prompt, kind)}"
        return super().__call__(prompt, request)


def is_right(row: dict[str, Any]) -> bool:
    return bool(row["completion"].split("Action: ")[1] == models.right_action(row["student_prompt"], OPTIONS))


def option(name: str, times: int = 1) -> Option:
    return Option(Completion(f"Action: {name}", (1,), (0.0,), "stop"), times)


def word(verdict: str) -> Judgement:
    return Judgement((), "", verdict)


@pytest.mark.parametrize(
    ("options", "verdicts", "best"),
    [
        ([("a", 1), ("b", 3)], ["yes", "no"], "a"),  # Yes before No, however rare
        ([("a", 1), ("b", 2), ("c", 1)], ["yes", "yes", "no"], "b"),  # among equals the most frequent
        ([("a", 2), ("b", 2)], ["yes", "yes"], "a"),  # and of those the first
        ([("a", 1), ("b", 3)], ["no", "no"], "b"),  # where nothing is right the best of it
        ([("a", 3), ("b", 1)], ["malformed", "no"], "b"),  # what nobody could read is never chosen
        ([("a", 3)], ["malformed"], None),
    ],
)
def test_the_best_judged_one_by_hand(options: list[tuple[str, int]], verdicts: list[str], best: str | None) -> None:
    state: Any = None
    choice = Choice(state, (1,), tuple(option(*one) for one in options))
    judged = [replace(one, judgement=word(verdict)) for one, verdict in zip(choice.options, verdicts, strict=True)]
    (found,) = with_best_judged([choice], judged)
    assert (found.learned.action if found.learned else None) == best
    assert bool(found.dropped) == (best is None)


def test_each_row_is_a_sampled_reply_as_the_engine_produced_it(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path, Sampling(5))
    rows, judgements, metrics = run(bench)
    said = asked(bench)
    assert {role: len(found) for role, found in said.items() if role in ("refiner", "corrector")} == {}
    assert len(said["policy"]) == 4 * 20 == len({r.seed for _, r, _ in said["policy"]})
    pairs = {(r.prompt_ids, c.token_ids) for _, r, c in said["policy"]}
    states = {t.key: t for t in transitions(bench.memory, ["collect0"])}
    assert len(rows) == len({(r["episode_id"], r["turn"]) for r in rows}) == 20
    for row in rows:
        assert (tuple(row["student_ids"]), tuple(row["completion_ids"])) in pairs
        assert row["student_ids"] == list(states[row["episode_id"], row["turn"]].prompt_ids)
        assert (row["role"], row["teacher_ids"], row["raw"]) == ("policy", [], row["completion"])
    assert metrics["pick/rows"] == 20 and metrics["pick/actions"] == 4
    assert sum(j["info"]["times"] for j in judgements) == 80 and sum(j["info"]["picked"] for j in judgements) == 20


def test_of_four_actions_a_right_one_is_learned_as_often_as_one_is_sampled(base: Path, tmp_path: Path) -> None:
    """A policy that is right in 3 of 10 and else takes one wrong action, 200 states: with a critic that sees it 1 - .7^4
    = .76 of the rows are right; with one that says No to all .22, since right actions must be the more frequent ones, or
    first of two and two. Without picking it is .3. Within 5 deviations of .03.
    """
    shares = {}
    for critic in ("truth", "no"):
        play = Sampling(3, critic=critic)
        bench = bench_of(base, tmp_path / critic, play, episodes=80)
        if critic == "no":
            play.verdict = lambda prompt: "Optimality: No. x."  # type: ignore[method-assign]
        rows, _, _ = run(bench, states=200, tries=1)
        assert len(rows) == 200
        shares[critic] = sum(map(is_right, rows)) / len(rows)
    assert abs(shares["truth"] - (1 - 0.7**4)) < 0.15
    assert abs(shares["no"] - (0.3**4 + 4 * 0.3**3 * 0.7 + 0.5 * 6 * 0.3**2 * 0.7**2)) < 0.15


def test_the_same_action_is_judged_once_and_counted(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path, Sampling(10))
    _, judgements, metrics = run(bench, futures=3)
    said = asked(bench)
    assert len(said["evaluator"]) == len(judgements) == 20 and len(said["successor"]) == 60
    assert {j["info"]["times"] for j in judgements} == {4}
    assert (metrics["pick/options"], metrics["pick/yes_rate"]) == (1, 1)


def test_it_acts_and_predicts_with_the_critic_s_adapter(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path, Sampling(5), frozen="base")
    run(bench)
    adapters = {role: {r.adapter for _, r, _ in found} for role, found in asked(bench).items()}
    assert adapters == {"policy": {"critic0-adapter"}, "successor": {"critic0-adapter"}, "evaluator": {None}}


def test_replies_that_cannot_be_read_are_counted_and_the_others_are_chosen_among(base: Path, tmp_path: Path) -> None:
    rows, _, metrics = run(bench_of(base, tmp_path, Often(5)))
    assert len(rows) == 20 and metrics["pick/missing"] == 0
    assert metrics["pick/unreadable"] > 20
    assert all(GARBAGE not in row["completion"] for row in rows)


def test_what_is_dropped_is_drawn_again_from_further_states(base: Path, tmp_path: Path) -> None:
    rows, _, once = run(bench_of(base, tmp_path / "once", Often(7)), actions=1, tries=1)
    assert 0 < once["pick/missing"] == once["pick/dropped"] == 20 - len(rows)
    rows, _, metrics = run(bench_of(base, tmp_path / "again", Often(7)), actions=1, tries=20)
    assert len(rows) == 20 and metrics["pick/missing"] == 0
    assert metrics["pick/states"] == 20 + metrics["pick/drawn_again"] == 20 + metrics["pick/dropped"]


@pytest.mark.parametrize("spoiled", [{"evaluator": "I like it."}, {"successor": "all is well"}, {"policy": GARBAGE}])
def test_where_nothing_can_be_read_nothing_is_learned(base: Path, tmp_path: Path, spoiled: dict[str, str]) -> None:
    bench = bench_of(base, tmp_path, Play())
    engine: Any = bench.engine
    engine._reply = Play(spoiled=spoiled)
    rows, _, metrics = run(bench)
    assert rows == [] and metrics["pick/dropped"] == metrics["pick/states"] == 20


def test_the_same_seed_gives_the_same_rows_and_another_seed_others(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path, Sampling(5))
    assert run(bench, 1) == run(bench, 1)
    assert run(bench, 1)[0] != run(bench, 2)[0]


def test_without_states_it_says_what_to_do(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path, Seeing())
    bench.memory.tables["episodes", "collect0"] = [
        row | {"outcome": str(Outcome.ENV_FAILED)} for row in bench.memory.tables["episodes", "collect0"]
    ]
    with pytest.raises(MissingInput, match="pick needs states from collect, found none"):
        run(bench)


class Rolling(Sampling):
    """No successor: what came of a rollout is told by its reward. After the first replies the policy is right."""

    left = 0

    def __call__(self, prompt: str, request: Request) -> str:
        role = models.role_of(prompt)
        if role == "combine":
            told = models.words_of(prompt)
            return f"Future: {'RIGHT' if 'Reward: 1' in told or 'RIGHT' in told else 'BROKEN'}."
        if role == "corrector":
            return models.words_of(prompt).removeprefix("Rewrite.\n")
        if role == "policy":
            self.left -= 1
            if self.left < 0:
                return f"Thought: go on. Action: {self.action(prompt, 'right')}"
        return super().__call__(prompt, request)


def test_by_rollouts_each_action_is_played_on_and_what_came_of_it_is_read(base: Path, tmp_path: Path) -> None:
    """Stored states are of episodes without a mistake, and so is what follows: a right action wins each of 2 rollouts, a
    wrong one none. So wherever a right one was sampled it is learned; each rollout is told from its end back.
    """
    play = Rolling(5)
    bench = bench_of(base, tmp_path, play)
    play.left, inputs = 4 * 20, {"collect": ["collect0"]}
    config = PickConfig(states=20, tries=1, futures=2, futures_of="rollouts")
    outputs = bench.run(pick.STAGE, config, inputs)
    said, rows = asked(bench), [dict(row) for row in outputs.rows["targets"]]
    judgements = [dict(row) for row in outputs.rows["judgements"]]
    assert "successor" not in said and {r.adapter for _, r, _ in said["policy"]} == {None}
    right = {(row["episode_id"], row["turn"]): models.right_action(row["student_prompt"], OPTIONS) for row in rows}
    for row in judgements:
        won = row["action"].split("Action: ")[1] == right[row["episode_id"], row["turn"]]
        assert row["verdict"] == ("yes" if won else "no")
        assert row["futures"] == [f"Future: {'RIGHT' if won else 'BROKEN'}."] * 2
    sampled: dict[tuple[str, int], set[str]] = {}
    for row in judgements:
        sampled.setdefault((row["episode_id"], row["turn"]), set()).add(row["verdict"])
    assert {"yes", "no"} in sampled.values()
    assert [is_right(row) for row in rows] == ["yes" in sampled[row["episode_id"], row["turn"]] for row in rows]
    turns = {t.key: t.turn for t in transitions(bench.memory, ["collect0"])}
    steps = sum(2 * 3 for _ in judgements)  # three steps a visit, those before the state acted anew
    assert outputs.metrics["pick/episodes"] == 2 * len(judgements)
    assert outputs.metrics["pick/env_steps"] == steps
    told = sum(2 * (3 - turns[row["episode_id"], row["turn"]]) for row in judgements)
    assert len(said["combine"]) == len(said["corrector"]) == told


def test_what_could_not_be_played_is_no_loss_of_an_action(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.envs.service_desk import ServiceDesk

    play = Rolling(5)
    bench = bench_of(base, tmp_path, play)
    play.left = 4 * 20

    def down(self: Any, message: Any) -> Any:
        raise SimulatorError("the user is silent")

    monkeypatch.setattr(ServiceDesk, "step", down)
    config = PickConfig(states=20, tries=1, futures=2, futures_of="rollouts")
    outputs = bench.run(pick.STAGE, config, {"collect": ["collect0"]})
    assert outputs.rows["targets"] == []
    assert outputs.metrics["pick/dropped"] == 20 and "evaluator" not in asked(bench)


def valued(*found: tuple[int, float]) -> list[Option]:
    return [replace(option(f"a{i}", times), q=q) for i, (times, q) in enumerate(found)]


@pytest.mark.parametrize(
    ("options", "tau", "expected"),
    [
        (valued((1, 0.0), (1, 0.0)), 0.1, [0.5, 0.5]),
        (valued((3, 0.0), (1, 0.0)), 0.1, [0.75, 0.25]),  # of equals as often as each was sampled
        (valued((1, math.log(3)), (1, 0.0)), 1.0, [0.75, 0.25]),
        (valued((1, 0.0), (3, 1.0)), 1e-3, [0.0, 1.0]),
        (valued((2, -1e6), (2, 1e6)), 1e9, [0.4995, 0.5005]),
    ],
)
def test_the_chances_by_q_by_hand(options: list[Option], tau: float, expected: list[float]) -> None:
    assert chances(options, tau) == pytest.approx(expected, abs=1e-5)


def test_by_value_no_critic_speaks_and_the_larger_numbers_are_learned(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that are right: of 200 states .76 of the rows are, as with a critic that speaks; turned round only where
    all four samples are right, .3^4 = .01. Without picking it is .3.
    """
    shares = {}
    for sign in (1, -1):
        bench = bench_of(base, tmp_path / str(sign), Sampling(3), episodes=80)
        bench.memory.files["q0", "adapter"] = tmp_path

        def numbers(model: Any, head: Any, prompts: Any, sign: int = sign, bench: models.Bench = bench) -> list[float]:
            texts = [bench.engine.decode(ids) for ids in prompts]
            acted = [text.rsplit("Action: ", 1)[1].splitlines()[0] for text in texts]
            states = [text.rsplit("<user>", 1)[0] for text in texts]
            return [
                sign * float(a == models.right_action(state, OPTIONS)) for a, state in zip(acted, states, strict=True)
            ]

        monkeypatch.setattr(pick, "open_q", lambda context: QCritic(None, None))  # type: ignore[arg-type]
        monkeypatch.setattr(pick, "q_values", numbers)
        inputs = {"collect": ["collect0"], "q_critic": ["q0"]}
        outputs = bench.run(pick.STAGE, PickConfig(by="value", states=200, tau=0.01, tries=1), inputs)
        assert set(asked(bench)) == {"policy"}
        assert {r.adapter for _, r, _ in asked(bench)["policy"]} == {"q0-adapter"}
        rows = outputs.rows["targets"]
        assert len(rows) == 200 and outputs.metrics["pick/tau"] == 0.01
        shares[sign] = sum(is_right(dict(row)) for row in rows) / len(rows)
    assert abs(shares[1] - (1 - 0.7**4)) < 0.15
    assert shares[-1] < 0.05
