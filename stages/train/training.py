"""What critic, distill and the baselines share: rows to batches, and an adapter opened for training.

A training row is token ids as an engine produced them; text is never tokenised again here, except for the `general`
rows, which are a file of text (a supervised data set) in the first place.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from stages.frame.contract import Config, Context
from stages.frame.types import Row, Sleeper, TurnwiseError, UsageError
from stages.learn.adapter import new_adapter, open_adapter
from stages.learn.batches import Batch, pad_rows
from stages.learn.fit import lr_factor
from stages.learn.losses import completion_nll, group_advantages
from stages.llm.hf import check_adapter, load_base
from stages.llm.roles import mix
from stages.llm.tokens import ChatTokenizer


class OptimConfig(Config):
    """Keys that every stage with a gradient has. The rate is lr up to one iteration, then falls linearly to lr x
    lr_final at another.
    """

    lr: float = Field(1e-4, gt=0, description="AdamW learning rate. [ours]")
    lr_decay_start: int = Field(1000, ge=0, description="Iteration from which the rate falls linearly. [ours]")
    lr_decay_end: int = Field(1000, ge=0, description="Iteration at which it is lr x lr_final. [ours]")
    lr_final: float = Field(1.0, gt=0, le=1, description="Share of the rate that is left then. [ours]")
    clip: float = Field(1.0, gt=0, description="Largest gradient norm. [ours]")
    autocast: bool = Field(
        False,
        description="Passes compute in bfloat16 where torch's autocast does; weights, head and losses stay. [ours]",
    )

    def rate(self, iteration: int) -> float:
        """The learning rate of an iteration."""
        return self.lr * lr_factor(iteration, start=self.lr_decay_start, end=self.lr_decay_end, final=self.lr_final)


class PassConfig(OptimConfig):
    """And of every stage whose rows are a prompt and a completion each."""

    pass_tokens: int = Field(
        0,
        ge=0,
        description="Most tokens of one pass, padding included; a step is as many passes as it needs, with the same gradient. 0 = one pass a kind of row. [ours]",
    )


class MixedConfig(PassConfig):
    """And of critic and distill, whose steps hold rows of several kinds."""

    weight: Literal["token", "row"] = Field(
        "token",
        description="What counts alike in a step's loss: token, so that a long row counts for more, with its whole log-likelihood; or row, whatever its "
        "length. [paper: token; row ours]",
    )


def half(device: Any, on: bool) -> torch.autocast:
    """Passes within it compute in bfloat16 where torch's autocast does, if `on`. Losses belong outside, in fp32."""
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=on)


def check_temperature(context: Context) -> None:
    """Raises UsageError where a policy gradient would be of another distribution than the one that acted: log-probs are
    of temperature 1.
    """
    if (found := context.run.roles.policy_temperature) != 1:
        raise UsageError(
            f"roles.policy_temperature: a policy gradient wants actions sampled at temperature 1, found {found:g}; set it to 1"
        )


@dataclass(frozen=True)
class TrainRow:
    """One (prompt -> completion) to be learned. `key` says where it came from, e.g. (episode id, turn)."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    weight: float = 1.0
    key: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Part:
    """Rows of one kind within a step: their batch, weights and keys.

    normaliser: what the whole step's loss is divided by, where this is a part of it; None = what its own rows count.
    share: its completion tokens among those of its kind in the step.
    """

    batch: Batch
    weights_B: Tensor
    rows: tuple[TrainRow, ...]
    normaliser: float | None = None
    share: float = 1.0


def weighed(rows: Sequence[TrainRow], by: str) -> list[TrainRow]:
    """The rows with weights by which each counts alike in `mixed_nll` and `mean_nll`, times the weight that it has (by
    = row); or as they are (token).
    """
    return [replace(r, weight=r.weight / len(r.completion_ids)) for r in rows] if by == "row" else list(rows)


def target_rows(rows: Sequence[Row]) -> list[TrainRow]:
    """Rows of table `targets` as training rows: the student's prompt, never the teacher's."""
    return [
        TrainRow(tuple(r["student_ids"]), tuple(r["completion_ids"]), r["weight"], (r["episode_id"], r["turn"]))
        for r in rows
    ]


def general_rows(model_path: str, path: str) -> list[TrainRow]:
    """Rows of a JSONL file of {"role", "messages", "reply"}; reply ids end with the end token. Raises UsageError naming
    a broken line.
    """
    chats = ChatTokenizer(model_path)
    found = []
    for row in read_jsonl(path):
        found.append(
            TrainRow(chats.encode(row["messages"]), reply_ids(chats, row["reply"]), key=("general", row["role"]))
        )
    return found


def reply_ids(chats: ChatTokenizer, text: str) -> tuple[int, ...]:
    """Ids of a reply that no engine produced, with the end token."""
    return (*chats.tokenizer(text, add_special_tokens=False).input_ids, chats.tokenizer.eos_token_id)


def read_jsonl(path: str) -> list[dict[str, Any]]:
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"wanted a JSONL file of role rows at {path!r}, found none; make it with: turnwise pretrain")
    rows = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            rows.append({"role": str(row["role"]), "messages": list(row["messages"]), "reply": str(row["reply"])})
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise UsageError(
                f"{file.name}, line {number}: wanted an object with role, messages and reply ({error})"
            ) from error
    return rows


def trainable(context: Context, start: Path | None) -> Any:
    """The base model with the adapter of folder `start`, or a fresh one, in training mode. Raises UsageError for an
    adapter of another base.
    """
    model = context.run.model
    if isinstance(context.engine, Sleeper):  # it and the training share a device, and need it one after the other
        context.engine.sleep()
    base, _ = load_base(model.path, model.dtype)
    if model.gradient_checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    if start is not None:
        check_adapter(start, context.engine.model_hash)
        return open_adapter(base, start).train()
    # The seed of the run, not of the stage: every stage of a run that starts afresh starts from the same adapter.
    return new_adapter(
        base, rank=model.lora_rank, alpha=model.lora_alpha, seed=mix("adapter", context.run.seed) % 2**31
    ).train()


def trainable_policy(context: Context) -> Any:
    """The model with the newest policy's adapter, or a fresh one, in training mode."""
    return trainable(context, context.artifact(context.policy_run, "adapter") if context.policy_run else None)


