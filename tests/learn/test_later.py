"""Numbers read together are those read one by one, by one copy; what is told of them comes when they are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.pretend_gpu import Counts, counting, pretended_gpu
from stages.learn.later import Later, named, numbers, read

TENSORS = [
    torch.tensor(0.1), torch.tensor([[1.5, -2.0, 3e-30], [0.3, 7.0, 1e30]]), torch.tensor(2**40 + 1), torch.tensor([True, False]),
    torch.tensor([0.1, 0.2], dtype=torch.float64), torch.tensor(0.1, dtype=torch.bfloat16), torch.zeros(0), torch.zeros(2, 0),
]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_numbers_are_those_of_each_tensor_alone_to_the_last_bit(device: str) -> None:
    with pretended_gpu():
        assert numbers([x.to(device) for x in TENSORS]) == [x.tolist() for x in TENSORS]
        assert numbers([TENSORS[1], TENSORS[0].to(device)]) == [TENSORS[1].tolist(), float(TENSORS[0])]
        assert numbers([]) == []


def test_metrics_of_a_device_are_read_with_one_wait() -> None:
    with pretended_gpu():
        parts = [named({"a": x, "b": 2 * x}) | {"c": 1.0} for x in torch.tensor([0.5, 0.25]).to("cuda")]
        alone = torch.tensor(7.0).to("cuda")
        with counting(Counts()) as counts:
            (found,) = read([*parts, {"d": 3.0}], [alone])
            assert [dict(part) for part in parts] == [{"a": 0.5, "b": 1.0, "c": 1.0}, {"a": 0.25, "b": 0.5, "c": 1.0}]
    assert (found, counts.waits.total()) == (7.0, 1)


def test_a_look_at_a_metric_reads_it_and_is_not_repeated() -> None:
    asked: list[Any] = []

    def told(x: float, y: list[float]) -> dict[str, float]:
        asked.append((x, y))
        return {"sum": x + sum(y)}

    later = Later([torch.tensor(1.0, requires_grad=True), torch.tensor([2.0, 3.0])], told)
    assert asked == [] and not later.tensors[0].requires_grad
    assert later["sum"] == 6.0 and [*later] == ["sum"] and len(later) == 1
    read([later])
    assert asked == [(1.0, [2.0, 3.0])]


def test_joined_metrics_have_those_of_both_and_the_right_one_s_where_both_have_one() -> None:
    one, two = named({"a": torch.tensor(1.0), "b": torch.tensor(2.0)}), named({"b": torch.tensor(3.0)})
    assert dict(one | two) == {"a": 1.0, "b": 3.0}
    assert dict(one | {"a": 5.0}) == {"a": 5.0, "b": 2.0}


def test_what_telling_raises_is_raised_by_the_read() -> None:
    def told(x: float) -> dict[str, float]:
        raise ValueError(f"found {x:g}")

    later = named({"a": torch.tensor(1.0)}) | Later([torch.tensor(4.0)], told)
    with pytest.raises(ValueError, match="found 4"):
        read([later])
