"""Shows a run or an episode. An episode is a transcript with the critic's words beside every turn; it also says whether
training kept its tokens.

    turnwise show RUN
    turnwise show EPISODE
    turnwise show RUN --ledger EPISODE
    turnwise show RUN --outcome lost --disagree

A model's text is never read as markup of the terminal.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from flows.book import EXPERIMENT, SUMMARY
from flows.evidence.study import keep
from flows.look.certificate import all_clear, difference
from flows.look.ledger import ledger_table, read_ledger
from flows.look.view.episodes import VALUES, WRITERS
from flows.look.view.verdicts import WRONG, disagreement, result
from flows.report import emit, ending, header, sparkline, table_row
from flows.rerun import stored_summary
from flows.telling import Iteration, Summary
from flows.workspace import find_home, open_workspace
from stages.frame.types import MissingInput, Row, UsageError
from stages.store.execute import lineage_inputs
from stages.store.workspace import Workspace
from turnwise.commands import listed
from turnwise.output import visible

PLAIN_WIDTH = 140  # where output is no terminal


def show(args: Namespace) -> int:
    """turnwise show RUN|EPISODE, and turnwise show RUN --ledger EPISODE"""
    workspace = open_workspace(find_home(args.home))
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
    if args.ledger is not None:
        found = read_ledger(workspace, args.what, args.ledger)
        emit(found) if args.json else console.print(ledger_table(found))
        return 0
    run_id = _find_run(workspace, args.what)
    listed.check_filters(workspace, args, run_id)
    if run_id is None:
        found = read_episode(workspace, args.what)
        emit(found) if args.json else console.print(transcript(visible(found)))
    elif workspace.tracking.experiment(run_id) == keep.EXPERIMENT:
        found = keep.read_study(workspace, run_id)
        emit(found["rows"]) if args.json else console.print(found["tables"], markup=False)
    elif workspace.tracking.experiment(run_id) == EXPERIMENT:
        if workspace.tracking.is_finished(run_id):  # a run that ended otherwise may have none
            workspace.tracking.read_json(run_id, SUMMARY)  # a damaged one is told
        summary = stored_summary(workspace, run_id)
        emit(summary) if args.json else console.print(_pipeline(workspace, run_id, summary), markup=False)
    else:
        described = read_stage_run(workspace, run_id)
        described["episodes"] = listed.kept_episodes(workspace, described, args.outcome, args.disagree)
        emit(described) if args.json else console.print(_stage_run(visible(described), args.episodes), markup=False)
    return 0


def read_episode(workspace: Workspace, prefix: str) -> dict[str, Any]:
    """An episode with its turns, and the judgements, targets and certificates that runs made from it."""
    tracking, replay = workspace.tracking, workspace.replay
    try:
        episode = replay.find_episode(prefix, tracking.is_finished)
    except UsageError:
        raise UsageError(
            f"No run and no episode starts with {prefix!r}. See: turnwise runs, and turnwise show RUN for its episodes."
        ) from None
    mine = f"episode_id = '{episode['episode_id']}'"
    return {
        "episode": episode,
        "turns": replay.rows("turns", [episode["run_id"]], where=mine),
        **{
            table: replay.rows(table, listed.runs_about(workspace, episode["run_id"], stages), where=mine)
            for table, stages in WRITERS.items()
        },
        "values": read_values(workspace, episode["run_id"], episode["episode_id"]),
    }


def read_values(workspace: Workspace, run_id: str, episode_id: str) -> list[float]:
    """V of the states 0..N of an episode. None if the run that played it read no values."""
    import pyarrow.parquet as pq

    try:
        path = workspace.tracking.artifact(run_id, VALUES)
    except MissingInput:  # a policy without a head, or an episode that was collected
        return []
    rows = pq.read_table(path, filters=[("episode_id", "=", episode_id)]).to_pylist()
    return [row["value"] for row in sorted(rows, key=lambda row: row["turn"])]


def read_stage_run(workspace: Workspace, run_id: str) -> dict[str, Any]:
    """A stage run's inputs, results and some of its episodes, the lost ones first."""
    info = workspace.tracking.info(run_id)
    finished = info.status == "FINISHED"
    stage = workspace.tracking.experiment(run_id)
    tables = ("episodes", "turns", "targets", "judgements", "priorities", "certificates")
    counts = {table: workspace.replay.count(table, [run_id]) for table in tables} if finished else {}
    episodes = workspace.replay.rows("episodes", [run_id]) if counts.get("episodes") else []
    keys = ("episode_id", "scenario_id", "outcome", "total_reward", "n_turns")
    return {
        "run_id": run_id,
        "stage": stage,
        "name": info.name,
        "seed": info.tags.get("seed"),
        "status": info.status,
        "started": datetime.fromtimestamp(info.started).astimezone().isoformat(timespec="seconds"),
        "seconds": None if info.ended is None else round(info.ended - info.started, 1),
        "iteration": int(info.tags.get("iteration", -1)),
        "pipeline": info.tags.get("pipeline"),
        "rerun_of": info.tags.get("rerun_of"),
        "changed": info.tags.get("changed"),
        "error": info.tags.get("error"),
        "inputs": lineage_inputs(workspace, run_id) if finished else {},
        "metrics": dict(sorted(info.metrics.items())),
        "rows": {table: n for table, n in counts.items() if n},
        "episodes": [{key: row[key] for key in keys} for row in sorted(episodes, key=lambda row: row["total_reward"])],
    }


