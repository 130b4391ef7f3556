"""Training rows as steps, a step as one pass or several, and the loss of a pass. Every step holds rows of every kind.
Rows that begin alike form one tree, and the losses of passes add up to the step's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from stages.learn import ranks
from stages.learn.adapter import as_base, base_of
from stages.learn.later import Later
from stages.learn.losses import chunked_log_probs
from stages.learn.moving import moved
from stages.learn.tree import Tree, n_new, tree_of
from stages.learn.tree_attention import body_pass
from stages.play.drawing import Draw
from stages.train.rows import TrainRow

LIKE = 3
"""Rows of one pass are at most so many times as long as the shortest of it: attention lays them side by side. Cost alone."""


def half(device: Any, on: bool) -> torch.autocast:
    """Passes within it compute in bfloat16 where torch's autocast does, if `on`. Losses belong outside, in fp32."""
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=on)


@dataclass(frozen=True)
class Pass:
    """Rows of a step that go through the model together, as one tree, and K completion tokens, row by row.

    normaliser: of the whole step's loss: sum of w_i |y_i|. totals: completion tokens of each kind in the step.
    """

    tree: Tree
    target_K: Tensor  # where each completion token stands in the tree's row
    source_K: Tensor  # where the token before it on its path stands, which predicts it
    row_K: Tensor  # the row that it is of
    n_R: Tensor  # completion tokens of each row
    weight_R: Tensor  # w_i |y_i| of each row
    places: Mapping[str, Tensor]  # kind -> which of the K tokens are of its rows
    rows: tuple[TrainRow, ...]
    kinds: tuple[str, ...]  # of each row
    normaliser: float
    totals: Mapping[str, int]
    host: Pass | None = None  # the same on the CPU, of a pass that was moved

    @property
    def n_tokens(self) -> int:
        return len(self.tree.ids)

    def to(self, device: Any) -> Pass:
        return moved(self, device)


def mixed_batches(
    kinds: Mapping[str, tuple[Sequence[TrainRow], int]],
    *,
    main: str,
    epochs: int,
    rng: random.Random,
    device: Any,
    pass_tokens: int = 0,
    draw: Draw = "turn",
) -> Iterator[list[Pass]]:
    """Steps that hold rows of every kind: kind -> (rows, rows a step).

    `main` is used `epochs` times, each time in a new order. The other kinds are sampled, without repeats inside a step.
    Kinds with no rows are left out. draw: row by row, or episode by episode (`in_order`); steps hold as many rows
    either way. Every step then holds every kind: training the critic alone
    destroys the policy within a stage (docs/explanation/decisions.md).
    """
    rows, size = kinds[main]
    if draw == "episode":
        kinds = {kind: (sorted(pool, key=lambda row: row.key), count) for kind, (pool, count) in kinds.items()}
        rows, _ = kinds[main]
    for _ in range(epochs):
        order = in_order(rows, draw, rng)
        for start in range(0, len(order), size):
            chosen = {main: order[start : start + size]}
            for kind, (pool, count) in kinds.items():
                if kind != main and pool and count:
                    chosen[kind] = some_of(pool, count, draw, rng)
            yield step_passes(chosen, pass_tokens, device)


def in_order(rows: Sequence[TrainRow], draw: Draw, rng: random.Random) -> list[TrainRow]:
    """All rows in a random order; or episodes in a random order, each with its rows as they stand."""
    if draw == "turn":
        return rng.sample(list(rows), len(rows))
    episodes: dict[Any, list[TrainRow]] = {}
    for row in rows:
        episodes.setdefault(row.key[:1], []).append(row)
    return [row for episode in rng.sample(list(episodes.values()), len(episodes)) for row in episode]


