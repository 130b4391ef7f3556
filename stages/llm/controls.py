"""Text is text: control tokens inside a message's text are read letter by letter and have no effect.

A chat template writes control tokens between the texts: <|im_start|>, <|im_end|>, <tool_call>. If a text holds one, a
tokenizer reads it as the template's own, and the text speaks for another role. Here

    1. the letters of such a text that could make a control token are masked by letters that the chat does not have;
    2. the template renders that chat; the control tokens in what comes are the template's own;
    3. those get other names, the masked letters come back, and a copy of the tokenizer reads it, which knows the control
       tokens by these names alone.

Masks and names are drawn at random, so no text can hold them. A control token is every special token, and every other
added token with a letter that is neither alphanumeric nor white space. In the assistant's own text only special tokens
count as text. It may have said <think>: templates look for it, and the policy learned it as one token. A chat without
such texts is left alone. This protects tokens only: words can still persuade a model (SECURITY.md). [ours; transformers
issue 29279; OWASP AISVS 2.1.7]
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from stages.frame.types import ChatRefused, Message

SPEAKERS = ("system", "user", "tool", "assistant")
_TAGS = re.compile(r"</?[a-z_]+>")  # where a template may cut the assistant's text
_MARK = "\ue000"
SHAPES = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user", "assistant", "user"),
    ("system", "user", "assistant", "tool"),
    ("user", "user"),
)
"""Chats by which is seen what a template writes before a text."""
_PRIVATE = range(0xF0000, 0xFFFFE)  # code points that mean nothing


class Finder:
    """Finds control tokens in texts, and texts that could become one together with what stands beside them."""

    def __init__(self, contents: Sequence[str], normalize: Callable[[str], str] | None) -> None:
        self._normalize = normalize
        self._longest = max(map(len, contents), default=0)
        self.first = tuple({one[0] for one in contents})
        every = "|".join(map(re.escape, sorted(contents, key=len, reverse=True))) or r"(?!)"
        self._every, self._overlapping = re.compile(every), re.compile(f"(?={every})")
        self.beginnings = tuple({one[:n] for one in contents for n in range(1, len(one))})
        self._ends = tuple({one[n:] for one in contents for n in range(1, len(one))})
        self._joined = "\n".join(contents)

    def count(self, text: str) -> int:
        """Control tokens in a text; of those that overlap, the first one."""
        return max(len(self._every.findall(one)) for one in self._forms(text))

    def touches(self, text: str, is_open: bool) -> bool:
        """Whether it holds one, or a part of one at an edge. is_open: the template may have begun one before the text."""
        return any(map(self._every.search, self._forms(text))) or any(True for _ in self._edges(text, is_open))

    def letters(self, text: str, is_open: bool) -> set[int]:
        """Where a text must be masked, so that no control token can come of it."""
        if any(map(self._every.search, self._forms(text)[1:])):  # who knows which letters became one
            return {place for place, letter in enumerate(text) if not letter.isspace()}
        return {found.start() for found in self._overlapping.finditer(text)} | set(self._edges(text, is_open))

    def _forms(self, text: str) -> tuple[str, ...]:
        """As it is, and as it is when the tokens that are normalized are looked for."""
        return (text,) if self._normalize is None else (text, self._normalize(text))

    def _edges(self, text: str, is_open: bool) -> Iterator[int]:
        said = text.strip()
        start = len(text) - len(text.lstrip())
        tail = said[-self._longest :]
        if any(one in tail for one in self.first) and tail.endswith(self.beginnings):
            yield from (start + len(said) - len(one) for one in self.beginnings if tail.endswith(one))
        if said and is_open and (said.startswith(self._ends) or said in self._joined):
            yield start
            yield from (start + len(one) - 1 for one in self._ends if said.startswith(one))


class Controls:
    """The control tokens of a tokenizer. render: what its chat template makes of a chat."""

    def __init__(self, tokenizer: Any, render: Callable[[Sequence[Message]], str]) -> None:
        self._fast: Any = getattr(tokenizer, "backend_tokenizer", None)
        added = self._fast.get_added_tokens_decoder() if self._fast is not None else tokenizer.added_tokens_decoder
        as_text = self._fast is not None and self._fast.encode_special_tokens  # they are read as text anyhow
        known = {i: one for i, one in added.items() if _is_control(one) and not (as_text and one.special)}
        self._added = list(known.values())
        self._numbers = {number: one.content for number, one in known.items()}
        normalize = self._normal = _normalizer(self._fast, self._added)
        self._all = Finder([one.content for one in self._added], normalize)
        self._special = Finder([one.content for one in self._added if one.special], normalize)
        self._tokenizer = tokenizer
        self._copy: tuple[Any, dict[str, str]] | None = None
        self._open = self._opened(render)
        self._simple = not self._open and normalize is None  # a text without the first letter of any needs no mask

    def count(self, messages: Sequence[Message]) -> int:
        """Control tokens in the messages' texts, which are read as text."""
        return sum(self._of(m).count(text) for m in messages for text in _texts(m))

    def is_plain(self, text: Any) -> bool:
        """Whether a content needs no mask, whoever says it."""
        if not isinstance(text, str):
            return False
        if self._simple:
            for letter in self._all.first:
                if letter in text:
                    break
            else:  # as almost always
                return True
        return not any(self._all.touches(part, bool(self._open)) for _, part in _parts("assistant", text))

    def touch(self, message: Message) -> bool:
        """Whether the message's texts need a mask."""
        role, finder = str(message["role"]), self._of(message)
        return any(finder.touches(one, role in self._open) for text in _texts(message) for _, one in _parts(role, text))

    def masked(self, chat: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
        """The chat with masks in it, and mask -> letter. Raises ChatRefused where no letter is left for a mask."""
        taken = {letter for message in chat for text in _texts(message) for letter in text}
        masks: dict[str, str] = {}  # letter -> mask

        def mask(message: Message, text: str) -> str:
            letters, is_open = list(text), message.get("role") in self._open
            for start, part in _parts(str(message["role"]), text):
                for place in self._of(message).letters(part, is_open):
                    letter = text[start + place]
                    if letter not in masks:
                        masks[letter] = _free(taken)
                        taken.add(masks[letter])
                    letters[start + place] = masks[letter]
            return "".join(letters)

        made = [_mapped(message, lambda text, message=message: mask(message, text)) for message in chat]  # type: ignore[misc]
        return made, {mask: letter for letter, mask in masks.items()}

    def ids(self, rendered: str, masks: Mapping[str, str]) -> list[int]:
        """Token ids of what the template made of a masked chat."""
        unmask = str.maketrans(dict(masks))
        if self._fast is None:  # each text between control tokens by itself
            return [
                one for part, is_own in self._cut(rendered) for one in self._slow_ids(part.translate(unmask), is_own)
            ]
        if self._copy is None:
            self._copy = renamed(self._fast, [one.content for one in self._added])
        copy, names = self._copy
        told = "".join(
            part.replace(part.strip(), names[own]) if own else part.translate(unmask)
            for part, own in self._found(rendered)
        )
        return list(copy.encode_batch_fast([told], add_special_tokens=False)[0].ids)

    def reply_ids(self, text: str) -> list[int] | None:
        """Token ids of the assistant's text; None where it holds no special token."""
        if not self._special.count(text):
            return None
        (message,), masks = self.masked([{"role": "assistant", "content": text}])
        return self.ids(message["content"], masks)

    def _found(self, text: str) -> Iterator[tuple[str, str]]:
        """Pieces of a text, each with the control token that the tokenizer itself finds there, or ""."""
        numbers, at = self._numbers, 0
        found = self._fast.encode(text, add_special_tokens=False)
        for number, (start, end) in zip(found.ids, found.offsets, strict=True):
            # One that stands for whatever is unknown is no control token there.
            part = text[start:end]
            if number in numbers and numbers[number] in (part.strip(), self._changed(part)):
                yield text[at:start], ""
                yield part, numbers[number]
                at = end
        yield text[at:], ""

    def _changed(self, text: str) -> str:
        return self._normal(text).strip() if self._normal else text

    def _cut(self, text: str) -> Iterator[tuple[str, bool]]:
        """The same of a tokenizer that tells no places: the longest of the leftmost."""
        words = sorted((one.content for one in self._added), key=len, reverse=True)
        for i, piece in enumerate(re.split(f"({'|'.join(map(re.escape, words))})", text) if words else [text]):
            if piece:
                yield piece, bool(i % 2)

    def _slow_ids(self, text: str, is_own: bool) -> list[int]:
        if is_own:
            return [self._tokenizer.convert_tokens_to_ids(text)]
        return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)

    def _opened(self, render: Callable[[Sequence[Message]], str]) -> set[str]:
        """Speakers before whose texts the template may write the beginning of a control token."""
        found = set()
        for roles in SHAPES:
            for said in ("", "<think>x</think>"):
                chat = [{"role": role, "content": f"{said}{_MARK}x"} for role in roles]
                try:
                    before = render(chat).split(_MARK)[:-1]
                except Exception:  # a template may refuse this chat
                    continue
                # Where it leaves out a text, or says one twice, whoever it was counts.
                whose = [{role} for role in roles] if len(before) == len(roles) else [set(roles)] * len(before)
                for text, speakers in zip(before, whose, strict=True):
                    if text.endswith(self._all.beginnings):
                        found |= speakers
        return found

    def _of(self, message: Message) -> Finder:
        return self._special if message.get("role") == "assistant" else self._all


