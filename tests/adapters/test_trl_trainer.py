"""TRL's GRPOTrainer itself trains on one of our environments: a model of two layers that calls the tool with one of four
answers learns which is right. `make test-adapters` runs it, with TRL 1.16.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from stages import envs
from stages.adapters.trl_env import trl_environment, trl_rows
from stages.frame.types import EngineUnavailable, Message, Scenario, Step

trl = pytest.importorskip("trl", reason="trl is not installed: make test-adapters")

from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from transformers.utils import get_json_schema  # noqa: E402
from trl.chat_template_utils import qwen3_instruct_2507_chat_template  # noqa: E402

pytestmark = pytest.mark.slow

ANSWERS = ("5", "6", "7", "8")
SCENARIO = Scenario("math", "train", "x", {"problem": "3 + 4?", "answer": "7", "level": 1})
MAKE = envs.make_env("math", {})
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]


def call(answer: str) -> Message:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "act", "arguments": {"action": answer}}}],
    }


def talks(made: Any) -> list[list[Message]]:
    """One conversation an answer, as TRL will make them."""
    env, row = made(), trl_rows(MAKE, [SCENARIO])[0]
    found = []
    for answer in ANSWERS:
        prompt = [row["prompt"][0], {"role": "user", "content": env.reset(**row)}]
        told = {"role": "tool", "name": "act", "content": env.act(action=answer)}
        found.append([*prompt, call(answer), told, {"role": "assistant", "content": "Done."}])
    return found


def tokenizer_of(texts: list[str]) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=700, special_tokens=MARKS, initial_alphabet=alphabet)
    )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = qwen3_instruct_2507_chat_template
    return made


def taught(tokenizer: Any, conversations: list[list[Message]], tools: list[Any]) -> Any:
    """A model that calls the tool with each of the answers about equally often, and says "Done." then."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, max_position_embeddings=2048, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    rendered = [tokenizer.apply_chat_template(talk, tools=tools, tokenize=False) for talk in conversations]
    batch = tokenizer(rendered, return_tensors="pt", padding=True)
    labels = batch["input_ids"].clone()
    for row, text in enumerate(rendered):
        prompt = text.index("<|im_start|>assistant\n") + len("<|im_start|>assistant\n")
        labels[row, : len(tokenizer(text[:prompt])["input_ids"])] = -100
    labels[batch["attention_mask"] == 0] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    slower = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=300)
    for _ in range(300):
        loss = model(**{k: batch[k] for k in ("input_ids", "attention_mask")}, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        slower.step()
    return model


def trainer_of(made: Any, tmp_path: Path, steps: int) -> Any:
    conversations = talks(trl_environment(MAKE, "math", max_turns=1, form=str))
    tools = [get_json_schema(made().act)]
    plain = [str(message["content"]) for talk in conversations for message in talk]
    tokenizer = tokenizer_of([*plain, str(tools)] * 3)
    settings = trl.GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        seed=0,
        max_steps=steps,
        learning_rate=1e-3,
        lr_scheduler_type="linear",
        warmup_steps=5,  # Adam's first steps are as large as its later ones, on what is noise yet
        top_p=0.9,  # of a small model's slips, none
        per_device_train_batch_size=16,
        num_generations=16,
        max_completion_length=160,
        max_tool_calling_iterations=1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    return trl.GRPOTrainer(
        model=taught(tokenizer, conversations, tools),
        args=settings,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(trl_rows(MAKE, [SCENARIO]) * 64),
        environment_factory=made,
    )


def test_its_trainer_learns_the_right_action_from_our_reward(tmp_path: Path) -> None:
    random.seed(0)
    trainer = trainer_of(trl_environment(MAKE, "math", max_turns=1, form=str), tmp_path, steps=24)
    trainer.train()
    rewards = [row["rewards/math/mean"] for row in trainer.state.log_history if "rewards/math/mean" in row]
    assert len(rewards) == 24
    # One answer in four is right, which is what a model that does not learn goes on winning.
    assert sum(rewards[:3]) / 3 < 0.5 and sum(rewards[-4:]) / 4 > 0.55


class Down:
    system = "Down."
    tools: Sequence[Any] = ()

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        return ({"role": "user", "content": "3 + 4?"},)

    def step(self, message: Message) -> Step:
        raise EngineUnavailable("no oracle")


def test_a_failure_that_trl_shows_to_the_policy_stops_its_training(tmp_path: Path) -> None:
    trainer = trainer_of(trl_environment(Down, "down", max_turns=1, form=str), tmp_path, steps=2)
    trainer.train_dataset = trainer.train_dataset.map(lambda row: trl_rows(Down, [SCENARIO])[0])
    with pytest.raises(RuntimeError, match="has no reward: EngineUnavailable: no oracle"):
        trainer.train()
