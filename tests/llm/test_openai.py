"""The OpenAI-compatible engine and chat, against a stub server on loopback that answers as it should; test_bad_endpoint.py has the others."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from openai_stub import Answer, Stub, adapter_folder, engine, good, request, stub_engine

from stages.frame.types import Completion, EngineUnavailable, Request, UsageError
from stages.llm.openai import OpenAIEngine, chat

pytest.importorskip("openai", reason="the extra `openai` is not installed")


def test_ids_go_out_and_ids_and_log_probs_come_back(stub: Stub) -> None:
    (done,) = engine(stub).generate([request(3)])
    assert done == Completion("seed 3", (3, 3, 2), (-0.5, -0.25, -0.125), "stop")
    path, body, _ = stub.asked[0]
    assert path == "/v1/completions"
    assert {k: body[k] for k in ("model", "prompt", "max_tokens", "temperature", "seed", "return_token_ids")} == {
        "model": "base-model", "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0.7, "seed": 3, "return_token_ids": True,
    }  # fmt: skip
    assert body["logprobs"] >= 1


@pytest.mark.parametrize(
    ("usage", "cached"),
    [({"prompt_tokens_details": {"cached_tokens": 2}}, 2), ({"prompt_tokens_details": None}, None), ("none", None)],
)
def test_what_the_server_had_read_before_is_counted_where_it_says_so(
    stub: Stub, usage: object, cached: int | None
) -> None:
    stub.answer = lambda path, body: (200, {**good(body), "usage": usage})
    assert engine(stub).generate([request(3)])[0].cached == cached


def test_sampling_is_from_the_whole_distribution_whatever_the_model_s_defaults(stub: Stub) -> None:
    engine(stub).generate([request()])
    body = stub.asked[0][1]
    assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1.0, -1, 0.0, 1.0)


def test_completions_keep_the_order_of_their_requests(stub: Stub) -> None:
    def slow_first(path: str, body: dict[str, Any]) -> Answer:
        time.sleep(0.02 * (8 - body["seed"]))
        return 200, good(body)

    stub.answer = slow_first
    assert [c.text for c in engine(stub).generate([request(n) for n in range(1, 8)])] == [
        f"seed {n}" for n in range(1, 8)
    ]
    assert engine(stub).generate([]) == []


@pytest.mark.parametrize("limit", [4, 64])
def test_concurrency_limit_is_kept_and_used(stub: Stub, limit: int) -> None:
    # Nobody passes before `limit` requests are there together: with fewer under way at once the server breaks the
    # barrier.
    together = threading.Barrier(limit, timeout=20)

    def wait(path: str, body: dict[str, Any]) -> Answer:
        together.wait()
        return 200, good(body)

    stub.answer = wait
    engine(stub, concurrency=limit, timeout_s=30.0).generate([request(n) for n in range(1, 2 * limit + 1)])
    assert stub.busiest == limit


def test_log_probs_that_rounding_left_just_above_0_are_taken_as_they_are(stub: Stub) -> None:
    stub.answer = lambda path, body: (200, good(body, logprobs={"token_logprobs": [-1.0, 1e-6, 0.0]}))
    assert engine(stub).generate([request()])[0].log_probs == (-1.0, 1e-6, 0.0)


def test_how_long_an_endpoint_is_waited_for_is_config(stub: Stub) -> None:
    from flows import presets
    from flows.workspace import make_engine

    run = presets.load("tiny", ["model.engine=openai", f"model.url={stub.url}", "model.timeout_s=0.2"])
    made = make_engine(run)
    made.tokenizer = stub_engine(stub.url).tokenizer  # type: ignore[attr-defined]

    def slow(path: str, body: dict[str, Any]) -> Answer:
        time.sleep(0.6)
        return 200, good(body)

    stub.answer = slow
    with pytest.raises(EngineUnavailable, match=r"did not answer in 5 tries of 0\.2 s"):
        made.generate([request()])


def test_how_many_requests_are_under_way_at_an_endpoint_is_config(stub: Stub) -> None:
    from flows import presets
    from flows.workspace import make_engine

    made = make_engine(presets.load("tiny", ["model.engine=openai", f"model.url={stub.url}", "model.concurrency=3"]))
    made.tokenizer = stub_engine(stub.url).tokenizer  # type: ignore[attr-defined]

    def slow(path: str, body: dict[str, Any]) -> Answer:
        time.sleep(0.1)
        return 200, good(body)

    stub.answer = slow
    made.generate([request(n) for n in range(1, 10)])
    assert stub.busiest == 3


def test_url_without_a_path_means_v1(stub: Stub) -> None:
    stub_engine(stub.url.removesuffix("/v1")).generate([request()])
    assert stub.asked[0][0] == "/v1/completions"


def test_adapter_is_loaded_once_and_is_the_model_s_name(stub: Stub, tmp_path: Path) -> None:
    client, folder = engine(stub), adapter_folder(tmp_path / "a")
    stub.answer, stub.content_type = lambda path, body: (200, "Success: LoRA adapter 'run1' added."), "text/plain"
    client.load_adapter("run1", folder)
    client.load_adapter("run1", folder)
    stub.answer, stub.content_type = lambda path, body: (200, good(body)), "application/json"
    client.generate([request(adapter="run1"), request(adapter=None)])
    loads = [body for path, body, _ in stub.asked if path == "/v1/load_lora_adapter"]
    (name,) = [body["lora_name"] for body in loads]
    assert loads == [{"lora_name": name, "lora_path": str(folder.resolve())}]
    assert name.startswith("run1-")
    assert {body["model"] for path, body, _ in stub.asked if path == "/v1/completions"} == {name, "base-model"}


def test_an_adapter_is_named_by_its_weights_so_one_that_the_server_has_is_taken_as_it_is(
    stub: Stub, tmp_path: Path
) -> None:
    held: list[str] = []

    def answer(path: str, body: dict[str, Any]) -> Answer:
        if body["lora_name"] in held:
            return 400, {"error": {"message": f"The lora adapter '{body['lora_name']}' has already been loaded."}}
        held.append(body["lora_name"])
        return 200, {}

    stub.answer = answer
    folder = adapter_folder(tmp_path / "a")
    engine(stub).load_adapter("run1", folder)
    engine(stub).load_adapter("run1", folder)  # another process
    (folder / "adapter_model.safetensors").write_bytes(b"others")
    engine(stub).load_adapter("run1", folder)
    assert len(stub.asked) == 3 and len(set(held)) == 2


def test_adapter_errors_say_what_to_do(stub: Stub, tmp_path: Path) -> None:
    client = engine(stub)
    with pytest.raises(EngineUnavailable, match="'run1' was never loaded"):
        client.generate([request(adapter="run1")])
    with pytest.raises(UsageError, match="LoRA adapter"):
        client.load_adapter("run1", tmp_path)
    stub.answer = lambda path, body: (404, {"detail": "Not Found"})
    with pytest.raises(EngineUnavailable, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        client.load_adapter("run1", adapter_folder(tmp_path / "a"))
    foreign = adapter_folder(tmp_path / "b")
    (foreign / "base.json").write_text(json.dumps({"model_hash": "0" * 64}))
    with pytest.raises(UsageError, match="belongs to base model"):
        client.load_adapter("run2", foreign)


def test_tokenizer_is_local_and_its_ids_are_sent(stub: Stub, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<unk>", "<end>", "user", "assistant", "hello"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<end>")
    fast.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} <end> {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
    fast.save_pretrained(tmp_path)
    client = OpenAIEngine(str(tmp_path), url=stub.url)
    ids = client.encode([{"role": "user", "content": "hello"}])
    assert ids == (2, 4, 1, 3)
    assert client.decode((4, 1)) == "hello"
    client.generate([Request(ids, 8, 0.0, 0)])
    assert stub.asked[0][1]["prompt"] == list(ids)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"^model.path: tokenizer.json or tokenizer_config.json at .* cannot be read"):
        OpenAIEngine(str(tmp_path / "empty"), url=stub.url).encode([])
    with pytest.raises(UsageError, match=r"^model.path: there is no folder"):
        OpenAIEngine(str(tmp_path / "none"), url=stub.url).encode([])


def test_chat_gives_the_reply_s_text(stub: Stub) -> None:
    stub.answer = lambda path, body: (
        200,
        {"choices": [{"message": {"role": "assistant", "content": f"{len(body['messages'])} Yes"}}]},
    )
    ask = chat(stub.url, "oracle", max_tokens=5)
    assert ask([{"role": "user", "content": "hi"}]) == "1 Yes"
    path, body, _ = stub.asked[0]
    assert path == "/v1/chat/completions"
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("oracle", 0.0, 5)
    ask([{"role": "user", "content": "hi"}], temperature=0.75, seed=9)
    assert [(asked["temperature"], asked["seed"]) for _, asked, _ in stub.asked] == [(0.0, 0), (0.75, 9)]
