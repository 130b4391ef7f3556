"""Engine over OpenAI-compatible endpoints that speak token ids (`vllm serve`, SGLang), and `chat` for oracles.

    vllm serve MODEL --enable-lora          (VLLM_ALLOW_RUNTIME_LORA_UPDATING=True for adapters made while it runs;
                                            --enable-prompt-tokens-details for counts of what it had read before)

Prompts go to /v1/completions as ids, and ids and log-probs come back (`logprobs`, `return_token_ids`). The server
tokenises nothing. An adapter is a model name. Several servers share the requests (`servers.py`). `endpoint.py` handles
failures and retries.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from stages.frame.signals import signals_held
from stages.frame.types import Ask, Completion, Message, More, Replies, Request
from stages.llm import tokens
from stages.llm.endpoint import URL_KEY, begin, run
from stages.llm.servers import Servers
from stages.llm.streams import in_order

T = TypeVar("T")

WEIGHTS = "adapter_model.safetensors"

ROUNDING = 1e-4  # how far above 0 a log-prob may lie that is worked out in fp32 from logits of a few hundred

MOMENT_S = 0.05
"""Between two looks for new requests while servers are at work on others."""

# Said outright, since `vllm serve` otherwise takes the model's own defaults (Qwen2.5: top_p 0.8, top_k 20, repetition
# penalty 1.05), and the log-probs would not be those of the distribution that was sampled from.
_PLAIN_SAMPLING = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


class OpenAIEngine(tokens.ChatTokenizer):
    """`Engine` over one or more servers. path: the base model's name there and the tokenizer's folder or hub name here.

    timeout_s: longest silence of a server in one try; retries: further tries; concurrency: requests under way at once,
    of each server; pause_s: how long a server that failed is left alone.
    """

    def __init__(
        self,
        path: str,
        *,
        url: str | Sequence[str],
        timeout_s: float = 300.0,
        retries: int = 4,
        concurrency: int = 64,
        pause_s: float = 30.0,
    ) -> None:
        super().__init__(path)
        self._servers = Servers(url, timeout_s=timeout_s, retries=retries, concurrency=concurrency, pause_s=pause_s)
        self._adapters: dict[str, tuple[Path, str]] = {}  # adapter -> its folder, and its name on the servers

    @cached_property
    def model_hash(self) -> str:
        """As the hf engine's, so that adapters go with both."""
        from stages.llm.hf import model_hash

        return model_hash(self._path)

    @cached_property
    def _n_ids(self) -> int:
        """One more than the tokenizer's largest id."""
        return 1 + int(max(self.tokenizer.get_vocab().values()))

    @property
    def context(self) -> int | None:
        """The shortest of the servers that are up. Raises EngineUnavailable where none is."""
        (found,) = run([self._servers.ready()])
        return found

    def load_adapter(self, name: str, path: Path) -> None:
        """Have every server read the folder `path`, which it must see, too. Raises UsageError, EngineUnavailable."""
        if name in self._adapters and self._adapters[name][0] == path:
            return
        from stages.llm.hf import check_adapter

        check_adapter(path, self.model_hash)
        # Named by its weights, so that what a server holds under that name from an earlier process is the same adapter.
        # Loaded in place (`load_inplace`) under one name, vLLM 0.32 would read the folder again at every step.
        served = f"{name}-{hashlib.sha256((path / WEIGHTS).read_bytes()).hexdigest()[:12]}"
        run([self._servers.load({"lora_name": served, "lora_path": str(path.resolve())})])
        self._adapters[name] = (path, served)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order. The first failure cancels the rest and is raised as EngineUnavailable."""
        return in_order(self, requests)

    def stream(self, more: More) -> Replies:
        """Completions as they end; what `more` gives is sent at once. A failure as in `generate`."""
        under_way: dict[Future[Completion], int] = {}
        arrived: SimpleQueue[Future[Completion]] = SimpleQueue()
        try:
            while (asked := more("none" if under_way else "some")) is not None:
                requests = self._checked([request for _, request in asked])
                with signals_held() as deliver:
                    for (number, _), request in zip(asked, requests, strict=True):
                        future = begin(self._one(request))
                        under_way[future] = number
                        future.add_done_callback(arrived.put)
                        deliver()
                    ended = taken(arrived) if under_way else []
                if ended:
                    yield [(under_way.pop(future), future.result()) for future in ended]
        finally:
            for future in under_way:
                future.cancel()

    def _checked(self, requests: Sequence[Request]) -> list[Request]:
        """The requests, cut to the servers' context."""
        tokens.check_loaded(requests, self._adapters)
        return tokens.fit_context(requests, self.context if requests else None)

    async def _one(self, request: Request) -> Completion:
        body = {
            "model": self._adapters[request.adapter][1] if request.adapter is not None else self._path,
            "prompt": list(request.prompt_ids),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "logprobs": 1,
            "return_token_ids": True,
            **_PLAIN_SAMPLING,
        }
        done = await self._servers.post("/completions", body, lambda said: read_completion(said, request, self._n_ids))
        # The text as every engine decodes the ids: a server's own, decoded as a stream, may begin with a space that is
        # none.
        return replace(done, text=self.decode(done.token_ids[:-1] if done.finish_reason == "stop" else done.token_ids))


