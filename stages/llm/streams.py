"""An engine as a stream: it gives replies as they end and takes new requests meanwhile. Nobody waits for the longest
reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from stages.frame.types import Completion, Engine, More, Replies, Request, Streamer, Wait


def stream(engine: Engine, more: More) -> Replies:
    """Replies to the requests of `more`. Raises EngineUnavailable.

    An engine that is no `Streamer` answers in ticks: all that there is in one call, then what follows from that.
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
