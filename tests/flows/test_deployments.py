"""Deployments: what each preset becomes, and what cannot be served."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from flows.orchestration import services
from stages.frame.types import UsageError
from turnwise import cli

ROOT = Path(__file__).parents[2]


def test_every_preset_is_a_deployment_of_the_project_that_does_not_overlap_with_itself(tmp_path: Path) -> None:
    from flows.orchestration.deployments import deployments

    (tmp_path / "nightly.toml").write_text("extends = 'tiny'\ncron = '0 3 * * *'\neach_run = 'further'\n")
    tiny, nightly, rerun = deployments({"tiny": "tiny", "nightly": str(tmp_path / "nightly.toml")}, "desk")
    assert (tiny.name, tiny.parameters) == ("desk.tiny", {"preset": "tiny", "sets": [], "each_run": "new_seed"})
    assert (nightly.name, nightly.parameters["preset"], nightly.parameters["each_run"]) == (
        "desk.nightly",
        str(tmp_path / "nightly.toml"),
        "further",
    )
    assert tiny.entrypoint == "flows.orchestration.deployments.pipeline"
    assert not tiny.schedules
    assert [one.schedule.cron for one in nightly.schedules or []] == ["0 3 * * *"]  # type: ignore[union-attr]
    assert tiny.concurrency_limit == 1
    assert tiny.concurrency_options is not None
    assert tiny.concurrency_options.collision_strategy == "CANCEL_NEW"
    assert (rerun.name, rerun.entrypoint) == ("desk.rerun", "flows.orchestration.deployments.rerun")


@pytest.mark.parametrize(
    ("history", "asked"),
    [
        ("SCHEDULED PENDING RUNNING CANCELLING CRASHED", True),
        ("SCHEDULED PENDING CANCELLING CRASHED", True),
        ("SCHEDULED PENDING RUNNING CRASHED", False),
        ("SCHEDULED PENDING RUNNING CANCELLING CANCELLED SCHEDULED PENDING RUNNING CRASHED", False),
    ],
)
def test_a_crash_is_a_cancellation_where_one_was_asked_for_since_the_run_was_due(history: str, asked: bool) -> None:
    from prefect.client.schemas.objects import State, StateType

    from flows.orchestration.flow import was_asked_to_end

    assert was_asked_to_end([State(type=StateType(name)) for name in history.split()]) is asked


def test_a_schedule_that_is_none_is_refused_with_its_preset(tmp_path: Path) -> None:
    from flows.orchestration.deployments import deployments

    (tmp_path / "bad.toml").write_text("cron = 'every night'\n")
    with pytest.raises(
        UsageError,
        match=r"bad\.toml cannot be served: cron: wanted five fields like '0 3 \* \* \*', found 'every night'",
    ):
        deployments({"bad": str(tmp_path / "bad.toml")}, "desk")


def test_time_zone_and_overlap_are_the_presets(tmp_path: Path) -> None:
    from flows.orchestration.deployments import deployments

    path = tmp_path / "queued.toml"
    path.write_text("cron = '0 3 * * *'\ntimezone = 'Europe/Berlin'\noverlap = 'queue'\n")
    queued, _ = deployments({"queued": str(path)}, "desk")
    assert [one.schedule.timezone for one in queued.schedules or []] == ["Europe/Berlin"]  # type: ignore[union-attr]
    assert queued.concurrency_options is not None
    assert queued.concurrency_options.collision_strategy == "ENQUEUE"
    path.write_text("cron = '0 3 * * *'\ntimezone = 'Mars/Olympus'\n")
    with pytest.raises(UsageError, match="timezone: wanted a name like Europe/Berlin, found 'Mars/Olympus'"):
        deployments({"queued": str(path)}, "desk")


def test_each_parameter_is_described_in_prefects_form_and_choices_are_choices() -> None:
    from flows.orchestration.deployments import deployments

    forms = [one._parameter_openapi_schema.properties for one in deployments({"tiny": "tiny"}, "desk")]
    assert [list(form) for form in forms] == [
        ["preset", "sets", "each_run", "seed", "iterations"],
        ["stage", "of", "sets", "iteration", "through", "downstream"],
    ]
    assert all(field["description"] for form in forms for field in form.values())
    assert forms[0]["each_run"]["enum"] == ["new_seed", "further", "force", "champion"]
    assert "critic" in forms[1]["stage"]["enum"]


def test_a_run_that_takes_too_long_is_stopped_as_by_ctrl_c() -> None:
    from flows.orchestration.deployments import TimedOut, time_limit

    with pytest.raises(TimedOut, match="not done after"), time_limit(0.1 / 3600):
        time.sleep(5)
    assert issubclass(TimedOut, KeyboardInterrupt)
    with time_limit(0):
        time.sleep(0.2)


ASKED = """
import sys
from pathlib import Path
from flows.orchestration.deployments import TimedOut, time_limit
from stages.store.replay import Replay

