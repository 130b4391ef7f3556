"""Engine over any OpenAI-compatible endpoint that speaks token ids (`vllm serve`, SGLang), and `chat` for oracles and simulated users.

    vllm serve MODEL --enable-lora          (VLLM_ALLOW_RUNTIME_LORA_UPDATING=True for adapters made while it runs)

Prompts go to /v1/completions as ids, and ids and log-probs come back (`logprobs`, `return_token_ids`); nothing is tokenised
by the server. An adapter is a model name. The key is taken from OPENAI_API_KEY alone and appears in no message.
Refused, down, overloaded (408, 409, 429, 5xx): tried again after growing, jittered waits. Anything else is final.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import os
import threading
from collections.abc import Coroutine, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from stages.types import Ask, Completion, EngineUnavailable, Message, Request, UsageError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

T = TypeVar("T")

# Said outright, since `vllm serve` otherwise takes the model's own defaults (Qwen2.5: top_p 0.8, top_k 20, repetition
# penalty 1.05), and the log-probs would not be those of the distribution that was sampled from.
_PLAIN_SAMPLING = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_TRIES_HINT = "Is the server up, and is model.url right?"


class OpenAIEngine:
    """`Engine` over one endpoint. path: the base model's name there and the tokenizer's folder or hub name here.

    timeout_s: longest silence of the server in one try; retries: further tries; concurrency: requests under way at once.
    """

    def __init__(self, path: str, *, url: str, timeout_s: float = 300.0, retries: int = 4, concurrency: int = 64) -> None:
        self._path = path
        self._endpoint = Endpoint(url, timeout_s=timeout_s, retries=retries, concurrency=concurrency)
        self._adapters: dict[str, Path] = {}

    @cached_property
    def model_hash(self) -> str:
        """As the hf engine's, so that adapters go with both."""
        from stages.llm.hf import model_hash

        return model_hash(self._path)

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self._path)
        except (OSError, ValueError) as error:
            raise UsageError(f"model.path: no tokenizer that transformers can load at {self._path!r} ({str(error).splitlines()[0]})") from error

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True, return_dict=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def load_adapter(self, name: str, path: Path) -> None:
        """Have the server read the folder `path`, which it must see under the same name. Raises UsageError, EngineUnavailable."""
        if self._adapters.get(name) == path:
            return
        from stages.llm.hf import check_adapter

        check_adapter(path, self.model_hash)
        # In place: the server may hold an adapter of that name from an earlier process.
        body = {"lora_name": name, "lora_path": str(path.resolve()), "load_inplace": True}
        self._endpoint.run([self._endpoint.post("/load_lora_adapter", body)])
        self._adapters[name] = path

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order. The first failure cancels the rest and is raised as EngineUnavailable."""
        unknown = {r.adapter for r in requests if r.adapter is not None} - set(self._adapters)
        if unknown:
            raise EngineUnavailable(f"adapter {min(unknown)!r} was never loaded into this engine; call load_adapter first")
        return self._endpoint.run([self._one(request) for request in requests])

    async def _one(self, request: Request) -> Completion:
        body = {
            "model": request.adapter or self._path,
            "prompt": list(request.prompt_ids),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "logprobs": 1,
            "return_token_ids": True,
            **_PLAIN_SAMPLING,
        }
        reply = await self._endpoint.post("/completions", body)
        try:
            return read_completion(reply, request)
        except ValueError as error:
            raise EngineUnavailable(f"the engine at {self._endpoint.name} answered garbage: {error}.") from None


def chat(
    url: str,
    model: str,
    *,
    temperature: float = 0.0,
    max_tokens: int = 256,
    seed: int = 0,
    timeout_s: float = 60.0,
    retries: int = 4,
    concurrency: int = 16,
) -> Ask:
    """A function from messages to the text of the model's reply, over /v1/chat/completions. It raises EngineUnavailable."""
    endpoint = Endpoint(url, timeout_s=timeout_s, retries=retries, concurrency=concurrency)
    settings = {"model": model, "temperature": temperature, "max_tokens": max_tokens, "seed": seed}

    def ask(messages: Sequence[Message]) -> str:
        (reply,) = endpoint.run([endpoint.post("/chat/completions", {**settings, "messages": list(messages)})])
        try:
            message = _mapping(_choice(reply).get("message"), "a choice has no message")
            if not isinstance(message.get("content"), str):
                raise ValueError("a message has no text")
        except ValueError as error:
            raise EngineUnavailable(f"the engine at {endpoint.name} answered garbage: {error}.") from None
        return str(message["content"])

    return ask


