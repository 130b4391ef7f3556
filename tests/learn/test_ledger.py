"""The ledger against a walk over episodes and tokens that shares no code with it, and its shares against the loss."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import shadows
import torch
from torch import Tensor

from stages.learn.credit import LostCredit
from stages.learn.episode_row import EpisodeIds, PackedRow, pack
from stages.learn.ledger import check_shares, ledger, step_targets
from stages.learn.losses import Ratio, turn_ppo_clip
from stages.learn.returns import advantages, turn_mask

RATIOS: list[Ratio] = ["turn", "turn_mean", "token"]
CLIP, Z = 0.2, 3.0


def episodes() -> list[EpisodeIds]:
    """Of 1, 4, 2 and 3 turns, the third one truncated, the last one a row that begins with turn 5 of its episode."""
    found = [shadows.make_episode(n, seed, truncated=n == 2) for seed, n in enumerate((1, 4, 2, 3))]
    found[2] = replace(found[2], rewards=(*found[2].rewards[:-1], 0.0))
    found[3] = replace(found[3], key=("late", 5))
    return found


def case(seed: int = 0, spread: float = 0.5) -> dict[str, Any]:
    """Random values, targets, advantages and log-probs for one row of those episodes."""
    rows = episodes()
    packed = pack(rows, shadows.CRITIC, max_positions=None)
    g = torch.Generator().manual_seed(seed)
    shape = packed.rewards.shape
    return {
        "packed": packed,
        "episodes": rows,
        "values_BM": torch.randn(shape, generator=g),
        "targets": step_targets(packed, torch.randn(shape, generator=g), gamma=0.9, n_max=3, known_end=False),
        "advantages_J": put_zero(torch.randn(int(packed.n_turns.sum()), generator=g)),
        "log_probs_K": (
            packed.old_log_probs + spread * torch.randn(packed.old_log_probs.shape, generator=g)
        ).requires_grad_(True),
    }


def put_zero(x: Tensor) -> Tensor:
    x[1] = 0.0
    return x


def slow(given: dict[str, Any], ratio: Ratio) -> list[dict[str, Any]]:
    """One dictionary an entry, by loops over episodes, turns and tokens."""
    found: list[dict[str, Any]] = []
    new, advantage_of = iter(given["log_probs_K"].tolist()), iter(given["advantages_J"].tolist())
    for b, e in enumerate(given["episodes"]):
        first = e.key[1] if len(e.key) > 1 else 0
        name = str(e.key[0])
        nothing = {
            "reward": None, "value": None, "target_1": None, "target_2": None, "target_3": None, "advantage": None,
            "ratio": None,
        }  # fmt: skip
        nothing |= {"old_log_prob": None, "log_prob": None}
        outside = {**nothing, "turn": -1, "in_action": False, "clipped": False, "loss_share": 0.0}
        entries = [
            {"episode": name, "first_turn": first, "position": p, "token_id": token, **outside}
            for p, token in enumerate(e.ids)
        ]
        entries.append({"episode": name, "first_turn": first, "position": len(e.ids), "token_id": -1, **outside})
        for k in range(e.n_turns + 1):
            state = {"reward": e.rewards[k], "value": float(given["values_BM"][b, k])}
            state |= {
                f"target_{n}": float(x[b, k]) if not (e.truncated and k == e.n_turns) else None
                for n, x in enumerate(given["targets"], 1)
            }
            if k == e.n_turns:
                entries[-1] |= {**state, "turn": first + k}
                continue
            a, olds = next(advantage_of), e.old_log_probs[k]
            news = [next(new) for _ in olds]
            logs = [now - old for now, old in zip(news, olds, strict=True)]
            whole = sum(logs) / (len(logs) if ratio == "turn_mean" else 1)
            for i, p in enumerate(range(e.action_start[k], e.action_end[k] + 1)):
                rho = math.exp(logs[i] if ratio == "token" else whole)
                bounded = min(max(rho, 1 - CLIP), 1 + CLIP)
                share = -min(rho * a, bounded * a) / Z / (1 if ratio == "token" else len(logs))
                held = bounded * a < rho * a
                entries[p] |= {
                    **state,
                    "turn": first + k,
                    "in_action": True,
                    "advantage": a,
                    "ratio": rho,
                    "clipped": held,
                    "loss_share": share,
                }
                entries[p] |= {"old_log_prob": olds[i], "log_prob": news[i]}
        found += entries
    return found


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_entry_equals_a_walk_over_the_episodes(ratio: Ratio, seed: int) -> None:
    given = case(seed)
    columns = ledger(**given, ratio=ratio, clip=CLIP, normaliser=Z)
    expected = slow(given, ratio)
    assert (
        {len(column) for column in columns.values()}
        == {len(expected)}
        == {sum(len(e.ids) + 1 for e in given["episodes"])}
    )
    assert set(columns) == set(expected[0])
    for i, entry in enumerate(expected):
        assert {name: columns[name][i] for name in columns} == pytest.approx(entry, abs=1e-5), i
    assert 0 < sum(columns["clipped"]) < sum(columns["in_action"])


@pytest.mark.parametrize("ratio", RATIOS)
def test_shares_add_up_to_the_loss_and_are_clipped_where_it_has_no_gradient(ratio: Ratio) -> None:
    given = case()
    row: PackedRow = given["packed"]
    columns = ledger(**given, ratio=ratio, clip=CLIP, normaliser=Z)
    loss, _ = turn_ppo_clip(
        given["log_probs_K"], row.old_log_probs, row.turn_of_token, given["advantages_J"], clip=CLIP, ratio=ratio, normaliser=Z
    )  # fmt: skip
    assert sum(columns["loss_share"]) == pytest.approx(float(loss.detach()), abs=1e-6)
    check_shares(columns, float(loss.detach()))
    still = torch.autograd.grad(loss, given["log_probs_K"])[0] == 0
    clipped = [one for one, acted in zip(columns["clipped"], columns["in_action"], strict=True) if acted]
    zero = (given["advantages_J"] == 0)[row.turn_of_token]
    assert torch.equal(torch.tensor(clipped) | zero, still)


def test_shares_that_do_not_add_up_stop_the_run() -> None:
    columns = ledger(**case(), ratio="turn", clip=CLIP, normaliser=Z)
    loss = sum(columns["loss_share"])
    with pytest.raises(LostCredit, match="wanted shares of the tokens that add up to the actor's loss"):
        check_shares(columns, loss + 0.01)
    moved = [*columns["loss_share"][1:], 1.0]
    with pytest.raises(LostCredit, match="add up"):
        check_shares({"loss_share": moved}, loss)
    check_shares(columns, math.nan)


def test_a_ratio_past_all_numbers_is_clipped_where_its_advantage_is_not_negative() -> None:
    given = case()
    given["log_probs_K"] = given["packed"].old_log_probs + 1000
    columns = ledger(**given, ratio="turn", clip=CLIP, normaliser=Z)
    for a, rho, share in zip(columns["advantage"], columns["ratio"], columns["loss_share"], strict=True):
        assert rho is None or rho == math.inf
        assert a is None or (share == math.inf if a < 0 else abs(share) <= a * (1 + CLIP) / Z)


@pytest.mark.parametrize("known_end", [False, True])
def test_the_targets_are_those_of_the_advantage(known_end: bool) -> None:
    """Their mean minus the value is `td_mean`; a truncated episode's last state has none."""
    given = case()
    row, values = given["packed"], given["values_BM"]
    targets = step_targets(row, values, gamma=0.9, n_max=5, known_end=known_end)
    told = (row.rewards, values, row.n_turns, row.truncated)
    wanted = advantages("td_mean", *told, gamma=0.9, n_max=5, known_end=known_end)
    turns = turn_mask(row.n_turns, values.shape[1])
    assert torch.allclose((torch.stack(targets).mean(0) - values)[turns], wanted[turns], atol=1e-6)
    assert [bool(torch.isnan(targets[0][b, n])) for b, n in enumerate(row.n_turns.tolist())] == [
        False,
        False,
        True,
        False,
    ]
