"""Replies that are kept by what was asked: by hand, among threads, over a damaged file, and through a whole collect."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
from openai_stub import Stub

from stages.collect import STAGE, CollectConfig
from stages.frame.sections import ModelConfig, RolesConfig, TaskConfig
from stages.frame.types import EngineUnavailable, Message, Request, SimulatorError, UsageError
from stages.llm.cassette import recorded
from stages.llm.scripted import ScriptedEngine
from stages.play.environment import environment

HELLO: list[Message] = [{"role": "user", "content": "hello"}]


class Teller:
    """Says "1", "2", ... and never the same again."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, messages: Sequence[Message], *, temperature: float = 0.0, seed: int = 0) -> str:
        self.n += 1
        return str(self.n)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kept" / "customer.cassette"


def test_the_same_request_is_asked_once_and_every_other_one_anew(file: Path) -> None:
    teller = Teller()
    ask = recorded(teller, file, {"model": "a"})
    assert [ask(HELLO), ask(HELLO)] == ["1", "1"]
    assert ask(HELLO, seed=1) == "2"
    assert ask(HELLO, temperature=1.0) == "3"
    assert ask([*HELLO, *HELLO]) == "4"
    assert ask([{"role": "user", "content": "hell\ud800o"}]) == "5"
    assert recorded(teller, file, {"model": "b"})(HELLO) == "6"
    again = recorded(teller, file, {"model": "a"}, only=True)
    assert [again(HELLO), again(HELLO, seed=1), again([*HELLO, *HELLO])] == ["1", "2", "4"]
    assert teller.n == 6


def test_with_only_what_it_holds_a_missing_reply_fails_the_episode_and_nobody_is_asked(file: Path) -> None:
    teller = Teller()
    with pytest.raises(UsageError, match=r"task\.cassette: there is no file .*; record it first"):
        recorded(teller, file, {}, only=True)
    recorded(teller, file, {})(HELLO)
    with pytest.raises(SimulatorError, match="has no reply to 'good bye'"):
        recorded(teller, file, {}, only=True)([{"role": "user", "content": "good\nbye"}])
    assert teller.n == 1


def test_what_failed_is_not_kept(file: Path) -> None:
    answers: Iterator[Any] = iter([EngineUnavailable("down"), "up"])

    def ask(messages: Sequence[Message], *, temperature: float = 0.0, seed: int = 0) -> str:
        if isinstance(found := next(answers), Exception):
            raise found
        return str(found)

    with pytest.raises(EngineUnavailable):
        recorded(ask, file, {})(HELLO)
    assert recorded(ask, file, {})(HELLO) == "up"


def test_of_two_who_ask_the_same_at_once_both_have_the_first_reply(file: Path) -> None:
    """Both have found nothing before either is answered."""
    both, number = threading.Barrier(2), itertools.count()

    def ask(messages: Sequence[Message], *, temperature: float = 0.0, seed: int = 0) -> str:
        both.wait(30)
        return str(next(number))

    answer = recorded(ask, file, {})
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(answer, [HELLO, HELLO]))
    assert said[0] == said[1] == answer(HELLO) and next(number) == 2


@pytest.mark.parametrize("damage", ["no database", "a folder"])
def test_a_file_that_is_no_cassette_is_one_sentence(damage: str, file: Path) -> None:
    file.parent.mkdir()
    file.mkdir() if damage == "a folder" else file.write_bytes(b"nonsense" * 999)
    with pytest.raises(UsageError, match=r"^task\.cassette: .* cannot be used \(.*\)\. Name another file\.$"):
        recorded(Teller(), file, {})


def test_it_is_for_endpoints_alone() -> None:
    task = TaskConfig(env="twenty_questions", cassette="kept")
    context: Any = SimpleNamespace(run=SimpleNamespace(task=task, roles=RolesConfig(), model=ModelConfig()))
    with pytest.raises(UsageError, match=r"task\.cassette: it keeps the answers of task\.oracle = openai, found rule"):
        environment(context)


QUESTIONS = ("Is it alive?", "Is it large?", "Is it a tool?", "Does it fly?")


def asking(prompt: str, request: Request) -> str:
    return f"Thought: let me see.\nAction: {QUESTIONS[request.seed % 4]}"


def noisy(number: Iterator[int], path: str, body: Mapping[str, Any]) -> tuple[int, object]:
    """An oracle whose every third answer is another one than the object's."""
    said = "Yes" if next(number) % 3 == 0 else "No"
    return 200, {"choices": [{"message": {"role": "assistant", "content": said}}]}


def test_a_collect_repeats_from_the_cassette_without_its_oracle(base: Path, tmp_path: Path, file: Path) -> None:
    """The oracle answers by chance; with the cassette the second collect has its rows, and its server is gone."""
    stub = Stub()
    stub.answer = partial(noisy, itertools.count())
    options = {"questions": 4}
    task = TaskConfig(
        env="twenty_questions",
        options=options,
        oracle="openai",
        oracle_url=stub.url,
        oracle_model="o",
        cassette=str(file),
    )
    config = CollectConfig(episodes=12, first_episodes=12)

    def collect(folder: str, task: TaskConfig) -> Any:
        bench = models.Bench(base, tmp_path / folder, task=task, engine=ScriptedEngine(asking))
        return {table: without_run(rows) for table, rows in bench.run(STAGE, config, {}).rows.items()}

    first = collect("one", task)
    asked = len(stub.asked)
    assert asked > 12
    stub.server.shutdown()
    stub.server.server_close()
    assert collect("two", task.model_copy(update={"cassette_only": True})) == first
    assert len(stub.asked) == asked


def without_run(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in ("run_id", "seconds")} for row in rows]
