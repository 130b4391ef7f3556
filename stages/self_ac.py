"""Self-AC: actor and critic in one transformer, one pass an episode, credit turn by turn.

    L = alpha L_critic + (1 - alpha) L_actor
    L_critic = mean_n || V - stop_grad(target_n) ||^2,   L_actor = -mean_k min(rho_k A_k, clip(rho_k, 1 - c, 1 + c) A_k)

Source: Self-AC slides, critic loss and actor loss; the row's layout is in `learn/shadow.py`. Every minibatch reads its values and
log-probs from the same pass, so targets and advantages are of the weights that are being trained; all of them are detached. [ours]
Before every loss `learn/credit.py` checks that each token learns from its own turn; the first step is written down in ledger.parquet. [ours]

    turnwise run self_ac_demo
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from stages.contract import Context, Outputs, Stage
from stages.learn.adapter import base_of, save_adapter
from stages.learn.credit import check_credit, returns_of
from stages.learn.fit import fit
from stages.learn.ledger import check_shares, ledger, step_targets
from stages.learn.losses import Per, Ratio, chunked_log_probs, loss_normaliser, turn_ppo_clip
from stages.learn.returns import AdvantageKind, advantages, monte_carlo, state_mask, turn_mask, value_loss
from stages.learn.shadow import BadEpisode, EpisodeIds, PackedRow, bins, pack, unbroken
from stages.learn.shadow_attention import check_masks
from stages.learn.value_head import ValueHead, episode_pass, load_head, new_head, save_head
from stages.llm.roles import load_roles, mix
from stages.tables import write_parquet
from stages.training import OptimConfig, by_scenario, check_temperature, fit_metrics, relative_advantages, trainable_policy
from stages.transitions import trainable_episodes
from stages.types import MissingInput, Outcome, Row


class SelfAcConfig(OptimConfig):
    """Critic and actor loss of one shared transformer."""

    epochs: int = Field(2, ge=1, description="Passes over the iteration's episodes. [ours]")
    batch: int = Field(32, ge=1, description="Episodes a step. [ours]")
    row_tokens: int = Field(4096, ge=1, description="Most tokens of one packed row; a step is as many rows as it needs. [ours]")
    alpha: float = Field(0.5, ge=0, le=1, description="Weight of the critic's loss against the actor's. [slides: alpha; number ours]")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount a turn; below 1 the actor's gradient is biased. [slides: gamma; number ours]")
    td_steps: int = Field(5, ge=1, description="TD(1) to TD(n) are averaged. [slides: 5]")
    advantage: AdvantageKind = Field("td_mean", description="td_mean, td1, gae, mc, or group: one number for a whole episode, as GRPO. [ours]")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="For advantage = gae. [ours]")
    known_end: bool = Field(False, description="The known final reward instead of V_N in the targets of earlier states. [ours; slides: V_N]")
    ratio: Ratio = Field("turn", description="Ratio of a turn's probability, of its mean token's (turn_mean), or of each token's. [slides: turn]")
    ratio_clip: float = Field(0.2, gt=0, lt=1, description="c of the clipped ratio. [slides: eps; number is PPO's]")
    per: Per = Field("turn", description="The actor's sum is divided by turns, or by episodes, which is unbiased. [slides: turn]")
    value_grad_scale: float = Field(1.0, ge=0, description="Factor on the critic's gradient into the shared body; 0 = head only. [ours; slides: 1]")
    warmup: int = Field(0, ge=0, description="First iterations in which only the head learns, and the shared body stays as it is. [ours; slides: 0]")
    soft_prompt: int = Field(0, ge=0, le=4, description="Learned vectors in place of the critic prompt's text. [ours; slides: text]")
    unusable: Literal["error", "drop"] = Field(
        "error", description="An episode that cannot be trained on (too long, no log-probs): stop, or drop and count it. [ours]"
    )


@dataclass(frozen=True)
class Part:
    """One packed row of a step, and what the whole step counts: all parts divide by the same numbers, so their losses add up."""

    row: PackedRow
    episodes: tuple[EpisodeIds, ...]  # of the row, in order
    returns: tuple[float, ...]  # what the rewards of each add up to, as it was stored
    relative_B: Tensor | None  # advantage of each episode relative to its group; None = by turn, from the values of the pass
    n_states: float  # states with a target in the step
    normaliser: float  # of the actor's sum
    first: bool  # of the stage's first step, which goes into the ledger


@dataclass(frozen=True)
class Pass:
    """What one pass through the body gives to the losses. J turns and K action tokens of the row; gradients flow into values and log-probs."""

    values_BM: Tensor
    advantages_J: Tensor
    log_probs_K: Tensor
    entropy_K: Tensor


def run(context: Context) -> Outputs:
    """Artifacts `adapter`, `head` and `ledger.parquet`. Raises MissingInput without an episode, UsageError for a model that a packed row does not fit."""
    config: SelfAcConfig = context.config
    check_temperature(context)
    heads = trainable_episodes(context.replay, context.inputs["collect"][-1:])
    critic_ids = critic_prompt(context)
    model = trainable_policy(context)
    if context.policy_run is None:
        check_masks(model, critic_ids)  # once, before the first step
    head = open_head(context, model)
    episodes, returns, counts = training_rows(context, heads, critic_ids, longest(model))
    bar = context.progress("train actor and critic", config.epochs * -(-len(episodes) // config.batch))
    warming_up = context.iteration < config.warmup
    weight = 0.0 if warming_up else 1 - config.alpha
    # With no actor to answer it, the critic's gradient would move the policy. A soft prompt learns through the body alone, so with one it has to.
    scale = 0.0 if warming_up and not config.soft_prompt else config.value_grad_scale
    pages: list[dict[str, list[Any]]] = []

    def loss(pair: Any, part: Part) -> tuple[Tensor, dict[str, float]]:
        found = credited_pass(pair[0], pair[1], part, config, value_grad_scale=scale)
        total, metrics = joint_loss(found, part, config, actor_weight=weight)
        if part.first:
            pages.append(page(found, part, config, metrics["actor_loss"]))
        return total, metrics

    batches = steps(
        episodes, returns, by_group(heads, config), critic_ids, config,
        rng=random.Random(context.seed), device=model.device,
    )  # fmt: skip
    history = fit(
        nn.ModuleList([model, head]), batches, loss, lr=config.rate(context.iteration), clip=config.clip,
        after_step=lambda step: bar.advance(1), merge=of_step,
    )  # fmt: skip
    save_adapter(model, context.workdir / "adapter", context.engine.model_hash)
    save_head(head, context.workdir / "head")
    curves = {
        f"self_ac/step_{name}": [h[name] for h in history if name in h] for name in ("value_loss", "actor_loss", "explained_variance", "grad_norm")
    }
    book = write_ledger(pages, context.engine.decode, context.workdir / "ledger.parquet")
    files = {"adapter": context.workdir / "adapter", "head": context.workdir / "head", book.name: book}
    return Outputs(fit_metrics("self_ac", history) | {"self_ac/rows": float(len(episodes)), **counts}, {}, files, curves)


def longest(model: Any) -> int | None:
    """Most positions that the model has; None = no limit that it tells of."""
    found: int | None = getattr(base_of(model).config, "max_position_embeddings", None)
    return found


def training_rows(
    context: Context, heads: Sequence[Row], critic_ids: Sequence[int], max_positions: int | None
) -> tuple[list[EpisodeIds], dict[tuple[Any, ...], float], dict[str, float]]:
    """The episodes as rows to be packed, what the rewards of each add up to by its key, and how many were split or dropped."""
    config: SelfAcConfig = context.config
    turns: dict[str, list[Row]] = defaultdict(list)
    for turn in context.replay.rows("turns", context.inputs["collect"][-1:]):
        turns[turn["episode_id"]].append(turn)
    roles = load_roles(context.run.roles.prompts)
    rows: list[EpisodeIds] = []
    returns: dict[tuple[Any, ...], float] = {}
    counts = {"self_ac/split": 0.0, "self_ac/dropped": 0.0}
    for head in heads:
        final, mine = context.engine.encode(roles.policy(head["messages"])), turns[head["episode_id"]]
        try:
            found = unbroken(mine, final, head["outcome"] == Outcome.TRUNCATED, config.gamma, (head["episode_id"],))
            pack(found, critic_ids, max_positions=max_positions, soft_len=config.soft_prompt)  # raises where one is too long
        except BadEpisode:
            if config.unusable == "error":
                raise
            counts["self_ac/dropped"] += 1
            continue
        rows += found
        told = returns_of(found, head["total_reward"], [turn["reward"] for turn in mine], gamma=config.gamma)
        returns |= {row.key: one for row, one in zip(found, told, strict=True)}
        counts["self_ac/split"] += len(found) > 1
    if not rows:
        raise MissingInput(f"self_ac found no usable one among {len(heads)} episodes of its last collect run; collect more")
    return rows, returns, counts


def critic_prompt(context: Context) -> tuple[int, ...]:
    """Ids of the text that asks for a value; none where a learned prompt stands in its place."""
    if context.config.soft_prompt:
        return ()
    text = load_roles(context.run.roles.prompts).templates["value"].strip()
    return context.engine.encode([{"role": "system", "content": text}])


def open_head(context: Context, model: Any) -> ValueHead:
    """The head of the last run, or a fresh one. Raises UsageError for one of another width."""
    if (last := context.latest("self_ac")) is not None:
        return load_head(context.artifact(last, "head"), width=base_of(model).config.hidden_size).to(model.device)
    return new_head(model, soft_len=context.config.soft_prompt, seed=mix("head", context.run.seed) % 2**31)


def by_group(heads: Sequence[Row], config: SelfAcConfig) -> dict[str, float] | None:
    """Advantage of each episode relative to those of its scenario, over the whole iteration; None where the values tell it."""
    if config.advantage != "group":
        return None
    groups = by_scenario(heads).values()
    if any(len(members) < 2 for members in groups):
        raise MissingInput("advantage = group compares episodes of one scenario, found a scenario with one episode; set collect.group to 4 or more")
    return relative_advantages(groups)


def steps(
    episodes: Sequence[EpisodeIds],
    returns: Mapping[tuple[Any, ...], float],
    groups: dict[str, float] | None,
    critic_ids: Sequence[int],
    config: SelfAcConfig,
    *,
    rng: random.Random,
    device: Any,
) -> Iterator[list[Part]]:
    """Each epoch's episodes in a new order, `batch` of them a step, packed by length into as few rows as hold them."""
    for epoch in range(config.epochs):
        order = rng.sample(list(episodes), len(episodes))
        n_steps = -(-len(order) // config.batch)
        # Steps of like size: a last one of a single episode would move the weights as far as any other.
        edges = [round(i * len(order) / n_steps) for i in range(n_steps + 1)]
        for start, end in pairwise(edges):
            chosen = order[start:end]
            n_states = float(sum(e.n_turns + (not e.truncated) for e in chosen))
            normaliser = loss_normaliser(config.per, torch.tensor([e.n_turns for e in chosen]))
            parts = []
            for row in bins(chosen, len(critic_ids) or config.soft_prompt, token_budget=config.row_tokens):
                members = tuple(chosen[i] for i in row)
                packed = pack(members, critic_ids, max_positions=None, soft_len=config.soft_prompt).to(device)
                relative = torch.tensor([groups[e.key[0]] for e in members], device=device) if groups else None
                told = tuple(returns[e.key] for e in members)
                parts.append(Part(packed, members, told, relative, n_states, normaliser, first=epoch == start == 0))
            yield parts


def credited_pass(model: Any, head: ValueHead, part: Part, config: SelfAcConfig, *, value_grad_scale: float) -> Pass:
    """One pass through the body, and the advantages that its values give. Raises LostCredit where a token would not get its own turn's."""
    row = part.row
    states_KD, values_BM = episode_pass(model, head, row, value_grad_scale=value_grad_scale)
    if part.relative_B is not None:
        advantages_BM = part.relative_B[:, None].expand_as(values_BM)
    else:
        advantages_BM = advantages(
            config.advantage, row.rewards, values_BM, row.n_turns, row.truncated,
            gamma=config.gamma, n_max=config.td_steps, lam=config.gae_lambda, known_end=config.known_end,
        )  # fmt: skip
    advantages_J = advantages_BM[turn_mask(row.n_turns, values_BM.shape[1])]
    check_credit(row, part.episodes, advantages_BM, advantages_J, returns=part.returns)
    ids_K = row.ids[row.target_positions]
    log_probs_K, entropy_K = chunked_log_probs(states_KD, base_of(model).get_output_embeddings(), ids_K, entropy=True)
    return Pass(values_BM, advantages_J, log_probs_K, entropy_K)


def joint_loss(found: Pass, part: Part, config: SelfAcConfig, *, actor_weight: float) -> tuple[Tensor, dict[str, float]]:
    """alpha L_critic + actor_weight L_actor of one row; metrics of both."""
    row = part.row
    critic, metrics = value_loss(
        found.values_BM, row.rewards, row.n_turns, row.truncated, gamma=config.gamma, n_max=config.td_steps, normaliser=part.n_states,
        known_end=config.known_end,
    )  # fmt: skip
    actor, of_actor = turn_ppo_clip(
        found.log_probs_K, row.old_log_probs, row.turn_of_token, found.advantages_J,
        clip=config.ratio_clip, ratio=config.ratio, normaliser=part.normaliser,
    )  # fmt: skip
    entropy = float(found.entropy_K.detach().mean())
    metrics |= {**of_actor, "value_loss": float(critic.detach()), "actor_loss": float(actor.detach()), "entropy": entropy}
    metrics |= {"tokens": float(len(found.log_probs_K)), **moments(found.values_BM.detach(), row, config)}
    return config.alpha * critic + actor_weight * actor, metrics


def moments(values_BM: Tensor, row: PackedRow, config: SelfAcConfig) -> dict[str, float]:
    """Sums over the states of terminated episodes, from which `of_step` has the explained variance of a step: count, R, R^2, error, error^2."""
    returns = monte_carlo(row.rewards, values_BM, row.n_turns, row.truncated, gamma=config.gamma)
    known = state_mask(row.n_turns, row.truncated, values_BM.shape[1]) & ~row.truncated[:, None]
    r, error = returns[known].double(), (returns - values_BM)[known].double()
    return {"n": float(len(r)), "r": float(r.sum()), "rr": float(r.square().sum()), "e": float(error.sum()), "ee": float(error.square().sum())}


def of_step(parts: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of a step from those of its rows. Losses are divided by the step's counts already, so they add up; the rest are means over tokens."""
    tokens = sum(part["tokens"] for part in parts)
    losses = [name for name in parts[0] if name.startswith(("value_loss", "actor_loss"))]
    found = {name: sum(part[name] for part in parts) for name in losses}
    found |= {name: sum(part["tokens"] * part[name] for part in parts) / tokens for name in ("ratio_mean", "clip_frac", "kl_old", "entropy")}
    n, r, rr, e, ee = (sum(part[name] for part in parts) for name in ("n", "r", "rr", "e", "ee"))
    variance = rr / n - (r / n) ** 2 if n else 0.0
    if variance > 1e-12:
        found["explained_variance"] = 1 - (ee / n - (e / n) ** 2) / variance
    return found | {"ratio_max": max(part["ratio_max"] for part in parts), "tokens": tokens}


def page(found: Pass, part: Part, config: SelfAcConfig, actor_loss: float) -> dict[str, list[Any]]:
    """The ledger of one row. Its shares are of the unweighted actor's loss, in the warm-up, too. Raises LostCredit if they do not add up to it."""
    targets = step_targets(part.row, found.values_BM, gamma=config.gamma, n_max=config.td_steps, known_end=config.known_end)
    columns = ledger(
        part.row, part.episodes, found.values_BM, targets, found.advantages_J, found.log_probs_K,
        ratio=config.ratio, clip=config.ratio_clip, normaliser=part.normaliser,
    )  # fmt: skip
    check_shares(columns, actor_loss)
    return columns


def write_ledger(pages: Sequence[Mapping[str, list[Any]]], decode: Callable[[Sequence[int]], str], path: Path) -> Path:
    """The pages below each other as one Parquet file, with the text of each token as it decodes alone."""
    import pyarrow as pa

    columns = {name: [one for found in pages for one in found[name]] for name in pages[0]}
    texts = {token: decode([token]) if token >= 0 else "" for token in set(columns["token_id"])}
    return write_parquet(pa.table({**columns, "text": [texts[token] for token in columns["token_id"]]}), path)


STAGE = Stage(
    "self_ac", 1, SelfAcConfig, inputs=("collect", "self_ac"), roles=("policy", "value"), run=run, outputs=("adapter/", "head/", "ledger.parquet"),
)  # fmt: skip
