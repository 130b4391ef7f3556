"""The kinds of evidence for a claim, and when it holds: paired runs of a study, metrics of these runs, programs. Ours.

Student's interval of a difference decides. Wholly above 0 the claim holds, wholly below 0 it does not, else it is
undecided. (A bootstrap of three seeds lies on one side of 0 whenever all three do. Chance alone does that in 1 of 4
cases.) A claim with several kinds of evidence holds if all of them do. It does not hold if one does not.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from flows.evidence.programs import Program, Said, half_width, number, root
from flows.evidence.study.figures import AXES, Mean, cost_to, differences, students_mean
from flows.evidence.study.rows import Row, evaluated
from flows.evidence.study.tables import rate

Verdict = Literal["holds", "does not hold", "not decided", "not run"]
Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Finding:
    """What was seen. verdict None: it is shown, but decides nothing."""

    figure: str
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Found:
    """All evidence: the table rows of a study, the metrics of their runs, and the programs' output."""

    rows: Sequence[Row]
    level: float
    metrics: Callable[[Row], Sequence[Metrics]]  # of each iteration, the base model first; none of a run elsewhere
    said: Mapping[Program, Said]

    def of(self, method: str) -> list[Row]:
        return [row for row in self.rows if row["method"] == method]


class Evidence(Protocol):
    """One piece of evidence for a claim: runs of these methods of the study, and programs."""

    @property
    def methods(self) -> tuple[str, ...]: ...

    @property
    def programs(self) -> tuple[Program, ...]: ...

    def find(self, found: Found) -> Finding: ...


NOT_RUN = Finding("–", "not run")


@dataclass(frozen=True)
class _Versus:
    """Runs of a method beside those of its controls."""

    method: str
    controls: tuple[str, ...]

    @property
    def methods(self) -> tuple[str, ...]:
        return (self.method, *self.controls)

    @property
    def programs(self) -> tuple[Program, ...]:
        return ()


@dataclass(frozen=True)
class _Output:
    """What a program printed."""

    name: str
    program: Program

    @property
    def methods(self) -> tuple[str, ...]:
        return (self.program.of,) if self.program.of else ()

    @property
    def programs(self) -> tuple[Program, ...]:
        return (self.program,)


@dataclass(frozen=True)
class Higher(_Versus):
    """The method's win rate on test above each control's, paired by task and seed."""

    def find(self, found: Found) -> Finding:
        parts = []
        for control in self.controls:
            by_task = differences(found.of(self.method), found.of(control))
            if not by_task:
                return NOT_RUN
            mean = students_mean(list(by_task.values()))
            parts.append(Finding(f"{rate(mean, '+.2f')} over {control}", decided(mean)))
        return Finding("; ".join(part.figure for part in parts), together(parts))


@dataclass(frozen=True)
class Sooner(_Versus):
    """The method reaches the study's level of the win rate on validation at less cost than each control, run by run.

    It holds if this is true for every pair of runs, and does not if the cost is higher in every pair. A run that never
    reached the level counts as later than all that did.
    """

    axis: str = "episodes"

    def find(self, found: Found) -> Finding:
        parts = []
        mine = self._costs(found, self.method)
        for control in self.controls:
            other = self._costs(found, control)
            pairs = [(mine[key], other[key]) for key in mine if key in other]
            if not pairs:
                return NOT_RUN
            less, more = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
            every = len(pairs)
            verdict: Verdict = "holds" if less == every else "does not hold" if more == every else "not decided"
            middle = statistics.median(b for _, b in pairs)
            parts.append(Finding(f"{control} {short(middle)}, more in {less} of {every}", verdict))
        own = f"{self.method} {short(statistics.median(mine.values()))} {AXES[self.axis]} to {found.level:g} (median)"
        return Finding("; ".join([own, *(part.figure for part in parts)]), together(parts))

    def _costs(self, found: Found, method: str) -> dict[tuple[str, int], float]:
        return {(row["task"], row["seed"]): cost_to(row, found.level, self.axis) for row in found.of(method)}


@dataclass(frozen=True)
class Elsewhere:
    """The same of another study, on one of its tasks: of its rows, which lie with the results. Not run where turnwise is
    installed without them.
    """

    study: str
    task: str
    evidence: Higher | Sooner
    decides: bool = True
    methods: tuple[str, ...] = field(default=(), init=False)
    programs: tuple[Program, ...] = field(default=(), init=False)

    def find(self, found: Found) -> Finding:
        folder = root()
        file = folder / "docs" / "results" / f"{self.study}.jsonl" if folder else None
        rows = map(json.loads, file.read_text("utf-8").splitlines()) if file and file.is_file() else ()
        mine = [row for row in rows if row["part"] == "table" and row["task"] == self.task]
        seen = self.evidence.find(replace(found, rows=mine))
        return Finding(f"{self.study}, {self.task}: {seen.figure}", seen.verdict if self.decides else None)


