"""`turnwise plan PRESET`: the work, the memory and the hours of a run on a device, for a reader.

turnwise plan twenty_questions --device h200 --assume turns=10
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from flows import presets
from flows.cost.estimate import DECODE, HF_DECODE, HF_READ, READ, TRAIN, estimate
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
        f"{'stage':<9}{'runs':>5}{'episodes':>9}{'prompts':>9}{'read':>8}{'cached':>8}{'generated':>10}{'trained':>9}{'predicted':>10}{'steps':>7}{'PFLOP':>10}{'hours':>10}",
    ]
    names = (
        "runs", "episodes", "prompts", "read", "cached", "generated", "trained", "predicted", "steps", "pflop", "hours",
    )  # fmt: skip
    rows = [
        *found["stages"],
        {"stage": "all", **{name: sum(one[name] for one in found["stages"]) for name in (*names, "waiting_hours")}},
    ]
    for one in rows:
        cells = [
            one["runs"],
            *(short(one[name]) for name in names[1:8]),
            f"{one['steps']}",
            short(one["pflop"]),
            f"{one['hours']:.3g}",
        ]
        widths = (5, 9, 9, 8, 8, 10, 9, 10, 7, 10, 10)
        # A space of its own before each, or a number as wide as its column would run into the one before it.
        said.append(
            f"{one['stage']:<9}" + "".join(f" {cell:>{width - 1}}" for cell, width in zip(cells, widths, strict=True))
        )
    if waiting := rows[-1]["waiting_hours"]:
        said.append(f"of the hours, {waiting:.3g} wait for whoever answers inside the environment")
    read, decode = (HF_READ, HF_DECODE) if found["engine"] == "hf" else (READ, DECODE)
    said.append(
        f"shares assumed: {TRAIN:g} of the peak in training, {read:g} in reading prompts, {decode:g} of the bandwidth in decoding"
    )
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
    return [
        *said,
        "",
        *found["verdict"],
        f"Estimated, never measured on a GPU. To run it: turnwise run {found['preset']}",
    ]


def _sizes(name: str, parts: Mapping[str, float]) -> str:
    """A line with the sum of the parts, and each of them."""
    return f"{name:<9}{sum(parts.values()):6.1f}  {', '.join(f'{what} {size:.1f}' for what, size in parts.items())}"


def short(value: float) -> str:
    """3 significant digits with k, M, G."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