class Endpoint:
    """A server, reached over https, over http on this machine, or over http anywhere as long as no key is set."""

    def __init__(self, url: str, *, timeout_s: float, retries: int, concurrency: int) -> None:
        self._key = os.environ.get("OPENAI_API_KEY", "")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise UsageError("model.url: wanted a base URL such as http://127.0.0.1:8000/v1, without user name or query.")
        self._local = _is_loopback(parts.hostname)
        if self._key and parts.scheme == "http" and not self._local:
            raise UsageError(
                f"model.url: OPENAI_API_KEY would go over plain http to {parts.hostname}; use https, or unset the key if the server wants none."
            )
        self.name = parts.netloc
        self._url = url.rstrip("/") + ("/v1" if parts.path in ("", "/") else "")
        self._timeout_s, self._retries = timeout_s, retries
        self._free = asyncio.Semaphore(concurrency)

    @cached_property
    def _client(self) -> AsyncOpenAI:
        try:
            import openai
        except ImportError:
            raise UsageError("model.engine = openai needs the package openai. Run: pip install 'turnwise[openai]'") from None
        # A proxy of the environment cannot reach this machine's loopback, and must not see what stays on it.
        http = openai.DefaultAsyncHttpxClient(trust_env=not self._local)
        timeout = openai.Timeout(self._timeout_s, connect=min(10.0, self._timeout_s))
        return openai.AsyncOpenAI(api_key=self._key or "none", base_url=self._url, timeout=timeout, max_retries=self._retries, http_client=http)

    def run(self, jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Do all jobs on the loop of this module; on the first error, and on Ctrl-C, what is still under way is cancelled."""

        async def together() -> list[T]:
            tasks = [asyncio.ensure_future(job) for job in jobs]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()

        waiting = asyncio.run_coroutine_threadsafe(together(), _loop())
        try:
            return waiting.result()
        except BaseException:
            waiting.cancel()
            raise

    async def post(self, path: str, body: dict[str, Any]) -> object:
        """The decoded JSON of the reply, or its text. Raises EngineUnavailable in one sentence that holds no key."""
        client = self._client
        import openai

        try:
            async with self._free:
                return await client.post(path, cast_to=object, body=body)
        except openai.APITimeoutError:
            tries = f"{self._retries + 1} tries of {self._timeout_s:g} s"
            raise EngineUnavailable(f"the engine at {self.name} did not answer in {tries}. {_TRIES_HINT}") from None
        except openai.APIConnectionError:
            raise EngineUnavailable(f"the engine at {self.name} cannot be reached ({self._retries + 1} tries). {_TRIES_HINT}") from None
        except openai.APIStatusError as error:
            # Without the cause: its text may repeat the key.
            raise EngineUnavailable(self._refusal(path, error.status_code, error.body)) from None
        except (openai.OpenAIError, ValueError):
            raise EngineUnavailable(f"the engine at {self.name} answered garbage: no JSON.") from None

    def _refusal(self, path: str, status: int, body: object) -> str:
        start = f"the engine at {self.name} answered {path} with status {status}"
        if status in (401, 403):
            return f"{start}: it {'refuses the key in' if self._key else 'wants a key in'} OPENAI_API_KEY."
        if status == 404 and path == "/load_lora_adapter":
            return f"{start}: start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True."
        found = body.get("message") if isinstance(body, dict) else body
        said = " ".join(str(found or "no reason given").split())
        return f"{start}: {said.replace(self._key, '***') if self._key else said}"[:300]


def read_completion(reply: object, request: Request) -> Completion:
    """The completion in a reply of /v1/completions. Raises ValueError saying what is missing or wrong in it."""
    choice = _choice(reply)
    ids, text, reason = choice.get("token_ids"), choice.get("text"), choice.get("finish_reason")
    log_probs = _mapping(choice.get("logprobs") or {}, "log-probs are no object").get("token_logprobs")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError("token ids are missing (the server must know `return_token_ids`)")
    if not isinstance(log_probs, list) or not all(type(p) in (int, float) for p in log_probs):
        raise ValueError("log-probs are missing")
    if len(ids) != len(log_probs):
        raise ValueError(f"{len(ids)} token ids but {len(log_probs)} log-probs")
    # vLLM writes -inf as -9999, since JSON has no infinity.
    if not all(math.isfinite(p) and p > -9999 for p in log_probs):
        raise ValueError("log-probs are not finite")
    if len(ids) > request.max_tokens:
        raise ValueError(f"{len(ids)} tokens where at most {request.max_tokens} were asked for")
    if not isinstance(text, str) or reason not in ("stop", "length"):
        raise ValueError(f"no text, or finish reason {reason!r}")
    if choice.get("prompt_token_ids") not in (None, list(request.prompt_ids)):
        raise ValueError("the prompt that it read is not the one that was sent")
    return Completion(text, tuple(ids), tuple(map(float, log_probs)), reason)


def _choice(reply: object) -> dict[str, Any]:
    choices = _mapping(reply, "the reply is no JSON object").get("choices")
    if not isinstance(choices, list) or not choices:
        raise ValueError("there are no choices")
    return _mapping(choices[0], "a choice is no object")


def _mapping(value: object, otherwise: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(otherwise)
    return value


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """One event loop in a thread of its own: requests overlap although stages are plain functions."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="openai", daemon=True).start()
    return loop
