"""The scalar critic: its targets by hand, its loss against a loop, and where its gradient and its average go."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from stages import q_critic
from stages.frame.contract import Config, Outputs
from stages.frame.types import Outcome
from stages.judge.q_values import q_values
from stages.learn.adapter import base_of, save_adapter, trainable_state
from stages.learn.fit import fit
from stages.learn.value_head import load_head, new_head, save_head
from stages.play.transitions import episode_rows
from stages.q_critic import QBackup, QCriticConfig
from stages.train import network
from stages.train.model import trainable
from stages.train.network import VALUE, mixed_q_loss, value_rows
from stages.train.passes import step_passes
from stages.train.rows import TrainRow

CHECK, CLOSE = ("Action: check photo", "photo done."), ("Action: close phone", "phone done. fail.")
FIRST = {"collect": ["collect0"]}
LATER = FIRST | {"distill": ["distill0"]}


@pytest.fixture
def bench(base: Path, tmp_path: Path) -> models.Bench:
    """A won and a lost visit and one that was cut short; policy, target network and heads that have learned something."""
    bench = models.Bench(base, tmp_path, engine=models.Recorder(lambda prompt, request: "Action: give discount"))
    visits = [
        models.make_episode(bench.engine, "Won", [CHECK, CLOSE], Outcome.SCORED, reward=1.0),
        models.make_episode(bench.engine, "Lost", [CLOSE], Outcome.SCORED),
        models.make_episode(bench.engine, "Cut", [CHECK], Outcome.TRUNCATED),
    ]
    bench.memory.keep("collect0", Outputs({}, episode_rows(visits, 0)))
    for seed, (adapter, head) in enumerate((("adapter", "head"), ("target", "target_head"))):
        model = models.shake(trainable(bench.context(Config(), {}), None), seed, 0.1)
        save_adapter(model, tmp_path / "distill0" / adapter, bench.engine.model_hash)
        save_head(new_head(model, spread=1.0, seed=seed), tmp_path / "distill0" / head)
        for folder in (adapter, head):
            bench.memory.files["distill0", folder] = tmp_path / "distill0" / folder
    return bench


def run(bench: models.Bench, inputs: Any = LATER, name: str = "q", **config: Any) -> Outputs:
    return bench.run(q_critic.STAGE, QCriticConfig(**config), inputs, name=name)


def wanted(outputs: Outputs) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row["episode_id"], row["turn"]): row["info"] for row in outputs.rows["targets"]}


@pytest.mark.parametrize(
    ("rewards", "later", "gamma", "y"),
    [([1.0], 0.0, 0.9, 1.0), ([0.0], 0.5, 0.9, 0.45), ([0.0, 0.25], 0.5, 0.5, 0.125 + 0.125)],
)
def test_the_target_by_hand(rewards: list[float], later: float, gamma: float, y: float) -> None:
    t = models.make_backup().t
    chain = tuple(replace(t, reward=reward) for reward in rewards)
    assert QBackup(chain, 1.0, later=later).target(gamma) == pytest.approx(y)


def test_targets_of_stored_visits_are_bootstrapped_by_the_target_network_where_they_go_on(bench: models.Bench) -> None:
    """Terminal: the reward. Else gamma times Q_target of a fresh next action, as a plain pass over its prompt reads it."""
    outputs = run(bench, gamma=0.9, lr=1e-12)
    found = wanted(outputs)
    assert (found["Won", 1]["q"], found["Lost", 0]["q"]) == (1.0, 0.0)
    model = trainable(bench.context(Config(), {}), bench.memory.files["distill0", "target"]).eval()
    head = load_head(bench.memory.files["distill0", "target_head"], width=base_of(model).config.hidden_size)
    for key, state in ((("Won", 0), 4), (("Cut", 0), 4)):
        messages = bench.memory.rows("episodes", ["collect0"])[0 if key[0] == "Won" else 2]["messages"][:state]
        words = {"role": "user", "content": f"Predict.\nAction: {found[key]['next_action']}"}
        ids = torch.tensor([bench.engine.encode([*messages, words])])
        with torch.no_grad():
            slow = float(head(base_of(model).model(input_ids=ids).last_hidden_state[0, -1]))
        assert abs(slow) > 1e-3 and found[key]["next_action"]
        assert found[key]["later"] == pytest.approx(slow, abs=1e-5)
        assert found[key]["q"] == pytest.approx(0.9 * slow, abs=1e-5)
    assert outputs.metrics["q_critic/bootstrapped"] == 2
    assert wanted(run(bench, steps=2))["Won", 0]["q"] == 1.0


def test_the_loss_and_its_gradient_equal_a_loop(bench: models.Bench) -> None:
    """Three value rows of two weights and two policy rows in passes of any size, against one row at a time in plain
    passes; head and adapter both get a gradient.
    """
    values = [(f"e{i}", [5 + i, 6, 7, 8 + i % 2], 0.3 * i, 1.0 + i % 2) for i in range(3)]
    stored = [
        {"episode_id": name, "turn": 0, "student_ids": ids, "weight": w, "info": {"q": y}} for name, ids, y, w in values
    ]
    rows, numbers = value_rows(stored)
    spoken = [TrainRow([5, 6, 7], [9, 10]), TrainRow([5, 6], [11])]
    model = models.shake(trainable(bench.context(Config(), {}), None), 3, 0.2)
    net = nn.ModuleList([model, new_head(model, spread=1.0, seed=1)])

    def gradients(loss: Any) -> dict[str, Any]:
        net.zero_grad()
        loss.backward()
        return {name: p.grad.clone() for name, p in net.named_parameters() if p.requires_grad and p.grad is not None}

    def slow() -> Any:
        total = torch.zeros(())
        for _, ids, y, w in values:
            state = base_of(model).model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
            total = total + 0.7 * w * (net[1](state) - y) ** 2 / len(values)
        for row in spoken:
            prompt = list(row.prompt_ids)
            logits = model(input_ids=torch.tensor([[*prompt, *row.completion_ids]])).logits[0].log_softmax(1)
            for t, token in enumerate(row.completion_ids):
                total = total - logits[len(prompt) + t - 1, token] / sum(len(r.completion_ids) for r in spoken)
        return total

    expected, by_loop = slow(), gradients(slow())
    for pass_tokens in (0, 8):
        passes = step_passes({VALUE: rows, "policy": spoken}, pass_tokens, model.device)
        assert (len(passes) > 1) == (pass_tokens > 0)
        loss = torch.stack([mixed_q_loss(net, one, numbers, weight=0.7)[0] for one in passes]).sum()
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
        found = gradients(loss)
        assert found.keys() == by_loop.keys()
        assert all(torch.allclose(found[name], grad, atol=1e-5) for name, grad in by_loop.items())
    assert float(by_loop["1.weight"].abs().sum()) > 0
    assert any(float(grad.abs().sum()) > 0 for name, grad in by_loop.items() if "lora" in name)


def test_values_of_many_prompts_are_those_of_each_alone(bench: models.Bench) -> None:
    model = models.shake(trainable(bench.context(Config(), {}), None), 3, 0.2).eval()
    head = new_head(model, spread=1.0, seed=1)
    prompts = [[5, 6, 7 + i % 3, *range(8, 8 + i % 5)] for i in range(50)]
    alone = [q_values(model, head, [ids])[0] for ids in prompts]
    assert q_values(model, head, prompts) == pytest.approx(alone, abs=1e-5)
    assert len({round(v, 4) for v in alone}) > 5


def test_head_and_adapter_of_the_target_follow_every_step(bench: models.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """(1 - rate)^n target_0 + sum_k rate (1 - rate)^(n - k) theta_k, of the head as of the adapter."""
    states: list[dict[str, torch.Tensor]] = []

    def watched(net: Any, *args: Any, after_step: Any, **options: Any) -> Any:
        def also(done: Any) -> None:
            states.append(trainable_state(net))
            after_step(done)

        return fit(net, *args, after_step=also, **options)

    monkeypatch.setattr(network, "fit", watched)
    run(bench, lr=0.01, batch=2, epochs=2, ema_rate=0.3)
    n = len(states)
    assert n == 4
    for folder, file, prefix in (
        ("target_head", "value_head.safetensors", "1."), ("target", "adapter_model.safetensors", "0."),
    ):  # fmt: skip
        start, found = (load_file(bench.memory.files[run_id, folder] / file) for run_id in ("distill0", "q"))
        for name, value in found.items():
            live = [
                state[prefix + name.replace(".weight", ".default.weight") if prefix == "0." else prefix + name]
                for state in states
            ]
            expected = 0.7**n * start[name] + sum(0.3 * 0.7 ** (n - k) * live[k - 1] for k in range(1, n + 1))
            assert torch.allclose(value, expected, atol=1e-6)


def test_it_learns_the_rewards_and_nothing_without_steps(bench: models.Bench) -> None:
    """Two ends, 1 and 0, of 4 targets: the mean squared error falls from above .1 to below .01; at a rate of 1e-12 it stays.
    The priorities are what is left of it.
    """
    config: dict[str, Any] = {"steps": 9, "epochs": 60, "batch": 4, "policy_rows": 0}
    stuck = run(bench, FIRST, lr=1e-12, **config).metrics
    outputs = run(bench, FIRST, lr=0.02, **config)
    assert stuck["q_critic/q_loss"] > 0.1 and stuck["q_critic/q_loss"] == pytest.approx(stuck["q_critic/q_loss_first"])
    assert outputs.metrics["q_critic/q_loss"] < 0.01
    left = [row["loss"] for row in outputs.rows["priorities"]]
    assert len(left) == 4 and all(0 <= e < 0.2 for e in left)


@pytest.mark.parametrize("gamma", [0.9, 0.0])
def test_one_step_backups_bring_the_end_s_worth_to_the_step_before_it(base: Path, tmp_path: Path, gamma: float) -> None:
    """Visits of two steps that part at the first: after a photo the policy goes on to give a discount, which wins, after a
    passport to give cash, which loses. Q of the first step is gamma Q of what comes next, by the target network alone.
    """

    def goes_on(prompt: str, request: Any) -> str:
        return "Action: give discount" if "photo done." in prompt else "Action: give cash"

    bench = models.Bench(base, tmp_path, engine=models.Recorder(goes_on))
    won = [("Action: check photo", "photo done."), ("Action: give discount", "discount done. pass.")]
    lost = [("Action: check passport", "passport done."), ("Action: give cash", "cash done. fail.")]
    visits = [
        models.make_episode(bench.engine, "Won", won, Outcome.SCORED, reward=1.0),
        models.make_episode(bench.engine, "Lost", lost, Outcome.SCORED),
    ]
    bench.memory.keep("collect0", Outputs({}, episode_rows(visits, 0)))
    inputs: dict[str, list[str]] = dict(FIRST)
    for i in range(8):
        found = wanted(run(bench, inputs, f"q{i}", steps=1, gamma=gamma, alpha=0, ema_rate=0.3, lr=0.02, epochs=40, batch=4, policy_rows=0))  # fmt: skip
        inputs = FIRST | {"q_critic": [f"q{i}"]}
    assert found["Won", 1]["q"] == 1.0 and found["Lost", 1]["q"] == 0.0
    assert found["Won", 0]["q"] == pytest.approx(gamma, abs=0.1)
    assert found["Lost", 0]["q"] == pytest.approx(0.0, abs=0.1)


def test_priorities_are_the_sizes_of_the_errors(bench: models.Bench) -> None:
    outputs = run(bench, lr=1e-12)
    q = outputs.metrics["q_critic/q"]
    errors = {(row["episode_id"], row["turn"]): row["loss"] for row in outputs.rows["priorities"]}
    found = wanted(outputs)
    assert errors.keys() == found.keys()
    mean_square = sum(e * e for e in errors.values()) / len(errors)
    assert outputs.metrics["q_critic/q_loss"] == pytest.approx(mean_square, rel=1e-4)
    assert math.isfinite(q)


def test_student_prompts_are_the_language_critic_s_and_hold_no_number(bench: models.Bench) -> None:
    for row in run(bench).rows["targets"]:
        assert row["role"] == VALUE and row["completion_ids"] == []
        assert row["student_prompt"].rstrip().endswith("<assistant>") and "Predict." in row["student_prompt"]
        assert "Q =" not in row["student_prompt"]
