"""The joint loss of Self-AC: one pass through the shared transformer, targets and advantages by its values.

    L = alpha L_critic + (1 - alpha) L_actor
    L_critic = mean_n || V - stop_grad(target_n) ||^2,   L_actor = -mean_k min(rho_k A_k, clip(rho_k, 1 - c, 1 + c) A_k)

Source: Self-AC slides, critic loss and actor loss. Every minibatch reads its values and log-probs from the same pass.
So targets and advantages use the current weights; all are detached. [ours] Before every loss `learn/credit.py` checks
that each token learns from its own turn. [ours]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from stages.frame.contract import Retired
from stages.learn import ranks
from stages.learn.adapter import acting_as, as_base, base_of
from stages.learn.credit import check_credit
from stages.learn.episode_row import EpisodeIds, PackedRow, without_shadows
from stages.learn.later import Later, named
from stages.learn.ledger import check_shares, ledger, step_targets
from stages.learn.losses import Per, Ratio, check_tokens, chunked_kl, chunked_log_probs, turn_ppo_clip
from stages.learn.returns import AdvantageKind, advantages, batch_deviation, check_rows, value_loss
from stages.learn.tree_attention import body_pass
from stages.learn.value_head import ValueHead, episode_pass
from stages.train.model import OptimConfig
from stages.train.on_policy import MAX_GAP
from stages.train.passes import half
from stages.train.step_metrics import moments, of_turns

CRITIC = "critic"  # name of the second adapter, where actor and critic have one each


class SelfAcConfig(OptimConfig):
    """Critic and actor loss of one shared transformer."""

    RETIRED: ClassVar[Mapping[str, Retired]] = {"attention": Retired("sdpa", "model.attention")}

    epochs: int = Field(2, ge=1, description="Passes over the iteration's episodes. [ours]")
    batch: int = Field(32, ge=1, description="Episodes a step. [ours]")
    row_tokens: int = Field(4096, ge=1)
    """Most tokens of one packed row; a step is as many rows as it needs. [ours]"""
    head_lr: float = Field(0.0, ge=0, description="Learning rate of the value head; 0 = that of the body, lr. [ours]")
    keep_moments: bool = True
    """Keep AdamW's moments from one iteration to the next; false = they start at 0 each time. [ours]"""
    alpha: float = Field(0.5, ge=0, le=1)
    """Weight of the critic's loss against the actor's. [slides: alpha; number ours]"""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount a turn; below 1 the actor's gradient is biased. [slides: gamma; number ours]"""
    td_steps: int = Field(5, ge=1, description="TD(1) to TD(n) are averaged. [slides: 5]")
    advantage: AdvantageKind = "td_mean"
    """td_mean, td1, gae, mc, or group: one number for a whole episode, as GRPO. [ours]"""
    gae_lambda: float = Field(0.95, ge=0, le=1, description="For advantage = gae. [ours]")
    advantage_scale: Literal["own", "batch"] = Field(
        "own",
        description="What advantages are divided by. own: those of `group` by the group's deviation, others by nothing. batch: all by their deviation over the iteration's turns. [ours]",
    )
    known_end: bool = False
    """The known final reward instead of V_N in the targets of earlier states. [ours; slides: V_N]"""
    ratio: Ratio = "turn"
    """Ratio of a turn's probability, of its mean token's (turn_mean), or of each token's. [slides: turn]"""
    ratio_clip: float = Field(0.2, gt=0, lt=1, description="c of the clipped ratio. [slides: eps; number is PPO's]")
    per: Per = "turn"
    """The actor's sum is divided by turns, or by episodes, which is unbiased. [slides: turn]"""
    kl_coef: float = Field(
        0.0,
        ge=0,
        description="Cost of one nat of divergence from the base policy, in units of the scaled advantage. Above 0 the policy keeps exploring. [ours; slides: 0]",
    )
    separate: bool = False
    """An adapter each for actor and critic, and a pass each. [ours; slides: one for both]"""
    value_grad_scale: float = Field(1.0, ge=0)
    """Factor on the critic's gradient into the shared body; 0 = head only. [ours; slides: 1]"""
    warmup: int = Field(0, ge=0)
    """First iterations in which only the head learns, and the shared body stays as it is. [ours; slides: 0]"""
    soft_prompt: int = Field(0, ge=0, le=4)
    """Learned vectors in place of the critic prompt's text. [ours; slides: text]"""
    max_gap: float = Field(0.1, gt=0, description=MAX_GAP)
    checkpoint_every: int = Field(50, ge=0)
    """Steps between two checkpoints, from which a killed stage goes on; 0 = none. [ours]"""
    broken: Literal["split", "error"] = "split"
    """What to do if a next state does not begin with the turn's tokens. split: one row for each piece. error: stop. [ours]"""
    unusable: Literal["error", "drop"] = "error"
    """What to do with an episode that cannot be trained on (too long, no log-probs): stop, or drop and count it. [ours]"""

    @property
    def has_critic(self) -> bool:
        """False where no value is asked for: GRPO."""
        return self.alpha > 0 or self.advantage != "group"


