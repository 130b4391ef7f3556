"""The ledger of credit: every token of a packed row with its turn, reward, value, advantage and share of the loss.

It is for reading and uses the vectors that the loss gets. The loss is computed in another way, and the shares must add
up to it. Source: [ours].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stages.learn.credit import ADVICE, LostCredit
from stages.learn.episode_row import EpisodeIds, PackedRow, first_turn
from stages.learn.losses import Ratio
from stages.learn.returns import state_mask, td_targets

LOSS_TOLERANCE = 1e-4  # of the sum of |shares|: the loss exponentiates sums of fp32 log-probs, the shares 64-bit ones


def step_targets(row: PackedRow, values_BM: Tensor, *, gamma: float, n_max: int, known_end: bool) -> list[Tensor]:
    """target_1 .. target_n_max as the losses see them, (B, M) each, NaN on states without one. No gradient flows."""
    m = values_BM.shape[1]
    end_BM = (torch.arange(m, device=values_BM.device) == row.n_turns[:, None]) & ~row.truncated[:, None]
    ahead_BM = torch.where(end_BM, row.rewards, values_BM.detach()) if known_end else values_BM
    found = [
        td_targets(row.rewards, ahead_BM, row.n_turns, row.truncated, n=n, gamma=gamma) for n in range(1, n_max + 1)
    ]
    return [torch.where(state_mask(row.n_turns, row.truncated, m), one, torch.nan) for one in found]


def ledger(
    packed: PackedRow,
    episodes: Sequence[EpisodeIds],
    values_BM: Tensor,
    targets: Sequence[Tensor],
    advantages_J: Tensor,
    log_probs_K: Tensor,
    *,
    ratio: Ratio,
    clip: float,
    normaliser: float,
) -> dict[str, list[Any]]:
    """Columns of one entry a visible token, and after each episode's one for its end state s_N, which is no token.

        loss_share_t = -min(rho A, clip(rho, 1 - c, 1 + c) A) / Z,  divided by |a_j| where rho is of the whole turn

    The shares add up to the actor's loss, and not to 1: a loss whose parts cancel has no parts of 1. A turn's tokens
    share its term evenly, for the log-prob of each gets the same gradient from it.
    episode, first_turn: the row's key; with `position`, from 0 in the row, they name it. token_id: -1 at the end state.
    turn: -1 outside actions, N at the end state. in_action: the mask of the loss. reward, value, target_1, ..: of the
    state that the turn acted in, the same on all its tokens, or of the end state; else None. old_log_prob, log_prob:
    the engine's and the trainer's of the token.
    advantage, ratio: of the turn, or the token where `ratio` is token. These are None outside actions. clipped: the
    clip holds the gradient at 0. loss_share: 0 outside actions.
    episodes: of the row, in order. targets: see `step_targets`. The rest is as of `turn_ppo_clip`. No gradient flows.
    """
    row = packed.on_host
    b_R, t_R, i_R, k_R = _entries(row)
    first_R = torch.tensor([first_turn(e.key) for e in episodes])[b_R]
    log_probs_K, advantages_J = log_probs_K.detach().cpu(), advantages_J.detach().cpu().double()
    token_K = (log_probs_K - row.old_log_probs).double()
    rho_K, clipped_K, share_K = _terms(token_K, row.turn_of_token, advantages_J, ratio, clip, normaliser)
    states = {
        "reward": row.rewards,
        "value": values_BM,
        **{f"target_{n}": target for n, target in enumerate(targets, 1)},
    }
    acted = {
        "old_log_prob": row.old_log_probs,
        "log_prob": log_probs_K,
        "advantage": advantages_J[row.turn_of_token],
        "ratio": rho_K,
    }
    lengths_B = torch.tensor([len(e.ids) for e in episodes])
    return {
        "episode": [str(episodes[b].key[0]) for b in b_R.tolist()],
        "first_turn": first_R.tolist(),
        "position": torch.where(t_R >= 0, row.position_ids[t_R], lengths_B[b_R]).tolist(),
        "token_id": torch.where(t_R >= 0, row.ids[t_R], -1).tolist(),
        "turn": torch.where(k_R >= 0, k_R + first_R, -1).tolist(),
        "in_action": (i_R >= 0).tolist(),
        **{name: _known(x_BM.detach().cpu()[b_R, k_R], k_R >= 0) for name, x_BM in states.items()},
        **{name: _known(x_K[i_R], i_R >= 0) for name, x_K in acted.items()},
        "clipped": (clipped_K[i_R] & (i_R >= 0)).tolist(),
        "loss_share": torch.where(i_R >= 0, share_K[i_R], 0.0).tolist(),
    }


def check_shares(columns: Mapping[str, Sequence[Any]], loss: float) -> None:
    """Raises LostCredit unless the shares add up to the row's actor loss, if that is finite (else `fit` tells)."""
    shares = torch.tensor(columns["loss_share"], dtype=torch.float64)
    found = float(shares.sum())
    if abs(found - loss) > LOSS_TOLERANCE * max(float(shares.abs().sum()), LOSS_TOLERANCE):
        raise LostCredit(
            f"wanted shares of the tokens that add up to the actor's loss {loss:.6g}, found {found:.6g}; {ADVICE}"
        )


def _entries(row: PackedRow) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each entry: episode, place in the row, number among the K action tokens, turn within the row; -1 = none."""
    visible_V = (row.shadow == 0).nonzero()[:, 0]
    turn_of_J = torch.cat([torch.arange(n) for n in row.n_turns.tolist()])
    nowhere_T, nowhere_B = torch.full_like(row.ids, -1), torch.full_like(row.n_turns, -1)
    i_T = nowhere_T.index_put((row.target_positions,), torch.arange(len(row.target_positions)))
    k_T = nowhere_T.index_put((row.target_positions,), turn_of_J[row.turn_of_token])
    b = torch.cat([row.episode[visible_V], torch.arange(len(row.n_turns))])
    order = b.argsort(stable=True)  # tokens keep their order, and each end state comes after its episode's
    t, i = torch.cat([visible_V, nowhere_B]), torch.cat([i_T[visible_V], nowhere_B])
    k = torch.cat([k_T[visible_V], row.n_turns])
    return b[order], t[order], i[order], k[order]


def _terms(
    token_K: Tensor, turn_of_K: Tensor, advantages_J: Tensor, ratio: Ratio, clip: float, normaliser: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Ratio, whether it is clipped, and part of the loss of every action token, (K,). token_K: log-prob new - old."""
    size_K = torch.bincount(turn_of_K, minlength=len(advantages_J))[turn_of_K].double()
    log_ratio_K = (
        token_K if ratio == "token" else torch.zeros_like(advantages_J).index_add(0, turn_of_K, token_K)[turn_of_K]
    )
    rho_K = (log_ratio_K / size_K if ratio == "turn_mean" else log_ratio_K).exp()
    a_K = advantages_J[turn_of_K]
    # min(rho A, clip(rho) A), without a product of infinity and 0.
    used_K = torch.where(a_K >= 0, rho_K.clamp(max=1 + clip), rho_K.clamp(min=1 - clip))
    return (
        rho_K,
        (used_K != rho_K) & (a_K != 0),
        -used_K * a_K / (normaliser if ratio == "token" else normaliser * size_K),
    )


def _known(x: Tensor, mask: Tensor) -> list[float | None]:
    """x as a list, None where the mask is False or x is NaN."""
    return [one if there and one == one else None for one, there in zip(x.tolist(), mask.tolist(), strict=True)]
