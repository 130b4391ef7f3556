"""Refinement: who is asked what, which action is learned, the cap on Yes, the two gates and the ablations.

The engine is scripted with the desk's own rules, so that it is known which action is right: the fresh action is wrong
for customers named in WRONG, the critic sees it or not, and the refiner does what the critique says.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from refine_play import INPUTS, OPTIONS, Often, Play, Seeing, asked, bench_of, run

from stages import collect, refine
from stages.collect import CollectConfig
from stages.frame.types import Completion, MissingInput, Outcome, Request, UsageError
from stages.judge.refinement import Refinement, cap_yes
from stages.llm.roles import Roles, roles_of
from stages.llm.scripted import GARBAGE
from stages.play.drawing import by_priority
from stages.play.transitions import transitions
from stages.refine import RefineConfig


def test_no_teaches_the_refined_action_as_the_engine_produced_it(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path, Seeing())
    rows, judgements, metrics = run(bench)
    said = asked(bench)
    corrected = {c.token_ids for _, _, c in said["corrector"]}
    fresh = {r.prompt_ids for _, r, _ in said["policy"]}
    states = {t.key: t for t in transitions(bench.memory, ["collect0"])}
    assert len(rows) == len({(r["episode_id"], r["turn"]) for r in rows}) == 20
    for row in rows:
        state = states[row["episode_id"], row["turn"]]
        assert tuple(row["completion_ids"]) in corrected
        assert tuple(row["student_ids"]) in fresh
        assert row["student_ids"] == list(bench.engine.encode(state.state)) == list(state.prompt_ids)
        assert row["completion"] == f"Thought: x. Action: {models.right_action(row['student_prompt'], OPTIONS)}"
        assert row["raw"] == row["completion"].replace("x.", "as told, x.")
        assert "Optimality: No." in row["teacher_prompt"]
        assert row["role"] == "policy"
    assert {j["verdict"] for j in judgements} == {"no"}
    assert metrics["refine/yes_rate"] == 0.0
    assert metrics["refine/changed_frac"] == 1.0


def test_yes_teaches_the_fresh_action_and_asks_nobody_to_refine_it(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path, Seeing(fresh="right"))
    rows, judgements, metrics = run(bench)
    said = asked(bench)
    assert "refiner" not in said
    assert "corrector" not in said
    assert {tuple(r["completion_ids"]) for r in rows} == {c.token_ids for _, _, c in said["policy"]}
    assert all(r["teacher_ids"] == [] and r["info"] == {"kept": True} for r in rows)
    assert {j["verdict"] for j in judgements} == {"yes"}
    assert (metrics["refine/yes_rate"], metrics["refine/changed_frac"]) == (1.0, 0.0)


def test_the_action_is_fresh_and_not_the_stored_one(base: Path, tmp_path: Path) -> None:
    """The stored actions are right, those of the critic's adapter wrong: every judged action is a wrong one."""
    bench = bench_of(base, tmp_path, Seeing())
    stored = {t.key: t.action for t in transitions(bench.memory, ["collect0"])}
    _, judgements, _ = run(bench)
    assert all(j["action"].split("Action: ")[1] != stored[j["episode_id"], j["turn"]] for j in judgements)


@pytest.mark.parametrize(("frozen", "judge"), [("adapter", "critic0-adapter"), ("base", None)])
def test_each_role_is_played_by_its_own_adapter(base: Path, tmp_path: Path, frozen: str, judge: str | None) -> None:
    bench = bench_of(
        base, tmp_path, Seeing(), frozen=frozen, policy_temperature=0.9, future_temperature=0.7, judge_temperature=0.1
    )
    run(bench)
    adapters = {role: {r.adapter for _, r, _ in found} for role, found in asked(bench).items()}
    assert adapters == {
        "policy": {"critic0-adapter"},
        "successor": {"critic0-adapter"},
        "evaluator": {judge},
        "refiner": {judge},
        "corrector": {judge},
    }
    temperatures = {role: {r.temperature for _, r, _ in found} for role, found in asked(bench).items()}
    assert temperatures == {
        "policy": {0.9},
        "successor": {0.7},
        "evaluator": {0.1},
        "refiner": {0.1},
        "corrector": {0.1},
    }


