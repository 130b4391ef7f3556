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

from benchmarks.checks import gpu_check, gpu_equality, gpu_steps
from benchmarks.passes import grpo_log_probs, grpo_row, made_up, self_ac_part
from flows.cost.shapes import DEVICES
from stages.learn.tree import Tree
from stages.learn.tree_attention import body_pass
from stages.learn.tree_kernel import MEASURED
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
    (engine,) = [row for row in rows if row[0] == "tiny" and len(row) == 7]
    assert float(engine[-1]) > 0
    timed = [row for row in rows if row[0] == "tiny" and len(row) == 12]
    assert [tuple(row[1:5]) for row in timed] == [
        (method, kernels, "sdpa", autocast)
        for method in ("Self-AC", "NLAC, 7 branches", "GRPO")
        for kernels, autocast in (("torch", "yes"), ("fused LoRA", "yes"), ("torch", "no"))
    ]
    assert all(float(row[7]) > 0 and float(row[8]) > 0 for row in timed)
    # Self-AC reads what follows the last action, and a critic prompt a state.
    assert int(timed[0][5]) > int(timed[-1][5])


def test_what_comes_after_the_time_or_does_not_fit_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "wrongs", lambda *args: [])
    assert gpu_check.main(["--smoke", "--minutes", "0"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| tiny")]
    assert len(rows) == 1 + 9 and all("skipped: the time is over" in row for row in rows)
    assert len({row.count("|") for row in rows[1:]}) == 1
    monkeypatch.setattr(gpu_check, "engine", lambda *args: None)
    monkeypatch.setattr(gpu_steps, "planned_gib", lambda *args: 1e9)
    monkeypatch.setattr(gpu_steps, "room_of", lambda device: 8.0)
    assert gpu_check.main(["--smoke"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| tiny")]
    assert len(rows) == 9 and all("skipped: the device has 8.0 GiB" in row for row in rows)


def test_the_nlac_row_is_a_tree_of_many_branches_and_its_work_counts_each_token_once() -> None:
    args = gpu_check.arguments([])
    model = gpu_equality.random_policy(gpu_equality.TINY, torch.float32, "cpu").eval()
    step = gpu_steps.nlac_step(model, args, gpu_equality.TINY, "cpu")
    assert step.method == "NLAC, 25 branches" and step.tokens == 14_952 == MEASURED[-1].tokens
    assert sum(int(rows.n * rows.fresh) for rows in step.rows) == step.tokens


def test_on_a_gpu_the_best_kernels_meet_flexattention_where_rows_are_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    for reason, best in (("not installed", "fused LoRA"), ("", "fused LoRA, Liger")):
        monkeypatch.setattr(gpu_steps, "no_liger", lambda device, reason=reason: reason)
        found = gpu_steps.variants("Self-AC", "cuda")
        assert [kernels for kernels, attention, _ in found if attention == "flex"] == [best]
        assert found[:-2] == gpu_steps.variants("GRPO", "cuda")[:-1] and found[-1] == ("torch", "sdpa", False)


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
    monkeypatch.setattr(gpu_equality, "ROUNDING", {dtype: gpu_equality.ROUNDING[dtype]})
    for name in ("steps", "engine"):
        monkeypatch.setattr(gpu_check, name, lambda *args: None)
    assert gpu_check.main(["--smoke"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(gpu_equality, "body_pass", lambda model, tree, **_: fault(model, tree))
    assert gpu_check.main(["--smoke"]) == 1
    assert re.search(f"^{shows} in {dtype}, sdpa: off by .* do not train", capsys.readouterr().err, re.M)


@DTYPES
def test_the_gradient_of_the_mean_square_of_states_is_rounding(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off by 0.13 in fp32 and by 1,200 times itself in bf16, in separate passes; a projection's by 1e-6 and 0.025. A
    check by it would be refused.
    """
    monkeypatch.setattr(gpu_equality, "ROUNDING", {dtype: gpu_equality.ROUNDING[dtype]})
    assert (
        gpu_equality.equivalence(gpu_equality.TINY, dtype, "cpu", flex=False)["separate"][1]
        < 20 * torch.finfo(dtype).eps
    )
    monkeypatch.setattr(gpu_equality, "projected", lambda states: states.square().mean())
    [known, *_] = gpu_equality.wrongs(gpu_equality.TINY, "cpu")
    off = re.fullmatch(f"gradient in {dtype}, separate: off by (.*), allowed .*", known)
    assert off and float(off[1]) > 0.05


def test_a_gradient_that_is_no_number_is_off() -> None:
    truth = [torch.ones(2, 3, dtype=torch.float64)] * 3
    assert gpu_equality.off(truth, truth) == (0.0, 0.0)
    assert math.isnan(gpu_equality.off([*truth[:2], truth[2] * torch.nan], truth)[1])
    assert math.isnan(gpu_equality.off([truth[0] * torch.nan, *truth[1:]], truth)[0])


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
    model = gpu_equality.random_policy(gpu_equality.TINY, torch.float32, "cpu")
    episodes = made_up(2, 2, 6, 6, 6, 300)
    part, row = self_ac_part(episodes, gpu_equality.CRITIC, 0), grpo_row(episodes)
    with torch.no_grad():
        found = credited_pass(model, new_head(model, seed=0), part, SelfAcConfig(), value_grad_scale=1.0)
        assert torch.allclose(found.log_probs_K, grpo_log_probs(model, row), atol=1e-4)