def renamed(fast: Any, contents: Sequence[str]) -> tuple[Any, dict[str, str]]:
    """A copy of a tokenizer that knows these tokens, by their ids, under other names alone; and content -> name."""
    made = json.loads(fast.to_str())
    names = {content: _name() for content in contents}
    for one in made["added_tokens"]:
        one["content"] = names.get(one["content"], one["content"])
    made["post_processor"] = made["truncation"] = made["padding"] = None
    model = made["model"]
    if isinstance(model["vocab"], list):  # of Unigram: pieces with their scores
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(piece, piece): number for piece, number in model["vocab"].items()}
    if "merges" in model:
        pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names.keys()]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    copy = type(fast).from_str(json.dumps(made))
    copy.encode_special_tokens = fast.encode_special_tokens
    return copy, names


def _free(taken: Collection[str]) -> str:
    """A random letter that is none of these."""
    if sum(ord(one) in _PRIVATE for one in taken) == len(_PRIVATE):
        raise ChatRefused("it holds every letter that means nothing")
    while (letter := chr(_PRIVATE.start + secrets.randbelow(len(_PRIVATE)))) in taken:
        pass
    return letter


def _name() -> str:
    """Nobody's word: 120 bits. Small letters between digits, which no normalizer changes or joins to their neighbours."""
    return f"7{''.join(secrets.choice(string.ascii_lowercase) for _ in range(26))}7"


