"""Roles are prompts: one folder a task, one file a role, with named fields.

policy, successor, combine, evaluator, refiner and corrector are the roles of NLAC (arXiv 2512.04601, section 4 and its
prompts). thinker writes a new thought before a rewritten action (stages/judge/rethink.py). value asks Self-AC's critic
(stages/judge/values.py). Every task has policy.md and value.md; without NLAC it needs no other. The fingerprint of each
stage holds the hash of its prompt files: a changed word is a new run. `policy.md` is added to the environment's own
system message. Every other file is one user message after the conversation as the policy saw it. So all roles of a turn
know what the policy knows and share a prefix [ours]. With `roles.history` "text" that message holds the conversation as
text.
"""

from __future__ import annotations

import hashlib
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter

from stages.frame.react import opened_thought, parse_react, without_thought
from stages.frame.sections import History, RolesConfig
from stages.frame.types import Completion, Engine, Malformed, Message, Request, UsageError
from stages.llm.pieces import leaked_piece
from stages.llm.tokens import has_room

ROLES = ("policy", "successor", "combine", "evaluator", "refiner", "corrector", "thinker", "value")
EVERYWHERE = ("policy", "value")
"""Roles that every task has a prompt for. The others are NLAC's: a stage that prompts one declares it (`Stage.roles`)."""
# What each role is told besides the conversation. policy and successor are the students: s', the reward and the critique
# have no field in their prompts.
FIELDS = {
    "policy": frozenset[str](),
    "successor": frozenset({"action", "thought"}),
    "combine": frozenset({"action", "thought", "observation", "reward", "future"}),
    "evaluator": frozenset({"action", "thought", "futures"}),
    "refiner": frozenset({"action", "thought", "evaluation"}),
    "corrector": frozenset({"text"}),
    "thinker": frozenset({"reply"}),
    "value": frozenset[str](),
}
FOLDER = Path(__file__).parent / "prompts"

NO_ROOM = Completion("", (), (), "no room")
"""Stands for the reply to a prompt that leaves no room for one in the model's context. Nobody was asked, and no reader of replies can read it."""

PIECE = 5
"""Successive words from which on a piece of a privileged text is a leak in a student prompt. A prompt is a template and fields, and what is known holds the
same filled template, so that false alarms need a chat template that says five words of a critique: a short run finds more."""


@dataclass(frozen=True)
class Evaluation:
    """`optimal` and the whole critique, "Optimality: No. <reason>"."""

    optimal: bool
    text: str


@dataclass(frozen=True)
class Roles:
    """The prompts of one task. history: how the conversation stands before a role's words."""

    name: str
    templates: dict[str, str]
    history: History = "chat"

    def prompt(self, role: str, state: Sequence[Message], **fields: str) -> list[Message]:
        """A role's prompt, but for the policy's: the conversation as that saw it, then a user message of its words.

        With history "text" that message is all, and the policy's private thoughts are left out.
        """
        words, seen = self.words(role, **fields), self.policy(state)
        if self.history == "chat":
            return [*seen, {"role": "user", "content": words}]
        orders = [str(message["content"]) for message in seen if message["role"] == "system"]
        return [{"role": "user", "content": "\n\n".join(["\n".join([*orders, history_text(seen)]), words])}]

    def words(self, role: str, **fields: str) -> str:
        """What a role is told besides the conversation: its file with the fields filled in."""
        return self.templates[role].format(**fields).strip()

    def policy(self, messages: Sequence[Message]) -> list[Message]:
        """The policy's prompt: the conversation, its system message followed by the role's instructions."""
        suffix = self.templates["policy"].format().strip()
        if not suffix:
            return list(messages)
        head, *rest = messages
        return [{**head, "content": f"{head['content']}\n\n{suffix}"}, *rest]

    def hashes(self) -> dict[str, str]:
        return {role: hashlib.sha256(text.encode()).hexdigest() for role, text in self.templates.items()}


