"""The values of a self_ac policy on held-out episodes: right numbers, no outcome seen, and what evaluate leaves of
them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from stages import evaluate, self_ac
from stages.evaluate import EvaluateConfig
from stages.frame.contract import Outputs
from stages.frame.types import Episode, Outcome, Request, UsageError
from stages.judge.values import TABLE, Critic, Judged, best_of, judge_episodes, open_critic, report, values_of
from stages.learn.adapter import new_adapter, save_adapter
from stages.learn.episode_row import episode_ids, pack
from stages.learn.statistics import spearman
from stages.learn.value_head import episode_pass, state_values
from stages.learn.value_use import explained_variance
from stages.llm.roles import load_roles
from stages.play.transitions import episode_rows
from stages.train.actor_critic import SelfAcConfig

INPUTS = {"self_ac": ["self_ac0"]}
ROLES = load_roles("service_desk")
CHECK, GIVE = ("Action: check photo", "photo done."), ("Action: give cash", "cash done.")
CLOSE = ("Action: close phone", "phone done. Mia audits: pass.")


def make(bench: models.Bench, name: str, n: int, reward: float, outcome: Outcome = Outcome.SCORED) -> Episode:
    return models.make_episode(bench.engine, name, [CHECK, GIVE, CLOSE][:n], outcome, reward=reward)


def mostly_right(prompt: str, request: Request) -> str:
    wrong = request.seed % 5 == 0
    return f"Action: {(models.wrong_action if wrong else models.right_action)(prompt, {'requests': 2, 'tiers': 2})}"


def train(base: Path, folder: Path, **config: Any) -> models.Bench:
    """A bench with a run of self_ac whose adapter and head do something, and a policy that wins half of its visits."""
    bench = models.Bench(base, folder, engine=models.Recorder(mostly_right))
    played = [make(bench, f"Ana{i}", n, float(i % 2)) for i, n in enumerate((3, 1, 2, 3))]
    bench.memory.keep("collect0", Outputs({}, episode_rows(played, 0)))
    options = SelfAcConfig(**({"lr": 0.02, "epochs": 4, "gamma": 0.5, "max_gap": 1e9} | config))
    bench.run(self_ac.STAGE, options, {"collect": ["collect0"]})
    told = folder / "config.json"
    told.write_text(json.dumps({"config": {"self_ac": options.model_dump(mode="json")}}))
    bench.memory.files["self_ac0", "config.json"] = told
    return bench


@pytest.fixture
def bench(base: Path, tmp_path: Path) -> models.Bench:
    return train(base, tmp_path)


def evaluated(
    bench: models.Bench, inputs: Any = INPUTS, **config: Any
) -> tuple[dict[str, float], dict[str, list[Any]], list[dict[str, Any]]]:
    """Metrics, rows, and the table of values."""
    outputs = bench.run(evaluate.STAGE, EvaluateConfig(**({"episodes": 12, "audit_turns": 0} | config)), inputs)
    table = pq.read_table(outputs.files[TABLE]).to_pylist() if TABLE in outputs.files else []
    return dict(outputs.metrics), {name: list(rows) for name, rows in outputs.rows.items()}, table


@pytest.mark.parametrize("soft", [0, 2])
def test_values_are_those_of_the_training_pass_and_of_a_plain_one(base: Path, tmp_path: Path, soft: int) -> None:
    """Of every state of three episodes; the packed pass is what trained the head, the plain one is written out here."""
    bench = train(base, tmp_path, soft_prompt=soft)
    critic = open_critic(bench.context(EvaluateConfig(), INPUTS), ROLES)
    assert critic is not None and critic.gamma == 0.5 and not critic.model.training
    assert bool(critic.prompt_ids) != bool(soft)
    episodes = [make(bench, "Ben", 3, 1.0), make(bench, "Cid", 1, 0.0), make(bench, "Dan", 2, 0.0, Outcome.TRUNCATED)]
    judged = judge_episodes(critic, bench.engine, ROLES, episodes)
    assert [len(j.values) for j in judged] == [4, 2, 3]
    assert len({round(v, 6) for j in judged for v in j.values}) == 9
    for j in judged:
        turns = [
            {
                "prompt_ids": t.prompt_ids,
                "action_ids": t.completion.token_ids,
                "log_probs": t.completion.log_probs,
                "reward": t.reward,
            }
            for t in j.episode.turns
        ]
        final = bench.engine.encode(j.episode.messages)
        row = pack([episode_ids(turns, final, truncated=False)], critic.prompt_ids, max_positions=None, soft_len=soft)
        with torch.no_grad():
            _, packed = episode_pass(critic.model, critic.head, row)
        assert j.values == pytest.approx(packed[0].tolist(), abs=1e-5)
        if not soft:
            head = load_file(bench.memory.files["self_ac0", "head"] / "value_head.safetensors")
            for k, state in enumerate([*(t.prompt_ids for t in j.episode.turns), final]):
                with torch.no_grad():
                    hidden = critic.model(
                        input_ids=torch.tensor([[*state, *critic.prompt_ids]]), output_hidden_states=True
                    ).hidden_states[-1][0, -1]
                assert j.values[k] == pytest.approx(float(hidden @ head["weight"] + head["bias"]), abs=1e-5)


def test_a_critic_with_an_adapter_of_its_own_is_read_through_it(bench: models.Bench, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    def opened(**trained: Any) -> Critic | None:
        told = {"config": {"self_ac": {"alpha": 0.5, "gamma": 1.0, **trained}}}
        bench.memory.files["self_ac0", "config.json"].write_text(json.dumps(told))
        return open_critic(bench.context(EvaluateConfig(), INPUTS), ROLES)

    own = models.shake(
        new_adapter(AutoModelForCausalLM.from_pretrained(bench.base), rank=2, alpha=4.0, seed=9), seed=9
    ).eval()
    save_adapter(own, tmp_path / "own", bench.engine.model_hash)
    bench.memory.files["self_ac0", "critic"] = tmp_path / "own"
    shared, separate = opened(), opened(separate=True)
    assert shared is not None and separate is not None
    states = [bench.engine.encode([{"role": "user", "content": "Ana"}]), (3, 5, 7)]
    wanted = state_values(own, separate.head, states, separate.prompt_ids).tolist()
    assert values_of(separate, states) == pytest.approx(wanted, abs=1e-5)
    assert all(abs(a - b) > 1e-2 for a, b in zip(values_of(shared, states), wanted, strict=True))
    assert opened(alpha=0.0) is None  # the head that such a run leaves was never trained


def test_returns_are_discounted_as_in_training_and_unknown_where_an_episode_was_cut_short(bench: models.Bench) -> None:
    critic = open_critic(bench.context(EvaluateConfig(), INPUTS), ROLES)
    assert critic is not None
    judged = judge_episodes(
        critic, bench.engine, ROLES, [make(bench, "Ben", 3, 1.0), make(bench, "Dan", 2, 0.0, Outcome.TRUNCATED)]
    )
    assert [j.returns for j in judged] == [(0.125, 0.25, 0.5, 1.0), None]


def test_what_the_terminal_state_tells_counts_for_nothing(bench: models.Bench, tmp_path: Path) -> None:
    """A value that is right in state N alone explains nothing; one that is right before it and wrong in N explains all."""
    episodes = [make(bench, f"e{i}", 2, float(i % 2)) for i in range(8)]
    at_the_end = [Judged(e, (0.5, 0.5, e.total_reward), (e.total_reward,) * 3) for e in episodes]
    found = report(at_the_end, tmp_path).metrics
    assert found["value/explained_variance"] == found["value/bias"] == 0
    assert "value/rank_correlation" not in found  # of a constant there is none
    before = [Judged(e, (e.total_reward, e.total_reward, 7.0), (e.total_reward,) * 3) for e in episodes]
    found = report(before, tmp_path).metrics
    assert (found["value/explained_variance"], found["value/rank_correlation"], found["value/states"]) == pytest.approx(
        (1, 1, 16)
    )


def test_by_turn_the_metrics_tell_where_the_value_is_blind(bench: models.Bench, tmp_path: Path) -> None:
    """Contrary in state 0, exact in state 1; an episode that was cut short says nothing."""
    judged = [Judged(make(bench, f"e{i}", 2, r), (1 - r, r, 0.0), (r, r, r)) for i in range(6) for r in (0.0, 1.0)]
    cut = Judged(make(bench, "cut", 2, 0.0, Outcome.TRUNCATED), (50.0, 50.0, 50.0), None)
    found = report([*judged, cut], tmp_path).metrics
    assert [found[f"value/turn{k}/rank_correlation"] for k in (0, 1)] == pytest.approx([-1, 1])
    assert [found[f"value/turn{k}/explained_variance"] for k in (0, 1)] == pytest.approx([-3, 1])
    assert found["value/states"] == 24


def test_evaluate_leaves_every_value_and_what_they_come_to(bench: models.Bench) -> None:
    """The metrics again from the table, and the table again from the rows."""
    metrics, rows, table = evaluated(bench)
    turns = {(t["episode_id"], t["turn"]) for t in rows["turns"]}
    assert {(one["episode_id"], one["turn"]) for one in table if not one["terminal"]} == turns
    assert {one["episode_id"]: one["turn"] for one in table if one["terminal"]} == {
        e["episode_id"]: e["n_turns"] for e in rows["episodes"]
    }
    rewards = {e["episode_id"]: e["total_reward"] for e in rows["episodes"]}
    ended = {one["episode_id"]: one["return_to_go"] for one in table if one["terminal"]}
    assert ended == {
        name: None if cut else rewards[name]
        for name, cut in ((e["episode_id"], e["outcome"] == "truncated") for e in rows["episodes"])
    }
    known = [one for one in table if not one["terminal"] and one["return_to_go"] is not None]
    assert metrics["value/states"] == len(known) > 12
    values, returns = ([one[key] for one in known] for key in ("value", "return_to_go"))
    assert metrics["value/bias"] == pytest.approx(np.mean(values) - np.mean(returns))
    assert metrics["value/explained_variance"] == pytest.approx(explained_variance(values, returns))
    assert metrics["value/rank_correlation"] == pytest.approx(spearman(values, returns))
    files = bench.memory.files
    assert files["evaluate0", "values/values.png"].read_bytes().startswith(b"\x89PNG")
    assert sum(row["n"] for row in json.loads(files["evaluate0", "values/calibration.json"].read_text())) == len(known)
    assert len(json.loads(files["evaluate0", "values/abort.json"].read_text())) == 21


def test_without_a_head_or_where_it_is_switched_off_there_are_no_values(bench: models.Bench, tmp_path: Path) -> None:
    bench.memory.files["distill0", "adapter"] = tmp_path
    for inputs, value in (({"distill": ["distill0"], **INPUTS}, True), ({}, True), (INPUTS, False)):
        metrics, _, table = evaluated(bench, inputs, value=value)
        assert not table and not any(name.startswith("value/") for name in metrics)


def test_the_first_of_n_episodes_is_the_only_one_of_one(bench: models.Bench) -> None:
    """Metrics of evaluate and of the first round's rows are those of best_of = 1; the others are added."""
    one, rows_of_one, _ = evaluated(bench)
    three, rows_of_three, table = evaluated(bench, best_of=3)
    assert {k: v for k, v in three.items() if k.startswith("evaluate/")} == {
        k: v for k, v in one.items() if k.startswith("evaluate/")
    }
    names = [row["episode_id"] for row in rows_of_three["episodes"]]
    assert names[:12] == [row["episode_id"] for row in rows_of_one["episodes"]] and len(set(names)) == len(names) == 36
    values = {(row["episode_id"], row["turn"]): row["value"] for row in table}
    groups = [[rows_of_three["episodes"][i + 12 * n] for n in range(3)] for i in range(12)]
    assert all(len({e["scenario_id"] for e in group}) == 1 for group in groups)
    # max takes the first of equals
    chosen = [max(group, key=lambda e: values[e["episode_id"], e["n_turns"] - 1]) for group in groups]
    assert three["best_of/scenarios"] == 12
    assert three["best_of/value_win_rate"] == pytest.approx(sum(e["total_reward"] >= 1 for e in chosen) / 12)
    assert three["best_of/random_win_rate"] == pytest.approx(
        sum(e["total_reward"] >= 1 for group in groups for e in group) / 36
    )
    assert three["best_of/oracle_win_rate"] == pytest.approx(
        sum(any(e["total_reward"] >= 1 for e in group) for group in groups) / 12
    )
    assert three["best_of/random_win_rate"] < three["best_of/oracle_win_rate"]


