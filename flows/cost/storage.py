"""What a run needs: on disk after all iterations, with and without `turnwise gc`, and in the machine's memory.

Weights are exact: an adapter has 4 bytes a parameter with any base type, and self_ac's moments 8. Rows are counted
before compression: 4 bytes an id, 8 a log-prob, 4 a token of text. The replay and the runs' Parquet files each hold
them once. [ours]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flows.cost.lengths import Lengths
from flows.cost.shapes import GIB
from flows.cost.work import Work
from flows.keep.garbage import KEEP
from flows.pipeline import stages_of
from flows.registry import METHODS

ID, LOG_PROB, TEXT = 4, 8, 4  # bytes of a token: as an id, as a log-prob, as text
PYTHON = 44  # bytes of an id while its episode is played: a number of Python's, and its places in two lists
CANDIDATE = 250  # bytes of a transition that can be drawn


def weights_bytes(run: Any, lora: int, stage: str) -> int:
    """Of the weights that one run of the stage leaves, the value head aside. lora: parameters of an adapter."""
    if stage == "self_ac":
        return 4 * lora * (2 if run.self_ac.separate else 1) * 3  # adapters, and two moments of each
    return 4 * lora * {"critic": 2, "q_critic": 2, "distill": 2, "rft": 1, "grpo": 1, "sdpo": 2}.get(stage, 0)


def disk(run: Any, lora: int, works: Sequence[Work], lengths: Lengths) -> dict[str, float]:
    """GiB after all iterations. after gc: of the weights, the most that it leaves."""
    stages = METHODS[run.method]
    an_iteration = sum(weights_bytes(run, lora, stage) for stage in stages)
    every = sum(weights_bytes(run, lora, stage) for i in range(run.iterations) for stage in stages_of(i, run))
    # The newest iterations, the policy that the first of them read, and the iteration whose adapter was chosen.
    kept = (KEEP + 1) * an_iteration + weights_bytes(run, lora, stages[-1])
    rows = sum(rows_bytes(work, lengths) for work in works)
    return {"weights": every / GIB, "weights after gc": min(every, kept) / GIB, "rows": 2 * rows / GIB}


def rows_bytes(work: Work, lengths: Lengths) -> float:
    """Of the rows that one execution of a stage writes; what targets, refine and pick write, by what they asked."""
    if work.stage in ("collect", "evaluate"):
        said = lengths.action + lengths.thought
        told = lengths.system + lengths.first + lengths.turns * (2 * said + 2 * lengths.observation)
        return ids_bytes(work, lengths) + work.episodes * TEXT * told
    if work.stage in (
        "targets",
        "refine",
        "pick",
    ):  # a student's and a teacher's prompt, as ids and as text, and the reply
        rows = sum(p.n for p in work.prompts) / max(len(work.prompts), 1) / 4
        length = sum(p.n * (p.read + p.written) for p in work.prompts) / max(sum(p.n for p in work.prompts), 1)
        return rows * 2 * length * (ID + TEXT)
    return 0.0


def ids_bytes(work: Work, lengths: Lengths) -> float:
    """Of the ids and log-probs of the episodes that one execution plays."""
    said = lengths.action + lengths.thought
    return work.episodes * lengths.turns * ((lengths.state(lengths.middle) + said) * ID + said * LOG_PROB)


def host(run: Any, weights: float, works: Sequence[Work], lengths: Lengths) -> dict[str, float]:
    """GiB of the machine's memory at most. weights: bytes of the base, which stay there between the stages."""
    length = lengths.state(lengths.middle) + lengths.action + lengths.thought
    episodes = max((work.episodes for work in works if work.stage == "collect"), default=0.0)
    trained = max((sum(r.n * r.length for r in work.trained) for work in works), default=0.0)
    pool = min(sum(work.episodes for work in works if work.stage == "collect") * lengths.turns, pool_size(run))
    found: Mapping[str, float] = {
        "base weights": weights,
        **({"engine asleep": weights} if run.model.engine == "vllm" else {}),
        "episodes": episodes * lengths.turns * length * PYTHON,
        "drawn from": pool * CANDIDATE,
        "training rows": trained * ID,
    }
    return {name: size / GIB for name, size in found.items()}


def pool_size(run: Any) -> float:
    """Transitions that a stage draws from at most; RFT from all of a run."""
    drawing = [getattr(run, stage) for stage in METHODS[run.method]]
    sizes = [config.replay_size for config in drawing if hasattr(config, "replay_size")]
    return 1e12 if run.method == "rft" else float(max(sizes, default=0))
