"""A training stage in several processes of this machine (`train.processes`), seen from their owner.

Each process (`flows/rank.py`) runs the stage's function as it is, on the same inputs, so all draw the same rows (`stages.learn.ranks`).
The first one's result counts. Only the owner generates: ranks ask it through files of FOLDER. They find each other by a
file, too, and talk over loopback. torchrun is not used: its rendezvous listens on every address.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.frame import types
from stages.frame.contract import Context, Outputs, Progress, Stage
from stages.frame.types import Request, Sleeper, TurnwiseError, UsageError

if TYPE_CHECKING:
    from flows.leash import Leashed

POLL_S = 0.02
SETTLE_S = 1.0  # after one rank has ended: the others fail of it at once, and the first to fall is to be named
JOB, ASKED, ANSWERED, DONE, RESULT = "job.json", "asked.json", "answered.json", "done.json", "result.json"
ERROR = "error"


def in_processes(home: Path) -> Callable[[Stage, Context], Outputs]:
    """What does a stage's work in the project folder `home`: in as many processes as its run says."""

    def work(stage: Stage, context: Context) -> Outputs:
        n = context.run.train.processes
        return _shared_out(stage, context, n, home) if stage.trains and n > 1 else stage.run(context)

    return work


def _shared_out(stage: Stage, context: Context, n: int, home: Path) -> Outputs:
    """Raises what a rank raised, and TurnwiseError for one that was killed."""
    from flows.leash import Leashed  # every command opens a workspace, and few need it

    _check_devices(n)
    folder = context.workdir / "ranks"
    folder.mkdir()
    engine = context.engine
    job = {
        "stage": stage.name, "run": context.run.model_dump(mode="json"), "iteration": context.iteration, "inputs": context.inputs,
        "home": str(home), "workdir": str(context.workdir), "checkpoints": str(context.checkpoints), "ranks": n,
        "model_hash": engine.model_hash, "context": engine.context,
    }  # fmt: skip
    write(folder / JOB, job)
    if isinstance(engine, Sleeper):
        engine.sleep()
    threads = max(1, (os.cpu_count() or 1) // n)
    env = {"OMP_NUM_THREADS": str(threads), **os.environ, "TOKENIZERS_PARALLELISM": "false"} | _on_loopback()
    bars: dict[str, tuple[Progress, int]] = {}
    with ExitStack() as stack:
        ranks = []
        for rank in range(n):
            command = [sys.executable, "-m", "flows.rank", str(folder), str(rank)]
            ranks.append(Leashed(command, log=folder / f"rank{rank}.log", env=env, cwd=home))
            stack.callback(ranks[-1].stop)
        while any(rank.running() for rank in ranks):
            if any(rank.status for rank in ranks):
                break
            _answer(folder, context)
            _advance(folder, context, bars)
            time.sleep(POLL_S)
        if any(rank.status for rank in ranks):
            raise _failure(stage, ranks, folder)
    _advance(folder, context, bars)
    told = json.loads((folder / RESULT).read_text())
    files = {path: Path(local) for path, local in told["files"].items()}
    return Outputs(told["metrics"], told["rows"], files, told["curves"])


def _check_devices(n: int) -> None:
    import torch

    if torch.cuda.is_available() and n > (cards := torch.cuda.device_count()):
        raise UsageError(f"train.processes: wanted at most one for each of the {cards} GPUs, found {n}; lower it")


def _on_loopback() -> dict[str, str]:
    """Variables by which gloo and NCCL talk over this machine's own address alone."""
    import psutil

    name = next(
        (name for name, held in psutil.net_if_addrs().items() if any(a.address == "127.0.0.1" for a in held)), "lo"
    )
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


def _answer(folder: Path, context: Context) -> None:
    """Generate what the ranks have asked for, if they have."""
    if not (folder / ASKED).exists():
        return
    asked = json.loads((folder / ASKED).read_text())
    (folder / ASKED).unlink()
    for name, path in asked["adapters"].items():
        context.engine.load_adapter(name, Path(path))
    found = context.engine.generate([Request.of(one) for one in asked["requests"]])
    if isinstance(context.engine, Sleeper):
        context.engine.sleep()
    write(folder / ANSWERED, [asdict(one) for one in found])


def _advance(folder: Path, context: Context, bars: dict[str, tuple[Progress, int]]) -> None:
    """The bars as far as the first rank has come."""
    if not (folder / DONE).exists():
        return
    for what, (total, done) in json.loads((folder / DONE).read_text()).items():
        bar, before = bars.get(what) or (context.progress(what, total), 0)
        if done > before:
            bar.advance(done - before)
        bars[what] = bar, done


def _failure(stage: Stage, ranks: Sequence[Leashed], folder: Path) -> TurnwiseError:
    """What to raise: the error that a rank told, or the rank that was killed."""
    time.sleep(SETTLE_S)
    told = sorted(folder.glob(f"{ERROR}*.json"))
    killed = [i for i, rank in enumerate(ranks) if rank.killed]
    if told and not killed:
        return error_of(json.loads(told[0].read_text()))
    fallen = (killed or [i for i, rank in enumerate(ranks) if rank.status])[0]
    return TurnwiseError(
        f"{stage.name}: process {fallen + 1} of the {len(ranks)} that trained {ranks[fallen].how()}. Nothing was stored of it. The same command goes on"
    )


def told_of(error: Exception) -> dict[str, str]:
    """An error as JSON, for `error_of` in another process: its text, and its nearest kind of stages/frame/types.py that a
    text alone can make.
    """
    known = (kind for kind in type(error).__mro__ if issubclass(kind, TurnwiseError) and "__init__" not in vars(kind))
    kind = next((one for one in known if getattr(types, one.__name__, None) is one), TurnwiseError)
    return {"kind": kind.__name__, "text": str(error)}


def error_of(told: Mapping[str, str]) -> TurnwiseError:
    """The error that `told_of` told."""
    kind: type[TurnwiseError] = getattr(types, told["kind"])
    return kind(told["text"])


def write(path: Path, value: Any) -> None:
    """Whole or not at all, for a reader in another process."""
    half = path.with_name(f"{path.name}.half")
    half.write_text(json.dumps(value, default=list))
    os.replace(half, path)
