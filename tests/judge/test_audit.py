"""The audit of a critic, in evaluation: planted critics, and the numbers that must come out."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import models
import pytest
from evaluate_play import INPUTS, OPTIONS, Play, bench_of, run

from flows import presets
from stages.envs import service_desk as desk
from stages.evaluate import EvaluateConfig
from stages.frame.types import Request
from stages.judge.audit import ends_well, predicted
from stages.judge.critique import Judgement
from stages.learn.statistics import wilson
from stages.llm.roles import roles_of
from stages.llm.scripted import draw


def test_a_perfect_critic_has_perfect_numbers(base: Path, tmp_path: Path) -> None:
    """Own actions (right for gold) and the base's (always wrong), so that right and wrong ones are there in plenty."""
    metrics, rows = run(bench_of(base, tmp_path, Play("perfect")))
    for name, value in {
        "verdict_accuracy": 1, "verdict_auroc": 1, "no_if_right": 0, "no_if_wrong": 1, "cause_named": 1, "malformed_frac": 0,
        "verdict_return_spearman": 1, "future_return_spearman": 1, "future_return_auroc": 1, "yes_rate_won": 1, "yes_rate_lost": 0,
    }.items():  # fmt: skip
        assert metrics[f"audit/{name}"] == pytest.approx(value), name
    assert metrics["audit/verdict_q_spearman"] == metrics["audit/future_q_spearman"] > 0.8
    assert len(rows["judgements"]) == 120
    assert sum(row["info"]["own"] for row in rows["judgements"]) == 60


def test_a_blind_critic_that_says_yes_to_all_is_found_out(base: Path, tmp_path: Path) -> None:
    """Accuracy is the share of right actions, AUROC one half; what is not defined for a constant is left out, not NaN."""
    metrics, rows = run(bench_of(base, tmp_path, Play("blind")))
    right = sum(row["info"]["own"] and row["info"]["return"] == 1 for row in rows["judgements"]) / 120
    assert 0.1 < right < 0.4
    assert metrics["audit/verdict_accuracy"] == pytest.approx(right)
    assert metrics["audit/verdict_auroc"] == metrics["audit/future_return_auroc"] == 0.5
    assert metrics["audit/no_if_wrong"] == metrics["audit/cause_named"] == 0
    assert metrics["audit/yes_rate"] == metrics["audit/yes_rate_won"] == metrics["audit/yes_rate_lost"] == 1
    assert {"audit/verdict_return_spearman", "audit/verdict_q_spearman", "audit/future_q_spearman"}.isdisjoint(metrics)
    assert not any(math.isnan(value) for value in metrics.values())


def test_a_contrary_critic_is_the_perfect_one_upside_down(base: Path, tmp_path: Path) -> None:
    metrics, _ = run(bench_of(base, tmp_path, Play("contrary")))
    assert metrics["audit/verdict_accuracy"] == metrics["audit/verdict_auroc"] == metrics["audit/cause_named"] == 0
    assert metrics["audit/no_if_right"] == 1
    assert metrics["audit/future_return_spearman"] == pytest.approx(-1)


def test_the_audit_by_turn_finds_the_step_at_fault(base: Path, tmp_path: Path) -> None:
    """A critic that blames everything at the second step, where the policy is right half of the time."""

    class Unjust(Play):
        def future(self, prompt: str) -> str:
            blamed = prompt.rsplit("Action: ", 1)[1].startswith("give")
            return "Future: then fail." if blamed else super().future(prompt)

    metrics, rows = run(bench_of(base, tmp_path, Unjust()))
    assert [metrics[f"audit/turn{k}/no_if_right"] for k in range(3)] == [0, 1, 0]
    assert [metrics[f"audit/turn{k}/no_if_wrong"] for k in range(3)] == [1, 1, 1]
    own = [row for row in rows["judgements"] if row["info"]["own"]]
    for k in range(3):
        here = [row["info"]["return"] for row in own if row["turn"] == k]
        # an episode is right in all steps or in none
        assert metrics[f"audit/turn{k}/own_right"] == pytest.approx(sum(here) / len(here))
    assert "audit/turn3/own_right" not in metrics


def test_what_the_critic_says_unreadably_is_counted_and_not_scored(base: Path, tmp_path: Path) -> None:
    class Mumbling(Play):
        def future(self, prompt: str) -> str:
            return "mumble" if "silver" in prompt else super().future(prompt)

    metrics, rows = run(bench_of(base, tmp_path, Mumbling()))
    malformed = [row for row in rows["judgements"] if row["verdict"] == "malformed"]
    assert metrics["audit/malformed_frac"] == len(malformed) / 120 > 0.2
    assert metrics["audit/verdict_accuracy"] == 1


def test_actions_that_the_desk_would_not_understand_are_not_judged_but_counted(base: Path, tmp_path: Path) -> None:
    """The base answers every step with an action of the last one, so mostly with no action of the step."""

    class Hasty(Play):
        def __call__(self, prompt: str, request: Request) -> str:
            if models.role_of(prompt) == "policy" and request.adapter is None:
                return "Action: close phone"
            if (
                models.role_of(prompt) == "successor"
                and " may" not in prompt
                and prompt.rsplit("Action: ", 1)[1].startswith("close")
            ):
                return "Future: then pass."
            return super().__call__(prompt, request)

    metrics, rows = run(bench_of(base, tmp_path, Hasty("blind", policy="all")), audit_turns=144)
    others = [row for row in rows["judgements"] if not row["info"]["own"]]
    assert (len(others), metrics["audit/unreadable"]) == (48, 96)
    # Own actions are all right; of the base's 144 only the 48 at the last step can be read, and some of those are right
    # by chance.
    closing = [
        models.right_action(f"X, {r['scenario']['tier']}, wants {r['scenario']['request']} for a done. done.", OPTIONS)
        for r in rows["episodes"]
    ]
    wrong = sum(action != "close phone" for action in closing)
    assert metrics["audit/verdict_accuracy"] == pytest.approx(1 - wrong / (144 + 48))


