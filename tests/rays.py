"""Nodes of a Ray cluster on this machine, for tests: a raylet each, which can be killed as when a machine goes down."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
from commands import HERE

from flows.orchestration.server import free_port

START_S = 180


@contextmanager
def head() -> Iterator[int]:
    """The head of a new cluster on 127.0.0.1; gives its port."""
    port = free_port()
    with (
        tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder,  # a socket's path is short
        _raylet("--head", "--port", str(port), "--node-ip-address", "127.0.0.1", "--include-dashboard=false", "--temp-dir", folder),
    ):  # fmt: skip
        until = time.monotonic() + START_S
        while not _answers(port):
            assert time.monotonic() < until, "no head of a Ray cluster"
            time.sleep(0.1)
        yield port


@contextmanager
def second(port: int) -> Iterator[psutil.Process]:
    """Another node of that cluster, on 127.0.0.2."""
    with _raylet("--address", f"127.0.0.1:{port}", "--node-ip-address", "127.0.0.2") as node:
        yield node


@contextmanager
def _raylet(*options: str) -> Iterator[psutil.Process]:
    """A node with one core, and all that it started, ended by their ids."""
    env = {
        **os.environ,
        "PYTHONPATH": f"{HERE.parent}:{HERE}",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "1", *options]
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        node = psutil.Process(child.pid)
        try:
            yield node
        finally:
            kill(node)


def kill(node: psutil.Process) -> None:
    """With -9, as when a machine goes down."""
    with suppress(psutil.NoSuchProcess):
        for one in [node, *node.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
