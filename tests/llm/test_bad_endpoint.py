"""The OpenAI-compatible engine against an endpoint that is overloaded, silent, wrong or not to be trusted with a key."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai_stub import N_IDS, Answer, Stub, engine, good, request

from stages.frame.types import EngineUnavailable, UsageError
from stages.llm import bounded
from stages.llm.openai import OpenAIEngine, chat

pytest.importorskip("openai", reason="the extra `openai` is not installed")


KEY = "sk-secret-0123456789"


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_overload_is_tried_again(stub: Stub, status: int) -> None:
    stub.answer = lambda path, body: (
        (200, good(body)) if len(stub.asked) > 2 else (status, {"error": {"message": "later"}})
    )
    assert engine(stub).generate([request()])[0].text == "seed 3"
    assert len(stub.asked) == 3


def test_overload_that_lasts_is_an_error_after_the_retries(stub: Stub) -> None:
    stub.answer = lambda path, body: (503, {"error": {"message": "too many\nrequests"}})
    with pytest.raises(EngineUnavailable, match=r"status 503: too many requests"):
        engine(stub).generate([request()])
    assert len(stub.asked) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_is_final(stub: Stub, status: int) -> None:
    stub.answer = lambda path, body: (status, {"error": {"message": "no such thing"}})
    with pytest.raises(EngineUnavailable, match=f"status {status}"):
        engine(stub).generate([request()])
    assert len(stub.asked) == 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"detail": "Not enough GPUs"}, "Not enough GPUs"),
        (
            {"detail": [{"loc": ["body", "seed"], "msg": "not an int"}, {"msg": "no prompt", "type": "missing"}]},
            "not an int; no prompt",
        ),
        ({"object": "error", "message": "too long"}, "too long"),
        ({"error": "overloaded"}, "overloaded"),
        ("a page", "a page"),
        ({}, "no reason given"),
    ],
)
def test_a_refusal_quotes_the_reason_wherever_a_server_puts_it(stub: Stub, body: object, reason: str) -> None:
    stub.answer = lambda path, asked: (422, body)
    with pytest.raises(EngineUnavailable, match=f"status 422: {reason}$"):
        engine(stub).generate([request()])


def test_silence_is_a_timeout_and_tried_again(stub: Stub) -> None:
    def silent(path: str, body: dict[str, Any]) -> Answer:
        time.sleep(0.6)
        return 200, good(body)

    stub.answer = silent
    with pytest.raises(EngineUnavailable, match=r"did not answer in 2 tries of 0\.2 s"):
        engine(stub, timeout_s=0.2, retries=1).generate([request()])
    assert len(stub.asked) == 2


def test_server_that_is_not_there_is_named(stub: Stub) -> None:
    stub.server.shutdown()
    stub.server.server_close()
    with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:\d+ cannot be reached \(1 tries\)"):
        engine(stub, retries=0).generate([request()])


def test_first_failure_cancels_the_rest(stub: Stub) -> None:
    def one_bad(path: str, body: dict[str, Any]) -> Answer:
        if body["seed"] == 1:
            return 400, {"error": {"message": "bad"}}
        time.sleep(0.1)
        return 200, good(body)

    stub.answer = one_bad
    with pytest.raises(EngineUnavailable, match="bad"):
        engine(stub, concurrency=2).generate([request(n) for n in range(1, 100)])
    time.sleep(0.3)  # what had left already may arrive late where the machine is busy
    asked = len(stub.asked)
    time.sleep(0.3)
    assert len(stub.asked) == asked < 20


GARBAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no JSON": (lambda body: "<html>busy</html>", "no JSON"),
    "no object": (lambda body: [1, 2], "no JSON object"),
    "no choices": (lambda body: {"object": "text_completion"}, "no choices"),
    "empty choices": (lambda body: {"choices": []}, "no choices"),
    "choice is no object": (lambda body: {"choices": ["x"]}, "a choice is no object"),
    "no ids": (lambda body: good(body, token_ids=None), "token ids are missing"),
    "empty ids": (lambda body: good(body, token_ids=[]), "token ids are missing"),
    "ids are text": (lambda body: good(body, token_ids=["a", "b", "c"]), "token ids are missing"),
    "negative id": (lambda body: good(body, token_ids=[1, -2, 3]), "token ids are missing"),
    "no log-probs": (lambda body: good(body, logprobs=None), "log-probs are missing"),
    "null log-prob": (lambda body: good(body, logprobs={"token_logprobs": [-1, None, -1]}), "log-probs are missing"),
    "lengths differ": (lambda body: good(body, logprobs={"token_logprobs": [-1.0]}), "3 token ids but 1 log-probs"),
    "NaN": (lambda body: good(body, logprobs={"token_logprobs": [-1.0, float("nan"), -1.0]}), "not finite"),
    "minus infinity": (lambda body: good(body, logprobs={"token_logprobs": [-1.0, -9999.0, -1.0]}), "not finite"),
    "above 0": (
        lambda body: good(body, logprobs={"token_logprobs": [-1.0, 0.25, -1.0]}),
        "a log-prob is 0.25, above 0",
    ),
    "no such id": (
        lambda body: good(body, token_ids=[1, N_IDS, 2]),
        "token id 5000 is none of the 5000 of the tokenizer at model.path",
    ),
    "too long": (lambda body: good(body, token_ids=[1] * 9, logprobs={"token_logprobs": [-1.0] * 9}), "at most 8"),
    "an id beyond 32 bits": (
        lambda body: good(body, token_ids=[1, 2**32, 2]),
        "token id 4294967296 is none of the 5000",
    ),
    "a whole number beyond floats": (
        lambda body: good(body, logprobs={"token_logprobs": [-1.0, -(10**400), -1.0]}),
        "not finite",
    ),
    "a log-prob far above 0": (
        lambda body: good(body, logprobs={"token_logprobs": [-1, 10**400, -1]}),
        "a log-prob is 10000000000000000000, above 0",
    ),
    "minus infinity in other words": (lambda body: json.dumps(good(body)).replace("-0.25", "-1e400"), "not finite"),
    "deep": (lambda body: "[" * 100_000 + "]" * 100_000, "no JSON"),
    "a number of 10,000 digits": (lambda body: '{"choices": ' + "1" * 10_000 + "}", "no JSON"),
    "a long reason with colours": (lambda body: good(body, finish_reason="\x1b[31m" + "x" * 10**6), "finish reason '"),
    "aborted": (lambda body: good(body, finish_reason="abort"), "finish reason 'abort'"),
    "another prompt": (lambda body: good(body, prompt_token_ids=[1, *body["prompt"]]), "not the one that was sent"),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_one_clear_sentence_and_not_tried_again(stub: Stub, kind: str) -> None:
    make, said = GARBAGE[kind]
    stub.answer = lambda path, body: (200, make(body))
    with pytest.raises(EngineUnavailable) as caught:
        engine(stub).generate([request()])
    text = str(caught.value)
    assert text.startswith("the engine at 127.0.0.1:")
    assert said in text
    assert text.isprintable() and len(text) < 500
    assert len(stub.asked) == 1


def test_what_a_server_says_moves_no_cursor_and_is_cut(stub: Stub) -> None:
    said = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m" + "long " * 10**5
    bodies: list[object] = [{"error": {"message": said}}, {"detail": [{"msg": said}]}, said]
    stub.answer = lambda path, asked: (422, bodies[0])
    while bodies:
        with pytest.raises(EngineUnavailable) as caught:
            engine(stub).generate([request()])
        assert str(caught.value).isprintable() and len(str(caught.value)) < 500
        del bodies[0]
    nested: object = said
    for _ in range(900):
        nested = {"message": nested}
    stub.answer = lambda path, asked: (422, nested)
    with pytest.raises(EngineUnavailable, match="no reason given"):
        engine(stub).generate([request()])


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(stub: Stub, status: int) -> None:
    other = Stub()
    stub.headers = {"Location": f"{other.url}/completions"}
    stub.answer = lambda path, body: (status, "")
    try:
        with pytest.raises(
            EngineUnavailable, match=rf"status {status}: it sends on to another address, which is not followed"
        ):
            engine(stub).generate([request()])
    finally:
        other.server.shutdown()
        other.server.server_close()
    assert other.asked == [] and other.greeted == 0


def test_a_reply_beyond_the_limit_is_refused_as_it_comes_and_not_asked_for_again(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "LARGEST", 1 << 20)
    sent: list[int] = []

    def endless(path: str, body: dict[str, Any]) -> Iterator[bytes]:
        while len(sent) < 1000:
            sent.append(1)
            yield b" " * (1 << 16)

    stub.pieces = endless
    with pytest.raises(EngineUnavailable, match=r"answered garbage: a reply of more than 64 MB\.$"):
        engine(stub).generate([request()])
    assert len(sent) < 500 and len(stub.asked) == 1


def test_a_compressed_reply_is_not_unpacked(stub: Stub) -> None:
    stub.headers = {"Content-Encoding": "gzip"}
    with pytest.raises(EngineUnavailable, match="a reply that is compressed, which nobody asked for"):
        engine(stub).generate([request()])


def test_a_reply_that_never_ends_is_a_silence(stub: Stub) -> None:
    def dripping(path: str, body: dict[str, Any]) -> Iterator[bytes]:
        for _ in range(100):
            time.sleep(0.05)
            yield b" "

    stub.pieces = dripping
    started = time.monotonic()
    with pytest.raises(EngineUnavailable, match=r"did not answer in 2 tries of 0\.3 s"):
        engine(stub, timeout_s=0.3, retries=1).generate([request()])
    assert time.monotonic() - started < 4


@pytest.mark.parametrize("status", [200, 400, 401, 500])
def test_key_is_sent_and_told_to_nobody(
    stub: Stub, status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    stub.answer = lambda path, body: (status, {"error": {"message": f"Incorrect API key provided: {KEY}"}})
    with pytest.raises(EngineUnavailable) as caught:
        engine(stub, retries=1).generate([request()])
    assert stub.asked[0][2] == f"Bearer {KEY}"
    assert KEY not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert KEY not in caplog.text
    assert KEY not in repr(vars(engine(stub)))


def test_key_over_plain_http_to_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    for url in ("http://10.0.0.7:8000/v1", "http://example.org/v1", "http://localhost.example.org/v1"):
        with pytest.raises(UsageError, match="plain http") as caught:
            OpenAIEngine("m", url=url)
        assert KEY not in str(caught.value)
    for url in ("http://127.0.0.1:1/v1", "http://localhost:1/v1", "http://[::1]:1/v1", "https://example.org/v1"):
        OpenAIEngine("m", url=url)
    monkeypatch.delenv("OPENAI_API_KEY")
    OpenAIEngine("m", url="http://10.0.0.7:8000/v1")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "ftp://127.0.0.1/v1",
        "http://",
        "http://me:word@127.0.0.1/v1",
        "http://127.0.0.1/v1?key=word",
    ],
)
def test_url_that_is_none_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(UsageError, match=r"model\.url: wanted a base URL") as caught:
        OpenAIEngine("m", url=url)
    assert "word" not in str(caught.value)


@pytest.mark.parametrize(
    "reply", [{}, {"choices": []}, {"choices": [{}]}, {"choices": [{"message": {"content": None}}]}, "no JSON"]
)
def test_chat_without_text_is_garbage(stub: Stub, reply: object) -> None:
    stub.answer = lambda path, body: (200, reply)
    with pytest.raises(EngineUnavailable, match="answered garbage"):
        chat(stub.url, "oracle")([{"role": "user", "content": "hi"}])
