"""A training step of every method waits for the GPU once, at its end: a pretended GPU counts.

`LATER` is the whole count of a step: one read of losses, gradient norm and metrics. The first step of grpo and self_ac
also writes down what it saw (gaps, ledger), and the first step of all makes the optimiser's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import self_ac_play
import torch
from torch import nn

from benchmarks.pretend_gpu import Counts, counting, pretended_gpu
from stages import critic, distill, grpo, rft, sdpo, self_ac
from stages.critic import CriticConfig
from stages.distill import DistillConfig
from stages.frame.contract import Outputs
from stages.frame.types import Outcome
from stages.grpo import GrpoConfig
from stages.learn.fit import fit
from stages.learn.value_head import new_head
from stages.play.transitions import episode_rows
from stages.q_critic import QCriticConfig, learn
from stages.rft import RftConfig
from stages.sdpo import SdpoConfig
from stages.train import network
from stages.train.model import trainable
from stages.train.passes import mixed_nll

LATER = 1
WON = [("Action: check photo", "photo done."), ("Action: close phone", "phone done. pass.")]
TARGETS = [models.successor_row(f"e{i}", f"Predict {i}", f"Future: {i}.") for i in range(12)]
ACTIONS = [models.successor_row(f"a{i}", f"Ana {i}", f"Action: {i}.", role="policy") for i in range(12)]


def play(bench: models.Bench) -> None:
    """Six episodes of one scenario, every other one won; targets of two roles."""
    found = [models.make_episode(bench.engine, f"Ana{i}", WON, Outcome.SCORED, reward=float(i % 2)) for i in range(6)]
    bench.memory.keep("collect0", Outputs({}, episode_rows(found, 0)))
    for head in bench.memory.tables["episodes", "collect0"]:
        head["scenario_id"] = "same"
    bench.memory.keep("targets0", Outputs({}, {"targets": TARGETS}))
    bench.memory.keep("refine0", Outputs({}, {"targets": ACTIONS}))


def run_critic(bench: models.Bench) -> None:
    inputs = {"collect": ["collect0"], "targets": ["targets0"], "refine": ["refine0"]}
    bench.run(critic.STAGE, CriticConfig(batch=4, policy_rows=2, epochs=2, pass_tokens=60), inputs)


def run_distill(bench: models.Bench) -> None:
    inputs = {"refine": ["refine0"], "targets": ["targets0"]}
    bench.run(distill.STAGE, DistillConfig(batch=4, successor_rows=2, kl_coef=0.1, held_out=0, epochs=2), inputs)


def run_q_critic(bench: models.Bench) -> None:
    """Its steps alone: what comes before them asks an engine."""
    context = bench.context(QCriticConfig(batch=4, policy_rows=2, epochs=2), {"collect": ["collect0"]})
    model = trainable(context, None)
    net = nn.ModuleList([model, new_head(model, seed=0)])
    target = {name: p.detach().clone() for name, p in net.named_parameters() if p.requires_grad}
    learn(context, net, target, [{**row, "info": {"q": 0.5}} for row in TARGETS])


def run_rft(bench: models.Bench) -> None:
    bench.run(rft.STAGE, RftConfig(batch=2, epochs=2), {"collect": ["collect0"]})


def run_grpo(bench: models.Bench) -> None:
    bench.run(grpo.STAGE, GrpoConfig(batch=4, max_gap=1e9), {"collect": ["collect0"]})


def run_sdpo(bench: models.Bench, **config: Any) -> None:
    bench.run(sdpo.STAGE, SdpoConfig(batch=4, epochs=2, **config), {"collect": ["collect0"]})


def run_self_ac(bench: models.Bench, **config: Any) -> None:
    self_ac_play.run(bench, {"collect": ["collect0"]}, batch=2, checkpoint_every=0, **config)


RUNS: dict[str, Callable[[models.Bench], None]] = {
    "critic": run_critic, "distill": run_distill, "q_critic": run_q_critic, "rft": run_rft, "grpo": run_grpo, "self_ac": run_self_ac,
    "sdpo": run_sdpo, "sdpo, one pass": lambda bench: run_sdpo(bench, ema_rate=1, top_k=5, divergence="jensen_shannon"),
    "self_ac, gae": lambda bench: run_self_ac(bench, advantage="gae", ratio="turn_mean", kl_coef=0.1),
    "self_ac, no critic": lambda bench: run_self_ac(bench, advantage="group", alpha=0.0),
    "self_ac, soft prompt": lambda bench: run_self_ac(bench, soft_prompt=2, known_end=True, row_tokens=1),
}  # fmt: skip


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Counts]]:
    """What each step of the next training asked for, from the end of the one before it to its own."""
    found: list[Counts] = []
    real = fit

    def counted(*args: Any, after_step: Any, **options: Any) -> Any:
        counts = Counts()

        def after(done: Any) -> None:
            after_step(done)
            found.append(Counts(*map(type(counts.waits), (counts.launches, counts.waits, counts.copies))))
            for one in (counts.launches, counts.waits, counts.copies):
                one.clear()

        with counting(counts):
            return real(*args, after_step=after, **options)

    for module in (network, self_ac):
        monkeypatch.setattr(module, "fit", counted)
    with pretended_gpu():
        yield found


@pytest.mark.parametrize("method", RUNS)
def test_a_step_waits_for_the_gpu_once(method: str, base: Path, tmp_path: Path, steps: list[Counts]) -> None:
    bench = models.Bench(base, tmp_path)
    play(bench)
    RUNS[method](bench)
    assert len(steps) >= 4
    assert [step.waits.total() for step in steps[1:]] == [LATER] * (len(steps) - 1), [step.waits for step in steps]


def test_a_wait_that_is_added_is_counted(base: Path, tmp_path: Path, steps: list[Counts], monkeypatch: Any) -> None:
    """So the test above can fail: one float of the loss in each of a step's passes."""
    bench = models.Bench(base, tmp_path)
    play(bench)
    real = mixed_nll

    def looked_at(*args: Any, **options: Any) -> Any:
        found = real(*args, **options)
        assert torch.isfinite(found[0])
        return found

    monkeypatch.setattr(rft, "mixed_nll", looked_at)
    run_rft(bench)
    assert [step.waits.total() for step in steps[1:]] == [LATER + 1] * (len(steps) - 1)
