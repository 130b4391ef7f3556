"""Tokenizers of the small base models (words; or byte pairs, for any text), and which tokens of an example are learned.

With both, a longer chat begins with the same ids. Ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from stages.corpora import Example, agents

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


Ids = tuple[list[int], list[bool]]
"""A row's token ids, and which of them are learned."""


def encode_episode(tokenizer: Any, example: Example) -> Ids:
    """All behind the system message is learned, observations too: a small model learns sooner to copy and to count."""
    ids = tokenizer.apply_chat_template(agents.transcript(example), tokenize=True, return_dict=False)
    start = ids.index(tokenizer.convert_tokens_to_ids("<|user|>"))
    return ids, [t > start for t in range(len(ids))]


def encode_reply(tokenizer: Any, example: Example) -> Ids:
    """The last reply and its end token are learned."""
    ids = tokenizer.apply_chat_template(agents.transcript(example), tokenize=True, return_dict=False)
    start = _last(ids, tokenizer.convert_tokens_to_ids("<|assistant|>"))
    return ids, [t > start for t in range(len(ids))]


def encode_turns(tokenizer: Any, example: Example) -> Ids:
    """Earlier replies and what came of them, too; not the opening and the last message, which are drawn at random."""
    ids, learned = encode_reply(tokenizer, example)
    user, assistant = (tokenizer.convert_tokens_to_ids(f"<|{role}|>") for role in ("user", "assistant"))
    start, end = ids.index(assistant), _last(ids, user)
    return ids, [last or start < t <= end for t, last in enumerate(learned)]


def encode_thoughts(tokenizer: Any, example: Example) -> Ids:
    """Of earlier turns the objects thought of and the answers, too; not the questions, which are drawn at random."""
    ids, learned = encode_reply(tokenizer, example)
    user, assistant, thought = (
        tokenizer.convert_tokens_to_ids(token) for token in ("<|user|>", "<|assistant|>", "Thought:")
    )
    end, answered = _last(ids, user), False
    for t in range(ids.index(assistant), end):
        answered = ids[t] != assistant and (answered or ids[t - 1] == user)
        learned[t] = answered or ids[t - 1] == thought
    return ids, learned


def _last(ids: Sequence[int], token: int) -> int:
    return len(ids) - 1 - ids[::-1].index(token)
