"""The config sections that several stages share: task, model, roles, engine, sampling.

A stage declares in `Stage.shared` which sections it reads. Only those enter its fingerprint.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from stages.frame.contract import Config, TaskOptions

Agent = Literal["react", "cot"]
History = Literal["chat", "text"]

NOT_A_URL = "base_url"
"""Type of the error that `base_url` raises. Whoever tells it leaves the value out."""


def base_url(url: str) -> str:
    """`url`, if urlsplit reads it as a server's base URL and it holds no secret: every run stores its config. Raises
    PydanticCustomError, a ValueError that does not quote the URL.
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


Attention = Literal["auto", "sdpa", "flex"]
Kernels = Literal["auto", "torch", "fused"]

WAYS = {
    "timeout_s", "concurrency", "oracle_timeout_s", "step_timeout_s", "cassette", "cassette_only", "attention", "kernels",
}  # fmt: skip
"""Keys of the sections that say by which way an answer comes, how many at once, how long it is waited for, and by which
kernels a model is trained. No fingerprint holds them, as none holds what answers at an endpoint, or the device.
"""


class TaskConfig(Config):
    """What is to be solved."""

    env: str = "service_desk"
    """Environment: a module of stages/envs, or your own by a name with a dot. my.traffic is my/traffic.py in the project folder. [ours]"""
    options: TaskOptions = Field(default_factory=dict)
    """Arguments of the environment's own config; see its docstring. [ours]"""
    agent: Agent = Field(
        "react",
        description="What a reply is. react: a thought and an action, which make one turn. cot: an action as a whole, with one turn for each part between blank lines. [slides; default ours]",
    )
    max_turns: int = Field(8, ge=1, description="Turns, of cot whole replies, that an episode has at most. [ours]")
    at_limit: Literal["truncated", "terminated"] = Field(
        "truncated",
        description="What an episode becomes if max_turns stops it. truncated: its last state is bootstrapped. terminated: for a task whose scoring counts it as lost, and an environment without its own limit. [ours]",
    )
    malformed_allowance: int = Field(1, ge=0)
    """Unreadable replies that an episode may hold before it counts as policy_failed. [ours]"""
    oracle: Literal["rule", "engine", "openai"] = "rule"
    """Who answers inside an environment that needs somebody: a rule, the run's own engine, or an OpenAI-compatible endpoint. [ours]"""
    oracle_url: str = Field("", description="Base URL of the endpoint of oracle = openai; empty = model.url. [ours]")
    oracle_model: str = Field("", description="Name of the model at that endpoint; empty = model.path. [ours]")
    oracle_concurrency: int = Field(
        16,
        ge=1,
        description="Requests under way at once with oracle = openai, each for a different episode. [ours]",
    )
    oracle_tokens: int = Field(
        256, ge=1, description="Longest answer of an oracle, or line of a simulated user. [ours]"
    )
    step_timeout_s: float = Field(
        0.0,
        ge=0,
        description="Longest time for one answer of the environment, with the LLM inside it. A slower episode has failed and is tried again; 0 = no limit. [ours]",
    )
    oracle_timeout_s: float = Field(60.0, gt=0)
    """Longest silence of the endpoint of oracle = openai in one try, of five. [ours]"""
    cassette: str = ""
    """File that keeps the answers of oracle = openai. The same question gets the stored answer again; empty = no file. [ours]"""
    cassette_only: bool = False
    """Use only answers that the cassette holds. An episode with another question fails, and gives no reward. [ours]"""

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
    """For engine = openai: base URL of an OpenAI-compatible endpoint, or a list of them that share the requests. [ours]"""
    timeout_s: float = Field(300.0, gt=0)
    """Longest silence of an endpoint in one try, of five, for engine = openai. [ours]"""
    concurrency: int = Field(64, ge=1, description="Requests under way at each endpoint, for engine = openai. [ours]")
    gpu_memory: float = Field(0.85, gt=0, le=1)
    """Share of the GPU's memory that engine = vllm takes, weights included; given back while a stage trains. [ours]"""
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Weights and computation. [ours]")
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass: a third more time, a fraction of the memory. [ours]"""
    attention: Attention = Field(
        "auto",
        description="Attention of training passes. sdpa: torch's, in a few calls. flex: FlexAttention, on a GPU. auto: what was measured faster for such rows. [ours]",
    )
    kernels: Kernels = Field(
        "auto",
        description="Layers of training passes. torch: as transformers and peft have them. fused: a LoRA layer in one function, and on a GPU Liger's kernels where installed. auto: fused on a GPU or under autocast. [ours]",
    )
    lora_rank: int = Field(32, ge=1, description="Rank of the LoRA adapter. [ours]")
    lora_alpha: float = Field(64.0, gt=0, description="LoRA scale is alpha / rank. [ours]")
    gen_batch: int = Field(256, ge=1, description="Requests decoded together by engine = hf. [ours]")

    @field_validator("url")
    @classmethod
    def _no_secret(cls, url: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(url, str):
            return base_url(url) if url else url
        return tuple(map(base_url, url))


class TrainConfig(Config):
    """How many processes of this machine train together. No fingerprint holds it: a result differs by rounding alone."""

    processes: int = Field(1, ge=1)
    """Processes that share out the passes of a training step, each on a GPU of its own, or all on the CPU. [ours]"""
    shard: Literal["none", "layers"] = Field(
        "none",
        description="What the processes deal out. none: passes alone, so each holds the whole model. layers: the weights of the layers as well, for a model that one GPU cannot hold. [ours]",
    )


class ShardConfig(Config):
    """How many processes play and ask. No fingerprint holds it: the result is the same."""

    shards: int = Field(1, ge=1)
    """Parts of the episodes and requests of collect, targets, refine and evaluate, each with an engine of its own. [ours]"""
    workers: Literal["threads", "ray", "pool"] = Field(
        "threads",
        description="Where shards run. threads: in processes of this machine, each started and watched by a thread. ray: on the nodes of a Ray cluster. pool: by the workers of a Prefect work pool. [ours]",
    )
    address: str = ""
    """For workers = ray: where the cluster's head answers, such as 127.0.0.1:6379. [ours]"""
    pool: str = Field("", description="For workers = pool: name of the work pool. [ours]")

    @property
    def here(self) -> int:
        """Processes of this machine that play and ask."""
        return self.shards if self.workers == "threads" else 1

    @model_validator(mode="after")
    def _where(self) -> Self:
        for workers, key, example in (("ray", "address", "127.0.0.1:6379"), ("pool", "pool", "gpus")):
            if self.workers == workers and not getattr(self, key):
                raise ValueError(f'workers = "{workers}" needs run.{key}, such as {example}')
        return self


class RolesConfig(Config):
    """How the roles are prompted and sampled."""

    prompts: str = "service_desk"
    """Folder of stages/llm/prompts, or your own: a path with a "/", like ./prompts, relative to the project folder. [ours]"""
    history: History = Field(
        "chat",
        description="How a role gets the conversation. chat: as the policy saw it, with the role's message last, so all roles of a turn share a prefix. text: inside the role's one message, without the policy's thoughts. [ours]",
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
        description="Sampling temperature of the refiner alone. Above 0 it tries different actions; none = judge_temperature. [ours]",
    )
    oracle: Literal["none", "successor", "evaluator", "refiner"] = Field(
        "none",
        description="A role that is played by code which knows the optimum, where the environment has it: to see what the model's own costs. For measuring alone. [ours]",
    )
    max_action_tokens: int = Field(256, ge=1, description="Longest thought and action. [ours]")
    max_future_tokens: int = Field(256, ge=1, description="Longest future, critique or correction. [ours]")
    max_thought_tokens: int = Field(0, ge=0)
    """Extra tokens in every role for a reasoning model's <think> part; 0 = none. [ours]"""

    ADDED: ClassVar[Mapping[str, Any]] = {"oracle": "none"}

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
