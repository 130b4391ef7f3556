"""Ids in = ids trained: from the engine, through every stage, into the loss, nothing is tokenised again.

Two iterations of NLAC and one of each baseline on scripted replies and real gradients; every row that reaches a loss is
held against what the engine was asked and what it answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest

from stages import collect, critic, distill, grpo, refine, rft, targets
from stages.frame.types import Completion, Request
from stages.llm.roles import check_student
from stages.llm.scripted import END_ID
from stages.play.transitions import transitions

Row = tuple[tuple[int, ...], tuple[int, ...]]


class Marking(models.Recorder):
    """Begins every completion with a token that its text does not show: what is tokenised again from text lacks it."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return super().decode([token for token in token_ids if token <= END_ID])

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        found = super().generate(requests)
        marks = [END_ID + 1 + request.seed % 100 for request in requests]
        marked = [
            replace(c, token_ids=(mark, *c.token_ids), log_probs=(-1.0, *c.log_probs))
            for mark, c in zip(marks, found, strict=True)
        ]
        self.completions[-len(found) :] = marked
        return marked


@pytest.fixture
def bench(base: Path, tmp_path: Path) -> models.Bench:
    return models.Bench(base, tmp_path, engine=Marking())


def known(bench: models.Bench) -> tuple[set[Row], set[tuple[int, ...]]]:
    """(prompt, completion) pairs that the engine produced, and its completions alone."""
    engine: Any = bench.engine
    pairs = {(r.prompt_ids, c.token_ids) for r, c in zip(engine.requests, engine.completions, strict=True)}
    return pairs, {completion for _, completion in pairs}


def test_nlac_trains_on_what_the_engine_produced_and_on_students_prompts_alone(
    bench: models.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    collects: list[str] = []
    critics: list[str] = []
    last: dict[str, list[str]] = {}
    for i in range(2):
        bench.run(collect.STAGE, collect.CollectConfig(episodes=10, first_episodes=10), last, iteration=i, seed=i)
        collects.append(f"collect{i}")
        bench.run(
            targets.STAGE,
            targets.TargetsConfig(transitions=20),
            {"collect": collects, "critic": critics} | last,
            iteration=i,
            seed=i,
        )
        refined = {"refine": [f"refine{i - 1}"]} if i else {}
        inputs = {"targets": [f"targets{i}"], "collect": collects, "critic": critics[-1:]} | last | refined
        trained = models.capture(monkeypatch)
        bench.run(critic.STAGE, critic.CriticConfig(batch=8, policy_rows=4, lr=1e-3), inputs, iteration=i, seed=i)
        check_rows(bench, trained, f"targets{i}", collects)
        monkeypatch.undo()
        critics.append(f"critic{i}")
        bench.run(
            refine.STAGE,
            refine.RefineConfig(states=20),
            {"collect": collects, "critic": critics[-1:]},
            iteration=i,
            seed=i,
        )
        trained = models.capture(monkeypatch)
        inputs = {"refine": [f"refine{i}"], "targets": [f"targets{i}"], "critic": critics[-1:]}
        bench.run(distill.STAGE, distill.DistillConfig(batch=8, successor_rows=4, lr=1e-3), inputs, iteration=i, seed=i)
        check_rows(bench, trained, f"targets{i}", collects)
        monkeypatch.undo()
        last = {"distill": [f"distill{i}"]}


def check_rows(bench: models.Bench, trained: list[Row], targets_run: str, collects: list[str]) -> None:
    pairs, completions = known(bench)
    teachers = {
        tuple(r["teacher_ids"]) for (table, _), rows in bench.memory.tables.items() if table == "targets" for r in rows
    }
    students = {tuple(r["student_ids"]): r for r in bench.memory.tables["targets", targets_run]}
    states = {t.key: t for t in transitions(bench.memory, collects)}
    assert any(row[0] in students for row in trained)
    assert any(row[0] not in students for row in trained)
    for prompt, completion in trained:
        assert completion in completions
        assert completion[0] > END_ID
        assert prompt not in teachers
        if (row := students.get(prompt)) is None:
            # A policy row: its prompt is one that the policy was asked, to the token.
            assert prompt in {asked for asked, _ in pairs}
            continue
        t = states[row["episode_id"], row["turn"]]
        assert prompt == bench.engine.encode([*t.state, {"role": "user", "content": f"Predict.\nAction: {t.action}"}])
        assert bench.engine.decode(prompt) == row["student_prompt"]
        seen = " ".join([*(str(m["content"]) for m in t.state), f"Predict. Action: {t.action}"])
        check_student(row["student_prompt"], seen, [t.observation, row["info"]["future"]])


@pytest.mark.parametrize("stage", ["rft", "grpo"])
def test_the_baselines_train_on_the_policy_s_own_turns(
    bench: models.Bench, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    bench.run(collect.STAGE, collect.CollectConfig(first_episodes=160, group=4), {})
    trained = models.capture(monkeypatch)
    if stage == "rft":
        bench.run(rft.STAGE, rft.RftConfig(), {"collect": ["collect0"]})
    else:
        bench.run(grpo.STAGE, grpo.GrpoConfig(max_gap=1e9), {"collect": ["collect0"]})
    assert len(trained) > 10
    assert set(trained) <= known(bench)[0]


def test_groups_are_episodes_of_one_scenario_side_by_side(bench: models.Bench) -> None:
    rows = bench.run(collect.STAGE, collect.CollectConfig(first_episodes=10, episodes=9, group=4), {}).rows["episodes"]
    ids = [row["scenario_id"] for row in rows]
    assert len(ids) == 8
    assert ids[:4] == ids[:1] * 4
    assert ids[4:] == ids[4:5] * 4
    assert len({row["episode_id"] for row in rows}) == 8
    few = bench.run(collect.STAGE, collect.CollectConfig(first_episodes=2, group=4), {}).rows["episodes"]
    assert len(few) == 4  # a group is never cut to nothing


def test_collect_gathers_more_at_first_and_with_the_newest_policy(bench: models.Bench, tmp_path: Path) -> None:
    config = collect.CollectConfig(first_episodes=7, episodes=5)
    assert len(bench.run(collect.STAGE, config, {}).rows["episodes"]) == 7
    for name in ("distill", "rft", "grpo"):
        bench.memory.files[f"{name}0", "adapter"] = tmp_path
        rows = bench.run(collect.STAGE, config, {name: [f"{name}0"]}, iteration=1).rows["episodes"]
        assert len(rows) == 5
        assert {row["adapter"] for row in rows} == {f"{name}0-adapter"}
        assert {row["iteration"] for row in rows} == {1}


def test_the_same_seed_collects_the_same_episodes_and_another_seed_others(bench: models.Bench) -> None:
    def rows(seed: int) -> list[Any]:
        found = bench.run(collect.STAGE, collect.CollectConfig(first_episodes=10), {}, seed=seed).rows
        return [{**row, "seconds": 0} for table in ("episodes", "turns") for row in found[table]]

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)
