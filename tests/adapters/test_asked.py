"""The endpoint behind which somebody plays, by HTTP."""

from __future__ import annotations

import json
import queue
import threading
from typing import Any

import pytest
import requests

from stages.adapters.asked import Question, asking

CALL = {"id": "call_1", "type": "function", "function": {"name": "times", "arguments": "{}"}}


def post(url: str, session: str, **body: Any) -> requests.Response:
    given = {"messages": [{"role": "user", "content": "Hi."}], **body}
    return requests.post(f"{url}/chat/completions", json=given, headers={"X-Session-ID": session}, timeout=30)


def answered(found: queue.SimpleQueue[Any], message: dict[str, Any] | Exception) -> None:
    """Reply to the next question, beside the request that waits for it."""

    def reply() -> None:
        question: Question = found.get(timeout=30)
        assert question.messages == [{"role": "user", "content": "Hi."}]
        if isinstance(message, Exception):
            question.reply.set_exception(message)
        else:
            question.reply.set_result(message)

    threading.Thread(target=reply).start()


def test_each_request_waits_for_the_reply_of_its_own_session() -> None:
    with asking() as asked:
        first: queue.SimpleQueue[Any] = queue.SimpleQueue()
        second: queue.SimpleQueue[Any] = queue.SimpleQueue()
        asked.sessions |= {"a": first, "b": second}
        said: dict[str, Any] = {}
        waiting = threading.Thread(target=lambda: said.update(post(asked.url, "a").json()))
        waiting.start()
        answered(second, {"role": "assistant", "content": "for b"})
        assert post(asked.url, "b").json()["choices"][0]["message"]["content"] == "for b" and not said
        first.get(timeout=30).reply.set_result({"role": "assistant", "content": "for a"})
        waiting.join(30)
        assert said["choices"][0] == {
            "index": 0,
            "message": {"role": "assistant", "content": "for a"},
            "finish_reason": "stop",
        }


def test_a_stream_says_the_same_in_events() -> None:
    with asking() as asked:
        found = asked.sessions["a"] = queue.SimpleQueue()
        answered(found, {"role": "assistant", "content": "x", "tool_calls": [CALL]})
        response = post(asked.url, "a", stream=True)
    assert response.headers["Content-Type"] == "text/event-stream"
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    first, last = (json.loads(event)["choices"][0] for event in events[:2])
    assert events[2:] == ["[DONE]"] and last["finish_reason"] == "tool_calls"
    assert first["delta"] == {"role": "assistant", "content": "x", "tool_calls": [{"index": 0, **CALL}]}


@pytest.mark.parametrize(("session", "status"), [("a", 500), ("nobody", 400)])
def test_what_nobody_answers_is_an_error(session: str, status: int) -> None:
    with asking() as asked:
        found = asked.sessions["a"] = queue.SimpleQueue()
        answered(found, RuntimeError("the episode was given up"))
        response = post(asked.url, session)
        if status == 400:
            post(asked.url, "a")  # so that the other thread ends
    assert response.status_code == status and ("given up" in response.text or "nobody plays" in response.text)
