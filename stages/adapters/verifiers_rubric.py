"""The reward of an episode by a rubric of verifiers' classic form, through its own `score_rollout`. Groups and
overridden rubrics work, too. A failure raises where verifiers would record 0.0.

Two kinds of failure would pass for a reward of 0:

    a reward function that raises       `call_reward_func` swallows the error, so it is noted on its way there
    math-verify beside the main thread  its time limits are signals, which Python allows on the main thread alone; it
        takes the error for a wrong answer. Elsewhere its limits are kept by a thread here, and one that passes is noted.

Ours.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from stages.frame.border import At, number_of
from stages.frame.types import UsageError

# Of one scoring, whatever tasks it is divided into: they inherit the context, and with it this list.
_failed: ContextVar[list[BaseException] | None] = ContextVar("failed", default=None)


def check_rubric(rubric: Any) -> None:
    """Raises UsageError where a rubric compares episodes with each other: here one is scored alone."""
    for one in rubrics_of(rubric):
        for name in ("score_group", "score_rollouts"):
            method = getattr(type(one), name, None)
            if method is not None and not method.__module__.startswith("verifiers."):
                raise UsageError(
                    f"{type(one).__name__}.{name} scores episodes as a group, and FromVerifiers scores each alone. Give it a rubric with score_rollout."
                )


def rubrics_of(rubric: Any) -> Iterator[Any]:
    yield rubric
    for one in getattr(rubric, "rubrics", ()):
        yield from rubrics_of(one)


async def reward_of(rubric: Any, known: Mapping[str, Any]) -> float:
    """What `rubric.score_rollout` says. known: its arguments by name, of which it gets those that it takes. Raises what
    a reward function raised, and BrokenEnvironment for a reward that is no finite number.
    """
    for one in rubrics_of(rubric):
        _watch(one)
    wanted = inspect.signature(rubric.score_rollout).parameters
    every = any(one.kind is one.VAR_KEYWORD for one in wanted.values())
    with failures():
        score = await rubric.score_rollout(**{name: one for name, one in known.items() if every or name in wanted})
    return number_of(At(type(rubric).__name__, "score_rollout"), "reward", score.reward)


@contextmanager
def failures() -> Iterator[None]:
    """Raises at its end the first failure that was noted inside of it, however it was swallowed."""
    found: list[BaseException] = []
    token = _failed.set(found)
    try:
        yield
    finally:
        _failed.reset(token)
    if found:
        raise found[0]


def _note(error: BaseException) -> None:
    noted = _failed.get()
    if noted is not None:
        noted.append(error)


def _watch(rubric: Any) -> None:
    """Let a rubric's `call_reward_func` note what its functions raise."""
    if "call_reward_func" in vars(rubric):
        return
    original = rubric.call_reward_func

    async def call_reward_func(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await original(_watched(func), *args, **kwargs)

    rubric.call_reward_func = call_reward_func


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, by name and arguments, which verifiers looks at."""

    @functools.wraps(function)
    async def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            value = function(*args, **kwargs)
            return await value if inspect.isawaitable(value) else value
        except BaseException as error:
            _note(error)
            raise

    return watched


def limit_by_threads() -> None:
    """Let math-verify compare on any thread of this process. Nothing where it is not installed, or done already."""
    if importlib.util.find_spec("math_verify") is None:
        return
    from math_verify import grader, parser

    # Looked up there at each call, so that whoever has imported parse and verify gets it, too.
    for module in (parser, grader):
        if not hasattr(module.timeout, "signals"):
            module.timeout = _by_thread(module.timeout)


def _by_thread(signals: Callable[..., Any]) -> Callable[..., Any]:
    def timeout(timeout_seconds: int | None = 10) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def limited(*args: Any, **kwargs: Any) -> Any:
                if not timeout_seconds or threading.current_thread() is threading.main_thread():
                    return signals(timeout_seconds)(function)(*args, **kwargs)
                return _within(timeout_seconds, lambda: function(*args, **kwargs))

            return limited

        return decorated

    timeout.signals = signals  # type: ignore[attr-defined]
    return timeout


def _within(limit_s: float, function: Callable[[], Any]) -> Any:
    """Its value. Raises math-verify's own error past the limit; the thread goes on then, for nobody."""
    from math_verify.errors import TimeoutException

    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # given to the caller
            future.set_exception(error)

    threading.Thread(target=run, name="math-verify", daemon=True).start()
    try:
        return future.result(limit_s)
    except TimeoutError:
        if future.done():
            raise  # its own
        _note(RuntimeError(f"math-verify could not decide within {limit_s:g} s"))
        raise TimeoutException("Operation timed out!") from None
