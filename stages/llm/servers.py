"""Several servers of the same model, used as one. A request goes to the least busy server that is up.

The requests of a server that fails go to the others. Later it is tried again, and catches up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from stages.frame.types import EngineUnavailable, UsageError
from stages.llm.endpoint import URL_KEY, Down, Endpoint

T = TypeVar("T")

LOAD = "/load_lora_adapter"


@dataclass
class _Server:
    endpoint: Endpoint
    up: bool = False  # it was greeted, and has not failed since
    due: float = 0.0  # when a server that is not up is to be greeted; on the clock of time.monotonic
    under_way: int = 0
    context: int | None = None


class Servers:
    """One or more endpoints. pause_s: how long one that failed is left alone; key: as of `Endpoint`."""

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        timeout_s: float,
        retries: int,
        concurrency: int,
        pause_s: float = 30.0,
        key: str = URL_KEY,
    ) -> None:
        urls = [urls] if isinstance(urls, str) else list(urls)
        if not urls:
            raise UsageError(
                f"{key}: wanted a base URL such as http://127.0.0.1:8000/v1, or a list of them, found none."
            )
        self._servers = [
            _Server(Endpoint(url, timeout_s=timeout_s, retries=retries, concurrency=concurrency, key=key))
            for url in urls
        ]
        # A request chooses its server when it can leave: chosen earlier, half of them would wait behind the slower one.
        self._free = asyncio.Semaphore(concurrency * len(urls))
        self._pause_s = pause_s
        self._adapters: list[dict[str, Any]] = []  # what each server is told, to load them

    async def ready(self) -> int | None:
        """Greet the servers that are due; the shortest context, or None. Raises EngineUnavailable if none is up."""
        alone = not any(server.up for server in self._servers)
        absent = [server for server in self._servers if not server.up and (alone or server.due <= time.monotonic())]
        failed = [
            said for said in await asyncio.gather(*(self._greet(server, last_hope=alone) for server in absent)) if said
        ]
        if not any(server.up for server in self._servers):
            raise EngineUnavailable(" ".join(failed)) from None
        contexts = [server.context for server in self._servers if server.up and server.context is not None]
        return min(contexts, default=None)

    async def load(self, body: dict[str, Any]) -> None:
        """Have every server load an adapter: those that are up now, the others once they are back."""
        await self.ready()
        present = [server for server in self._servers if server.up]
        failed = [
            said
            for said in await asyncio.gather(*(self._try(server, self._load(server, body)) for server in present))
            if said
        ]
        if not any(server.up for server in self._servers):
            raise EngineUnavailable(" ".join(failed)) from None
        self._adapters.append(body)

    async def post(self, path: str, body: dict[str, Any], read: Callable[[object], T]) -> T:
        """What `read` makes of the reply of one server. Raises EngineUnavailable naming each, where all of them failed."""
        failed: list[str] = []
        async with self._free:
            while present := [server for server in self._servers if server.up]:
                server = min(present, key=lambda each: each.under_way)
                server.under_way += 1
                try:
                    return await server.endpoint.post(path, body, read)
                except Down as error:
                    failed.append(str(error))
                    self._set_aside(server)
                finally:
                    server.under_way -= 1
        raise EngineUnavailable(" ".join(failed) or "every engine failed while this request waited for one.") from None

    async def _greet(self, server: _Server, *, last_hope: bool) -> str:
        async def hello() -> None:
            try:
                server.context = await server.endpoint.context()
            except Down:
                if not last_hope:
                    raise  # else the requests find out, which are tried more than once
            for body in self._adapters:
                await self._load(server, body)
            server.up = True

        return await self._try(server, hello())

    async def _load(self, server: _Server, body: dict[str, Any]) -> None:
        try:
            await server.endpoint.post(LOAD, body, lambda reply: None)
        except EngineUnavailable as error:
            # From an earlier process or before a pause: a name says what the weights are, so it is the same adapter.
            if isinstance(error, Down) or "already been loaded" not in str(error):
                raise

    async def _try(self, server: _Server, work: Any) -> str:
        """What went wrong, with the server set aside; "" if nothing did."""
        try:
            await work
        except Down as error:
            self._set_aside(server)
            return str(error)
        return ""

    def _set_aside(self, server: _Server) -> None:
        server.up, server.due = False, time.monotonic() + self._pause_s
