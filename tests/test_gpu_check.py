"""`make gpu-check` without a GPU: its code at a tiny shape, and what it says where there is nothing to measure."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.passes import grpo_log_probs, grpo_row, made_up, self_ac_part
from flows.cost.shapes import DEVICES
from stages.learn.value_head import new_head
from stages.train.actor_critic import SelfAcConfig, credited_pass


def test_the_smoke_run_checks_packed_rows_and_times_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--smoke"]) == 0
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("| ")]
    for dtype, allowed in (("float32", 1e-3), ("bfloat16", 5e-2)):
        (found,) = [float(row[1]) for row in rows if row[0] == dtype]
        assert 0 <= found <= allowed
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


def test_a_packed_row_that_is_off_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "equivalence", lambda *args, **options: [0.2])
    monkeypatch.setattr(gpu_check, "steps", lambda *args: None)
    assert gpu_check.main(["--smoke"]) == 1
    assert "do not train" in capsys.readouterr().err


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
