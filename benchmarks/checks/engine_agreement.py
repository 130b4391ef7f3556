"""Whether the engines agree: an iteration of a preset through each of them, beside the same iteration through
transformers.

    python -m benchmarks.checks.engine_agreement                                              # demo and desk+self_ac, hf alone
    .venv-vllm/bin/python -m benchmarks.checks.engine_agreement --engines vllm                # and vLLM in process (`make
        test-vllm` makes that environment)
    .venv-vllm/bin/python -m benchmarks.checks.engine_agreement --engines vllm openai --url http://127.0.0.1:8000/v1

--url is a server of the same model on this machine, which sees this folder:

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 .venv-vllm/bin/python -m vllm.entrypoints.openai.api_server --model
        $PWD/data/base --dtype float32 \\
        --enable-lora --max-loras 32 --max-lora-rank 32 --logprobs-mode raw_logprobs      # on a CPU also:
            --enforce-eager --no-enable-chunked-prefill

Each run has a folder of its own and the same seed. collect, start, end: win rates while collecting, and on validation
before and after the iteration, with 95 % intervals; the draws of two engines differ, so these agree within noise at
best. With --iterations, collect and end are of the last one, and curve has the win rates on validation after each. same
ids: of prompts of the hf run, those to the policy as it collected, to its roles, and to the policy that it trained
(with its adapter), decoded greedily by each engine, the share whose ids are those of hf. gap: of every token of an
engine's own turns, |its log-prob - the trainer's|, mean and largest, in nats; turns of the base model and of the
trained adapter.
seconds: of the stages of the iteration without evaluation, engine start left out.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.passes import table_head, table_row
from flows import presets
from flows.pipeline import plain_step, run_pipeline
from flows.telling import Summary
from flows.workspace import make_engine, open_workspace
from stages.frame.contract import POLICY_STAGES
from stages.frame.types import Completion, Engine, Request, Row
from stages.learn.losses import completion_log_probs, pad_rows
from stages.llm.hf import load_base
from stages.store.workspace import Workspace, silent

SHIPPED = Path("data/base").resolve()
ROLE_TOKENS = 48


@dataclass(frozen=True)
class Played:
    """A finished run of one iteration, its stores, and the engine that it ran on."""

    summary: Summary
    workspace: Workspace
    engine: Engine

    def metrics(self, point: int) -> dict[str, float]:
        return dict(self.summary.iterations[point]["metrics"])

    def rows(self, table: str, stage: str, point: int) -> list[Row]:
        """What a stage wrote at a point of the curve: 0 = the base model, 1 = the first iteration, -1 = the last one."""
        runs: Mapping[str, str] = self.summary.iterations[point]["runs"]
        return self.workspace.replay.rows(table, [runs[stage]]) if stage in runs else []

    @property
    def adapter(self) -> Path:
        """Of the policy that the last iteration trained."""
        runs = self.summary.iterations[-1]["runs"]
        return self.workspace.tracking.artifact(
            next(runs[stage] for stage in POLICY_STAGES if stage in runs), "adapter"
        )


def played(preset: str, sets: Sequence[str], engine: Engine, home: Path) -> Played:
    """The run in a folder of its own, the shipped base copied there."""
    (home / "mlflow").mkdir(parents=True)
    shutil.copytree(SHIPPED, home / "data" / "base")
    workspace = replace(open_workspace(home), engine=lambda run: engine)
    workspace.tracking.initialise()
    run = presets.load(preset, sets)
    summary = run_pipeline(run, workspace, lambda parent: plain_step(workspace, silent, parent))
    return Played(summary, workspace, engine)


def prompts(run: Played, n: int) -> list[Request]:
    """n greedy requests of each kind: the policy as it collected first, the roles of targets, and the trained policy,
    whose adapter is named "trained".
    """
    rng = random.Random(0)
    acting = [Request(tuple(row["prompt_ids"]), ROLE_TOKENS, 0.0, 0) for row in run.rows("turns", "collect", 1)]
    role = [
        Request(tuple(row[key]), ROLE_TOKENS, 0.0, 0)
        for row in run.rows("targets", "targets", 1)
        for key in ("student_ids", "teacher_ids")
    ]
    trained = [
        Request(tuple(row["prompt_ids"]), ROLE_TOKENS, 0.0, 0, "trained") for row in run.rows("turns", "evaluate", -1)
    ]
    return [one for kind in (acting, role, trained) for one in rng.sample(kind, min(n, len(kind)))]


def gaps(run: Played) -> list[float]:
    """|log-prob of the engine - that of one pass of the trainer's model| of every token of the turns of the base and of
    the trained adapter.
    """
    from peft import PeftModel

    model = load_base(str(SHIPPED), "float32")[0]
    of_base = difference(model, run.rows("turns", "evaluate", 0) + run.rows("turns", "collect", 1))
    return of_base + difference(PeftModel.from_pretrained(model, run.adapter).eval(), run.rows("turns", "evaluate", -1))


@torch.no_grad()
def difference(model: Any, turns: Sequence[Row]) -> list[float]:
    found: list[float] = []
    for start in range(0, len(turns), 64):
        part = turns[start : start + 64]
        log_probs, _ = completion_log_probs(
            model, pad_rows([t["prompt_ids"] for t in part], [t["action_ids"] for t in part], pad_id=0)
        )
        found += [
            abs(one - other)
            for one, other in zip(log_probs.tolist(), (p for t in part for p in t["log_probs"]), strict=True)
        ]
    return found


def report(preset: str, name: str, run: Played, greedy: tuple[Sequence[Completion], Sequence[Completion]]) -> None:
    m, start, gap = run.metrics(-1), run.metrics(0), gaps(run)
    same = sum(one.token_ids == other.token_ids for one, other in zip(*greedy, strict=True))
    curve = " ".join(f"{one['win_rate']:.2f}" for one in run.summary.iterations[1:] if one["win_rate"] is not None)
    table_row(
        preset, name, f"{m['collect/win_rate']:.3f} of {m['collect/episodes']:.0f}", rate(start), rate(m), curve, f"{m['collect/turns']:.2f}",
        f"{m['collect/malformed_frac']:.3f}", f"{m['pipeline/generated_tokens']:.0f}", f"{same} of {len(greedy[0])}", f"{sum(gap) / len(gap):.1e}, {max(gap):.1e}",
        f"{sum(one['seconds'] for one in run.summary.iterations[1:]):.0f}",
    )  # fmt: skip


def rate(metrics: Mapping[str, float]) -> str:
    return f"{metrics['evaluate/win_rate']:.3f} ({metrics['evaluate/win_low']:.2f}-{metrics['evaluate/win_high']:.2f})"


@contextmanager
def homes() -> Iterator[Callable[[str], Path]]:
    """Folders by name, for as long as the block lasts; the process is in the one that was opened last."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            yield lambda name: Path(scratch, name)
        finally:
            os.chdir(here)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="*", default=[], choices=["vllm", "openai"], help="beside hf")
    parser.add_argument("--url", default="", help="of a server that holds the shipped base, for openai")
    parser.add_argument("--model", default=str(SHIPPED), help="the name that it has there")
    parser.add_argument("--presets", nargs="+", default=["demo", "desk+self_ac"])
    parser.add_argument("--iterations", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--prompts", type=int, default=200, help="of each kind, decoded greedily")
    args = parser.parse_args()
    torch.set_num_threads(1)
    paths = {"hf": str(SHIPPED), "vllm": str(SHIPPED), "openai": args.model}
    settings = {
        name: [f"model.engine={name}", f"model.path={path}", f"model.url={args.url}"] for name, path in paths.items()
    }
    engines = {name: make_engine(presets.load("demo", settings[name])) for name in ("hf", *args.engines)}
    table_head(
        "preset", "engine", "collect", "start", "end", "curve", "turns", "malformed", "generated tokens", "same ids", "gap: mean, largest", "seconds",
    )  # fmt: skip
    sets = [f"iterations={args.iterations}", *args.sets]
    with homes() as home:
        for preset in args.presets:
            reference = played(preset, sets, engines["hf"], home(f"{preset}-hf"))
            asked = prompts(reference, args.prompts)
            expected: list[Completion] = []
            for name, engine in engines.items():
                run = reference if name == "hf" else played(preset, sets, engine, home(f"{preset}-{name}"))
                engine.load_adapter(f"{preset}-trained", reference.adapter)
                greedy = engine.generate(
                    [replace(one, adapter=one.adapter and f"{preset}-{one.adapter}") for one in asked]
                )
                expected = expected or greedy
                report(preset, name, run, (expected, greedy))


if __name__ == "__main__":
    main()
