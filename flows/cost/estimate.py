"""Work, memory and hours of a run on a device, before anything runs, and whether it fits.

A model of cost, not a measurement (python -m benchmarks.checks.plan_check has both side by side). Work in FLOP, w = weights
that a token is multiplied with:

    token read or generated      2 w + 4 Q layers x context                     Q: width of all query heads
    token trained on             2 w forward, 2 w backward (the base is frozen), 2 w more with gradient checkpointing;
        the adapter also has
                                 its own gradients; attention 2 products forward, 5 backward

Hours: work / (peak x assumed share of it). Decoding is no faster than memory can deliver weights and KV cache. One
device trains. An engine in this process shares it; servers (engine = openai) have their own devices. [ours]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flows.cost.lengths import Lengths, assumed
from flows.cost.shapes import GIB, KNOWN, Device, Shape, device_of, shape_of
from flows.cost.storage import disk, host
from flows.cost.work import Prompts, Rows, Work
from flows.cost.workload import workload
from flows.datasets import missing_rows
from stages.frame.types import UsageError

# Shares of the peak that are assumed: of arithmetic in training and in reading prompts, of bandwidth in decoding.
TRAIN, READ, DECODE = 0.35, 0.45, 0.6
HF_READ, HF_DECODE = 0.25, 0.2  # transformers: one padded batch after the other, adapters beside the weights
CONTEXT_GIB = 2.0  # what a CUDA process takes for itself
MOST_DEVICES = 100_000
SPARE = 0.9  # of the rest: the allocator's pieces never fit together wholly
COPIES = {
    "critic": 3,
    "q_critic": 3,
    "distill": 5,
}  # of the adapter beside the trained one: target network, its next, the step's; of the best epoch both


@dataclass(frozen=True)
class Machine:
    """What the work is done on: the shape of the model, its config, a device and how many of them."""

    run: Any
    shape: Shape
    device: Device
    n: int

    @property
    def itemsize(self) -> int:
        return 2 if self.run.model.dtype == "bfloat16" else 4

    @property
    def lora(self) -> int:
        return self.shape.lora(self.run.model.lora_rank)

    @property
    def weights(self) -> float:
        return float(self.shape.parameters * self.itemsize)

    @property
    def caches_prefixes(self) -> bool:
        return bool(self.run.model.engine != "hf")

    @property
    def servers(self) -> int:
        """Devices that generate: those that do not train, or the same one."""
        return max(1, self.n - 1) if self.run.model.engine == "openai" else 1


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


def train_seconds(m: Machine, flops: tuple[float, float]) -> float:
    return (flops[0] / m.device.peak(m.run.model.dtype) + flops[1] / m.device.peak("float32")) / TRAIN


def read_flops(m: Machine, p: Prompts) -> float:
    new = p.read - (p.shared if m.caches_prefixes else 0.0)
    return p.n * (2.0 * new * (m.shape.body + m.lora) + m.shape.attention_flops(new * (p.read + p.read - new) / 2, 2))


def decode_flops(m: Machine, p: Prompts) -> float:
    context = p.read + p.written / 2
    return p.n * p.written * (2.0 * (m.shape.body + m.shape.head + m.lora) + m.shape.attention_flops(context, 2))


def side_by_side(m: Machine, context: float) -> float:
    """Requests decoded together: as the engine is told, or as many as its KV cache holds."""
    room = engine_memory(m)["KV cache"] * GIB / (m.shape.kv_bytes(m.itemsize) * max(context, 1.0))
    most = m.run.model.gen_batch if m.run.model.engine == "hf" else m.run.collect.slots
    return float(max(1.0, min(most, room)))


def generate_seconds(m: Machine, p: Prompts) -> float:
    """Prompts of one stage come together, so the batch is full until the last ones."""
    read, decode = (HF_READ, HF_DECODE) if m.run.model.engine == "hf" else (READ, DECODE)
    peak, context = m.device.peak(m.run.model.dtype) * m.servers, p.read + p.written
    batch = min(side_by_side(m, context), max(1.0, p.n))
    bytes_a_step = m.weights + batch * context * m.shape.kv_bytes(m.itemsize)
    from_memory = p.n * p.written / batch * bytes_a_step / (1e12 * m.device.bandwidth * m.servers * decode)
    return read_flops(m, p) / (peak * read) + max(decode_flops(m, p) / (peak * read), from_memory)


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
    return work.asked / side_by_side * told * shape.parameters * m.itemsize / (1e12 * m.device.bandwidth * DECODE)


def cost(m: Machine, stage: str, works: Sequence[Work], lengths: Lengths) -> Cost:
    """The executions of one stage together."""
    autocast = getattr(getattr(m.run, stage), "autocast", False)
    seconds = flops = waiting = 0.0
    for work in works:
        passes = [train_flops(m, rows, autocast=autocast) for rows in work.trained]
        passes += [train_flops(m, rows, autocast=autocast, backward=False) for rows in work.forward]
        waiting += answer_seconds(m, work, lengths.told)
        seconds += sum(train_seconds(m, one) for one in passes) + sum(generate_seconds(m, p) for p in work.prompts)
        flops += sum(map(sum, passes)) + sum(read_flops(m, p) + decode_flops(m, p) for p in work.prompts)
    return Cost(
        stage, len(works), sum(w.episodes for w in works), sum(p.n for w in works for p in w.prompts), sum(w.read for w in works),
        sum(w.cached for w in works) if m.caches_prefixes else 0.0,
        sum(w.generated for w in works), sum(w.trained_tokens for w in works), sum(w.predicted for w in works), sum(w.steps for w in works),
        flops / 1e15, (seconds + waiting) / 3600, waiting / 3600,
    )  # fmt: skip


def engine_memory(m: Machine) -> dict[str, float]:
    """GiB on each device that generates. The KV cache is what is left of the engine's share."""
    total = m.device.memory
    if m.run.model.engine == "openai":
        weights, share = m.weights / GIB / m.servers, 0.9
    else:
        weights, share = m.weights / GIB, m.run.model.gpu_memory if m.run.model.engine == "vllm" else 0.5
    adapters = 4.0 * m.lora * m.itemsize / GIB
    return {
        "weights": weights,
        "adapters": adapters,
        "KV cache": max(0.0, total * share - CONTEXT_GIB - weights - adapters),
    }


