"""The shards of a stage (`run.shards`), seen from the run that joins them.

A thread each waits for a shard, wherever it is made (`run.workers`): in a process of this machine, on a node of a Ray
cluster, or by a worker of a Prefect work pool. All of them do the same (`flows/shard_worker.py`). Finished shards are
found by their fingerprints, so after a kill only those that lack are made.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

from flows.processes import error_of, write
from stages.frame.contract import Context, Outputs, Stage
from stages.frame.types import Completion, Engine, Request, TurnwiseError, UsageError
from stages.llm.metered import Metered
from stages.store.shards import EXPERIMENT, LEAST, Shard, part_of, read_shard, shards_of
from stages.store.workspace import Workspace

Item = TypeVar("Item")
Result = TypeVar("Result")

if TYPE_CHECKING:
    from flows.leash import Leashed

POLL_S = 0.05
JOB, ANSWER = ".job.json", ".answer.json"
WORKER = "flows.shard_worker"
WAIT_S = 0.5  # between two looks at what works elsewhere
GREETED_S = 5.0
RETRIES = 3  # of a shard whose node died
FLOW, DEPLOYMENT = "turnwise-shard", "shard"

Make = Callable[[Shard], None]
"""Has a shard made somewhere, and returns when it is. Raises what it raised."""


def in_shards(workspace: Workspace) -> Callable[[Stage, Context], Outputs]:
    """What does a stage's work: by its run's `run.shards`, and for other stages as the workspace does it."""

    workers = Workers(workspace.home)

    def where(run: Any, stopping: Event) -> AbstractContextManager[Make]:
        if run.run.workers == "ray":
            return on_ray(run.run.address, workspace.home, stopping)
        if run.run.workers == "pool":
            return in_pool(run.run.pool, workspace.home, stopping)
        return workers(run, stopping)

    def work(stage: Stage, context: Context) -> Outputs:
        if not stage.shares or context.run.run.shards == 1:
            return workspace.work(stage, context)
        stopping = Event()
        with where(context.run, stopping) as make:
            joined = _Joined(stage, context, workspace, make, stopping)
            return stage.run(replace(context, engine=Dealt(context.engine, joined.replies), share=joined.share))

    return work


class Dealt(Metered):
    """`Engine` whose bulk requests are answered by shards. What is played here is asked of the engine itself."""

    def __init__(self, engine: Engine, deal: Callable[[Sequence[Request]], list[Completion] | None]) -> None:
        super().__init__(engine)
        self._deal = deal

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        found = self._deal(requests)
        return super().generate(requests) if found is None else found


@dataclass(frozen=True)
class _Joined:
    """The run that joins shards."""

    stage: Stage
    context: Context
    workspace: Workspace
    make: Make
    stopping: Event

    def share(
        self, items: Sequence[Item], work: Callable[[Sequence[Item]], list[Result]], kind: type[Result], done: Callable[[int], None]
    ) -> list[Result]:  # fmt: skip
        """As `contract.Share`."""
        count = min(self.context.run.run.shards, len(items))
        if count < 2:
            return work(items)
        shards = shards_of(self.context, self.stage, count, self.workspace)
        return self.join(shards, kind, lambda shard: done(len(part_of(items, shard.number, count))))

    def replies(self, requests: Sequence[Request]) -> list[Completion] | None:
        """None where there are too few to deal out."""
        count = min(self.context.run.run.shards, len(requests) // LEAST)
        if count < 2:
            return None
        shards = shards_of(self.context, self.stage, count, self.workspace, requests)
        found = self.join(shards, Completion, lambda shard: None)
        self.workspace.tracking.discard(shards[0].joined, shards[0].asked)
        return found

    def join(self, shards: Sequence[Shard], kind: type[Result], done: Callable[[Shard], None]) -> list[Result]:
        tracking, engine = self.workspace.tracking, self.context.engine
        assert isinstance(engine, Metered)  # as execute hands it in
        made = {shard.key: tracking.finished(shard.key, EXPERIMENT) for shard in shards}
        for shard in (one for one in shards if made[one.key]):
            done(shard)
        engine.sleep()
        self.make_all([shard for shard in shards if not made[shard.key]], done)
        found: list[Result] = []
        for shard in shards:
            if not (run_id := made[shard.key] or tracking.finished(shard.key, EXPERIMENT)):
                raise TurnwiseError(f"{shard.title} left no finished run; give the same command again")
            part, counted = read_shard(run_id, kind, tracking)
            found += part
            engine.add(counted)
        return found

    def make_all(self, shards: Sequence[Shard], done: Callable[[Shard], None]) -> None:
        """Side by side. Where one fails, the others are finished: the next command finds them."""
        if not shards:
            return
        with ThreadPoolExecutor(len(shards)) as threads:
            begun = {threads.submit(self.make, shard): shard for shard in shards}
            try:
                for ended in as_completed(begun):
                    if not ended.exception():
                        done(begun[ended])
            except BaseException:  # Ctrl-C
                self.stopping.set()
                raise
        for ended in begun:
            ended.result()


class Workers:
    """A process for each number of a shard, started when it is first wanted, and kept for the next stage.

    One whose engine may hold a GPU ends with its stage: other stages want the memory.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._folder: TemporaryDirectory[str] | None = None
        self._started: dict[int, Leashed] = {}
        self._environments: list[Mapping[str, str]] = []

    @contextmanager
    def __call__(self, run: Any, stopping: Event) -> Iterator[Make]:
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="turnwise-shards-")
            atexit.register(self.stop)
        self._environments = _environments(run)
        try:
            yield lambda shard: self._make(shard, stopping)
        finally:
            if stopping.is_set() or run.model.engine in ("hf", "vllm"):
                self.stop()

    def stop(self) -> None:
        for one in self._started.values():
            one.stop()
        self._started.clear()

    def _make(self, shard: Shard, stopping: Event) -> None:
        assert self._folder is not None
        own = Path(self._folder.name, str(shard.number))
        worker = self._worker(shard.number, own)
        write(own / f"{shard.key}{JOB}", asdict(shard))
        answer = own / f"{shard.key}{ANSWER}"
        while not answer.exists():
            if stopping.is_set():
                return
            if not worker.running():
                raise _lost(shard, worker)
            time.sleep(POLL_S)
        said = json.loads(answer.read_text())
        answer.unlink()
        told(said)

    def _worker(self, number: int, own: Path) -> Leashed:
        from flows.leash import Leashed  # few commands need it

        known = self._started.get(number)
        if known is None or not known.running():
            own.mkdir(exist_ok=True)
            for left in own.glob(f"*{JOB}"):  # of one that died
                left.unlink()
            command = [sys.executable, "-m", WORKER, str(self._home), str(own)]
            env = self._environments[number]
            self._started[number] = Leashed(command, log=own / "worker.log", env=env, cwd=self._home)
        return self._started[number]


