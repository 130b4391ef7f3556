"""Check the credit in a packed row before the loss: each token learns from its own turn and no other.

The check compares the packed episodes with the vectors that the loss gets. It does not trust the row's own indices, so
it also finds a row that is consistently wrong. Source: [ours]. A row's key is (episode id,), or (episode id, turn) if
it begins with that turn. Turns are counted from the episode's start.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stages.frame.types import TurnwiseError
from stages.learn.episode_row import EpisodeIds, PackedRow, first_turn
from stages.learn.later import Later, read

ADVICE = "the row was built wrongly and nothing was learnt from it: report it with the run's config"
REWARD_TOLERANCE = 1e-5  # of the sum of |rewards|: what fp32 keeps of rewards that were added up in 64 bits


class LostCredit(TurnwiseError):
    """Credit that does not stand where it was earned. A mistake of the program, never of an episode."""


def check_credit(
    packed: PackedRow,
    episodes: Sequence[EpisodeIds],
    advantages_BM: Tensor,
    advantages_J: Tensor,
    *,
    returns: Sequence[float],
) -> Later:
    """Stop unless the loss will give every turn's credit to the tokens of that turn, and to no others.

    1. Every token of an action is counted once, with its own turn; so it has credit.   2. No other token has any.
    3. advantages_J, which the loss reads by `turn_of_token`, is advantages_BM turn by turn: tokens carry their turn's.
    4. Rewards stand on the states they came with, and each episode's sum to its return.
    5. Nothing is lost across an observation: the token after it is the next turn's, predicted by the one before it.

    Where a turn's tokens stand is worked out from the episode alone, by its action's start and log-probs.
    episodes: the B of the row, in order. advantages_BM: (B, M). advantages_J: (J,), one a turn of the row. returns:
    (B,), undiscounted, from what the episodes were stored with. Values are compared bit by bit; one that is not finite
    is left to `fit`. No gradient flows. Of a row that was moved to a device, what the host moved there is looked at.
    Raises LostCredit, naming episode, turn and token; for 3., where the advantages are on a device, only when the
    result is read, with the step's metrics and before the weights move. It holds no metric. Source: [ours].
    """
    row = packed.on_host
    if (found := row.n_turns.tolist()) != (wanted := [e.n_turns for e in episodes]):
        raise LostCredit(f"wanted a row of episodes of {wanted} turns, found {found}; {ADVICE}")
    turns = [(b, k) for b, e in enumerate(episodes) for k in range(e.n_turns)]
    _check_tokens(row, episodes, turns)
    _check_sources(row, episodes, turns)
    _check_rewards(row, episodes, returns)
    _check_shapes(episodes, turns, advantages_BM, advantages_J)

    def told(found_BM: list[list[float]], found_J: list[float]) -> dict[str, float]:
        _check_advantages(episodes, turns, torch.tensor(found_BM), torch.tensor(found_J))
        return {}

    later = Later([advantages_BM, advantages_J], told)
    if advantages_J.device.type == "cpu":
        read([later])
    return later


def returns_of(rows: Sequence[EpisodeIds], total: float, rewards: Sequence[float], *, gamma: float) -> list[float]:
    """What the rewards of each row of one episode must add up to.

        total - sum of r_k before the row - sum over the turns j = 0, 1, .. after it of (1 - gamma^j) r_j

    The last turn's reward counts as one turn later: it is the terminal state's. For an episode in one row this is
    `total`, the stored return. A row that breaks off ends with the discounted return of the rest, or without it if
    truncated.
    rewards: one a turn, as the turns were stored.
    """
    found = []
    for e in rows:
        start, end = first_turn(e.key), first_turn(e.key) + e.n_turns
        delays = [*range(len(rewards) - end - 1), len(rewards) - end]
        lost = sum(
            reward if e.truncated else (1 - gamma**j) * reward for j, reward in zip(delays, rewards[end:], strict=False)
        )
        found.append(total - sum(rewards[:start]) - lost)
    return found


def _check_tokens(row: PackedRow, episodes: Sequence[EpisodeIds], turns: Sequence[tuple[int, int]]) -> None:
    """Invariants 1, 2 and the first half of 5."""
    vectors = (row.target_positions, row.source_positions, row.turn_of_token)
    n, shapes = len(row.ids), [tuple(x.shape) for x in vectors]
    if len(set(shapes)) > 1 or any(bool(((x < 0) | (x >= n)).any()) for x in vectors[:2]):
        raise LostCredit(
            f"wanted two places in a row of {n} tokens and a turn for each token with credit, found vectors {shapes}; {ADVICE}"
        )
    wanted_T = _turn_of_every_token(row, episodes)
    # A turn below 0 is none of the row's, and must not pass for "no credit".
    found_T = torch.full_like(wanted_T, -1).index_put(
        (vectors[0],), torch.where(row.turn_of_token < 0, len(turns), row.turn_of_token)
    )
    counts_T = torch.bincount(vectors[0], minlength=n)
    wrong_T = (wanted_T != found_T) | (counts_T > 1)
    if bool(wrong_T.any()):
        t = int(wrong_T.nonzero()[0])
        raise _misplaced(row, episodes, turns, t, int(wanted_T[t]), int(found_T[t]), int(counts_T[t]))


def _misplaced(
    row: PackedRow, episodes: Sequence[EpisodeIds], turns: Sequence[tuple[int, int]], t: int, wanted: int, found: int, count: int
) -> LostCredit:  # fmt: skip
    """The token at place t belongs to turn `wanted` and learns from `found`, -1 for none, `count` times."""
    at = (int(row.episode[t]), -1) if wanted < 0 else turns[wanted]
    other = "none" if found < 0 else "that of no turn of the row"
    if 0 <= found < len(turns):
        other = f"that of {_turn(episodes, turns[found])}"
    across = ""
    if at[1] > 0 and int(row.position_ids[t]) == episodes[at[0]].action_start[at[1]]:
        across = ", so credit is lost across the observation before it"
    if wanted < 0:
        return _lost(row, episodes, at, t, f"wanted no credit outside of an action, found {other}")
    if found == wanted:
        return _lost(row, episodes, at, t, f"wanted the token of an action counted once, found it {count} times")
    return _lost(row, episodes, at, t, f"wanted its turn's credit for the token of an action, found {other}{across}")


def _turn_of_every_token(row: PackedRow, episodes: Sequence[EpisodeIds]) -> Tensor:
    """Which of the row's turns each token belongs to, (T,), -1 outside actions: by its episode and position."""
    longest = max(len(e.ids) for e in episodes)
    ids_BP, turn_BP = torch.full((len(episodes), longest), -1), torch.full((len(episodes), longest), -1)
    z = 0
    for b, e in enumerate(episodes):
        ids_BP[b, : len(e.ids)] = torch.tensor(e.ids)
        for start, log_probs in zip(e.action_start, e.old_log_probs, strict=True):
            turn_BP[b, start : start + len(log_probs)] = z
            z += 1
    visible_T = row.shadow == 0
    places_V = row.episode[visible_T] * longest + row.position_ids[visible_T]
    whole = torch.equal(places_V.sort().values, (ids_BP >= 0).flatten().nonzero()[:, 0])
    if not whole or not torch.equal(row.ids[visible_T], ids_BP.flatten()[places_V]):
        raise LostCredit(
            f"wanted a row with every token of its episodes {', '.join(str(e.key[0]) for e in episodes)} once, found another; {ADVICE}"
        )
    found_T = torch.full_like(row.ids, -1)
    found_T[visible_T] = turn_BP.flatten()[places_V]
    return found_T