def training_memory(m: Machine, work: Work) -> dict[str, float]:
    """GiB on the device that trains one stage, at the largest pass that the config allows."""
    rank, stage = m.run.model.lora_rank, getattr(m.run, work.stage)
    adapters = 2 if getattr(stage, "separate", False) else 1
    kept, again = m.shape.activation_bytes(m.itemsize, rank, checkpointing=m.run.model.gradient_checkpointing)
    if stage.autocast:
        kept, again = (x * 0.8 for x in (kept, again))
    return {
        "weights": m.weights / GIB,
        "adapter, gradient, Adam": m.lora * 4.0 * (4 * adapters + COPIES.get(work.stage, 0)) / GIB,
        "activations": (kept + again) * tokens_of_a_pass(m, work) / GIB,
        "logits": m.shape.logits_bytes(m.itemsize) / GIB,
    }


def tokens_of_a_pass(m: Machine, work: Work) -> float:
    """Tokens of the longest pass: a packed row, the limit of `pass_tokens`, or a whole step. At least the longest row,
    assumed to be twice the mean.
    """
    stage, longest = getattr(m.run, work.stage), max((2 * r.length for r in work.trained), default=0.0)
    longest = min(longest, m.shape.positions)
    if budget := getattr(stage, "row_tokens" if work.stage == "self_ac" else "pass_tokens"):
        return float(max(budget, longest))
    return max(longest, work.trained_tokens / max(work.steps, 1))


