"""Self-AC as a stage: the advantages that its loss reads, of turns and of whole episodes, by hand; and with no critic at all."""

from __future__ import annotations

from typing import Any

import models
import pyarrow.parquet as pq
import pytest
import torch
from self_ac_play import keep_episodes, run, tensors

from stages.frame.contract import Config
from stages.frame.types import MissingInput
from stages.learn.adapter import base_of
from stages.learn.value_head import load_head
from stages.llm.roles import roles_of
from stages.train.actor_critic import SelfAcConfig
from stages.train.episode_steps import critic_prompt
from stages.train.model import trainable


def one_scenario(bench: models.Bench, n: int = 4) -> None:
    """The first n episodes are of one scenario, the others of one each."""
    for i, head in enumerate(bench.memory.tables["episodes", "collect0"]):
        head["scenario_id"] = "same" if i < n else f"own{i}"


def test_group_advantages_are_of_whole_episodes(bench: models.Bench) -> None:
    episodes = keep_episodes(bench)
    one_scenario(bench)
    run(bench, advantage="group", batch=4)
    entries = pq.read_table(bench.memory.files["self_ac0", "ledger.parquet"]).to_pylist()
    seen = {(entry["episode"], entry["advantage"]) for entry in entries if entry["in_action"]}
    mean, spread = 0.5, 0.5
    assert dict(seen) == pytest.approx({e.id: (e.total_reward - mean) / spread for e in episodes}, abs=1e-4)
    assert len(seen) == 4


def advantages_by_turn(bench: models.Bench, name: str) -> dict[tuple[str, int], float]:
    """As the loss read them, of the first step."""
    entries = pq.read_table(bench.memory.files[name, "ledger.parquet"]).to_pylist()
    return {(entry["episode"], entry["turn"]): entry["advantage"] for entry in entries if entry["in_action"]}


@pytest.mark.parametrize(
    "kind", [{"advantage": kind} for kind in ("td_mean", "td1", "gae", "mc")] + [{"advantage": "gae", "separate": True}]
)
def test_advantages_of_one_scale_are_the_estimator_s_over_their_deviation(
    bench: models.Bench, kind: dict[str, Any]
) -> None:
    """All nine turns are in the first step, whose weights are those that sampled: deviation 1, whatever the estimator."""
    keep_episodes(bench)
    options: dict[str, Any] = {"batch": 4, "epochs": 1, "known_end": True, **kind}
    own = run(bench, name="own", **options).metrics
    batch = run(bench, name="batch", advantage_scale="batch", **options).metrics
    plain = advantages_by_turn(bench, "own")
    mean = sum(plain.values()) / len(plain)
    deviation = (sum((x - mean) ** 2 for x in plain.values()) / len(plain)) ** 0.5
    assert deviation == pytest.approx(own["self_ac/advantage_deviation"], rel=1e-4)
    assert own["self_ac/advantage_divisor"] == 1
    assert batch["self_ac/advantage_divisor"] == pytest.approx(deviation, rel=1e-4)
    assert 0.05 < deviation < 0.9
    assert batch["self_ac/advantage_deviation"] == pytest.approx(1.0, rel=1e-4)
    scaled = {turn: x / deviation for turn, x in plain.items()}
    assert advantages_by_turn(bench, "batch") == pytest.approx(scaled, rel=1e-3, abs=1e-4)


def test_group_advantages_of_one_scale_are_divided_by_the_batch_s_deviation_and_not_by_their_group_s(
    bench: models.Bench,
) -> None:
    """Two groups: 1 of 2 won, and none, which has no say in either way. Turns: 3 and 1, then 2 and 3."""
    episodes = keep_episodes(bench)
    for i, head in enumerate(bench.memory.tables["episodes", "collect0"]):
        head["scenario_id"] = f"group{i // 2}"
        head["total_reward"] = float(i == 1)
    for turn in bench.memory.tables["turns", "collect0"]:
        turn["reward"] = turn["reward"] if turn["episode_id"] == episodes[1].id else 0.0
    options: dict[str, Any] = {"batch": 4, "epochs": 1, "advantage": "group", "alpha": 0.0}
    run(bench, name="own", **options)
    divisor = run(bench, name="batch", advantage_scale="batch", **options).metrics["self_ac/advantage_divisor"]
    by_turn = [-0.5] * 3 + [0.5] + [0.0] * 5
    mean = sum(by_turn) / 9
    assert divisor == pytest.approx((sum((x - mean) ** 2 for x in by_turn) / 9) ** 0.5, rel=1e-5)
    assert [*advantages_by_turn(bench, "own").values()].count(0.0) == 5
    expected = {(e.id, k): {0: -0.5, 1: 0.5}.get(i, 0.0) for i, e in enumerate(episodes) for k in range(len(e.turns))}
    assert advantages_by_turn(bench, "own") == pytest.approx({turn: 2 * x for turn, x in expected.items()}, abs=1e-4)
    assert advantages_by_turn(bench, "batch") == pytest.approx({t: x / divisor for t, x in expected.items()}, abs=1e-4)


