"""Tiny models shaped, named and templated like Qwen2.5-Instruct and QwQ, for rehearsals of presets that want those.

Weights are random; the tokenizer is byte pairs in Qwen's own class, learned from the shipped prompts. As with the real
ones, the embedding has more rows than the tokenizer knows, a reply ends with <|im_end|>, and generation_config.json
asks for a sampling that is not ours. The templates are ours, in their form: Qwen2.5 puts a system message of its own
before a chat without one; QwQ opens <think>, and drops earlier thoughts.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from stages.frame.types import Completion, Request
from stages.llm.hf import HfEngine
from stages.llm.roles import FOLDER, mix
from stages.llm.tokens import check_loaded

END, PAD = "<|im_end|>", "<|endoftext|>"
POSITIONS = 32768
SPARE = 40  # rows of the embedding beyond the tokenizer
_HEAD = """{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
{{- '\\n\\n# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}NONE{%- endif %}"""
_TURNS = """
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' + SAID + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\nOPEN' }}{%- endif %}"""
_ASSISTANT = "{%- else %}{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
QWEN = _HEAD.replace("NONE", _ASSISTANT) + _TURNS.replace("SAID", "message.content").replace("OPEN", "")
_STRIPPED = "message.content.split('</think>')[-1].lstrip('\\n')"
QWQ = _HEAD.replace("NONE", "") + _TURNS.replace("SAID", _STRIPPED).replace("OPEN", "<think>\\n")


def save_qwen(folder: Path, *, thinks: bool = False) -> Path:
    """A folder that transformers and vLLM load as a Qwen2 model; thinks: in the manner of QwQ."""
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokenizer = qwen_tokenizer(QWQ if thinks else QWEN)
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=len(tokenizer) + SPARE, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=POSITIONS, rope_theta=1e6, tie_word_embeddings=False, bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, initializer_range=0.1,
    )  # fmt: skip
    model = Qwen2ForCausalLM(shape).to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
    )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def qwen_tokenizer(template: str) -> Any:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    blank = Tokenizer(models.BPE())
    blank.pre_tokenizer = Qwen2Tokenizer()._tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    blank.train_from_iterator((path.read_text() for path in sorted(FOLDER.glob("*/*.md"))), trainer)
    learned = json.loads(blank.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"], merges=[tuple(pair) for pair in learned["merges"]], eos_token=END, pad_token=PAD
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.add_tokens(
        [
            AddedToken(tag, special=False, normalized=False)
            for tag in ("<think>", "</think>", "<tool_call>", "</tool_call>")
        ]
    )
    tokenizer.chat_template = template
    return tokenizer


Script = Callable[[str, str, random.Random], str]
"""(role, prompt, chance) -> what is replied."""


class Prompted(HfEngine):
    """The real engine over the real model, told what to reply: its ids, and the log-probs that it gives them."""

    def __init__(self, path: str, script: Script, **settings: Any) -> None:
        super().__init__(path, **settings)
        self.script = script
        self.asked: list[Request] = []

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        check_loaded(requests, self._loaded)
        self.asked += requests
        return [self._told(request) for request in requests]

    def _told(self, request: Request) -> Completion:
        prompt = self.tokenizer.decode(request.prompt_ids)
        text = self.script(role_of(prompt), prompt, random.Random(mix(request.prompt_ids, request.seed)))
        ids = (*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id)[
            : request.max_tokens
        ]
        with self._with_adapter(request.adapter) as model:
            out = model(input_ids=torch.tensor([[*request.prompt_ids, *ids]]), logits_to_keep=len(ids) + 1)
        log_probs = out.logits[0, :-1].float().log_softmax(1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
        stopped = ids[-1] in self._stops
        return Completion(
            self.decode(ids[:-1] if stopped else ids), ids, tuple(log_probs), "stop" if stopped else "length"
        )


ROLES = {
    "Predict": "successor",
    "Merge": "combine",
    "Write": "combine",
    "Judge": "evaluator",
    "Improve": "refiner",
    "Rewrite": "corrector",
}


def role_of(prompt: str) -> str:
    """The role of NLAC that a prompt is put to, by its last message; the policy's ends with what was seen."""
    found = re.findall(r"<\|im_start\|>user\nStep aside from the conversation above\. (\w+)", prompt)
    return ROLES[found[-1]] if found else "policy"
