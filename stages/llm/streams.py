"""An engine as a stream: replies as they end, new requests while others are under way, so that nobody waits for the
longest reply.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

from stages.frame.types import Completion, Engine, More, Replies, Request, Streamer, Wait


def stream(engine: Engine, more: More) -> Replies:
    """Replies to the requests of `more`. Raises EngineUnavailable.

    An engine that is no `Streamer` answers tick by tick: all that there is in one call, and then what follows from all
    of its replies.
    """
    return engine.stream(more) if isinstance(engine, Streamer) else ticks(engine, more)


def ticks(engine: Engine, more: More) -> Replies:
    """`stream` of an engine that takes requests a batch at a time."""
    while (asked := more("all")) is not None:
        if asked:
            numbers, requests = zip(*asked, strict=True)
            yield list(zip(numbers, engine.generate(requests), strict=True))


def once(requests: Sequence[Request]) -> More:
    """These requests, numbered from 0, and then no more."""
    left = [list(enumerate(requests))]

    def more(wait: Wait) -> Sequence[tuple[int, Request]] | None:
        return left.pop() if left else [] if wait == "none" else None

    return more


def in_order(engine: Streamer, requests: Sequence[Request]) -> list[Completion]:
    """`generate` of an engine that is a stream."""
    found = dict(chain.from_iterable(engine.stream(once(requests))))
    return [found[i] for i in range(len(requests))]


@contextmanager
def signals_between_steps() -> Iterator[Callable[[], None]]:
    """Ctrl-C and SIGTERM wait for the function that it gives, or the end of the block.

    In the middle of a step they would leave an engine's books half written; and in a callback of Python's garbage
    collector, which requests by the hundred set going, an exception is printed and lost.
    """
    if threading.current_thread() is not threading.main_thread():  # the only one that signals reach
        yield lambda: None
        return
    arrived: list[int] = []
    before = {
        number: signal.signal(number, lambda n, _: arrived.append(n)) for number in (signal.SIGINT, signal.SIGTERM)
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
