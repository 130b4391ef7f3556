"""The values that all packages share: scenario, turn, episode, request, completion.

Frozen data and Protocols only. Importing this module loads neither torch, MLflow, DuckDB nor Prefect.
The words are the field's own; docs/explanation/architecture.md lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

Message = dict[str, Any]
"""One OpenAI-style chat message: {"role": "system" | "user" | "assistant" | "tool", "content": str}."""

Row = dict[str, Any]
"""One row of a replay table, keyed by column name."""


class Outcome(StrEnum):
    """How an episode ended. Trained on are only SCORED, POLICY_FAILED and TRUNCATED, the policy's own doing."""

    SCORED = "scored"  # the environment, or a limit of the task's (task.at_limit), ended it; its rewards count
    POLICY_FAILED = "policy_failed"  # replies unreadable past the allowance
    TRUNCATED = "truncated"  # out of turns: the state is not terminal, so a value may be bootstrapped from it
    ENV_FAILED = "env_failed"  # the environment raised: an infrastructure failure, never a reward
    SIMULATOR_FAILED = "simulator_failed"  # the oracle or simulated user failed: likewise

    @property
    def trainable(self) -> bool:
        return self in (Outcome.SCORED, Outcome.POLICY_FAILED, Outcome.TRUNCATED)


@dataclass(frozen=True)
class Scenario:
    """One start of an environment. `data` is JSON and is all that `Env.reset` needs.

    seed: for what an environment draws. A rollout gives each of its episodes one; it is not stored.
    """

    task: str
    split: str
    id: str
    data: Mapping[str, Any]
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """What an engine is asked for. The seed belongs to the request, so a batch's order and size change nothing."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float  # 0 = greedy
    seed: int
    adapter: str | None = None  # a name given to `Engine.load_adapter`; None = the base model
    role: str = "policy"  # who is asked, for counts alone

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Request:
        """One that was told as JSON."""
        return cls(**{**told, "prompt_ids": tuple(told["prompt_ids"])})


@dataclass(frozen=True)
class Completion:
    """What an engine produced: these ids and log-probs, never a re-tokenised text, are what is trained on.

    token_ids end with the end-of-turn token where finish_reason is "stop"; log_probs: of temperature 1, one a token.
    """

    text: str
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: (
        str  # "stop" | "length"; "cut" where it is a part of a reply, and not the last one; "no room": `roles.NO_ROOM`
    )
    cached: int | None = field(default=None, compare=False)
    """Tokens of the prompt that the engine still had from an earlier one; None where it does not say."""


class Engine(Protocol):
    """A function from requests to completions, with the tokenizer that belongs to it. Raises EngineUnavailable."""

    @property
    def model_hash(self) -> str: ...

    @property
    def context(self) -> int | None:
        """Most tokens of prompt and reply together; None = not known. Asked anew: a restart may change a server's."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a chat, ready for the assistant's next reply."""

    def encode_all(self, chats: Sequence[Sequence[Message]]) -> list[tuple[int, ...]]:
        """`encode` of each chat, on as many cores as the tokenizer can use."""

    def count_controls(self, messages: Sequence[Message]) -> int:
        """Control tokens of the chat template that stand in the messages' texts, which `encode` reads as text."""

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def load_adapter(self, name: str, path: Path) -> None:
        """Make the LoRA adapter in the folder `path` available as `Request.adapter = name`. Idempotent."""


Wait = Literal["none", "some", "all"]
"""For what is waited that has been begun: for nothing, for some of it or a moment, or for all of it."""

More = Callable[[Wait], Sequence[tuple[int, Request]] | None]
"""What a stream of replies is made from: numbered requests that are new. Often there are none yet; None says that none will come."""

Replies = Generator[list[tuple[int, Completion]], None, None]
"""Completions as they end, each with its request's number, those together that ended together. Closed early, it drops what is under way."""


@runtime_checkable
class Streamer(Protocol):
    """What an engine may be besides: one that takes requests while others are under way."""

    def stream(self, more: More) -> Replies:
        """Replies to the requests of `more`, asked between two steps; "some" where nothing is under way."""