def plain_values(bench: models.Bench, run_id: str, adapter: str, prompts: list[tuple[int, ...]]) -> list[float]:
    """V of each state by a pass of its own: the head of a run on the last token of the state and the critic prompt."""
    model = trainable(bench.context(Config(), {}), bench.memory.files[run_id, adapter]).eval()
    head = load_head(bench.memory.files[run_id, "head"], width=base_of(model).config.hidden_size)
    asked = critic_prompt(bench.context(SelfAcConfig(), {}))
    with torch.no_grad():
        rows = [torch.tensor([[*prompt, *asked]]) for prompt in prompts]
        return [float(head(base_of(model).model(input_ids=ids).last_hidden_state[0, -1])) for ids in rows]


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("known_end", [False, True])
def test_gae_is_the_discounted_sum_of_later_errors_by_hand(
    bench: models.Bench, known_end: bool, separate: bool
) -> None:
    """Of adapters and a head that have learned, at gamma = .9 and lambda = .8; the third episode was cut short."""
    episodes = keep_episodes(bench)
    run(bench, name="before", lr=0.01, epochs=2, separate=separate)
    later = {"collect": ["collect0"], "self_ac": ["before"]}
    options = {"advantage": "gae", "gamma": 0.9, "gae_lambda": 0.8, "known_end": known_end, "separate": separate}
    run(bench, later, "gae", 1, batch=4, **options)
    found = advantages_by_turn(bench, "gae")
    for i, episode in enumerate(episodes):
        n, reward = len(episode.turns), float(i % 2)
        final = bench.engine.encode(roles_of(bench.roles).policy(episode.messages))
        prompts = [*(turn.prompt_ids for turn in episode.turns), final]
        v = plain_values(bench, "before", "critic" if separate else "adapter", prompts)
        ahead = 0.0 if i == 2 or known_end else reward - v[n]  # the end state's own error
        if known_end and i != 2:
            v[n] = reward
        by_hand = {}
        for k in reversed(range(n)):  # no turn but the last is paid, and that on the end state
            ahead = 0.9 * v[k + 1] - v[k] + 0.9 * 0.8 * ahead
            by_hand[episode.id, k] = ahead
        assert {turn: found[turn] for turn in by_hand} == pytest.approx(by_hand, abs=1e-4)
        assert len({round(value, 3) for value in v}) == n + 1
    assert len(found) == 9


def test_an_episode_without_a_group_is_left_out_and_counted(bench: models.Bench) -> None:
    keep_episodes(bench)
    one_scenario(bench, 3)
    metrics = run(bench, advantage="group").metrics
    assert (metrics["self_ac/alone"], metrics["self_ac/rows"]) == (1, 3)
    one_scenario(bench, 0)
    with pytest.raises(MissingInput, match=r"found none with two; set collect.group to 4 or more"):
        run(bench, advantage="group")


def test_without_a_critic_no_value_is_asked_for(bench: models.Bench) -> None:
    """GRPO: the head stays as it was made, no value is reported, and the policy moves."""
    keep_episodes(bench)
    one_scenario(bench)
    before = tensors(bench, "fresh") if run(bench, name="fresh", lr=1e-12) else {}
    metrics = run(bench, advantage="group", alpha=0.0, ratio="token", lr=0.01).metrics
    after = tensors(bench)
    assert not any("value_loss" in name or "explained_variance" in name for name in metrics)
    assert all(torch.allclose(after[name], before[name], atol=1e-9) for name in after if name.startswith("head."))
    assert any(bool(value.any()) for name, value in after.items() if "lora_B" in name)


def test_the_actor_alone_learns_the_same_with_and_without_shadows_in_its_row(bench: models.Bench) -> None:
    """alpha = 0 with values read, and without any: the shadows are seen by nobody, so the policies are equal."""
    keep_episodes(bench)
    one_scenario(bench)
    real = SelfAcConfig.has_critic
    run(bench, name="plain", advantage="group", alpha=0.0, lr=0.01)
    try:
        SelfAcConfig.has_critic = property(lambda config: True)  # type: ignore[method-assign, assignment]
        run(bench, name="shadowed", advantage="group", alpha=0.0, lr=0.01)
    finally:
        SelfAcConfig.has_critic = real  # type: ignore[method-assign]
    plain, shadowed = tensors(bench, "plain"), tensors(bench, "shadowed")
    assert all(torch.allclose(value, shadowed[name], atol=2e-5) for name, value in plain.items() if "lora" in name)
