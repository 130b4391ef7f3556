"""A chat's ids are those of transformers' own path, whatever the tokenizer's file asks for and whether it is a fast one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stages.llm.tokens import decode, encode, encode_all, load_tokenizer

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "system", "content": "Service desk. check give close."}, {"role": "user", "content": "Ana, gold, wants refund for lamp."}],
    [{"role": "user", "content": "  two  spaces\n\nand unknown words: Grüße <|im_end|> 12.5"}, {"role": "assistant", "content": ""}],
]


def whole_path(tokenizer: Any, chat: list[dict[str, Any]]) -> tuple[int, ...]:
    return tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False))


@pytest.mark.parametrize("folder", ["data/base", "data/base_agents"])
def test_ids_are_those_of_the_whole_path(folder: str) -> None:
    tokenizer = load_tokenizer(folder)
    expected = [whole_path(tokenizer, chat) for chat in CHATS]
    assert [encode(tokenizer, chat) for chat in CHATS] == expected
    assert encode_all(tokenizer, CHATS) == expected
    assert encode_all(tokenizer, []) == []


@pytest.mark.parametrize("folder", ["data/base", "data/base_agents"])
def test_text_is_that_of_the_whole_path(folder: str) -> None:
    tokenizer = load_tokenizer(folder)
    for ids in ((), *(encode(tokenizer, chat) for chat in CHATS)):
        assert decode(tokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=True)


def test_text_is_cleaned_where_a_tokenizer_asks_for_it() -> None:
    tokenizer = load_tokenizer("data/base")
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization = str.upper
    assert decode(tokenizer, encode(tokenizer, CHATS[0])).startswith("SERVICE DESK.")


def test_a_tokenizer_s_file_may_ask_for_neither_cutting_nor_padding() -> None:
    tokenizer = load_tokenizer("data/base")
    expected = [encode(tokenizer, chat) for chat in CHATS]
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=500)
    assert [encode(tokenizer, chat) for chat in CHATS] == expected


def test_a_tokenizer_that_is_no_fast_one_goes_the_whole_path() -> None:
    def whole(chats: list[Any], *, add_generation_prompt: bool, tokenize: bool, return_dict: bool) -> list[list[int]]:
        assert (add_generation_prompt, tokenize, return_dict) == (True, True, False)
        return [[len(chat)] for chat in chats]

    assert encode_all(SimpleNamespace(apply_chat_template=whole), CHATS) == [(2,), (2,)]