def transcript(found: Mapping[str, Any]) -> RenderableType:
    """The conversation on the left; futures, critique, refinement and target of each turn on the right."""
    episode = found["episode"]
    title = f"episode {episode['episode_id']}  scenario {episode['scenario_id']} ({episode['split']})  iteration {episode['iteration']}"
    ended = f"{episode['outcome']}, reward {episode['total_reward']:g}, {episode['n_turns']} turns"
    table = Table(show_header=True, expand=True, show_lines=True)
    table.add_column("what happened", ratio=1, overflow="fold")
    table.add_column("what the critic said", ratio=1, overflow="fold")
    opening, certified = _opening(found), found.get("certificates") or ()
    if opening:
        table.add_row(opening, "")
    for turn in found["turns"]:
        said = [row for row in found["judgements"] if row["turn"] == turn["turn"]]
        made = [row for row in found["targets"] if row["turn"] == turn["turn"]]
        happened = _turn(turn, _parts(turn, found["turns"]))
        if broken := difference(certified, turn["turn"]):
            happened.append("\n").append(_labelled("tokens differ", broken, style="red"))
        judged = [_judgement(row, disagreement(row, turn["action"], result(episode))) for row in said]
        table.add_row(happened, Text("\n").join([*_value(found, turn["turn"]), *judged, *map(_target, made)]))
    parts: list[RenderableType] = [Rule(Text(title)), table, Text(ended, style="bold")]
    if values := found.get("values"):
        span = f"{values[0]:.2f} -> {values[-2]:.2f} before the last action, {values[-1]:.2f} at the end"
        parts.append(Text(f"V {sparkline(values)}  {span}"))
    parts += map(Text, all_clear(certified))
    if episode["error"]:
        parts.append(Text(f"error: {episode['error']}"))
    return Group(*parts)


def _value(found: Mapping[str, Any], turn: int) -> list[Text]:
    """What the value head gave to the state before this turn's action."""
    values = found.get("values") or ()
    return [Text(f"V {values[turn]:.2f}", style="magenta")] if turn < len(values) else []


def _opening(found: Mapping[str, Any]) -> Text:
    """What the policy was told before its first turn."""
    first = found["turns"][0]["state_len"] if found["turns"] else None
    return Text("\n").join(
        _labelled(message["role"], str(message.get("content") or ""))
        for message in found["episode"]["messages"][:first]
    )


def _parts(turn: Row, turns: list[Row]) -> list[int]:
    """All turns of the reply that this turn belongs to. They have one state."""
    return [one["turn"] for one in turns if one["state_len"] == turn["state_len"]]