def ask(
    engine: Engine,
    prompts: Sequence[Sequence[Message]],
    *,
    role: str,
    adapter: str | None,
    temperature: float,
    max_tokens: int,
    seed: int,
    thoughts: bool = False,
) -> list[tuple[tuple[int, ...], Completion]]:
    """Put prompts to a role; (prompt ids, completion) of each, in order. Every row gets a seed of its own.

    A model's <think> part is cut off, tokens and all (`spoken`); with `thoughts` it stays, as in actions to be learned.
    A prompt that is too long gets NO_ROOM: the stage drops that row and counts it, and the others are as without it.
    """
    ids = engine.encode_all(prompts)
    context = engine.context if ids else None
    requests = {
        i: Request(prompt, max_tokens, temperature, mix(seed, i), adapter, role)
        for i, prompt in enumerate(ids)
        if has_room(prompt, context)
    }
    # Prompts that begin alike after each other: an engine that keeps what it has read finds it there. Seeds are of the
    # prompts' own order, so what comes is the same.
    order = sorted(requests, key=lambda i: ids[i])
    replies = dict(zip(order, engine.generate([requests[i] for i in order]) if order else [], strict=True))
    for i, reply in replies.items():
        tag = thought_opened(engine.decode, ids[i])
        replies[i] = replace(reply, text=tag + reply.text) if thoughts else spoken(reply, tag, engine.decode)
    return [(prompt, replies.get(i, NO_ROOM)) for i, prompt in enumerate(ids)]


def thought_opened(decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int]) -> str:
    """The <think> that the chat template has opened at the end of this prompt, or ""."""
    # room for the tag and white space, even where each letter is a token
    return opened_thought(decode(prompt_ids[-10:]))


def spoken(reply: Completion, opened: str, decode: Callable[[Sequence[int]], str]) -> Completion:
    """What is left of a reply without its <think> part: text, ids and log-probs. A thought without an end leaves "".

    opened: the tag that stands at the prompt's end already, or "". Then the ids keep the closing tag. Prompt and
    completion, learned as a row, are an empty thought and a reply: a form that the model knows. Source: ours; the paper
    corrects chains of thought.
    """
    if not opened and "think>" not in reply.text.lower():
        return reply
    try:
        said = without_thought(opened + reply.text)
    except Malformed:
        return replace(reply, text="")
    if said == opened + reply.text:
        return reply
    ids = reply.token_ids

    def closed(start: int, end: int) -> bool:
        return "</think>" in decode(ids[start:end]).lower()

    end = bisect_left(range(len(ids)), True, key=lambda n: closed(0, n))
    start = end
    if opened:
        while start and not closed(start, end):
            start -= 1
    else:
        while start < len(ids) - 1 and not decode(ids[start : start + 1]).strip():
            start += 1
    return Completion(said, ids[start:], reply.log_probs[start:], reply.finish_reason)


def mix(*parts: object) -> int:
    """A seed in [0, 2^63) from anything printable; the same parts give the same seed on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def prompts_folder(name: str) -> Path:
    """Of that name in FOLDER; what has a "/" is the path of one's own, which counts from the project folder."""
    return Path(name) if "/" in name else FOLDER / name


def load_roles(name: str, *, history: History = "chat") -> Roles:
    """Read and check the prompt files of a task. Raises UsageError naming a missing file, or a wrong field in one.

    That a role of NLAC is missing is no error here: `execute` refuses a stage that needs it before it starts.
    """
    folder = prompts_folder(name)
    if not os.path.isdir(folder):  # not Path's, which raises where a name is too long
        known = ", ".join(sorted(path.name for path in FOLDER.iterdir() if path.is_dir()))
        raise UsageError(
            f"roles.prompts: no prompt folder named {name[:200]!r}. Known are {known}. Your own is a path with a '/', like ./prompts, relative to {Path.cwd()}"
        )
    templates = {}
    for role in ROLES:
        path = folder / f"{role}.md"
        if not path.is_file():
            if role in EVERYWHERE:
                raise UsageError(f"roles.prompts: {folder.name} lacks {role}.md; add it to {folder.name}/")
            continue
        templates[role] = _template(path, role)
    return Roles(name, templates, history)