def taken(queue: SimpleQueue[T]) -> list[T]:
    """What is in the queue, or comes within a moment."""
    try:
        found = [queue.get(timeout=MOMENT_S)]
    except Empty:
        return []
    while not queue.empty():
        found.append(queue.get())
    return found


def chat(
    url: str | Sequence[str],
    model: str,
    *,
    max_tokens: int = 256,
    timeout_s: float = 60.0,
    retries: int = 4,
    concurrency: int = 16,
    key: str = URL_KEY,
) -> Ask:
    """A function from messages to a reply's text; it raises EngineUnavailable. key: as of `Endpoint`."""
    servers = Servers(url, timeout_s=timeout_s, retries=retries, concurrency=concurrency, key=key)

    def ask(messages: Sequence[Message], *, temperature: float = 0.0, seed: int = 0) -> str:
        said = {"model": model, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        run([servers.ready()])
        (text,) = run([servers.post("/chat/completions", {**said, "messages": list(messages)}, read_text)])
        return text

    return ask


def read_text(reply: object) -> str:
    """The text in a reply of /v1/chat/completions. Raises ValueError saying what is missing."""
    message = _mapping(_choice(reply).get("message"), "a choice has no message")
    if not isinstance(message.get("content"), str):
        raise ValueError("a message has no text")
    text = str(message["content"])
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can hold and no store
        raise ValueError("a message's text is no Unicode") from None
    return text


def read_completion(reply: object, request: Request, n_ids: int) -> Completion:
    """The completion in a reply, with ids below `n_ids`. Raises ValueError saying what is missing or wrong."""
    choice = _choice(reply)
    ids, text, reason = choice.get("token_ids"), choice.get("text"), choice.get("finish_reason")
    log_probs = _mapping(choice.get("logprobs") or {}, "log-probs are no object").get("token_logprobs")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError("token ids are missing (the server must know `return_token_ids`)")
    if not isinstance(log_probs, list) or not all(type(p) in (int, float) for p in log_probs):
        raise ValueError("log-probs are missing")
    if len(ids) != len(log_probs):
        raise ValueError(f"{len(ids)} token ids but {len(log_probs)} log-probs")
    # vLLM writes -inf as -9999, since JSON has no infinity. A whole number may be beyond what a float holds.
    if not all(-9999 < p < math.inf for p in log_probs):
        raise ValueError("log-probs are not finite")
    if (largest := max(log_probs)) > ROUNDING:
        raise ValueError(f"a log-prob is {str(largest)[:20]}, above 0")
    if max(ids) >= n_ids:
        raise ValueError(
            f"token id {str(max(ids))[:20]} is none of the {n_ids} of the tokenizer at model.path (does the server hold the same model?)"
        )
    if len(ids) > request.max_tokens:
        raise ValueError(f"{len(ids)} tokens where at most {request.max_tokens} were asked for")
    if not isinstance(text, str) or reason not in ("stop", "length"):
        raise ValueError(f"no text, or finish reason {str(reason)[:20]!r}")
    if choice.get("prompt_token_ids") not in (None, list(request.prompt_ids)):
        raise ValueError("the prompt that it read is not the one that was sent")
    return Completion(text, tuple(ids), tuple(map(float, log_probs)), reason, _cached(reply, len(request.prompt_ids)))


def _cached(reply: object, most: int) -> int | None:
    """Tokens of the prompt that the server had read before, where it says (`--enable-prompt-tokens-details`)."""
    found: Any = reply
    for key in ("usage", "prompt_tokens_details", "cached_tokens"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if type(found) is int and 0 <= found <= most else None


def _choice(reply: object) -> dict[str, Any]:
    choices = _mapping(reply, "the reply is no JSON object").get("choices")
    if not isinstance(choices, list) or not choices:
        raise ValueError("there are no choices")
    return _mapping(choices[0], "a choice is no object")


def _mapping(value: object, otherwise: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(otherwise)
    return value