def some_of(pool: Sequence[TrainRow], count: int, draw: Draw, rng: random.Random) -> list[TrainRow]:
    """`count` rows without repeats, each equally likely. With draw = episode: consecutive rows from a random place on,
    so they come from few episodes.
    """
    count = min(count, len(pool))
    if draw == "turn":
        return rng.sample(list(pool), count)
    start = rng.randrange(len(pool))
    return [pool[(start + i) % len(pool)] for i in range(count)]


def step_passes(chosen: Mapping[str, Sequence[TrainRow]], pass_tokens: int, device: Any) -> list[Pass]:
    """One step's rows as passes whose losses add up to the step's. A pass has at most `pass_tokens` tokens, a shared
    prefix counted once; 0 = no limit. A longer row is a pass of its own.
    """
    labelled = [(kind, row) for kind, picked in chosen.items() for row in picked]
    normaliser = sum(row.weight * len(row.completion_ids) for _, row in labelled)
    totals = {kind: sum(len(row.completion_ids) for row in picked) for kind, picked in chosen.items()}
    passes = [
        make_pass([labelled[i] for i in members], normaliser, totals)
        for members in together([row for _, row in labelled], pass_tokens)
    ]
    return moved(passes, device)


def make_pass(labelled: Sequence[tuple[str, TrainRow]], normaliser: float, totals: Mapping[str, int]) -> Pass:
    """Raises ValueError on an empty prompt or completion: a row that trains nothing is a bug upstream."""
    rows = tuple(row for _, row in labelled)
    if any(not row.prompt_ids or not row.completion_ids for row in rows):
        raise ValueError("every training row needs a prompt and a completion of at least one token")
    tree, places = tree_of([row.ids for row in rows])
    ends, lengths = [len(row.prompt_ids) for row in rows], [len(row.completion_ids) for row in rows]
    n_R, kinds = torch.tensor(lengths), tuple(kind for kind, _ in labelled)
    row_K = torch.repeat_interleave(torch.arange(len(rows)), n_R)
    return Pass(
        tree,
        torch.cat([at[end:] for at, end in zip(places, ends, strict=True)]),
        # The token before it on its own path, which may be another row's, too; never the one before it in the tree.
        torch.cat([at[end - 1 : -1] for at, end in zip(places, ends, strict=True)]),
        row_K,
        n_R,
        torch.tensor([row.weight for row in rows]) * n_R,
        {kind: torch.tensor([each == kind for each in kinds])[row_K].nonzero()[:, 0] for kind in dict.fromkeys(kinds)},
        rows,
        kinds,
        normaliser,
        totals,
    )


