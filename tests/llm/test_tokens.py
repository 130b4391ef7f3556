"""A chat's ids are those of transformers' own path, whatever the tokenizer's file asks for, and whatever was read
before.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qwens import QWEN, qwen_tokenizer
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from stages.llm import tokens
from stages.llm.tokens import ChatTokenizer

Chat = list[dict[str, Any]]

CHATS: list[Chat] = [
    [
        {"role": "system", "content": "Service desk. check give close."},
        {"role": "user", "content": "Ana, gold, wants refund for lamp."},
    ],
    [
        {"role": "user", "content": "  two  spaces\n\nand unknown words: Grüße <|im_end|> 12.5"},
        {"role": "assistant", "content": ""},
    ],
]
TEXT = "Ana wants a refund for the lamp of May. The desk says no, and gives 12 in its place.\nÄrger an der Theke"
SPECIAL = ("<s>", "</s>", "<|a|>", "<|b|>", "<|a|><|b|>", "|><|b|>")
TEMPLATE = "<s>{% for m in messages %}<|a|>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<|a|>assistant\n{% endif %}"
KINDS: dict[str, dict[str, Any]] = {
    "a space before the first word, as Mistral": {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first")},
    "one before each part, as Llama 2": {
        "normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    },
    "small letters, as BERT": {
        "normalizer": normalizers.BertNormalizer(),
        "pre_tokenizer": pre_tokenizers.BertPreTokenizer(),
    },
    "bytes": {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
}
HOW = ("plain", "lstrip", "rstrip", "single_word", "normalized", "read as text")
CASES = [(kind, how) for kind in KINDS for how in HOW] + [("Qwen", "plain")]
PIECES = (
    *SPECIAL, *TEXT.split(), *" \n<é🙂ﬁ", "|>", "<|", "lamp", "Lamps", "  ", "<unk>", "<|im_end|>", "<|im_start|>",
    "<think>",
)  # fmt: skip


def of(tokenizer: Any) -> ChatTokenizer:
    """One that reads by this tokenizer, and has read nothing yet."""
    made = ChatTokenizer("none")
    made.tokenizer = tokenizer
    return made


@cache
def of_kind(kind: str, how: str) -> Any:
    """A tokenizer as transformers wraps it. how: its special tokens are looked for."""
    from transformers import PreTrainedTokenizerFast

    if kind == "Qwen":
        return qwen_tokenizer(QWEN)
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    for name, part in KINDS[kind].items():
        setattr(inner, name, part)
    alphabet = [*pre_tokenizers.ByteLevel.alphabet(), "▁"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([TEXT] * 3, trainer)
    flags = {how: True} if how in ("lstrip", "rstrip", "single_word", "normalized") else {}
    inner.add_special_tokens([AddedToken(content, **flags) for content in SPECIAL])
    inner.add_tokens([AddedToken("Lamp", normalized=True), AddedToken("desk", normalized=False)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", eos_token="</s>", split_special_tokens=how == "read as text"
    )
    made.chat_template = TEMPLATE
    return made


def whole_path(tokenizer: Any, chat: Chat) -> tuple[int, ...]:
    return tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False))


def chats() -> st.SearchStrategy[Chat]:
    content = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=6).map("".join)
    return st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": content}),
        min_size=1,
        max_size=4,
    )


@pytest.mark.parametrize(("kind", "how"), CASES)
@settings(max_examples=40, deadline=None)
@given(chat=chats())
def test_ids_of_every_turn_are_those_of_the_whole_path(kind: str, how: str, chat: Chat) -> None:
    """Of any text: whose control tokens are text is the matter of test_controls.py."""
    growing = of(of_kind(kind, how))
    for turns in range(1, len(chat) + 1):
        assert growing._plain([chat[:turns]])[0] == whole_path(growing.tokenizer, chat[:turns])


@pytest.mark.parametrize("folder", ["data/base", "data/base_agents"])
def test_ids_are_those_of_the_whole_path(folder: str) -> None:
    found = ChatTokenizer(folder)
    expected = [whole_path(found.tokenizer, chat) for chat in CHATS]
    assert [found.encode(chat) for chat in CHATS] == expected
    assert found.encode_all(CHATS) == expected
    assert found.encode_all([]) == []


@pytest.mark.parametrize("folder", ["data/base", "data/base_agents"])
def test_text_is_that_of_the_whole_path(folder: str) -> None:
    found = ChatTokenizer(folder)
    for ids in ((), *found.encode_all(CHATS)):
        assert found.decode(ids) == found.tokenizer.decode(ids, skip_special_tokens=True)


def test_only_what_is_new_of_a_chat_is_read() -> None:
    found = ChatTokenizer("data/base")
    chat = [*CHATS[0], {"role": "assistant", "content": "check"}, {"role": "user", "content": "ok"}]
    found.encode(CHATS[0])
    before = set(found.kept_ids)
    found.encode(chat)
    assert set(found.kept_ids) - before == {"<|assistant|> check ", "<|end|> ", "<|user|> ok "}


def test_no_more_is_kept_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "KEPT_IDS", 100)
    found, most = ChatTokenizer("data/base"), 0
    for i in range(50):
        chat = [{"role": "user", "content": f"{i} " * 10}, *CHATS[0]]
        ids = found.encode(chat)
        assert ids == whole_path(found.tokenizer, chat)
        most = max(most, sum(map(len, found.kept_ids.values())))
    assert 100 < most <= 100 + len(ids)


def test_nothing_is_kept_where_a_text_is_not_cut() -> None:
    """Each prompt of an episode would be kept whole, and never be met again."""
    found = of(of_kind("bytes", "lstrip"))
    for chat in CHATS:
        assert found.encode(chat) == whole_path(found.tokenizer, chat)
    assert not found.kept_ids


def test_text_is_cleaned_where_a_tokenizer_asks_for_it() -> None:
    found = ChatTokenizer("data/base")
    found.tokenizer.clean_up_tokenization_spaces = True
    found.tokenizer.clean_up_tokenization = str.upper
    assert found.decode(found.encode(CHATS[0])).startswith("SERVICE DESK.")


def test_a_tokenizer_s_file_may_ask_for_neither_cutting_nor_padding() -> None:
    found = ChatTokenizer("data/base")
    expected = [whole_path(found.tokenizer, chat) for chat in CHATS]
    found.tokenizer.backend_tokenizer.enable_truncation(3)
    found.tokenizer.backend_tokenizer.enable_padding(length=500)
    assert found.encode_all(CHATS) == expected


def test_a_tokenizer_that_is_no_fast_one_goes_the_whole_path() -> None:
    def whole(chats: list[Any], *, add_generation_prompt: bool, tokenize: bool, return_dict: bool) -> list[list[int]]:
        assert (add_generation_prompt, tokenize, return_dict) == (True, True, False)
        return [[len(chat)] for chat in chats]

    slow = SimpleNamespace(apply_chat_template=whole, added_tokens_decoder={})
    assert of(slow).encode_all(CHATS) == [(2,), (2,)]
