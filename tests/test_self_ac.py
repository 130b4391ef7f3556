"""Self-AC as a stage: what is trained, that packing changes nothing, what a broken row costs, and a bandit that it must learn."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from stages import self_ac
from stages.contract import Outputs
from stages.learn.credit import LostCredit, returns_of
from stages.learn.shadow import BadEpisode, EpisodeTooLong, pack, unbroken
from stages.llm.hf import HfEngine
from stages.sections import RolesConfig
from stages.self_ac import SelfAcConfig
from stages.transitions import episode_rows
from stages.types import MissingInput, Outcome, Request, UsageError

CHECK, GIVE = ("Thought: t Action: check photo", "photo done."), ("Action: give cash", "cash done.")
CLOSE = ("Action: close phone", "phone done. Mia audits: fail.")
LENGTHS = (3, 1, 2, 3)


def keep_episodes(bench: models.Bench, run_id: str = "collect0", **changes: Any) -> list[Any]:
    """Four episodes of 3, 1, 2 and 3 turns, the second and the last one won, the third one cut short."""
    found = []
    for i, n in enumerate(LENGTHS):
        turns = [CHECK, GIVE, CLOSE][:n]
        outcome = Outcome.TRUNCATED if i == 2 else Outcome.SCORED
        found.append(models.make_episode(bench.engine, f"Ana{i}", turns, outcome, reward=float(i % 2), **changes))
    bench.memory.keep(run_id, Outputs({}, episode_rows(found, 0)))
    return found


@pytest.fixture
def bench(base: Path, tmp_path: Path) -> models.Bench:
    return models.Bench(base, tmp_path)


def run(bench: models.Bench, inputs: Any = None, name: str = "self_ac0", iteration: int = 0, **config: Any) -> Outputs:
    return bench.run(self_ac.STAGE, SelfAcConfig(**config), inputs or {"collect": ["collect0"]}, name=name, iteration=iteration)


def tensors(bench: models.Bench, name: str = "self_ac0") -> dict[str, torch.Tensor]:
    adapter = load_file(bench.memory.files[name, "adapter"] / "adapter_model.safetensors")
    head = load_file(bench.memory.files[name, "head"] / "value_head.safetensors")
    return {**adapter, **{f"head.{key}": value for key, value in head.items()}}


def test_a_step_of_many_rows_is_the_step_of_one(bench: models.Bench) -> None:
    """One long row, or one episode a row whose gradients are summed: the same weights after two epochs, to rounding."""
    keep_episodes(bench)
    of_one = run(bench, name="one", batch=4, lr=0.01).metrics
    of_many = run(bench, name="many", batch=4, lr=0.01, row_tokens=1).metrics
    first = [name for name in of_one if name.endswith("_first")]
    assert "self_ac/explained_variance_first" in first
    assert {name: of_many[name] for name in first} == pytest.approx({name: of_one[name] for name in first}, rel=1e-4, abs=1e-5)
    one, many = tensors(bench, "one"), tensors(bench, "many")
    assert set(one) == set(many)
    for name, value in one.items():
        assert torch.allclose(value, many[name], atol=2e-5), name  # Adam's first steps amplify rounding of tiny gradients
    assert any(bool(value.abs().max() > 0) for name, value in one.items() if "lora_B" in name)


def test_the_next_run_goes_on_from_adapter_and_head(bench: models.Bench) -> None:
    keep_episodes(bench)
    run(bench, lr=0.01)
    run(bench, {"collect": ["collect0"], "self_ac": ["self_ac0"]}, "self_ac1", 1, lr=1e-12)
    before, after = tensors(bench), tensors(bench, "self_ac1")
    assert all(torch.allclose(before[name], value, atol=1e-6) for name, value in after.items())


def test_in_the_warm_up_only_the_critic_learns(bench: models.Bench) -> None:
    """The head reads a detached body then, so there is nothing that could move the adapter: B stays at its 0, and the head moves."""
    keep_episodes(bench)
    run(bench, warmup=1, lr=0.01)
    assert tensors(bench)["head.bias"] != 0
    assert all(not value.any() for name, value in tensors(bench).items() if "lora_B" in name)
    run(bench, {"collect": ["collect0"]}, "later", 1, warmup=1, value_grad_scale=0.0, lr=0.01, ratio="token")
    assert any(bool(value.any()) for name, value in tensors(bench, "later").items() if "lora_B" in name)


def test_the_critic_learns_the_return(bench: models.Bench, base: Path) -> None:
    """Won and lost episodes have other openings, so the values can tell them: explained variance near 0 before, above .9 after."""
    keep_episodes(bench)
    metrics = run(bench, lr=0.02, epochs=60, alpha=1.0).metrics
    assert metrics["self_ac/explained_variance_first"] < 0.5
    assert metrics["self_ac/explained_variance"] > 0.9


def test_group_advantages_are_of_whole_episodes(bench: models.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    episodes = keep_episodes(bench)
    for row in bench.memory.tables["episodes", "collect0"]:
        row["scenario_id"] = "same"
    seen: dict[str, float] = {}
    real = self_ac.by_group

    def spy(heads: Any, config: Any) -> Any:
        found = real(heads, config)
        seen.update(found or {})
        return found

    monkeypatch.setattr(self_ac, "by_group", spy)
    run(bench, advantage="group")
    mean, spread = 0.5, 0.5
    assert seen == pytest.approx({e.id: (e.total_reward - mean) / spread for e in episodes}, abs=1e-4)


def test_a_group_of_one_says_what_to_do(bench: models.Bench) -> None:
    keep_episodes(bench)
    with pytest.raises(MissingInput, match=r"found a scenario with one episode; set collect.group to 4 or more"):
        run(bench, advantage="group")


def row(prompt: list[int], action: list[int], reward: float = 0.0) -> dict[str, Any]:
    return {"prompt_ids": prompt, "action_ids": action, "log_probs": [-0.5] * len(action), "reward": reward}


BROKEN = [row([5], [6, 7], 0.5), row([5, 6, 9], [8], 0.25), row([5, 6, 9, 8, 4], [3], 4.0)]


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_a_row_that_breaks_is_cut_and_every_state_keeps_its_return(gamma: float) -> None:
    """The second prompt does not begin with the first turn's ids. The oracle is the same episode, had it not broken."""
    first, second = unbroken(BROKEN, [5, 6, 9, 8, 4, 3, 2], False, gamma, ("e",))
    assert (first.ids, first.action_start, first.action_end) == ((5, 6, 7), (1,), (2,))
    assert (second.ids, second.rewards) == ((5, 6, 9, 8, 4, 3, 2), (0.25, 0.0, 4.0))
    assert (first.truncated, second.truncated, first.key, second.key) == (False, False, ("e",), ("e", 1))
    assert returns_of([first, second], 4.75, [0.5, 0.25, 4.0], gamma=gamma) == [sum(first.rewards), sum(second.rewards)]
    whole = [row([5], [6], 0.5), row([5, 6], [8], 0.25), row([5, 6, 8], [3], 4.0)]
    (same,) = unbroken(whole, [5, 6, 8, 3], False, gamma, ("e",))

    def returns(e: Any) -> list[float]:
        return [sum(gamma**j * r for j, r in enumerate(e.rewards[k:])) for k in range(len(e.rewards))]

    assert [*returns(first)[:-1], *returns(second)] == returns(same)