def test_a_scenario_with_an_episode_that_says_nothing_is_left_out(bench: models.Bench) -> None:
    rounds = [[make(bench, f"{n}{i}", 2, float(n == "b")) for i in range(3)] for n in "ab"]
    judged = [Judged(e, (0.0, e.total_reward, 0.0), None) for one in rounds for e in one]
    assert best_of(rounds, judged) == {
        "best_of/scenarios": 3, "best_of/random_win_rate": 0.5, "best_of/oracle_win_rate": 1, "best_of/value_win_rate": 1,
    }  # fmt: skip
    rounds[1][0] = replace(rounds[1][0], outcome=Outcome.ENV_FAILED)
    assert best_of(rounds, judged)["best_of/scenarios"] == 2
    assert "best_of/value_win_rate" not in best_of(rounds, None)


def test_n_greedy_episodes_are_refused(bench: models.Bench) -> None:
    with pytest.raises(UsageError, match=r"evaluate.best_of: 3 greedy episodes .* set evaluate.temperature above 0"):
        evaluated(bench, best_of=3, temperature=0.0)


def test_episodes_below_a_threshold_are_really_given_up(bench: models.Bench) -> None:
    """The ones whose value fell below it at a later turn, and no others; what they would have said costs no token."""
    metrics, rows, table = evaluated(bench)
    later = [row for row in table if row["turn"] and not row["terminal"]]
    threshold = sorted(row["value"] for row in later)[len(later) // 2]
    low = {row["episode_id"] for row in later if row["value"] < threshold}
    found, fewer, _ = evaluated(bench, abort_below=threshold)
    assert 0 < len(low) < 12
    assert {row["episode_id"] for row in fewer["episodes"] if row["outcome"] == Outcome.TRUNCATED} == low
    assert found["evaluate/given_up"] == len(low) and "evaluate/given_up" not in metrics
    assert found["evaluate/tokens"] < metrics["evaluate/tokens"]
    stay = [row["total_reward"] for row in rows["episodes"] if row["episode_id"] not in low]
    assert found["evaluate/win_rate"] == pytest.approx(sum(stay) / 12)


def test_episodes_are_given_up_by_values_alone(bench: models.Bench) -> None:
    with pytest.raises(UsageError, match=r"evaluate.abort_below: this run has no values"):
        evaluated(bench, abort_below=0.5, value=False)


def test_a_new_value_prompt_is_another_run_of_evaluate() -> None:
    assert "value" in evaluate.STAGE.roles


def test_episodes_of_the_policy_are_played_with_its_adapter(bench: models.Bench) -> None:
    evaluated(bench)
    requests: list[Request] = bench.engine.requests  # type: ignore[attr-defined]
    assert {r.adapter for r in requests} == {"self_ac0-adapter"}