def test_the_evaluator_reads_all_k_futures_of_its_own_pair(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path, Play(critic="no"))
    _, judgements, _ = run(bench, futures=4)
    said = asked(bench)
    assert len(said["successor"]) == 4 * 20
    assert len({r.seed for _, r, _ in said["successor"]}) == 80
    prompts = [models.words_of(prompt) for prompt, _, _ in said["evaluator"]]  # in an order of their own
    assert len(prompts) == len(judgements)
    for judgement in judgements:
        action = judgement["action"].split("Action: ")[1]
        mine = f"Judge.\nAction: {action}\n" + "\n".join(judgement["futures"])
        assert mine.count("Future:") == 4
        prompts.remove(mine)
        assert all(future.endswith(action) for future in judgement["futures"])
    assert any(len(set(j["futures"])) > 1 for j in judgements)


def test_m_refinements_are_m_rows_with_ids_of_their_own(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path, Seeing(), judge_temperature=0.7)
    rows, judgements, _ = run(bench, refinements=3)
    assert set(Counter((r["episode_id"], r["turn"]) for r in rows).values()) == {3}
    assert len({r["target_id"] for r in rows}) == len(rows) == len(judgements) == 60
    assert len({r.seed for _, r, _ in asked(bench)["refiner"]}) == 60


def test_refinements_that_would_all_be_equal_are_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Raise roles\.refiner_temperature"):
        run(bench_of(base, tmp_path, Seeing(), judge_temperature=0.0), refinements=2)


def test_without_correction_the_refiner_s_words_are_learned(base: Path, tmp_path: Path) -> None:
    rows, _, metrics = run(bench_of(base, tmp_path, Seeing()), correct=False)
    assert all(r["completion"] == r["raw"] and "as told" in r["completion"] for r in rows)
    assert metrics["refine/leak_before"] == metrics["refine/leak_after"]


@pytest.mark.parametrize(
    ("critique", "roles", "told"),
    [
        (
            "full",
            {"policy", "successor", "evaluator", "refiner", "corrector"},
            "Optimality: No. another may be needed.",
        ),
        ("verdict", {"policy", "successor", "evaluator", "refiner", "corrector"}, "Optimality: No."),
        ("none", {"policy", "refiner", "corrector"}, "Optimality: No."),
    ],
)
def test_what_the_refiner_is_told_in_each_ablation(
    base: Path, tmp_path: Path, critique: str, roles: set[str], told: str
) -> None:
    """none: no critic is asked at all, and every action is rewritten, right ones too."""
    bench = bench_of(base, tmp_path, Seeing(fresh="right" if critique == "none" else "wrong"))
    rows, _, _ = run(bench, critique=critique)
    said = asked(bench)
    assert set(said) == roles
    assert {prompt.splitlines()[-2] for prompt, _, _ in said["refiner"]} == {told}
    assert len(rows) == 20


@pytest.mark.parametrize(
    ("spoiled", "verdicts"),
    [
        ({"policy": GARBAGE}, {"malformed"}),
        ({"policy": "Action: check photo " + "and " * 200}, {"malformed"}),  # cut at max_action_tokens
        ({"evaluator": "I like it."}, {"malformed"}),
        ({"successor": "all is well"}, {"malformed"}),
        ({"successor": "Future: and " + "so on " * 200}, {"malformed"}),  # cut: how it ends is not known
        ({"refiner": GARBAGE}, {"no"}),
        ({"corrector": GARBAGE}, {"no"}),
        ({"corrector": "Action: check photo " + "and " * 200}, {"no"}),
    ],
)
def test_what_cannot_be_read_is_dropped_counted_and_kept_in_the_judgements(
    base: Path, tmp_path: Path, spoiled: dict[str, str], verdicts: set[str]
) -> None:
    bench = bench_of(base, tmp_path, Seeing())
    engine: Any = bench.engine
    engine._reply = Seeing(spoiled=spoiled)
    rows, judgements, metrics = run(bench)
    assert rows == []
    assert metrics["refine/dropped"] == len(judgements) == 20
    assert {j["verdict"] for j in judgements} == verdicts
    assert all(j["info"]["dropped"] for j in judgements)


def refinement(kept: bool, dropped: str = "") -> Refinement:
    action, other = Completion("a", (1,), (0.0,), "stop"), Completion("b", (2,), (0.0,), "stop")
    state: Any = None
    return Refinement(state, (1,), action, learned=action if kept else other, dropped=dropped)


