"""The stage runs that made a run: the graph of inputs, each run once, as values, text and drawing. Ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from xml.etree import ElementTree

from flows.registry import STAGES
from stages.store.execute import lineage_inputs
from stages.store.runs import RunInfo
from stages.store.workspace import Workspace

PARTS = ("base", "start", "iteration", "final")  # in the order of a pipeline run
BOX, GAP = (92, 34), (38, 22)  # of the drawing, in pixels: width and height


@dataclass(frozen=True)
class Node:
    """A stage run. pipeline: the pipeline run that made it, "" where none did. inputs: upstream stage -> run ids."""

    run_id: str
    stage: str
    part: str
    iteration: int
    pipeline: str
    inputs: Mapping[str, Sequence[str]]

    @property
    def title(self) -> str:
        return f"{self.stage} {self.iteration if self.part == 'iteration' else self.part}"

    @property
    def place(self) -> tuple[Any, ...]:
        """By which nodes are sorted: what a node reads comes before it."""
        return *self.column, list(STAGES).index(self.stage) if self.stage in STAGES else len(STAGES), self.run_id

    @property
    def column(self) -> tuple[int, int]:
        return PARTS.index(self.part), self.iteration if self.part == "iteration" else 0


def runs_of(summary: Mapping[str, Any]) -> list[str]:
    """Ids of all stage runs of a pipeline run, its own and those that it reused."""
    ends = [summary[part]["run_id"] for part in ("base", "final") if summary[part]]
    return list(dict.fromkeys([*ends, *(run_id for row in summary["iterations"] for run_id in row["runs"].values())]))


def lineage(run_ids: Sequence[str], workspace: Workspace, *, pipeline: str = "") -> list[Node]:
    """These stage runs and all that they were made from, at any depth, sorted.

    pipeline: the run that made most of them, if any; its runs are looked up at once. Raises MissingInput for an unknown
    run.
    """
    known = {info.run_id: info for info in workspace.tracking.children(pipeline)} if pipeline else {}
    found, waiting = dict[str, Node](), list(run_ids)
    while waiting:
        if (run_id := waiting.pop()) in found:
            continue
        info = known.get(run_id) or workspace.tracking.info(run_id)
        found[run_id] = _node(info, lineage_inputs(workspace, run_id))
        waiting += [each for runs in found[run_id].inputs.values() for each in runs]
    return sorted(found.values(), key=lambda node: node.place)


def _node(info: RunInfo, inputs: Mapping[str, Sequence[str]]) -> Node:
    tags = info.tags
    part = tags.get("part", "iteration")
    return Node(
        info.run_id, tags["stage"], part if part in PARTS else "iteration", int(tags["iteration"]), tags.get("pipeline", ""), inputs
    )  # fmt: skip


def text(nodes: Sequence[Node], of: str = "") -> list[str]:
    """A line a run, with the titles of its inputs. Inputs stand above the runs that read them.

    of: the pipeline run that is shown. Runs that another one made are marked.
    """
    by_id, lines = {node.run_id: node for node in nodes}, list[str]()
    for _, group in groupby(nodes, key=lambda node: node.column):
        column = list(group)
        lines.append(column[0].part if column[0].part != "iteration" else f"iteration {column[0].iteration}")
        for node in column:
            reads = "; ".join(_reads(name, [by_id[run_id] for run_id in runs]) for name, runs in node.inputs.items())
            made = f"  (made by run {node.pipeline[:8]})" if of and node.pipeline and node.pipeline != of else ""
            lines.append(f"  {node.stage:<10}{node.run_id[:8]}{f'  <- {reads}' if reads else ''}{made}")
    return lines


def _reads(name: str, nodes: Sequence[Node]) -> str:
    """ "collect 0-3"; by id where two of them are of one iteration."""
    numbers = [node.iteration for node in nodes]
    if len(set(numbers)) < len(numbers):
        return f"{name} {', '.join(node.run_id[:8] for node in nodes)}"
    spans = [[pair[0] for pair in group] for _, group in groupby(zip(sorted(numbers), range(len(numbers)), strict=True), key=lambda pair: pair[0] - pair[1])]  # fmt: skip
    return f"{name} {', '.join(str(span[0]) if len(span) == 1 else f'{span[0]}-{span[-1]}' for span in spans)}"


def svg(nodes: Sequence[Node]) -> str:
    """The graph as a drawing: a column an iteration, a row a stage. Lines come only from the newest run of each
    upstream stage; more would hide each other. The mouse shows the id of a run.
    """
    columns = list(dict.fromkeys(node.column for node in nodes))
    stages = sorted({node.stage for node in nodes}, key=lambda name: [*STAGES, name].index(name))
    at = {node.run_id: _corner(columns.index(node.column), stages.index(node.stage)) for node in nodes}
    width, height = (GAP[i] + (BOX[i] + GAP[i]) * n for i, n in enumerate((len(columns), len(stages))))
    view = {"viewBox": f"0 0 {width} {height}", "width": str(width), "height": str(height), "font-family": "sans-serif", "font-size": "11"}  # fmt: skip
    root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **view})
    ElementTree.SubElement(root, "rect", {"width": "100%", "height": "100%", "fill": "white"})
    for node in nodes:
        for source in (runs[-1] for runs in node.inputs.values() if runs and runs[-1] in at):
            ElementTree.SubElement(root, "path", {"d": _line(at[source], at[node.run_id]), "fill": "none", "stroke": "#8aa"})  # fmt: skip
    for node in nodes:
        root.append(_box(node, *at[node.run_id]))
    return ElementTree.tostring(root, encoding="unicode")


def _corner(column: int, row: int) -> tuple[int, int]:
    return GAP[0] + column * (BOX[0] + GAP[0]), GAP[1] + row * (BOX[1] + GAP[1])


def _line(source: tuple[int, int], target: tuple[int, int]) -> str:
    """From the right side of a box to the left side of another; within a column around the boxes between them."""
    (x, y), (to_x, to_y) = source, target
    middle = BOX[1] // 2
    if x == to_x:
        side = x + BOX[0]
        return (
            f"M{side} {y + middle} C{side + GAP[0]} {y + middle} {side + GAP[0]} {to_y + middle} {side} {to_y + middle}"
        )
    half = GAP[0] // 2
    return f"M{x + BOX[0]} {y + middle} C{x + BOX[0] + half} {y + middle} {to_x - half} {to_y + middle} {to_x} {to_y + middle}"


def _box(node: Node, x: int, y: int) -> ElementTree.Element:
    group = ElementTree.Element("g")
    ElementTree.SubElement(group, "title").text = f"{node.title}: run {node.run_id}"
    frame = {"x": str(x), "y": str(y), "width": str(BOX[0]), "height": str(BOX[1]), "rx": "5"}
    ElementTree.SubElement(group, "rect", {**frame, "fill": "#eef4f6", "stroke": "#456"})
    for line, (words, colour) in enumerate(((node.title, "#123"), (node.run_id[:8], "#678"))):
        place = {"x": str(x + BOX[0] // 2), "y": str(y + 14 + 13 * line), "text-anchor": "middle", "fill": colour}
        ElementTree.SubElement(group, "text", place).text = words
    return group