def test_the_critic_reads_k_futures(base: Path, tmp_path: Path) -> None:
    bench = bench_of(
        base,
        tmp_path,
        lambda p, r: (
            draw(r, ["Future: then pass.", "Future: then fail."]) if models.role_of(p) == "successor" else Play()(p, r)
        ),
    )
    _, rows = run(bench, audit_futures=3, audit_turns=10)
    assert {len(row["futures"]) for row in rows["judgements"]} == {3}
    assert len({tuple(row["futures"]) for row in rows["judgements"]}) > 3


def test_calibration_is_left_as_table_and_plot(base: Path, tmp_path: Path) -> None:
    """A perfect critic: of the own actions said to fail none was won, of those said to pass all."""
    bench = bench_of(base, tmp_path, Play("perfect"))
    run(bench)
    table = json.loads(bench.memory.files["evaluate0", "audit/calibration.json"].read_text())
    assert [(row["mean_score"], row["rate"]) for row in table] == [(0.0, 0.0), (1.0, 1.0)]
    assert sum(row["n"] for row in table) == 60
    assert bench.memory.files["evaluate0", "audit/calibration.png"].read_bytes().startswith(b"\x89PNG")


def test_every_share_and_correlation_of_the_audit_has_an_interval_over_episodes(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path, Play("blind"))
    metrics, rows = run(bench)
    table = {
        row["name"]: row for row in json.loads(bench.memory.files["evaluate0", "audit/intervals.json"].read_text())
    }
    counts = {"audit/malformed_frac", "audit/out_of_context", "audit/unreadable"}
    assert set(table) == {name for name in metrics if name.startswith("audit/")} - counts
    for name, row in table.items():
        assert row["value"] == metrics[name]
        assert row["low"] is None or row["low"] - 1e-9 <= row["value"] <= row["high"] + 1e-9
    episodes = {row["episode_id"] for row in rows["judgements"] if row["info"]["own"]}
    yes = table["audit/yes_rate"]
    assert (yes["actions"], yes["episodes"]) == (60, len(episodes))
    assert (yes["low"], yes["high"]) == wilson(len(episodes), len(episodes))


def test_without_a_critic_or_turns_there_is_no_audit(base: Path, tmp_path: Path) -> None:
    for inputs, turns in (({"distill": ["distill0"]}, 60), (INPUTS, 0)):
        metrics, rows = run(bench_of(base, tmp_path, Play()), inputs, audit_turns=turns)
        assert not any(name.startswith("audit/") for name in metrics)
        assert "judgements" not in rows


def test_predicted_success_is_the_share_of_futures_without_a_word_of_loss() -> None:
    futures = (
        "Future: photo, then pass.",
        "Future: photo, then fail. gold may need give cash.",
        "Future: the game is LOST",
        "Future: won.",
    )
    judgement = Judgement(futures, "", "yes")
    config = EvaluateConfig()
    assert predicted(judgement, config.win_words, config.loss_words) == 0.5
    assert predicted(judgement, ("lost",), ("won",)) == (0.5 + 0.5 + 1 + 0) / 4


TAU = (("won",), ("lost",))


@pytest.mark.parametrize(
    ("words", "future", "well"),
    [
        (TAU, "If the lookup fails, the agent asks for the email, and then the case is probably won.", 1),
        (TAU, "The case could be lost if the item is gone. It is not, and the case is won.", 1),
        (TAU, "What was won before is undone: the case is LOST.", 0),
        (TAU, "The user leaves; the case is not won", 0),
        (TAU, "It will never be lost.", 1),
        (TAU, "The agent lists the orders.", 0.5),
        (TAU, "The lostness of Wonderland.", 0.5),
        ((("pass",), ("fail",)), "Future: photo, then fail. gold refund may need give cash.", 0),
        ((("right",), ("fails", "wrong")), "A step is wrong, but repaired: the answer is right", 1),
        ((("right",), ("fails", "wrong")), "All steps seem right; the answer fails", 0),
    ],
)
def test_the_last_word_on_the_end_tells_how_a_future_ends(words: Any, future: str, well: float) -> None:
    assert ends_well(future, *words) == well


@pytest.mark.parametrize("preset", ["demo", "20q_rule", "math+qwen7b", "tau_retail+qwen7b", "20q+qwen7b"])
def test_a_task_s_words_for_the_end_stand_in_what_its_successor_is_told_to_say(preset: str) -> None:
    run: Any = presets.load(preset)
    prompts = roles_of(run.roles).templates
    told = prompts["successor"].rsplit("at the end", 1)[-1] if preset != "demo" else "pass or fail"
    assert all(
        any(re.search(rf"\b{w}\b", told) for w in words) for words in (run.evaluate.win_words, run.evaluate.loss_words)
    )


def test_a_cause_is_named_as_a_fact_or_as_a_possibility() -> None:
    truth = desk.Truth(False, 0.0, "gold refund needs give cash.", ())
    assert truth.named_in("Future: then fail. gold refund may need give cash.")
    assert truth.named_in("Future: then fail. gold refund needs give cash.")
    assert not truth.named_in("Future: then fail. gold refund may need give credit.")
    assert not truth.named_in("Future: then fail. silver refund may need give cash.")
    assert not desk.Truth(True, 1.0, "", ()).named_in("Future: then pass.")