@pytest.mark.parametrize("most", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_yes_rows_are_at_most_their_share_and_as_many_as_that_allows(most: float) -> None:
    for yes in (0, 1, 5, 40):
        for no in (0, 1, 3, 10):
            everything = (
                [refinement(True) for _ in range(yes)]
                + [refinement(False) for _ in range(no)]
                + [refinement(True, "gate")]
            )
            kept = cap_yes(everything, most, random.Random(0))
            n_yes = sum(r.kept_action for r in kept)
            assert not any(r.dropped for r in kept)
            assert len(kept) - n_yes == no
            assert n_yes <= most * len(kept) + 1e-9
            assert n_yes == yes or n_yes + 1 > most * (len(kept) + 1) + 1e-9


def test_refined_words_from_the_critique_are_measured_before_and_after_correction(base: Path, tmp_path: Path) -> None:
    """The refiner repeats a name of the critique alone, the corrector takes it out: a leak of 1 word in 5."""

    class Gossip(Play):
        def __call__(self, prompt: str, request: Request) -> str:
            role = models.role_of(prompt)
            if role == "evaluator":
                return "Optimality: No. Raj said so."
            if role == "refiner":
                return f"Thought: Raj. Action: {self.action(prompt, 'right')}"
            return super().__call__(prompt, request).replace("Raj", "so")

    _, _, metrics = run(bench_of(base, tmp_path, Gossip()))
    assert metrics["refine/leak_before"] == pytest.approx(0.2)
    assert metrics["refine/leak_after"] == 0.0


def test_a_student_prompt_that_holds_the_critique_raises(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of(base, tmp_path, Seeing())

    class Telling(Roles):
        def policy(self, messages: Any) -> Any:
            return [*super().policy(messages), {"role": "user", "content": "Optimality: No. another may be needed."}]

    monkeypatch.setattr(refine, "roles_of", lambda config: Telling(config.prompts, roles_of(config).templates))
    with pytest.raises(AssertionError, match="only the teacher may know"):
        run(bench)


def test_the_same_seed_gives_the_same_rows_and_another_seed_others(base: Path, tmp_path: Path) -> None:
    bench = models.Bench(base, tmp_path)
    bench.run(collect.STAGE, CollectConfig(first_episodes=12), {})
    bench.memory.files["critic0", "adapter"] = tmp_path
    assert run(bench, 1) == run(bench, 1)
    assert run(bench, 1)[0] != run(bench, 2)[0]


def test_states_are_of_the_newest_transitions(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path, Seeing())
    newest = {t.key for t in transitions(bench.memory, ["collect0"])[-5:]}
    _, judgements, _ = run(bench, replay_size=5)
    assert {(j["episode_id"], j["turn"]) for j in judgements} == newest


def test_what_is_dropped_is_drawn_again_from_further_states(base: Path, tmp_path: Path) -> None:
    """Without it a third of the 20 states would leave no row, and distill would have as many steps fewer."""
    once, _, lost = run(bench_of(base, tmp_path / "once", Often(3)), tries=1)
    rows, judgements, metrics = run(bench_of(base, tmp_path / "again", Often(3)))
    missing = 20 - len(once)
    assert 0 < missing == lost["refine/missing"] == lost["refine/dropped"]
    assert (lost["refine/tries"], lost["refine/drawn_again"]) == (1, 0)
    assert len({(r["episode_id"], r["turn"]) for r in rows}) == len(rows) == 20
    assert metrics["refine/missing"] == 0 and metrics["refine/tries"] > 1
    assert (
        metrics["refine/states"]
        == len(judgements)
        == 20 + metrics["refine/dropped"]
        == 20 + metrics["refine/drawn_again"]
    )
    assert metrics["refine/drawn_again_frac"] == metrics["refine/drawn_again"] / metrics["refine/states"]
    drawn = [(j["episode_id"], j["turn"]) for j in judgements]
    assert len(set(drawn)) == len(drawn), "there are further states, so none is drawn twice"


def test_where_all_states_were_drawn_the_dropped_ones_are_asked_for_another_action(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path, Often(5))
    pool = {t.key for t in transitions(bench.memory, ["collect0"])}
    rows, judgements, metrics = run(bench, states=1000, tries=20)
    assert {(r["episode_id"], r["turn"]) for r in rows} == pool
    assert len(judgements) == metrics["refine/states"] > len(rows) == len(pool)


@pytest.mark.parametrize("tries", [1, 2, 3])
def test_states_are_drawn_at_most_so_often(base: Path, tmp_path: Path, tries: int) -> None:
    rows, _, metrics = run(bench_of(base, tmp_path, Often(8)), tries=tries)
    assert metrics["refine/tries"] == tries
    assert metrics["refine/missing"] == 20 - len(rows) > 0


@pytest.mark.parametrize("yes_frac_max", [1.0, 0.5])
def test_as_many_rows_as_states_at_a_yes_rate_of_four_fifths(base: Path, tmp_path: Path, yes_frac_max: float) -> None:
    """With a cap, further states are judged until the rewritten actions allow the rest."""

    class Pleased(Seeing):
        def verdict(self, prompt: str) -> str:
            lucky = int(prompt.rsplit("RIGHT ", 1)[-1].rsplit("BROKEN ", 1)[-1].split(".")[0]) % 10 < 8
            return "Optimality: Yes. fine." if lucky else "Optimality: No. another may be needed."

    rows, _, metrics = run(
        bench_of(base, tmp_path, Pleased(), episodes=96), states=40, yes_frac_max=yes_frac_max, tries=50
    )
    assert 0.6 < metrics["refine/yes_rate"] < 0.95
    assert len(rows) == 40
    assert sum(r["info"]["kept"] for r in rows) <= yes_frac_max * 40
    assert (metrics["refine/drawn_again"] == 0) == (yes_frac_max == 1.0)


def known(bench: models.Bench, loss: float) -> set[tuple[str, int]]:
    """Half of the states have been met by two critics: the older found all hard, the newer `loss`; the rest 1e-6."""
    keys = [t.key for t in transitions(bench.memory, ["collect0"])]
    for run_id, low, high in (("critic0", 9.0, 9.0), ("critic1", 1e-6, loss)):
        rows = [
            {"episode_id": e, "turn": n, "loss": high if i % 2 else low, "step": 0} for i, (e, n) in enumerate(keys)
        ]
        bench.memory.tables["priorities", run_id] = rows
    bench.memory.files["critic1", "adapter"] = bench.memory.files["critic0", "adapter"]
    return set(keys[1::2])


@pytest.mark.parametrize(("alpha", "least", "most"), [(2.0, 0.95, 1.0), (0.0, 0.3, 0.7)])
def test_states_are_drawn_by_the_critic_s_newest_losses_and_uniformly_at_alpha_0(
    base: Path, tmp_path: Path, alpha: float, least: float, most: float
) -> None:
    bench = bench_of(base, tmp_path, Seeing(), episodes=40)
    hard = known(bench, 5.0)
    inputs = INPUTS | {"critic": ["critic0", "critic1"]}
    rows = bench.run(refine.STAGE, RefineConfig(states=40, alpha=alpha), inputs).rows["judgements"]
    assert least <= sum((r["episode_id"], r["turn"]) in hard for r in rows) / 40 <= most


def test_a_state_whose_reply_was_never_readable_is_not_new_for_ever(base: Path, tmp_path: Path) -> None:
    """No target is made of it, so no critic ever has a loss of it: it counts with the mean, not with the largest."""
    pool = transitions(bench_of(base, tmp_path, Seeing(), episodes=40).memory, ["collect0"])
    mended = [replace(t, malformed=True, terminal=False) for t in pool[:5]]
    losses = {t.key: 9.0 if i < 20 else 1.0 for i, t in enumerate(pool[5:])}
    order = by_priority([*mended, *pool[5:]], losses, 20.0, 0.01, np.random.default_rng(0))
    assert {t.key for t in order[:20]} == {t.key for t in pool[5:25]}
    assert {t.key for t in order[20:25]} == {t.key for t in mended}
    assert len({t.key for t in order}) == len(pool)


def test_nothing_is_asked_or_rewritten_in_the_warm_up(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path, Seeing())
    config = RefineConfig(states=20, warmup=2)
    for iteration, n in ((0, 0), (1, 0), (2, 20)):
        outputs = bench.run(refine.STAGE, config, INPUTS, iteration=iteration)
        assert len(outputs.rows.get("targets", ())) == n
        assert bool(asked(bench)) == (n > 0)


def test_without_states_it_says_what_to_do(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path, Seeing())
    bench.memory.tables["episodes", "collect0"] = [
        row | {"outcome": str(Outcome.ENV_FAILED)} for row in bench.memory.tables["episodes", "collect0"]
    ]
    with pytest.raises(MissingInput, match="refine needs states from collect, found none"):
        run(bench)