def verdicts(m: Machine, memory: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Fits or does not fit, and what to change."""
    model, room = m.run.model, (m.device.memory - CONTEXT_GIB) * SPARE
    beside = m.weights / GIB if model.engine == "hf" else 0.0
    stage, needed = max(
        ((name, sum(parts.values())) for name, parts in memory.items() if name != "engine"),
        key=lambda one: one[1],
        default=("", 0),
    )
    found = []
    if needed + beside > room:
        todo = [
            *(["model.gradient_checkpointing=true"] if not model.gradient_checkpointing else []),
            *(["model.dtype=bfloat16"] if model.dtype != "bfloat16" else []),
            f"a smaller {stage}.{'row_tokens' if stage == 'self_ac' else 'pass_tokens'}",
            *(["model.engine=vllm, which gives its memory back"] if beside else []),
            "shorter episodes (task.max_turns), or a device with more memory: training is on one device",
        ]
        found.append(
            f"does not fit: {stage} needs {needed + beside:.0f} GiB of the {room:.0f} GiB that are left to it. Change: {'; '.join(todo)}."
        )
    elif needed:
        found.append(
            f"fits: training needs {needed + beside:.0f} GiB at most ({stage}) of {room:.0f} GiB on one device."
        )
    found.append(_engine_verdict(m, memory["engine"]))
    if model.engine != "openai" and m.n > 1:
        found.append(
            f"{m.n - 1} of {m.n} devices stand idle: engine {model.engine} generates where it trains. To use them: model.engine=openai."
        )
    if model.engine == "openai" and m.n == 1:
        found.append(
            "does not fit: with model.engine=openai one device trains and others serve. Give their number by --devices."
        )
    return found


def _engine_verdict(m: Machine, memory: Mapping[str, float]) -> str:
    longest = min(m.shape.positions, m.run.roles.max_action_tokens + m.run.roles.max_thought_tokens + 8192)
    fitting = memory["KV cache"] * GIB / (m.shape.kv_bytes(m.itemsize) * longest) * m.servers
    where = f"{m.servers} serving devices" if m.run.model.engine == "openai" else "the same device"
    if fitting < 1:
        more = (
            "more serving devices (--devices)"
            if m.run.model.engine == "openai"
            else "model.engine=openai with servers on other devices"
        )
        return f"does not fit: the engine's {memory['weights']:.0f} GiB of weights leave no room for one conversation on {where}. Change: {more}."
    return f"fits: the engine holds {memory['weights']:.0f} GiB of weights and {fitting:.0f} conversations of {longest} tokens on {where}."


def estimate(run: Any, device: str, n: int, changes: Sequence[str] = ()) -> dict[str, Any]:
    """All that `turnwise plan` prints, as plain values. Raises UsageError for a model, device or assumption that is not
    known.
    """
    if not 1 <= n <= MOST_DEVICES:
        raise UsageError(f"--devices {n}: wanted at least 1, and at most {MOST_DEVICES}.")
    m = Machine(run, shape_of(run.model.path), device_of(device), n)
    lengths = assumed(run, changes)
    by_stage: dict[str, list[Work]] = {}
    for work in workload(run, lengths):
        by_stage.setdefault(work.stage, []).append(work)
    costs = [cost(m, stage, works, lengths) for stage, works in by_stage.items()]
    memory = {stage: training_memory(m, works[-1]) for stage, works in by_stage.items() if works[-1].trained}
    memory["engine"] = engine_memory(m)
    works = [work for each in by_stage.values() for work in each]
    return {
        "preset": run.preset, "model": run.model.path, "parameters": m.shape.parameters, "adapter": m.lora, "dtype": run.model.dtype,
        "method": run.method, "engine": run.model.engine, "iterations": run.iterations, "device": device, "devices": n, "assumed": asdict(lengths),
        "stages": [asdict(one) for one in costs], "memory_gib": memory,
        "host_gib": host(run, m.weights, works, lengths), "disk_gib": disk(run, m.lora, works, lengths), "verdict": [*verdicts(m, memory), *missing_rows(run)],
    }  # fmt: skip
