"""All that is past one machine, at once: PostgreSQL, S3, two Ray nodes with a shard each, two processes that train.

The run leaves what the embedded default leaves, to rounding: `assert_same` says what is equal and what is close. Then
nodes, processes and the database die in the middle of it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb
import psutil
import pytest
import rays
from commands import HERE, NLAC, ended, seen, seen_in, stage_runs, started
from team import Team

from flows.registry import STAGES
from flows.workspace import stores
from stages.store.runs import RunInfo
from stages.store.shards import EXPERIMENT
from stages.store.workspace import Workspace

pytestmark = pytest.mark.slow
ROOT, WAIT_S = HERE.parent, 1800
RUN = (
    "run", "tiny", "--plain", "--json", "--set", "iterations=1", "--set", "critic.batch=8", "--set", "distill.batch=4", "--set",
    "distill.epochs=2",
)  # fmt: skip
TITLES = {"evaluate base", "evaluate start", *(f"{name} 0" for name in NLAC), "evaluate final"}
WEIGHTS = "adapter/adapter_model.safetensors"
NEAR = {"rel": 1e-3, "abs": 1e-4}
"""Metrics and log-probs after a training, whose sums are added up in another order."""
ROUNDING = {"rel": 1e-5, "abs": 1e-5}
"""Log-probs of the same weights, beside other requests."""
KEYS = {
    "episodes": "run_id, episode_id",
    "turns": "run_id, episode_id, turn",
    "targets": "run_id, target_id",
    "priorities": "run_id, episode_id, turn, step",
}
"""What no two rows of a table have alike."""
LAID_OUT = {f"{name}/{what}" for name in ("critic", "distill") for what in ("tokens", "tokens_share")}
"""Tokens of all passes: rows of two processes share fewer beginnings."""


def ran(home: Path, *argv: str) -> Any:
    status, out, err = ended(started(home, *argv), WAIT_S)
    assert status == 0, err
    return json.loads(out)


def based(home: Path) -> Path:
    """The folder, with the model that ships."""
    (home / "data" / "base").symlink_to(ROOT / "data" / "base")
    return home


def waited_for(what: Callable[[], Any], child: subprocess.Popen[str]) -> Any:
    """What this gives, once it is something, while the command runs."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        if found := what():
            return found
        assert child.poll() is None, child.communicate()[1]
        time.sleep(0.05)
    raise AssertionError("it was waited for in vain")


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with stores of its own in which one process did all, and what readers see of it."""
    home = tmp_path_factory.mktemp("embedded") / "home"
    for name in ("data", "mlflow"):
        (home / name).mkdir(parents=True)
    return home, ran(based(home), *RUN)


@pytest.fixture(scope="module")
def port(team_servers: Team) -> Iterator[int]:
    """Of the head of a Ray cluster whose nodes have the secrets of the servers."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    with rays.head() as found:
        yield found


def together(port: int) -> tuple[str, ...]:
    sets = ("run.shards=2", "run.workers=ray", f"run.address=127.0.0.1:{port}", "train.processes=2")
    return (*RUN, *(part for one in sets for part in ("--set", one)))


def test_it_leaves_what_the_embedded_default_leaves(
    team: Team, tmp_path: Path, port: int, embedded: tuple[Path, dict[str, Any]]
) -> None:
    home = based(team.home(tmp_path / "one"))
    with rays.second(port):
        summary = ran(home, *together(port))
    assert_same(home, summary, embedded)
    assert_whole(home, summary)


def test_a_node_a_rank_and_the_database_die_and_nothing_is_lost_or_doubled(
    team: Team, tmp_path: Path, port: int, embedded: tuple[Path, dict[str, Any]]
) -> None:
    home = based(team.home(tmp_path / "one"))
    workspace = stores(home)
    with rays.second(port) as node:
        child = started(home, *together(port))
        lost = waited_for(lambda: at_work(workspace, "collect 0", node), child)
        rays.kill(node)
        # The other node plays this one's shard; the command goes on.
        rank = waited_for(lambda: rank_of(home, "distill"), child)
        rank.send_signal(signal.SIGKILL)
        status, _, err = ended(child, WAIT_S)
        assert status == 1
        assert "distill: process 2 of the 2 that trained was killed (signal 9)" in err.strip().splitlines()[-1]
    with rays.second(port):
        child = started(home, *together(port))
        waited_for(lambda: at_work(workspace, "evaluate 0"), child)
        team.server.stop("immediate")
        team.server.start()
        status, out, err = ended(child, WAIT_S)
        # What needs the database meanwhile ends in a sentence, and what computes goes on.
        assert status == 0 or (status == 1 and "Traceback" not in err), err
        assert "distill 0: " in err and "collect 0: reused" in err and "refine 0: reused" in err
        summary = json.loads(out) if status == 0 else ran(home, *together(port))
    assert_same(home, summary, embedded)
    assert_whole(home, summary)
    # Another machine reads all of it, from the bucket.
    other = based(team.home(tmp_path / "two"))
    again = ran(other, *RUN)
    assert stage_runs(again) == stage_runs(summary)
    assert_same(other, again, embedded)
    # Shards that were joined are gone; of those that died it is known.
    left = {info.run_id: info.status for info in workspace.tracking.runs(EXPERIMENT)}
    assert left[lost.run_id] == "KILLED" and not {"RUNNING", "FINISHED"} & set(left.values())


