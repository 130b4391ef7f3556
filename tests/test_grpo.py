"""GRPO: group-relative advantages by hand, rollout log-probs as they were recorded, and a bandit that it must learn."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import load_file
from self_ac_play import CHECK, CLOSE, GIVE

from stages import grpo
from stages.frame.contract import Config, Outputs
from stages.frame.sections import RolesConfig
from stages.frame.types import Completion, MissingInput, Outcome, Request, UsageError
from stages.grpo import GrpoConfig, episode_advantages
from stages.learn.adapter import save_adapter
from stages.learn.losses import turn_ppo_clip
from stages.learn.value_head import new_head
from stages.llm.hf import HfEngine
from stages.play.transitions import episode_rows
from stages.train.actor_critic import SelfAcConfig, credited_pass, joint_loss
from stages.train.episode_steps import steps, trainable_rows
from stages.train.history import of_step
from stages.train.model import trainable
from stages.train.passes import pass_log_probs

TURNS = [("Action: check photo", "photo done."), ("Action: close phone", "phone done.")]


def head(name: str, scenario: str, reward: float, outcome: Outcome = Outcome.SCORED) -> dict[str, Any]:
    return {"episode_id": name, "scenario_id": scenario, "total_reward": reward, "outcome": str(outcome)}


def turn(name: str, index: int, prompt_ids: list[int], completion: Completion) -> dict[str, Any]:
    return {
        "episode_id": name, "turn": index, "prompt_ids": prompt_ids, "action_ids": list(completion.token_ids), "log_probs": list(completion.log_probs)
    }  # fmt: skip


def group_rows(rewards: dict[str, list[float]], turns: int = 2) -> dict[str, list[Any]]:
    """Episodes "<scenario><number>" with the given rewards, and random ids and log-probs in their turns."""
    heads, rows = [], []
    generator = torch.Generator().manual_seed(0)
    for scenario, returns in rewards.items():
        for i, reward in enumerate(returns):
            heads.append(head(f"{scenario}{i}", scenario, reward))
            for k in range(turns):
                ids = torch.randint(2, 200, (4 + k,), generator=generator).tolist()
                log_probs = tuple((-5 * torch.rand(len(ids), generator=generator)).tolist())
                rows.append(turn(f"{scenario}{i}", k, [7, 8, i, k], Completion("", tuple(ids), log_probs, "stop")))
    return {"episodes": heads, "turns": rows}


def bring_near(model: Any, turns: list[dict[str, Any]], advantage: dict[str, float]) -> int:
    """Give a single step's turns log-probs near the model's, so that some ratios are clipped; the number of tokens."""
    (whole,) = next(grpo.step_batches(turns, advantage, GrpoConfig(), random.Random(0), model))
    n = len(whole.rows.row_K)
    noise = torch.randn(n, generator=torch.Generator().manual_seed(0))
    near = (pass_log_probs(model, whole.rows).detach() + 0.3 * noise).tolist()
    for row in whole.rows.rows:
        mine = next(
            t
            for t in turns
            if (tuple(t["prompt_ids"]), tuple(t["action_ids"])) == (tuple(row.prompt_ids), tuple(row.completion_ids))
        )
        mine["log_probs"], near = near[: len(row.completion_ids)], near[len(row.completion_ids) :]
    return n


def run(bench: models.Bench, inputs: Any = None, **config: Any) -> Outputs:
    return bench.run(grpo.STAGE, GrpoConfig(**({"max_gap": 1e9} | config)), inputs or {"collect": ["collect0"]})


def weights(bench: models.Bench) -> dict[str, torch.Tensor]:
    return dict(load_file(bench.memory.files["grpo0", "adapter"] / "adapter_model.safetensors"))


def test_advantages_are_relative_to_the_group_by_hand() -> None:
    """Group a: mean 0.25, deviation sqrt(3)/4; b: all lost, no signal; c: one episode, nothing to compare it with."""
    rewards = {"a": [1.0, 0.0, 0.0, 0.0], "b": [0.0, 0.0], "c": [1.0]}
    found = episode_advantages([head(f"{s}{i}", s, r) for s, returns in rewards.items() for i, r in enumerate(returns)])
    assert found == pytest.approx(
        {
            "a0": math.sqrt(3),
            "a1": -1 / math.sqrt(3),
            "a2": -1 / math.sqrt(3),
            "a3": -1 / math.sqrt(3),
            "b0": 0,
            "b1": 0,
        },
        abs=1e-4,
    )
    assert found["b0"] == found["b1"] == 0.0


def test_without_groups_it_says_what_to_do(bench: models.Bench) -> None:
    bench.memory.keep("collect0", Outputs({}, group_rows({"a": [1.0], "b": [0.0]})))
    with pytest.raises(MissingInput, match=r"found none with two; set collect.group to 4 or more"):
        run(bench)


def test_another_temperature_than_1_is_refused(bench: models.Bench) -> None:
    bench.memory.keep("collect0", Outputs({}, group_rows({"a": [1.0, 0.0]})))
    bench.roles = RolesConfig(policy_temperature=0.5)
    with pytest.raises(UsageError, match=r"roles.policy_temperature: .* found 0.5; set it to 1"):
        run(bench)


def test_ids_and_log_probs_reach_the_loss_unchanged(bench: models.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice each, token for token beside the engine's log-prob and its episode's advantage."""
    rows = group_rows({"a": [1.0, 0.0, 0.0], "b": [0.0, 1.0], "c": [1.0, 1.0]})
    bench.memory.keep("collect0", Outputs({}, rows))
    trained = models.capture(monkeypatch)
    tokens: list[tuple[float, float]] = []

    def spy(log_probs_K: Any, old_K: Any, turn_of_K: Any, advantages_J: Any, **options: Any) -> Any:
        tokens.extend(zip(old_K.tolist(), advantages_J[turn_of_K].tolist(), strict=True))
        return turn_ppo_clip(log_probs_K, old_K, turn_of_K, advantages_J, **options)

    monkeypatch.setattr(grpo, "turn_ppo_clip", spy)
    outputs = run(bench, batch=3, epochs=2)
    # a group of equal returns teaches nothing
    counted = [t for t in rows["turns"] if not t["episode_id"].startswith("c")]
    assert Counter(trained) == Counter(2 * [(tuple(t["prompt_ids"]), tuple(t["action_ids"])) for t in counted])
    advantage = episode_advantages(rows["episodes"])
    by_ids = {(tuple(t["prompt_ids"]), tuple(t["action_ids"])): t for t in counted}
    in_order = [by_ids[row] for row in trained]
    assert [old for old, _ in tokens] == pytest.approx([lp for t in in_order for lp in t["log_probs"]], abs=1e-6)
    assert [a for _, a in tokens] == pytest.approx(
        [advantage[t["episode_id"]] for t in in_order for _ in t["log_probs"]], abs=1e-6
    )
    assert outputs.metrics["grpo/used_frac"] == 5 / 7


