"""First calls from many threads at once: an oracle's are, since environments play side by side."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai_stub import Stub

from stages.adapters import verifiers_env
from stages.frame import loops
from stages.llm import endpoint

THREADS = 16


@pytest.fixture(autouse=True)
def no_loop_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process; and a loop takes its time to be made, so that all threads ask before the first one has it."""
    make = asyncio.new_event_loop

    def slowly() -> asyncio.AbstractEventLoop:
        time.sleep(0.05)
        return make()

    monkeypatch.setattr(asyncio, "new_event_loop", slowly)
    monkeypatch.setattr(loops, "_loops", {})


def at_once(call: Callable[[], Any]) -> list[Any]:
    """What each of many threads gets, all of which call in the same moment."""
    together = threading.Barrier(THREADS)

    def wait_and_call(_: int) -> Any:
        together.wait()
        return call()

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(wait_and_call, range(THREADS)))


async def loop_of_this() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


@pytest.mark.parametrize(
    "call",
    [lambda: endpoint.run([loop_of_this()])[0], lambda: verifiers_env._wait(loop_of_this())],
    ids=["endpoint", "verifiers"],
)
def test_first_calls_from_many_threads_run_on_one_loop(call: Callable[[], Any]) -> None:
    assert len(set(at_once(call))) == 1


def test_first_questions_of_many_threads_to_an_oracle_are_all_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client and its semaphores are bound to the loop that first used them."""
    pytest.importorskip("openai", reason="the extra `openai` is not installed")
    from stages.llm.openai import chat

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    stub = Stub()
    stub.answer = lambda path, body: (200, {"choices": [{"message": {"content": "Yes"}}]})
    ask = chat(stub.url, "oracle", concurrency=2)  # fewer than threads: whoever waits for a place is bound to a loop
    try:
        assert at_once(lambda: ask([{"role": "user", "content": "hi"}])) == ["Yes"] * THREADS
    finally:
        stub.server.shutdown()
        stub.server.server_close()


def test_loops_of_two_names_are_two() -> None:
    """A reward function of verifiers may wait for an oracle: on one loop both would wait for ever."""
    assert loops.event_loop("one") is loops.event_loop("one") is not loops.event_loop("two")
