"""Memory that a run needs on its devices, and whether it fits. [ours]"""

from __future__ import annotations

from collections.abc import Mapping

from flows.cost.machine import Machine
from flows.cost.shapes import GIB
from flows.cost.work import Work

COPIES = {
    "critic": 3,
    "q_critic": 3,
    "distill": 5,
    "sdpo": 4,
}  # of the adapter beside the trained one: target network, its next, the step's; of the best epoch both


def engine_memory(m: Machine) -> dict[str, float]:
    """GiB on each device that generates. The KV cache is what is left of the engine's share."""
    total = m.device.memory
    if m.run.model.engine == "openai":
        weights, share = m.weights * m.copies / GIB / m.servers, 0.9
    else:
        weights, share = m.weights / GIB, m.run.model.gpu_memory if m.run.model.engine == "vllm" else 0.5
    adapters = 4.0 * m.lora * m.itemsize / GIB
    return {
        "weights": weights,
        "adapters": adapters,
        "KV cache": max(0.0, total * share - m.rate("context") - weights - adapters),
    }


def training_memory(m: Machine, work: Work) -> dict[str, float]:
    """GiB on the device that trains one stage, at the largest pass that the config allows."""
    rank, stage = m.run.model.lora_rank, getattr(m.run, work.stage)
    adapters = 2 if getattr(stage, "separate", False) else 1
    kept, again = m.shape.activation_bytes(m.itemsize, rank, checkpointing=m.run.model.gradient_checkpointing)
    if stage.autocast:
        kept, again = (x * 0.8 for x in (kept, again))
    # Dealt out: a share of the layers, two whole ones while they are used, and all else. The copies stay whole.
    n, layers = (m.trainers, float(m.shape.body * m.itemsize)) if m.sharded else (1, 0.0)
    weights = m.weights - layers * (1 - 1 / n - 2 / m.shape.layers)
    return {
        "weights": min(weights, m.weights) / GIB,
        "adapter, gradient, Adam": m.lora * 4.0 * (4 * adapters / n + COPIES.get(work.stage, 0)) / GIB,
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
    model, room = m.run.model, (m.device.memory - m.rate("context")) * m.rate("spare")
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
            *(["train.processes=8 and train.shard=layers, which deal out the weights"] if not m.sharded else []),
            "shorter episodes (task.max_turns), or a device with more memory",
        ]
        found.append(
            f"does not fit: {stage} needs {needed + beside:.0f} GiB of the {room:.0f} GiB that are left to it. Change: {'; '.join(todo)}."
        )
    elif needed:
        found.append(
            f"fits: training needs {needed + beside:.0f} GiB at most ({stage}) of {room:.0f} GiB on {'one device' if m.trainers == 1 else 'each device that trains'}."
        )
    found.append(_engine_verdict(m, memory["engine"]))
    if model.engine != "openai" and m.n > m.trainers:
        found.append(
            f"{m.n - m.trainers} of {m.n} devices stand idle: engine {model.engine} generates where it trains. To use them: model.engine=openai."
        )
    if m.n < m.trainers:
        found.append(
            f"does not fit: train.processes={m.trainers} wants as many devices. Give their number by --devices."
        )
    elif model.engine == "openai" and m.n == m.trainers:
        found.append(
            f"does not fit: with model.engine=openai {m.trainers} of the devices train and others serve. Give the number of all by --devices."
        )
    return found


def _engine_verdict(m: Machine, memory: Mapping[str, float]) -> str:
    longest = min(m.shape.positions, m.run.roles.max_action_tokens + m.run.roles.max_thought_tokens + 8192)
    fitting = memory["KV cache"] * GIB / (m.kv_bytes * longest) * m.servers
    where = f"{m.servers} serving devices" if m.run.model.engine == "openai" else "the same device"
    if fitting < 1:
        more = (
            "more serving devices (--devices)"
            if m.run.model.engine == "openai"
            else "model.engine=openai with servers on other devices"
        )
        return f"does not fit: the engine's {memory['weights']:.0f} GiB of weights leave no room for one conversation on {where}. Change: {more}."
    return f"fits: the engine holds {memory['weights']:.0f} GiB of weights and {fitting:.0f} separate conversations of {longest} tokens on {where}."
