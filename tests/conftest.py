"""Fixtures that several test files share: an initialised MLflow store is made once, then copied."""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from commands import RUN, Commands, Done, Ended, commands, make_home, seen
from toys import toy_workspace

from stages.store import sqlite
from stages.store.replay import Replay
from stages.store.tracking import Tracking
from stages.store.workspace import Workspace

if TYPE_CHECKING:
    from engines import Subject
    from fakes import Stages
    from models import Bench
    from openai_stub import Stub
    from team import Team


@pytest.fixture(autouse=True)
def _same_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins in the repository, where ever the one before it went: commands work in their project folder."""
    monkeypatch.chdir(Path(__file__).parent.parent)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stages]:
    """Stages that learn nothing, in place of all."""
    from fakes import fake_stages

    with fake_stages(monkeypatch) as found:
        yield found


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Database of a new MLflow store. Making one takes seconds, copying it milliseconds."""
    root = tmp_path_factory.mktemp("mlflow")
    Tracking(root).initialise()
    return root / "mlflow.db"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny base model with random weights and the project's tokenizer."""
    from models import save_base

    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def bench(base: Path, tmp_path: Path) -> Bench:
    """Runs stages by hand on that model, with a replay in memory."""
    from models import Bench

    return Bench(base, tmp_path)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """An OpenAI-compatible endpoint on loopback that answers as a test wants."""
    from openai_stub import Stub

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server = Stub()
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture(scope="session")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Subject]]:
    """An engine by its kind. Each is started once: vLLM takes minutes."""
    from engines import open_subject

    with contextlib.ExitStack() as stack:
        yield cache(lambda kind: stack.enter_context(open_subject(kind, tmp_path_factory.mktemp(kind) / "server.log")))


@pytest.fixture
def home(tmp_path: Path, empty_store: Path) -> Path:
    """A project folder with an initialised, empty store."""
    (tmp_path / "mlflow").mkdir()
    sqlite.copy(empty_store, tmp_path / "mlflow" / "mlflow.db")
    return tmp_path


@pytest.fixture
def tracking(home: Path) -> Tracking:
    """That store."""
    return Tracking(home / "mlflow")


@pytest.fixture
def replay(tmp_path: Path) -> Replay:
    """An empty replay, whose file comes with its first rows."""
    return Replay(tmp_path / "data" / "replay.duckdb")


@pytest.fixture(scope="session")
def prefect_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a new database of Prefect's. Making one costs a start of its server, copying it milliseconds."""
    from flows.orchestration.server import make_database

    root = tmp_path_factory.mktemp("prefect")
    make_database(root)
    return root / "data" / "prefect"


@pytest.fixture
def prefect_home(home: Path, prefect_store: Path) -> Path:
    """A project folder with empty stores of MLflow and Prefect."""
    shutil.copytree(prefect_store, home / "data" / "prefect")
    return home


@pytest.fixture
def workspace(home: Path) -> Workspace:
    """Stores in `home`, no engine, one base model named "base" and no prompts."""
    return toy_workspace(home)


@pytest.fixture(scope="session")
def command() -> Iterator[Commands]:
    """Runs `turnwise` commands on the real stages, disturbed where a test says so."""
    with commands() as run:
        yield run


@pytest.fixture
def fresh(tmp_path: Path, empty_store: Path, base: Path) -> Path:
    """A project folder with the tiny model, in which nothing was run yet."""
    return make_home(tmp_path / "home", empty_store, base)


@pytest.fixture(scope="session")
def undisturbed(empty_store: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run that nothing disturbed.

    It ran in this process and not in a fork of the child's: so nothing that differs between two processes (the order of
    a set, say) can be part of a result that disturbed runs equal.
    """
    from turnwise import cli

    home = make_home(tmp_path_factory.mktemp("undisturbed") / "home", empty_store, base)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(home), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(RUN)
    done = Done(status, out.getvalue(), err.getvalue())
    return Ended(home, done, seen(home, done.json))


@pytest.fixture
def finished(undisturbed: Ended, tmp_path: Path) -> Ended:
    """A copy of that run's folder, to go on in."""
    return replace(undisturbed, home=Path(shutil.copytree(undisturbed.home, tmp_path / "home")))


@pytest.fixture(scope="module")
def team_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    """PostgreSQL and S3 with an empty store, which `team` copies. The tests are skipped where one of them is missing."""
    from team import servers

    with servers(tmp_path_factory.mktemp("empty")) as found:
        yield found


@pytest.fixture
def team(team_servers: Team) -> Team:
    """An empty store that project folders share."""
    return team_servers.new("empty")


@pytest.fixture
def homes(team: Team, tmp_path: Path) -> tuple[Path, Path]:
    """Two project folders on that store."""
    return team.home(tmp_path / "one"), team.home(tmp_path / "two")


@pytest.fixture
def projects(homes: tuple[Path, Path], base: Path) -> tuple[Path, Path]:
    """The same, with the tiny model."""
    for home in homes:
        shutil.copytree(base, home / "data" / "base")
    return homes


@pytest.fixture(scope="module")
def team_command(team_servers: Team) -> Iterator[Commands]:
    """As `command`, with the servers' secrets in the environment."""
    with commands() as run:
        yield run