def test_a_truncated_episode_that_breaks_is_truncated_in_each_row() -> None:
    """What would have come is not known, so the last value of each row has to stand for it; no reward is counted twice."""
    rows = unbroken(BROKEN, [5, 6, 9, 8, 4, 3, 2], True, 1.0, ("e",))
    assert [(e.truncated, e.rewards) for e in rows] == [(True, (0.5, 0.0)), (True, (0.25, 4.0, 0.0))]
    assert returns_of(rows, 4.75, [0.5, 0.25, 4.0], gamma=1.0) == [0.5, 4.25]


def test_a_last_state_that_breaks_costs_its_observation_alone() -> None:
    (only,) = unbroken([row([5], [6], 1.0)], [5, 9, 9], True, 1.0, ("e",))
    assert (only.ids, only.rewards, only.truncated) == ((5, 6), (1.0, 0.0), True)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"log_probs": []}, "log-probs"), ({"action_ids": [], "log_probs": []}, "empty"), ({"reward": float("nan")}, "finite reward")],
)
def test_what_cannot_be_trained_on_stops_the_run_or_is_dropped_and_counted(bench: models.Bench, change: dict[str, Any], said: str) -> None:
    keep_episodes(bench)
    bench.memory.tables["turns", "collect0"][0].update(change)
    with pytest.raises(BadEpisode, match=rf"(?s)turn 0.*{said}"):
        run(bench)
    metrics = run(bench, unusable="drop").metrics
    assert (metrics["self_ac/dropped"], metrics["self_ac/rows"]) == (1, 3)


