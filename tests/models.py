"""Tiny models, a replay in memory and contexts, for tests of what learns.

The models are Llama- and Qwen2-shaped with random weights of a spread that makes their predictions far from uniform.
The base in a folder has the project's own kind of tokenizer, and a vocabulary that holds the scripted engine's bytes
too, so that a stage can be run on scripted replies and real gradients.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stages import envs
from stages.envs import service_desk as desk
from stages.frame.contract import Config, Context, Outputs, Stage
from stages.frame.react import parse_react
from stages.frame.sections import ModelConfig, RolesConfig, TaskConfig, TrainConfig
from stages.frame.types import Completion, Engine, Episode, Message, Outcome, Request, Row, Scenario, Turn
from stages.judge.backup import Backup
from stages.llm.scripted import END_ID, VOCABULARY, ScriptedEngine
from stages.play.transitions import Transition
from stages.store.tables import ARRAYS, columns_of
from stages.store.workspace import silent

torch.set_num_threads(1)

SMALL: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 4096, "initializer_range": 0.4, "bos_token_id": None,
}  # fmt: skip


def tiny_llama(vocabulary: int = 40, seed: int = 0, **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(**(SMALL | {"vocab_size": vocabulary, "pad_token_id": 0, "eos_token_id": 1} | changes))
    ).eval()


def tiny_qwen2(vocabulary: int = 40, seed: int = 0) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    # No padding token and no tied weights: as different from the shipped base as a Qwen2 can be.
    return Qwen2ForCausalLM(
        Qwen2Config(**(SMALL | {"vocab_size": vocabulary, "eos_token_id": 1, "tie_word_embeddings": False}))
    ).eval()


def shake(model: Any, seed: int = 0, spread: float = 0.3) -> Any:
    """Random values in the adapter's tensors, so that it does something: a fresh one has B = 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
    return model


