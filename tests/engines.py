"""One engine of each kind over the base model that ships, for the suite that all of them pass, and a second opinion by
transformers.

The vLLM ones need an environment that has vLLM: `make test-vllm`.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models import shake
from openai_stub import Answer, Stub
from torch import Tensor

from stages.frame.types import Completion, Engine, Message, Request
from stages.learn.adapter import new_adapter, save_adapter
from stages.llm.hf import HfEngine, load_base, model_hash
from stages.llm.openai import OpenAIEngine
from stages.llm.scripted import ScriptedEngine

BASE = Path(__file__).resolve().parents[1] / "data" / "base"
CONTEXT = 512  # of that model
RANK = 4
START_S = 600  # vLLM's server imports for a minute and compiles for another on a busy core
HAS_VLLM = importlib.util.find_spec("vllm") is not None
WORDS = ("refund", "lamp", "tent", "radio", "scarf", "mirror", "kettle", "clock", "camera", "bike")


@dataclass(frozen=True)
class Subject:
    """An engine under test, and whether there is a model behind it."""

    kind: str
    engine: Engine
    has_model: bool = True

    def chat(self, i: int) -> tuple[int, ...]:
        """Ids of a prompt of its own for each i."""
        said = " ".join(WORDS[(i // 10**k) % 10] for k in range(3))
        messages: list[Message] = [
            {"role": "system", "content": "Service desk."},
            {"role": "user", "content": f"Ana, gold, wants {said}."},
        ]
        return self.engine.encode(messages if i % 2 else messages[1:])


def save_adapters(folder: Path, n: int = 6, spread: float = 0.1) -> list[Path]:
    """Adapters of the base, each of which changes it in a way of its own. spread: how much."""
    found = []
    for seed in range(n):
        model = shake(
            new_adapter(load_base(str(BASE), "float32")[0], rank=RANK, alpha=2.0 * RANK, seed=0), seed, spread=spread
        )
        save_adapter(model, folder / str(seed), model_hash(str(BASE)))
        found.append(folder / str(seed))
    return found


def distributions(adapter: Path | None, request: Request, completion: Completion, temperature: float = 1.0) -> Tensor:
    """Log-probs of each token in each place of the completion, by one pass of transformers over the whole text."""
    with torch.no_grad():
        logits: Tensor = (
            _model(adapter)(input_ids=torch.tensor([[*request.prompt_ids, *completion.token_ids]])).logits[0].double()
        )
    return (logits / temperature).log_softmax(1)[len(request.prompt_ids) - 1 : -1]


def full_forward(
    adapter: Path | None, pairs: Sequence[tuple[Request, Completion]], *, best: bool = False
) -> list[list[float]]:
    """Log-probs of each completion's tokens, or of the best ones in their places, by `distributions`."""
    found = []
    for request, completion in pairs:
        log_probs_TV = distributions(adapter, request, completion)
        chosen = log_probs_TV.argmax(1) if best else torch.tensor(completion.token_ids)
        found.append([float(x) for x in log_probs_TV.gather(1, chosen[:, None])[:, 0]])
    return found


@cache
def _model(adapter: Path | None) -> Any:
    from peft import PeftModel

    model = load_base(str(BASE), "float32")[0]
    return model if adapter is None else PeftModel.from_pretrained(model, adapter).eval()


@contextmanager
def open_subject(kind: str, log: Path) -> Iterator[Subject]:
    """The engine of that kind over the base; skips without its packages. log: what a server that it starts writes."""
    if kind in ("openai", "server"):
        pytest.importorskip("openai", reason="the extra `openai` is not installed")
    if kind in ("vllm", "server") and not HAS_VLLM:
        pytest.skip("vLLM is not installed here; run: make test-vllm")
    if kind == "scripted":
        yield Subject(kind, ScriptedEngine(_chatter), False)
    elif kind == "hf":
        yield Subject(kind, HfEngine(str(BASE), batch=16))
    elif kind == "openai":
        with served(HfEngine(str(BASE)), str(BASE), CONTEXT) as url:
            yield Subject(kind, OpenAIEngine(str(BASE), url=url))
    elif kind == "server":
        with vllm_server(log) as url:
            yield Subject(kind, OpenAIEngine(str(BASE), url=url))
    else:
        from stages.llm.vllm import VllmEngine

        yield Subject(kind, VllmEngine(str(BASE)))


def _chatter(prompt: str, request: Request) -> str:
    """By prompt and seed, or by the prompt alone at temperature 0."""
    return f"{random.Random(request.seed if request.temperature else 0).random()} {prompt[-40:-20]}"


@contextmanager
def served(inner: Engine, name: str, context: int) -> Iterator[str]:
    """URL of a server that answers as `vllm serve` would, out of another engine. name: of its model."""
    lock, stub = threading.Lock(), Stub()
    stub.context = context
    held: dict[str, Path] = {}

    def answer(path: str, body: dict[str, Any]) -> Answer:
        with lock:
            if path == "/v1/load_lora_adapter":
                held[body["lora_name"]] = Path(body["lora_path"])
                return 200, {}
            adapter = None if body["model"] == name else body["model"]
            if adapter is not None:
                # again, where the inner engine has put it out for newer ones
                inner.load_adapter(adapter, held[adapter])
            request = Request(tuple(body["prompt"]), body["max_tokens"], body["temperature"], body["seed"], adapter)
            (done,) = inner.generate([request])
        choice = {
            "text": done.text, "finish_reason": done.finish_reason, "token_ids": list(done.token_ids), "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": list(done.log_probs)},
        }  # fmt: skip
        return 200, {"choices": [choice]}

    stub.answer = answer
    yield stub.url
    stub.server.shutdown()
    stub.server.server_close()


@contextmanager
def vllm_server(log: Path) -> Iterator[str]:
    """URL of a real vLLM server on loopback, for as long as the block lasts.

    Its module, not `vllm serve`: that asks for the version of a package named vllm, which the build for CPUs is not."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(BASE), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
        "--enforce-eager", "--enable-lora", "--enable-prompt-tokens-details", "--no-enable-chunked-prefill", "--max-loras", "32", "--max-lora-rank", "32", "--logprobs-mode", "raw_logprobs",
    ]  # fmt: skip
    with log.open("w") as out:
        server = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
        )
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        with suppress(ProcessLookupError):  # it ended by itself
            os.killpg(server.pid, signal.SIGTERM)  # with the engine that it started
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if server.poll() is not None:
            break
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"vllm serve did not come up:\n{log.read_text()[-3000:]}")