def test_only_the_newest_collection_is_used_and_only_what_the_policy_caused(
    bench: models.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.memory.keep("collect0", Outputs({}, group_rows({"old": [1.0, 0.0]})))
    rows = group_rows({"a": [1.0, 0.0, 0.0]})
    rows["episodes"][2]["outcome"] = "env_failed"
    bench.memory.keep("collect1", Outputs({}, rows))
    trained = models.capture(monkeypatch)
    run(bench, {"collect": ["collect0", "collect1"]}, epochs=1)
    assert {prompt[2] for prompt, _ in trained} == {0, 1}
    assert len(trained) == 4


def test_equal_groups_change_nothing_to_the_bit(bench: models.Bench, tmp_path: Path) -> None:
    bench.memory.keep("collect0", Outputs({}, group_rows({"a": [0.0] * 4, "b": [1.0] * 4})))
    save_adapter(
        models.shake(trainable(bench.context(Config(), {}), None), 3, 0.1), tmp_path / "before", bench.engine.model_hash
    )
    bench.memory.files["grpoX", "adapter"] = tmp_path / "before"
    outputs = run(bench, {"collect": ["collect0"], "grpo": ["grpoX"]})
    before = load_file(tmp_path / "before" / "adapter_model.safetensors")
    assert all(torch.equal(before[name], value) for name, value in weights(bench).items())
    assert (outputs.metrics["grpo/steps"], outputs.metrics["grpo/used_frac"]) == (0, 0)


def bandit(base: Path, tmp_path: Path, n: int = 64) -> tuple[models.Bench, HfEngine, list[Request]]:
    """One prompt, one-token replies of the real engine; the reward is 1 for an even token."""
    engine = HfEngine(str(base))
    bench = models.Bench(base, tmp_path, engine=engine)
    prompt = engine.encode([{"role": "user", "content": "w1 w2"}])
    return bench, engine, [Request(prompt, 1, 1.0, seed) for seed in range(n)]


def play(bench: models.Bench, engine: HfEngine, requests: list[Request], run_id: str, adapter: str | None) -> float:
    """Play the bandit, leave its rows, return the share of wins."""
    replies = engine.generate([Request(r.prompt_ids, 1, 1.0, r.seed, adapter) for r in requests])
    rewards = [float(reply.token_ids[0] % 2 == 0) for reply in replies]
    heads = [head(f"{run_id}-{i}", "bandit", reward) for i, reward in enumerate(rewards)]
    turns = [turn(f"{run_id}-{i}", 0, list(requests[i].prompt_ids), reply) for i, reply in enumerate(replies)]
    bench.memory.keep(run_id, Outputs({}, {"episodes": heads, "turns": turns}))
    return sum(rewards) / len(rewards)


def test_at_the_first_step_every_ratio_is_1(base: Path, tmp_path: Path) -> None:
    """Log-probs of engine and trainer are the same to 1e-5, so the KL estimate is below 1e-9."""
    bench, engine, requests = bandit(base, tmp_path)
    play(bench, engine, requests, "collect0", None)
    metrics = run(bench, epochs=2, batch=64, lr=0.01).metrics
    assert abs(metrics["grpo/kl_old_first"]) < 1e-8
    assert metrics["grpo/clip_frac_first"] == 0
    assert metrics["grpo/kl_old"] > 1e-6


def test_it_learns_a_bandit(base: Path, tmp_path: Path) -> None:
    """Even tokens win: half of 128 plays untrained, or at rate 1e-12 (s.e. 0.044); after 8 rounds 3 in 4."""
    bench, engine, requests = bandit(base, tmp_path, 128)
    start = play(bench, engine, requests, "collect0", None)
    assert start < 0.6
    for name, lr in (("still", 1e-12), ("learning", 0.02)):
        inputs: dict[str, list[str]] = {"collect": ["collect0"]}
        for i in range(8):
            bench.run(grpo.STAGE, GrpoConfig(lr=lr, epochs=4, batch=128), inputs, name=f"{name}{i}")
            engine.load_adapter(f"{name}{i}", bench.memory.files[f"{name}{i}", "adapter"])
            share = play(bench, engine, requests, f"plays {name}{i}", f"{name}{i}")
            inputs = {"collect": [f"plays {name}{i}"], "grpo": [f"{name}{i}"]}
        assert share == start if lr < 1e-6 else share > 0.75


def test_the_same_seed_gives_the_same_bits(bench: models.Bench) -> None:
    bench.memory.keep("collect0", Outputs({}, group_rows({"a": [1.0, 0.0, 0.0]})))
    run(bench, lr=0.01, batch=2)
    one = weights(bench)
    run(bench, lr=0.01, batch=2)
    assert all(torch.equal(one[name], value) for name, value in weights(bench).items())


@pytest.mark.parametrize("pass_tokens", [1, 20, 60])
def test_a_step_in_many_passes_has_the_loss_the_gradient_and_the_metrics_of_one(
    bench: models.Bench, pass_tokens: int
) -> None:
    """Ratios near 1, so that some are clipped and some are not; 12 turns of 8 or 9 tokens, prompts included."""
    rows = group_rows({"a": [1.0, 0.0, 0.0, 0.0], "b": [0.0, 1.0]})
    model = models.shake(trainable(bench.context(Config(), {}), None), 3, 0.1)
    advantage, parameters = episode_advantages(rows["episodes"]), [p for p in model.parameters() if p.requires_grad]
    bring_near(model, rows["turns"], advantage)

    def step(config: GrpoConfig) -> tuple[int, float, list[torch.Tensor], dict[str, float]]:
        model.zero_grad()
        found = [
            grpo.clipped_loss(model, part, config)
            for part in next(grpo.step_batches(rows["turns"], advantage, config, random.Random(0), model))
        ]
        for loss, _ in found:
            loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad.clone() for p in parameters if p.grad is not None]
        return (
            len(found),
            sum(float(loss.detach()) for loss, _ in found),
            gradients,
            of_step([{k: x for k, x in metrics.items() if k != "each/gaps"} for _, metrics in found]),
        )

    n, loss, gradients, metrics = step(GrpoConfig())
    n_many, many_loss, many_gradients, many_metrics = step(GrpoConfig(pass_tokens=pass_tokens))
    assert (n, n_many) == (1, {1: 12, 20: 5, 60: 2}[pass_tokens])
    assert 0 < metrics["clip_frac"] < 1
    assert many_loss == pytest.approx(loss, rel=1e-5)
    assert many_metrics.pop("count/tokens") >= metrics.pop("count/tokens")  # less is shared
    assert many_metrics == pytest.approx(metrics, rel=1e-4)
    assert max(float(one.abs().max()) for one in gradients) > 1e-3
    for one, many in zip(gradients, many_gradients, strict=True):
        assert torch.allclose(one, many, atol=1e-5 * max(1.0, float(one.abs().max())))