try:
    with time_limit(2 / 3600), Replay(Path(sys.argv[1]))._open(write=True) as connection:
        connection.execute("set threads = 1")  # only a thread that works looks for signals
        connection.execute("select count(*) from range(1000000000) a, range(1000) b").fetchall()
except TimedOut as error:
    print(error)
"""


def test_time_that_is_up_in_the_middle_of_a_query_is_told_as_that(tmp_path: Path) -> None:
    """DuckDB makes an interrupt of it, which a flow run would take for a crash. In a process of its own, for signals."""
    done = subprocess.run(
        [sys.executable, "-c", ASKED, str(tmp_path / "replay.duckdb")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout.startswith("not done after"), done.stderr


def test_the_last_due_time_is_that_of_the_time_zone() -> None:
    from flows.orchestration.flow import last_due

    now = datetime(2026, 11, 23, 1, 30, tzinfo=UTC)
    assert last_due("0 3 * * *", "Europe/Berlin", now) == datetime(2026, 11, 22, 2, 0, tzinfo=UTC)
    assert last_due("0 3 1 * *", "UTC", now) == datetime(2026, 11, 1, 3, 0, tzinfo=UTC)
    assert last_due("* * * * *", "UTC", now) == now


def test_a_night_that_a_person_or_the_one_before_it_cancelled_is_not_made_up_for() -> None:
    from prefect.client.schemas.objects import FlowRun
    from prefect.states import Cancelled, Crashed, Scheduled

    from flows.orchestration.flow import MISSED, _seen_to

    def run(state: Any, run_count: int = 0) -> FlowRun:
        return FlowRun(flow_id=uuid4(), state=state, run_count=run_count, start_time=datetime.now(UTC))

    assert _seen_to(run(Crashed(), 1)) and _seen_to(run(Cancelled(message="Deployment concurrency limit reached.")))
    assert not any(map(_seen_to, (run(Cancelled(message=MISSED)), run(Scheduled()), run(Crashed()))))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--preset", "demo", "--preset", "my/demo.toml"], "the deployment name 'demo' already belongs to demo"),
        (
            ["--preset", "my/rerun.toml"],
            "the deployment name 'rerun' already belongs to the deployment that reruns a stage",
        ),
        (["--preset", "grpo"], "names no task. Put one before it, as in desk+grpo"),
        (["--preset", "my/nothing.toml"], "There is no preset file my/nothing.toml"),
        (["--limit", "0"], "--limit: wanted at least 1 run at once, found 0"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(
    home: Path, arguments: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    (home / "my").mkdir()
    for name in ("demo", "rerun"):
        (home / "my" / f"{name}.toml").write_text("iterations = 1\n")
    assert cli.main(["serve", "--home", str(home), *arguments]) == 2
    assert why in capsys.readouterr().err


def test_a_file_is_served_by_its_name_and_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my own.v2.toml").write_text("iterations = 1\n")
    assert services.by_name(["tiny", "my own.v2.toml"], "serve") == {
        "tiny": "tiny",
        "my-own.v2": str(tmp_path / "my own.v2.toml"),
    }


def test_a_folder_that_is_served_is_not_served_twice(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / "data" / "prefect" / "serve.lock"
    path.parent.mkdir(parents=True)
    code = f"from pathlib import Path; from flows.locks import lock; lock(Path({str(path)!r}), 'process 7'); print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert cli.main(["serve", "--home", str(home), "--preset", "tiny"]) == 2
        other.kill()
    assert "is served already, by process 7. Stop that one first." in capsys.readouterr().err
