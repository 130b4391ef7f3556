"""HTTP replies with a limit on their size and their time. Ours.

A client would read a body to its end first, however long it is and however slowly it comes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

LARGEST = 64 << 20  # bytes of a reply; one of 32,000 tokens with log-probs has 2 MB

TOO_LONG = f"a reply of more than {LARGEST >> 20} MB"
CODED = "a reply that is compressed, which nobody asked for"
REFUSED = (TOO_LONG, CODED)


def bounded(timeout_s: float) -> Callable[[Any], Awaitable[None]]:
    """A hook for responses of the client of the package openai. Their bodies raise its OpenAIError with one of REFUSED,
    which it does not try again. A body that takes longer than `timeout_s` raises a timeout.
    """

    async def hook(response: Any) -> None:
        from openai import OpenAIError

        if response.headers.get("content-encoding", "identity") != "identity":  # its size says nothing of what it holds
            raise OpenAIError(CODED)
        # httpx, or the package that took its place there.
        http = sys.modules[type(response).__module__.partition(".")[0]]
        response.stream = _bounded_stream(http, response.stream, response.request, time.monotonic() + timeout_s)

    return hook


def _bounded_stream(http: Any, stream: Any, request: Any, deadline: float) -> Any:
    from openai import OpenAIError

    class Bounded(http.AsyncByteStream):  # type: ignore[misc]
        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for piece in stream:
                size += len(piece)
                if size > LARGEST:
                    raise OpenAIError(TOO_LONG)
                if time.monotonic() > deadline:
                    raise http.ReadTimeout("the body did not end", request=request)
                yield piece

        async def aclose(self) -> None:
            await stream.aclose()

    return Bounded()
