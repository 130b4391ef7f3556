"""`make gpu-check` without a GPU: its code at a tiny shape, and what it says where there is nothing to measure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.checks import gpu_check
from benchmarks.passes import grpo_log_probs, grpo_row, made_up, self_ac_part
from flows.cost.shapes import DEVICES
from stages.learn.tree import Tree
from stages.learn.tree_attention import body_pass
from stages.learn.tree_layout import layout_of
from stages.learn.value_head import new_head
from stages.train.actor_critic import SelfAcConfig, credited_pass


def test_the_smoke_run_checks_packed_rows_and_times_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--smoke"]) == 0
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("| ")]
    for dtype, rounding in (("float32", 5e-6), ("bfloat16", 5e-2)):
        for of in ("states", "gradient"):
            ((separate, packed),) = [map(float, row[2:4]) for row in rows if row[:2] == [dtype, of]]
            assert 0 < packed < 1.5 * separate < 1.5 * rounding
    timed = [row for row in rows if row[0] == "tiny"]
    assert [(row[1], row[3]) for row in timed] == [
        ("GRPO", "no"),
        ("Self-AC", "no"),
        ("GRPO", "yes"),
        ("Self-AC", "yes"),
    ]
    assert all(float(row[5]) > 0 and float(row[6]) > 0 for row in timed)
    # Self-AC reads what follows the last action, and a critic prompt a state.
    assert int(timed[1][4]) > int(timed[0][4])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_cuda_it_is_one_sentence_and_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 1
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(r"gpu-check wants a CUDA device, .*--smoke.*\n", err)


def late(model: Any, tree: Tree) -> Tensor:
    """Every branch stands one position too far on; it sees what it should."""
    branch = tree.node >= len(tree.paths)
    return body_pass(model, replace(tree, position_ids=tree.position_ids + branch), layout=layout_of(tree))


def short(model: Any, tree: Tree) -> Tensor:
    """One branch does not see the last token of its prefix."""
    first = torch.arange(len(tree.branch_prefix)) == 0
    return body_pass(model, tree, layout=layout_of(replace(tree, branch_prefix=tree.branch_prefix - first.long())))


def lost(model: Any, tree: Tree) -> Tensor:
    """Every state is right; no gradient flows from the branches."""
    states = body_pass(model, tree)
    return torch.where((tree.node < len(tree.paths))[:, None], states, states.detach())


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@DTYPES
@pytest.mark.parametrize(("fault", "shows"), [(late, "states"), (short, "states"), (lost, "gradient")])
def test_a_packed_row_that_is_off_is_no_success(
    fault: Callable[[Any, Tree], Tensor], shows: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    monkeypatch.setattr(gpu_check, "ROUNDING", {dtype: gpu_check.ROUNDING[dtype]})
    monkeypatch.setattr(gpu_check, "steps", lambda *args: None)
    assert gpu_check.main(["--smoke"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(gpu_check, "body_pass", lambda model, tree, **_: fault(model, tree))
    assert gpu_check.main(["--smoke"]) == 1
    assert re.search(f"^{shows} in {dtype}, sdpa: off by .* do not train", capsys.readouterr().err, re.M)


@DTYPES
def test_the_gradient_of_the_mean_square_of_states_is_rounding(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off by 0.13 in fp32 and by 1,200 times itself in bf16, in separate passes; a projection's by 1e-6 and 0.025. A
    check by it would be refused.
    """
    monkeypatch.setattr(gpu_check, "ROUNDING", {dtype: gpu_check.ROUNDING[dtype]})
    assert gpu_check.equivalence(gpu_check.TINY, dtype, "cpu", flex=False)["separate"][1] < 20 * torch.finfo(dtype).eps
    monkeypatch.setattr(gpu_check, "projected", lambda states: states.square().mean())
    [known, *_] = gpu_check.wrongs(gpu_check.TINY, "cpu")
    off = re.fullmatch(f"gradient in {dtype}, separate: off by (.*), allowed .*", known)
    assert off and float(off[1]) > 0.05


def test_a_gradient_that_is_no_number_is_off() -> None:
    truth = [torch.ones(2, 3, dtype=torch.float64)] * 3
    assert gpu_check.off(truth, truth) == (0.0, 0.0)
    assert math.isnan(gpu_check.off([*truth[:2], truth[2] * torch.nan], truth)[1])
    assert math.isnan(gpu_check.off([truth[0] * torch.nan, *truth[1:]], truth)[0])


def test_devices_are_known_by_what_their_drivers_call_them() -> None:
    for said, name in (
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA H20", "h20"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA L40S", "l40s"), ("NVIDIA B200", "b200"),
    ):  # fmt: skip
        found = gpu_check.peak_of(said)
        assert found is not None and found.bf16 == DEVICES[name].bf16
    assert gpu_check.peak_of("Some Other Device") is None


def test_the_steps_are_of_the_same_episodes() -> None:
    """GRPO's log-probs are those of Self-AC's pass over the packed row."""
    model = gpu_check.random_policy(gpu_check.TINY, torch.float32, "cpu")
    episodes = made_up(2, 2, 6, 6, 6, 300)
    part, row = self_ac_part(episodes, gpu_check.CRITIC, 0), grpo_row(episodes)
    with torch.no_grad():
        found = credited_pass(model, new_head(model, seed=0), part, SelfAcConfig(), value_grad_scale=1.0)
        assert torch.allclose(found.log_probs_K, grpo_log_probs(model, row), atol=1e-4)
