"""The sections of a run's config that several stages share: task, model, roles, engine, sampling.

A stage declares in `Stage.shared` which of them it reads; only those enter its fingerprint.
"""

from __future__ import annotations

import ipaddress
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from stages.frame.contract import Config, TaskOptions

Agent = Literal["react", "cot"]
History = Literal["chat", "text"]

NOT_A_URL = "base_url"
"""Type of the error that `base_url` raises. Whoever tells it leaves the value out."""


def base_url(url: str) -> str:
    """`url`, if it is the base URL of a server, as urlsplit reads one, and holds no secret: what is in a config is stored
    with every run. Raises PydanticCustomError, a ValueError that does not quote it.
    """
    try:
        parts = urlsplit(url)
        told = parts.scheme in ("http", "https") and parts.hostname
    except ValueError:
        told = None
    # Anywhere: a password may hold a slash, and then stands where a path does.
    if not told or any(letter in url for letter in "@?#"):
        raise PydanticCustomError(
            NOT_A_URL,
            "wanted a base URL such as http://127.0.0.1:8000/v1, without user name or query; a key goes into OPENAI_API_KEY",
        )
    return url


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


WAYS = {"timeout_s", "oracle_timeout_s", "step_timeout_s", "cassette", "cassette_only"}
"""Keys of the sections that say by which way an answer comes, and how long it is waited for. No fingerprint holds them, as
none holds what answers at an endpoint.
"""


class TaskConfig(Config):
    """What is to be solved."""

    env: str = "service_desk"
    """Environment: a module of stages/envs, or one of your own by a name with a dot: my.traffic is my/traffic.py of the project folder. [ours]"""
    options: TaskOptions = Field(default_factory=dict)
    """Arguments of the environment's own config; see its docstring. [ours]"""
    agent: Agent = Field(
        "react",
        description="What a reply is: react, a thought and an action, one turn; or cot, an action as a whole, one turn for each part between "
        "blank lines. [slides; default ours]",
    )
    max_turns: int = Field(8, ge=1, description="Turns, of cot whole replies, that an episode has at most. [ours]")
    at_limit: Literal["truncated", "terminated"] = Field(
        "truncated",
        description="What an episode becomes if max_turns stops it: truncated, so its last state is bootstrapped; or terminated, if the task's scoring "
        "counts it as lost and the environment has no limit of its own. [ours]",
    )
    malformed_allowance: int = Field(1, ge=0)
    """Unreadable replies that an episode may hold before it counts as policy_failed. [ours]"""
    oracle: Literal["rule", "engine", "openai"] = "rule"
    """Who answers inside the environment, where it needs somebody: a rule, the run's own engine, or an OpenAI-compatible endpoint. [ours]"""
    oracle_url: str = Field("", description="Base URL of the endpoint of oracle = openai; empty = model.url. [ours]")
    oracle_model: str = Field("", description="Name of the model at that endpoint; empty = model.path. [ours]")
    oracle_concurrency: int = Field(
        16,
        ge=1,
        description="Answers of oracle = openai that are waited for at once, each for an episode of its own. [ours]",
    )
    oracle_tokens: int = Field(
        256, ge=1, description="Longest answer of an oracle, or line of a simulated user. [ours]"
    )
    step_timeout_s: float = Field(
        0.0,
        ge=0,
        description="Longest time that the environment takes for one answer, those of an LLM inside it included; past it the episode has failed, and is "
        "tried again; 0 = any. [ours]",
    )
    oracle_timeout_s: float = Field(60.0, gt=0)
    """Longest silence of the endpoint of oracle = openai in one try, of five. [ours]"""
    cassette: str = ""
    """File that keeps the answers of oracle = openai by what was asked, and gives them to whoever asks the same again; empty = none. [ours]"""
    cassette_only: bool = False
    """Ask nobody what the cassette has no answer to: such an episode fails, and is no reward. [ours]"""

    @field_validator("oracle_url")
    @classmethod
    def _no_secret(cls, url: str) -> str:
        return base_url(url) if url else url


