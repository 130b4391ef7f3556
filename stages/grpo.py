"""GRPO, a baseline: policy gradient with the group's mean return as baseline and one advantage an episode.

    A_i = (R_i - mean_g R) / (std_g R + eps),   L = -E_t [ min(rho_t A_i, clip(rho_t, 1 - c, 1 + c) A_i) ],   rho_t =
        pi_theta / pi_rollout

Source: arXiv 2402.03300, the mean over all tokens 2503.14476. A group is `collect.group` episodes of one scenario.

`step_weight` above 0 makes it GiGPO (arXiv 2505.10978). A turn then has an advantage of its own beside its episode's:

    A_ik = A_i + w (G_ik - mean_u G) / (std_u G + eps),   G_ik = sum_j>=k gamma^(j-k) r_ij

u: the turns of the group that began in the same state. A state is all that the policy reads: token by token [ours].

    turnwise run desk+grpo
    turnwise run desk+gigpo
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from stages.frame.contract import Context, Outputs, Stage
from stages.frame.types import MissingInput, Row
from stages.learn.adapter import save_adapter
from stages.learn.certificate import Turn, cert_metrics, certificates, turn_gaps, with_gaps
from stages.learn.fit import Lists
from stages.learn.later import Later
from stages.learn.losses import check_tokens, group_advantages, turn_ppo_clip
from stages.learn.moving import moved
from stages.play.transitions import trainable_episodes
from stages.train.history import fit_metrics
from stages.train.model import PassConfig, deal_out, trainable_policy
from stages.train.network import trained
from stages.train.on_policy import MAX_GAP, by_scenario, check_gap, check_temperature, relative_advantages
from stages.train.passes import Pass, half, pass_log_probs, step_passes, token_counts
from stages.train.rows import TrainRow


class GrpoConfig(PassConfig):
    """The clipped policy gradient."""

    ADDED: ClassVar[Mapping[str, Any]] = {"step_weight": 0.0, "gamma": 0.95, "step_scale": "deviation"}

    epochs: int = Field(2, ge=1, description="Passes over the iteration's episodes. [ours]")
    batch: int = Field(96, ge=1, description="Turns a step. [ours]")
    ratio_clip: float = Field(0.2, gt=0, lt=1, description="c of the clipped ratio. [PPO's default]")
    max_gap: float = Field(0.1, gt=0, description=MAX_GAP)
    step_weight: float = Field(
        0.0, ge=0, description="w, weight of a turn's own advantage; 0 = GRPO. [GiGPO's code: 1]"
    )
    gamma: float = Field(0.95, ge=0, le=1, description="Discount a turn of G, for step_weight. [GiGPO's code: 0.95]")
    step_scale: Literal["deviation", "none"] = "deviation"
    """What a turn's own advantage is divided by: the deviation of its state's returns, or nothing. [GiGPO's code: both]"""


@dataclass(frozen=True)
class Turns:
    """The turns of one pass of a step, a row each. The shared prefix of an episode's turns stands in its tree once."""

    rows: Pass
    advantage_R: Tensor
    old_log_probs_K: Tensor
    first: tuple[Turn, ...]  # in the stage's first step which turn each row is; none later

    @property
    def n_tokens(self) -> int:
        return self.rows.n_tokens


def run(context: Context) -> Outputs:
    """Artifact `adapter`, rows of `certificates`. A row is one turn, so the next state need not carry it on. Turns that
    are not carried on are still counted. The last turn of an episode is not: GRPO reads no state after it.

    Raises MissingInput if no group has two episodes, UsageError for a policy_temperature that is not 1."""
    config: GrpoConfig = context.config
    check_temperature(context)
    latest = context.inputs["collect"][-1:]
    episodes = trainable_episodes(context.replay, latest, ["episode_id", "scenario_id", "total_reward"])
    advantage = episode_advantages(episodes)
    columns = ["episode_id", "turn", "prompt_ids", "action_ids", "log_probs"]
    columns += ["reward"] if config.step_weight else []
    used = {(name,) for name, value in advantage.items() if value != 0.0 or config.step_weight}
    turns = context.replay.read("turns", latest, columns, by=["episode_id"], among=used)
    steps, shared = step_advantages(episodes, turns, config) if config.step_weight else ({}, {})
    learned = [t for t in turns if advantage[t["episode_id"]] + steps.get((t["episode_id"], t["turn"]), 0.0) != 0.0]
    model = trainable_policy(context)
    deal_out(context, model)
    gaps: dict[Turn, dict[str, float]] = {}
    bar = context.progress("train by GRPO", config.epochs * -(-len(learned) // config.batch))

    def after_step(done: list[dict[str, float]]) -> None:
        check_gap("grpo", done, config.max_gap)
        bar.advance(1)

    def each(lists: Lists) -> None:
        gaps.update({(episode_id, turn): told for (episode_id, turn), told in lists.get("each/gaps", ())})

    batches = step_batches(learned, advantage, config, random.Random(context.seed), model, steps)
    history = trained(context, model, batches, partial(clipped_loss, config=config), after_step, each)
    save_adapter(model, context.workdir / "adapter", context.engine.model_hash)
    mixed = len({t["episode_id"] for t in learned}) / len(episodes)
    episodes_of_turns = [list(mine) for _, mine in groupby(turns, lambda t: t["episode_id"])]
    certified = [row for mine in episodes_of_turns for row in certificates(mine, None, context.engine.decode)]
    certified = with_gaps(certified, gaps)
    metrics = (
        fit_metrics("grpo", history)
        | {"grpo/used_frac": mixed}
        | shared
        | cert_metrics("grpo", certified, config.max_gap)
    )
    return Outputs(metrics, {"certificates": certified}, {"adapter": context.workdir / "adapter"})


def clipped_loss(model: Any, part: Turns, config: GrpoConfig) -> tuple[Tensor, Mapping[str, Any]]:
    """L of one pass, and its metrics. The losses of a step's passes add up to the step's loss.

    In the first step the gap of each turn is among them, as a list."""
    rows_K = part.rows.row_K
    with half(rows_K.device, config.autocast):
        log_probs_K = pass_log_probs(model, part.rows)
    # A row is a turn; divided by the number of tokens, the sum over them is their mean.
    loss, metrics = turn_ppo_clip(
        log_probs_K, part.old_log_probs_K, rows_K, part.advantage_R, clip=config.ratio_clip, ratio="token",
        normaliser=part.rows.normaliser,
    )  # fmt: skip
    metrics |= token_counts(part.rows)
    if not part.first:
        return loss, metrics
    old_K, turn_K = part.old_log_probs_K.tolist(), [part.first[row] for row in rows_K.tolist()]

    def told(found_K: list[float]) -> dict[str, Any]:
        return {"each/gaps": list(turn_gaps(turn_K, old_K, found_K).items())}

    return loss, metrics | Later([log_probs_K], told)


def episode_advantages(episodes: list[Row]) -> dict[str, float]:
    """Group-relative advantage of every episode whose scenario has at least two."""
    groups = [members for members in by_scenario(episodes).values() if len(members) > 1]
    if not groups:
        raise MissingInput(
            "grpo compares episodes of one scenario, found none with two; set collect.group to 4 or more"
        )
    return relative_advantages(groups)


def step_advantages(
    episodes: Sequence[Row], turns: Sequence[Row], config: GrpoConfig
) -> tuple[dict[Turn, float], dict[str, float]]:
    """w times each turn's own advantage, 0 where no other turn of the group began in its state; and metrics.

    turns: rows of whole episodes, in order. Metrics: `partner_frac`, the share of turns with a partner, and
    `partner_frac_later`, the same without first turns, which all share their state."""
    scenario = {episode["episode_id"]: episode["scenario_id"] for episode in episodes}
    returns, ahead = dict[Turn, float](), dict[str, float]()
    begun: dict[tuple[str, tuple[int, ...]], list[Turn]] = defaultdict(list)
    for t in reversed(turns):
        name = t["episode_id"]
        returns[name, t["turn"]] = ahead[name] = t["reward"] + config.gamma * ahead.get(name, 0.0)
        begun[scenario[name], tuple(t["prompt_ids"])].append((name, t["turn"]))
    found = dict.fromkeys(returns, 0.0)
    groups = [members for members in begun.values() if len(members) > 1]
    for members in groups:
        own = torch.tensor([returns[turn] for turn in members])
        relative = group_advantages(own, divided=config.step_scale == "deviation")
        found |= dict(zip(members, (config.step_weight * relative).tolist(), strict=True))
    having = {turn for members in groups for turn in members}
    later = [turn for turn in returns if turn[1]]
    shares = {"partner_frac": list(returns), "partner_frac_later": later}
    return found, {f"grpo/{k}": sum(t in having for t in v) / max(len(v), 1) for k, v in shares.items()}


def step_batches(
    turns: list[Row], advantage: dict[str, float], config: GrpoConfig, rng: random.Random, model: Any,
    steps: Mapping[Turn, float] = {},
) -> Iterator[list[Turns]]:  # fmt: skip
    """Steps as lists of passes: one pass, or as many as `pass_tokens` asks for. steps: advantages of turns, added to
    those of their episodes.
    """
    by_key = {(t["episode_id"], t["turn"]): t for t in turns}
    rows = [TrainRow(t["prompt_ids"], t["action_ids"], key=key) for key, t in by_key.items()]
    for epoch in range(config.epochs):
        order = rng.sample(rows, len(rows))
        for start in range(0, len(order), config.batch):
            chosen = order[start : start + config.batch]
            passes = []
            for each in step_passes({"policy": chosen}, config.pass_tokens, "cpu"):
                old = torch.tensor([p for row in each.rows for p in by_key[row.key]["log_probs"]])
                check_tokens(old, each.row_K, len(each.rows))
                advantage_R = torch.tensor([advantage[row.key[0]] + steps.get(row.key, 0.0) for row in each.rows])
                first = tuple((row.key[0], row.key[1]) for row in each.rows) if epoch == start == 0 else ()
                passes.append(Turns(each, advantage_R, old, first))
            yield moved(passes, model.device)


STAGE = Stage(
    "grpo", 3, GrpoConfig, inputs=("collect", "grpo"), roles=(), run=run, trains=True,
    outputs=("certificates", "adapter/"),
)  # fmt: skip
