"""The curves of README as one SVG: docs/pictures/curves.svg, drawn from rows of docs/results/*.jsonl by `make docs`.

A line is the mean validation win rate of an arm over its seeds, a band goes from the worst seed to the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, TOP, WIDE, HIGH = 880, 372, 52, 66, 350, 226
STEP = 432  # from panel to panel


@dataclass(frozen=True)
class Arm:
    """One line of a panel. method: as the rows call it."""

    method: str
    label: str
    colour: str
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """file, task: which rows. most: episodes at the right end of the axis."""

    title: str
    below: str
    file: str
    task: str
    most: int
    arms: tuple[Arm, ...]


PANELS = (
    Panel(
        "NLAC: words name the fault",
        "win rate; three steps, five seeds",
        "ladder",
        "fault",
        1120,
        (
            Arm("nlac", "NLAC", "#3f51b5"),
            Arm("parser", "a parser of the words", "#00796b", dashed=True),
            Arm("rft", "RFT, reward alone", "#e65100"),
            Arm("frozen", "NLAC, critic never trained", "#8d6e63", dashed=True),
        ),
    ),
    Panel(
        "Self-AC: every right step is paid",
        "win rate; eight steps, five seeds (PPO three)",
        "self_ac",
        "8 steps, each paid",
        3840,
        (
            Arm("td_mean", "Self-AC, mean of TD(1..5)", "#3f51b5"),
            Arm("td1", "Self-AC, one step", "#7986cb"),
            Arm("grpo", "GRPO", "#e65100"),
            Arm("ppo", "PPO", "#8d6e63", dashed=True),
        ),
    ),
)


def curves() -> str:
    """The picture. Raises ValueError where an arm has no rows."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">',
        "<title>Validation win rate over episodes</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#fff"/>',
    ]
    for i, panel in enumerate(PANELS):
        parts += [f'<g transform="translate({LEFT + i * STEP} {TOP})">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel) -> list[str]:
    parts = [
        f'<text y="-38" font-size="16" font-weight="bold">{escape(panel.title)}</text>',
        f'<text y="-18" fill="#555">{escape(panel.below)}</text>',
    ]
    for share in (0.0, 0.5, 1.0):
        y = HIGH * (1 - share)
        parts.append(f'<path d="M0 {y:.1f}H{WIDE}" stroke="#ddd"/>')
        parts.append(f'<text x="-8" y="{y + 4:.1f}" text-anchor="end" fill="#555">{share:g}</text>')
    for share in (0.0, 0.5, 1.0):
        x, anchor = WIDE * share, ("start", "middle", "end")[round(2 * share)]
        parts.append(
            f'<text x="{x:.1f}" y="{HIGH + 18}" text-anchor="{anchor}" fill="#555">{panel.most * share:,.0f}</text>'
        )
    parts.append(f'<text x="{WIDE * 0.25:.1f}" y="{HIGH + 18}" text-anchor="middle" fill="#555">episodes</text>')
    for n, arm in enumerate(panel.arms):
        parts += _line(panel, arm, x=(n % 2) * 190, y=HIGH + 44 + (n // 2) * 20)
    return parts


def _line(panel: Panel, arm: Arm, x: int, y: int) -> list[str]:
    """Its band, its line, and its entry of the legend at x, y."""
    points = _points(panel, arm.method)

    def path(which: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{WIDE * min(n / panel.most, 1):.1f},{HIGH * (1 - rate):.1f}" for n, rate in which)

    dash = ' stroke-dasharray="6 4"' if arm.dashed else ""
    band = [(n, low) for n, low, _, _ in points] + [(n, high) for n, _, _, high in reversed(points)]
    return [
        f'<polygon points="{path(band)}" fill="{arm.colour}" opacity="0.12"/>',
        f'<polyline points="{path([(n, mean) for n, _, mean, _ in points])}" fill="none" stroke="{arm.colour}" stroke-width="2.5"{dash}/>',
        f'<path d="M{x} {y - 4}h22" stroke="{arm.colour}" stroke-width="2.5"{dash}/>',
        f'<text x="{x + 28}" y="{y}">{escape(arm.label)}</text>',
    ]


def _points(panel: Panel, method: str) -> list[tuple[float, float, float, float]]:
    """(episodes, worst, mean, best) of each iteration that was evaluated, over the runs of an arm."""
    from tables import rows

    from flows.evidence.study.rows import evaluated

    found = rows({"data": panel.file, "show": "rate", "method": method, "task": panel.task})
    if not found:
        raise ValueError(f"docs/results/{panel.file}.jsonl has no rows of {method!r} on {panel.task!r}.")
    points = []
    for column in zip(*map(evaluated, found), strict=True):
        rates = [one["win_rate"] for one in column]
        episodes = sum(one["episodes"] for one in column) / len(column)
        points.append((episodes, min(rates), sum(rates) / len(rates), max(rates)))
    return points