class ModelConfig(Config):
    """The one model behind all roles, and its adapter."""

    path: str = "data/base"
    """Folder or hub name that AutoModelForCausalLM loads. [ours; paper: Qwen2.5-7B-Instruct, QwQ-32B]"""
    engine: Literal["hf", "vllm", "openai", "scripted"] = Field("hf", description="Who generates. [ours; paper: verl]")
    url: str | tuple[str, ...] = ""
    """Base URL of an OpenAI-compatible endpoint, or a list of them that share the requests, for engine = openai. [ours]"""
    timeout_s: float = Field(300.0, gt=0)
    """Longest silence of an endpoint in one try, of five, for engine = openai. [ours]"""
    gpu_memory: float = Field(0.85, gt=0, le=1)
    """Share of the GPU's memory that engine = vllm takes, weights included; given back while a stage trains. [ours]"""
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Weights and computation. [ours]")
    gradient_checkpointing: bool = False
    """Work each layer out again in the backward pass: a third more time for a fraction of the memory. [ours]"""
    lora_rank: int = Field(32, ge=1, description="Rank of the LoRA adapter. [ours]")
    lora_alpha: float = Field(64.0, gt=0, description="LoRA scale is alpha / rank. [ours]")
    gen_batch: int = Field(256, ge=1, description="Requests decoded together by engine = hf. [ours]")

    @field_validator("url")
    @classmethod
    def _no_secret(cls, url: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(url, str):
            return base_url(url) if url else url
        return tuple(map(base_url, url))


class RolesConfig(Config):
    """How the roles are prompted and sampled."""

    prompts: str = "service_desk"
    """Folder of stages/llm/prompts, or one of your own: a path with a "/", as ./prompts, from the project folder on. [ours]"""
    history: History = Field(
        "chat",
        description="How a role gets the conversation: chat, as the policy saw it, with the role's message last, so that all roles of a turn share their "
        "first tokens; or text, in that one message, without the policy's thoughts. [ours]",
    )
    frozen: Literal["base", "adapter"] = Field(
        "adapter",
        description="Who runs combine, evaluator, refiner and corrector: the base model, or the trained adapter. [paper: adapter]",
    )
    policy_temperature: float = Field(
        1.0, ge=0, description="Sampling temperature of the policy while collecting. [ours]"
    )
    target_temperature: float = Field(
        1.0, ge=0, description="Sampling temperature of the bootstrapped futures f' in targets. [ours]"
    )
    future_temperature: float = Field(
        1.0, ge=0, description="Sampling temperature of the futures that the evaluator reads. [ours]"
    )
    judge_temperature: float = Field(
        0.0, ge=0, description="Sampling temperature of combine, evaluator, refiner and corrector. [ours]"
    )
    refiner_temperature: float | None = Field(
        None,
        ge=0,
        description="Sampling temperature of the refiner alone, so that it tries different actions if it is told only what was wrong; none = judge_temperature. [ours]",
    )
    max_action_tokens: int = Field(256, ge=1, description="Longest thought and action. [ours]")
    max_future_tokens: int = Field(256, ge=1, description="Longest future, critique or correction. [ours]")
    max_thought_tokens: int = Field(0, ge=0)
    """Room for a reasoning model's <think> part, in every role, on top of the reply's own; 0 = none. [ours]"""

    @property
    def rewriting_temperature(self) -> float:
        """Of the refiner."""
        return self.judge_temperature if self.refiner_temperature is None else self.refiner_temperature

    @property
    def action_room(self) -> int:
        """Most tokens of a reply that is an action."""
        return self.max_action_tokens + self.max_thought_tokens

    @property
    def future_room(self) -> int:
        """Most tokens of a reply that is a future, critique or correction."""
        return self.max_future_tokens + self.max_thought_tokens