def together(rows: Sequence[TrainRow], pass_tokens: int) -> list[list[int]]:
    """Lists of row indices, a pass each: of like length, then of like beginning, up to `pass_tokens`. Several ranks
    get a pass each at least.
    """
    ids = [row.ids for row in rows]
    alike: list[list[int]] = []
    for i in sorted(range(len(ids)), key=lambda i: -len(ids[i])):
        if not alike or len(ids[i]) * LIKE < len(ids[alike[-1][0]]):
            alike.append([])
        alike[-1].append(i)
    if (n := ranks.count()) > 1:
        share = -(-sum(n_tree(ids, each) for each in alike) // n)
        pass_tokens = min(pass_tokens or share, share)
    if not pass_tokens:
        return alike
    found = []
    for members in alike:
        held: list[int] = []
        n_held = 0
        for i in sorted(members, key=lambda i: ids[i]):
            new = n_new(ids[held[-1]], ids[i]) if held else len(ids[i])
            if held and n_held + new > pass_tokens:
                found.append(held)
                held, n_held, new = [], 0, len(ids[i])
            held.append(i)
            n_held += new
        found.append(held)
    return found


def n_tree(ids: Sequence[tuple[int, ...]], members: Sequence[int]) -> int:
    """Tokens of the tree of these rows."""
    rows = sorted(ids[i] for i in members)
    return len(rows[0]) + sum(n_new(a, b) for a, b in pairwise(rows))


def pass_log_probs(model: Any, step: Pass) -> Tensor:
    """Log-prob of every completion token of the pass, (K,). Gradients flow into the model.

        log pi(y_t | x, y_<t)

    Only the places that predict a completion token go through the vocabulary projection, 1024 at a time.
    """
    states_KD = body_pass(model, step.tree).index_select(0, step.source_K)
    return chunked_log_probs(states_KD, base_of(model).get_output_embeddings(), step.tree.ids[step.target_K])


def pass_kl(model: Any, step: Pass, kind: str) -> Tensor:
    """Sum of KL(pi_theta || pi_base) over the completion tokens of a kind, divided by the step's tokens of that kind.
    The base is the model with its adapter off. A step's passes add up to its mean; one without the kind gives 0. [ours]

        KL_t = sum_v pi_theta(v | x, y_<t) [log pi_theta(v | ..) - log pi_base(v | ..)]
    """
    places = step.places.get(kind, step.source_K[:0])
    source, head = step.source_K.index_select(0, places), base_of(model).get_output_embeddings()

    def log_probs() -> Tensor:
        found: Tensor = head(body_pass(model, step.tree).index_select(0, source)).float().log_softmax(1)
        return found

    with torch.no_grad(), as_base(model):
        base_KV = log_probs()
    log_probs_KV = log_probs()
    return (log_probs_KV.exp() * (log_probs_KV - base_KV)).sum() / max(step.totals.get(kind, 0), 1)


def mixed_nll(model: Any, step: Pass, *, autocast: bool = False) -> tuple[Tensor, Later, Tensor]:
    """This pass's share of the step's weighted mean NLL a token: (loss, "nll/<kind>" a token, NLL a token of each row
    (R,), detached).

        L = sum_i w_i |y_i| nll_i / sum_i w_i |y_i|,   the sum above over the rows of the pass, below over those of the step
    """
    with half(step.tree.ids.device, autocast):
        log_probs_K = pass_log_probs(model, step)
    return nll_of(log_probs_K, step)


def nll_of(log_probs_K: Tensor, step: Pass) -> tuple[Tensor, Later, Tensor]:
    """`mixed_nll` from the log-prob of every completion token of the pass."""
    nll_R = -log_probs_K.new_zeros(len(step.rows)).index_add(0, step.row_K, log_probs_K) / step.n_R
    loss = (step.weight_R * nll_R).sum() / max(step.normaliser, 1e-9)
    counted_R = (step.host or step).weight_R.tolist()

    def told(told_R: list[float]) -> dict[str, float]:
        metrics = token_counts(step)
        for kind in dict.fromkeys(step.kinds):
            mine = [r for r, each in enumerate(step.kinds) if each == kind]
            count = sum(counted_R[r] for r in mine)
            metrics[f"nll/{kind}"] = sum(counted_R[r] * told_R[r] for r in mine) / max(count, 1e-9)
            metrics[f"count/nll/{kind}"] = count
        return metrics

    return loss, Later([nll_R], told), nll_R.detach()


def token_counts(step: Pass) -> dict[str, float]:
    """For `fit_metrics`: tokens that go through the model, and what they were if every row had all of its own."""
    apart = sum(len(row.prompt_ids) + len(row.completion_ids) for row in step.rows)
    return {"count/tokens": float(len(step.tree.ids)), "count/tokens_apart": float(apart)}


@torch.no_grad()
def mean_nll(model: Any, rows: Sequence[TrainRow], *, pass_tokens: int = 0, autocast: bool = False) -> float:
    """Mean NLL a token over rows by their weights, as in `mixed_nll`, in evaluation mode."""
    was_training = model.training
    model.eval()
    passes = step_passes({"": rows}, pass_tokens, model.device) if rows else []
    total: float = sum(ranks.each_of(passes, lambda each: float(mixed_nll(model, each, autocast=autocast)[0]), model))
    model.train(was_training)
    return total
