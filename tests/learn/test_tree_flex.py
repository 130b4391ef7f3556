"""FlexAttention against the groups of sdpa calls, forward only: it has no backward pass on a CPU, so gradients are
compared on a GPU alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import shadows
import torch

from benchmarks.pretend_gpu import pretended_gpu
from stages import self_ac
from stages.frame.contract import Outputs
from stages.frame.types import Outcome, UsageError
from stages.learn import tree_flex
from stages.learn.episode_row import pack, without_shadows
from stages.learn.tree import grow
from stages.learn.tree_attention import body_pass, tree_attention
from stages.learn.tree_flex import flex_layout_of
from stages.play.transitions import episode_rows
from stages.train.actor_critic import SelfAcConfig


def states(kind: str, turns: list[int], device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """With shadows and without, by both kernels."""
    model = shadows.with_adapter(kind).to(device)
    row = pack([shadows.make_episode(n, seed) for seed, n in enumerate(turns)], shadows.CRITIC, max_positions=None).to(
        device
    )
    return [
        (body_pass(model, x.tree, layout=flex_layout_of(x.tree)), body_pass(model, x.tree))
        for x in (row, without_shadows(row))
    ]


@pytest.mark.parametrize("kind", shadows.KINDS)
@pytest.mark.parametrize("turns", [[1], [17], [5, 2, 1]])
def test_flex_attention_gives_the_states_of_the_groups(kind: str, turns: list[int]) -> None:
    with torch.no_grad():
        for flex, groups in states(kind, turns, "cpu"):
            assert torch.allclose(flex, groups, atol=shadows.TOLERANCE * float(groups.abs().max()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: FlexAttention has no backward pass on a CPU")
@pytest.mark.parametrize("turns", [[1], [5, 2, 1]])
def test_flex_attention_has_the_gradients_of_the_groups(turns: list[int]) -> None:
    model = shadows.with_adapter().cuda()
    row = pack([shadows.make_episode(n, seed) for seed, n in enumerate(turns)], shadows.CRITIC, max_positions=None).to(
        "cuda"
    )
    found = []
    for layout in (flex_layout_of(row.tree), None):
        model.zero_grad()
        body_pass(model, row.tree, layout=layout).square().sum().backward()  # type: ignore[no-untyped-call]
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    largest = max(float(g.abs().max()) for g in found[1])
    assert all(torch.allclose(x, y, atol=1e-4 * largest) for x, y in zip(*found, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of a machine without a GPU")
def test_flex_attention_without_a_gpu_is_refused_in_one_sentence(base: Path, tmp_path: Path) -> None:
    bench = models.Bench(base, tmp_path, shape={"attention": "flex"})
    episode = models.make_episode(
        bench.engine, "Ana", [("Action: check photo", "photo done.")], Outcome.SCORED, reward=1.0
    )
    bench.memory.keep("collect0", Outputs({}, episode_rows([episode], 0)))
    with pytest.raises(
        UsageError, match=r"model.attention: FlexAttention has no backward pass on a CPU; set it to auto or sdpa"
    ):
        bench.run(self_ac.STAGE, SelfAcConfig(), {"collect": ["collect0"]})


def test_a_body_pass_takes_the_kernel_that_the_model_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = shadows.with_adapter(), list[int]()
    tree = pack([shadows.make_episode(5, 0)], shadows.CRITIC, max_positions=None).tree
    real = tree_flex._kernel
    monkeypatch.setattr(tree_flex, "_kernel", lambda device: made.append(1) or real(device))  # type: ignore[func-returns-value]
    with torch.no_grad():
        wanted = body_pass(model, tree)
        for kernel in ("sdpa", "auto"):
            with tree_attention(model, kernel):
                assert torch.equal(body_pass(model, tree), wanted)
        assert not made
        with tree_attention(model, "flex"):
            found = body_pass(model, tree)
        assert len(made) == 2  # a call for each block
        assert torch.allclose(found, wanted, atol=shadows.TOLERANCE * float(wanted.abs().max()))
        assert torch.equal(body_pass(model, tree), wanted)


def test_a_compiled_block_mask_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced by the compiler and run as it stands: making code of it takes 20 s here, and changes no number."""
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compiler(f, backend="eager", **options))
    episodes = [shadows.make_episode(n, n) for n in (17, 9, 30)]
    tree = pack(episodes, shadows.CRITIC, max_positions=None).tree
    assert len(tree.ids) > 128  # more than one block
    plain = flex_layout_of(tree).block_mask
    real = tree_flex._block_masks.__wrapped__
    monkeypatch.setattr(tree_flex, "_block_masks", lambda *, compiled: real(compiled=True))
    found = flex_layout_of(tree).block_mask
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        assert torch.equal(getattr(found, name), getattr(plain, name)), name


def test_only_a_long_row_on_a_gpu_has_its_block_mask_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[bool]()

    def noted(*, compiled: bool) -> Any:
        asked.append(compiled)
        return lambda *args, **options: None

    monkeypatch.setattr(tree_flex, "_block_masks", noted)
    for n in (tree_flex.LONG, tree_flex.LONG + 1):
        row = grow([[1] * n])
        flex_layout_of(row)
        with pretended_gpu():
            flex_layout_of(row.to("cuda"))
    assert asked == [False, False, False, True]
