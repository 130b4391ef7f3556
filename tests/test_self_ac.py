"""Self-AC as a stage: what is trained, that packing changes nothing, what a broken row costs, and a bandit that it must
learn.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import load_file
from self_ac_play import keep_episodes, row, run, tensors

from stages import self_ac
from stages.frame.contract import Outputs
from stages.frame.sections import RolesConfig
from stages.frame.types import MissingInput, Request, TurnwiseError, UsageError
from stages.learn.checkpoint import save_checkpoint
from stages.llm.hf import HfEngine
from stages.train.actor_critic import Part, credited_pass


@pytest.mark.parametrize("advantage_scale", ["own", "batch"])
def test_a_step_of_many_rows_is_the_step_of_one(bench: models.Bench, advantage_scale: str) -> None:
    """One long row, or one episode a row whose gradients are summed: the same weights after two epochs, to rounding."""
    keep_episodes(bench)
    options: dict[str, Any] = {"batch": 4, "lr": 0.01, "advantage_scale": advantage_scale}
    of_one = run(bench, name="one", **options).metrics
    of_many = run(bench, name="many", row_tokens=1, **options).metrics
    first = [name for name in of_one if name.endswith(("_first", "_divisor"))]
    assert {"self_ac/explained_variance_first", "self_ac/advantage_deviation_first"} <= set(first)
    assert {name: of_many[name] for name in first} == pytest.approx(
        {name: of_one[name] for name in first}, rel=1e-4, abs=1e-5
    )
    one, many = tensors(bench, "one"), tensors(bench, "many")
    assert set(one) == set(many)
    for name, value in one.items():
        # Adam's first steps amplify rounding of tiny gradients
        assert torch.allclose(value, many[name], atol=2e-5), name
    assert any(bool(value.abs().max() > 0) for name, value in one.items() if "lora_B" in name)


@pytest.mark.parametrize("changes", [{}, {"kl_coef": 0.1, "soft_prompt": 2}])
def test_layers_that_are_worked_out_again_give_the_same_weights(bench: models.Bench, changes: dict[str, Any]) -> None:
    keep_episodes(bench)
    run(bench, name="plain", batch=4, lr=0.01, **changes)
    bench.checkpointing = True
    run(bench, name="again", batch=4, lr=0.01, **changes)
    plain, again = tensors(bench, "plain"), tensors(bench, "again")
    for name, value in plain.items():
        assert torch.allclose(value, again[name], atol=2e-5), name


def test_an_adapter_each_and_layers_that_are_worked_out_again_do_not_go_together(bench: models.Bench) -> None:
    keep_episodes(bench)
    bench.checkpointing = True
    with pytest.raises(UsageError, match=r"self_ac\.separate: .*gradient_checkpointing"):
        run(bench, separate=True)


def test_the_next_run_goes_on_from_adapter_and_head(bench: models.Bench) -> None:
    keep_episodes(bench)
    run(bench, lr=0.01)
    run(bench, {"collect": ["collect0"], "self_ac": ["self_ac0"]}, "self_ac1", 1, lr=1e-12)
    before, after = tensors(bench), tensors(bench, "self_ac1")
    assert all(torch.allclose(before[name], value, atol=1e-6) for name, value in after.items())


def test_in_the_warm_up_only_the_critic_learns(bench: models.Bench) -> None:
    """The head reads a detached body then: the adapter's B stays at its 0, and the head moves."""
    keep_episodes(bench)
    run(bench, warmup=1, lr=0.01)
    assert tensors(bench)["head.bias"] != 0
    assert all(not value.any() for name, value in tensors(bench).items() if "lora_B" in name)
    run(bench, {"collect": ["collect0"]}, "later", 1, warmup=1, value_grad_scale=0.0, lr=0.01, ratio="token")
    assert any(bool(value.any()) for name, value in tensors(bench, "later").items() if "lora_B" in name)


def test_the_critic_learns_the_return(bench: models.Bench, base: Path) -> None:
    """Won and lost episodes have other openings: explained variance near 0 before, above .9 after."""
    keep_episodes(bench)
    metrics = run(bench, lr=0.02, epochs=60, alpha=1.0).metrics
    assert metrics["self_ac/explained_variance_first"] < 0.5
    assert metrics["self_ac/explained_variance"] > 0.9


