"""An environment behind the border: the same Env, with every answer checked and a time limit on each.

`envs.make_env`, `rollout` and the adapters for other libraries wrap every environment in it.
"""

from __future__ import annotations

import contextvars
import copy
import queue
import threading
import weakref
from asyncio import CancelledError
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from stages.frame.border import At, BrokenEnvironment, failure, messages_of, step_of, text_of, tools_of
from stages.frame.types import Env, Malformed, Message, Scenario, Step

T = TypeVar("T")

LEAVING = (SystemExit, GeneratorExit, CancelledError)
"""What ends a program or a task, and no Exception. Of an environment it is a failure like any other."""


class EnvironmentLeft(RuntimeError):
    """An environment tried to end the program."""


class EnvironmentSilent(RuntimeError):
    """An environment did not answer within task.step_timeout_s."""


def checked(make_env: Callable[[], Env], where: str = "", *, limit_s: float = 0.0, more: str = "") -> Callable[[], Env]:
    """The same maker, of checked environments; one that is checked already stays as it is.

    where: what a breach names; "" = the class of what is made. limit_s: seconds that an answer may take, 0 = any.
    more: the command that looks for other breaches.
    """
    return lambda: _checked(make_env, where, limit_s, more)


def _checked(make_env: Callable[[], Env], where: str, limit_s: float, more: str) -> Env:
    answers = _Answers(limit_s) if limit_s else None
    env = _called(answers, "make", make_env)
    if isinstance(env, CheckedEnv):
        return env
    where = where or f"{type(env).__module__}.{type(env).__qualname__}"
    at = At(where, "make", more)
    if not all(callable(getattr(env, name, None)) for name in ("reset", "step")):
        raise at.broken("an object with reset and step", type(env).__name__, "return a function that makes an Env")
    return CheckedEnv(env, at, answers)


class CheckedEnv:
    """One running episode. Raises BrokenEnvironment, EnvironmentLeft, EnvironmentSilent, and what it raises."""

    def __init__(self, env: Env, at: At, answers: _Answers | None) -> None:
        self._env, self._at, self._answers = env, at, answers

    @property
    def system(self) -> str:
        return text_of(self._method("system"), "system", getattr(self._env, "system", None))

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return tools_of(self._method("tools"), getattr(self._env, "tools", None))

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        # A copy: what an environment changes in it must not reach the episodes beside, nor the stored one.
        own = replace(scenario, data=copy.deepcopy(dict(scenario.data)))
        return self._passed("reset", lambda: self._env.reset(own), messages_of)

    def step(self, message: Message) -> Step:
        """Act. Raises Malformed as the environment does."""
        try:
            return self._passed("step", lambda: self._env.step(message), step_of)
        except Malformed as error:
            text_of(self._method("step"), "text of Malformed, which the policy reads,", str(error))
            raise

    def _method(self, name: str) -> At:
        return replace(self._at, method=name)

    def _passed(self, name: str, call: Callable[[], Any], check: Callable[[At, Any], T]) -> T:
        try:
            answer = _called(self._answers, name, call)
        except BrokenEnvironment as error:  # of an adapter inside of it
            if error.where.startswith(self._at.where):
                raise
            method, wanted, found, fix = error.said
            inside = f"{self._at.where} ({error.where})"
            raise BrokenEnvironment(inside, method, wanted, found, fix, self._at.more) from error
        return check(self._method(name), answer)


def _called(answers: _Answers | None, name: str, call: Callable[[], T]) -> T:
    try:
        return call() if answers is None else answers.of(name, call)
    except LEAVING as error:
        raise EnvironmentLeft(f"{name} wanted to end the program ({failure(error)})") from error


class _Answers:
    """Calls of one environment, all in one thread of its own, since it may hold what belongs to a thread. One that does
    not end is left behind there, and so is the environment: the thread ends with the process.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._calls,), name="environment", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def of(self, name: str, call: Callable[[], T]) -> T:
        future: Future[T] = Future()
        context = contextvars.copy_context()

        def answer() -> None:
            try:
                future.set_result(context.run(call))
            except BaseException as error:  # given to who asked
                future.set_exception(error)

        self._calls.put(answer)
        try:
            return future.result(self._limit_s)
        except TimeoutError:
            if future.done():
                raise  # its own
            raise EnvironmentSilent(f"{name} has not answered within task.step_timeout_s = {self._limit_s:g}") from None


def _work(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # it holds the environment, whose end ends this thread
