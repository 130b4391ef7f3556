"""Finds a Prefect server that is running, or starts one that ends with its owner.

Order: PREFECT_API_URL; the server that `turnwise ui` or `turnwise serve` keeps up for this folder; a healthy one on
Prefect's own loopback port; else one is started on a free port, for this run alone. Starting it takes 4-20 s of its own
process, so it is begun first and waited for last, after the run's imports. All of them are bound to 127.0.0.1.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flows.orchestration.leash import Leashed
from stages.frame.types import TurnwiseError

DEFAULT_PORT = 4200
HEALTH_TIMEOUT_S = 1.0
START_TIMEOUT_S = 180.0  # 4 s on an idle machine, over a minute on a busy one that makes the database too
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback is never asked for through a proxy


@dataclass
class Server:
    """A Prefect server: one that was found, or one that this process owns."""

    url: str  # of its API
    owned: Leashed | None = None

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """Block until the server answers; returns its URL. Raises TurnwiseError if it ends or never answers."""
        deadline = time.monotonic() + timeout_s
        while self.owned is not None and not healthy(self.url):
            if not self.owned.running() or time.monotonic() > deadline:
                what = f"did not answer within {timeout_s:.0f} s" if self.owned.running() else "ended while it started"
                said = self.owned.tail() or "nothing"
                self.stop()
                raise TurnwiseError(
                    f"A Prefect server was wanted at {self.url}, but it {what} (it said: {said}). Try again, or run with --plain."
                )
            time.sleep(0.05)
        return self.url

    def stop(self) -> None:
        if self.owned is not None:
            self.owned.stop()


def healthy(url: str, says: bytes = b"true") -> bool:
    """Whether a server on this machine answers that it is well; what Prefect's API says is the default."""
    try:
        with _DIRECT.open(f"{url}/health", timeout=HEALTH_TIMEOUT_S) as answer:
            return bool(answer.status == 200 and answer.read(16).strip() == says)
    except (OSError, ValueError):  # refused, timed out, an error status, or no URL at all
        return False


def find_server(home: Path) -> str | None:
    """URL of a running server's API, or None. Raises TurnwiseError where PREFECT_API_URL names one that does not
    answer.
    """
    if url := os.environ.get("PREFECT_API_URL"):
        if not _answers(url):
            raise TurnwiseError(
                f"PREFECT_API_URL names {url}, but nothing answers there. Start it, unset the variable, or run with --plain."
            )
        return url
    return next((url for url in [*_kept(home), api_url(DEFAULT_PORT)] if healthy(url)), None)


def begin_server(home: Path) -> Server:
    """A server for one run: one that is found, or one that begins to start and has to be waited for and stopped."""
    found = find_server(home)
    return Server(found) if found else start_server(home, free_port())


@contextmanager
def keep_server(home: Path) -> Iterator[Server]:
    """A server with its page and its scheduler, which other commands of this folder find while the context lasts."""
    if found := find_server(home):
        yield Server(found)
        return
    server = start_server(home, DEFAULT_PORT if is_free(DEFAULT_PORT) else free_port(), full=True)
    state = _state_file(home)
    try:
        server.wait()
        state.write_text(json.dumps({"url": server.url, "pid": os.getpid()}))
        yield server
    finally:
        state.unlink(missing_ok=True)
        server.stop()


def start_server(home: Path, port: int, *, full: bool = False) -> Server:
    """Begin to start a server. full: with its page, scheduler and late-run services; without, only what records runs."""
    folder = _folder(home)
    folder.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, **_environment(home), "PREFECT_LOGGING_LEVEL": "WARNING"}
    if not full:
        env |= {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT_UI_ENABLED": "0"}
    command = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--log-level",
        "error",
        "--lifespan",
        "on",
        "--timeout-graceful-shutdown",
        "2",
    ]
    return Server(api_url(port), Leashed(command, log=folder / f"server-{port}.log", env=env))


def make_database(home: Path) -> None:
    """Create or upgrade Prefect's database by starting a server once: the slow part of a first start."""
    server = start_server(home, free_port())
    try:
        server.wait()
    finally:
        server.stop()


def use_server(url: str, home: Path) -> None:
    """Point this process, before it imports Prefect, at a server; keep Prefect's own log lines off the terminal."""
    os.environ.update(_environment(home))
    os.environ["PREFECT_API_URL"] = url
    # The page still gets every line; the terminal gets our own, and a failure is told in one sentence.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    for name in ("NO_PROXY", "no_proxy"):
        if "127.0.0.1" not in os.environ.get(name, ""):
            os.environ[name] = ",".join(filter(None, [os.environ.get(name, ""), "127.0.0.1", "localhost"]))


def api_url(port: int) -> str:
    return f"http://127.0.0.1:{port}/api"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether nothing listens on the loopback port."""
    with socket.socket() as probe:
        # A connection that was closed a moment ago still holds the port, but not against a server.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _answers(url: str) -> bool:
    """Whether anything speaks HTTP at `url`: a server that wants a key refuses, but is there."""
    try:
        urllib.request.urlopen(f"{url}/health", timeout=10).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True


def _environment(home: Path) -> dict[str, str]:
    folder = Path(os.environ.get("PREFECT_HOME") or _folder(home))
    return {
        "PREFECT_HOME": str(folder),
        "PREFECT_MEMO_STORE_PATH": str(folder / "memo_store.toml"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }


def _kept(home: Path) -> list[str]:
    try:
        return [str(json.loads(_state_file(home).read_text())["url"])]
    except (OSError, ValueError, KeyError):  # none is kept, or one is being written down just now
        return []


def _folder(home: Path) -> Path:
    return home / "data" / "prefect"


def _state_file(home: Path) -> Path:
    return _folder(home) / "server.json"