When = Literal["base", "last", "mean"]


@dataclass(frozen=True)
class Metric:
    """A metric of a method's runs: of the base model, of the last iteration that has it, or its mean over iterations."""

    method: str
    key: str
    when: When = "last"

    def values(self, found: Found) -> dict[tuple[str, int], float]:
        """By task and seed, of the runs that have it."""
        values = {}
        for row in found.of(self.method):
            points = found.metrics(row)
            asked = points[:1] if self.when == "base" else points[1:]
            seen = [point[self.key] for point in asked if self.key in point]
            if seen:
                values[row["task"], row["seed"]] = statistics.mean(seen) if self.when == "mean" else seen[-1]
        return values


@dataclass(frozen=True)
class Larger:
    """One metric above another, or above a number, run by run; `by` is what it has to be larger by."""

    name: str
    metric: Metric
    control: Metric | float
    by: float = 0.0
    decides: bool = True

    @property
    def methods(self) -> tuple[str, ...]:
        return (self.metric.method, *([self.control.method] if isinstance(self.control, Metric) else []))

    @property
    def programs(self) -> tuple[Program, ...]:
        return ()

    def find(self, found: Found) -> Finding:
        mine = self.metric.values(found)
        other = self.control.values(found) if isinstance(self.control, Metric) else dict.fromkeys(mine, self.control)
        keys = [key for key in mine if key in other]
        if not keys:
            return NOT_RUN
        mean = students_mean([[mine[key] - other[key] for key in keys]])
        a, b = (statistics.mean(side[key] for key in keys) for side in (mine, other))
        verdict = decided(Mean(mean.value - self.by, mean.low - self.by, mean.high - self.by))
        return Finding(f"{self.name} {a:.2f} against {b:.2f}, {rate(mean, '+.2f')}", verdict if self.decides else None)


@dataclass(frozen=True)
class Printed(_Output):
    """A cell of a program's output. It holds if it lies within bounds with its whole ± half-width, or above another
    cell. Without bounds or another cell it decides nothing.
    """

    read: Callable[[Said], str]
    most: float | None = None
    least: float | None = None
    more_than: Callable[[Said], str] | None = None

    def find(self, found: Found) -> Finding:
        if self.program not in found.said:
            return NOT_RUN
        said = found.said[self.program]
        try:
            text, other = self.read(said), self.more_than(said) if self.more_than else ""
            value, half = number(text), half_width(text)
            sides = [self.most - value] if self.most is not None else []
            sides += [value - self.least] if self.least is not None else []
            sides += [value - number(other)] if other else []
        except (LookupError, ValueError):
            return Finding(f"{self.name} the program did not print it", "not run")
        verdicts = [Finding("", decided(Mean(side, side - half, side + half))) for side in sides]
        told = f"{text} against {other}" if other else text
        return Finding(f"{self.name} {told}", together(verdicts) if verdicts else None)


@dataclass(frozen=True)
class Passes(_Output):
    """Tests, as pytest prints their number: one that failed refutes; where none was run nothing is known."""

    def find(self, found: Found) -> Finding:
        said = found.said.get(self.program)
        counted = re.findall(r"\d+ (?:passed|failed)", said.text) if said else []
        if said is None or not counted:
            return NOT_RUN
        failed = any("failed" in one for one in counted)
        return Finding(f"{self.name} {', '.join(counted)}", "does not hold" if failed or said.status else "holds")


@dataclass(frozen=True)
class CostOfAnEpisode(_Versus):
    """Processor time of learning, per episode and up to the level. Only the total up to the level decides."""

    def find(self, found: Found) -> Finding:
        total = Sooner(self.method, self.controls, "cpu_s").find(found)
        if total.verdict == "not run":
            return total
        each = []
        for method in (self.method, *self.controls):
            ends = [evaluated(row)[-1] for row in found.of(method)]
            each.append(f"{method} {statistics.mean(end['cpu_s'] / end['episodes'] for end in ends):.2f}")
        return Finding(f"CPU seconds an episode: {', '.join(each)}; {total.figure}", total.verdict)


def decided(mean: Mean) -> Verdict:
    """By an interval that is wholly on one side of 0; one without bounds decides nothing."""
    return "holds" if mean.low > 0 else "does not hold" if mean.high < 0 else "not decided"


def together(findings: Sequence[Finding]) -> Verdict:
    """Of all that decide: each must hold."""
    verdicts = [one.verdict for one in findings if one.verdict]
    for worst in ("not run", "does not hold", "not decided"):
        if worst in verdicts:
            return worst
    return "holds" if verdicts else "not decided"


def short(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.0f}"
