"""The services of deploy/compose.yaml, run without their images: the same commands, environment and health checks.

Names of hosts and published ports become loopback and free ports. PostgreSQL is the system's, and moto stands for MinIO.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose.yaml"
HOSTS = r"\b(postgres|s3|mlflow|prefect)(?=:\d)"
START_S = 240.0
VARIABLE = re.compile(r"\$\{(\w+)(?:(:\?|:-)([^}]*))?\}")


def load() -> dict[str, Any]:
    """compose.yaml, its variables as they stand."""
    return dict(yaml.safe_load(COMPOSE.read_text(encoding="utf-8")))


def argv(command: str | list[str]) -> list[str]:
    return shlex.split(command) if isinstance(command, str) else list(command)


def filled(text: str, values: Mapping[str, str]) -> str:
    """As docker compose fills in ${NAME:?why}. Raises KeyError where a value is missing."""
    return VARIABLE.sub(lambda found: values[found[1]], text)


@dataclass
class Composed:
    """values: of the variables. ports: of the file -> here."""

    values: Mapping[str, str]
    ports: Mapping[str, int]
    folder: Path  # for logs and what is mounted
    services: dict[str, Any] = field(default_factory=lambda: load()["services"])

    def here(self, text: str) -> str:
        """With its hosts and ports moved to loopback, and its variables filled in."""
        text = re.sub(HOSTS, "127.0.0.1", text).replace("0.0.0.0", "127.0.0.1")
        text = re.sub(r"\b(" + "|".join(self.ports) + r")\b", lambda found: str(self.ports[found[1]]), text)
        return filled(text, self.values)

    def command(self, name: str) -> list[str]:
        return self._translated(argv(self.services[name]["command"]))

    def environment(self, name: str) -> dict[str, str]:
        own = {key: self.here(value) for key, value in self.services[name]["environment"].items()}
        for mounted in self.services[name].get("volumes", ()):
            source, target, *_ = mounted.split(":")
            if source.startswith("./"):
                (self.folder / Path(source).name).write_text(self.here((DEPLOY / source).read_text()))
                own = {key: value.replace(target, str(self.folder / Path(source).name)) for key, value in own.items()}
        return clean() | {"PREFECT_HOME": str(self.folder / "prefect")} | own

    def check(self, name: str) -> list[str]:
        """The command of its health check."""
        kind, *words = self.services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        return self._translated(words)

    def healthy(self, name: str) -> bool:
        done = subprocess.run(self.check(name), env=self.environment(name), capture_output=True, check=False)
        return done.returncode == 0

    @contextmanager
    def up(self, name: str, cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
        """The service's process, once its health check is passed."""
        log = self.folder / f"{name}.log"
        with (
            log.open("wb") as out,
            subprocess.Popen(
                self.command(name), env=self.environment(name), stdout=out, stderr=out, cwd=cwd
            ) as process,
        ):
            try:
                until = time.monotonic() + START_S
                while not self.healthy(name):
                    ended = process.poll() is not None or time.monotonic() > until
                    assert not ended, f"{name} is not healthy: {log.read_text()[-3000:]}"
                    time.sleep(0.5)
                yield process
            finally:
                process.terminate()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()

    def _translated(self, words: list[str]) -> list[str]:
        words = [self.here(word) for word in words]
        if words[0] in ("mlflow", "prefect"):
            return [sys.executable, "-m", *words]
        return [sys.executable, *words[1:]] if words[0] == "python" else words


def clean() -> dict[str, str]:
    """This process's environment, without what it says of servers and stores."""
    told = ("PREFECT", "MLFLOW", "AWS_", "PG", "TURNWISE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(told)}
    return kept | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "DO_NOT_TRACK": "1"}
