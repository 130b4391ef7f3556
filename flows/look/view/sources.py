"""The stage runs of a pipeline run whose episodes are shown, and a choice of episodes where they are too many."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from stages.frame.types import Row

PLAYERS = ("collect", "evaluate")


@dataclass(frozen=True)
class Source:
    """A stage run that played episodes. part: "base", "start" or "final"; "" within an iteration."""

    run_id: str
    stage: str
    iteration: int
    part: str = ""

    @property
    def title(self) -> str:
        return f"{self.stage} {self.part or self.iteration}"


def sources(summary: Mapping[str, Any]) -> list[Source]:
    """In the order in which they ran. Each is named once."""
    base, final, rows = summary["base"], summary["final"], summary["iterations"]
    found = [Source(base["run_id"], "evaluate", -1, "base")] if base else []
    for row in rows:
        part = "start" if row["iteration"] < 0 else ""
        found += [Source(row["runs"][name], name, row["iteration"], part) for name in PLAYERS if name in row["runs"]]
    found += [Source(final["run_id"], "evaluate", final["iteration"], "final")] if final else []
    return list({one.run_id: one for one in reversed(found)}.values())[::-1]


def titles(summary: Mapping[str, Any]) -> dict[str, str]:
    """Stage run -> what it is called, such as "refine 3"; all stages of the pipeline run."""
    others = {run: f"{name} {row['iteration']}" for row in summary["iterations"] for name, run in row["runs"].items()}
    return {**others, **{one.run_id: one.title for one in sources(summary)}}


def choose(heads: Sequence[Row], played_by: Sequence[Source], told: Collection[str], n: int) -> list[Row]:
    """At most n episodes, evenly from each stage run, in the order of the stage runs.

    From collect, episodes with judgements come first (`told`, by id). Else a hash of the scenario decides, so two runs
    show the same ones.
    """
    queues: dict[str, list[Row]] = {one.run_id: [] for one in played_by}
    for head in heads:
        queues[head["run_id"]].append(head)
    collects = {one.run_id for one in played_by if one.stage == "collect"}

    def rank(head: Row) -> tuple[bool, str]:
        mark = hashlib.sha256(head["scenario_id"].encode(errors="replace")).hexdigest()
        return head["run_id"] in collects and head["episode_id"] not in told, mark

    layers = zip_longest(*(sorted(mine, key=rank) for mine in queues.values()))
    chosen = [head for layer in layers for head in layer if head is not None][:n]
    place = {run_id: at for at, run_id in enumerate(queues)}
    return sorted(chosen, key=lambda head: place[head["run_id"]])
