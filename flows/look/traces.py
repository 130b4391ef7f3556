"""Episodes of a pipeline run as MLflow's traces. They come from the store: nothing is traced while a run works."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flows.look.view.episodes import read_episodes
from flows.rerun import stored_summary
from stages.store.mlflow_traces import Span
from stages.store.workspace import Workspace

SHOWN = 40  # characters of an action in a span's name


def traces(workspace: Workspace, run_id: str, n: int) -> dict[str, Span]:
    """At most n episodes of the run as spans, by their ids: those that `turnwise view` shows, with their known times.

    An episode begins with its stage run, because its own start is not stored. A turn's time is its share of the
    generation. Later judgements of a turn stand at its end and take no time.
    """
    summary = stored_summary(workspace, run_id)
    shown = read_episodes(workspace, summary, workspace.tracking.read_json(run_id, "config.json"), n)
    began = {one: workspace.tracking.info(one).started for one in {e["played_by"] for e in shown.episodes}}
    return {e["id"]: _episode(e, began[e["played_by"]]) for e in shown.episodes}


def _episode(episode: Mapping[str, Any], began_s: float) -> Span:
    now, turns = began_s, list[Span]()
    for turn in episode["turns"]:
        turns.append(_turn(turn, now))
        now = turns[-1].end_s
    told = {key: episode[key] for key in ("outcome", "result", "reward", "error")}
    known = {key: episode[key] for key in ("by", "split", "scenario", "iteration")}
    end_s = max(now, began_s + (episode["seconds"] or 0.0))
    name = f"{episode['result']}: {episode['by']}, {episode['id'][:8]}"
    return Span(name, "AGENT", began_s, end_s, {"messages": episode["opening"]}, told, known, turns)


def _turn(turn: Mapping[str, Any], start_s: float) -> Span:
    end_s = start_s + (turn["seconds"] or 0.0)
    said = {key: turn[key] for key in ("thought", "action", "observation", "reward", "end")}
    counted = {"tokens": turn["n_tokens"], "prompt_tokens": turn["prompt"], "malformed": turn["malformed"]}
    counted |= turn["credit"] or {}
    below = [_judged(one, end_s) for one in turn["judgements"]]
    below += [
        Span(f"{one['role']}, {one['by']}", "LLM", end_s, end_s, {"prompt_tokens": one["prompt"]}, {"reply": one["completion"]}, {"weight": one["weight"], "tokens": len(one["tokens"])})
        for one in turn["targets"]
    ]  # fmt: skip
    name = f"turn {turn['turn']}: {' '.join(turn['action'].split())[:SHOWN]}"
    return Span(name, "CHAIN", start_s, end_s, {}, {"text": turn["text"], **said}, counted, below)


def _judged(one: Mapping[str, Any], at_s: float) -> Span:
    """A verdict, with the futures it read and the rewrite it led to."""
    told = {"verdict": one["verdict"], "critique": one["critique"], "rewritten": one["refined"], "notes": one["notes"]}
    asked = {"action": one["action"], "futures": one["futures"]}
    return Span(
        f"{one['verdict']}: evaluator, {one['by']}", "EVALUATOR", at_s, at_s, asked, told, {"disagrees": one["wrong"]}
    )
