"""Several servers as one engine, against stubs on loopback: shares, failures, returns, adapters."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai_stub import Answer, Stub, adapter_folder, good, stub_engine

from flows import presets
from stages.frame.types import Completion, EngineUnavailable, Request, UsageError
from stages.llm.openai import OpenAIEngine, chat

pytest.importorskip("openai", reason="the extra `openai` is not installed")

PAUSE_S = 0.3


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Stub]]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    servers = [Stub() for _ in range(3)]
    for server in servers:
        server.answer = fine
    yield servers
    for stub in servers:
        stub.server.shutdown()
        stub.server.server_close()


def engine(stubs: list[Stub], **settings: Any) -> OpenAIEngine:
    return stub_engine([s.url for s in stubs], **{"retries": 1, "concurrency": 4, "pause_s": PAUSE_S, **settings})


def requests(n: int, **changes: Any) -> list[Request]:
    return [Request((5, 6, 7), **{"max_tokens": 8, "temperature": 0.7, "seed": seed, **changes}) for seed in range(n)]


def right(found: list[Completion]) -> bool:
    return [done.text for done in found] == [f"seed {seed}" for seed in range(len(found))]


def completions(stub: Stub) -> int:
    return sum(path == "/v1/completions" for path, _, _ in stub.asked)


def fine(path: str, body: dict[str, Any]) -> Answer:
    return 200, good(body) if path == "/v1/completions" else {}


def down(path: str, body: dict[str, Any]) -> Answer:
    return 503, {"error": {"message": "out of order"}}


def test_requests_are_shared_and_the_slower_server_gets_fewer(stubs: list[Stub]) -> None:
    """The third one answers nothing until the others have done all the rest; with equal shares that would never be."""
    rest_done = threading.Event()

    def fast(path: str, body: dict[str, Any]) -> Answer:
        if completions(stubs[0]) + completions(stubs[1]) >= 90 - 4:
            rest_done.set()
        return fine(path, body)

    def slow(path: str, body: dict[str, Any]) -> Answer:
        return fine(path, body) if rest_done.wait(20) else (500, {})

    for stub, answer in zip(stubs, (fast, fast, slow), strict=True):
        stub.answer = answer
    assert right(engine(stubs, timeout_s=30.0, retries=0).generate(requests(90)))
    shares = [completions(stub) for stub in stubs]
    assert (shares[2], sum(shares)) == (4, 90)
    assert min(shares[:2]) > 20
    assert max(stub.busiest for stub in stubs) <= 4


def test_a_server_that_fails_is_set_aside_and_the_others_do_its_work(stubs: list[Stub]) -> None:
    stubs[1].answer = down
    client = engine(stubs, pause_s=60.0)
    assert right(client.generate(requests(24)))
    failed = completions(stubs[1])
    assert 0 < failed <= 2 * 4  # what had left for it, each in two tries
    assert right(client.generate(requests(24)))
    assert completions(stubs[1]) == failed
    assert completions(stubs[0]) + completions(stubs[2]) == 48


def test_a_server_is_asked_again_after_a_while(stubs: list[Stub]) -> None:
    stubs[1].answer = down
    client = engine(stubs)
    client.generate(requests(12))
    stubs[1].answer = fine
    before = completions(stubs[1])
    time.sleep(PAUSE_S)
    assert right(client.generate(requests(24)))
    assert completions(stubs[1]) > before


def test_all_down_names_each_and_the_next_call_tries_them_again(stubs: list[Stub]) -> None:
    for stub in stubs:
        stub.answer = down
    client = engine(stubs, pause_s=60.0)
    with pytest.raises(EngineUnavailable, match="out of order") as caught:
        client.generate(requests(1))
    for stub in stubs:
        assert stub.url.split("/")[2] in str(caught.value)
    stubs[2].answer = fine
    assert right(client.generate(requests(4)))


def test_a_server_that_is_not_there_costs_no_request(stubs: list[Stub]) -> None:
    stubs[0].server.shutdown()
    stubs[0].server.server_close()
    client = engine(stubs)
    assert right(client.generate(requests(12)))
    time.sleep(PAUSE_S)
    began = time.monotonic()
    assert right(client.generate(requests(12)))
    assert time.monotonic() - began < 2  # a server that was set aside is asked once, without waits


def test_a_refusal_is_final_and_sets_nobody_aside(stubs: list[Stub]) -> None:
    for stub in stubs:
        stub.answer = lambda path, body: (400, {"error": {"message": "no such thing"}})
    client = engine(stubs)
    with pytest.raises(EngineUnavailable, match="no such thing"):
        client.generate(requests(1))
    assert sum(map(completions, stubs)) == 1
    for stub in stubs:
        stub.answer = fine
    assert right(client.generate(requests(12)))
    assert all(map(completions, stubs))


def test_every_server_loads_an_adapter_and_one_that_comes_back_does_so_before_its_first_request(
    stubs: list[Stub], tmp_path: Path
) -> None:
    client = engine(stubs)
    client.load_adapter("a1", adapter_folder(tmp_path / "a1"))
    stubs[1].answer = down
    client.load_adapter("a2", adapter_folder(tmp_path / "a2"))
    client.load_adapter("a3", adapter_folder(tmp_path / "a3"))
    assert loaded(stubs[0]) == loaded(stubs[2]) == ["a1", "a2", "a3"]
    stubs[1].answer = fine
    stubs[1].asked.clear()
    time.sleep(PAUSE_S)
    assert right(client.generate(requests(24, adapter="a3")))
    assert loaded(stubs[1]) == ["a1", "a2", "a3"]
    assert [path for path, _, _ in stubs[1].asked][:4] == ["/v1/load_lora_adapter"] * 3 + ["/v1/completions"]


def loaded(stub: Stub) -> list[str]:
    """Names of the adapters that it was told to load, a repeated one once."""
    return list(
        dict.fromkeys(
            body["lora_name"].partition("-")[0] for path, body, _ in stub.asked if path == "/v1/load_lora_adapter"
        )
    )


def test_a_server_that_was_started_anew_gets_its_adapters_again(stubs: list[Stub], tmp_path: Path) -> None:
    """It says 404: it has never heard of the model. Alone, it fails this call; the next one finds it with its adapters."""
    client = engine(stubs[:1])
    client.load_adapter("a1", adapter_folder(tmp_path / "a1"))
    knows: list[str] = []

    def forgetful(path: str, body: dict[str, Any]) -> Answer:
        if path == "/v1/load_lora_adapter":
            knows.append(body["lora_name"])
            return 200, {}
        return (
            (200, good(body))
            if body["model"] in knows
            else (404, {"error": {"message": f"The model {body['model']} does not exist."}})
        )

    stubs[0].answer = forgetful
    with pytest.raises(EngineUnavailable, match=r"The model a1-\w+ does not exist"):
        client.generate(requests(3, adapter="a1"))
    assert right(client.generate(requests(3, adapter="a1")))
    assert len(knows) == 1


def test_the_shortest_context_counts(stubs: list[Stub]) -> None:
    for stub, context in zip(stubs, (None, 64, 32), strict=True):
        stub.context = context
    client = engine(stubs)
    assert client.context == 32
    with pytest.raises(
        UsageError, match=r"a prompt of 40 tokens leaves no room for a reply in the model's context of 32"
    ):
        client.generate([Request((1,) * 40, 8, 1.0, 0)])
    client.generate([Request((1,) * 28, 8, 1.0, 0)])
    assert [body["max_tokens"] for stub in stubs for _, body, _ in stub.asked] == [4]


def test_chat_is_shared_too(stubs: list[Stub]) -> None:
    for stub in stubs:
        stub.answer = lambda path, body: (200, {"choices": [{"message": {"role": "assistant", "content": "Yes"}}]})
    stubs[0].answer = down
    ask = chat([stub.url for stub in stubs], "oracle", retries=0)
    assert [ask([{"role": "user", "content": "hi"}]) for _ in range(3)] == ["Yes"] * 3


def test_a_config_holds_one_url_or_several() -> None:
    assert presets.load("tiny", ["model.url=http://127.0.0.1:1/v1"]).model.url == "http://127.0.0.1:1/v1"
    several = presets.load("tiny", ['model.url=["http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"]'])
    assert several.model.url == ("http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1")
    assert presets.resolve(several.model_dump(mode="json")).model.url == several.model.url
    with pytest.raises(UsageError, match=r"^model.url: wanted a base URL .* or a list of them, found none"):
        OpenAIEngine("m", url=[])