def test_actor_and_critic_with_an_adapter_each_do_not_touch_one_another(bench: models.Bench) -> None:
    """The critic's weight in the loss is nothing to the actor, except that both are clipped together: so no clip here."""
    keep_episodes(bench)
    for name, alpha in (("little", 0.1), ("much", 0.9)):
        run(bench, name=name, separate=True, advantage="mc", alpha=alpha, lr=0.01, epochs=1, batch=4, clip=1e9)
    little, much = tensors(bench, "little"), tensors(bench, "much")
    # Adam does not see the size of a gradient, so one step of each is the same.
    assert all(torch.allclose(little[name], much[name], atol=1e-5) for name in little if "lora" in name)
    critic = load_file(bench.memory.files["little", "critic"] / "adapter_model.safetensors")
    assert any(bool(value.any()) for name, value in critic.items() if "lora_B" in name)
    actor = load_file(bench.memory.files["little", "adapter"] / "adapter_model.safetensors")
    assert any(not torch.equal(value, critic[name]) for name, value in actor.items())
    # And both go on from where they were.
    run(bench, {"collect": ["collect0"], "self_ac": ["little"]}, "later", 1, separate=True, lr=1e-12)
    after = load_file(bench.memory.files["later", "critic"] / "adapter_model.safetensors")
    assert all(torch.allclose(after[name], value, atol=1e-6) for name, value in critic.items())
    with pytest.raises(UsageError, match=r"self_ac.separate: .*set self_ac.soft_prompt to 0"):
        run(bench, name="both", separate=True, soft_prompt=2)


@pytest.mark.parametrize(("kill", "advantage_scale"), [(1, "own"), (3, "own"), (3, "batch")])
def test_a_killed_stage_goes_on_from_its_checkpoint_to_the_same_weights(
    bench: models.Bench, monkeypatch: pytest.MonkeyPatch, kill: int, advantage_scale: str
) -> None:
    """Bit by bit: weights, moments, metrics, and the first step's ledger and certificates."""
    keep_episodes(bench)
    options: dict[str, Any] = {"epochs": 2, "batch": 2, "lr": 0.01, "checkpoint_every": 1}
    options["advantage_scale"] = advantage_scale
    whole = run(bench, name="whole", **options)

    def killed(path: Path, model: Any, optimiser: Any, history: Any = (), **more: Any) -> None:
        save_checkpoint(path, model, optimiser, history, **more)
        if len(history) == kill:
            raise KeyboardInterrupt

    monkeypatch.setattr(self_ac, "save_checkpoint", killed)
    with pytest.raises(KeyboardInterrupt):
        run(bench, name="broken", **options)
    monkeypatch.setattr(self_ac, "save_checkpoint", save_checkpoint)
    steps_done: list[Part] = []

    def counted(model: Any, head: Any, part: Part, *args: Any, **more: Any) -> Any:
        steps_done.append(part)
        return credited_pass(model, head, part, *args, **more)

    monkeypatch.setattr(self_ac, "credited_pass", counted)
    again = run(bench, name="broken", **options)
    assert (dict(again.metrics), again.curves, again.rows) == (dict(whole.metrics), whole.curves, whole.rows)
    assert again.metrics["self_ac/cert_gap_turns"] > 0
    assert len(steps_done) == 4 - kill
    for name in (
        "adapter/adapter_model.safetensors",
        "head/value_head.safetensors",
        "moments.safetensors",
        "ledger.parquet",
    ):
        first, *rest = name.split("/")
        files = [bench.memory.files[which, first].joinpath(*rest).read_bytes() for which in ("whole", "broken")]
        assert files[0] == files[1], name


def test_the_moments_of_adam_go_on_in_the_next_iteration(bench: models.Bench) -> None:
    """Two iterations of one step on the same episodes are the two steps of one iteration."""
    keep_episodes(bench)
    options: dict[str, Any] = {"batch": 4, "lr": 0.01, "clip": 1e9}
    run(bench, name="together", epochs=2, **options)
    run(bench, name="first", epochs=1, **options)
    run(bench, {"collect": ["collect0"], "self_ac": ["first"]}, "second", 1, epochs=1, **options)
    run(bench, {"collect": ["collect0"], "self_ac": ["first"]}, "anew", 1, epochs=1, keep_moments=False, **options)
    together, second, anew = tensors(bench, "together"), tensors(bench, "second"), tensors(bench, "anew")
    assert all(torch.allclose(value, second[name], atol=2e-5) for name, value in together.items())
    assert any(not torch.allclose(value, anew[name], atol=1e-3) for name, value in together.items())