@dataclass(frozen=True)
class Part:
    """One packed row of a step; all rows divide by the step's counts, so that their losses add up."""

    row: PackedRow
    episodes: tuple[EpisodeIds, ...]  # of the row, in order
    returns: tuple[float, ...]  # what the rewards of each add up to, as it was stored
    # advantage of each episode relative to its group; None = by turn, from the values of the pass
    relative_B: Tensor | None
    n_states: float  # states with a target in the step
    normaliser: float  # of the actor's sum
    first: bool  # of the stage's first step, which goes into the ledger
    deviation: float = 1.0  # what advantages are divided by

    @property
    def n_tokens(self) -> int:
        return len(self.row.ids)


@dataclass(frozen=True)
class Pass:
    """What one pass gives to the losses, of J turns and K action tokens; no gradient into the advantages."""

    values_BM: Tensor
    advantages_J: Tensor
    log_probs_K: Tensor
    entropy_K: Tensor
    kl_K: Tensor  # to the base policy; zeros where it costs nothing
    checked: Later  # raises LostCredit when it is read, where the advantages were on a device; no metric


def credited_pass(model: Any, head: ValueHead, part: Part, config: SelfAcConfig, *, value_grad_scale: float) -> Pass:
    """One pass through the body, and its advantages. Raises LostCredit where a token would get another turn's."""
    row = part.row
    if config.has_critic:
        states_KD, values_BM = critic_pass(model, head, row, config, value_grad_scale=value_grad_scale)
    else:
        values_BM = torch.zeros_like(row.rewards)
    if config.separate or not config.has_critic:
        with half(row.ids.device, config.autocast):
            states_KD = action_states(model, row)
    advantages_BM = row_advantages(part, values_BM, config) / part.deviation
    advantages_J = advantages_BM.flatten().index_select(0, row.turn_places)
    checked = check_credit(row, part.episodes, advantages_BM, advantages_J, returns=part.returns)
    if row.host is not None:  # else the losses look at the values themselves
        check_rows(row.host.rewards, row.host.n_turns, row.host.truncated)
        check_tokens(row.host.old_log_probs, row.host.turn_of_token, len(advantages_J))
    ids_K = row.ids[row.target_positions]
    with half(row.ids.device, config.autocast):
        to_vocabulary = base_of(model).get_output_embeddings()
        log_probs_K, entropy_K = chunked_log_probs(states_KD, to_vocabulary, ids_K, entropy=True)
        kl_K = (
            chunked_kl(states_KD, base_states(model, row), to_vocabulary)
            if config.kl_coef
            else torch.zeros_like(log_probs_K)
        )
    return Pass(values_BM, advantages_J, log_probs_K, entropy_K, kl_K, checked)


def critic_pass(
    model: Any, head: ValueHead, row: PackedRow, config: SelfAcConfig, *, value_grad_scale: float
) -> tuple[Tensor, Tensor]:
    """States that predict the action tokens, (K, D), and V, (B, M), by the critic's own adapter, if it has one."""
    scale = 1.0 if config.separate else value_grad_scale
    acting = acting_as(model, CRITIC) if config.separate else nullcontext()
    with half(row.ids.device, config.autocast), acting:
        return episode_pass(model, head, row, value_grad_scale=scale)


