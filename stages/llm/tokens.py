"""What engines over a model folder share: its tokenizer, and the room for a reply in the model's context."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from operator import add
from typing import Any

from stages.frame.types import ChatRefused, EngineUnavailable, Message, Request, UsageError
from stages.llm.controls import Controls
from stages.llm.folder import GENERATION, check_folder, reading


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model folder or hub name. Raises UsageError if there is none."""
    check_folder(path)
    from transformers import AutoTokenizer

    with reading(path, "tokenizer.json", "tokenizer_config.json"):
        return AutoTokenizer.from_pretrained(path)


KEPT_IDS = 4_000_000
"""Most ids that a tokenizer keeps before it forgets them all: about 200 MB with their texts."""


LETTERS = 20
"""Of a text that was looked at, as much memory as an id takes."""


class ChatTokenizer:
    """Chats to token ids, and ids to text, by the tokenizer of a model folder or hub name, loaded when first needed.

    At each turn only the end of an episode's prompt is new. So the ids between two special tokens are cached. A text
    that holds control tokens is read as text (stages/llm/controls.py). [ours]
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.forget()

    def forget(self) -> None:
        """Begin anew to keep ids."""
        self.kept_ids: dict[str, list[int]] = {}
        # texts without control tokens: others', the assistant's
        self._harmless: tuple[set[str], set[str]] = (set(), set())
        self._n_kept = self._n_read = 0

    @cached_property
    def tokenizer(self) -> Any:
        """The one of transformers. Raises UsageError if there is none."""
        return load_tokenizer(self._path)

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a chat, ready for the assistant's next reply."""
        return self.encode_all([messages])[0]

    def encode_all(self, chats: Sequence[Sequence[Message]]) -> list[tuple[int, ...]]:
        """Token ids of each chat, ready for the assistant's next reply, on several cores. Raises ChatRefused."""
        if max(self._n_kept, self._n_read // LETTERS) > KEPT_IDS:
            self.forget()
        harmless = [self._is_harmless(chat) for chat in chats]
        if all(harmless):
            return self._plain(chats)
        plain = iter(self._plain([chat for chat, one in zip(chats, harmless, strict=True) if one]))
        return [next(plain) if one else self._as_text(chat) for chat, one in zip(chats, harmless, strict=True)]

    def encode_reply(self, text: str) -> tuple[int, ...]:
        """Token ids of a reply that no engine produced, without an end token; special tokens in it are text."""
        ids = self._controls.reply_ids(text)
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids if ids is None else ids)

    def reply_ids(self, text: str) -> tuple[int, ...]:
        """The same with the end token, as an engine would have ended it."""
        return (*self.encode_reply(text), self.tokenizer.eos_token_id)

    def count_controls(self, messages: Sequence[Message]) -> int:
        """How many control tokens stand in the messages' texts, which `encode` reads as text."""
        return 0 if self._is_harmless(messages) else self._controls.count(messages)

    def _is_harmless(self, chat: Sequence[Message]) -> bool:
        """Whether the chat's texts hold no control token, and no part of one that the template could complete."""
        plain, own = self._harmless
        is_plain, n_read = self._controls.is_plain, 0
        for message in [m for m in chat if m["content"] not in plain or len(m) != 2]:  # of a chat that grew, its end
            text, is_own = message["content"], len(message) == 2 and message["role"] == "assistant"
            if len(message) == 2 and is_plain(text):
                plain.add(text)
            elif not (is_own and text in own):
                if self._controls.touch(message):
                    return False
                if not is_own:
                    continue
                own.add(text)
            n_read += len(text)
        self._n_read += n_read
        return True

    def _as_text(self, chat: Sequence[Message]) -> tuple[int, ...]:
        masked, masks = self._controls.masked(chat)
        return tuple(self._controls.ids(self._rendered([masked], tokenize=False)[0], masks))

    def _plain(self, chats: Sequence[Sequence[Message]]) -> list[tuple[int, ...]]:
        """Ids of chats that are harmless."""
        if not chats:
            return []
        fast = self._fast
        rendered = self._rendered(chats, tokenize=fast is None)
        if fast is None:
            return [tuple(ids) for ids in rendered]
        if self._cut is None:
            return [tuple(found.ids) for found in self._encoded(fast, rendered)]
        pieces = [self._cut(text) for text in rendered]
        new = list(dict.fromkeys(piece for chat in pieces for piece in chat if piece not in self.kept_ids))
        for piece, found in zip(new, self._encoded(fast, new), strict=True):
            self.kept_ids[piece] = found.ids
            self._n_kept += len(self.kept_ids[piece])
        return [tuple(chain.from_iterable(map(self.kept_ids.__getitem__, chat))) for chat in pieces]

    def _encoded(self, fast: Any, texts: list[str]) -> Any:
        # Beside transformers, which wraps offsets and masks around them that nobody reads: twice the time.
        with reading(self._path, "tokenizer.json"):
            return fast.encode_batch_fast(texts, add_special_tokens=False)

    def _rendered(self, chats: Sequence[Sequence[Message]], *, tokenize: bool) -> Any:
        try:
            found = self.tokenizer.apply_chat_template(
                [list(chat) for chat in chats], add_generation_prompt=True, tokenize=tokenize, return_dict=False
            )
        except Exception as error:  # a template is a program of the model's maker, and raises what it likes
            raise ChatRefused(getattr(error, "message", None) or f"{type(error).__name__}: {error}") from None
        if not all(found):
            raise ChatRefused("of a chat it leaves nothing")
        return found

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without special ones."""
        if self._fast is None or self.tokenizer.clean_up_tokenization_spaces:
            return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))
        # all that transformers then does, without a look at each id
        return str(self._fast.decode(token_ids, skip_special_tokens=True))

    @cached_property
    def _fast(self) -> Any:
        """The tokenizer in Rust, told neither to cut nor to pad, whatever its file says; None where there is none."""
        fast = getattr(self.tokenizer, "backend_tokenizer", None)
        if fast is not None:
            fast.no_truncation()
            fast.no_padding()
        return fast

    @cached_property
    def _controls(self) -> Controls:
        return Controls(self.tokenizer, lambda chat: str(self._rendered([chat], tokenize=False)[0]))

    @cached_property
    def _cut(self) -> Callable[[str], list[str]] | None:
        return cutter(self._fast)


def cutter(fast: Any) -> Callable[[str], list[str]] | None:
    """A function that cuts a text before each special token, into pieces whose ids in order are the text's; or None.

    A tokenizer looks for added tokens without normalization first, leftmost and longest, and never reads across them.
    None if one takes the white space before it, must be a word, or is text.
    """
    special = [token for token in fast.get_added_tokens_decoder().values() if not token.normalized]
    if not special or fast.encode_special_tokens or any(token.lstrip or token.single_word for token in special):
        return None
    contents = sorted((token.content for token in special), key=len, reverse=True)
    split = re.compile(f"({'|'.join(map(re.escape, contents))})").split

    def cut(text: str) -> list[str]:
        # Each piece begins with its token: a text that stood alone might be read as the beginning of a sentence.
        first, *rest = split(text)
        return [first, *map(add, rest[::2], rest[1::2])]

    return cut


def stop_tokens(tokenizer: Any, generation: Any) -> tuple[int, ...]:
    """Ids that end a reply, of the tokenizer and the model's generation config, sorted. Raises UsageError."""
    of_model = list(generation) if isinstance(generation, (list, tuple)) else [generation]
    found = [one for one in (tokenizer.eos_token_id, *of_model) if one is not None]
    for one in found:
        if type(one) is not int or not 0 <= one <= LARGEST_ID:
            raise UsageError(
                f"model.path: eos_token_id in {GENERATION} is {str(one)[:40]!r}, wanted a token id or a list of them"
            )
    return tuple(sorted(set(found)))


