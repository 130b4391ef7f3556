"""Tokenizers of the small base models: words, or byte pairs for any text. A chat that goes on begins with the same ids.

Ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL = ("<|pad|>", "<|end|>", "<|unknown|>", *ROLES)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }}{% if m['role'] == 'assistant' %} <|end|>{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# A space is a token of its own for bytes, so here there is none between the parts.
BYTE_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# A blank line, a digit and a spaced operator are never part of a longer token: a chain of thought is cut at blank
# lines, and each digit has one form wherever it stands.
PIECES = r"\n\n|\d| [-+*/=] | ?[A-Za-z]+|\s| ?[^\sA-Za-z\d]+"


def word_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """One token a word, one for '.' and ','; text with single spaces survives encode and decode unchanged."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("[.,]"), "isolated")]
    )
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>", unk_token="<|unknown|>"
    )
    fast.add_special_tokens({"additional_special_tokens": list(ROLES)})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def byte_tokenizer(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """Byte pairs learned from texts, `size` tokens in all, at least 262; text survives encode and decode unchanged."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [token for token in SPECIAL if token != "<|unknown|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>", clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.add_special_tokens({"additional_special_tokens": list(ROLES)})
    fast.chat_template = BYTE_TEMPLATE
    return fast