def save_base(folder: Path, seed: int = 0) -> Path:
    """A folder that AutoModelForCausalLM and AutoTokenizer load; it holds the words of service_desk."""
    from stages.corpora.desk import words
    from stages.corpora.tokenizers import word_tokenizer
    from stages.llm.roles import load_roles

    known = words(load_roles("service_desk"), 300)
    tokenizer = word_tokenizer([*known, *(f"w{i}" for i in range(VOCABULARY))])
    model = tiny_llama(len(tokenizer), seed, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_lettered(folder: Path, seed: int = 0) -> Path:
    """As `save_base`, with a tokenizer from whose ids any text comes back."""
    from stages.corpora.tokenizers import byte_tokenizer
    from stages.llm.roles import load_roles

    tokenizer = byte_tokenizer([str(load_roles("service_desk"))], 1000)
    model = tiny_llama(len(tokenizer), seed, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Memory:
    """`contract.Reader` over dicts, for stages that are run one after the other by hand."""

    def __init__(self) -> None:
        self.tables: dict[tuple[str, str], list[Row]] = {}
        self.files: dict[tuple[str, str], Path] = {}

    def rows(self, table: str, run_ids: Sequence[str], *, where: str = "") -> list[Row]:
        return [row for run_id in run_ids for row in self.tables.get((table, run_id), [])]

    def read(
        self,
        table: str,
        run_ids: Sequence[str],
        columns: Sequence[str],
        *,
        by: Sequence[str] = (),
        among: Collection[tuple[Any, ...]] = (),
    ) -> list[Row]:
        found = [row for row in self.rows(table, run_ids) if not by or tuple(row[name] for name in by) in among]
        kinds = columns_of(table, [*columns, *by])
        return [{name: compact(row[name], kinds[name]) for name in columns} for row in found]

    def keep(self, run_id: str, outputs: Outputs) -> None:
        for table, rows in outputs.rows.items():
            self.tables[table, run_id] = [{**row, "run_id": run_id} for row in rows]
        for path, file in outputs.files.items():
            self.files[run_id, path] = file


def compact(value: Any, kind: str) -> Any:
    return value if value is None or kind not in ARRAYS else array(ARRAYS[kind], value)


class Recorder(ScriptedEngine):
    """The scripted engine, with all that it ever produced."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.completions: list[Completion] = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        found = super().generate(requests)
        self.completions += found
        return found

    def produced(self, *, adapter: str | None = None, head: str = "") -> list[tuple[Request, Completion]]:
        """Requests to the role whose prompt begins with `head`, by one adapter, and what came of them."""
        pairs = zip(self.requests, self.completions, strict=True)
        return [
            (r, c) for r, c in pairs if r.adapter == adapter and words_of(self.decode(r.prompt_ids)).startswith(head)
        ]


@dataclass
class Bench:
    """Runs stages by hand, as `execute` without stores. A run gets the id "<stage><iteration>" unless named."""

    base: Path
    workdir: Path
    engine: Engine = field(default_factory=Recorder)
    memory: Memory = field(default_factory=Memory)
    seed: int = 0
    task: TaskConfig = field(default_factory=lambda: TaskConfig(options={"requests": 2, "tiers": 2}))
    roles: RolesConfig = field(default_factory=lambda: RolesConfig(max_action_tokens=400, max_future_tokens=400))
    checkpointing: bool = False
    shape: Mapping[str, Any] = field(default_factory=dict)  # more keys of the section `model`
    train: TrainConfig = field(default_factory=TrainConfig)

    def context(
        self,
        config: Config,
        inputs: Mapping[str, Sequence[str]],
        *,
        name: str = "run",
        iteration: int = 0,
        seed: int = 0,
    ) -> Context:
        run = SimpleNamespace(
            seed=self.seed,
            task=self.task,
            model=ModelConfig(
                path=str(self.base),
                lora_rank=2,
                lora_alpha=4.0,
                gradient_checkpointing=self.checkpointing,
                **self.shape,
            ),
            roles=self.roles,
            train=self.train,
        )
        workdir = self.workdir / name
        workdir.mkdir(parents=True, exist_ok=True)
        return Context(
            config, run, iteration, seed, inputs, self.memory, self.engine, lambda run_id, path: self.memory.files[run_id, path],
            workdir, self.workdir / "checkpoints" / name, silent,
        )  # fmt: skip

    def run(
        self,
        stage: Stage,
        config: Config,
        inputs: Mapping[str, Sequence[str]],
        *,
        name: str = "",
        iteration: int = 0,
        seed: int = 0,
    ) -> Outputs:
        name = name or f"{stage.name}{iteration}"
        outputs = stage.run(self.context(config, inputs, name=name, iteration=iteration, seed=seed))
        self.memory.keep(name, outputs)
        return outputs


def rows_of(step: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(prompt ids, completion ids) of every row of a pass, read back from its tree: a token's path is what it may see."""
    from stages.learn.tree import allowed

    tree, sees, found = step.tree, allowed(step.tree), []
    for r in range(len(step.rows)):
        places = step.target_K[step.row_K == r].tolist()
        path = sorted(sees[places[-1]].nonzero()[:, 0].tolist(), key=lambda t: int(tree.position_ids[t]))
        ids, n = tuple(tree.ids[path].tolist()), len(path) - len(places)
        assert path[n:] == places
        found.append((ids[:n], ids[n:]))
    return found


def capture(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every row that reaches a loss from now on, in any stage. Held-out rows have no gradients and are left out."""
    from stages import grpo
    from stages.train import passes

    trained: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    real = passes.pass_log_probs

    def spy(model: Any, step: Any) -> Any:
        if torch.is_grad_enabled():
            trained.extend(rows_of(step))
        return real(model, step)

    for module in (passes, grpo):
        monkeypatch.setattr(module, "pass_log_probs", spy)
    return trained


def customer(prompt: str) -> tuple[str, str]:
    """(tier, request) of the customer in a prompt of service_desk."""
    found: list[tuple[str, str]] = re.findall(r"\w+, (\w+), wants (\w+) for", prompt)
    return found[-1]


def right_action(prompt: str, options: Mapping[str, Any]) -> str:
    """What the desk's hidden rules want next, read off a policy's or a critic's prompt."""
    opts = desk.Options(**options)
    tier, request = customer(prompt)
    tool, kind, _ = desk.steps_of(opts)[min(prompt.count(" done."), len(desk.steps_of(opts)) - 1)]
    return f"{tool} {desk.rule_book(opts)[tool, desk.key_of(kind, request, tier)].option}"


def wrong_action(prompt: str, options: Mapping[str, Any]) -> str:
    tool, right = right_action(prompt, options).split()
    return f"{tool} {next(option for option in desk.OPTIONS_OF[tool] if option != right)}"


def words_of(prompt: str) -> str:
    """The last message of a prompt of the scripted engine: a role's words, or what the policy has just seen."""
    return prompt.removesuffix("<assistant>\n").rsplit("<user>\n", 1)[-1].strip()


def role_of(prompt: str) -> str:
    """Which role a prompt of service_desk is put to; "check" where a chat template is only tried out."""
    if prompt.startswith("<system>\nDesk.\n<user>\nHello."):
        return "check"
    heads = {
        "Predict": "successor",
        "Merge": "combine",
        "Judge": "evaluator",
        "Improve": "refiner",
        "Rewrite": "corrector",
    }
    return heads.get(words_of(prompt).split(".")[0], "policy")


def successor_row(
    name: str, prompt: str, completion: str, *, weight: float = 1.0, role: str = "successor", turn: int = 0
) -> Row:
    """A row of table `targets` made of the scripted engine's bytes; its teacher's ids must never be trained on."""
    return {
        "target_id": name, "role": role, "episode_id": name, "turn": turn, "terminal": False, "student_ids": list(prompt.encode()),
        "completion_ids": [*completion.encode(), END_ID], "teacher_ids": list(f"secret {prompt}".encode()), "student_prompt": prompt,
        "teacher_prompt": "[]", "raw": completion, "completion": completion, "weight": weight, "info": {},
    }  # fmt: skip


def make_episode(
    engine: Engine,
    name: str,
    turns: Sequence[tuple[str, str]],
    outcome: Outcome,
    *,
    reward: float = 0.0,
    malformed: Sequence[int] = (),
) -> Episode:
    """An episode of Ana at the desk as rollout leaves it: (reply, observation) of each turn; the last one ends it."""
    messages: list[Message] = [
        {"role": "system", "content": "Service desk."},
        {"role": "user", "content": f"{name}, gold, wants refund for lamp."},
    ]
    found = []
    for k, (text, observation) in enumerate(turns):
        prompt, ids = engine.encode(messages), (*text.encode(), 256)
        last = k == len(turns) - 1
        thought, action = ("", "") if k in malformed else parse_react(text)
        found.append(
            Turn(
                k, len(messages), prompt, Completion(text, ids, tuple(-0.1 for _ in ids), "stop"), thought, action, observation,
                reward if last else 0.0, last and outcome in (Outcome.SCORED, Outcome.POLICY_FAILED), last and outcome == Outcome.TRUNCATED,
                k in malformed, 0.1,
            )
        )  # fmt: skip
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": observation}]
    return Episode(name, Scenario("service_desk", "train", name, {}), None, outcome, tuple(messages), tuple(found), 1.0)


def make_backup(**changes: Any) -> Backup:
    """A terminal transition with a target."""
    state = ({"role": "user", "content": "Ana wants refund."},)
    done = Completion("Future: then fail.", (70, 256), (-1.0, -1.0), "stop")
    t = Transition(
        "e",
        0,
        Scenario("service_desk", "train", "s", {}),
        state,
        state,
        "close phone",
        "",
        "Mia audits: fail.",
        0.0,
        True,
        False,
        (),
        (),
        0.0,
        (),
    )
    return Backup((t,), 1.0, **({"combined": done, "target": done} | changes))


def scenarios_of(env: str, n: int, **options: Any) -> list[Scenario]:
    return envs.scenarios(env, options, "train", n, 0)


def everywhere(options: Mapping[str, Any]) -> list[Scenario]:
    """One customer of every (request, tier) of a desk."""
    opts = desk.Options(**options)
    return desk.scenarios(dict(options), "train", opts.requests * opts.tiers, 0)
