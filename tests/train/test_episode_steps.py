"""From episodes to the steps of Self-AC: what a broken row costs, what cannot be trained on, and that no credit is lost
on the way.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import models
import pyarrow.parquet as pq
import pytest
from self_ac_play import CHECK, keep_episodes, row, run

from stages import self_ac
from stages.learn.credit import LostCredit, returns_of
from stages.learn.episode_row import BadEpisode, EpisodeTooLong, pack, unbroken
from stages.train import episode_steps
from stages.train.actor_critic import SelfAcConfig
from stages.train.episode_steps import Trainable, steps

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
    [
        ({"log_probs": []}, "log-probs"),
        ({"action_ids": [], "log_probs": []}, "no token"),
        ({"reward": float("nan")}, "reward must be finite"),
    ],
)
def test_what_cannot_be_trained_on_stops_the_run_or_is_dropped_and_counted(
    bench: models.Bench, change: dict[str, Any], said: str
) -> None:
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
    with pytest.raises(EpisodeTooLong, match=f"the model has {limit} positions"):
        run(bench)
    assert run(bench, unusable="drop").metrics["self_ac/dropped"] == 2


def test_steps_are_of_like_size() -> None:
    episodes = [unbroken([row([5, i], [6], 1.0)], [5, i, 6], False, 1.0, (f"e{i}",))[0] for i in range(9)]
    told = {e.key: 1.0 for e in episodes}
    found = steps(
        Trainable(tuple((e,) for e in episodes), told, None, {}),
        [7],
        SelfAcConfig(batch=4, epochs=1),
        rng=random.Random(0),
        device="cpu",
    )
    assert [sum(len(part.episodes) for part in step) for step in found] == [3, 3, 3]


def test_per_episode_counts_a_broken_episode_once_and_keeps_its_rows_in_one_step() -> None:
    broken = unbroken(BROKEN, [5, 6, 9, 8, 4, 3, 2], False, 1.0, ("e",))
    whole = unbroken([row([5], [6], 1.0)], [5, 6], False, 1.0, ("f",))
    told = {e.key: sum(e.rewards) for e in (*broken, *whole)}
    found = Trainable((tuple(broken), tuple(whole)), told, None, {})
    config = SelfAcConfig(batch=2, epochs=1, per="episode", row_tokens=1)
    (step,) = steps(found, [7], config, rng=random.Random(0), device="cpu")
    assert {(part.normaliser, part.n_states) for part in step} == {(2.0, 7.0)}
    assert sorted(part.episodes[0].key for part in step) == [("e",), ("e", 1), ("f",)]
    one_each = steps(found, [7], SelfAcConfig(batch=1, epochs=1), rng=random.Random(0), device="cpu")
    assert sorted(sorted(e.key for part in parts for e in part.episodes) for parts in one_each) == [
        [("e",), ("e", 1)],
        [("f",)],
    ]


@pytest.mark.parametrize("row_tokens", [1, 4096])
def test_the_first_step_is_written_down_with_shares_that_add_up_to_its_loss(
    bench: models.Bench, row_tokens: int
) -> None:
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
        assert (
            sum({entry["turn"]: entry["reward"] for entry in mine if entry["turn"] >= 0}.values())
            == episodes[name].total_reward
        )
        assert "".join(entry["text"] for entry in mine if entry["turn"] == 0) == CHECK[0]
    assert sum(entry["loss_share"] for entry in entries) == pytest.approx(
        curves["self_ac/step_actor_loss"][0], rel=1e-4
    )


def test_the_stage_stops_where_credit_is_lost(bench: models.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_episodes(bench)

    def late(*args: Any, **options: Any) -> Any:
        found = pack(*args, **options)
        return replace(found, target_positions=found.target_positions + 1, source_positions=found.source_positions + 1)

    monkeypatch.setattr(episode_steps, "pack", late)
    with pytest.raises(
        LostCredit, match=r"episode Ana\d, turn 0, token \d+ \(id \d+\): wanted its turn's credit .* found none"
    ):
        run(bench)


def test_the_stage_stops_where_rewards_do_not_sum_to_the_stored_return(bench: models.Bench) -> None:
    keep_episodes(bench)
    bench.memory.tables["episodes", "collect0"][3]["total_reward"] = 0.5
    with pytest.raises(
        LostCredit, match=r"episode Ana3: wanted rewards over its turns that sum to its return 0.5, found 1"
    ):
        run(bench)
