"""What a store holds after a year of nights: rows and bytes of a stage run, and how long PostgreSQL then searches.

    mkdir -p NIGHT/data && cp -r data/base NIGHT/data/
    turnwise run tiny --plain --set iterations=10 --home NIGHT       # a night
    python -m benchmarks.memory.store_size --home NIGHT              # its newest pipeline run, by kind
    python -m benchmarks.memory.store_size --home NIGHT --nights 365 # and PostgreSQL with as many of them (extra team, moto)

The first table has what the runs of that folder hold, and the mean of a stage run. With --nights a copy of the folder is
shared into a PostgreSQL and a moto server on loopback (`turnwise share`). There the rows of its runs are multiplied
under new ids. The second table has the size of MLflow's tables, the third what is asked: medians, the fastest in brackets.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.timed import cells, timed
from flows.book import EXPERIMENT
from flows.keep.share import share
from flows.workspace import open_workspace, stores
from stages.store import search
from stages.store.execute import readers
from stages.store.tables import TABLES
from stages.store.workspace import Workspace, silent

KINDS = {".safetensors": "weights", ".parquet": "rows as Parquet", ".json": "JSON", ".svg": "pictures"}
OF_RUNS = ("runs", "tags", "params", "metrics", "latest_metrics")
AGAIN = "lpad(to_hex(c), 8, '0')"
NAMES = ("inputs", "pipeline", "mlflow.parentRunId")  # tags whose value has run ids


def size(home: Path) -> None:
    """Print what the embedded store of a folder holds."""
    workspace = stores(home)
    runs = search.stage_runs(workspace.tracking.db)
    n, found = len(runs), dict[str, tuple[float, str]]()
    with closing(sqlite3.connect(home / "mlflow" / "mlflow.db")) as raw:
        for table in OF_RUNS:
            ((count,),) = raw.execute(f"select count(*) from {table}")
            found[f"MLflow's table {table}"] = count, "rows"
    found["MLflow's database"] = (home / "mlflow" / "mlflow.db").stat().st_size, "B"
    files = [one for one in (home / "mlflow" / "artifacts").rglob("*") if one.is_file()]
    found["files"] = len(files), "files"
    kinds: Counter[str] = Counter()
    for file in files:
        kinds[KINDS.get(file.suffix, "other files")] += file.stat().st_size
    found |= {kind: (size, "B") for kind, size in kinds.most_common()}
    found["DuckDB file"] = (home / "data" / "turnwise.duckdb").stat().st_size, "B"
    for table in TABLES.keys() - {"commits"}:
        if rows := workspace.replay.count(table, runs):
            found[f"rows of {table}"] = rows, "rows"
    ids = workspace.replay.read("turns", runs, ["prompt_ids", "action_ids"])
    found["tokens in turns, prompts"] = sum(len(one["prompt_ids"]) for one in ids), "tokens"
    found["tokens in turns, actions"] = sum(len(one["action_ids"]) for one in ids), "tokens"
    pipelines = len(workspace.tracking.runs(EXPERIMENT))
    print(f"{n} stage runs in {pipelines} pipeline runs\n\n| what | in all | a stage run |\n|---|---|---|")
    for what, (value, unit) in found.items():
        print(f"| {what} | {value:,.0f} {unit} | {value / n:,.1f} {unit} |")


def multiply(ask: Callable[..., Any], nights: int) -> None:
    """Put the rows of all runs into MLflow's tables, once more for each further night, under ids of their own."""
    own = {
        "run_uuid": f"{AGAIN} || substr(run_uuid, 9)",
        "start_time": "start_time + 86400000 * c::bigint",
        "tags.value": f"case when key in {NAMES} then regexp_replace(value, '[0-9a-f]{{8}}([0-9a-f]{{24}})', {AGAIN} || '\\1', 'g') "
        "when key = 'fingerprint' then md5(c || value) || md5(value) when key = 'sequence' then lpad(c::text, 12, '0') else value end",
    }
    for table in OF_RUNS:
        columns = [
            name for (name,) in ask(f"select column_name from information_schema.columns where table_name = '{table}'")
        ]
        values = ", ".join(own.get(f"{table}.{one}") or own.get(one, one) for one in columns)
        ask(
            f"insert into {table} ({', '.join(columns)}) select {values} from {table}, generate_series(1, {nights - 1}) c"
        )
    ask("analyze")


def questions(workspace: Workspace) -> dict[str, Callable[[int], Any]]:
    tracking = workspace.tracking
    run = tracking.runs("critic", 1)[0]
    collect = json.loads(run.tags["inputs"])["collect"][-1]
    return {
        "fingerprint that is there": lambda _: tracking.finished(run.tags["fingerprint"], "critic"),
        "fingerprint that is not": lambda _: tracking.finished("0" * 64, "critic"),
        "newest 20 pipeline runs": lambda _: tracking.runs(EXPERIMENT, 20),
        "runs that are open": lambda _: tracking.running(),
        "stage runs of a pipeline run": lambda _: tracking.children(run.tags["mlflow.parentRunId"]),
        "runs of critic that read a run of collect": lambda _: readers(workspace, collect, "critic"),
        "ids of all finished runs (verify, gc, share)": lambda _: tracking.finished_runs(),
    }


def in_postgres(home: Path, nights: int) -> None:
    from tests import team

    with tempfile.TemporaryDirectory() as folder, team.servers(Path(folder) / "empty") as store:
        copy = store.join(Path(shutil.copytree(home, Path(folder) / "copy")))
        workspace = open_workspace(copy)
        before, began = _bytes(store), time.perf_counter()
        new = share(workspace, silent, print).new
        print(f"\n{len(new)} runs shared in {time.perf_counter() - began:.0f} s\n")
        after = _bytes(store)
        first = {what: timed(asked, 7)[1] for what, asked in questions(workspace).items()}
        multiply(lambda query: store.server.ask(query, store.database), nights)
        all_bytes = _bytes(store)
        print(f"| PostgreSQL | 1 night | {nights} nights | a night |\n|---|---|---|---|")
        for what, size in all_bytes.items():
            one = (size - after[what]) / (nights - 1) / 1e6
            print(f"| {what} | {(after[what] - before[what]) / 1e6:.1f} MB | {size / 1e6:,.0f} MB | {one:.2f} MB |")
        print(f"\n| what is asked | 1 night | processor | {nights} nights | processor |\n|---|---|---|---|---|")
        for what, asked in questions(workspace).items():
            print(f"| {what} | {cells(first[what])} | {cells(timed(asked, 7)[1])} |", flush=True)


def _bytes(store: Any) -> dict[str, int]:
    """Of each of MLflow's tables of runs, with its indexes, and of the whole database."""
    found = {one: f"pg_total_relation_size('{one}')" for one in OF_RUNS} | {
        "the database": "pg_database_size(current_database())"
    }
    return {what: int(store.server.ask(f"select {how}", store.database)[0][0]) for what, how in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, required=True, help="a project folder with finished runs; it is only read")
    parser.add_argument("--nights", type=int, default=0, help="measure PostgreSQL with as many of them, too")
    args = parser.parse_args()
    size(args.home.resolve())
    if args.nights > 1:
        in_postgres(args.home.resolve(), args.nights)


if __name__ == "__main__":
    main()
