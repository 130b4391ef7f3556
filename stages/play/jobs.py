"""Calls that run in threads while their caller does something else, for environments that wait for a server."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

from stages.frame.types import Wait

T = TypeVar("T")

MOMENT_S = 0.1
"""Longest wait for "some": a caller between two waits can attend to Ctrl-C."""


class Jobs(Generic[T]):
    """A `with` block in which calls are started and fetched. workers: at once; 1 = each is done when it is started.

    Leaving the block drops calls that have not begun, and waits for nobody: after an error nobody wants results.
    """

    def __init__(self, workers: int) -> None:
        self._pool = ThreadPoolExecutor(workers) if workers > 1 else None
        self._started: list[Future[T]] = []

    def __enter__(self) -> Jobs[T]:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def __len__(self) -> int:
        """Calls whose results were not fetched yet."""
        return len(self._started)

    def start(self, function: Callable[..., T], *given: Any) -> None:
        if self._pool is not None:
            self._started.append(self._pool.submit(function, *given))
            return
        done: Future[T] = Future()
        done.set_result(function(*given))
        self._started.append(done)

    def fetch(self, patience: Wait) -> list[T]:
        """Results in the order of their start; patience: of all calls, of some, or of those that have ended.

        Raises what a call raised.
        """
        if patience != "none" and self._started:
            whole = patience == "all"
            wait(self._started, None if whole else MOMENT_S, ALL_COMPLETED if whole else FIRST_COMPLETED)
        ended = {future for future in self._started if future.done()}
        found = [each for each in self._started if each in ended]
        self._started = [each for each in self._started if each not in ended]
        return [future.result() for future in found]
