"""The critic's training: L1 on the targets as they are, priorities from its losses, and the target network's average."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import load_file

from stages import critic
from stages.critic import CriticConfig
from stages.frame.contract import Config, Outputs
from stages.frame.types import MissingInput, Outcome, UsageError
from stages.learn.adapter import save_adapter, trainable_state
from stages.learn.fit import fit
from stages.play.transitions import episode_rows
from stages.train import network
from stages.train.model import trainable

TARGETS = [
    models.successor_row(f"e{i}", f"Predict. {i} {'x' * (i % 4)}", f"Future: {'abc'[i % 3]} {i % 2}", turn=i % 2)
    for i in range(10)
]
POLICY = [models.successor_row(f"p{i}", f"Desk. {i}", f"Action: {i}", role="policy") for i in range(6)]
TURNS = [("Action: check photo", "photo done."), ("mumble", "what?"), ("Action: close phone", "phone done.")]


@pytest.fixture
def bench(base: Path, tmp_path: Path) -> models.Bench:
    """Targets, refinements, own episodes, and adapters of a policy and a target network that have learned."""
    bench = models.Bench(base, tmp_path)
    bench.memory.keep("targets0", Outputs({}, {"targets": TARGETS}))
    bench.memory.keep("refine0", Outputs({}, {"targets": POLICY}))
    episodes = [
        models.make_episode(bench.engine, name, TURNS, Outcome.SCORED, malformed=[1]) for name in ("Ana", "Ben")
    ]
    bench.memory.keep("collect0", Outputs({}, episode_rows(episodes[:1], 0)))
    bench.memory.keep("collect1", Outputs({}, episode_rows(episodes[1:], 1)))
    context = bench.context(Config(), {})
    for seed, (run_id, folder) in enumerate((("distill0", "adapter"), ("distill0", "target"))):
        save_adapter(
            models.shake(trainable(context, None), seed, 0.1), tmp_path / run_id / folder, bench.engine.model_hash
        )
        bench.memory.files[run_id, folder] = tmp_path / run_id / folder
    return bench


FIRST = {"targets": ["targets0"], "collect": ["collect0", "collect1"]}
LATER = FIRST | {"distill": ["distill0"], "refine": ["refine0"]}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(folder / "adapter_model.safetensors"))


def pairs(rows: list[dict[str, Any]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(tuple(row["student_ids"]), tuple(row["completion_ids"])) for row in rows]


def test_ids_trained_are_the_rows_ids_and_never_the_teacher_s(
    bench: models.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = models.capture(monkeypatch)
    bench.run(critic.STAGE, CriticConfig(epochs=2, batch=4, policy_rows=2), LATER, name="critic1")
    assert Counter(row for row in trained if row in pairs(TARGETS)) == Counter(pairs(TARGETS * 2))
    others = [row for row in trained if row not in pairs(TARGETS)]
    assert len(others) == 2 * 3 * 2
    assert set(others) <= set(pairs(POLICY))


def test_before_any_refinement_the_policy_is_anchored_on_its_own_readable_actions(
    bench: models.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the newest collection only, with the ids that the engine produced; the unreadable reply is left out."""
    own = {
        (tuple(r["prompt_ids"]), tuple(r["action_ids"]))
        for r in bench.memory.rows("turns", ["collect1"])
        if not r["malformed"]
    }
    assert len(own) == 2
    bench.memory.keep("refine1", Outputs({}, {"targets": []}))  # a critic that said Yes to all left nothing either
    for inputs in (FIRST, LATER | {"refine": ["refine1"]}):
        trained = models.capture(monkeypatch)
        bench.run(critic.STAGE, CriticConfig(batch=5, policy_rows=4), inputs, name="critic1")
        assert set(trained) - set(pairs(TARGETS)) == own
        monkeypatch.undo()


