"""math-verify in a process of its own, which is killed when it hangs.

math-verify compares answers as sympy expressions (0.5 = 1/2 = 50 %). It needs the main thread of a process for its own
time limit, swallows a timeout as "wrong", and hangs on a tower such as 9^{9^{9^9}}, deep in C where no limit reaches.
So its limits are off, and the whole comparison has one limit here. What cannot be decided is a SimulatorError, never a
wrong answer.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.frame.types import Malformed, SimulatorError, UsageError

_START_S = 120.0  # sympy is slow to import on a busy machine
_MEMORY_BYTES = 4 << 30  # of the worker: 2^{10^{12}} would take all that there is
_WORKER = "from stages.envs.math_verifier import serve; serve({timeout_s})"


@dataclass(frozen=True)
class Verdict:
    """correct: equal to the gold answer. found: the reply has an answer at all."""

    correct: bool
    found: bool


class Verifier:
    """Compares answers, one at a time, whatever thread asks. The worker starts at the first comparison and after each
    kill.
    """

    def __init__(self, timeout_s: float) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise UsageError(
                "task.options.path of math needs math-verify, which is not installed. Run: pip install 'turnwise[math]'"
            )
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None

    def check(self, gold: str, reply: str) -> Verdict:
        """Whether the reply's answer equals `gold` (LaTeX without dollar signs).

        Raises Malformed where math-verify cannot read the reply, SimulatorError where it cannot decide: out of time or
        memory, killed, or no answer in `gold`.
        """
        with self._lock:
            if self._worker is None:
                self._worker = self._started()
            answer = self._asked(self._worker, {"gold": gold, "reply": reply}, self._timeout_s)
        if "malformed" in answer:
            raise Malformed(f"the answer cannot be read ({answer['malformed']})")
        if "error" in answer:
            raise SimulatorError(f"math-verify cannot compare with the gold answer {gold[:80]!r}: {answer['error']}")
        return Verdict(answer["correct"], answer["found"])

    def _started(self) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        # -P: with the folder of this file on the path, `import math` would find the environment of that name.
        command = [sys.executable, "-P", "-c", _WORKER.format(timeout_s=self._timeout_s)]
        worker = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": path},
        )
        weakref.finalize(self, _end, worker)
        answer = self._asked(worker, None, _START_S)
        if not answer.get("correct"):
            _end(worker)
            raise SimulatorError(f"math-verify does not work here: it says {answer} of 1/2 and 0.5")
        return worker

    def _asked(
        self, worker: subprocess.Popen[bytes], question: dict[str, str] | None, timeout_s: float
    ) -> dict[str, Any]:
        """The worker's next line. A worker that does not give one is ended."""
        try:
            if question is not None and worker.stdin:
                worker.stdin.write(json.dumps(question).encode() + b"\n")
            line = _line(worker, timeout_s)
        except (OSError, TimeoutError) as error:  # told as what it is: nothing is known about the answer
            line, why = b"", str(error)
        else:
            why = "its process died"
        if line.endswith(b"\n"):
            answer: dict[str, Any] = json.loads(line)
            return answer
        _end(worker)
        self._worker = None
        raise SimulatorError(f"math-verify did not answer: {why}")


def _line(worker: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """What the worker writes up to the end of a line, or of its life. Raises TimeoutError."""
    assert worker.stdout is not None
    until, line = time.monotonic() + timeout_s, b""
    while not line.endswith(b"\n"):
        if not select.select([worker.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
            raise TimeoutError(
                f"nothing within {timeout_s:g} s; a longer task.options.timeout_s may help on a busy machine"
            )
        piece = os.read(worker.stdout.fileno(), 65536)
        if not piece:
            break
        line += piece
    return line


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe:
            with contextlib.suppress(OSError):  # what was not written yet goes to nobody
                pipe.close()


def serve(timeout_s: float) -> None:
    """The worker: a line of JSON in, a line of JSON out, until nothing more comes."""
    import logging
    import resource
    import signal

    # sympy and antlr print: only answers may reach the pipe.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(_MEMORY_BYTES, hard), hard)
    )
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    logging.disable(logging.CRITICAL)
    # The first parse builds the grammar, which on a busy machine takes longer than a comparison may.
    json.dump(_compared(r"\frac{1}{2}", r"\boxed{0.5}"), out)
    print(file=out, flush=True)
    for line in sys.stdin:
        # Ends a worker whose parent was killed while it hangs. The parent's own limit comes first.
        signal.alarm(int(timeout_s) + 10)
        json.dump(_compared(**json.loads(line)), out)
        print(file=out, flush=True)
        signal.alarm(0)


def _compared(gold: str, reply: str) -> dict[str, bool | str]:
    from math_verify import parse, verify

    try:
        wanted = _gold(gold)
    except Exception as error:  # of the data or the library, so not the policy's doing: reported as an error
        return {"error": f"{type(error).__name__} while reading it"}
    if not wanted:
        return {"error": "it cannot be read as an answer"}
    try:
        given = parse(reply, parsing_timeout=None, raise_on_error=True)
    except MemoryError:
        return {"error": "out of memory"}
    except Exception as error:  # what the parser raises on a text is the text's fault: counted as an unreadable reply
        return {"malformed": type(error).__name__}
    try:
        # Gold first: of relations and assignments the order matters.
        return {"correct": bool(verify(wanted, given, timeout_seconds=None, raise_on_error=True)), "found": bool(given)}
    except Exception as error:  # not decided, so reported as an error
        return {"error": f"{type(error).__name__} while comparing"}


@functools.lru_cache(maxsize=4096)
def _gold(gold: str) -> list[Any]:
    from math_verify import parse

    return list(parse(f"${gold}$", parsing_timeout=None, raise_on_error=True))
