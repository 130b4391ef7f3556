"""RFT, a baseline: supervised learning on the agent's own winning episodes, again and again.

    L = E_{episodes with reward 1} [ -log pi_theta(a | s) ]

Source: rejection-sampling fine-tuning, as the baseline of arXiv 2512.04601. Wins of all iterations are kept. [ours]

`labels = "told"` is the control for a critic that speaks: the same information without a critic. A parser reads what
the environment said of an episode. It inserts a right action that is named and leaves out a blamed turn. It prefers the
episodes with the fewest wrong turns, if these are counted. [ours]

    turnwise run desk+rft
    turnwise run desk+rft_relabel
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar, Literal

from pydantic import Field

from stages import envs
from stages.frame.contract import Context, Outputs, Stage
from stages.frame.types import UsageError
from stages.learn.adapter import save_adapter
from stages.llm.tokens import ChatTokenizer
from stages.play.transitions import Candidate, candidates, ids_of, observations
from stages.train.history import fit_metrics
from stages.train.model import PassConfig, deal_out, trainable_policy
from stages.train.network import batches_of, trained
from stages.train.passes import Pass, mixed_nll
from stages.train.rows import TrainRow


class RftConfig(PassConfig):
    """How the wins are learned."""

    ADDED: ClassVar[Mapping[str, Any]] = {"newest": 0}

    epochs: int = Field(2, ge=1, description="Passes over the rows. [ours]")
    batch: int = Field(32, ge=1, description="Turns a step. [ours]")
    rows: int = Field(512, ge=1, description="Most turns an iteration, drawn from all wins so far. [ours]")
    refill: bool = False
    """If there are fewer turns than `rows`, draw some again. Every iteration then takes as many steps. [ours]"""
    newest: int = Field(
        0, ge=0, description="Draw from the episodes of this many newest iterations; 0 = of all. [ours]"
    )
    labels: Literal["wins", "told"] = "wins"
    """What is learned: the turns of won episodes, or what the environment's parser makes of all episodes (its `lessons`). [ours]"""


def run(context: Context) -> Outputs:
    """Artifact `adapter`; without a single win so far it is the adapter that came in."""
    config: RftConfig = context.config
    rng = random.Random(context.seed)
    lived = [t for t in candidates(context.replay, context.inputs["collect"][-config.newest :]) if not t.malformed]
    won = [t for t in lived if t.total_reward >= 1]
    if config.labels == "wins":
        drawn = draw(won, config.rows, rng, refill=config.refill)
        rows = [TrainRow(*ids, key=t.key) for t, ids in zip(drawn, ids_of(context.replay, drawn), strict=True)]
        counts: dict[str, float] = {}
    else:
        rows, counts = told_rows(context, lived, rng)
    counts["rft/wins"] = float(len(won))
    model = trainable_policy(context)
    deal_out(context, model)
    bar = context.progress("train on wins", config.epochs * -(-len(rows) // config.batch))

    def loss(model: Any, step: Pass) -> Any:
        return mixed_nll(model, step, autocast=config.autocast)[:2]

    batches = batches_of(context, model, {"policy": (rows, config.batch)}, main="policy", rng=rng)
    history = trained(context, model, batches, loss, lambda done: bar.advance(1))
    save_adapter(model, context.workdir / "adapter", context.engine.model_hash)
    return Outputs(fit_metrics("rft", history) | counts, {}, {"adapter": context.workdir / "adapter"})


def draw(pool: Sequence[Candidate], n: int, rng: random.Random, *, refill: bool) -> list[Candidate]:
    """n turns of the pool without repeats, at most all; with `refill`, n turns that repeat as evenly as possible."""
    drawn: list[Candidate] = []
    while pool and len(drawn) < n:
        drawn += rng.sample(pool, min(n - len(drawn), len(pool)))
        if not refill:
            break
    return drawn


def told_rows(
    context: Context, lived: Sequence[Candidate], rng: random.Random
) -> tuple[list[TrainRow], dict[str, float]]:
    """Rows that a parser makes of the words, episodes with few wrong turns first; how many it changed and left out.

    Raises UsageError if the environment's module has no `lessons`.
    """
    task, config = context.run.task, context.config
    if not envs.has(task.env, "lessons"):
        raise UsageError(
            f'rft.labels: "told" wants an environment whose observations correct actions, and {task.env} has no function '
            '`lessons`; use "wins"'
        )
    seen, decode = observations(context.replay, lived), context.engine.decode
    read = dict(zip([t.key for t in lived], ids_of(context.replay, lived), strict=True))
    useful, wrong = dict[tuple[str, int], tuple[str, str]](), dict[str, float]()
    for episode_id, group in groupby(lived, lambda t: t.key[0]):
        turns = list(group)
        texts = [decode(read[t.key][1]) for t in turns]
        said = [(text, seen[t.key]) for t, text in zip(turns, texts, strict=True)]
        told = envs.lessons(task.env, said, won=turns[-1].total_reward >= 1)
        useful |= {t.key: (a, b) for t, a, b in zip(turns, texts, told, strict=True) if b is not None}
        wrong[episode_id] = envs.n_wrong(task.env, seen[turns[-1].key])
    pool = sorted((t for t in lived if t.key in useful), key=lambda t: (wrong[t.key[0]], rng.random()))
    drawn = draw(pool[: config.rows], config.rows, rng, refill=config.refill)
    chats = ChatTokenizer(context.run.model.path)
    rows = [
        TrainRow(read[t.key][0], read[t.key][1] if before == after else chats.reply_ids(after), key=t.key)
        for t in drawn
        for before, after in [useful[t.key]]
    ]
    corrected = sum(before != after for before, after in useful.values())
    return rows, {"rft/corrected": float(corrected), "rft/left_out": float(len(lived) - len(useful))}


STAGE = Stage("rft", 4, RftConfig, inputs=("collect", "rft"), roles=(), run=run, trains=True, outputs=("adapter/",))
