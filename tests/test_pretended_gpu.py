"""On a GPU, everything that a stage needs is where the model is: whole runs, on a pretended GPU and on the CPU, end
alike to the last bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.checks.gpu_equality import TINY, equivalence
from benchmarks.pretend_gpu import GPU, OnGpu, pretended_gpu
from stages.learn import tree_layout
from stages.learn.checkpoint import load_checkpoint, save_checkpoint
from stages.learn.fit import adamw, fit
from stages.llm.hf import HfEngine
from stages.store import sqlite
from turnwise import cli

# Fused on both: `auto` would take fused kernels on the GPU alone, which round otherwise.
SMALL = ("iterations=1", "task.options.pay=step", "evaluate.episodes=4", "model.kernels=fused")
NLAC = (
    "model.engine=hf", "collect.first_episodes=12", "targets.transitions=8", "refine.states=8",
    "evaluate.audit_turns=4", "critic.autocast=true", "distill.autocast=true",
)  # fmt: skip
SELF_AC = (
    "iterations=2",  # the second goes on from the head that the first one left
    "collect.first_episodes=16",
    "self_ac.soft_prompt=2",
    "self_ac.autocast=true",
    "model.gradient_checkpointing=true",
    "evaluate.value=true",
    "evaluate.best_of=2",
)
Run = Callable[[str, str, Sequence[str]], Any]


@pytest.fixture
def run(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """(name of a fresh home, preset, --set) -> metrics of every iteration, without times."""
    bases = Path("data").resolve()

    def finished(name: str, preset: str, sets: Sequence[str]) -> Any:
        home = tmp_path / name
        (home / "mlflow").mkdir(parents=True)
        sqlite.copy(empty_store, home / "mlflow" / "mlflow.db")
        (home / "data").mkdir()
        (home / "data" / "base").symlink_to(bases / "base")
        monkeypatch.chdir(home)
        arguments = [part for one in (*SMALL, *sets) for part in ("--set", one)]
        status, (out, err) = cli.main(["run", preset, "--plain", "--json", *arguments]), capsys.readouterr()
        assert status == 0, err
        metrics = [row["metrics"] for row in json.loads(out.strip().splitlines()[-1])["iterations"]]
        return [{key: value for key, value in found.items() if not key.endswith("_s")} for found in metrics]

    return finished


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "sets"),
    [
        ("tiny", NLAC),
        ("desk+self_ac", SELF_AC),
        ("desk+self_ac_ppo", ("collect.first_episodes=16",)),
        ("desk+self_ac_grpo", ("collect.first_episodes=16",)),
        ("desk+grpo", ("collect.first_episodes=16", "grpo.autocast=true", "grpo.pass_tokens=2000")),
        ("desk+rft", ("collect.first_episodes=96",)),
        ("desk+sdpo", ("collect.first_episodes=16", "sdpo.epochs=1")),
    ],
)
def test_a_run_ends_as_on_the_cpu(run: Run, preset: str, sets: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run("cpu", preset, sets)
    devices: set[torch.device] = set()
    decode = HfEngine._decode_batch

    def noted(engine: Any, model: Any, requests: Any) -> Any:
        devices.add(model.device)
        return decode(engine, model, requests)

    monkeypatch.setattr(HfEngine, "_decode_batch", noted)
    # There, branches may go in fewer calls, which round otherwise.
    monkeypatch.setattr(tree_layout, "LEAST_SCORES", 1)
    with pretended_gpu():
        assert run("gpu", preset, sets) == expected
    assert devices == {GPU}
    steps = {key: value for key, value in expected[-1].items() if key.endswith("/steps")}
    assert steps and all(value >= 1 for value in steps.values()), steps


def test_a_checkpoint_is_gone_on_from_where_the_model_is(tmp_path: Path) -> None:
    rows = [torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) for i in range(4)]

    def trained(device: str) -> list[dict[str, float]]:
        def loss(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
            found = model(x.to(device)).square().mean()
            return found, {"loss": float(found.detach())}

        path = tmp_path / device
        torch.manual_seed(0)
        models = [torch.nn.Linear(3, 2).to(device) for _ in range(2)]
        first, second = (adamw(model, lr=0.1) for model in models)
        fit(models[0], rows[:2], loss, first, after_step=lambda done: save_checkpoint(path, models[0], first, done))
        done = load_checkpoint(path, models[1], second)
        return fit(models[1], rows, loss, second, history=done)

    with pretended_gpu():
        found = trained("cuda")
    assert found == trained("cpu")


def test_packed_rows_are_compared_with_separate_passes_there() -> None:
    """With grouped heads: off the CPU, keys and values are repeated for the masked kernel."""
    with pretended_gpu():
        assert max(map(max, equivalence(TINY, torch.float32, "cuda", flex=False).values())) <= 5e-6


def test_the_pretended_gpu_refuses_what_a_real_one_refuses() -> None:
    with pretended_gpu():
        x = torch.arange(6.0, device="cuda").reshape(2, 3)
        with pytest.raises(RuntimeError, match="same device"):
            x.add(torch.ones(3))
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(3)[x[0].long()]
        with pytest.raises(RuntimeError, match="same device"):
            torch.cat([x[0], torch.tensor([1.0])])
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
        for allowed in (
            x + torch.tensor(1.0),
            x[torch.tensor([1])],
            x.clone().copy_(torch.ones(2, 3)),
            x.sum().to("cuda"),
        ):
            assert isinstance(allowed, OnGpu) and allowed.device == GPU
        assert type(x.cpu()) is type(x.to("cpu")) is torch.Tensor and x.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_gradients_cross_between_the_devices() -> None:
    with pretended_gpu():
        weight = torch.tensor([1.0, 2.0], requires_grad=True)
        (weight.to("cuda") * 3).sum().cpu().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None and type(weight.grad) is torch.Tensor and weight.grad.tolist() == [3, 3]
