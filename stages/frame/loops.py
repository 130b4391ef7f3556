"""Event loops in threads of their own: coroutines overlap although stages are plain functions."""

from __future__ import annotations

import asyncio
import threading

_loops: dict[str, asyncio.AbstractEventLoop] = {}
_making = threading.Lock()


def event_loop(name: str) -> asyncio.AbstractEventLoop:
    """The running loop of that name, one a process. What belongs to one loop is awaited on no other."""
    # `functools.cache` would be no lock: first calls from several threads would each make a loop.
    with _making:
        if name not in _loops:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
            _loops[name] = loop
        return _loops[name]