def _check_sources(row: PackedRow, episodes: Sequence[EpisodeIds], turns: Sequence[tuple[int, int]]) -> None:
    """The second half of invariant 5: a visible state just before the token, in its own episode, has the gradient."""
    t, s = row.target_positions, row.source_positions
    # A critic prompt has the positions of the tokens after it, so position alone would not tell.
    right_K = (
        (row.shadow[s] == 0) & (row.episode[s] == row.episode[t]) & (row.position_ids[s] + 1 == row.position_ids[t])
    )
    if not bool(right_K.all()):
        i = int((~right_K).nonzero()[0])
        at = turns[int(row.turn_of_token[i])]
        raise _lost(
            row,
            episodes,
            at,
            int(t[i]),
            f"wanted it predicted by the visible token before it, found entry {int(s[i])} of the row",
        )


def _check_shapes(
    episodes: Sequence[EpisodeIds], turns: Sequence[tuple[int, int]], advantages_BM: Tensor, advantages_J: Tensor
) -> None:
    widest = max(e.n_turns for e in episodes) + 1
    if advantages_J.shape != (len(turns),) or advantages_BM.shape != (len(episodes), widest):
        shapes = f"{tuple(advantages_J.shape)} and {tuple(advantages_BM.shape)}"
        raise LostCredit(
            f"wanted advantages of shape ({len(turns)},) and ({len(episodes)}, {widest}), by turn, found {shapes}; {ADVICE}"
        )


