"""Self-AC: actor and critic in one transformer, one pass an episode, credit turn by turn.

Source: Self-AC slides. `actor_critic.py` has the losses, `learn/shadow.py` the row's layout. ledger.parquet shows the
first step token by token, and every turn gets a certificate of its tokens. A killed stage goes on from its last
checkpoint. It reaches the same weights as without the kill. [ours]

    turnwise run desk+self_ac
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from stages.frame.contract import Context, Outputs, Stage
from stages.frame.types import UsageError
from stages.learn import ranks
from stages.learn.adapter import add_adapter, base_of, save_adapter
from stages.learn.certificate import Turn, cert_metrics, turn_gaps, with_gaps
from stages.learn.checkpoint import load_checkpoint, save_checkpoint
from stages.learn.fit import Lists, adamw, fit
from stages.learn.later import Later
from stages.learn.value_head import ValueHead, load_head, new_head, save_head
from stages.llm.roles import mix
from stages.play.transitions import trainable_episodes
from stages.store.tables import write_parquet
from stages.train.actor_critic import CRITIC, Part, SelfAcConfig, credited_pass, joint_loss, page
from stages.train.episode_steps import HEAD, critic_prompt, of_one_scale, steps, trainable_rows
from stages.train.history import fit_metrics
from stages.train.model import deal_out, in_training, trainable_policy
from stages.train.on_policy import check_gap, check_temperature
from stages.train.step_metrics import of_step

CURVES = ("value_loss", "actor_loss", "advantage_deviation", "explained_variance", "entropy", "grad_norm")


def run(context: Context) -> Outputs:
    """Artifacts `adapter`, `head`, `moments.safetensors`, `ledger.parquet`, maybe `critic`; rows of `certificates`.

    Raises MissingInput without an episode, UsageError for a model that a packed row does not fit."""
    config: SelfAcConfig = context.config
    check_options(config, checkpointing=context.run.model.gradient_checkpointing)
    check_temperature(context)
    heads = trainable_episodes(context.replay, context.inputs["collect"][-1:], HEAD)
    critic_ids = critic_prompt(context)
    model = open_policy(context)
    head = open_head(context, model)
    found = of_one_scale(trainable_rows(context, heads, critic_ids, longest(model)), critic_ids, config, model, head)
    both = nn.ModuleList([model, head])
    rate = config.rate(context.iteration)
    optimiser = adamw(both, lr=rate, rates=[(head, config.head_lr * rate / config.lr)] if config.head_lr else [])
    if config.keep_moments and (last := context.latest("self_ac")):
        load_checkpoint(context.artifact(last, "moments.safetensors"), both, optimiser)
    history = learn(
        context,
        both,
        optimiser,
        steps(found, critic_ids, config, rng=random.Random(context.seed), device=model.device),
        len(found.episodes),
    )
    files = save(context, model, head)
    save_checkpoint(files["moments.safetensors"], both, optimiser, weights=False)
    curves = {f"self_ac/step_{name}": [h[name] for h in history if name in h] for name in CURVES}
    certified = with_gaps(found.certificates, ledger_gaps(files["ledger.parquet"]))
    metrics = fit_metrics("self_ac", history) | {"self_ac/rows": float(sum(map(len, found.episodes))), **found.counts}
    metrics["self_ac/advantage_divisor"] = found.deviation
    return Outputs(
        metrics | cert_metrics("self_ac", certified, config.max_gap), {"certificates": certified}, files, curves
    )


def learn(
    context: Context, both: nn.ModuleList, optimiser: torch.optim.Optimizer, batches: Any, n_episodes: int
) -> list[dict[str, float]]:
    """Does all remaining steps. Leaves the ledger of the first step beside the checkpoint."""
    config: SelfAcConfig = context.config
    model, head = cast(tuple[Any, ValueHead], tuple(both))
    warming_up = context.iteration < config.warmup
    weight = 0.0 if warming_up else 1 - config.alpha
    # With no actor to answer it, the critic's gradient would move the policy. A soft prompt learns through the body
    # alone, so with one it has to.
    scale = 0.0 if warming_up and not config.soft_prompt and not config.separate else config.value_grad_scale

    def loss(pair: Any, part: Part) -> tuple[Tensor, Later]:
        found = credited_pass(model, head, part, config, value_grad_scale=scale)
        total, metrics = joint_loss(found, part, config, actor_weight=weight)
        if part.first:
            metrics |= {"each/page": [page(found, part, config, metrics["actor_loss"])]}
        return total, metrics

    state = context.checkpoints / "step.safetensors"
    done = load_checkpoint(state, both, optimiser) if config.checkpoint_every and state.exists() else []
    bar = context.progress("train actor and critic", config.epochs * -(-n_episodes // config.batch))
    bar.advance(len(done))

    def each(lists: Lists) -> None:
        if pages := lists.get("each/page"):
            if ranks.own() == 0:
                write_ledger(pages, context.engine.decode, ledger_path(context))
            ranks.gathered("the ledger is written")

    def after_step(done: list[dict[str, float]]) -> None:
        check_gap("self_ac", done, config.max_gap)
        if config.checkpoint_every and len(done) % config.checkpoint_every == 0:
            save_checkpoint(state, both, optimiser, done)
        bar.advance(1)

    with in_training(context, model):
        return fit(
            both,
            batches,
            loss,
            optimiser,
            clip=config.clip,
            after_step=after_step,
            each=each,
            merge=of_step,
            history=done,
        )


def check_options(config: SelfAcConfig, *, checkpointing: bool) -> None:
    """Raises UsageError for two options that do not go together."""
    if checkpointing and config.separate:
        raise UsageError(
            "self_ac.separate: a layer computed again would use the other pass's adapter. Set model.gradient_checkpointing to false"
        )
    if config.soft_prompt and config.separate:
        raise UsageError(
            "self_ac.separate: a critic with an adapter of its own reads the text prompt; set self_ac.soft_prompt to 0"
        )


def longest(model: Any) -> int | None:
    """Most positions that the model has; None = no limit that it tells of."""
    found: int | None = getattr(base_of(model).config, "max_position_embeddings", None)
    return found


def open_policy(context: Context) -> Any:
    """The policy, with the critic's adapter beside its own if there are two."""
    model = trainable_policy(context)
    if context.config.separate:
        last, shape = context.latest("self_ac"), context.run.model
        start = context.artifact(last, CRITIC) if last else None
        add_adapter(
            model, CRITIC, start, rank=shape.lora_rank, alpha=shape.lora_alpha,
            seed=mix(CRITIC, context.run.seed) % 2**31,
        )  # fmt: skip
    deal_out(context, model)
    return model


