"""Engine without a model, for tests: a function or a table answers, and every byte of text is a token.

Byte ids follow from the text alone: they are the same in every process and need no stored vocabulary. They are small
enough (0..256) for any tiny model. Log-probs are a fixed function of the token id. With no script of its own the engine
plays `service_desk` and 20 Questions at random, all roles included.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from stages.frame.types import Completion, EngineUnavailable, Message, Request
from stages.llm.tokens import check_loaded, fit_context

Reply = Callable[[str, Request], str]
"""(prompt text, request) -> reply text."""

END_ID = 256  # ends every message; the only id that is not a byte
VOCABULARY = 257
GARBAGE = "%% ?? %%"  # no role and no environment can read it

# What a random agent asks in 20 Questions, and does in service_desk, whose system message names the tools in their
# order.
_QUESTIONS = (
    "Is it alive?", "Is it made of metal?", "Can it fly?", "Is it bigger than a person?", "Is it a cat?",
    "Is it a piano?",
)  # fmt: skip
_DESK = re.compile(r"Service desk\. ([a-z ]+)\.")
_TOOLS = {
    "check": ["photo", "receipt", "passport"],
    "give": ["voucher", "cash", "credit", "discount"],
    "log": ["ledger", "ticket", "diary"],
    "send": ["courier", "drone", "truck"],
    "tag": ["red", "blue", "green"],
    "bill": ["weekly", "monthly", "yearly"],
    "rate": ["high", "middle", "low"],
    "close": ["phone", "email"],
}  # fmt: skip


class ScriptedEngine:
    """`Engine` that answers from a script.

    reply: a function, or a table whose longest key in the prompt gives the reply (of several the seed draws one).
    fail_on: numbers of `generate` calls, from 1, that raise EngineUnavailable; garbage_on: that answer unreadable text.
    context: tokens that a prompt and its reply may have together; None = any number.
    `calls`, `requests` and `prompts` tell what was asked so far.
    """

    def __init__(
        self,
        reply: Reply | Mapping[str, str | Sequence[str]] | None = None,
        *,
        fail_on: Collection[int] = (),
        garbage_on: Collection[int] = (),
        name: str = "scripted",
        context: int | None = None,
    ) -> None:
        self.model_hash = hashlib.sha256(name.encode()).hexdigest()
        self.context = context
        self.calls = 0
        self.requests: list[Request] = []
        self.adapters: dict[str, Path] = {}
        self._reply = _from_table(reply) if isinstance(reply, Mapping) else reply or play
        self._fail_on, self._garbage_on = frozenset(fail_on), frozenset(garbage_on)

    @property
    def prompts(self) -> list[str]:
        return [self.decode(request.prompt_ids) for request in self.requests]

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Each message is its bytes and END; so a prompt and its reply are the beginning of the next prompt."""
        ids: list[int] = []
        for message in messages:
            ids += [*_bytes(f"<{message['role']}>\n{message.get('content') or ''}"), END_ID, *_bytes("\n")]
        return (*ids, *_bytes("<assistant>\n"))

    def encode_all(self, chats: Sequence[Sequence[Message]]) -> list[tuple[int, ...]]:
        return [self.encode(chat) for chat in chats]

    def count_controls(self, messages: Sequence[Message]) -> int:
        return 0  # bytes are text, and END is none

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token != END_ID).decode(errors="replace")

    def load_adapter(self, name: str, path: Path) -> None:
        self.adapters[name] = path

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.calls += 1
        self.requests += requests
        if self.calls in self._fail_on:
            raise EngineUnavailable(f"the scripted engine fails at call {self.calls}, as it was told to")
        check_loaded(requests, self.adapters)
        return [self._completion(request) for request in fit_context(requests, self.context)]

    def _completion(self, request: Request) -> Completion:
        text = GARBAGE if self.calls in self._garbage_on else self._reply(self.decode(request.prompt_ids), request)
        whole = (*_bytes(text), END_ID)
        ids = whole[: request.max_tokens]
        return Completion(self.decode(ids), ids, tuple(map(log_prob, ids)), "stop" if ids == whole else "length")


def log_prob(token_id: int) -> float:
    """The log-prob of a token wherever it stands, in (-2, 0)."""
    return -((token_id * 2654435761) % 1999 + 1) / 1000


def draw(request: Request, options: Sequence[str]) -> str:
    """One of the options by the request's seed; the first at temperature 0."""
    return random.Random(request.seed).choice(options) if request.temperature > 0 else options[0]


def play(prompt: str, request: Request) -> str:
    """A random readable reply of the role that the prompt asks for, by the first word of the role's words."""
    last = prompt.removesuffix("<assistant>\n").rsplit("<user>\n", 1)[-1].strip()
    _, aside, words = last.rpartition("Step aside from the conversation above.")
    asked = (words if aside else last.rpartition("\n\n")[2]).strip()
    head = asked.split(maxsplit=1)[0].strip(".,:") if asked else ""
    if head in ("Rewrite", "Think"):
        return re.split(r"\n", asked, maxsplit=1)[-1].rsplit("Text:\n", 1)[-1].strip()
    if head in ("Predict", "Merge"):
        return draw(request, ("Future: then fail. It may need another action.", "Future: then pass."))
    if head == "Judge":
        return draw(request, ("Optimality: No. Another action may be needed.", "Optimality: Yes. It may pass."))
    return f"Thought: one of several. Action: {_move(prompt, request, improve=head == 'Improve')}"


def _move(prompt: str, request: Request, *, improve: bool) -> str:
    # The action to be improved says which step it is; otherwise the steps that are done do.
    tool = (re.findall(r"Action: (\w+)", prompt) or [""])[-1] if improve else ""
    if offered := _DESK.search(prompt):
        steps = offered[1].split()
        tool = tool or steps[min(prompt.count(" done."), len(steps) - 1)]
    return f"{tool} {draw(request, _TOOLS[tool])}" if tool in _TOOLS else draw(request, _QUESTIONS)


def _bytes(text: str) -> list[int]:
    return list(text.encode())


def _from_table(table: Mapping[str, str | Sequence[str]]) -> Reply:
    def reply(prompt: str, request: Request) -> str:
        keys = [key for key in table if key in prompt]
        if not keys:
            raise LookupError(f"the script has no reply to: {prompt!r}")
        found = table[max(keys, key=len)]
        return found if isinstance(found, str) else draw(request, found)

    return reply