def test_passes_of_a_stage_are_the_whole_steps(bench: models.Bench) -> None:
    bench.memory.keep("collect0", Outputs({}, group_rows({"a": [1.0, 0.0, 0.0], "b": [0.0, 1.0]})))
    one, many = run(bench, lr=0.001, batch=5).metrics, run(bench, lr=0.001, batch=5, pass_tokens=20).metrics
    assert set(one) == set(many)
    same = [name for name in one if "/tokens" not in name]
    assert [many[name] for name in same] == pytest.approx([one[name] for name in same], rel=1e-3)


def test_an_episode_in_one_pass_has_the_gradient_of_its_turns_in_passes_of_their_own(bench: models.Bench) -> None:
    """Self-AC's packed loss without a critic: the same sum over tokens, divided by episodes."""
    turns = {"e0": [CHECK, GIVE, CLOSE], "e1": [CLOSE], "e2": [CHECK, CLOSE]}
    played = [
        models.make_episode(bench.engine, name, mine, Outcome.SCORED, reward=float(name == "e1"))
        for name, mine in turns.items()
    ]
    rows = episode_rows(played, 0)
    for episode in rows["episodes"]:
        episode["scenario_id"] = "one for all"
    model = models.shake(trainable(bench.context(Config(), {}), None), 3, 0.1)
    advantage, n_tokens = episode_advantages(rows["episodes"]), sum(len(t["action_ids"]) for t in rows["turns"])
    assert bring_near(model, rows["turns"], advantage) == n_tokens
    bench.memory.keep("collect0", Outputs({}, rows))

    def gradient(losses: Iterable[tuple[torch.Tensor, Mapping[str, float]]], times: float) -> torch.Tensor:
        model.zero_grad()
        clipped = 0.0
        for loss, metrics in losses:
            (times * loss).backward()  # type: ignore[no-untyped-call]
            clipped += metrics["clip_frac"]
        assert clipped > 0
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    by_turn = next(grpo.step_batches(rows["turns"], advantage, GrpoConfig(), random.Random(0), model))
    expected = gradient((grpo.clipped_loss(model, part, GrpoConfig()) for part in by_turn), n_tokens)
    config, critic_ids = SelfAcConfig(alpha=0, advantage="group", ratio="token", per="episode", epochs=1), (7, 9)
    found = trainable_rows(bench.context(config, {"collect": ["collect0"]}), rows["episodes"], critic_ids, None)
    parts = next(steps(found, critic_ids, config, rng=random.Random(0), device="cpu"))
    head = new_head(model, seed=0)
    assert len(parts) == 1 and len(parts[0].row.ids) < sum(
        len(t["prompt_ids"]) + len(t["action_ids"]) for t in rows["turns"]
    )
    packed = (
        joint_loss(credited_pass(model, head, part, config, value_grad_scale=1.0), part, config, actor_weight=1.0)
        for part in parts
    )
    assert float(expected.abs().max()) > 1e-3
    assert torch.allclose(gradient(packed, len(played)), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
