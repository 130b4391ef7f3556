"""The values of a finished self_ac run on later episodes: their accuracy and their uses.

    V(s_k), k = 0 .. N: the head on the last token of s_k + critic prompt, one plain pass a state, no gradient, in
        evaluation mode

States are the turns' own prompts, as the engine produced them, then the conversation after the last turn. Metrics and
plots use only states k < N: the text of s_N may show the verdict. Source: Self-AC slides, which promise a free value
function; the measures are ours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stages.frame.contract import Context
from stages.frame.sections import ModelConfig
from stages.frame.types import Engine, Episode, Outcome, Row, Sleeper
from stages.learn.adapter import base_of, open_adapter
from stages.learn.statistics import spearman
from stages.learn.value_head import ValueHead, load_head, state_values
from stages.learn.value_use import (
    abort_table,
    abort_thresholds,
    best_of_n,
    binned_returns,
    explained_variance,
    returns_to_go,
)
from stages.llm.hf import check_adapter, shared_base
from stages.llm.last_message import asked_after
from stages.llm.roles import Roles
from stages.store.tables import write_parquet

TABLE = "values/values.parquet"
BINS = 10


@dataclass(frozen=True)
class Critic:
    """A policy's model with adapter and value head, and what the head is asked with. gamma: of its returns."""

    model: Any
    head: ValueHead
    prompt_ids: tuple[int, ...]  # none where the head has a soft prompt
    gamma: float


@dataclass(frozen=True)
class Judged:
    """An episode with V of its states 0 .. N, and their returns to go: not known where it was cut short."""

    episode: Episode
    values: tuple[float, ...]
    returns: tuple[float, ...] | None


@dataclass(frozen=True)
class Values:
    """metrics that are defined, files by artifact path."""

    metrics: dict[str, float]
    files: dict[str, Path]


def open_critic(context: Context, roles: Roles) -> Critic | None:
    """The critic of the newest policy; None where that is not one of self_ac, or has no critic."""
    run = context.latest("self_ac")
    if run is None or run != context.policy_run:
        return None
    return load_critic(context.engine, roles, context.run.model, lambda path: context.artifact(run, path))


def load_critic(engine: Engine, roles: Roles, model: ModelConfig, artifact: Callable[[str], Path]) -> Critic | None:
    """The critic of a self_ac run, None where it trained none. Raises UsageError where it does not fit the model."""
    # As it was trained, whatever the config of the present run says.
    trained = json.loads(artifact("config.json").read_text(encoding="utf-8"))["config"]["self_ac"]
    if (name := critic_adapter(trained)) is None:
        return None
    check_adapter(artifact(name), engine.model_hash)
    if isinstance(engine, Sleeper):  # as before a training
        engine.sleep()
    adapted = open_adapter(shared_base(model.path, model.dtype), artifact(name)).eval()
    head = load_head(artifact("head"), width=base_of(adapted).config.hidden_size).to(adapted.device)
    return Critic(adapted, head.eval(), () if head.soft_len else prompt_ids(engine, roles), float(trained["gamma"]))


def critic_adapter(trained: Mapping[str, Any]) -> str | None:
    """The artifact with the adapter that V is read through, by the run's config; None where no loss trained V."""
    if not trained["alpha"]:
        return None
    return "critic" if trained.get("separate") else "adapter"


def prompt_ids(engine: Engine, roles: Roles) -> tuple[int, ...]:
    """What asks for a value behind a state. Raises UsageError where the chat template has no place for it."""
    return asked_after(engine, roles.templates["value"].strip())


@torch.no_grad()
def values_of(critic: Critic, states: Sequence[Sequence[int]], *, batch: int = 16) -> list[float]:
    """V of each state, in order; `batch` states a pass, like lengths together."""
    found: list[float] = state_values(critic.model, critic.head, states, critic.prompt_ids, batch_size=batch).tolist()
    return found


def judge_episodes(critic: Critic, engine: Engine, roles: Roles, episodes: Sequence[Episode]) -> list[Judged]:
    """V and returns to go of every state of every episode. An episode needs a turn."""
    finals = engine.encode_all([roles.policy(e.messages) for e in episodes])
    states = [[*(turn.prompt_ids for turn in e.turns), final] for e, final in zip(episodes, finals, strict=True)]
    flat = iter(values_of(critic, [ids for mine in states for ids in mine]))
    return [
        Judged(e, tuple(next(flat) for _ in mine), actual_returns(e, critic.gamma))
        for e, mine in zip(episodes, states, strict=True)
    ]


def actual_returns(episode: Episode, gamma: float) -> tuple[float, ...] | None:
    if episode.outcome == Outcome.TRUNCATED:
        return None
    return tuple(returns_to_go([turn.reward for turn in episode.turns], gamma=gamma))


