"""A real PostgreSQL server and moto's S3 server, for tests of a store that several project folders share.

Whoever lacks one of them skips these tests: apt-get install postgresql, pip install 'turnwise[team]' 'moto[server]'.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from flows.orchestration.server import free_port
from stages.store.shared import FILE, shared_store
from stages.store.tracking import Tracking

USER, PASSWORD, BUCKET = "turnwise", "no-secret-of-anybody", "runs"
KEYS = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing", "AWS_DEFAULT_REGION": "us-east-1"}
START_S = 60.0
numbers = count()


@dataclass
class Server:
    """A PostgreSQL server on loopback, which wants a password."""

    programs: Path
    folder: Path
    port: int
    as_user: Mapping[str, Any] = field(default_factory=dict)

    def start(self) -> None:
        options = f"-p {self.port} -k {self.folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        self._run(
            "pg_ctl", "start", "-w", "-D", str(self.folder / "data"), "-l", str(self.folder / "log"), "-o", options
        )

    def stop(self, mode: str = "fast") -> None:
        self._run("pg_ctl", "stop", "-w", "-D", str(self.folder / "data"), "-m", mode)

    def make(self) -> None:
        (self.folder / "password").write_text(PASSWORD)
        how = ["-U", USER, "-A", "scram-sha-256", f"--pwfile={self.folder / 'password'}", "--no-sync", "-E", "UTF8"]
        self._run("initdb", "-D", str(self.folder / "data"), *how)

    def ask(self, query: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        import psycopg2

        raw = psycopg2.connect(self.uri(database), password=PASSWORD)
        raw.autocommit = True
        with raw.cursor() as cursor:
            cursor.execute(query)
            found = cursor.fetchall() if cursor.description else []
        raw.close()
        return found

    def uri(self, database: str) -> str:
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{database}"

    def _run(self, program: str, *options: str) -> None:
        # To a file: a server that was started would keep a pipe open.
        with (self.folder / "said").open("ab") as said:
            subprocess.run(
                [str(self.programs / program), *options],
                check=True,
                stdout=said,
                stderr=said,
                cwd=self.folder,
                **self.as_user,
            )


@contextmanager
def postgres() -> Iterator[Server]:
    """A server of its own folder, as another user where root runs the tests: PostgreSQL refuses to be root."""
    folder = Path(tempfile.mkdtemp(prefix="turnwise-postgres-"))
    as_user: dict[str, Any] = {}
    if os.geteuid() == 0:
        name = "postgres" if any(one.pw_name == "postgres" for one in pwd.getpwall()) else "nobody"
        found = pwd.getpwnam(name)
        os.chown(folder, found.pw_uid, found.pw_gid)
        as_user = {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": []}
    server = Server(_programs(), folder, free_port(), as_user)
    try:
        server.make()
        server.start()
        yield server
    finally:
        server.stop("immediate")
        shutil.rmtree(folder, ignore_errors=True)


def _programs() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda one: int(one.parent.name))
    if found:
        return found[-1]
    if (initdb := shutil.which("initdb")) is None:
        pytest.skip("no PostgreSQL here")
    return Path(initdb).resolve().parent


@contextmanager
def s3() -> Iterator[str]:
    """Address of moto's server, which forgets everything as it ends."""
    for module in ("boto3", "moto", "psycopg2"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            _wait(f"http://127.0.0.1:{port}/moto-api/")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def _wait(url: str) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < until, f"{url} does not answer"
            time.sleep(0.1)


@dataclass
class Team:
    """Both servers. Each test has a database and a prefix of its own."""

    server: Server
    s3: str
    database: str

    def new(self, template: str = "template1") -> Team:
        """A store of its own on the same servers. Making its tables takes seconds, copying those of `template` less."""
        name = f"team{next(numbers)}"
        self.server.ask(f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{template}'")
        self.server.ask(f"create database {name} template {template}")
        return replace(self, database=name)

    def home(self, folder: Path) -> Path:
        """A project folder of its own, on this store."""
        for name in ("data", "mlflow"):
            (folder / name).mkdir(parents=True)
        return self.join(folder)

    def join(self, folder: Path) -> Path:
        """Put a project folder on this store."""
        text = f'[tracking]\nuri = "{self.server.uri(self.database)}"\nartifacts = "s3://{BUCKET}/{self.database}"\n'
        (folder / FILE).write_text(text)
        return folder

    @property
    def keys(self) -> dict[str, str]:
        """Of both servers, for the environment of another process."""
        return {**KEYS, "MLFLOW_S3_ENDPOINT_URL": self.s3, "PGPASSWORD": PASSWORD}

    def objects(self) -> dict[str, Any]:
        """Key -> ETag, of all objects below the prefix."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{self.database}/")
        return {
            one["Key"].removeprefix(f"{self.database}/"): one["ETag"]
            for page in pages
            for one in page.get("Contents", ())
        }

    @property
    def client(self) -> Any:
        import boto3

        return boto3.client("s3", endpoint_url=self.s3)


@contextmanager
def servers(folder: Path) -> Iterator[Team]:
    """Both servers with an empty store in them, and their keys in the environment. folder: of a first project."""
    with s3() as address, postgres() as server, pytest.MonkeyPatch.context() as patch:
        team = Team(server, address, "empty")
        for key, value in team.keys.items():
            patch.setenv(key, value)
        team.client.create_bucket(Bucket=BUCKET)
        server.ask("create database empty")
        home = team.home(folder)
        Tracking(home / "mlflow", shared_store(home)).initialise()
        yield team