def test_the_head_may_have_a_rate_of_its_own(bench: models.Bench) -> None:
    """Adam's first step has the length of the rate."""
    keep_episodes(bench)
    run(bench, name="fresh", lr=1e-12)
    run(bench, epochs=1, batch=4, lr=0.001, head_lr=0.1)
    before, after = tensors(bench, "fresh"), tensors(bench)
    assert float((after["head.bias"] - before["head.bias"]).abs()) == pytest.approx(0.1, rel=1e-3)
    moved = max(float((after[name] - before[name]).abs().max()) for name in after if "lora" in name)
    assert moved == pytest.approx(0.001, rel=1e-2)


def test_a_price_on_divergence_keeps_the_policy_near_its_base(bench: models.Bench) -> None:
    """In units of the reward: at 100 a nat one win is worth a hundredth of a nat over the episode."""
    keep_episodes(bench)
    free, priced = (
        run(bench, name=f"k{coef}", kl_coef=coef, lr=0.01, epochs=20, batch=4, ratio="token").metrics
        for coef in (1e-9, 100.0)
    )
    assert free["self_ac/kl_base_first"] == pytest.approx(0.0, abs=1e-6)  # a fresh adapter is the base
    assert 0 < priced["self_ac/kl_base"] < 0.01 < free["self_ac/kl_base"]


def test_autocast_computes_in_16_bits_and_leaves_the_weights_in_32(bench: models.Bench) -> None:
    keep_episodes(bench)
    exact, rounded = (run(bench, name=str(on), autocast=on, epochs=1, batch=4).metrics for on in (False, True))
    assert rounded["self_ac/value_loss_first"] != exact["self_ac/value_loss_first"]
    assert rounded["self_ac/entropy_first"] == pytest.approx(exact["self_ac/entropy_first"], rel=0.02)
    assert {value.dtype for value in tensors(bench, "True").values()} == {torch.float32}


def test_a_head_of_another_width_is_refused(bench: models.Bench, tmp_path: Path) -> None:
    from stages.learn.value_head import ValueHead, save_head

    keep_episodes(bench)
    run(bench)
    save_head(ValueHead(99), tmp_path / "wide")
    bench.memory.files["self_ac0", "head"] = tmp_path / "wide"
    with pytest.raises(UsageError, match=r"width 99.*16"):
        run(bench, {"collect": ["collect0"], "self_ac": ["self_ac0"]}, "self_ac1")


def test_another_temperature_than_1_is_refused(bench: models.Bench) -> None:
    keep_episodes(bench)
    bench.roles = RolesConfig(policy_temperature=0.7)
    with pytest.raises(UsageError, match=r"roles.policy_temperature"):
        run(bench)


def test_a_base_with_dropout_is_refused_before_the_first_step(bench: models.Bench, tmp_path: Path) -> None:
    bench.base = Path(shutil.copytree(bench.base, tmp_path / "drops"))
    shape = json.loads((bench.base / "config.json").read_text())
    (bench.base / "config.json").write_text(json.dumps(shape | {"attention_dropout": 0.1}))
    keep_episodes(bench)
    with pytest.raises(UsageError, match=r"model\.path: .*found attention_dropout = 0\.1 in its config"):
        run(bench)


def test_no_episode_at_all_says_what_to_do(bench: models.Bench) -> None:
    bench.memory.keep("collect0", Outputs({}, {"episodes": [], "turns": []}))
    with pytest.raises(MissingInput, match="collect more"):
        run(bench)