def open_head(context: Context, model: Any) -> ValueHead:
    """The head of the last run, or a fresh one. Raises UsageError for one of another width."""
    if (last := context.latest("self_ac")) is not None:
        return load_head(context.artifact(last, "head"), width=base_of(model).config.hidden_size).to(model.device)
    return new_head(model, soft_len=context.config.soft_prompt, seed=mix("head", context.run.seed) % 2**31)


def save(context: Context, model: Any, head: ValueHead) -> dict[str, Path]:
    """The artifacts; `moments.safetensors` is not written yet."""
    names = ["adapter", "head", "moments.safetensors", "ledger.parquet", *([CRITIC] if context.config.separate else [])]
    files = {name: context.workdir / name for name in names}
    save_adapter(model, files["adapter"], context.engine.model_hash)
    if CRITIC in files:
        save_adapter(model, files[CRITIC], context.engine.model_hash, name=CRITIC)
    save_head(head, files["head"])
    shutil.copy(ledger_path(context), files["ledger.parquet"])
    return files


def ledger_path(context: Context) -> Path:
    """Where the running stage keeps its ledger. The file must outlive a kill, because the first step is not done
    again.
    """
    return context.checkpoints / "ledger.parquet"


def write_ledger(pages: Sequence[Mapping[str, list[Any]]], decode: Callable[[Sequence[int]], str], path: Path) -> None:
    """Joins the pages into one Parquet file, with the text of each token decoded alone."""
    import pyarrow as pa

    columns = {name: [one for found in pages for one in found[name]] for name in pages[0]}
    texts = {token: decode([token]) if token >= 0 else "" for token in set(columns["token_id"])}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_parquet(pa.table({**columns, "text": [texts[token] for token in columns["token_id"]]}), path)


def ledger_gaps(path: Path) -> dict[Turn, dict[str, float]]:
    """Gaps of the first step's turns, from its ledger, which also survives a kill."""
    import pyarrow.parquet as pq

    columns = ["episode", "turn", "old_log_prob", "log_prob"]
    tokens = pq.read_table(path, columns=columns, filters=[("in_action", "=", True)]).to_pydict()
    return turn_gaps(zip(tokens["episode"], tokens["turn"], strict=True), tokens["old_log_prob"], tokens["log_prob"])


STAGE = Stage(
    "self_ac", 7, SelfAcConfig, inputs=("collect", "self_ac"), roles=("policy", "value"), run=run, trains=True,
    outputs=("certificates", "adapter/", "head/", "critic/", "moments.safetensors", "ledger.parquet"),
)  # fmt: skip
