"""Every row of a tree is what it would be alone, in values and gradients; and nothing but its own path is seen."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from shadows import KINDS, VOCABULARY, assert_close, tiny, with_adapter
from torch import Tensor

from stages.learn import tree_layout
from stages.learn.adapter import base_of
from stages.learn.tree import Branch, Tree, allowed, grow, n_unique, tree_of, trunk
from stages.learn.tree_attention import body_pass, tree_attention
from stages.learn.tree_layout import layout_of

Ids = tuple[int, ...]


def some(rng: random.Random, n: int) -> Ids:
    return tuple(rng.randrange(VOCABULARY) for _ in range(n))


def episodes(
    n_turns: Sequence[int], seed: int = 0, *, system: int = 9, reply: int = 3, branch: tuple[int, ...] = (5, 2)
) -> list[Ids]:
    """Rows as a step has them: episodes with one system message, actions, and branches of these lengths."""
    rng = random.Random(seed)
    head, rows = some(rng, system), []
    for n in n_turns:
        state = (*head, *some(rng, 4))
        for _ in range(n):
            rows += [(*state, *some(rng, length)) for length in branch]
            state = (*state, *some(rng, reply))
            rows.append(state)
            state = (*state, *some(rng, 4))
    rng.shuffle(rows)
    return rows


def together(model: Any, rows: Sequence[Ids]) -> tuple[list[Tensor], Tree]:
    tree, places = tree_of(rows)
    states_TD = body_pass(model, tree)
    return [states_TD[at] for at in places], tree


def alone(model: Any, rows: Sequence[Ids]) -> list[Tensor]:
    body = base_of(model).model
    return [body(input_ids=torch.tensor([row]), use_cache=False).last_hidden_state[0] for row in rows]


def loss(states: Sequence[Tensor]) -> Tensor:
    """Rows weigh differently, and so do tokens, so that credit at a wrong place shows."""
    return torch.stack(
        [(i + 1) * (x.sin() * torch.linspace(1, 2, len(x))[:, None]).sum() for i, x in enumerate(states)]
    ).sum()


def gradients(model: Any, states: Sequence[Tensor]) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss(states).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


SHAPES: dict[str, list[Ids]] = {
    "one row": [(3, 1, 4)],
    "one turn": episodes([1]),
    "17 turns": episodes([17]),
    "several episodes": episodes([5, 1, 17, 2]),
    "nothing shared": [some(random.Random(i), 3 + i) for i in range(4)],
    "a group": episodes([3]) + [(*episodes([3])[0][:12], *some(random.Random(i), 8)) for i in range(4)],
    "the same row twice": [*episodes([2]), *episodes([2])],
    "long branches": episodes([6], branch=(40, 30, 1), system=200),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_what_they_are_alone(shape: str, kind: str) -> None:
    model, rows = with_adapter(kind), SHAPES[shape]
    found, tree = together(model, rows)
    twin = alone(model, rows)
    for i, (x, y) in enumerate(zip(found, twin, strict=True)):
        assert_close(x, y, f"row {i}")
    ours, theirs = gradients(model, found), gradients(model, twin)
    assert set(ours) == set(theirs) and any("lora_B" in name for name in ours)
    for name, grad in theirs.items():
        assert_close(ours[name], grad, name)
    assert len(tree.ids) <= sum(map(len, rows))


def rms_norm(norm: Any, x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


def test_in_fp64_ten_digits_agree() -> None:
    model, rows = with_adapter("Qwen2").double(), SHAPES["several episodes"]
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):  # transformers' own works in fp32, whatever comes in
            module.forward = functools.partial(rms_norm, module)
    found, _ = together(model, rows)
    twin = alone(model, rows)
    assert max(float((x - y).detach().abs().max()) for x, y in zip(found, twin, strict=True)) < 1e-12
    ours, theirs = gradients(model, found), gradients(model, twin)
    for name, grad in theirs.items():
        assert float((ours[name] - grad).abs().max()) <= 1e-10 * float(grad.abs().max()), name


@pytest.mark.parametrize("shape", SHAPES)
def test_the_layout_hands_each_token_what_it_may_see(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The masked calls and the causal one, put together again, against the definition."""
    monkeypatch.setattr(tree_layout, "LEAST_ROWS", 1)
    tree, _ = tree_of(SHAPES[shape])
    layout, n = layout_of(tree), len(tree.ids)
    n_lines, slots = len(tree.paths), layout.slots
    if slots is None:
        slots = torch.arange(n)[None]
    L, S = layout.n_visible, slots.shape[1] - layout.n_visible
    seen = torch.zeros(n_lines, L + S, L + S, dtype=torch.bool)
    seen[:, :L, :L] = torch.ones(L, L).tril().bool()
    for g in layout.groups:
        seen[:, L + g.start : L + g.end, : g.keys] = g.mask[:, 0, :, : g.keys]
        seen[:, L + g.start : L + g.end, L + g.own : L + g.end] = g.mask[:, 0, :, g.keys :]
    back = torch.arange(n) if layout.back is None else layout.back
    found = torch.zeros(n, n, dtype=torch.bool)
    for t, slot in enumerate(back.tolist()):
        found[t, slots[slot // (L + S)][seen[slot // (L + S), slot % (L + S)]]] = True
    assert torch.equal(found, allowed(tree))


def test_what_rows_share_stands_in_the_tree_once() -> None:
    rows = episodes([4, 3])
    tree, places = tree_of(rows)
    assert len(tree.ids) == n_unique(rows) == len({row[:k] for row in rows for k in range(1, len(row) + 1)})
    for row, at in zip(rows, places, strict=True):
        assert tuple(tree.ids[at].tolist()) == row
        assert tree.position_ids[at].tolist() == list(range(len(row)))


def test_a_planted_token_changes_nothing_that_may_not_see_it() -> None:
    """Of a teacher's branch, of another episode, of a later turn: bit for bit."""
    model, rng = with_adapter(), random.Random(1)
    lines = [some(rng, 30), some(rng, 24)]
    branches = [
        Branch(0, 10, some(rng, 6)),
        Branch(0, 10, some(rng, 4)),
        Branch(0, 20, some(rng, 5)),
        Branch(1, 8, some(rng, 5)),
    ]
    before = grow(lines, branches)
    states = body_pass(model, before)
    for t in range(len(before.ids)):
        planted = before.ids.clone()
        planted[t] = (planted[t] + 1) % VOCABULARY
        after = body_pass(model, grow_like(before, planted))
        blind = ~allowed(before)[:, t]
        assert torch.equal(after[blind], states[blind])
        assert not torch.equal(after[~blind], states[~blind])


def grow_like(tree: Tree, ids: Tensor) -> Tree:
    return replace(tree, ids=ids)


def test_a_trunk_is_the_tree_without_branches() -> None:
    lines = [some(random.Random(0), 12), some(random.Random(1), 9)]
    whole = grow(lines, [Branch(1, 3, (1, 2)), Branch(0, 5, (4,))])
    bare, cut = grow(lines), trunk(whole)
    for name in ("ids", "position_ids", "node", "limit", "paths", "branch_start"):
        assert torch.equal(getattr(cut, name), getattr(bare, name)), name


def test_a_line_that_may_share_little_has_its_own_tokens() -> None:
    line = some(random.Random(0), 8)
    assert len(grow([line, line], shareable=0).ids) == 16
    assert len(grow([line, line], shareable=3).ids) == 13
    assert len(grow([line, line]).ids) == 8


@pytest.mark.parametrize(
    ("lines", "branches"),
    [([], []), ([()], []), ([(1,)], [Branch(0, 1, ())]), ([(1,)], [Branch(0, 2, (1,))]), ([(1,)], [Branch(1, 1, (1,))]), ([(1,)], [Branch(0, 0, (1,))])],
)  # fmt: skip
def test_what_is_no_tree_is_refused(lines: list[Ids], branches: list[Branch]) -> None:
    with pytest.raises(ValueError, match="tree"):
        grow(lines, branches)


def test_16_bits_and_checkpointing_change_no_more_than_they_do_alone() -> None:
    rows, model = SHAPES["several episodes"], with_adapter().train()
    plain = gradients(model, together(model, rows)[0])
    base_of(model).gradient_checkpointing_enable({"use_reentrant": False})
    with tree_attention(model):
        again = gradients(model, together(model, rows)[0])
    for name, grad in plain.items():
        assert_close(again[name], grad, name)
    half = tiny("Llama").bfloat16().requires_grad_(False)
    for x, y in zip(together(half, rows)[0], alone(half, rows), strict=True):
        assert float((x - y).abs().max()) < 0.05 * float(y.abs().max())
