"""FlexAttention against the groups of sdpa calls, forward only: it has no backward pass on a CPU, so gradients are
compared on a GPU alone.
"""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import shadows
import torch

from stages import self_ac
from stages.frame.contract import Outputs
from stages.frame.types import Outcome, UsageError
from stages.learn.episode_row import pack, without_shadows
from stages.learn.tree_attention import body_pass
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
    bench = models.Bench(base, tmp_path)
    episode = models.make_episode(
        bench.engine, "Ana", [("Action: check photo", "photo done.")], Outcome.SCORED, reward=1.0
    )
    bench.memory.keep("collect0", Outputs({}, episode_rows([episode], 0)))
    with pytest.raises(
        UsageError, match=r"self_ac.attention: FlexAttention has no backward pass on a CPU; set it to sdpa"
    ):
        bench.run(self_ac.STAGE, SelfAcConfig(attention="flex"), {"collect": ["collect0"]})