def _check_advantages(
    episodes: Sequence[EpisodeIds], turns: Sequence[tuple[int, int]], advantages_BM: Tensor, advantages_J: Tensor
) -> None:
    """Invariant 3."""
    wanted_J = advantages_BM[tuple(torch.tensor(turns).T)]
    wrong_J = (wanted_J != advantages_J) & ~(wanted_J.isnan() & advantages_J.isnan())
    if bool(wrong_J.any()):
        z = int(wrong_J.nonzero()[0])
        t = episodes[turns[z][0]].action_start[turns[z][1]]
        said = f"its first token {t}: wanted the advantage {float(wanted_J[z]):.6g}, found {float(advantages_J[z]):.6g}"
        raise LostCredit(f"{_turn(episodes, turns[z])}, {said}; {ADVICE}")


def _check_rewards(row: PackedRow, episodes: Sequence[EpisodeIds], returns: Sequence[float]) -> None:
    """Invariant 4."""
    width = row.rewards.shape[1]
    wanted_BM = torch.tensor([[*e.rewards, *[0.0] * (width - len(e.rewards))] for e in episodes], dtype=torch.float32)
    for b, k in (wanted_BM != row.rewards).nonzero().tolist():
        found = f"wanted the reward {float(wanted_BM[b, k]):.6g}, found {float(row.rewards[b, k]):.6g}"
        raise LostCredit(f"{_turn(episodes, (b, k))}: {found}; {ADVICE}")
    sums = zip(episodes, row.rewards.double().sum(1).tolist(), row.rewards.abs().sum(1).tolist(), returns, strict=True)
    for e, total, size, wanted in sums:
        if not abs(total - wanted) <= REWARD_TOLERANCE * max(1.0, size):
            raise LostCredit(
                f"episode {e.key[0]}: wanted rewards over its turns that sum to its return {wanted:.6g}, found {total:.6g}; {ADVICE}"
            )


def _turn(episodes: Sequence[EpisodeIds], at: tuple[int, int]) -> str:
    e = episodes[at[0]]
    return f"episode {e.key[0]}, turn {first_turn(e.key) + at[1]}"


def _lost(row: PackedRow, episodes: Sequence[EpisodeIds], at: tuple[int, int], t: int, said: str) -> LostCredit:
    """About the token at place t of the row, of a turn or, with turn -1, of none."""
    where = _turn(episodes, at) if at[1] >= 0 else f"episode {episodes[at[0]].key[0]}, outside of its turns"
    return LostCredit(f"{where}, token {int(row.position_ids[t])} (id {int(row.ids[t])}): {said}; {ADVICE}")