def play(bench: models.Bench, engine: HfEngine, run_id: str, adapter: str | None, lost: float = 0.0) -> float:
    """128 games of one token; an even one wins 1 more than `lost`. Leaves their rows and returns the share of wins."""
    messages = [{"role": "system", "content": "w1"}, {"role": "user", "content": "w2"}]
    prompt = engine.encode(messages)
    replies = engine.generate([Request(prompt, 1, 1.0, seed, adapter) for seed in range(128)])
    heads: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    for i, reply in enumerate(replies):
        reward = lost + float(reply.token_ids[0] % 2 == 0)
        heads.append(
            {
                "episode_id": f"{run_id}-{i}",
                "scenario_id": "bandit",
                "total_reward": reward,
                "outcome": "scored",
                "messages": messages,
            }
        )
        turns.append(
            {
                "episode_id": f"{run_id}-{i}",
                "turn": 0,
                **row(list(prompt), list(reply.token_ids), reward),
                "log_probs": list(reply.log_probs),
            }
        )
    bench.memory.keep(run_id, Outputs({}, {"episodes": heads, "turns": turns}))
    return float(sum(h["total_reward"] for h in heads) / len(heads)) - lost


def test_log_probs_of_another_model_stop_the_run_and_of_this_one_do_not(base: Path, tmp_path: Path) -> None:
    """Each token's log-prob off by .05, by .2, and by .2 to either side in turn, which keeps the mean."""
    engine = HfEngine(str(base))
    bench = models.Bench(base, tmp_path, engine=engine)
    play(bench, engine, "collect0", None)
    rows, heads = (bench.memory.tables[table, "collect0"] for table in ("turns", "episodes"))
    for name, off in (("near", lambda i: 0.05), ("far", lambda i: 0.2), ("to_and_fro", lambda i: 0.2 * (-1) ** i)):
        moved = [row | {"log_probs": [x + off(i) for x in row["log_probs"]]} for i, row in enumerate(rows)]
        bench.memory.keep(name, Outputs({}, {"episodes": heads, "turns": moved}))
    found = run(bench, {"collect": ["near"]}, "near0", lr=1e-12, batch=128, max_gap=0.1).metrics
    assert found["self_ac/gap_mean_first"] == pytest.approx(0.05, abs=1e-4)
    for name in ("far", "to_and_fro"):
        with pytest.raises(
            TurnwiseError,
            match=r"self_ac: log-probs of engine and trainer differ by 0.2 .* model.path .* raise self_ac.max_gap",
        ):
            run(bench, {"collect": [name]}, f"{name}0", max_gap=0.1)


PPO = {"advantage": "gae", "separate": True, "ratio": "token", "known_end": True, "per": "episode", "head_lr": 0.1}


@pytest.mark.parametrize(
    ("config", "lost", "learns"),
    [
        ({}, 0.0, True),
        ({"lr": 1e-12}, 0.0, False),
        ({"alpha": 0.0, "advantage": "group"}, 0.0, True),  # GRPO
        (PPO, 2.0, True),
        (PPO | {"alpha": 0.0}, 2.0, False),  # its critic is never trained
    ],
)
def test_it_learns_a_bandit(base: Path, tmp_path: Path, config: dict[str, Any], lost: float, learns: bool) -> None:
    """Untrained about half of 128 plays are won (standard error 0.044); after 12 rounds 3 in 4. Where a lost game pays,
    too, that takes a critic: without one every token that was sampled is made likelier.
    """
    engine = HfEngine(str(base))
    bench = models.Bench(base, tmp_path, engine=engine)
    start = play(bench, engine, "collect0", None, lost)
    assert start < 0.6
    inputs: dict[str, list[str]] = {"collect": ["collect0"]}
    options = {"lr": 0.02, "epochs": 4, "batch": 128, "max_gap": 1e-4} | config
    for i in range(12):
        metrics = run(bench, inputs, f"self_ac{i}", i, **options).metrics
        assert metrics["self_ac/gap_max_first"] < 1e-4  # the engine's log-probs are the trainer's
        engine.load_adapter(f"self_ac{i}", bench.memory.files[f"self_ac{i}", "adapter"])
        share = play(bench, engine, f"plays{i}", f"self_ac{i}", lost)
        inputs = {"collect": [f"plays{i}"], "self_ac": [f"self_ac{i}"]}
    assert share > 0.75 if learns else share < 0.6
    if options["lr"] < 1e-6:
        assert share == start