def test_an_episode_longer_than_the_model_is_never_cut(bench: models.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit lies just below the two longest episodes with their critic prompt."""
    lengths = sorted(len(bench.engine.encode(e.messages)) for e in keep_episodes(bench))
    limit = lengths[2] + len(bench.engine.encode([{"role": "system", "content": "Judge. pass. fail."}])) - 1
    monkeypatch.setattr(self_ac, "longest", lambda model: limit)
    with pytest.raises(EpisodeTooLong, match=f"wanted at most {limit} positions"):
        run(bench)
    assert run(bench, unusable="drop").metrics["self_ac/dropped"] == 2


def test_a_head_of_another_width_is_refused(bench: models.Bench, tmp_path: Path) -> None:
    from stages.learn.value_head import ValueHead, save_head

    keep_episodes(bench)
    run(bench)
    save_head(ValueHead(99), tmp_path / "wide")
    bench.memory.files["self_ac0", "head"] = tmp_path / "wide"
    with pytest.raises(UsageError, match=r"width 99.*16"):
        run(bench, {"collect": ["collect0"], "self_ac": ["self_ac0"]}, "self_ac1")


def test_steps_are_of_like_size() -> None:
    episodes = [unbroken([row([5, i], [6], 1.0)], [5, i, 6], False, 1.0, (f"e{i}",))[0] for i in range(9)]
    told = {e.key: 1.0 for e in episodes}
    found = self_ac.steps(episodes, told, None, [7], SelfAcConfig(batch=4, epochs=1), rng=random.Random(0), device="cpu")
    assert [sum(len(part.episodes) for part in step) for step in found] == [3, 3, 3]


def test_another_temperature_than_1_is_refused(bench: models.Bench) -> None:
    keep_episodes(bench)
    bench.roles = RolesConfig(policy_temperature=0.7)
    with pytest.raises(UsageError, match=r"roles.policy_temperature"):
        run(bench)


def test_no_episode_at_all_says_what_to_do(bench: models.Bench) -> None:
    bench.memory.keep("collect0", Outputs({}, {"episodes": [], "turns": []}))
    with pytest.raises(MissingInput, match="collect more"):
        run(bench)


@pytest.mark.parametrize("row_tokens", [1, 4096])
def test_the_first_step_is_written_down_with_shares_that_add_up_to_its_loss(bench: models.Bench, row_tokens: int) -> None:
    """Both episodes of the first step, in one row or in two, and none of the second step."""
    episodes = {e.id: e for e in keep_episodes(bench)}
    curves = run(bench, epochs=1, batch=3, lr=0.01, row_tokens=row_tokens).curves
    entries = pq.read_table(bench.memory.files["self_ac0", "ledger.parquet"]).to_pylist()
    names = {entry["episode"] for entry in entries}
    assert (len(names), names < set(episodes)) == (2, True)
    for name in names:
        mine = [entry for entry in entries if entry["episode"] == name]
        produced = [token for turn in episodes[name].turns for token in turn.completion.token_ids]
        assert [entry["token_id"] for entry in mine if entry["in_action"]] == produced
        assert sum({entry["turn"]: entry["reward"] for entry in mine if entry["turn"] >= 0}.values()) == episodes[name].total_reward
        assert "".join(entry["text"] for entry in mine if entry["turn"] == 0) == CHECK[0]
    assert sum(entry["loss_share"] for entry in entries) == pytest.approx(curves["self_ac/step_actor_loss"][0], rel=1e-4)


def test_the_stage_stops_where_credit_is_lost(bench: models.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_episodes(bench)

    def late(*args: Any, **options: Any) -> Any:
        found = pack(*args, **options)
        return replace(found, target_positions=found.target_positions + 1, source_positions=found.source_positions + 1)

    monkeypatch.setattr(self_ac, "pack", late)
    with pytest.raises(LostCredit, match=r"episode Ana\d, turn 0, token \d+ \(id \d+\): wanted its turn's credit .* found none"):
        run(bench)


def test_the_stage_stops_where_rewards_do_not_sum_to_the_stored_return(bench: models.Bench) -> None:
    keep_episodes(bench)
    bench.memory.tables["episodes", "collect0"][3]["total_reward"] = 0.5
    with pytest.raises(LostCredit, match=r"episode Ana3: wanted rewards over its turns that sum to its return 0.5, found 1"):
        run(bench)


def play(bench: models.Bench, engine: HfEngine, run_id: str, adapter: str | None) -> float:
    """128 games of one token; an even one wins. Leaves their rows and returns the share of wins."""
    messages = [{"role": "system", "content": "w1"}, {"role": "user", "content": "w2"}]
    prompt = engine.encode(messages)
    replies = engine.generate([Request(prompt, 1, 1.0, seed, adapter) for seed in range(128)])
    heads: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    for i, reply in enumerate(replies):
        reward = float(reply.token_ids[0] % 2 == 0)
        heads.append({"episode_id": f"{run_id}-{i}", "scenario_id": "bandit", "total_reward": reward, "outcome": "scored", "messages": messages})
        turns.append(
            {"episode_id": f"{run_id}-{i}", "turn": 0, **row(list(prompt), list(reply.token_ids), reward), "log_probs": list(reply.log_probs)}
        )
    bench.memory.keep(run_id, Outputs({}, {"episodes": heads, "turns": turns}))
    return float(sum(h["total_reward"] for h in heads) / len(heads))


def test_it_learns_a_bandit(base: Path, tmp_path: Path) -> None:
    """Untrained, and trained at a rate of 1e-12, about half of 128 plays are won (standard error 0.044); after 8 rounds 3 in 4."""
    engine = HfEngine(str(base))
    bench = models.Bench(base, tmp_path, engine=engine)
    start = play(bench, engine, "collect0", None)
    assert start < 0.6
    for name, lr in (("still", 1e-12), ("learning", 0.02)):
        inputs: dict[str, list[str]] = {"collect": ["collect0"]}
        for i in range(8):
            metrics = run(bench, inputs, f"{name}{i}", i, lr=lr, epochs=4, batch=128).metrics
            assert abs(metrics["self_ac/kl_old_first"]) < 1e-6  # the first step's ratios are 1: the engine's log-probs are the trainer's
            engine.load_adapter(f"{name}{i}", bench.memory.files[f"{name}{i}", "adapter"])
            share = play(bench, engine, f"plays {name}{i}", f"{name}{i}")
            inputs = {"collect": [f"plays {name}{i}"], "self_ac": [f"{name}{i}"]}
        if lr < 1e-6:
            assert share == start
        else:
            assert share > 0.75
