"""A store of 10,000 stage runs: look-ups by fingerprint, lists of runs, who read a run, and what commands take to start.

    python -m benchmarks.store                             # runs tiny once, and takes some ten minutes on two cores
    python -m benchmarks.store --runs 500 --home FOLDER    # multiplies the newest pipeline run of FOLDER, which grows

A pipeline run of the preset tiny is multiplied under new ids: its rows in MLflow's tables, and the JSON among its
artifacts. The first table asks what turnwise asks beside the obvious way to the same answer, MLflow's own search, which
the answers are compared with. The second has whole commands, each a process of its own, before and after. Medians, the
fastest in brackets; ratios are of processor time.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.timed import Times, cells, ratio, timed
from flows import presets
from flows.book import EXPERIMENT
from flows.workspace import open_workspace
from stages.store import artifacts
from stages.store.execute import lineage_inputs, readers
from stages.store.workspace import Workspace

COMMAND = [sys.executable, "-m", "flows.cli"]
NUMBERS = ("params", "latest_metrics", "metrics")  # tables that name no run but their own
ORDER = ["tags.sequence DESC", "attributes.start_time DESC"]
STAGE = "critic"


def pipeline_of(raw: sqlite3.Connection) -> list[str]:
    """Ids of the newest finished pipeline run and of its stage runs, in the order in which they started."""
    asked = "select run_uuid from runs join experiments using (experiment_id) where experiments.name = ? and status = 'FINISHED' order by start_time desc limit 1"
    if not (found := raw.execute(asked, [EXPERIMENT]).fetchone()):
        raise SystemExit(f"--home: wanted a project folder with a finished run of {EXPERIMENT}, found none.")
    members = (
        "select run_uuid from tags join runs using (run_uuid) where key = 'pipeline' and value = ? order by start_time"
    )
    return [found[0], *(one for (one,) in raw.execute(members, found))]


def copies(raw: sqlite3.Connection, root: Path, ids: Sequence[str], n: int) -> None:
    """Put n further pipeline runs beside the one that these ids are of."""
    marks = ", ".join("?" * len(ids))
    rows = {name: _rows(raw, f"select * from {name} where run_uuid in ({marks})", ids) for name in ("runs", "tags")}
    folders = [artifacts.folder_of(root, row["artifact_uri"]) for row in rows["runs"]]
    texts = [
        (file, file.read_text()) for folder in folders for file in folder.glob("*.json") if file.name != artifacts.SEAL
    ]
    pattern = re.compile("|".join(ids))
    for c in range(1, n + 1):

        def renamed(value: Any, c: int = c) -> Any:
            return pattern.sub(lambda hit: _new(hit[0], c), value) if isinstance(value, str) else value

        for name, found in rows.items():
            for row in found:
                own = [renamed(value) for value in _further(name, row, c, len(ids)).values()]
                raw.execute(f"insert into {name} ({', '.join(row)}) values ({', '.join('?' * len(row))})", own)
        for name in NUMBERS:
            columns = [row["name"] for row in _rows(raw, f"select name from pragma_table_info('{name}')", [])]
            own = [f"'{c:08x}' || substr(run_uuid, 9)" if one == "run_uuid" else one for one in columns]
            raw.execute(
                f"insert into {name} ({', '.join(columns)}) select {', '.join(own)} from {name} where run_uuid in ({marks})",
                ids,
            )
        for file, text in texts:
            place = file.parent.parent.with_name(_new(file.parts[-3], c)) / file.parent.name
            place.mkdir(parents=True, exist_ok=True)
            (place / file.name).write_text(renamed(text))
        for folder in folders:
            artifacts.seal(folder.parent.with_name(_new(folder.parts[-2], c)) / folder.name)
    raw.commit()


def _new(run_id: str, c: int) -> str:
    return f"{c:08x}{run_id[8:]}"


def _further(table: str, row: dict[str, Any], c: int, n_runs: int) -> dict[str, Any]:
    """The row in copy c, which started later, has fingerprints of its own, and goes on numbering."""
    if table == "runs":
        return {**row, "start_time": row["start_time"] + 60_000 * c}
    if table == "tags" and row["key"] == "fingerprint":
        return {**row, "value": hashlib.sha256(f"{c}{row['value']}".encode()).hexdigest()}
    if table == "tags" and row["key"] == "sequence":
        return {**row, "value": f"{10**6 + c * n_runs + int(row['value']):012d}"}
    return row


def _rows(raw: sqlite3.Connection, query: str, values: Sequence[Any]) -> list[dict[str, Any]]:
    found = raw.execute(query, values)
    return [dict(zip([one[0] for one in found.description], row, strict=True)) for row in found.fetchall()]


def questions(workspace: Workspace, of: str) -> Iterator[tuple[str, Callable[[int], Any], Callable[[int], Any]]]:
    """What, by turnwise and by MLflow's search. of: a run of critic."""
    from mlflow.tracking import MlflowClient

    tracking = workspace.tracking
    client: Any = MlflowClient(tracking.uri)
    known = {one.name: one.experiment_id for one in client.search_experiments()}

    def search(wanted: str, limit: int, stages: Sequence[str] = tuple(known)) -> list[Any]:
        found, token = [], None
        while len(found) < limit:
            page = client.search_runs([known[one] for one in stages], wanted, max_results=min(1000, limit - len(found)), order_by=ORDER, page_token=token)  # fmt: skip
            found, token = [*found, *page], page.token
            if not token:
                break
        return found

    def ids(runs: Sequence[Any]) -> list[str]:
        return [run.info.run_id for run in runs]

    def slowly_read(of: str, stage: str) -> list[str]:
        finished = ids(search("attributes.status = 'FINISHED'", 10**9, [stage]))
        return [one for one in finished if any(of in runs for runs in lineage_inputs(workspace, one).values())]

    key, none = tracking.tags(of)["fingerprint"], "0" * 64
    same = "attributes.status = 'FINISHED' and tags.fingerprint = '{}'"
    collect = lineage_inputs(workspace, of)["collect"][0]
    yield (
        "fingerprint that is there",
        lambda _: tracking.finished(key, STAGE),
        lambda _: ids(search(same.format(key), 1000, [STAGE]))[0],
    )
    yield (
        "fingerprint that is not",
        lambda _: tracking.finished(none, STAGE),
        lambda _: next(iter(ids(search(same.format(none), 1000, [STAGE]))), None),
    )
    yield (
        "newest 20 pipeline runs",
        lambda _: [one.run_id for one in tracking.runs(EXPERIMENT, 20)],
        lambda _: ids(search("", 20, [EXPERIMENT])),
    )
    yield (
        "runs that are open",
        lambda _: [one.run_id for one in tracking.running()],
        lambda _: ids(search("attributes.status = 'RUNNING'", 10**9)),
    )
    yield (
        "all finished runs",
        lambda _: tracking.finished_runs(),
        lambda _: ids(search("attributes.status = 'FINISHED'", 10**9)),
    )
    yield (
        f"runs of {STAGE} that read a run of collect",
        lambda _: readers(workspace, collect, STAGE),
        lambda _: slowly_read(collect, STAGE),
    )


