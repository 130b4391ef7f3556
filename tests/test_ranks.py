"""Two processes that train one model take the steps of one: gradient, weights, metrics, rows, and the target network.

With `train.shard = layers` each of them holds a part of the weights. `ranks_child.py` runs the stages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks_child
import torch
from safetensors.torch import load_file

from stages.learn import ranks

HERE = Path(__file__).parent


def test_the_longest_pass_goes_to_the_rank_with_the_least_so_far() -> None:
    assert ranks.dealt([3, 9, 4, 4, 1], 2) == [1, 0, 1, 1, 0]
    assert ranks.dealt([5, 5], 3) == [0, 1]
    assert ranks.dealt([], 2) == []
    assert ranks.dealt([7, 1], 1) == [0, 0]


def test_alone_nothing_is_sent_and_all_is_one_s_own() -> None:
    weight = torch.ones(2, requires_grad=True)
    ranks.sum_gradients([weight])
    assert weight.grad is None
    assert (ranks.count(), ranks.own(), ranks.gathered({"a": 1})) == (1, 0, [{"a": 1}])
    assert ranks.each_of([1, 2], lambda part: part + 1, torch.nn.Linear(1, 1)) == [2, 3]
    assert ranks.whole(weight) is weight


@pytest.fixture(scope="module")
def folder(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process and two left, of every case."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "base").symlink_to(base)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]), "OMP_NUM_THREADS": "1"}
    env["GLOO_SOCKET_IFNAME"] = "lo"
    for count in (1, 2):
        commands = [
            [sys.executable, str(HERE / "ranks_child.py"), str(folder), str(i), str(count)] for i in range(count)
        ]
        running = [
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for command in commands
        ]
        try:
            said = [one.communicate(timeout=400)[0] for one in running]
        finally:
            for one in running:
                one.kill()
        assert [one.returncode for one in running] == [0] * count, said[0].decode()[-3000:]
    return folder


def told(
    folder: Path, name: str, way: str, count: int, rank: int = 0
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    place = folder / name / way / str(count)
    return json.loads((place / f"{rank}.json").read_text()), load_file(place / f"{rank}.safetensors")


def far(x: torch.Tensor, y: torch.Tensor) -> float:
    """Length of the difference, in shares of x."""
    return float((x - y).norm() / x.norm().clamp_min(1e-12))


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["none", "layers"])
def test_gradient_and_weights_after_20_steps_are_those_of_one_process(folder: Path, shard: str) -> None:
    one, two, other = (load_file(folder / f"steps-{shard}-{n}.safetensors") for n in ("1-0", "2-0", "2-1"))
    assert far(one["gradient"], two["gradient"]) < 1e-6
    assert far(one["weights"], two["weights"]) < 1e-5
    assert torch.equal(two["weights"], other["weights"])
    assert far(one["weights"], load_file(folder / "steps-none-1-0.safetensors")["gradient"]) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), ranks_child.cases())
def test_a_stage_of_two_processes_leaves_what_one_leaves(folder: Path, name: str, way: str) -> None:
    """Adapter, target network, heads, metrics and rows. Weights to 1e-4, since Adam divides small gradients by their
    own size. Tokens of passes may differ: a step is cut into a pass for each process.
    """
    (one, weights), (two, shared), (_, other) = (
        told(folder, name, way, count, rank) for count, rank in ((1, 0), (2, 0), (2, 1))
    )
    assert weights.keys() == shared.keys() and weights
    for key, tensor in weights.items():
        assert torch.equal(shared[key], other[key]), key
        assert far(tensor, shared[key]) < 1e-4, key
    for kind in ("metrics", "curves"):
        assert one[kind].keys() == two[kind].keys()
        for key in (key for key in one[kind] if "tokens" not in key):
            assert two[kind][key] == pytest.approx(one[kind][key], rel=1e-4, abs=1e-5), key
    assert one["metrics"] and one["rows"].keys() == two["rows"].keys()
    for table, rows in one["rows"].items():
        check_alike(in_order(rows), in_order(two["rows"][table]))


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["episode_id"], row["turn"]))


def check_alike(one: Any, two: Any) -> None:
    """Numbers to 1e-4, all else equal, at any depth."""
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        one, two = list(one.values()), [two[key] for key in one]
    if isinstance(one, list):
        for x, y in zip(one, two, strict=True):
            check_alike(x, y)
    else:
        assert two == (pytest.approx(one, rel=1e-4, abs=1e-5) if isinstance(one, float) else one)


@pytest.mark.slow
def test_the_steps_are_shared_out(folder: Path) -> None:
    """A step of several rows is cut into passes, so that each process has some."""
    found = {count: told(folder, "rft", "plain", count)[0]["metrics"]["rft/tokens_share"] for count in (1, 2)}
    assert found[2] > found[1]