def _is_control(token: Any) -> bool:
    return bool(token.special) or any(not (one.isalnum() or one.isspace() or one == "▁") for one in token.content)


def _normalizer(fast: Any, added: Sequence[Any]) -> Callable[[str], str] | None:
    """How a text is changed before the tokens that are normalized are looked for; None where nothing is, or none is."""
    if fast is None or fast.normalizer is None or not any(one.normalized for one in added):
        return None
    normalize: Callable[[str], str] = fast.normalizer.normalize_str
    return normalize


def _texts(message: Message) -> Iterator[str]:
    """All texts that a template may write, but for the name of a known speaker."""
    for key, value in message.items():
        if key != "role" or value not in SPEAKERS:
            yield from _inside(value)


def _inside(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from (*_inside(key), *_inside(one))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _inside(one)


def _mapped(message: Message, change: Callable[[str], str]) -> Message:
    """The message with each of its texts changed."""

    def changed(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, Mapping):
            return {changed(key): changed(one) for key, one in value.items()}
        return [changed(one) for one in value] if isinstance(value, (list, tuple)) else value

    return {key: value if key == "role" and value in SPEAKERS else changed(value) for key, value in message.items()}


def _parts(role: str, text: str) -> Iterator[tuple[int, str]]:
    """(start, text) of what a template may write by itself: of the assistant's text, also what stands between tags."""
    yield 0, text
    if role == "assistant":
        start = 0
        for tag in _TAGS.finditer(text):
            yield start, text[start : tag.start()]
            start = tag.end()
        if start:
            yield start, text[start:]