def commands(home: Path, ids: Sequence[str], stage_run: str) -> dict[str, Times]:
    """Times of commands, each a process of its own."""
    argvs = {
        "turnwise --help": ["--help"],
        "turnwise runs": ["runs"],
        "turnwise show, of a pipeline run": ["show", ids[0]],
        "turnwise show, of a stage run": ["show", stage_run],
        "turnwise lineage": ["lineage", ids[0]],
        "turnwise verify": ["verify"],
    }

    def go(argv: Sequence[str]) -> None:
        where = [] if argv[0] == "--help" else ["--home", str(home)]
        subprocess.run([*COMMAND, *argv, *where], check=True, stdout=subprocess.DEVNULL)

    return {name: timed(lambda i, argv=argv: go(argv), 2)[1] for name, argv in argvs.items()}  # type: ignore[misc]


def tiny(home: Path) -> None:
    """A finished run of the preset tiny in a new project folder."""
    model = Path(presets.load("tiny").model.path)
    shutil.copytree(model, home / model)
    subprocess.run([*COMMAND, "run", "tiny", "--plain", "--quiet", "--home", str(home)], check=True, stdout=subprocess.DEVNULL)  # fmt: skip


def measure(home: Path, n: int) -> None:
    db = home / "mlflow" / "mlflow.db"
    with closing(sqlite3.connect(db)) as raw:
        ids = pipeline_of(raw)
        stage_run = next(one for one in ids if f"{os.sep}{STAGE}{os.sep}{one}" in str(_folder(raw, home, one)))
        before = commands(home, ids, stage_run)
        n_copies = -(-n // (len(ids) - 1)) - 1
        copies(raw, home / "mlflow" / "artifacts", ids, n_copies)
    size = f"{(n_copies + 1) * (len(ids) - 1):,} stage runs"
    here = os.getcwd()
    workspace = open_workspace(home)
    print(f"{size} in {n_copies + 1:,} pipeline runs, {db.stat().st_size / 1e6:,.0f} MB\n")
    print("| what is asked | turnwise | processor | MLflow's search | processor | ratio |\n|---|---|---|---|---|---|")
    for what, mine, theirs in questions(workspace, stage_run):
        (found, fast), (wanted, slow) = timed(mine, 5), timed(theirs, 1, first=0)
        if found != wanted:
            raise SystemExit(f"{what}: turnwise answers {str(found)[:200]}, MLflow {str(wanted)[:200]}")
        print(f"| {what} | {cells(fast)} | {cells(slow)} | {ratio(slow, fast):.0f} |", flush=True)
    os.chdir(here)
    print(f"\n| command | one pipeline run | processor | {size} | processor | ratio |\n|---|---|---|---|---|---|")
    for name, times in commands(home, ids, stage_run).items():
        print(f"| {name} | {cells(before[name])} | {cells(times)} | {ratio(times, before[name]):.2f} |", flush=True)


def _folder(raw: sqlite3.Connection, home: Path, run_id: str) -> Path:
    ((uri,),) = raw.execute("select artifact_uri from runs where run_uuid = ?", [run_id]).fetchall()
    return artifacts.folder_of(home / "mlflow" / "artifacts", uri)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000, help="stage runs in the store (default: 10,000)")
    parser.add_argument(
        "--home", type=Path, help="a project folder with a finished run; default: a new one, with a run of tiny"
    )
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    if args.home:
        measure(args.home.resolve(), args.runs)
        return
    with tempfile.TemporaryDirectory() as folder:
        tiny(Path(folder))
        measure(Path(folder), args.runs)


if __name__ == "__main__":
    main()
