"""Finds the Prefect server of a project folder, or starts one that ends with its owner.

Order: PREFECT_API_URL; the server that `turnwise ui` or `turnwise serve` keeps for this folder; else a new one for this
run, on a free port. A kept server has the folder's own port, which the folder stores. A server that answers there is
asked for its folder, so that no run goes to another folder's server. A start takes 4-20 s in its own process. So it
begins first, and is waited for after the run's imports. All servers are bound to 127.0.0.1.
"""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flows.leash import Leashed
from stages.frame.types import TurnwiseError
from stages.store import sqlite

HEALTH_TIMEOUT_S = 1.0
ANSWER_TIMEOUT_S = 10.0  # of a server that has a run's work to do beside our question
START_TIMEOUT_S = 180.0  # 4 s on an idle machine, over a minute on a busy one that makes the database too
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback is never asked for through a proxy


@dataclass
class Server:
    """A Prefect server: one that was found, or one that this process owns."""

    url: str  # of its API
    owned: Leashed | None = None

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """Wait until the server answers, and return its URL. Raises TurnwiseError if it ends or never answers."""
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
    """URL of a running server's API, or None. Raises TurnwiseError where PREFECT_API_URL does not answer."""
    if url := os.environ.get("PREFECT_API_URL"):
        if not _answers(url):
            raise TurnwiseError(
                f"PREFECT_API_URL names {_hidden(url)}, but nothing answers there. Start it, unset the variable, or run with --plain."
            )
        return url
    url = api_url(_own_port(home))
    return url if serves(url, home) else None


def serves(url: str, home: Path) -> bool:
    """Whether what answers at `url` is a Prefect server of this project folder, by its own word."""
    key = os.environ.get("PREFECT_API_AUTH_STRING")  # as Prefect's client sends it, where a server asks for one
    headers = {"Authorization": f"Basic {base64.b64encode(key.encode()).decode()}"} if key else {}
    try:
        asked = urllib.request.Request(f"{url}/admin/settings", headers=headers)
        with _DIRECT.open(asked, timeout=ANSWER_TIMEOUT_S) as answer:
            return bool(json.load(answer)["home"] == str(_folder(home)))
    except (OSError, ValueError, KeyError, TypeError):  # nothing there, or something else than a Prefect server
        return False


def begin_server(home: Path) -> Server:
    """A server for one run: one that exists, or a new one. The caller has to wait for it and stop it."""
    found = find_server(home)
    return Server(found) if found else start_server(home)


@contextmanager
def keep_server(home: Path) -> Iterator[Server]:
    """A server with its page and its scheduler. Other commands of this folder find it while the context lasts."""
    # Of two commands that begin at once, the second finds the first's.
    with sqlite.exclusive(_port_file(home), START_TIMEOUT_S):
        found = find_server(home)
        server = Server(found) if found else start_server(home, _own_port(home), full=True)
        try:
            server.wait()
            if not found:
                _port_file(home).write_text(json.dumps({"port": urllib.parse.urlsplit(server.url).port}))
        except BaseException:
            server.stop()
            raise
    try:
        yield server
    finally:
        server.stop()


def stand_in(server: Server, home: Path) -> bool:
    """Start this folder's server again on its known port, if the command that kept it has ended. Returns False if
    something still listens there, or if PREFECT_API_URL names the server. Raises TurnwiseError.
    """
    port = _own_port(home)
    if server.owned is not None or server.url != api_url(port):
        return False
    with sqlite.exclusive(_port_file(home), START_TIMEOUT_S):
        if not is_free(port):
            return False
        started = start_server(home, port, full=True)
        if started.url != server.url:  # the port was taken between
            started.stop()
            return False
        server.owned = started.owned
        server.wait()
    return True


def start_server(home: Path, port: int = 0, *, full: bool = False) -> Server:
    """Begin to start a server, on a free port where `port` is 0 or taken.

    full: with its page, scheduler and late-run services; without, only what records runs.
    """
    with _listen(port) as listening:
        port = listening.getsockname()[1]
        url = api_url(port)
        # The page calls port 4200 unless it is told another one.
        env = {
            **os.environ,
            **_environment(home),
            "PREFECT_API_URL": url,
            "PREFECT_SERVER_UI_API_URL": url,
            "PREFECT_LOGGING_LEVEL": "WARNING",
        }
        if not full:
            env |= {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT_UI_ENABLED": "0"}
        command = [sys.executable, "-m", "flows.orchestration.prefect_server", str(listening.fileno())]
        return Server(
            url, Leashed(command, log=_folder(home) / f"server-{port}.log", env=env, hands=[listening.fileno()])
        )


def make_database(home: Path) -> None:
    """Create or upgrade Prefect's database by starting a server once: the slow part of a first start."""
    server = start_server(home)
    try:
        server.wait()
    finally:
        server.stop()


def use_server(url: str, home: Path) -> None:
    """Make this process use a server. Call it before Prefect is imported. Prefect's own log lines stay off the terminal."""
    for name, value in _environment(home).items():
        os.environ.setdefault(name, value)
    os.environ["PREFECT_API_URL"] = url
    # The page still gets every line. The terminal gets only ours, and one sentence for a failure.
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


def _hidden(url: str) -> str:
    """Without what may be a password."""
    return re.sub(r"//.*@", "//***@", url)


def _environment(home: Path) -> dict[str, str]:
    folder = _folder(home)
    return {
        "PREFECT_HOME": str(folder),
        "PREFECT_MEMO_STORE_PATH": str(folder / "memo_store.toml"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }


def _listen(port: int) -> socket.socket:
    """A loopback socket that listens on `port`, or on a free one. From here on no other server can take it."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError:  # taken since it was chosen
        return socket.create_server(("127.0.0.1", 0))


def _own_port(home: Path) -> int:
    """The port of this folder's kept server, whether it is up or not; 0 where none was ever kept."""
    return stored_port(_port_file(home), 0)


def stored_port(file: Path, default: int) -> int:
    """The port that a server's file names, or the default where there is no such file."""
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["port"])
    except (OSError, ValueError, KeyError, TypeError):
        return default


def _folder(home: Path) -> Path:
    return home.resolve() / "data" / "prefect"


def _port_file(home: Path) -> Path:
    return _folder(home) / "server.json"
