"""What is moved together is what is moved one by one; the host keeps its own."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from shadows import CRITIC, make_episode
from torch import Tensor

from benchmarks.pretend_gpu import GPU, Counts, OnGpu, counting, pretended_gpu
from stages.learn.episode_row import pack, without_shadows
from stages.learn.moving import moved


@dataclass(frozen=True)
class Things:
    xs: tuple[Tensor, ...]
    named: dict[str, Tensor]
    ids: tuple[int, ...]
    inner: Any = None
    host: Things | None = None


THINGS = Things(
    (torch.arange(5), torch.tensor([[True], [False], [True]]), torch.tensor(0.5)),
    {"half": torch.tensor([1.5, 2.5], dtype=torch.bfloat16), "none": torch.zeros(0), "turned": torch.arange(6.0).view(2, 3).T},
    (1, 2, 3),
    Things((torch.tensor([7], dtype=torch.int32),), {}, (4,)),
)  # fmt: skip


def tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, tuple | list):
        return [t for each in x for t in tensors(each)]
    if isinstance(x, dict):
        return tensors([*x.values()])
    return [t for f in fields(x) if f.name != "host" for t in tensors(getattr(x, f.name))] if hasattr(x, "ids") else []


def test_all_tensors_come_by_one_copy_that_nobody_waits_for() -> None:
    with pretended_gpu():
        with counting(Counts()) as counts:
            found = moved([THINGS, THINGS.inner], "cuda")
        assert (counts.copies.total(), counts.waits.total(), counts.launches.total()) == (1, 0, 0)
        there = tensors(found)
        assert all(isinstance(x, OnGpu) and x.device == GPU for x in there)
        for one, other in zip(there, tensors([THINGS, THINGS.inner]), strict=True):
            assert one.dtype == other.dtype and torch.equal(one.cpu(), other)
    assert found[0].host is THINGS and found[0].inner.host is THINGS.inner and found[0].ids is THINGS.ids


def test_what_is_there_already_stays_the_same_object() -> None:
    assert moved(THINGS, "cpu") is THINGS
    with pretended_gpu():
        there = moved(THINGS, "cuda")
        assert moved(there, "cuda") is there
        mixed = replace(there, inner=THINGS.inner)
        assert moved(mixed, "cuda").xs[0] is there.xs[0]


def test_a_packed_row_keeps_what_the_host_knows_of_it_and_so_does_its_part() -> None:
    row = pack([make_episode(n, seed=n) for n in (2, 3)], CRITIC, max_positions=None)
    with pretended_gpu():
        there = row.to("cuda")
        with counting(Counts()) as counts:
            plain = without_shadows(there)
            assert there.on_host is row and there.tree.on_host is row.tree
            assert plain.tree.n_visible == len(plain.ids) == there.tree.n_visible
        assert counts.waits.total() == 0
        for one, other in zip(tensors(plain.on_host), tensors(without_shadows(row)), strict=True):
            assert torch.equal(one, other)
        for one, other in zip(tensors(plain), tensors(plain.on_host), strict=True):
            assert torch.equal(one.cpu(), other)