def row_advantages(part: Part, values_BM: Tensor, config: SelfAcConfig) -> Tensor:
    """Advantages of a row as their estimator has them, (B, M); what stands outside turns is never read."""
    row = part.row
    if part.relative_B is not None:
        return part.relative_B[:, None].expand_as(values_BM)
    return advantages(
        config.advantage, row.rewards, values_BM, row.n_turns, row.truncated,
        gamma=config.gamma, n_max=config.td_steps, lam=config.gae_lambda, known_end=config.known_end,
    )  # fmt: skip


@torch.no_grad()
def deviation_of(model: Any, head: ValueHead, rows: Sequence[Part], config: SelfAcConfig) -> float:
    """Of the advantages of all turns of the rows, at the weights as they are. A group's are known without a pass."""

    def told(part: Part) -> list[float]:
        row = part.row
        values_BM = (
            torch.zeros_like(row.rewards)
            if part.relative_B is not None
            else critic_pass(model, head, row, config, value_grad_scale=1.0)[1]
        )
        found: list[float] = row_advantages(part, values_BM, config).flatten()[row.turn_places].tolist()
        return found

    found = ranks.each_of(rows, told, model)
    return batch_deviation(torch.tensor([advantage for each in found for advantage in each]))


def action_states(model: Any, row: PackedRow) -> Tensor:
    """States that predict the action tokens, (K, D), by a pass without shadows."""
    return body_pass(model, without_shadows(row).tree).index_select(0, row.source_positions)


@torch.no_grad()
def base_states(model: Any, row: PackedRow) -> Tensor:
    """The same, of the base model."""
    with as_base(model):
        return action_states(model, row)


def joint_loss(found: Pass, part: Part, config: SelfAcConfig, *, actor_weight: float) -> tuple[Tensor, Later]:
    """alpha L_critic + actor_weight (L_actor + kl_coef KL) of one row; metrics of both."""
    row = part.row
    actor, of_actor = turn_ppo_clip(
        found.log_probs_K, row.old_log_probs, row.turn_of_token, found.advantages_J,
        clip=config.ratio_clip, ratio=config.ratio, normaliser=part.normaliser,
    )  # fmt: skip
    # By the same normaliser as the actor's sum, so that the coefficient is in units of reward.
    cost = config.kl_coef * found.kl_K.sum() / part.normaliser
    means = {"actor_loss": actor, "entropy": found.entropy_K.mean(), "kl_base": found.kl_K.mean()}
    counts = dict.fromkeys(("tokens", "count/entropy", "count/kl_base"), float(len(found.log_probs_K)))
    metrics = found.checked | of_actor | named(means) | counts
    metrics |= moments(found.values_BM, row, gamma=config.gamma) | of_turns(found.advantages_J)
    if not config.has_critic:
        return actor_weight * (actor + cost), metrics | {"n": 0.0}
    critic, of_critic = value_loss(
        found.values_BM, row.rewards, row.n_turns, row.truncated, gamma=config.gamma, n_max=config.td_steps, normaliser=part.n_states,
        known_end=config.known_end,
    )  # fmt: skip
    metrics |= of_critic | named({"value_loss": critic})
    return config.alpha * critic + actor_weight * (actor + cost), metrics


def page(found: Pass, part: Part, config: SelfAcConfig, actor_loss: float) -> dict[str, list[Any]]:
    """The ledger of one row, by the unweighted actor's loss. Raises LostCredit if its shares do not add up to it."""
    targets = step_targets(
        part.row, found.values_BM, gamma=config.gamma, n_max=config.td_steps, known_end=config.known_end
    )
    columns = ledger(
        part.row, part.episodes, found.values_BM, targets, found.advantages_J, found.log_probs_K,
        ratio=config.ratio, clip=config.ratio_clip, normaliser=part.normaliser,
    )  # fmt: skip
    check_shares(columns, actor_loss)
    return columns