def _template(path: Path, role: str) -> str:
    """The text of a prompt file. Raises UsageError where it is no text, or has another field than its role's."""
    where = f"{path.parent.name}/{path.name}"
    try:
        text = path.read_text(encoding="utf-8")
        used = {"!:".join(filter(None, part[1:])) for part in Formatter().parse(text) if part[1] is not None}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"roles.prompts: {where} cannot be read as text in UTF-8: {error}") from None
    except ValueError as error:
        raise UsageError(f"{where}: {error}; write {{{{ and }}}} for braces that are no field") from error
    if unknown := used - FIELDS[role]:
        raise UsageError(
            f"{where} uses the field {{{sorted(unknown)[0]}}}, which is none of this role's; "
            "the conversation stands before the role's words"
        )
    return text


def roles_of(config: RolesConfig) -> Roles:
    """The prompts that a run's config names. Raises UsageError as `load_roles`."""
    return load_roles(config.prompts, history=config.history)


def check_student(student: str, known: str, privileged: Sequence[str]) -> None:
    """The invariant of the two information sets: nothing that only the teacher knew stands in the student prompt.

    A leak is a whole privileged text, however short, or a run of PIECE words of one.
    known: what the student may see, its template included; what stands there, too, is no leak.
    Raises AssertionError.
    """
    whole = [text for text in privileged if text and text in student and text not in known]
    for piece in (*whole, leaked_piece(student, privileged, known, words=PIECE)):
        if piece:
            raise AssertionError(f"the student prompt holds what only the teacher may know: {piece!r}")


def policy_text(roles: Roles, messages: Sequence[Message]) -> str:
    """All that the policy may know of a state, as text: the system message with the role's instructions, then the
    conversation. It does not use the code that builds prompts, because they are compared with it.
    """
    head, *rest = (str(m["content"]) for m in messages)
    return "\n".join([f"{head}\n\n{roles.templates['policy'].format().strip()}", *rest])


def prompt_text(messages: Sequence[Message]) -> str:
    """All that a prompt says, message below message."""
    return "\n".join(str(message["content"]) for message in messages)


def history_text(messages: Sequence[Message]) -> str:
    """A state as text: what was said and done, without the policy's private thoughts and without the system message.

    The thought does not touch the environment (paper, section 3), so a future cannot depend on it.
    """
    lines = []
    for message in messages:
        if message["role"] == "assistant":
            lines.append(f"Action: {_action(str(message['content']))}")
        elif message["role"] != "system":
            lines.append(str(message["content"]))
    return "\n".join(lines)


def _action(text: str) -> str:
    try:
        return parse_react(text)[1]
    except Malformed:
        return "unreadable"


def parse_future(text: str) -> str:
    """A future that begins with "Future:" and says something. Raises Malformed."""
    if not re.match(r"\s*Future:\s*\S", text):
        raise Malformed(f"wanted 'Future: ...', found {text[:80]!r}")
    return text.strip()


def complete_future(reply: Completion) -> str:
    """The future of a reply that was not cut off: without its end nobody knows how it ends. Raises Malformed."""
    if reply.finish_reason != "stop":
        raise Malformed("the future was cut at roles.max_future_tokens")
    return parse_future(reply.text)


def parse_evaluation(text: str) -> Evaluation:
    """ "Optimality: Yes ..." or "Optimality: No. <reason>". Raises Malformed."""
    match = re.match(r"\s*Optimality:\s*(Yes|No)\b", text, re.IGNORECASE)
    if not match:
        raise Malformed(f"wanted 'Optimality: Yes' or 'Optimality: No. <reason>', found {text[:80]!r}")
    return Evaluation(match.group(1).lower() == "yes", text.strip())
