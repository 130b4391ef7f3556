"""A chat's ids are those of transformers' own path, whatever the tokenizer's file asks for and whether it is a fast one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stages.llm.tokens import encode, load_tokenizer

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "system", "content": "Service desk. check give close."}, {"role": "user", "content": "Ana, gold, wants refund for lamp."}],
    [{"role": "user", "content": "  two  spaces\n\nand unknown words: Grüße <|im_end|> 12.5"}, {"role": "assistant", "content": ""}],
]


def whole_path(tokenizer: Any, chat: list[dict[str, Any]]) -> tuple[int, ...]:
    return tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False))


@pytest.mark.parametrize("folder", ["data/base", "data/base_agents"])
def test_ids_are_those_of_the_whole_path(folder: str) -> None:
    tokenizer = load_tokenizer(folder)
    for chat in CHATS:
        assert encode(tokenizer, chat) == whole_path(tokenizer, chat)


def test_a_tokenizer_s_file_may_ask_for_neither_cutting_nor_padding() -> None:
    tokenizer = load_tokenizer("data/base")
    expected = [encode(tokenizer, chat) for chat in CHATS]
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=500)
    assert [encode(tokenizer, chat) for chat in CHATS] == expected


def test_a_tokenizer_that_is_no_fast_one_goes_the_whole_path() -> None:
    slow = SimpleNamespace(apply_chat_template=lambda chat, **options: [len(chat), *sorted(map(int, (options["tokenize"], options["return_dict"])))])
    assert encode(slow, CHATS[0]) == (2, 0, 1)
