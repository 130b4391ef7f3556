"""Texts of a pipeline's run: its name, summary and description on MLflow's page, and the figures of its adapter.

A reader of two runs side by side sees what they are, how they differ, and their results.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flows import presets
from flows.presets import RunConfig
from stages.store.models import Version
from stages.store.notes import Link, code, run_link
from stages.store.runs import MAX_VALUE, SET, differences, without_password

NAMED = 3  # changes that a run's name tells; the others are counted
NAMED_LENGTH = 24  # characters of a changed value in a name
LISTED, LONG = 20, 60  # changes that the description tells, and characters of a value; all are params of the run


Changes = Mapping[str, tuple[Any, Any]]
"""`section.key` -> the value before and the value now; None where there is none."""


@dataclass(frozen=True)
class Asked:
    """How a run was asked for. changed: differences from the preset, or from the run that this one leaves;
    `section.key` -> the value there and the run's.
    """

    command: str = ""
    changed: Changes = field(default_factory=dict)
    leaves: str = ""  # "rerun critic 1 of 3f9c0a1b", where it leaves another run
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def params(self) -> dict[str, Any]:
        """What differs, as params of the run."""
        return {f"{SET}{key}": new for key, (_, new) in self.changed.items()}


@dataclass(frozen=True)
class Iteration:
    """The result of one iteration. win_rate and its 95 % interval are of the validation split, None without evaluation."""

    iteration: int
    runs: Mapping[str, str]  # stage -> run id
    metrics: Mapping[str, float]
    seconds: float  # of the stages' own work, evaluation left out; a reused stage counts what it took when it ran
    reused: tuple[str, ...] = ()
    cpu_s: float = 0.0  # as seconds, but processor time

    @property
    def win_rate(self) -> float | None:
        return self.metrics.get("evaluate/win_rate")


@dataclass(frozen=True)
class Summary:
    """A whole run, as `turnwise run --json` prints it."""

    run_id: str
    preset: str
    status: str
    seconds: float
    base: Mapping[str, Any] = field(default_factory=dict)  # the base model on the test split
    final: Mapping[str, Any] = field(default_factory=dict)  # the best adapter on the test split
    iterations: Sequence[Mapping[str, Any]] = ()
    match: Mapping[str, Any] = field(default_factory=dict)  # against the champion: `flows.champion.compared`


def asked(preset: str, run: RunConfig, sets: Sequence[str]) -> Asked:
    """How `run` was asked for: `turnwise run preset --set ...`. Raises UsageError where there is no such preset."""
    before = presets.load(preset).model_dump(mode="json")
    return Asked(command_of(preset, sets), differences(before, run.model_dump(mode="json")))


def command_of(preset: str, sets: Sequence[str], *options: str) -> str:
    """The command that runs a preset."""
    changes = [part for item in sets for part in ("--set", item)]
    return without_password(shlex.join(["turnwise", "run", preset, *changes, *options]))


def run_name(run: RunConfig, how: Asked) -> str:
    """Preset, seed, and what else was changed, in few words: "tiny seed 0, critic.lr 0.0005"."""
    changed = changes_named({key: pair for key, pair in how.changed.items() if key != "seed"})
    return f"{run.preset} seed {run.seed}{f', {how.leaves}' if how.leaves else ''}{changed}"


def changes_named(changed: Changes, section: str = "") -> str:
    """The first changes, to be added to a name. section: whose keys go without it."""
    told = [f", {key.removeprefix(f'{section}.')} {_short(new)}" for key, (_, new) in changed.items()]
    return "".join(told[:NAMED]) + (f", {len(told) - NAMED} more" if len(told) > NAMED else "")


def changes_told(changed: Changes) -> str:
    """Every change with what was before: "critic.lr 0.0001 -> 0.01"; "nothing" where there is none."""
    told = [f"{key} {_text(old)} -> {_text(new)}" for key, (old, new) in changed.items()]
    return without_password(", ".join(told)) or "nothing"


def note(
    run: RunConfig, how: Asked, commit: Mapping[str, str], summary: Summary, link: Link, model: Version | None = None
) -> str:
    """A pipeline run's description in Markdown: what it is, result, changes, command, commit, links to stage runs."""
    parts = [f"{run.method} on {run.task.env}, {run.iterations} iterations, seed {run.seed}.", *_result(summary)]
    if summary.match:
        parts.append(f"Against the champion: {match_text(summary.match)}.")
    if how.command:
        differ = [
            f"{code(key)} {code(_short(new, LONG))} (there {code(_short(old, LONG))})"
            for key, (old, new) in how.changed.items()
        ]
        more = f" and {len(differ) - LISTED} more, which are params `{SET}*`" if len(differ) > LISTED else ""
        there = f"the run that it leaves ({how.leaves})" if how.leaves else f"the preset {run.preset}"
        parts.append(f"Differs from {there} in: {', '.join(differ[:LISTED]) or 'nothing'}{more}.")
    if model is not None:
        parts.append(f"Its adapter is registered as [{model.name}, version {model.number}]({model.link}).")
    if how.command:
        parts.append(f"Command: {code(how.command)}")
    if page := how.tags.get("prefect_page"):
        parts.append(f"Made by [this flow run]({page}).")
    local = " with local changes" if commit.get("git_dirty") == "true" else ""
    parts.append(f"Commit: {code(commit.get('git_commit', 'unknown'))}{local}")
    head = "\n\n".join(parts)
    return without_password(f"{head}\n\n{_stage_runs(summary, link, MAX_VALUE - len(head) - 200)}".strip())


