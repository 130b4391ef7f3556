"""Prompts that leave no room in the model's context: an episode is cut there, a stage drops the row and counts it, and
nothing else changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import models
import pytest
from evaluate_play import Play, bench_of
from evaluate_play import run as run_evaluate
from models import role_of
from refine_play import Seeing
from refine_play import bench_of as refine_bench
from refine_play import run as run_refine
from rollout_play import ROLES, SETTINGS, scenario, speak, toy, without_time
from test_targets import INPUTS, TABLE, role_play
from test_targets import bench_of as targets_bench

from stages import collect, evaluate, targets
from stages.collect import CollectConfig
from stages.evaluate import EvaluateConfig
from stages.frame.contract import Config
from stages.frame.sections import TaskConfig
from stages.frame.types import Message, Outcome, TurnwiseError, UsageError
from stages.llm.metered import Metered
from stages.llm.roles import NO_ROOM, ask
from stages.llm.scripted import ScriptedEngine
from stages.play.environment import environment
from stages.play.rollout import rollout
from stages.play.tally import check_environment, summary
from stages.targets import TargetsConfig

CONTEXT = 20_000


class Long(models.Recorder):
    """The prompts that `too_long` picks by their text are padded to more than the context, and kept in `padded`."""

    def __init__(self, reply: Any, too_long: Callable[[str], bool]) -> None:
        super().__init__(reply, context=CONTEXT)
        self.padded: list[str] = []
        self._too_long = too_long

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        ids = super().encode(messages)
        if not self._too_long(text := self.decode(ids)):
            return ids
        self.padded.append(text)
        return (*ids, *b" " * CONTEXT)


def of_role(role: str, *, some: bool = True) -> Callable[[str], bool]:
    """All prompts of a role, or about a half of the different ones."""
    return lambda text: role_of(text) == role and (not some or crc32(text.encode()) % 2 == 0)


STARTS = [scenario("a", "say", "say", "say", "win"), scenario("b", "win"), scenario("c", "say", "lose")]


@pytest.mark.parametrize(("room", "turns"), [(-1, 2), (0, 2), (1, 3)])
def test_an_episode_is_truncated_where_its_next_prompt_has_no_room_and_the_others_are_as_without(
    room: int, turns: int
) -> None:
    """With room for one token it is asked; that unreadable turn is no failure of the policy."""
    settings = replace(SETTINGS, malformed_allowance=0, slots=2)
    whole = [without_time(e) for e in rollout(ScriptedEngine(speak), toy(), STARTS, ROLES, SETTINGS)]
    full = len(whole[0].turns[2].prompt_ids)
    engine = ScriptedEngine(speak, context=full + room)
    a, b, c = (without_time(e) for e in rollout(engine, toy(), STARTS, ROLES, settings))
    assert [t.malformed for t in a.turns] == [False, False, True][:turns]
    assert [b, c] == whole[1:]
    assert (a.outcome, a.attempts, a.total_reward, len(a.turns)) == (Outcome.TRUNCATED, 1, 0.0, turns)
    assert a.turns[:turns] == (
        *whole[0].turns[: turns - 1],
        replace((*whole[0].turns[:2], a.turns[-1])[turns - 1], truncated=True),
    )
    assert (
        a.error == f"out of context: a prompt of {len(engine.encode(a.messages))} tokens, the model has {full + room}"
    )
    found = summary([a, b, c], "x")
    assert (found["x/out_of_context"], found["x/truncated"], found["x/win_rate"]) == (1, 1, 1 / 3)
    assert summary(whole, "x")["x/out_of_context"] == 0


def test_a_first_prompt_without_room_is_never_a_reward_and_all_of_them_name_the_key_to_change() -> None:
    long = scenario("l" * 500, "win")
    engine = ScriptedEngine(speak, context=400)
    found = rollout(engine, toy(), [long, *STARTS], ROLES, SETTINGS)
    assert (found[0].outcome, found[0].attempts, found[0].turns) == (Outcome.ENV_FAILED, SETTINGS.attempts, ())
    assert found[0].error.startswith("out of context: a prompt of 5")
    assert len(engine.requests) == sum(len(e.turns) for e in found)
    rates = summary(found, "x")
    assert (rates["x/out_of_context"], rates["x/env_failed"], rates["x/win_rate"]) == (1, 1, 2 / 3)
    check_environment(found)
    with pytest.raises(
        UsageError,
        match=r"no episode could begin, .* the model has 400. Set model.path to a model with a longer context",
    ):
        check_environment(found[:1])


def test_an_episode_without_room_is_not_asked_whether_it_is_hopeless() -> None:
    asked: list[tuple[int, ...]] = []

    def hopeless(states: Sequence[tuple[int, ...]]) -> list[bool]:
        asked.extend(states)
        return [False] * len(states)

    whole = rollout(ScriptedEngine(speak), toy(), STARTS, ROLES, SETTINGS)
    context = len(whole[0].turns[2].prompt_ids)
    found = rollout(ScriptedEngine(speak, context=context), toy(), STARTS, ROLES, SETTINGS, hopeless=hopeless)
    assert sorted(asked) == sorted([found[0].turns[1].prompt_ids, found[2].turns[1].prompt_ids])


def test_an_oracle_without_room_fails_the_simulator(base: Path, tmp_path: Path) -> None:
    engine = Long(
        lambda prompt, request: "Yes" if "oracle" in prompt else "Thought: . Action: Is it alive?",
        lambda text: "You are the oracle" in text,
    )
    task = TaskConfig(env="twenty_questions", options={"questions": 3}, oracle="engine", max_turns=5)
    make = environment(models.Bench(base, tmp_path, engine=engine, task=task).context(Config(), {}))
    (found,) = rollout(engine, make, models.scenarios_of("twenty_questions", 1), ROLES, SETTINGS)
    assert (found.outcome, found.attempts, found.turns) == (Outcome.SIMULATOR_FAILED, SETTINGS.attempts, ())
    assert found.error.startswith("the model inside the environment was asked 20")
    with pytest.raises(TurnwiseError, match="simulator_failed on all 1, first error: the model inside"):
        check_environment([found])


def test_collect_counts_them_and_targets_cannot_bootstrap_from_there(base: Path, tmp_path: Path) -> None:
    """Desks of several steps that outgrow the context: truncated, and too long for a' after the cut, too."""
    bench = models.Bench(base, tmp_path)
    bench.run(collect.STAGE, CollectConfig(first_episodes=16), {}, name="free")
    lengths = sorted(len(row["prompt_ids"]) for row in bench.memory.tables["turns", "free"])
    bench.engine.context = lengths[len(lengths) * 4 // 5]  # type: ignore[misc]
    outputs = bench.run(collect.STAGE, CollectConfig(first_episodes=16), {})
    cut = [row for row in outputs.rows["episodes"] if row["error"].startswith("out of context")]
    assert len(cut) == outputs.metrics["collect/out_of_context"] == outputs.metrics["collect/truncated"] > 0
    ends = {(row["episode_id"], row["n_turns"] - 1) for row in cut}
    assert {(row["episode_id"], row["turn"]) for row in outputs.rows["turns"] if row["truncated"]} == ends
    found = bench.run(targets.STAGE, TargetsConfig(transitions=10_000), {"collect": ["collect0"]})
    assert ends.isdisjoint((row["episode_id"], row["turn"]) for row in found.rows["targets"])
    # Most of their last replies were cut at the context, so unreadable: no transition that a critic learns from.
    whole = {(row["episode_id"], row["turn"]) for row in outputs.rows["turns"] if not row["malformed"]} & ends
    assert found.metrics["targets/dropped"] >= found.metrics["targets/out_of_context"] >= len(whole) > 0
    told = bench.run(evaluate.STAGE, EvaluateConfig(episodes=16), {}).metrics
    assert told["evaluate/out_of_context"] == told["evaluate/truncated"] > 0


def test_ask_gives_no_reply_to_a_prompt_that_is_too_long_and_the_others_theirs() -> None:
    prompts: list[list[Message]] = [[{"role": "user", "content": text}] for text in ("one", "two " * 100, "three")]
    options: dict[str, Any] = {"role": "policy", "adapter": None, "temperature": 1.0, "max_tokens": 50, "seed": 3}
    free, tight = models.Recorder(speak), models.Recorder(speak, context=120)
    expected = ask(free, prompts, **options)
    assert ask(tight, prompts, **options) == [expected[0], (expected[1][0], NO_ROOM), expected[2]]
    left = [r for r in free.requests if tuple(r.prompt_ids) != expected[1][0]]
    assert [r.seed for r in tight.requests] == [r.seed for r in left] and len(left) == 2
    assert ask(Metered(tight), prompts[1:2], **options, thoughts=True) == [(expected[1][0], NO_ROOM)]
    assert tight.calls == 1


@pytest.mark.parametrize(
    ("role", "word", "lost"),
    [
        ("policy", "Cut,", ("Cut", 0)),
        ("successor", "Cut,", ("Cut", 0)),
        ("combine", "audits: pass", ("Won", 0)),
        ("corrector", "B(close email", ("Won", 0)),
    ],
)
def test_targets_drop_the_row_whose_prompt_is_too_long(
    base: Path, tmp_path: Path, role: str, word: str, lost: tuple[str, int]
) -> None:
    bench = targets_bench(base, tmp_path)
    engine = bench.engine = Long(role_play, lambda text: role_of(text) == role and word in text)
    outputs = bench.run(targets.STAGE, TargetsConfig(), INPUTS)
    assert {(row["episode_id"], row["turn"]): row["raw"] for row in outputs.rows["targets"]} == {
        k: v for k, v in TABLE.items() if k != lost
    }
    assert (outputs.metrics["targets/dropped"], outputs.metrics["targets/out_of_context"], len(engine.padded)) == (
        1,
        1,
        1,
    )
    bench.engine = Long(role_play, of_role("combine", some=False))
    with pytest.raises(
        UsageError,
        match=r"targets: 5 of 5 rows .* in the model's context of 20000; lower task.max_turns or .* model.path",
    ):
        bench.run(targets.STAGE, TargetsConfig(), INPUTS)


@pytest.mark.parametrize("role", ["policy", "successor", "evaluator", "refiner", "corrector"])
def test_refine_drops_the_rows_whose_prompts_are_too_long(base: Path, tmp_path: Path, role: str) -> None:
    bench = refine_bench(base, tmp_path, Seeing())
    free, _, _ = run_refine(bench, tries=1)
    engine = bench.engine = Long(Seeing(), of_role(role))
    engine.load_adapter("critic0-adapter", tmp_path)
    rows, judgements, metrics = run_refine(bench, tries=1)
    lost = [j for j in judgements if j["info"]["dropped"]]
    assert {j["info"]["dropped"] for j in lost} == {"out of context"}
    assert len(lost) == metrics["refine/dropped"] == metrics["refine/out_of_context"] == len(engine.padded)
    assert 0 < len(lost) < len(judgements) == 20
    gone = {(j["episode_id"], j["turn"]) for j in lost}
    assert [row["completion"] for row in rows] == [
        row["completion"] for row in free if (row["episode_id"], row["turn"]) not in gone
    ]
    bench.engine = Long(Seeing(), of_role(role, some=False))
    bench.engine.load_adapter("critic0-adapter", tmp_path)
    with pytest.raises(UsageError, match=r"refine: 20 of 20 rows have a prompt that leaves no room"):
        run_refine(bench)


@pytest.mark.parametrize("role", ["successor", "evaluator"])
def test_the_audit_counts_what_is_too_long_and_does_not_score_it(base: Path, tmp_path: Path, role: str) -> None:
    bench = bench_of(base, tmp_path, Play())
    engine = bench.engine = Long(Play(), of_role(role))
    metrics, rows = run_evaluate(bench)
    malformed = [row for row in rows["judgements"] if row["verdict"] == "malformed"]
    assert 0 < len(malformed) == metrics["audit/out_of_context"] == len(engine.padded) < len(rows["judgements"]) == 120
    assert metrics["audit/malformed_frac"] == len(malformed) / 120
    assert metrics["audit/verdict_accuracy"] == 1
    bench.engine = Long(Play(), of_role(role, some=False))
    with pytest.raises(UsageError, match=r"evaluate.audit_turns: 120 of 120 rows"):
        run_evaluate(bench)


def test_the_probe_leaves_out_what_is_too_long(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "probe.jsonl"
    lines = [
        {"role": role, "messages": [{"role": "user", "content": f"{role} {i}"}], "reply": "right"}
        for role in ("combine", "refiner")
        for i in (0, 1)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def play(prompt: str, request: Any) -> str:
        return "right" if prompt.startswith(("<user>\ncombine", "<user>\nrefiner")) else Play()(prompt, request)

    bench = bench_of(base, tmp_path, play)
    bench.engine = Long(play, lambda text: "refiner" in text or "combine 1" in text)
    metrics, _ = run_evaluate(bench, probe_path=str(file), audit_turns=0)
    found = {name: value for name, value in metrics.items() if "probe" in name}
    assert found == {"evaluate/probe_combine": 1.0, "evaluate/probe": 1.0, "evaluate/probe_out_of_context": 3.0}
    bench.engine = Long(play, lambda text: "refiner" in text or "combine" in text)
    with pytest.raises(UsageError, match=r"evaluate.probe_path: 4 of 4 rows"):
        run_evaluate(bench, probe_path=str(file), audit_turns=0)
