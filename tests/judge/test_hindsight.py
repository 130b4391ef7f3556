"""Self-distillation: what really came of an action is all that the refiner is told, and no successor is asked."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import models

from stages import collect, refine
from stages.collect import CollectConfig
from stages.envs import service_desk as desk
from stages.frame.sections import RolesConfig, TaskConfig
from stages.frame.types import Request
from stages.play.transitions import transitions
from stages.refine import RefineConfig

OPTIONS = {"requests": 3, "tiers": 2}
INPUTS = {"collect": ["collect0"]}


def reading(prompt: str, request: Request) -> str:
    """A policy that acts at random, and roles that pass on what they read word by word."""
    role, said = models.role_of(prompt), models.words_of(prompt)
    if role == "policy":
        right = models.right_action(prompt, OPTIONS)
        tool = right.split()[0]
        return f"Thought: x. Action: {tool} {random.Random(request.seed).choice(desk.OPTIONS_OF[tool])}"
    if role == "combine":
        seen, later = re.findall(r"Then: (.*)\n", said)[0], said.rsplit("Later: ", 1)[1]
        return f"Future: {seen} {later.removeprefix('Future: ').replace('none', '')}".strip()
    if role == "corrector":
        return said.removeprefix("Rewrite.\n")
    tool = re.findall(r"Action: (\w+)", said)[0]
    if role == "evaluator":
        needed = re.findall(rf"needs {tool} \w+", said)
        return f"Optimality: No. {needed[0]}." if needed else "Optimality: Yes."
    assert role == "refiner", role
    return f"Thought: x. Action: {tool} {said.rsplit(maxsplit=1)[1].rstrip('.')}"


def bench_of(base: Path, tmp_path: Path, **options: Any) -> models.Bench:
    bench = models.Bench(
        base, tmp_path, engine=models.Recorder(reading), task=TaskConfig(options={**OPTIONS, **options})
    )
    bench.roles = RolesConfig(max_action_tokens=400, max_future_tokens=400)
    bench.run(collect.STAGE, CollectConfig(first_episodes=24), {})
    return bench


def refined(bench: models.Bench, states: int) -> list[dict[str, Any]]:
    config = RefineConfig(states=states, yes_frac_max=1.0, futures_of="episode")
    return [dict(row) for row in bench.run(refine.STAGE, config, INPUTS).rows["targets"]]


def right_share(rows: list[tuple[str, str]]) -> float:
    """rows: the conversation so far and the action's text."""
    return sum(action == models.right_action(state, OPTIONS) for state, action in rows) / len(rows)


def test_what_the_audit_of_its_own_episode_names_is_learned_and_what_was_right_is_kept(
    base: Path, tmp_path: Path
) -> None:
    """A random policy does 0.36 of the steps right; with the audit read back to each step all 72 rows are."""
    bench = bench_of(base, tmp_path)
    lived = {t.key: t for t in transitions(bench.memory, ["collect0"])}
    assert right_share([(bench.engine.decode(t.prompt_ids), t.action) for t in lived.values()]) < 0.55
    rows = refined(bench, len(lived))
    assert len(rows) == len(lived) == 72
    assert right_share([(r["student_prompt"], r["completion"].rsplit("Action: ", 1)[1]) for r in rows]) == 1
    for row in rows:
        t = lived[row["episode_id"], row["turn"]]
        assert row["student_ids"] == list(t.prompt_ids)
        if row["info"]["kept"]:
            assert row["completion_ids"] == list(t.action_ids)
    assert 0 < sum(row["info"]["kept"] for row in rows) < len(rows)


def test_where_the_audit_names_nothing_every_action_of_the_episode_is_kept(base: Path, tmp_path: Path) -> None:
    rows = refined(bench_of(base, tmp_path, audit="verdict"), 72)
    assert len(rows) == 72 and all(row["info"]["kept"] for row in rows)


def test_no_successor_is_asked_and_each_turn_to_the_end_is_merged(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path)
    engine: Any = bench.engine
    engine.requests.clear()
    refined(bench, 72)
    roles = [models.role_of(bench.engine.decode(request.prompt_ids)) for request in engine.requests]
    assert set(roles) == {"combine", "corrector", "evaluator", "refiner"}
    assert roles.count("combine") == 24 * (3 + 2 + 1)  # of the three turns of each visit
    assert roles.count("evaluator") == 72