def end_token(tokenizer: Any) -> int:
    """Id of the token that the chat template writes after a reply. Raises UsageError where there is none."""
    said = "A reply."
    chat = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": said}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    after = tokenizer(text.rpartition(said)[2], add_special_tokens=False).input_ids
    ends = [one for one in after if one in set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)]
    if not ends:
        raise UsageError(
            "model.path: its chat template ends a reply by no special token, so no reply would end; use another model"
        )
    return int(ends[0])


LARGEST_ID = 2**31 - 1
"""Of a token, as it is stored."""

OUT_OF_CONTEXT = "out of context"
"""How `Episode.error` begins, and why a row is dropped, where a prompt leaves no room for a reply."""

LONGER = "lower task.max_turns or roles.max_action_tokens, or set model.path to a model with a longer context"
"""What to do where prompts do not fit."""


def has_room(prompt_ids: Sequence[int], context: int | None) -> bool:
    """Whether a reply of at least one token fits behind the prompt. context: as of `Engine.context`."""
    return context is None or len(prompt_ids) < context


def nothing_fits(stage: str, n: int, context: int | None) -> UsageError:
    """Of a stage all of whose rows were dropped for this. As a finished run without rows it would be reused for ever."""
    return UsageError(
        f"{stage}: {n} of {n} rows have a prompt that leaves no room for a reply in the model's context of {context}; {LONGER}"
    )


def check_loaded(requests: Sequence[Request], loaded: Collection[str]) -> None:
    """Raises EngineUnavailable for an adapter that is none of these: its request would be answered by the base."""
    unknown = {r.adapter for r in requests if r.adapter is not None} - set(loaded)
    if unknown:
        raise EngineUnavailable(f"adapter {min(unknown)!r} was never loaded into this engine; call load_adapter first")


def fit_context(requests: Sequence[Request], context: int | None) -> list[Request]:
    """The requests, cut to the model's context; a reply that ends there ends as at max_tokens, with "length".

    context: most tokens of a prompt and its reply together; None = not known, nothing is changed. Raises UsageError for
    a prompt that leaves no room for a single token. With many prompts, ask `has_room` first, so that one does not end
    the run. All engines do this, because libraries differ: transformers goes past the trained positions, vLLM stops,
    its server refuses. [ours]
    """
    if context is None:
        return list(requests)
    for request in requests:
        if not has_room(request.prompt_ids, context):
            raise UsageError(
                f"a prompt of {len(request.prompt_ids)} tokens leaves no room for a reply in the model's context of {context}; {LONGER}"
            )
    return [replace(r, max_tokens=min(r.max_tokens, context - len(r.prompt_ids))) for r in requests]