def at_work(workspace: Workspace, title: str, node: psutil.Process | None = None) -> RunInfo | None:
    """A running shard of a stage run, on this node."""
    mine = {one.pid for one in node.children(recursive=True)} if node else set()
    for info in workspace.tracking.running():
        if info.name.startswith(f"{title}, shard") and (node is None or int(info.tags["pid"]) in mine):
            return info
    return None


def rank_of(home: Path, stage: str) -> psutil.Process | None:
    """The second process of a training that has made a step."""
    for folder in home.glob("data/tmp/*/ranks"):
        with suppress(OSError, ValueError):
            if json.loads((folder / "job.json").read_text())["stage"] == stage and (folder / "done.json").exists():
                for one in psutil.process_iter(["cmdline"]):
                    told = one.info["cmdline"] or []
                    if told[-2:] == [str(folder), "1"] and "flows.leash" not in told:
                        return one
    return None


def assert_same(home: Path, summary: dict[str, Any], embedded: tuple[Path, dict[str, Any]]) -> None:
    """Rows, metrics, files and ingredients of all stage runs, with titles for ids of runs.

    Texts, token ids, verdicts, win rates and counts are equal. Numbers are close: those of the base model to the rounding
    of a batch, those behind a training to that of its sums. Adapters are close as vectors. Within a step, the priorities
    come in the order of the processes' passes, so they are sorted.
    """
    its_home, its_summary = embedded
    there = stores(home)
    mine = seen_in(there.tracking, there.replay, summary)
    its = seen(its_home, its_summary)
    assert mine.keys() == its.keys() == {"pipeline", *TITLES}
    found = list[str]()
    for title in mine:
        for one in (mine[title], its[title]) if title in TITLES else ():
            one["files"] = list(one["files"])  # config.json has all keys, also those of no fingerprint
            one["rows"]["priorities"].sort(key=lambda row: (row["step"], row["episode_id"], row["turn"]))
        early = title in ("evaluate base", "evaluate start", "collect 0", "targets 0")
        found += differences(mine[title], its[title], title, ROUNDING if early else NEAR)
    assert not found, "\n".join(found)
    for title in ("critic 0", "distill 0"):
        a, b = (
            weights(where, stage_runs(told)[title])
            for where, told in ((there, summary), (stores(its_home), its_summary))
        )
        assert (a - b).norm() <= 1e-4 * b.norm(), title  # fmt: skip


def differences(mine: Any, its: Any, where: str, how: dict[str, float]) -> Iterator[str]:
    if isinstance(its, dict) and isinstance(mine, dict) and mine.keys() == its.keys():
        for key in its.keys() - LAID_OUT:
            yield from differences(mine[key], its[key], f"{where} {key}", how)
    elif isinstance(its, list) and isinstance(mine, list) and len(mine) == len(its):
        for i, (a, b) in enumerate(zip(mine, its, strict=True)):
            yield from differences(a, b, f"{where} {i}", how)
    elif mine != (pytest.approx(its, **how, nan_ok=True) if isinstance(its, float) else its):
        yield f"{where}: {mine!r}, not {its!r}"


def weights(workspace: Workspace, run_id: str) -> Any:
    """All weights of an adapter as one vector."""
    import torch
    from safetensors.torch import load_file

    held = load_file(workspace.tracking.artifact(run_id, WEIGHTS))
    return torch.cat([held[name].flatten().double() for name in sorted(held)])


def assert_whole(home: Path, summary: dict[str, Any]) -> None:
    """Each stage run is finished once, each row is there once, and all that is kept has its hash."""
    workspace, runs = stores(home), stage_runs(summary)
    finished = [info for name in STAGES for info in workspace.tracking.runs(name) if info.status == "FINISHED"]
    assert Counter(info.run_id for info in finished) == Counter(runs.values())
    with duckdb.connect(str(home / "data" / "turnwise.duckdb"), read_only=True) as rows:
        assert sorted(run_id for (run_id,) in rows.execute("select run_id from commits").fetchall()) == sorted(
            runs.values()
        )
        for table, key in KEYS.items():
            n, distinct = rows.execute(f"select count(*), count(distinct ({key})) from {table}").fetchall()[0]
            assert n == distinct > 0, table
    status, out, err = ended(started(home, "verify"), WAIT_S)
    assert status == 0, out + err
