"""A store of 10,000 stage runs: look-ups by fingerprint, lists of runs, who read a run, and what commands take to start.

    python -m benchmarks.speed.store                             # runs tiny once, and takes some ten minutes on two cores
    python -m benchmarks.speed.store --runs 500 --home FOLDER    # multiplies the newest pipeline run of FOLDER, which grows

A pipeline run of the preset tiny is multiplied under new ids: its rows in MLflow's tables, and of its artifacts the
inputs of critic and the summary. The first table asks what turnwise asks beside the obvious way to the same answer, MLflow's own search, which
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

COMMAND = [sys.executable, "-m", "turnwise"]
FILES = ("inputs.json", "summary.json")
NUMBERS = ("params", "latest_metrics", "metrics")  # tables that name no run but their own
ORDER = ["tags.sequence DESC", "attributes.start_time DESC"]
STAGE = "critic"
RUN_ID = re.compile("[0-9a-f]{32}")


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
    """Put n further pipeline runs beside the one that these ids are of: they started later, have fingerprints of their
    own, and go on numbering.
    """
    raw.create_function("renamed", 2, renamed(ids), deterministic=True)
    raw.create_function("hashed", 1, lambda text: hashlib.sha256(text.encode()).hexdigest(), deterministic=True)
    further = {
        "runs.start_time": "start_time + 60000 * c",
        "tags.value": f"case key when 'fingerprint' then hashed(c || value) when 'sequence' then printf('%012d', 1000000 + {len(ids)} * c + value) "
        "else renamed(value, c) end",
    }
    numbers = f"(with recursive n(c) as (select 1 union all select c + 1 from n where c < {n}) select c from n)"
    for table in ("runs", "tags", "params", "latest_metrics", "metrics"):
        columns = [name for (name,) in raw.execute(f"select name from pragma_table_info('{table}')")]
        own = {"run_uuid": "renamed(run_uuid, c)", "artifact_uri": "renamed(artifact_uri, c)"}
        values = ", ".join(further.get(f"{table}.{one}") or own.get(one, one) for one in columns)
        marks = ", ".join("?" * len(ids))
        raw.execute(
            f"insert into {table} ({', '.join(columns)}) select {values} from {table}, {numbers} where run_uuid in ({marks})",
            ids,
        )
    raw.commit()
    folders = [root / EXPERIMENT / ids[0], *((root / STAGE / one) for one in ids if (root / STAGE / one).is_dir())]
    files = [file for folder in folders for file in (folder / "artifacts").glob("*.json") if file.name in FILES]
    texts, rename = {file: file.read_text() for file in files}, renamed(ids)
    for c in range(1, n + 1):
        for file, text in texts.items():
            place = Path(rename(str(file), c))
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(rename(text, c))


def renamed(ids: Sequence[str]) -> Callable[[Any, int], Any]:
    """A function of a text and c: the text with these ids as they are in copy c."""
    known = frozenset(ids)

    def of(text: Any, c: int) -> Any:
        if not isinstance(text, str):
            return text
        return RUN_ID.sub(lambda hit: f"{c:08x}{hit[0][8:]}" if hit[0] in known else hit[0], text)

    return of


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

    key, none, parent = tracking.tags(of)["fingerprint"], "0" * 64, tracking.tags(of)["pipeline"]
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
        "stage runs of a pipeline run",
        lambda _: [one.run_id for one in tracking.children(parent)],
        lambda _: ids(search(f"tags.mlflow.parentRunId = '{parent}'", 10**9)),
    )
    yield (
        f"runs of {STAGE} that read a run of collect",
        lambda _: readers(workspace, collect, STAGE),
        lambda _: slowly_read(collect, STAGE),
    )


def commands(home: Path, ids: Sequence[str], stage_run: str) -> dict[str, Times]:
    """Times of commands, each a process of its own."""
    argvs = {
        "turnwise runs": ["runs"],
        "turnwise show, of a pipeline run": ["show", ids[0]],
        "turnwise show, of a stage run": ["show", stage_run],
        "turnwise lineage": ["lineage", ids[0]],
    }

    def go(argv: Sequence[str]) -> None:
        subprocess.run([*COMMAND, *argv, "--home", str(home)], check=True, stdout=subprocess.DEVNULL)

    return {name: timed(lambda i, argv=argv: go(argv), 2, first=0)[1] for name, argv in argvs.items()}  # type: ignore[misc]


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