@contextmanager
def on_ray(address: str, home: Path, stopping: Event) -> Iterator[Make]:
    """A task of the cluster for each shard. The shards of a node that dies are made again on another one."""
    try:
        import ray
    except ImportError:
        raise UsageError(
            'run.workers: "ray" needs Ray, which is not installed. Run: pip install -c constraints.txt -e ".[ray]"'
        ) from None
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), GREETED_S).close()  # Ray itself looks for minutes
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"run.address: wanted the head of a Ray cluster at {address}, but none answers ({error}). Start it by ray start --head, or mend the address"
        ) from None
    task = ray.remote(max_retries=RETRIES, scheduling_strategy="SPREAD")(_on_a_node)

    def make(shard: Shard) -> None:
        begun = task.remote(str(home), asdict(shard))
        while not ray.wait([begun], timeout=WAIT_S)[0]:
            if stopping.is_set():
                ray.cancel(begun, force=True)
                return
        try:
            answer = ray.get(begun)
        except ray.exceptions.RayError as error:
            said = str(error).strip().splitlines()[-1]
            raise TurnwiseError(f"{shard.title}: its Ray task failed ({type(error).__name__}: {said})") from error
        told(answer)

    try:
        yield make
    finally:
        ray.shutdown()


def _on_a_node(home: str, job: dict[str, Any]) -> dict[str, str]:
    # By its name: it opens the project folder, which this module is a part of.
    answer: dict[str, str] = importlib.import_module(WORKER).make(Path(home), job)
    return answer


@contextmanager
def in_pool(name: str, home: Path, stopping: Event) -> Iterator[Make]:
    """A flow run for each shard, of the deployment `turnwise-shard/shard` that the work pool has."""
    if not os.environ.get("PREFECT_API_URL"):
        raise UsageError(
            'run.workers: "pool" needs the Prefect server that has the pool. Set PREFECT_API_URL to the address of its API'
        )
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import DeploymentFilter, FlowFilter, WorkPoolFilter
    from prefect.states import Cancelling

    with get_client(sync_client=True) as client:
        found = client.read_deployments(
            flow_filter=FlowFilter.model_validate({"name": {"any_": [FLOW]}}),
            deployment_filter=DeploymentFilter.model_validate({"name": {"any_": [DEPLOYMENT]}}),
            work_pool_filter=WorkPoolFilter.model_validate({"name": {"any_": [name]}}),
        )
    if not found:
        raise UsageError(
            f"run.pool: wanted a work pool with the deployment {FLOW}/{DEPLOYMENT}, found none in {name!r}. Run: turnwise deploy --pool {name}"
        )

    def make(shard: Shard) -> None:
        with get_client(sync_client=True) as client:
            run = client.create_flow_run_from_deployment(
                found[0].id, parameters={"home": str(home), "job": asdict(shard)}, name=shard.title
            )
            while not (run.state and run.state.is_final()):
                if stopping.is_set():
                    client.set_flow_run_state(run.id, Cancelling(message="The run that wanted it was stopped."))
                    return
                time.sleep(WAIT_S)
                run = client.read_flow_run(run.id)
        if not run.state.is_completed():
            raise TurnwiseError(f"{shard.title} ended as {run.state.name}: {run.state.message}")

    yield make


def told(answer: Mapping[str, str]) -> None:
    """Raise what a shard's process answered, if it was an error."""
    if answer:
        raise error_of(answer)


def _lost(shard: Shard, worker: Leashed) -> TurnwiseError:
    return TurnwiseError(
        f"{shard.title}: its process {worker.how()}. The same command goes on with the shards that are finished"
    )


def _environments(run: Any) -> list[Mapping[str, str]]:
    """Variables of each process: its share of the cores, and a GPU of its own where the engine is inside it."""
    n = run.run.shards
    threads = str(max(1, (os.cpu_count() or 1) // n))
    plain = {"OMP_NUM_THREADS": threads, **os.environ, "TOKENIZERS_PARALLELISM": "false"}
    if run.model.engine not in ("hf", "vllm"):
        return [plain] * n
    import torch

    if not torch.cuda.is_available():
        return [plain] * n
    if n > (cards := torch.cuda.device_count()):
        raise UsageError(f"run.shards: wanted at most one for each of the {cards} GPUs, found {n}; lower it")
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(cards)))
    return [{**plain, "CUDA_VISIBLE_DEVICES": name} for name in names.split(",")[:n]]