def test_no_policy_rows_are_asked_for_none_are_trained(bench: models.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = models.capture(monkeypatch)
    outputs = bench.run(critic.STAGE, CriticConfig(policy_rows=0), LATER, name="critic1")
    assert sorted(trained) == sorted(pairs(TARGETS))
    assert "critic/nll/policy" not in outputs.metrics


def slow_losses(model: Any) -> dict[tuple[str, int], float]:
    """NLL a token of every target under the model, one token at a time."""
    found = {}
    with torch.no_grad():
        for row in TARGETS:
            total, ids = 0.0, list(row["student_ids"])
            for token in row["completion_ids"]:
                logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
                total -= float(logits[token] - torch.log(torch.exp(logits).sum()))
                ids.append(token)
            found[row["episode_id"], row["turn"]] = total / len(row["completion_ids"])
    return found


def test_priorities_are_the_losses_a_token_of_each_row(bench: models.Bench) -> None:
    """At a rate that moves nothing they equal the loop over the policy's model; lengths differ, sums would not fit."""
    outputs = bench.run(critic.STAGE, CriticConfig(lr=1e-12, batch=4), LATER, name="critic1")
    slow = slow_losses(trainable(bench.context(Config(), {}), bench.memory.files["distill0", "adapter"]).eval())
    found = {(row["episode_id"], row["turn"]): row["loss"] for row in outputs.rows["priorities"]}
    assert found == pytest.approx(slow, abs=1e-5)
    assert sorted(row["step"] for row in outputs.rows["priorities"]) == [0] * 4 + [1] * 4 + [2] * 2


def test_a_step_in_passes_leaves_the_weights_and_priorities_of_a_whole_one(bench: models.Bench) -> None:
    found = {}
    for name, pass_tokens in (("whole", 0), ("passes", 60)):
        outputs = bench.run(
            critic.STAGE,
            CriticConfig(epochs=1, batch=10, policy_rows=4, lr=0.01, pass_tokens=pass_tokens),
            LATER,
            name=name,
        )
        found[name] = weights(bench.memory.files[name, "adapter"]), outputs
    (whole, one), (passes, many) = found["whole"], found["passes"]
    assert all(torch.allclose(value, passes[name], atol=2e-5) for name, value in whole.items())
    assert learned(many.metrics) == pytest.approx(learned(one.metrics), rel=1e-4)
    losses = [
        {(row["episode_id"], row["turn"]): row["loss"] for row in outputs.rows["priorities"]} for outputs in (one, many)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def learned(metrics: Mapping[str, float]) -> dict[str, float]:
    """All but how many tokens it took."""
    return {name: value for name, value in metrics.items() if "/tokens" not in name}


def test_the_newest_loss_is_the_one_kept(bench: models.Bench) -> None:
    first = bench.run(critic.STAGE, CriticConfig(lr=1e-12, batch=5), LATER, name="critic1").rows["priorities"]
    last = bench.run(critic.STAGE, CriticConfig(lr=0.01, batch=5, epochs=6), LATER, name="critic1").rows["priorities"]
    assert len(last) == len(TARGETS)
    assert sorted({row["step"] for row in last}) == [10, 11]
    before = {row["episode_id"]: row["loss"] for row in first}
    assert all(row["loss"] < before[row["episode_id"]] for row in last)


def run_and_watch(
    bench: models.Bench, monkeypatch: pytest.MonkeyPatch, inputs: dict[str, list[str]], **config: Any
) -> list[dict[str, torch.Tensor]]:
    """Run the stage; the adapter's tensors before the first step and after each."""
    states: list[dict[str, torch.Tensor]] = []

    def watched(model: Any, *args: Any, after_step: Any, **options: Any) -> Any:
        states.append(trainable_state(model))

        def also(done: Any) -> None:
            states.append(trainable_state(model))
            after_step(done)

        return fit(model, *args, after_step=also, **options)

    monkeypatch.setattr(network, "fit", watched)
    bench.run(critic.STAGE, CriticConfig(**config), inputs, name="critic1")
    return states


@pytest.mark.parametrize("rate", [0.1, 1.0])
@pytest.mark.parametrize("inputs", [FIRST, LATER], ids=["first", "later"])
def test_the_target_after_n_steps_equals_the_formula(
    bench: models.Bench, monkeypatch: pytest.MonkeyPatch, rate: float, inputs: Any
) -> None:
    """(1 - rate)^n target_0 + sum_k rate (1 - rate)^(n - k) theta_k; target_0: the last, or the fresh adapter."""
    states = run_and_watch(bench, monkeypatch, inputs, lr=0.01, batch=3, ema_rate=rate, policy_rows=2)
    n = len(states) - 1
    assert n == 4
    found = weights(bench.memory.files["critic1", "target"])
    start = weights(bench.memory.files["distill0", "target"]) if "distill" in inputs else None
    live = weights(bench.memory.files["critic1", "adapter"])
    for name, value in found.items():
        steps = [state[name.replace(".weight", ".default.weight")] for state in states]
        expected = (1 - rate) ** n * (start[name] if start else steps[0])
        expected = expected + sum(rate * (1 - rate) ** (n - k) * steps[k] for k in range(1, n + 1))
        assert torch.allclose(value, expected, atol=1e-6)
        assert torch.equal(live[name], steps[-1])
    assert (rate == 1.0) == all(torch.allclose(found[name], live[name], atol=1e-7) for name in found)


def test_training_starts_from_the_policy_s_adapter(bench: models.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    states = run_and_watch(bench, monkeypatch, LATER)
    policy = weights(bench.memory.files["distill0", "adapter"])
    assert all(
        torch.equal(states[0][name.replace(".weight", ".default.weight")], value) for name, value in policy.items()
    )


def test_frozen_the_targets_move_nothing_and_the_policy_s_rows_and_steps_are_as_they_were(
    bench: models.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other futures leave the same bits; without `frozen` they leave others."""
    others = [{**row, "completion_ids": list(reversed(row["completion_ids"]))} for row in TARGETS]

    def learned(found: list[Any], *, frozen: bool) -> tuple[bytes, list[Any], float]:
        bench.memory.keep("targets0", Outputs({}, {"targets": found}))
        trained = models.capture(monkeypatch)
        config = CriticConfig(frozen=frozen, epochs=2, batch=4, policy_rows=2, lr=0.01)
        metrics = bench.run(critic.STAGE, config, LATER, name="critic1").metrics
        monkeypatch.undo()
        policy = {(tuple(row["student_ids"]), tuple(row["completion_ids"])) for row in POLICY}
        file = bench.memory.files["critic1", "adapter"] / "adapter_model.safetensors"
        return file.read_bytes(), [row for row in trained if row in policy], metrics["critic/steps"]

    still, moved = learned(TARGETS, frozen=True), learned(TARGETS, frozen=False)
    assert learned(others, frozen=True)[0] == still[0] != moved[0] != learned(others, frozen=False)[0]
    assert still[1:] == moved[1:] and len(still[1]) == 2 * still[2] > 0


def test_it_learns_the_targets_and_nothing_without_steps(bench: models.Bench) -> None:
    """Ten targets of 11 bytes by 17,616 random weights: from 7.3 nats a token, kept at rate 1e-12, to below 3."""
    stuck = bench.run(
        critic.STAGE, CriticConfig(lr=1e-12, epochs=30, batch=5, policy_rows=0), FIRST, name="critic1"
    ).metrics
    found = bench.run(
        critic.STAGE, CriticConfig(lr=0.02, epochs=30, batch=5, policy_rows=0), FIRST, name="critic1"
    ).metrics
    assert stuck["critic/nll/successor"] > 7
    assert found["critic/nll/successor"] < 3
    assert found["critic/nll/successor_first"] == pytest.approx(stuck["critic/nll/successor_first"])
    assert found["critic/steps"] == 60


def test_the_learning_rate_falls_with_the_iteration(bench: models.Bench) -> None:
    """At iteration 2 of a fall from 0 to 4 to 20 % it is 60 %: the same weights as with 60 % of the rate and no fall."""
    falling = CriticConfig(lr=0.01, lr_decay_start=0, lr_decay_end=4, lr_final=0.2)
    bench.run(critic.STAGE, falling, LATER, name="critic1", iteration=2)
    bench.run(critic.STAGE, CriticConfig(lr=0.006), LATER, name="critic2", iteration=2)
    one, other = (weights(bench.memory.files[name, "adapter"]) for name in ("critic1", "critic2"))
    assert all(torch.allclose(one[name], other[name], atol=1e-7) for name in one)


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(bench: models.Bench) -> None:
    def run(seed: int) -> tuple[bytes, Any]:
        outputs = bench.run(critic.STAGE, CriticConfig(lr=0.01, batch=4), LATER, name="critic1", seed=seed)
        return (bench.memory.files["critic1", "target"] / "adapter_model.safetensors").read_bytes(), outputs.rows

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_weights_of_rows_reach_the_loss(bench: models.Bench) -> None:
    """A row of weight 0 is not learned: its loss stays where the others' falls."""
    rows = [row | {"weight": 0.0} if row["episode_id"] == "e3" else row for row in TARGETS]
    bench.memory.keep("targets1", Outputs({}, {"targets": rows}))
    alone = CriticConfig(lr=0.02, epochs=12, batch=5, policy_rows=0)
    with_it = bench.run(critic.STAGE, alone, FIRST | {"targets": ["targets1"]}, name="critic1")
    bench.memory.keep("targets2", Outputs({}, {"targets": [row for row in TARGETS if row["episode_id"] != "e3"]}))
    losses = {row["episode_id"]: row["loss"] for row in with_it.rows["priorities"]}
    start = bench.run(critic.STAGE, CriticConfig(lr=1e-12, policy_rows=0), FIRST, name="critic1").rows["priorities"]
    before = {row["episode_id"]: row["loss"] for row in start}
    falls = {name: before[name] - losses[name] for name in losses}
    assert falls["e3"] < min(fall for name, fall in falls.items() if name != "e3")


def test_general_rows_are_mixed_into_every_step(
    bench: models.Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "general.jsonl"
    file.write_text(
        "".join(
            json.dumps({"role": "x", "messages": [{"role": "user", "content": f"w{i}"}], "reply": f"w{i + 1}"}) + "\n"
            for i in range(4)
        )
    )
    trained = models.capture(monkeypatch)
    outputs = bench.run(
        critic.STAGE,
        CriticConfig(batch=5, policy_rows=1, general_rows=3, general_path=str(file)),
        LATER,
        name="critic1",
    )
    assert len(trained) == 10 + 2 * (1 + 3)
    assert outputs.metrics["critic/nll/general"] > 0


def test_without_targets_it_says_what_to_do(bench: models.Bench) -> None:
    with pytest.raises(MissingInput, match="critic needs successor targets of run refine0, found 0; rerun targets"):
        bench.run(critic.STAGE, CriticConfig(), LATER | {"targets": ["refine0"]})


def test_a_policy_of_another_base_is_refused(bench: models.Bench) -> None:
    (bench.memory.files["distill0", "adapter"] / "base.json").write_text(json.dumps({"model_hash": "0" * 64}))
    with pytest.raises(UsageError, match="belongs to base model 000000000000"):
        bench.run(critic.STAGE, CriticConfig(), LATER)