def _turn(turn: Row, reply: list[int]) -> Text:
    part = reply.index(turn["turn"]) + 1
    parts = [Text(f"turn {turn['turn']}", style="bold")]
    if turn["malformed"]:
        parts.append(_labelled("unreadable reply", turn["text"]))
    elif len(reply) > 1:
        parts[0].append(f" (part {part} of {len(reply)} of a reply)")
        parts.append(_labelled("part", turn["action"], style="cyan"))
    else:
        parts += [_labelled("thought", turn["thought"]), _labelled("action", turn["action"], style="cyan")]
    if part == len(reply):  # no part but the last is answered
        parts.append(_labelled("observation", turn["observation"]))
    if turn["reward"] or turn["terminated"] or turn["truncated"]:
        end = "terminated" if turn["terminated"] else "truncated" if turn["truncated"] else ""
        parts.append(_labelled("reward", f"{turn['reward']:g} {end}".strip()))
    return Text("\n").join(parts)


def _judgement(row: Row, wrong: str) -> Text:
    """A judgement is of a freshly sampled action in the turn's state, which need not be the action that was taken."""
    style = {"yes": "green", "no": "red"}.get(row["verdict"], "yellow")
    parts = [_labelled("judged action", row["action"], style="cyan")]
    parts += [Text(future) for future in row["futures"]]  # begins with "Future:"
    parts.append(Text(row["critique"], style=style))  # begins with "Optimality:"
    if row["refined"] and row["refined"] != row["action"]:
        parts.append(_labelled("refined to", row["refined"], style="bold"))
    if wrong:
        parts.append(_labelled("critic and outcome disagree", f"it {WRONG[wrong]}", style="bold red"))
    return Text("\n").join(parts)


def _target(row: Row) -> Text:
    return _labelled(f"target of the {row['role']}", row["completion"])


def _labelled(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"{label}: ", "dim"), (text, style))


def _pipeline(workspace: Workspace, run_id: str, summary: Mapping[str, Any]) -> str:
    info = workspace.tracking.info(run_id)
    lines = [f"run {run_id}  {info.name}  {info.status}"]
    if old := info.tags.get("rerun_of"):
        lines.append(
            f"stages before {info.tags['rerun_from']} are those of run {old[:8]}; changed from there on: "
            f"{info.tags['changed']}"
        )
    lines.append(header())
    rows = [
        Iteration(one["iteration"], one["runs"], one["metrics"], one["seconds"], tuple(one["reused"]))
        for one in summary["iterations"]
    ]
    lines += [table_row(row) for row in rows]
    lines += ["", "stage runs:"]
    for row in rows:
        runs = ", ".join(f"{name} {one[:8]}" for name, one in row.runs.items())
        lines.append(f"  {'base' if row.iteration < 0 else row.iteration}: {runs}")
    lines += [
        f"  {part} on test: evaluate {summary[part]['run_id'][:8]}" for part in ("base", "final") if summary[part]
    ]
    if info.status == "FINISHED":
        lines += ["", *ending(Summary(**summary))[:-1]]
    elif info.tags.get("error"):
        lines += ["", f"ended by {info.tags['error']}. The same command goes on from the last finished stage."]
    shown = summary["final"] or summary["base"]
    if shown:
        lines.append(f"Its episodes: turnwise show {shown['run_id'][:8]}")
    return "\n".join(lines)


def _stage_run(described: Mapping[str, Any], most: int) -> str:
    seconds = "" if described["seconds"] is None else f", {described['seconds']:.1f} s"
    lines = [
        f"{described['stage']} run {described['run_id']}  {described['name']}  seed {described['seed']}  iteration {described['iteration']}  {described['status']}{seconds}"
    ]
    lines += [f"{key}: {described[key]}" for key in ("pipeline", "rerun_of", "changed", "error") if described[key]]
    lines += [f"input {name}: {', '.join(one[:8] for one in ids)}" for name, ids in described["inputs"].items()]
    lines += [f"rows of {table}: {n}" for table, n in described["rows"].items()]
    lines += [f"  {key:<36}{value:>12.5g}" for key, value in described["metrics"].items()]
    lines += listed.lines(described, most)
    return "\n".join(lines)


def _find_run(workspace: Workspace, what: str) -> str | None:
    """Id of the run that starts with `what`. None if there is none. Raises UsageError if there are several."""
    try:
        return workspace.tracking.find(what)
    except UsageError as error:
        if "several" in str(error):
            raise
        return None