def report(judged: Sequence[Judged], folder: Path) -> Values:
    """What the values know of the returns, over all states k < N and by turn, as metrics, tables and plots."""
    known = [
        (k, v, r)
        for j in judged
        if j.returns
        for k, (v, r) in enumerate(zip(j.values[:-1], j.returns[:-1], strict=True))
    ]
    metrics = {"value/states": float(len(known)), **agreement(known, "value")}
    for turn in sorted({k for k, _, _ in known}):
        metrics |= agreement([one for one in known if one[0] == turn], f"value/turn{turn}")
    values, returns = [v for _, v, _ in known], [r for _, _, r in known]
    aborts = abort_rows(judged)
    tables = {"calibration": binned_returns(values, returns, BINS), "abort": aborts, "curve": mean_by_turn(judged)}
    files = {TABLE: write_values(judged, folder)}
    for name, rows in tables.items():
        files[f"values/{name}.json"] = folder / f"{name}_of_values.json"
        files[f"values/{name}.json"].write_text(json.dumps(rows, indent=1))
    files["values/values.png"] = draw(tables, folder / "values.png")
    return Values({name: value for name, value in metrics.items() if not math.isnan(value)}, files)


def agreement(known: Sequence[tuple[int, float, float]], name: str) -> dict[str, float]:
    """Explained variance, rank correlation, and how far the values lie above the returns on average."""
    values, returns = [v for _, v, _ in known], [r for _, _, r in known]
    return {
        f"{name}/explained_variance": explained_variance(values, returns),
        f"{name}/rank_correlation": spearman(values, returns),
        f"{name}/bias": sum(values) / len(values) - sum(returns) / len(returns) if known else math.nan,
    }


def abort_rows(judged: Sequence[Judged]) -> list[Row]:
    """The table of early abort, after the fact. An episode that was cut short is one that was not won."""
    values = [j.values[:-1] for j in judged]
    tokens = [[len(turn.completion.token_ids) for turn in j.episode.turns] for j in judged]
    return abort_table(values, tokens, [j.episode.won for j in judged], abort_thresholds(values)) if judged else []


def mean_by_turn(judged: Sequence[Judged]) -> list[Row]:
    """Mean V of the states that an action follows, by turn, of won episodes and of the others."""
    groups: dict[tuple[int, bool], list[float]] = {}
    for j in judged:
        for k, value in enumerate(j.values[:-1]):
            groups.setdefault((k, j.episode.won), []).append(value)
    return [
        {"turn": k, "won": is_won, "n": len(found), "mean_value": sum(found) / len(found)}
        for (k, is_won), found in sorted(groups.items())
    ]


def best_of(rounds: Sequence[Sequence[Episode]], judged: Sequence[Judged] | None) -> dict[str, float]:
    """Win rates of one of n episodes a scenario: random, of the largest V(s_{N-1}), an oracle's. rounds: n lists.

    A scenario with an episode that says nothing about the policy is left out, and the others are counted. judged: of
    all that are left; None = no critic, so that nothing but chance and the oracle can choose.
    """
    complete = [tries for tries in zip(*rounds, strict=True) if all(e.outcome.trainable for e in tries)]
    if not complete:
        return {"best_of/scenarios": 0.0}
    before_last = {j.episode.id: j.values[-2] for j in judged or ()}
    values = [[before_last[e.id] for e in tries] for tries in complete] if judged is not None else None
    rates = best_of_n([[e.won for e in tries] for tries in complete], values)
    return {
        "best_of/scenarios": float(len(complete)),
        **{f"best_of/{name}_win_rate": rate for name, rate in rates.items()},
    }


def write_values(judged: Sequence[Judged], folder: Path) -> Path:
    """One row a state: episode_id, turn, terminal (turn N), value, return_to_go (null where it was cut short)."""
    import pyarrow as pa

    rows: list[Row] = [
        {
            "episode_id": j.episode.id,
            "turn": k,
            "terminal": k == len(j.values) - 1,
            "value": v,
            "return_to_go": j.returns[k] if j.returns else None,
        }
        for j in judged
        for k, v in enumerate(j.values)
    ]
    kinds = {
        "episode_id": pa.string(),
        "turn": pa.int32(),
        "terminal": pa.bool_(),
        "value": pa.float64(),
        "return_to_go": pa.float64(),
    }
    return write_parquet(pa.Table.from_pylist(rows, pa.schema(list(kinds.items()))), folder / "values.parquet")


def draw(tables: Mapping[str, Sequence[Row]], path: Path) -> Path:
    """Three panels: the return by the value; the value by turn, won and lost; what early abort saves and loses."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    calibration, curve, abort = figure.subplots(1, 3)
    means = [(row["mean_value"], row["mean_return"]) for row in tables["calibration"]]
    ends = [bound(x for pair in means for x in pair) for bound in (min, max)] if means else [0.0, 1.0]
    calibration.plot(ends, ends, color="0.8")
    calibration.plot(*zip(*means, strict=True) if means else ([], []), "o")
    calibration.set(xlabel="V(s), tenths of the states", ylabel="mean return that followed", title="Calibration")
    for is_won, label in ((True, "won"), (False, "not won")):
        mine = [row for row in tables["curve"] if row["won"] == is_won]
        curve.plot([row["turn"] for row in mine], [row["mean_value"] for row in mine], "o-", label=label)
    curve.set(xlabel="turn", ylabel="mean V before the action", title="Value along an episode")
    curve.legend()
    abort.plot([0, 1], [0, 1], color="0.8")
    abort.plot([row["tokens_saved"] for row in tables["abort"]], [row["wins_lost"] for row in tables["abort"]], "o-")
    abort.set(xlabel="share of tokens saved", ylabel="share of wins lost", title="Early abort by V, after the fact")
    figure.savefig(path, dpi=100)
    return path
