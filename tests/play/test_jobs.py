"""Calls in threads: their results in the order of their start, their errors to the caller, and none begun once the
caller has left.
"""

from __future__ import annotations

import threading
import time

import pytest
from openai_stub import Stub

from stages.llm.endpoint import dropped_on_error
from stages.llm.openai import chat
from stages.play.jobs import Jobs


def later(seconds: float, value: int) -> int:
    time.sleep(seconds)
    return value


@pytest.mark.parametrize("workers", [1, 4])
def test_all_results_come_in_the_order_of_their_start(workers: int) -> None:
    with Jobs[int](workers) as jobs:
        for i in range(8):
            jobs.start(later, 0.002 * (8 - i), i)
        assert len(jobs) == 8
        assert jobs.fetch("all") == list(range(8))
        assert len(jobs) == 0
        assert jobs.fetch("all") == jobs.fetch("some") == jobs.fetch("none") == []


def test_with_one_worker_a_call_is_done_when_it_is_started_and_in_the_same_thread() -> None:
    with Jobs[int | None](1) as jobs:
        jobs.start(threading.get_ident)
        assert jobs.fetch("none") == [threading.get_ident()]


def test_some_waits_for_the_first_or_a_moment_and_none_for_nobody() -> None:
    gate = threading.Event()
    with Jobs[int](2) as jobs:
        jobs.start(lambda: int(gate.wait(30)))
        assert jobs.fetch("none") == jobs.fetch("some") == []
        jobs.start(later, 0.0, 7)
        assert jobs.fetch("some") == [7]
        assert len(jobs) == 1
        gate.set()
        assert jobs.fetch("all") == [1]


@pytest.mark.parametrize("workers", [1, 3])
def test_an_error_reaches_the_caller(workers: int) -> None:
    def fails() -> int:
        raise KeyError("door")

    def work() -> None:
        with Jobs[int](workers) as jobs:
            jobs.start(fails)
            jobs.fetch("all")

    with pytest.raises(KeyError, match="door"):
        work()


def test_what_has_not_begun_is_dropped_when_the_caller_leaves() -> None:
    begun: list[int] = []

    def slow(i: int) -> None:
        begun.append(i)
        time.sleep(0.05)

    def work() -> None:
        with Jobs[None](2) as jobs:
            for i in range(50):
                jobs.start(slow, i)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert len(begun) < 10


def test_ctrl_c_waits_for_no_server_that_does_not_answer() -> None:
    """Nor does the end of the command, which Python puts off until its threads have ended."""
    stub, silent = Stub(), threading.Event()
    stub.answer = lambda path, body: (200, {"late": silent.wait(60)})
    ask = chat(stub.url, "customer", concurrency=4)
    before = set(threading.enumerate())

    def work() -> None:
        with dropped_on_error(), Jobs[str](4) as jobs:
            for _ in range(12):
                jobs.start(ask, [{"role": "user", "content": "hello?"}])
            while stub.busy < 4:
                jobs.fetch("some")
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            work()
        for thread in set(threading.enumerate()) - before:
            if "ThreadPoolExecutor" in thread.name:
                thread.join(20)
                assert not thread.is_alive()
        assert stub.busy == 4
    finally:
        silent.set()
        stub.server.shutdown()
