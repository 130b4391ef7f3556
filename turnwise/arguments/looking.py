"""The commands that look at what was run, or keep it in order: stages, presets, compare, runs, show, view, lineage, sql, export, import, replay, data, gc, check, verify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turnwise.arguments.command import add_set, command


def add(commands: Any) -> None:
    """Add them to the commands."""
    stages = command(
        commands,
        "stages",
        "List the stages: inputs, outputs, config with defaults, units and sources.",
        "turnwise stages critic",
    )
    stages.add_argument("name", metavar="STAGE", nargs="?", help="this one only")
    what = "List the presets that ship with turnwise, or those that are named, by the first sentence of each."
    presets = command(
        commands, "presets", what, "turnwise presets demo my/nightly.toml", module="turnwise.commands.presets"
    )
    presets.add_argument("preset", metavar="PRESET", nargs="*", help="name of a preset, or a path that ends in .toml")
    what = "Set runs side by side: what differs in their configs, what they came to, and their curves."
    compare = command(commands, "compare", what, "turnwise compare 3f9c f775", module="turnwise.commands.compare")
    compare.add_argument(
        "runs", metavar="RUN", nargs="+", help="pipeline runs, or runs of one stage; the start of an id is enough"
    )
    runs = command(commands, "runs", "List pipeline runs, newest first.", "turnwise runs --limit 5")
    runs.add_argument("--limit", type=int, default=20, metavar="N", help="how many (default: 20)")
    runs.add_argument("--stage", default="pipeline", metavar="STAGE", help="runs of this stage instead")
    what = "Show a run, or an episode with futures, critiques and refinements beside it."
    show = command(commands, "show", what, "turnwise show 3f9c", module="turnwise.commands.show")
    show.add_argument("what", metavar="RUN|EPISODE", help="the start of its id is enough")
    ledger = "of a run of self_ac: what each turn of an episode of its first step earned, and its share of the loss"
    show.add_argument("--ledger", metavar="EPISODE", help=ledger)
    became = (
        "of a run of collect or evaluate: only episodes that became this; failed: the environment or a simulator did"
    )
    show.add_argument("--outcome", choices=("won", "lost", "failed"), help=became)
    show.add_argument(
        "--disagree",
        action="store_true",
        help="only episodes with turns where the critic said Yes and the episode was lost, or No and it was won",
    )
    show.add_argument("--episodes", type=int, default=8, metavar="N", help="most episodes that are listed (default: 8)")
    what = "Write one or two runs as a page that needs no other file: what differs, curves, and the episodes with all that was said of their turns."
    view = command(commands, "view", what, "turnwise view 3f9c", module="turnwise.commands.view")
    view.add_argument("run", metavar="RUN", help="pipeline run; the start of its id is enough")
    view.add_argument("other", metavar="RUN2", nargs="?", help="another one, shown beside it")
    view.add_argument("--out", type=Path, metavar="FILE", help="where it is written (default: data/views/RUN.html)")
    most = "most episodes of each run, evenly from its stage runs (default: 200)"
    view.add_argument("--episodes", type=int, default=200, metavar="N", help=most)
    what = "Make traces of some of a run's episodes, for MLflow's page: turns, replies, verdicts and rewrites."
    traces = command(commands, "traces", what, "turnwise traces 3f9c", module="turnwise.commands.traces")
    traces.add_argument("run", metavar="RUN", help="pipeline run; the start of its id is enough")
    traces.add_argument("--episodes", type=int, default=20, metavar="N", help="most episodes (default: 20)")
    what = "Show which stage runs made a run, what each of them read, and who made it."
    lineage = command(
        commands, "lineage", what, "turnwise lineage 3f9c --svg lineage.svg", module="turnwise.commands.lineage"
    )
    lineage.add_argument("run", metavar="RUN", help="pipeline or stage run; the start of its id is enough")
    lineage.add_argument("--svg", type=Path, metavar="FILE", help="also draw it there")
    what = "Ask the rows of all runs in SQL, as DuckDB has it; docs/sql.md has queries to begin with."
    example = "turnwise sql 'select outcome, count(*) from episodes join runs using (run_id) group by all' --of 3f9c"
    sql = command(commands, "sql", what, example, module="turnwise.commands.sql")
    sql.add_argument("query", metavar="QUERY", help="a query; beside the tables it may join the relation runs")
    sql.add_argument(
        "--of",
        metavar="RUN",
        help="the relation runs has the stage runs of this pipeline run (default: of all finished)",
    )
    export = command(
        commands,
        "export",
        "Write a run's rows, adapter, merged model or critic to a folder, or all of it as a bundle.",
        "turnwise export 3f9c out --what adapter",
    )
    export.add_argument("run", metavar="RUN", help="pipeline or stage run; the start of its id is enough")
    export.add_argument("folder", metavar="FOLDER", type=Path, help="a new folder")
    kinds = "rows as Parquet; the best adapter; the base model with it merged in; that model with its value head, of self_ac; all that a pipeline run left, for `replay` and `import` (default: rows)"
    export.add_argument("--what", choices=("rows", "adapter", "merged", "critic", "bundle"), default="rows", help=kinds)
    what = "Take the runs of a bundle into this project: shown, rerun and reused as if they had been made here."
    take_in = command(commands, "import", what, "turnwise import out", module="turnwise.commands.bundle")
    take_in.add_argument("folder", metavar="BUNDLE", type=Path, help="a folder that export --what bundle wrote")
    own = "let its runs name this module, an environment of one's own that lies in this project (repeatable)"
    take_in.add_argument("--module", action="append", default=[], metavar="NAME", help=own)
    take_in.set_defaults(function="turnwise.commands.bundle:take_in")
    what = (
        "Work out again what a run stored, without an engine or an environment, and name the first stage that differs."
    )
    replay = command(commands, "replay", what, "turnwise replay 3f9c:critic:0", module="turnwise.commands.bundle")
    which = (
        "a bundle's folder or a run, one stage of it as RUN:STAGE:ITERATION; or an episode: the stages with rows of it"
    )
    replay.add_argument("what", metavar="BUNDLE|RUN|EPISODE", help=which)
    what = "Fetch the published data of a task into a folder, or list what there is."
    data = command(commands, "data", what, "turnwise data fetch game24", module="turnwise.commands.data")
    data.add_argument("action", choices=("fetch", "list"), help="fetch one task's data, or list all tasks")
    data.add_argument("task", metavar="TASK", nargs="?", help="which task, to fetch")
    data.add_argument(
        "--from", dest="source", type=Path, metavar="PATH", help="a folder that holds the files, instead of the network"
    )
    data.add_argument(
        "--into", type=Path, metavar="FOLDER", help="where a folder of the task's name is made (default: data/tasks)"
    )
    what = (
        "Say which weights of older iterations no run needs any more; delete them with --yes. They can be made again."
    )
    gc = command(commands, "gc", what, "turnwise gc --keep 3 --yes", module="turnwise.commands.gc")
    gc.add_argument(
        "--keep",
        type=int,
        default=2,
        metavar="N",
        help="newest iterations of each pipeline run that are kept (default: 2)",
    )
    gc.add_argument("--yes", action="store_true", help="delete; without it nothing is changed")
    what = "Hold an environment against the contract that those that ship keep: one line a claim, exit status 1 where one is broken."
    check = command(
        commands,
        "check",
        what,
        'turnwise check my.traffic --reply "Action: stop" --reply "Action: go"',
        module="turnwise.commands.check",
    )
    check.add_argument("name", metavar="NAME", help="an environment: my.traffic is my/traffic.py of the project folder")
    check.add_argument(
        "--reply",
        action="append",
        default=[],
        metavar="TEXT",
        help="a reply that it can read, as a policy says it (repeatable); said again and again they end an episode "
        "(default: REPLIES of the module)",
    )
    check.add_argument("--answer", metavar="TEXT", help="what an LLM inside it always says, where it needs one")
    add_set(check)
    what = "List stored rows that belong to no finished run, which are never read; rows that no environment may leave; and artifacts that are not what their run wrote."
    verify = command(commands, "verify", what, "turnwise verify --mend", module="turnwise.commands.verify")
    verify.add_argument(
        "--mend", action="store_true", help="let what has changed be made again by the next command that needs it"
    )
