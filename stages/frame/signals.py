"""Signals that wait for the end of work that must not be interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TIME_IS_UP = signal.SIGUSR1  # of a run with a time limit; not SIGALRM, of which there is one a process


@contextmanager
def signals_held() -> Iterator[Callable[[], None]]:
    """Ctrl-C, SIGTERM and a time limit wait for the function that it gives, or the end of the block.

    A signal in the middle of a step would leave an engine's state half written. And an exception from a handler can get
    lost. In a callback of Python's garbage collector it is only printed. DuckDB, when it reads Python rows, reports it
    as a fault of the rows.
    """
    if threading.current_thread() is not threading.main_thread():  # the only one that signals reach
        yield lambda: None
        return
    arrived: list[int] = []
    before = {
        number: signal.signal(number, lambda n, _: arrived.append(n))
        for number in (signal.SIGINT, signal.SIGTERM, TIME_IS_UP)
    }

    def deliver() -> None:
        while arrived:
            number = arrived.pop(0)
            handler = before[signal.Signals(number)]
            if callable(handler):
                handler(number, None)
            elif handler == signal.SIG_DFL:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)

    try:
        yield deliver
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        deliver()
