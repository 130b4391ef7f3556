"""Work and hours of a run on a device, before anything runs.

A model of cost, not a measurement (python -m benchmarks.checks.plan_check has both side by side). Work in FLOP, w = weights
that a token is multiplied with:

    token read or generated      2 w + 4 Q layers x context                     Q: width of all query heads
    token trained on             2 w forward, 2 w backward (the base is frozen), 2 w more with gradient checkpointing;
        the adapter also has
                                 its own gradients; attention 2 products forward, 5 backward

Hours: work / (peak x a measured or assumed share of it, flows/cost/rates.py). Decoding is no faster than memory can
deliver weights and KV cache, and no pass is faster than its launches. `train.processes` devices train; with the layers
dealt out no pass is faster than its weights come over the links. An engine in this process shares the first of them;
servers (engine = openai) have their own devices. [ours]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flows.cost.lengths import Lengths, assumed, given_rates
from flows.cost.machine import Machine
from flows.cost.memory import engine_memory, training_memory, verdicts
from flows.cost.rates import WHEN, changed, rates_of, weakest
from flows.cost.shapes import GIB, KNOWN, device_of, shape_of
from flows.cost.storage import disk, host
from flows.cost.work import Prompts, Rows, Work
from flows.cost.workload import workload
from flows.datasets import missing_rows
from stages.frame.types import UsageError

MOST_DEVICES = 100_000
MEASURED_ROWS = 48  # of a pass whose launches were timed; more are not known to take longer


@dataclass(frozen=True)
class Cost:
    """Of executions of one stage, summed."""

    stage: str
    runs: int
    episodes: float
    prompts: float
    read: float
    cached: float  # of those read: that the engine still had
    generated: float
    trained: float
    predicted: float
    steps: int
    pflop: float
    hours: float
    waiting_hours: float  # of it: for whoever answers inside the environment
    at_once: float  # requests decoded together; 0 = none
    rests_on: tuple[str, ...]  # the rates of rates.py that the hours rest on
    link_gb: float  # that each device that trains takes from the others
    known: str  # the weakest of them: measured, measured on another card, or assumed


def train_flops(m: Machine, rows: Rows, *, autocast: bool, backward: bool = True) -> tuple[float, float]:
    """(FLOP in the model's dtype, FLOP in fp32): an adapter over 16-bit weights is kept, and without autocast
    multiplied, in fp32.
    """
    again = 1 if m.run.model.gradient_checkpointing and backward else 0
    tokens = rows.n * rows.fresh
    pairs = tokens * (rows.length - rows.fresh + (rows.fresh + 1) / 2)
    passes = 1 + again + (1 if backward else 0)
    # The chunked projection is worked out again, whether the layers are or not.
    body, head = (
        2.0 * tokens * m.shape.body * passes,
        2.0 * rows.n * rows.predicted * m.shape.head * (3 if backward else 1),
    )
    lora = 2.0 * tokens * m.lora * (1 + again + (2 if backward else 0))
    attention = m.shape.attention_flops(pairs, 2 * (1 + again) + (5 if backward else 0))
    fp32 = 0.0 if autocast or m.itemsize == 4 else lora
    return body + head + attention + (lora - fp32), fp32


def train_share(stage: str) -> str:
    """The rate of a stage's training: Self-AC trains on rows of episodes, the others on trees."""
    return "train_rows" if stage == "self_ac" else "train_trees"


def train_seconds(m: Machine, flops: tuple[float, float], share: str = "train_trees") -> float:
    """Of the arithmetic alone."""
    return (flops[0] / m.device.peak(m.run.model.dtype) + flops[1] / m.device.peak("float32")) / m.rate(share)


def launch_seconds(m: Machine, work: Work) -> float:
    """What the training passes of a stage take at least, however small the model: a layer's launches, and each row's."""
    rows = min(work.branches, work.passes * MEASURED_ROWS)
    return m.shape.layers * (work.passes * m.rate("pass") + rows * m.rate("branch"))


def link_bytes(m: Machine, work: Work) -> float:
    """What a training device takes from the others: the sum of each step's gradients; with the layers dealt out their
    weights, once forward and once backward for each of its passes.
    """
    if m.trainers == 1 or not work.trained:
        return 0.0
    share, passes = 1 - 1 / m.trainers, work.passes / m.trainers
    weights = 2 * passes * m.shape.body * m.itemsize if m.sharded else 0.0
    return share * (weights + 2 * work.steps * m.lora * 4.0)


def overlapped(m: Machine, costs: Sequence[Cost]) -> float:
    """Hours in which the next episodes are played while this iteration trains (`collect.lag`), and nothing generates."""
    if not m.run.lag or m.run.model.engine != "openai":
        return 0.0
    played = sum(one.hours * (one.runs - 1) / one.runs for one in costs if one.stage == "collect")
    trained = sum(one.hours for one in costs if one.stage != "evaluate" and one.steps and not one.prompts)
    return min(played, trained)


def read_flops(m: Machine, p: Prompts) -> float:
    new = p.read - (p.shared if m.caches_prefixes else 0.0)
    return p.n * (2.0 * new * (m.shape.body + m.lora) + m.shape.attention_flops(new * (p.read + p.read - new) / 2, 2))


def decode_flops(m: Machine, p: Prompts) -> float:
    context = p.read + p.written / 2
    return p.n * p.written * (2.0 * (m.shape.body + m.shape.head + m.lora) + m.shape.attention_flops(context, 2))


def side_by_side(m: Machine, p: Prompts) -> float:
    """Requests decoded together: as many as the engine takes, as episodes are under way, and as its KV cache holds.

    What requests share with others under way stands in the cache once: the batch is bounded by distinct tokens.
    """
    room = engine_memory(m)["KV cache"] * m.servers * GIB / m.kv_bytes
    held = (room - p.beside) / max(p.read - p.beside + p.written, 1.0) if m.caches_prefixes else room / p.length
    return float(max(1.0, min(m.requests, p.together, held, max(1.0, p.n))))


def generate_seconds(m: Machine, p: Prompts) -> float:
    """Prompts of one stage come together, so the batch is full until the last ones. A decoding step reads each
    copy of the weights once for all its requests, and each request's own context, what it shares included.
    """
    peak, bandwidth = m.device.peak(m.run.model.dtype) * m.servers, 1e12 * m.device.bandwidth * m.servers
    read, batch = m.rate("read"), side_by_side(m, p)
    bytes_a_step = m.weights * m.copies + batch * (p.read + p.written / 2) * m.kv_bytes
    step = max(bytes_a_step / (bandwidth * m.rate("decode")), m.shape.layers * m.rate("step"))
    return read_flops(m, p) / (peak * read) + max(decode_flops(m, p) / (peak * read), p.n * p.written / batch * step)


def answer_seconds(m: Machine, work: Work, told: float) -> float:
    """The run's own engine answers environments one by one; a server answers all that wait at once. An unknown model
    counts as the run's; what it reads is left out. The seconds are added to the hours, although a streaming engine goes
    on meanwhile.
    """
    task = m.run.task
    shape, side_by_side = (
        KNOWN.get(task.oracle_model, m.shape),
        task.oracle_concurrency if task.oracle == "openai" else 1,
    )
    return (
        work.asked
        / side_by_side
        * told
        * shape.parameters
        * m.itemsize
        / (1e12 * m.device.bandwidth * m.rates["decode"].value)
    )


def rates_behind(m: Machine, stage: str, works: Sequence[Work]) -> tuple[str, ...]:
    """Names of the rates that a stage's hours rest on."""
    found = []
    if any(work.prompts for work in works):
        found += ["read", "decode", "step"]
        found += ["requests"] if m.caches_prefixes else []
    if any(work.asked for work in works) and "decode" not in found:
        found.append("decode")
    if any(work.trained or work.forward for work in works):
        found += [train_share(stage), "pass", "branch", *(["link"] if m.trainers > 1 else [])]
    return tuple(name for name in map(m.named, found) if m.rates[name].value)


def cost(m: Machine, stage: str, works: Sequence[Work], lengths: Lengths, device: str) -> Cost:
    """The executions of one stage together."""
    autocast, share = getattr(getattr(m.run, stage), "autocast", False), train_share(stage)
    seconds = flops = waiting = sent_gb = 0.0
    for work in works:
        steps = [train_flops(m, rows, autocast=autocast) for rows in work.trained]
        forward = [train_flops(m, rows, autocast=autocast, backward=False) for rows in work.forward]
        waiting += answer_seconds(m, work, lengths.told)
        arithmetic = sum(train_seconds(m, one, share) for one in steps) / m.trainers
        sent = link_bytes(m, work)
        seconds += max(arithmetic, launch_seconds(m, work) / m.trainers, sent / (1e9 * m.rate("link")))
        seconds += sum(train_seconds(m, one, share) for one in forward) / m.trainers
        seconds += sum(generate_seconds(m, p) for p in work.prompts)
        sent_gb += sent / 1e9
        flops += sum(map(sum, steps + forward)) + sum(read_flops(m, p) + decode_flops(m, p) for p in work.prompts)
    prompts = [p for work in works for p in work.prompts]
    rests_on = rates_behind(m, stage, works)
    return Cost(
        stage, len(works), sum(w.episodes for w in works), sum(p.n for p in prompts), sum(w.read for w in works),
        sum(w.cached for w in works) if m.caches_prefixes else 0.0,
        sum(w.generated for w in works), sum(w.trained_tokens for w in works), sum(w.predicted for w in works), sum(w.steps for w in works),
        flops / 1e15, (seconds + waiting) / 3600, waiting / 3600,
        max((side_by_side(m, p) for p in prompts), default=0.0), rests_on, sent_gb, weakest((m.rates[name] for name in rests_on), device),
    )  # fmt: skip


def estimate(run: Any, device: str, n: int, changes: Sequence[str] = ()) -> dict[str, Any]:
    """All that `turnwise plan` prints, as plain values. Raises UsageError for a model, device or assumption that is not
    known.
    """
    if not 1 <= n <= MOST_DEVICES:
        raise UsageError(f"--devices {n}: wanted at least 1, and at most {MOST_DEVICES}.")
    given, others = given_rates(changes)
    lengths, card = assumed(run, others), device_of(device)
    rates = changed(rates_of(device, card.memory), given)
    m = Machine(run, shape_of(run.model.path), card, n, rates, lengths.cache_bytes)
    by_stage: dict[str, list[Work]] = {}
    for work in workload(run, lengths):
        by_stage.setdefault(work.stage, []).append(work)
    costs = [cost(m, stage, works, lengths, device) for stage, works in by_stage.items()]
    memory = {stage: training_memory(m, works[-1]) for stage, works in by_stage.items() if works[-1].trained}
    memory["engine"] = engine_memory(m)
    works = [work for each in by_stage.values() for work in each]
    used = {"context", "spare"}.union(*(one.rests_on for one in costs))
    return {
        "preset": run.preset, "model": run.model.path, "parameters": m.shape.parameters, "adapter": m.lora, "dtype": run.model.dtype,
        "method": run.method, "engine": run.model.engine, "iterations": run.iterations, "device": device, "devices": n,
        "trainers": m.trainers, "overlapped_hours": overlapped(m, costs), "assumed": asdict(lengths),
        "stages": [asdict(one) for one in costs], "memory_gib": memory,
        "host_gib": host(run, m.weights, works, lengths), "disk_gib": disk(run, m.lora, works, lengths), "verdict": [*verdicts(m, memory), *missing_rows(run)],
        "rates": {name: asdict(rate) | {"known": rate.kind(device), "when": WHEN.get(rate.on, "")} for name, rate in rates.items() if name in used},
    }  # fmt: skip
