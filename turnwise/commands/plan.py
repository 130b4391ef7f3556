"""`turnwise plan PRESET`: the work, the memory and the hours of a run on a device, for a reader.

turnwise plan twenty_questions --device h200 --assume turns=10
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from flows import presets
from flows.cost.estimate import estimate
from flows.report import answer
from flows.workspace import find_home


def plan(args: Namespace) -> int:
    """turnwise plan PRESET"""
    os.chdir(find_home(args.home))  # a config's paths count from there
    found = estimate(presets.load(args.preset, args.set), args.device, args.devices, args.assume)
    return answer(args, found, lines(found))


def lines(found: Mapping[str, Any]) -> list[str]:
    """The plan for a reader."""
    said = [
        f"{found['preset']}: {found['iterations']} iterations of {found['method']}; {found['model']}, {found['parameters'] / 1e9:.3g} B parameters "
        f"in {found['dtype']}, adapter {found['adapter'] / 1e6:.3g} M",
        "assumed, change with --assume NAME=NUMBER: "
        + ", ".join(f"{name} {value:g}" for name, value in found["assumed"].items()),
        "",
        f"{'stage':<9}{'runs':>5}{'episodes':>9}{'prompts':>9}{'read':>8}{'cached':>8}{'generated':>10}{'trained':>9}{'predicted':>10}{'steps':>7}{'PFLOP':>10}{'time':>8}{'each':>8}  known",
    ]
    names = (
        "runs", "episodes", "prompts", "read", "cached", "generated", "trained", "predicted", "steps", "pflop", "hours",
    )  # fmt: skip
    total = {name: sum(one[name] for one in found["stages"]) for name in (*names, "waiting_hours")}
    known = min(one["known"] for one in found["stages"])  # "assumed", if one is
    rows = [*found["stages"], {"stage": "all", **total, "known": known}]
    for one in rows:
        cells = [
            one["runs"], *(short(one[name]) for name in names[1:8]), f"{one['steps']}", short(one["pflop"]),
            span(one["hours"]), span(one["hours"] / one["runs"]) if one is not rows[-1] else "-",
        ]  # fmt: skip
        widths = (5, 9, 9, 8, 8, 10, 9, 10, 7, 10, 8, 8)
        # A space of its own before each, or a number as wide as its column would run into the one before it.
        said.append(
            f"{one['stage']:<9}" + "".join(f" {cell:>{width - 1}}" for cell, width in zip(cells, widths, strict=True))
            + f"  {one['known']}"
        )  # fmt: skip
    if waiting := rows[-1]["waiting_hours"]:
        said.append(f"of the time, {span(waiting)} wait for whoever answers inside the environment")
    if overlapped := found["overlapped_hours"]:
        less = span(rows[-1]["hours"] - overlapped)
        said.append(
            f"of the time, {span(overlapped)} of collect go by while an iteration trains (collect.lag): {less} in all"
        )
    if (n := found["trainers"]) > 1:
        sent = sum(one["link_gb"] for one in found["stages"])
        said.append(f"{n} devices train; each takes {short(sent * 1e9)}B from the others")
    said += ["", "what times and memory rest on, change with --assume; tokens rest on what is assumed above:"]
    for name, rate in found["rates"].items():
        when = f" ({rate['when']})" if rate["when"] else ""
        said.append(f"{name:<16}{rate['value']:>7g} {rate['what']}: {rate['known']}{when}")
    said += ["", f"GiB on one {found['device']}:"]
    said += [_sizes(name, parts) for name, parts in found["memory_gib"].items()]
    disk = found["disk_gib"]
    said += ["", "GiB of the machine that trains, at most:", _sizes("memory", found["host_gib"])]
    kept = f"rows {disk['rows']:.1f} before compression"
    said.append(
        f"disk     {disk['weights'] + disk['rows']:6.1f}  weights {disk['weights']:.1f} after {found['iterations']} iterations, {kept}"
    )
    said.append(
        f"with gc  {disk['weights after gc'] + disk['rows']:6.1f}  weights {disk['weights after gc']:.1f} (turnwise gc --yes), {kept}"
    )
    most = max(found["stages"], key=lambda one: (one["at_once"], one["prompts"]))
    return [
        *said,
        "",
        f"{most['stage']} decodes {most['at_once']:.0f} requests at once; what they share stands in the engine's cache once.",
        *found["verdict"],
        f"Estimated: no run of this size was measured. To run it: turnwise run {found['preset']}",
    ]


def _sizes(name: str, parts: Mapping[str, float]) -> str:
    """A line with the sum of the parts, and each of them."""
    return f"{name:<9}{sum(parts.values()):6.1f}  {', '.join(f'{what} {size:.1f}' for what, size in parts.items())}"


def short(value: float) -> str:
    """3 significant digits with k, M, G, T."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def span(hours: float) -> str:
    """3 significant digits in hours, minutes or seconds."""
    for unit, size in (("h", 1.0), ("m", 1 / 60)):
        if hours >= size:
            return f"{hours / size:.3g}{unit}"
    return f"{hours * 3600:.3g}s"
