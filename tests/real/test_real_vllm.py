"""A real model with its adapter merged, as `turnwise export RUN merged --what merged` writes it, in vLLM on a CPU.

vLLM gets the folder alone, as `vllm serve merged` would: tokenizer, chat template, end token and generation config are
the folder's. `make test-vllm` runs this.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engines import HAS_VLLM
from smol import smol

from stages.frame.types import Message, Request
from stages.llm.hf import HfEngine, merge_adapter, read_base
from stages.llm.tokens import ChatTokenizer

__all__ = ["smol"]  # fixtures
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed here; run: make test-vllm"),
]
ADAPTER = Path(__file__).parents[2] / "data" / "smollm2_desk"
PLAIN: list[Message] = [{"role": "user", "content": "What is the capital of France?"}]
MOST_TOKENS = 48
A_ROLE = 2
TIE = 1e-3
"""Logits of two tokens this near are a tie: processors sum in different orders, which moves a logit by some 1e-5."""


@dataclass(frozen=True)
class Reply:
    """vLLM's, to one chat. prompt: the ids that its chat template made."""

    prompt: list[int]
    ids: list[int]
    text: str
    reason: str


@pytest.fixture(scope="module")
def merged(smol: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "merged"
    merge_adapter(str(smol), ADAPTER, folder)
    return folder


@pytest.fixture(scope="module")
def chats() -> list[list[Message]]:
    """Held-out prompts of every role, and a question without a system message, for which the template has its own."""
    rows = [json.loads(line) for line in (ADAPTER / "probe.jsonl").read_text(encoding="utf-8").splitlines()]
    by_role: dict[str, list[list[Message]]] = {}
    for row in rows:
        by_role.setdefault(row["role"], []).append(row["messages"])
    return [chat for of_role in by_role.values() for chat in of_role[:A_ROLE]] + [PLAIN]


@pytest.fixture(scope="module")
def replies(merged: Path, chats: list[list[Message]]) -> list[Reply]:
    """Greedy ones, of all chats in one batch, in fp32: in bfloat16 rounding alone decides between near tokens."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    llm = LLM(str(merged), dtype="float32", max_model_len=1024, enforce_eager=True, seed=0)
    found = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=MOST_TOKENS), use_tqdm=False)
    return [
        Reply(list(one.prompt_token_ids), list(one.outputs[0].token_ids), one.outputs[0].text, one.outputs[0].finish_reason)
        for one in found
    ]  # fmt: skip


def test_a_merged_model_says_in_vllm_what_it_says_in_transformers(
    merged: Path, chats: list[list[Message]], replies: list[Reply]
) -> None:
    """Token for token, the end token included; up to a tie, where there is one. At most two replies have one."""
    model, _ = read_base(str(merged), "float32")
    whole = 0
    for chat, reply in zip(chats, replies, strict=True):
        with torch.no_grad():
            ids = torch.tensor([reply.prompt])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=MOST_TOKENS, do_sample=False,
                output_scores=True, return_dict_in_generate=True,
            )  # fmt: skip
        expected = out.sequences[0, len(reply.prompt) :].tolist()
        best, next_best = torch.cat(out.scores).topk(2).values.unbind(1)
        sure = next((t for t, gap in enumerate((best - next_best).tolist()) if gap < TIE), len(expected))
        assert reply.ids[:sure] == expected[:sure], chat
        whole += reply.ids == expected
    assert whole >= len(chats) - 2


def test_vllm_makes_the_prompts_that_training_saw(
    merged: Path, chats: list[list[Message]], replies: list[Reply]
) -> None:
    tokens = ChatTokenizer(str(merged))
    assert [tuple(reply.prompt) for reply in replies] == tokens.encode_all(chats)
    assert "You are a helpful AI assistant" in tokens.decode(replies[-1].prompt)


def test_a_reply_in_vllm_ends_where_the_template_ends_one(merged: Path, replies: list[Reply]) -> None:
    """Every role's reply is short: none runs into the limit. The end token is no part of the text."""
    end = ChatTokenizer(str(merged)).tokenizer.convert_tokens_to_ids("<|im_end|>")
    for reply in replies:
        assert (reply.reason, reply.ids.count(end), reply.ids[-1]) == ("stop", 1, end), reply.text
        assert "<|" not in reply.text


def test_the_adapter_is_in_what_vllm_says(smol: Path, replies: list[Reply]) -> None:
    """To the first held-out request of the policy. The base says how fine the customer is."""
    (base,) = HfEngine(str(smol)).generate([Request(tuple(replies[0].prompt), 12, 0.0, 0)])
    assert "Thought:" not in base.text
    assert re.fullmatch(r"Thought: .+ Action: .+", replies[0].text)
