"""One OpenAI-compatible server: a request, its retries, and an error sentence without the key.

The key is taken from OPENAI_API_KEY alone and appears in no message. Refused, down, overloaded (408, 409, 429, 5xx):
tried again after growing, jittered waits, then `Down`. Anything else is final. A server is not trusted. No redirect is
followed, size and time of a reply are limited (`bounded.py`), and messages keep only printable text.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from stages.frame.loops import event_loop
from stages.frame.sections import base_url, is_loopback
from stages.frame.types import EngineUnavailable, UsageError, printable
from stages.llm.bounded import REFUSED, bounded

if TYPE_CHECKING:
    from openai import AsyncOpenAI

T = TypeVar("T")

URL_KEY = "model.url"

LOOP = "openai"  # of this module: all requests of a process overlap on it

_under_way: set[Future[Any]] = set()

SHOWN = 300  # characters of what a server said

_PROBE_S = 5.0  # of silence, when a server is asked whether it is there


class Down(EngineUnavailable):
    """The server itself fails; another one that holds the same model may answer."""


class Silent(Down):
    """Nobody answers there."""


class Endpoint:
    """A server, reached over https, over http on this machine, or over http anywhere as long as no key is set.

    timeout_s: longest silence of the server in one try; retries: further tries; concurrency: requests under way at
    once; key: the config's, that holds the URL and is named in errors.
    """

    def __init__(self, url: str, *, timeout_s: float, retries: int, concurrency: int, key: str = URL_KEY) -> None:
        self._hint = f"Is the server up, and is {key} right?"
        self._key = os.environ.get("OPENAI_API_KEY", "")
        try:
            parts = urlsplit(base_url(url))
        except ValueError as error:
            raise UsageError(f"{key}: {error}.") from None
        host = parts.hostname or ""
        self._local = is_loopback(host)
        if self._key and parts.scheme == "http" and not self._local:
            raise UsageError(
                f"{key}: OPENAI_API_KEY would go over plain http to {host}; use https, or unset the key if the server wants none."
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
            raise UsageError(
                "an OpenAI-compatible server needs the package openai here. Run: pip install 'turnwise[openai]'"
            ) from None
        # A proxy of the environment cannot reach this machine's loopback, and must not see what stays on it.
        http = openai.DefaultAsyncHttpxClient(
            trust_env=not self._local,
            follow_redirects=False,  # to anywhere, with the prompts
            event_hooks={"response": [bounded(self._timeout_s)]},
        )
        timeout = openai.Timeout(self._timeout_s, connect=min(10.0, self._timeout_s))
        return openai.AsyncOpenAI(
            api_key=self._key or "none",
            base_url=self._url,
            timeout=timeout,
            max_retries=self._retries,
            http_client=http,
            default_headers={"Accept-Encoding": "identity"},
        )

    async def post(self, path: str, body: dict[str, Any], read: Callable[[object], T]) -> T:
        """What `read` makes of the reply, whose ValueError says what is wrong with it. Raises EngineUnavailable."""
        client = self._client
        reply = await self._asked(
            path, lambda: client.post(path, cast_to=object, body=body), self._timeout_s, self._retries
        )
        try:
            return read(reply)
        except ValueError as error:
            raise EngineUnavailable(f"the engine at {self.name} answered garbage: {_beginning(str(error))}.") from None

    async def context(self) -> int | None:
        """Most tokens of prompt and reply together; None where it does not tell. Raises Down if nobody answers."""
        limit = min(_PROBE_S, self._timeout_s)
        client = self._client.with_options(timeout=limit, max_retries=0)
        try:
            reply = await self._asked("/models", lambda: client.get("/models", cast_to=object), limit, 0)
        except Silent:
            raise
        except EngineUnavailable:
            return None  # somebody answers, who speaks of models in another way, or not to us: the requests will tell
        # `vllm serve` and SGLang say so of the base model, which comes first; adapters have the same.
        models = reply.get("data") if isinstance(reply, dict) else None
        first = models[0] if isinstance(models, list) and models else None
        found = first.get("max_model_len") if isinstance(first, dict) else None
        return found if type(found) is int and found > 0 else None

    async def _asked(self, path: str, ask: Callable[[], Awaitable[object]], timeout_s: float, retries: int) -> object:
        import openai

        try:
            async with self._free:
                return await ask()
        except openai.APITimeoutError:
            raise Silent(
                f"the engine at {self.name} did not answer in {retries + 1} tries of {timeout_s:g} s. {self._hint}"
            ) from None
        except openai.APIConnectionError:
            raise Silent(f"the engine at {self.name} cannot be reached ({retries + 1} tries). {self._hint}") from None
        except openai.APIStatusError as error:
            # Without the cause: its text may repeat the key.
            status = error.status_code
            # 404 of a completion: a server that was started anew does not know the adapters that it had.
            down = status in (408, 409, 429) or status >= 500 or (status, path) == (404, "/completions")
            raise (Down if down else EngineUnavailable)(self._refusal(path, status, error.body)) from None
        except (openai.OpenAIError, ValueError, RecursionError) as error:
            said = str(error) if str(error) in REFUSED else "no JSON"
            raise EngineUnavailable(f"the engine at {self.name} answered garbage: {said}.") from None

    def _refusal(self, path: str, status: int, body: object) -> str:
        start = f"the engine at {self.name} answered {path} with status {status}"
        if status in (401, 403):
            return f"{start}: it {'refuses the key in' if self._key else 'wants a key in'} OPENAI_API_KEY."
        if status == 404 and path == "/load_lora_adapter":
            return f"{start}: start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True."
        if 300 <= status < 400:
            return f"{start}: it sends on to another address, which is not followed. {self._hint}"
        said = _reason(body) or "no reason given"
        return f"{start}: {_beginning(said.replace(self._key, '***') if self._key else said)}"


def _reason(body: object, depth: int = 4) -> str:
    """Why a server refused: the message of an OpenAI error, FastAPI's `detail`, or the text itself."""
    if isinstance(body, (dict, list)) and not depth:
        return ""
    if isinstance(body, dict):
        return _reason(body.get("message") or body.get("detail") or body.get("msg"), depth - 1)
    if isinstance(body, list):
        return "; ".join(filter(None, (_reason(one, depth - 1) for one in body)))
    return str(body or "")


def _beginning(said: str) -> str:
    """Of what a server said, as it can be told."""
    return " ".join(printable(said[:SHOWN]).split())


def run(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Do all jobs on the loop of this module. The first error, or Ctrl-C, cancels what is still under way."""

    async def together() -> list[T]:
        tasks = [asyncio.ensure_future(job) for job in jobs]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    waiting = begin(together())
    try:
        return waiting.result()
    except BaseException:
        waiting.cancel()
        raise


def begin(job: Coroutine[Any, Any, T]) -> Future[T]:
    """Have a job done on the loop of this module."""
    found = asyncio.run_coroutine_threadsafe(job, event_loop(LOOP))
    _under_way.add(found)
    found.add_done_callback(_under_way.discard)
    return found


@contextmanager
def dropped_on_error() -> Iterator[None]:
    """A block whose error cancels all jobs under way, whichever thread waits for them: else a command would not end."""
    try:
        yield
    except BaseException:
        for job in list(_under_way):
            job.cancel()
        raise
