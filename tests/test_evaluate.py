"""Evaluation: planted policies, planted critics, planted forgetting, and the numbers that must come out."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import models
import pytest

from flows import presets
from stages import evaluate
from stages.envs import service_desk as desk
from stages.evaluate import EvaluateConfig
from stages.frame.sections import RolesConfig, TaskConfig
from stages.frame.types import Request, UsageError
from stages.judge.audit import ends_well, predicted
from stages.judge.critique import Judgement
from stages.learn.statistics import share_interval, wilson
from stages.llm.roles import roles_of
from stages.llm.scripted import draw

OPTIONS = {"requests": 3, "tiers": 2}
INPUTS = {"distill": ["distill0"], "critic": ["critic0"]}


@dataclass
class Play:
    """The policy is right for gold customers alone; the base policy is always wrong. critic: "perfect", "blind" (Yes to
    all) or "contrary".
    """

    critic: str = "perfect"
    policy: str = "gold"

    def __call__(self, prompt: str, request: Request) -> str:
        role = models.role_of(prompt)
        if role == "policy":
            right = request.adapter == "distill0-adapter" and ("gold" in prompt or self.policy == "all")
            return f"Action: {(models.right_action if right else models.wrong_action)(prompt, OPTIONS)}"
        if role == "successor":
            return self.future(prompt)
        return "Optimality: No. another." if "fail" in prompt else "Optimality: Yes."

    def future(self, prompt: str) -> str:
        """Of this step alone: in these plays one wrong step is a lost visit, and no other step of a gold visit is
        wrong.
        """
        state, action = prompt.rsplit("Action: ", 1)
        needed = models.right_action(state, OPTIONS)
        tier, request = models.customer(prompt)
        _, kind, _ = next(step for step in desk.steps_of(desk.Options(**OPTIONS)) if step[0] == needed.split()[0])
        wrong = (action.splitlines()[0] != needed) != (self.critic == "contrary")
        if self.critic == "blind" or not wrong:
            return "Future: then pass."
        return f"Future: then fail. {desk.key_of(kind, request, tier)} may need {needed}."


def bench_of(base: Path, tmp_path: Path, play: Any) -> models.Bench:
    bench = models.Bench(base, tmp_path, engine=models.Recorder(play), task=TaskConfig(options=OPTIONS))
    bench.roles = RolesConfig(max_action_tokens=400, max_future_tokens=400)
    for run_id, folder in (("distill0", "adapter"), ("critic0", "adapter")):
        bench.memory.files[run_id, folder] = tmp_path
    return bench


def run(bench: models.Bench, inputs: Any = INPUTS, **config: Any) -> tuple[dict[str, float], dict[str, list[Any]]]:
    outputs = bench.run(evaluate.STAGE, EvaluateConfig(**({"episodes": 48, "audit_turns": 60} | config)), inputs)
    return dict(outputs.metrics), {table: list(rows) for table, rows in outputs.rows.items()}


def test_win_rate_and_its_interval_by_hand(base: Path, tmp_path: Path) -> None:
    """48 visits, every (request, tier) equally often: 24 gold ones are won. The base wins none, and its interval still
    has a width.
    """
    metrics, rows = run(bench_of(base, tmp_path, Play()))
    assert metrics["evaluate/win_rate"] == metrics["evaluate/return"] == 0.5
    centre, half = (
        (0.5 + 1.96**2 / 96) / (1 + 1.96**2 / 48),
        1.96 * math.sqrt(0.25 / 48 + 1.96**2 / (4 * 48**2)) / (1 + 1.96**2 / 48),
    )
    assert (metrics["evaluate/win_low"], metrics["evaluate/win_high"]) == pytest.approx((centre - half, centre + half))
    assert metrics["evaluate/turns"] == 3
    assert len(rows["episodes"]) == 48
    assert len(rows["turns"]) == metrics["evaluate/env_steps"] == 144
    lost, _ = run(bench_of(base, tmp_path, Play()), {})
    assert lost["evaluate/win_rate"] == 0
    assert (lost["evaluate/win_low"], lost["evaluate/win_high"]) == wilson(0, 48)
    assert lost["evaluate/win_high"] > 0.05


def lucky(share: float) -> Any:
    """A policy that wins about this share of its visits, by the seeds of its requests."""

    def play(prompt: str, request: Request) -> str:
        right = random.Random(request.seed).random() < share
        return f"Action: {(models.right_action if right else models.wrong_action)(prompt, OPTIONS)}"

    return play


def test_trials_play_each_test_scenario_n_times_and_tell_pass_hat_k_and_a_share_interval(
    base: Path, tmp_path: Path
) -> None:
    config = {"episodes": 12, "trials": 4, "audit_turns": 0}
    metrics, rows = run(bench_of(base, tmp_path, lucky(0.9)), {}, split="test", **config)
    plays: dict[str, list[bool]] = {}
    for row in rows["episodes"]:
        plays.setdefault(row["scenario_id"], []).append(row["total_reward"] >= 1)
    assert len(rows["episodes"]) == 48 == metrics["evaluate/episodes"] and {len(p) for p in plays.values()} == {4}
    for k in (1, 2, 3, 4):
        by_hand = [mean(all(drawn) for drawn in itertools.combinations(p, k)) for p in plays.values()]
        assert metrics[f"evaluate/pass_hat_{k}"] == pytest.approx(mean(by_hand))
    assert metrics["evaluate/pass_hat_1"] == metrics["evaluate/win_rate"] > metrics["evaluate/pass_hat_4"] > 0
    ids, won = zip(*((i, w) for i, p in plays.items() for w in p), strict=True)
    assert (metrics["evaluate/win_low"], metrics["evaluate/win_high"]) == share_interval(won, ids)


def test_trials_are_of_the_test_split_alone_and_exclude_best_of(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path, Play())
    metrics, _ = run(bench, {}, split="validation", episodes=6, trials=3, audit_turns=0)
    assert metrics["evaluate/episodes"] == 6 and not any("pass_hat" in name for name in metrics)
    with pytest.raises(UsageError, match="set one of them to 1"):
        run(bench, {}, split="test", episodes=6, trials=3, best_of=2, audit_turns=0)


def test_scenarios_are_of_the_split_and_the_same_in_every_iteration(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path, Play())

    def seen(split: str, iteration: int, seed: int) -> list[str]:
        outputs = bench.run(
            evaluate.STAGE,
            EvaluateConfig(split=split, episodes=20, audit_turns=0),
            INPUTS,
            iteration=iteration,
            seed=seed,
        )
        names = {row["scenario"]["name"] for row in outputs.rows["episodes"]}
        assert names <= set(desk.CUSTOMERS[split])
        return [row["scenario_id"] for row in outputs.rows["episodes"]]

    assert seen("validation", 0, 1) == seen("validation", 5, 2)
    assert set(seen("validation", 0, 1)).isdisjoint(seen("test", 0, 1))
    bench.seed = 9
    before = seen("test", 0, 1)
    bench.seed = 10
    assert seen("test", 0, 1) != before


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
    """A critic that is right but for the second step, where it blames everything; the policy is right there half of the
    time.
    """

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
        assert metrics[f"audit/turn{k}/own_right"] == pytest.approx(
            sum(here) / len(here)
        )  # an episode is right in all steps or in none
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
    """The base answers every step with an action of the last one: two words, but out of order, so mostly no action of
    the step.
    """

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


def test_the_probe_shows_what_was_forgotten(base: Path, tmp_path: Path) -> None:
    """Planted: combine is answered as before, evaluator never, refiner for one of two rows; base: all."""
    file = tmp_path / "probe.jsonl"
    rows = [(role, f"{role} {i}") for role in ("combine", "evaluator", "refiner") for i in (0, 1)]
    lines = [
        {"role": role, "messages": [{"role": "user", "content": text}], "reply": f"as told {text}"}
        for role, text in rows
    ]
    file.write_text(
        "".join(json.dumps(line) + "\n" for line in [*lines, lines[0] | {"reply": "beyond the two rows a role"}])
    )

    def play(prompt: str, request: Request) -> str:
        text = prompt.removeprefix("<user>\n").removesuffix("\n<assistant>\n")
        if text.split()[0] not in ("combine", "evaluator", "refiner"):
            return Play()(prompt, request)
        kept = request.adapter is None or text.startswith("combine") or text == "refiner 1"
        return f"as told {text}" if kept else "as told"

    found, _ = run(bench_of(base, tmp_path, play), probe_path=str(file), probe_rows=2, audit_turns=0)
    shares = {name: value for name, value in found.items() if "probe" in name}
    assert shares == {
        "evaluate/probe_combine": 1.0, "evaluate/probe_evaluator": 0.0, "evaluate/probe_refiner": 0.5, "evaluate/probe": 0.5,
        "evaluate/probe_out_of_context": 0.0,
    }  # fmt: skip
    untrained, _ = run(bench_of(base, tmp_path, play), {}, probe_path=str(file), probe_rows=2, audit_turns=0)
    assert untrained["evaluate/probe"] == 1.0
    with pytest.raises(UsageError, match="found none"):
        run(bench_of(base, tmp_path, play), probe_path=str(tmp_path / "gone.jsonl"))


def test_the_policy_s_temperature_is_evaluate_s_own(base: Path, tmp_path: Path) -> None:
    bench = bench_of(base, tmp_path, Play())
    run(bench, temperature=0.0, audit_turns=0)
    engine: Any = bench.engine
    assert {r.temperature for r in engine.requests} == {0.0}


def test_the_same_seed_gives_the_same_numbers(base: Path, tmp_path: Path) -> None:
    def rows() -> Any:
        metrics, found = run(bench_of(base, tmp_path, Play("perfect")))
        return metrics, [{**row, "seconds": 0} for table in found.values() for row in table]

    assert rows() == rows()


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


@pytest.mark.parametrize("preset", ["demo", "twenty_questions", "qwen7b_math", "qwen7b_tau_retail", "qwen7b_20q"])
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


@pytest.mark.parametrize(("split", "tiers"), [("test", 3), ("validation", 2)])
def test_options_of_the_test_split_are_of_the_test_split_alone(
    base: Path, tmp_path: Path, split: str, tiers: int
) -> None:
    config = EvaluateConfig(split=split, episodes=30, audit_turns=0, test_options={"tiers": 3})
    context = models.Bench(base, tmp_path).context(config, {})
    run = presets.load("tiny", ["task.options.tiers=2", "roles.max_action_tokens=400"])
    outputs = evaluate.run(replace(context, run=run))
    assert len({row["scenario"]["tier"] for row in outputs.rows["episodes"]}) == tiers
    assert run.task.options["tiers"] == 2
