"""What an engine read, had still, and wrote, by who was asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from stages.frame.types import Completion, Request, Wait
from stages.llm.metered import Metered
from stages.llm.scripted import ScriptedEngine


class Caching(ScriptedEngine):
    """Says that it still had all of a prompt but its last two tokens."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [
            replace(c, cached=len(r.prompt_ids) - 2) for r, c in zip(requests, super().generate(requests), strict=True)
        ]


def requests(role: str, *lengths: int) -> list[Request]:
    return [Request((65,) * n, 5, 0.0, 0, role=role) for n in lengths]


def test_tokens_are_counted_by_who_was_asked() -> None:
    engine = Metered(Caching(lambda prompt, request: "yes"))
    engine.generate(requests("successor", 10, 20))
    engine.generate(requests("combine", 4))
    assert engine.metrics("targets") == {
        "targets/requests": 3.0,
        "targets/generated_tokens": 12.0,
        "targets/read_tokens": 34.0,
        "targets/read_tokens/successor": 30.0,
        "targets/read_tokens/combine": 4.0,
        "targets/cached_share/successor": pytest.approx(26 / 30),
        "targets/cached_share/combine": 0.5,
    }


def test_an_engine_that_does_not_say_what_it_had_has_no_share_of_it_and_one_that_was_not_asked_has_no_metrics() -> None:
    engine = Metered(ScriptedEngine(lambda prompt, request: "yes"))
    assert engine.metrics("critic") == {}
    engine.generate(requests("policy", 3))
    assert not [name for name in engine.metrics("collect") if "cached" in name]


def test_a_stream_counts_the_replies_that_came() -> None:
    engine = Metered(Caching(lambda prompt, request: "yes"))
    waiting = [list(enumerate(requests("policy", 5, 7))), list(enumerate(requests("policy", 11), start=2))]

    def more(wait: Wait) -> Sequence[tuple[int, Request]] | None:
        return waiting.pop(0) if waiting else None

    replies = engine.stream(more)
    assert sorted(number for number, _ in next(replies)) == [0, 1]
    replies.close()
    assert (engine.requests, engine.read["policy"], engine.cached["policy"]) == (2, 12, 8)