def figures(run: RunConfig, how: Asked, commit: Mapping[str, str], summary: Summary) -> dict[str, Any]:
    """Facts about the run's final adapter, for the tags of its registered version."""
    test = {f"test_{key}": summary.final.get(key) for key in ("win_rate", "win_low", "win_high")}
    chosen = next(
        (one["win_rate"] for one in summary.iterations if one["iteration"] == summary.final["iteration"]), None
    )
    known = {**test, "base_test_win_rate": summary.base.get("win_rate"), "validation_win_rate": chosen}
    return {
        "preset": run.preset, "seed": run.seed, "iteration": summary.final["iteration"], "pipeline": summary.run_id, "run": summary.final["adapter"],
        **{key: f"{value:.4g}" for key, value in known.items() if value is not None}, **how.params, **commit,
    }  # fmt: skip


def rate_text(outcome: Mapping[str, Any]) -> str:
    """Win rate with its interval, as far as they are known."""
    if outcome.get("win_rate") is None:
        return "-"
    known = "win_low" in outcome and "win_high" in outcome
    return f"{outcome['win_rate']:.2f}" + (f" ({outcome['win_low']:.2f}-{outcome['win_high']:.2f})" if known else "")


def match_text(verdict: Mapping[str, Any]) -> str:
    """The decision on a candidate, and why: rates, common scenarios, and the difference with its interval."""
    word = "promoted" if verdict["promoted"] else "kept"
    other = f"version {verdict['against']}" if verdict["against"] else "the base model"
    if "difference" not in verdict:
        return f"{word}: {other} and the candidate have {verdict['scenarios']} scenarios in common, too few to tell"
    low, high = verdict["difference_low"], verdict["difference_high"]
    rates = f"the candidate wins {verdict['candidate']:.2f} and {other} {verdict['champion']:.2f}"
    return f"{word}: on {verdict['scenarios']} scenarios {rates}, difference {verdict['difference']:+.2f} (95 % {low:+.2f} to {high:+.2f})"


def _result(summary: Summary) -> list[str]:
    """Nothing for a run that has none yet."""
    rates = [one["win_rate"] for one in summary.iterations if one["win_rate"] is not None]
    lines = []
    if summary.base and summary.final:
        adapter = f"adapter of iteration {summary.final['iteration']} **{rate_text(summary.final)}**"
        lines.append(f"Win rate on test: base model {rate_text(summary.base)}, {adapter}.")
    if rates:
        lines.append(f"On validation: {rates[0]:.2f} -> {rates[-1]:.2f}, best {max(rates):.2f}.")
    if lines and summary.status != "FINISHED":
        lines.append(f"So far: the run is {summary.status.lower()}.")
    return [" ".join(lines)] if lines else []


def _stage_runs(summary: Summary, link: Link, room: int) -> str:
    """A table of links, a row an iteration. Where `room` (characters) is short, the oldest iterations are left out."""
    if not summary.iterations:
        return ""
    names = list(dict.fromkeys(name for one in reversed(summary.iterations) for name in one["runs"]))
    rows = [
        _row("base" if one["iteration"] < 0 else one["iteration"], one["runs"], names, link)
        for one in summary.iterations
    ]
    tests = [
        _row(f"{part}, test", {"evaluate": ended["run_id"]}, names, link)
        for part in ("base", "final")
        if (ended := getattr(summary, part))
    ]
    shown = _fitting([*rows, *tests], room)
    left_out = len(rows) + len(tests) - len(shown)
    rest = f"\n\n{left_out} earlier rows are left out: `turnwise show {summary.run_id[:8]}` has all."
    more = rest if left_out else ""
    return "\n".join([f"| stage runs | {' | '.join(names)} |", f"|---{'|---' * len(names)}|", *shown]) + more


def _row(title: object, runs: Mapping[str, str], names: Sequence[str], link: Link) -> str:
    return f"| {title} | {' | '.join(run_link(name, runs[name], link) if name in runs else '' for name in names)} |"


def _fitting(rows: Sequence[str], room: int) -> list[str]:
    """The last rows that fit, all of them where they do."""
    kept: list[str] = []
    for row in reversed(rows):
        room -= len(row) + 1
        if room < 0:
            break
        kept.insert(0, row)
    return kept


def _short(value: Any, length: int = NAMED_LENGTH) -> str:
    text = _text(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _text(value: Any) -> str:
    return "not set" if value is None else f"{value:g}" if isinstance(value, float) else without_password(str(value))