@runtime_checkable
class Sleeper(Protocol):
    """What an engine may be besides: one that can give its device's memory to a training."""

    def sleep(self) -> None:
        """Free the memory until the next call of `generate`, which takes it again. Adapters stay loaded."""


@dataclass(frozen=True)
class Step:
    """What an environment answers to one action."""

    messages: tuple[Message, ...]  # the observation
    reward: float = 0.0
    terminated: bool = False  # the task is over: no future, nothing to bootstrap
    truncated: bool = False  # cut short: the state has a future that was not lived
    info: Mapping[str, Any] = field(default_factory=dict)


class Env(Protocol):
    """One running episode. `system` and `tools` describe the task to the policy.

    The constructor gets an LLM that the environment needs (oracle, simulated user) as a function from messages to text.
    Its tokens never reach a training row.
    """

    @property
    def system(self) -> str: ...  # a plain attribute will do

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]: ...

    def reset(self, scenario: Scenario) -> tuple[Message, ...]: ...

    def step(self, message: Message) -> Step:
        """Act by the assistant's message. Raises Malformed where it cannot be read, SimulatorError where an LLM failed."""


@dataclass(frozen=True)
class Turn:
    """One action and its result. The first `state_len` messages of `Episode.messages` were the state before it.

    A turn may be a part of a reply (stages/play/agents.py). Then all parts have the `state_len` of the reply. Only
    `prompt_ids` holds the earlier parts.
    """

    index: int
    state_len: int
    prompt_ids: tuple[int, ...]
    completion: Completion
    thought: str
    action: str
    observation: str
    reward: float
    terminated: bool
    truncated: bool
    malformed: bool
    seconds: float


@dataclass(frozen=True)
class Episode:
    """Turns of one scenario by one policy. `messages`: from the system message to the last observation."""

    id: str
    scenario: Scenario
    adapter: str | None
    outcome: Outcome
    messages: tuple[Message, ...]
    turns: tuple[Turn, ...]
    seconds: float
    error: str = ""
    attempts: int = 1

    @property
    def total_reward(self) -> float:
        # One rounding at the end: six times 1/6, added one by one, is less than 1, and no win.
        return math.fsum(turn.reward for turn in self.turns)

    @property
    def won(self) -> bool:
        return self.total_reward >= 1


class Ask(Protocol):
    """An LLM as an environment sees it: messages in, text out, greedy by default. Raises EngineUnavailable."""

    def __call__(self, messages: Sequence[Message], *, temperature: float = 0.0, seed: int = 0) -> str: ...


def printable(text: str) -> str:
    """The text on one line, without what moves a terminal's cursor or colours it."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


class TurnwiseError(Exception):
    """A failure that is told to the user in one sentence: what was wanted, what was found, what to do."""

    def __str__(self) -> str:
        return printable(super().__str__())  # what it quotes may be a server's, or of a file that came from anywhere


class UsageError(TurnwiseError):
    """The command, a config key or a file that the user named is wrong (exit code 2)."""


class ChatRefused(UsageError):
    """The chat template of the user's model refuses messages, for the reason that it gives."""

    def __init__(self, reason: str) -> None:
        self.reason = " ".join(reason.split()) or "no reason given"
        super().__init__(
            f"model.path: wanted a chat template that takes a system message and turns of user and assistant, found one "
            f"that refuses such a chat ({self.reason}); use a model with another template"
        )


class MissingInput(TurnwiseError):
    """A stage lacks rows or artifacts that an earlier stage should have left."""


class Dropped(MissingInput):
    """An artifact that `turnwise gc` deleted; its run can be made again from its inputs."""

    def __init__(self, text: str, run_id: str) -> None:
        super().__init__(text)
        self.run_id = run_id


class Changed(MissingInput):
    """An artifact that is not what its run wrote: a disk that failed, or a hand. Never read."""


class Diverged(TurnwiseError):
    """A training left the numbers: a loss, a gradient or a weight that is not finite. Its stage leaves no weights."""


class EngineUnavailable(TurnwiseError):
    """An engine is down, timed out or answered garbage: infrastructure, retried by policy, never a reward."""


class SimulatorError(TurnwiseError):
    """An LLM inside an environment failed: infrastructure, never a reward."""


class Malformed(ValueError):
    """A model's reply that cannot be read: data, counted and kept, not an error of the program."""
