"""RFT, a baseline: supervised learning on the agent's own winning episodes, again and again.

    L = E_{episodes with reward 1} [ -log pi_theta(a | s) ]

Source: rejection-sampling fine-tuning, as the baseline of arXiv 2512.04601. Winning episodes of all iterations are
kept. [ours]

`labels = "told"` is the information-matched control of a critic that speaks: every turn of every episode is learned,
and where the episode's last observation names another action, a parser puts that one in its place. It is told what
NLAC is told, and has no critic. [ours]

    turnwise run demo_rft
    turnwise run demo_relabel
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from stages.frame.contract import Context, Outputs, Stage
from stages.frame.types import UsageError
from stages.learn.adapter import save_adapter
from stages.learn.fit import adamw, fit
from stages.learn.tree_attention import tree_attention
from stages.llm.tokens import ChatTokenizer
from stages.play.transitions import Candidate, candidates, ids_of, last_observations
from stages.train.history import fit_metrics, of_step
from stages.train.model import PassConfig, trainable_policy
from stages.train.passes import Pass, mixed_batches, mixed_nll
from stages.train.rows import TrainRow, reply_ids


class RftConfig(PassConfig):
    """How the wins are learned."""

    epochs: int = Field(2, ge=1, description="Passes over the rows. [ours]")
    batch: int = Field(32, ge=1, description="Turns a step. [ours]")
    rows: int = Field(512, ge=1, description="Most turns an iteration, drawn from all wins so far. [ours]")
    refill: bool = Field(
        False,
        description="Where there are fewer turns than `rows`, draw them again, so that every iteration takes as many steps. [ours]",
    )
    labels: Literal["wins", "told"] = Field(
        "wins",
        description="Turns of episodes that won; or all turns, those that the last observation corrects as it says. [ours]",
    )


def run(context: Context) -> Outputs:
    """Artifact `adapter`; without a single win so far it is the adapter that came in."""
    config: RftConfig = context.config
    rng = random.Random(context.seed)
    lived = [t for t in candidates(context.replay, context.inputs["collect"]) if not t.malformed]
    won = [t for t in lived if t.total_reward >= 1]
    pool = won if config.labels == "wins" else lived
    drawn = draw(pool, config.rows, rng, refill=config.refill)
    read = ids_of(context.replay, drawn)
    actions = [ids for _, ids in read]
    labels = actions if config.labels == "wins" else told_ids(context, drawn, actions)
    rows = [TrainRow(prompt, label, key=t.key) for t, (prompt, _), label in zip(drawn, read, labels, strict=True)]
    model = trainable_policy(context)
    bar = context.progress("train on wins", config.epochs * -(-len(rows) // config.batch))

    def loss(model: Any, step: Pass) -> Any:
        return mixed_nll(model, step, autocast=config.autocast)[:2]

    batches = mixed_batches(
        {"policy": (rows, config.batch)}, main="policy", epochs=config.epochs, rng=rng, device=model.device,
        pass_tokens=config.pass_tokens,
    )  # fmt: skip
    optimiser = adamw(model, lr=config.rate(context.iteration))
    with tree_attention(model):
        history = fit(
            model, batches, loss, optimiser, clip=config.clip, after_step=lambda done: bar.advance(1), merge=of_step
        )
    save_adapter(model, context.workdir / "adapter", context.engine.model_hash)
    counts = {"rft/wins": float(len(won))}
    if config.labels == "told":
        counts["rft/corrected"] = float(
            sum(tuple(ids) != tuple(label) for ids, label in zip(actions, labels, strict=True))
        )
    return Outputs(fit_metrics("rft", history) | counts, {}, {"adapter": context.workdir / "adapter"})


def draw(pool: Sequence[Candidate], n: int, rng: random.Random, *, refill: bool) -> list[Candidate]:
    """n turns of the pool, none twice; with `refill` none comes a time more than another until all have, else at most
    the pool.
    """
    drawn: list[Candidate] = []
    while pool and len(drawn) < n:
        drawn += rng.sample(pool, min(n - len(drawn), len(pool)))
        if not refill:
            break
    return drawn


def told_ids(context: Context, drawn: Sequence[Candidate], actions: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The tokens of each drawn action; where the last observation of its episode says that another was wanted, of that.

    Raises UsageError where the environment's module has no `told`.
    """
    task = context.run.task
    told: Any = getattr(importlib.import_module(f"stages.envs.{task.env}"), "told", None)
    if told is None:
        raise UsageError(
            f'rft.labels: "told" wants an environment whose last observation corrects actions, and {task.env} has no function '
            '`told`; use "wins"'
        )
    last = last_observations(context.replay, drawn)
    chats, decode = ChatTokenizer(context.run.model.path), context.engine.decode
    texts = [
        (text, told(text, last[t.episode_id])) for t, ids in zip(drawn, actions, strict=True) for text in [decode(ids)]
    ]
    return [
        ids if before == after else reply_ids(chats, after) for ids, (before, after) in zip(actions, texts, strict=True)
    ]


STAGE = Stage("rft", 3, RftConfig, inputs=("collect", "rft"), roles=(), run=run, outputs=("adapter/",))