def by_scenario(heads: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of `episodes` by scenario."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for head in heads:
        groups[head["scenario_id"]].append(head)
    return groups


def relative_advantages(groups: Iterable[Sequence[Row]]) -> dict[str, float]:
    """Advantage of each episode relative to its group, by episode id. Raises ValueError for a group of one."""
    found: dict[str, float] = {}
    for members in groups:
        returns = torch.tensor([head["total_reward"] for head in members])
        found.update(zip([head["episode_id"] for head in members], group_advantages(returns).tolist(), strict=True))
    return found


def mixed_batches(
    kinds: Mapping[str, tuple[Sequence[TrainRow], int]],
    *,
    main: str,
    epochs: int,
    rng: random.Random,
    pad_id: int,
    device: Any,
    pass_tokens: int = 0,
) -> Iterator[list[dict[str, Part]]]:
    """Batches that hold rows of every kind: kind -> (rows, rows a batch).

    `main` is gone through `epochs` times in a new order each time; the other kinds are drawn from, without repeats
    inside a batch. Kinds with no rows are left out. Every step then holds every kind: training the critic alone
    destroys the policy within a stage (docs/decisions.md). A step is one pass, or several of at most `pass_tokens`,
    each with one kind.
    """
    rows, size = kinds[main]
    for _ in range(epochs):
        order = rng.sample(range(len(rows)), len(rows))
        for start in range(0, len(order), size):
            chosen = {main: [rows[i] for i in order[start : start + size]]}
            for kind, (pool, count) in kinds.items():
                if kind != main and pool and count:
                    chosen[kind] = rng.sample(list(pool), min(count, len(pool)))
            yield step_passes(chosen, pass_tokens, pad_id, device)


def step_passes(
    chosen: Mapping[str, Sequence[TrainRow]], pass_tokens: int, pad_id: int, device: Any
) -> list[dict[str, Part]]:
    """One step's rows as passes whose losses add up to the step's. A row that is longer than `pass_tokens` is a pass of
    its own.
    """
    if not pass_tokens:
        return [{kind: make_part(picked, pad_id, device) for kind, picked in chosen.items()}]
    normaliser = sum(r.weight * len(r.completion_ids) for picked in chosen.values() for r in picked)
    found = []
    for kind, picked in chosen.items():
        tokens = sum(len(r.completion_ids) for r in picked)
        for group in by_length(picked, pass_tokens):
            share = sum(len(r.completion_ids) for r in group) / tokens
            found.append(
                {kind: replace(make_part(group, pad_id, device), normaliser=max(normaliser, 1e-9), share=share)}
            )
    return found


def by_length(rows: Sequence[TrainRow], pass_tokens: int) -> list[list[TrainRow]]:
    """Rows of like length together, as many as fit into `pass_tokens` when padded to the longest, at least one."""
    groups: list[list[TrainRow]] = []
    longest = 0
    for row in sorted(rows, key=lambda r: -len(r.prompt_ids) - len(r.completion_ids)):
        if not groups or (len(groups[-1]) + 1) * longest > pass_tokens:
            groups.append([])
            longest = len(row.prompt_ids) + len(row.completion_ids)
        groups[-1].append(row)
    return groups


def make_part(rows: Sequence[TrainRow], pad_id: int, device: Any) -> Part:
    batch = pad_rows([r.prompt_ids for r in rows], [r.completion_ids for r in rows], pad_id=pad_id)
    batch = Batch(batch.ids.to(device), batch.completion.to(device), batch.n_completion.to(device))
    return Part(batch, torch.tensor([r.weight for r in rows], device=device), tuple(rows))


def mixed_nll(
    model: Any, parts: Mapping[str, Part], *, autocast: bool = False
) -> tuple[Tensor, dict[str, float], dict[str, Tensor]]:
    """Weighted mean NLL a token over all rows of all kinds: (loss, "nll/<kind>" a token, row NLL (B,) by kind).

    L = sum_kinds sum_i w_i |y_i| nll_i / sum_kinds sum_i w_i |y_i|,   the sum below over all rows of the step, if these
    are a part of it
    """
    total, count, metrics, by_row = torch.zeros(()), torch.zeros(()), {}, {}
    whole = next((part.normaliser for part in parts.values()), None)
    for kind, part in parts.items():
        with half(part.batch.ids.device, autocast):
            nll_B, _ = completion_nll(model, part.batch)
        weight_B = part.weights_B * part.batch.n_completion
        total, count = total + (weight_B * nll_B).sum(), count + weight_B.sum()
        metrics[f"nll/{kind}"] = float(((weight_B * nll_B).sum() / weight_B.sum().clamp(min=1e-9)).detach())
        metrics[f"count/nll/{kind}"] = float(weight_B.sum())
        by_row[kind] = nll_B.detach()
    return (total / count.clamp(min=1e-9) if whole is None else total / whole), metrics, by_row


def of_step(parts: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of a step from those of its passes: means, in which "count/<name>" weighs <name>, without it all alike;
    of names that end in "_max" the largest. "count/<name>" adds up, for `fit_metrics` to weigh the step.
    """
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        having = [part for part in parts if name in part]
        if name.startswith("count/"):
            found[name] = sum(part[name] for part in having)
        else:
            found[name] = max(part[name] for part in having) if name.endswith("_max") else weighted(name, having)
    return found


def weighted(name: str, parts: Sequence[Mapping[str, float]]) -> float:
    """Mean of a metric over passes or steps that all have it, each weighed by its "count/<name>", 1 where there is
    none.
    """
    if len(parts) == 1:
        return parts[0][name]  # as it is: a product with its count and back would round it
    counts = [part.get(f"count/{name}", 1.0) for part in parts]
    return sum(c * part[name] for c, part in zip(counts, parts, strict=True)) / max(sum(counts), 1e-9)


@torch.no_grad()
def mean_nll(
    model: Any, rows: Sequence[TrainRow], *, pad_id: int, size: int = 128, pass_tokens: int = 0, autocast: bool = False
) -> float:
    """Mean NLL a token over rows by their weights, as in `mixed_nll`, in evaluation mode, `size` of them a pass or as
    many as `pass_tokens` allows.
    """
    was_training = model.training
    model.eval()
    total = count = 0.0
    groups = (
        by_length(rows, pass_tokens)
        if pass_tokens
        else [rows[start : start + size] for start in range(0, len(rows), size)]
    )
    for group in groups:
        part = make_part(group, pad_id, model.device)
        with half(model.device, autocast):
            nll_B, _ = completion_nll(model, part.batch)
        weight_B = part.weights_B * part.batch.n_completion
        total += float((weight_B * nll_B).sum())
        count += float(weight_B.sum())
    model.train(was_training)
    return total / max(count, 1e-9)


def pad_id(model: Any) -> int:
    """Any token serves: padding stands to the right, where no loss and no real token reads it."""
    found = model.config.pad_token_id
    return int(found if found is not None else 0)


MAX_GAP = "Largest mean |difference| of a token's log-prob, engine against trainer, at the weights that sampled, in nats; more stops the run. [ours]"


def check_gap(stage: str, history: Sequence[Mapping[str, float]], allowed: float) -> None:
    """After the first step, whose loss was worked out at the weights that sampled. The ratio of the clipped loss
    corrects a small gap, as it does any change of the policy; a large one says that the engine ran another model.
    Raises TurnwiseError.
    """
    if len(history) == 1 and not history[0]["gap_mean"] <= allowed:
        raise TurnwiseError(
            f"{stage}: wanted the engine's log-probs to be the trainer's (mean |difference| up to {allowed:g} nats a token), found "
            f"{history[0]['gap_mean']:.2g}; is model.path the model that the engine serves, and the adapter the one it loaded? Else raise {stage}.max_gap"
        )


def fit_metrics(stage: str, history: list[dict[str, float]]) -> dict[str, float]:
    """First values of a fit, means of the last five steps, each weighed by what it counts, and the number of steps; no
    steps, no losses.
    """
    metrics = {f"{stage}/steps": float(len(history))}
    for name in sorted({name for step in history for name in step if not name.startswith("count/")}):
        having = [step for step in history if name in step]
        metrics[f"{stage}/{name}_first"], metrics[f"{stage}/{name}"] = having[0][name], weighted(name, having[-5:])
    return metrics
