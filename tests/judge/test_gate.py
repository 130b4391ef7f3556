"""The gates of refinement: what is refused, what is kept, and what a rollout that failed means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
from refine_play import OPTIONS, Seeing, bench_of, run

from stages.frame.types import Request, SimulatorError


def check(rows: list[dict[str, Any]], judgements: list[dict[str, Any]], metrics: dict[str, float], n: int) -> None:
    """All 20 states are trained on: n of them with the rewritten action, the others with the fresh one."""
    assert [row["info"]["kept"] for row in rows] == [n == 0] * 20
    assert metrics["refine/refused"] == 20 - n
    assert metrics["refine/dropped"] == 0
    for row in judgements:
        assert (row["refined"] == row["action"]) == (n == 0)
        assert bool(row["info"]["refused"]) == (n == 0)


@pytest.mark.parametrize(("better", "n"), [("right", 20), ("wrong", 0)])
def test_gate_evaluate_keeps_what_the_critic_then_says_yes_to(base: Path, tmp_path: Path, better: str, n: int) -> None:
    rows, judgements, metrics = run(bench_of(base, tmp_path, Seeing(better=better)), gate="evaluate")
    check(rows, judgements, metrics, n)


def test_refused_rows_are_not_capped_away(base: Path, tmp_path: Path) -> None:
    """A critic that says No to everything: without these rows nothing would hold the policy where it is."""
    rows, _, metrics = run(bench_of(base, tmp_path, Seeing(better="wrong")), gate="evaluate", yes_frac_max=0.0)
    assert len(rows) == metrics["refine/refused"] == 20


def test_nothing_is_learned_of_what_is_refused_where_that_is_wanted(base: Path, tmp_path: Path) -> None:
    """Of states whose rewrites pass every third time: only those that pass, and others are drawn in the place of the rest."""
    rows, judgements, metrics = run(
        bench_of(base, tmp_path / "none", Seeing(better="wrong")), gate="evaluate", refused="dropped"
    )
    assert rows == [] and metrics["refine/refused"] == metrics["refine/dropped"] == len(judgements)
    assert {row["info"]["dropped"] for row in judgements} == {"gate"}
    bench = bench_of(base, tmp_path / "some", Mixed(), judge_temperature=1.0)
    rows, judgements, metrics = run(bench, gate="evaluate", refused="dropped", states=10)
    passed = [(row["episode_id"], row["turn"]) for row in judgements if not row["info"]["refused"]]
    assert sorted((row["episode_id"], row["turn"]) for row in rows) == sorted(passed)
    assert len(rows) == 10 and not any(row["info"]["kept"] for row in rows) and metrics["refine/drawn_again"] > 0


class Mixed(Seeing):
    """Rewrites right and wrong by the request's seed."""

    def __call__(self, prompt: str, request: Request) -> str:
        if models.role_of(prompt) == "refiner":
            return f"Thought: as told, x. Action: {self.action(prompt, 'right' if request.seed % 3 == 0 else 'wrong')}"
        return super().__call__(prompt, request)


def test_of_many_rewrites_the_fresh_action_is_learned_once_and_only_if_none_passes(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path, Mixed(), judge_temperature=1.0)
    rows, judgements, _ = run(bench, gate="evaluate", refinements=3)
    tried: dict[tuple[str, int], list[bool]] = {}
    for row in judgements:
        tried.setdefault((row["episode_id"], row["turn"]), []).append(not row["info"]["refused"])
    learned: dict[tuple[str, int], list[bool]] = {}
    for row in rows:
        learned.setdefault((row["episode_id"], row["turn"]), []).append(row["info"]["kept"])
    assert {len(passed) for passed in tried.values()} == {3}
    assert any(any(passed) for passed in tried.values())
    assert any(not any(passed) for passed in tried.values())
    for state, passed in tried.items():
        assert learned[state] == ([False] * sum(passed) if any(passed) else [True])


def test_without_a_gate_worse_actions_are_learned(base: Path, tmp_path: Path) -> None:
    rows, _, _ = run(bench_of(base, tmp_path, Seeing(better="wrong")))
    assert len(rows) == 20


def test_gates_leave_kept_actions_alone(base: Path, tmp_path: Path) -> None:
    for gate in ("evaluate", "reroll"):
        rows, _, _ = run(bench_of(base, tmp_path / gate, Seeing(fresh="right")), gate=gate)
        assert len(rows) == 20


class Rolling(Seeing):
    """Fresh and refined actions as asked, then a policy that is right: only the action decides the return."""

    def __call__(self, prompt: str, request: Request) -> str:
        if models.role_of(prompt) == "policy" and self.rolling:
            return f"Action: {models.right_action(prompt, OPTIONS)}"
        if models.role_of(prompt) == "corrector":
            self.rolling = True  # the last role that is asked before the gate
        return super().__call__(prompt, request)

    rolling = False


@pytest.mark.parametrize(
    ("fresh", "better", "n"),
    [("wrong", "right", 20), ("right", "wrong", 0), ("wrong", "wrong", 20), ("right", "right", 20)],
)
def test_gate_reroll_keeps_what_is_no_worse(base: Path, tmp_path: Path, fresh: str, better: str, n: int) -> None:
    """Stored states are of episodes without a mistake, so the action alone decides: 1 against 0, 0 against 1, or equal."""
    play = Rolling(better=better, critic="no")
    play.verdict = lambda prompt: "Optimality: No. x."  # type: ignore[method-assign]
    bench = bench_of(base, tmp_path, play)
    play.fresh, play.rolling = fresh, False
    rows, judgements, metrics = run(bench, gate="reroll", gate_rollouts=2)
    check(rows, judgements, metrics, n)
    # Two of the old action and two of the new one; three steps a visit.
    assert (metrics["refine/episodes"], metrics["refine/env_steps"]) == (4 * 20, 3 * 4 * 20)


def test_gate_reroll_refuses_what_the_environment_could_not_roll_out(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed rollout is no return of 0: nothing is known, so the refined action is not taken."""
    from stages.envs.service_desk import ServiceDesk

    bench = bench_of(base, tmp_path, Seeing())

    def down(self: Any, message: Any) -> Any:
        raise SimulatorError("the user is silent")

    monkeypatch.setattr(ServiceDesk, "step", down)
    check(*run(bench, gate="reroll", gate_rollouts=1), 0)
