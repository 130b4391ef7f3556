"""What the engines over a model folder share: its tokenizer, and the room that the model's context leaves for a reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.types import Message, Request, UsageError


def check_folder(path: str) -> None:
    """Raises UsageError where `path` is shaped like a folder that is not there. Taken for a hub name it would be looked for in the network."""
    folder = Path(path)
    if not folder.is_dir() and folder.parent != Path() and folder.parent.is_dir():
        raise UsageError(f"model.path: there is no folder {path!r}; the embedded base model is made by: turnwise pretrain")


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model folder or hub name. Raises UsageError if there is none."""
    check_folder(path)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"model.path: no tokenizer that transformers can load at {path!r} ({str(error).splitlines()[0]})") from error


def encode(tokenizer: Any, messages: Sequence[Message]) -> tuple[int, ...]:
    """Token ids of a chat, ready for the assistant's next reply."""
    return encode_all(tokenizer, [messages])[0]


def encode_all(tokenizer: Any, chats: Sequence[Sequence[Message]]) -> list[tuple[int, ...]]:
    """Token ids of each chat, ready for the assistant's next reply. A fast tokenizer shares them out among the machine's cores."""
    if not chats:
        return []
    fast = getattr(tokenizer, "backend_tokenizer", None)
    rendered = tokenizer.apply_chat_template([list(chat) for chat in chats], add_generation_prompt=True, tokenize=fast is None, return_dict=False)
    if fast is None:
        return [tuple(ids) for ids in rendered]
    # The same in two steps: what transformers wraps around its fast tokenizer, and offsets, take twice as long again, at every turn.
    fast.no_truncation()  # which, as padding, a tokenizer's file may ask for
    fast.no_padding()
    return [tuple(found.ids) for found in fast.encode_batch_fast(rendered, add_special_tokens=False)]


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of token ids, without special ones."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None or tokenizer.clean_up_tokenization_spaces:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))
    return str(fast.decode(token_ids, skip_special_tokens=True))  # all that transformers then does, without a look at each id


def stop_tokens(tokenizer: Any, generation: int | Sequence[int] | None) -> tuple[int, ...]:
    """Ids that end a reply: the tokenizer's end token, and `eos_token_id` of the model's generation config; sorted."""
    found = {tokenizer.eos_token_id, *([generation] if generation is None or isinstance(generation, int) else generation)}
    return tuple(sorted(found - {None}))


OUT_OF_CONTEXT = "out of context"
"""How `Episode.error` begins, and why a row is dropped, where a prompt leaves no room for a reply."""

LONGER = "lower task.max_turns or roles.max_action_tokens, or set model.path to a model with a longer context"
"""What to do where prompts do not fit."""


def has_room(prompt_ids: Sequence[int], context: int | None) -> bool:
    """Whether a reply of at least one token fits behind the prompt. context: as of `Engine.context`."""
    return context is None or len(prompt_ids) < context


def nothing_fits(stage: str, n: int, context: int | None) -> UsageError:
    """Of a stage all of whose rows were dropped for this. As a finished run without rows it would be reused for ever."""
    return UsageError(f"{stage}: {n} of {n} rows have a prompt that leaves no room for a reply in the model's context of {context}; {LONGER}")


def fit_context(requests: Sequence[Request], context: int | None) -> list[Request]:
    """The requests, none of which can run past the model's context; a reply that is cut there ends like one at max_tokens, with "length".

    context: most tokens of a prompt and its reply together; None = not known, nothing is changed. Raises UsageError for a prompt that
    leaves no room for a single token; who has many prompts asks `has_room` first, so that one of them does not end the run. All engines
    do this, because each library does something else: transformers goes on past the positions that were trained, vLLM stops, its server
    refuses. [ours]
    """
    if context is None:
        return list(requests)
    for request in requests:
        if not has_room(request.prompt_ids, context):
            raise UsageError(f"a prompt of {len(request.prompt_ids)} tokens leaves no room for a reply in the model's context of {context}; {LONGER}")
    return [replace(request, max_tokens=min(request.max_tokens, context - len(request.prompt_ids))) for request in requests]
