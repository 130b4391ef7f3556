"""Every role is told all that the policy is told, behind the same tokens, or the run is refused in a sentence.

Of the desk, of 20 Questions, of problems, and of the shop in miniature, whose policy and tools stand in the system message.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tau_small
from qwens import QWEN, QWQ, qwen_tokenizer

from stages import envs
from stages.frame.sections import History
from stages.frame.types import Message, UsageError
from stages.llm.last_message import check_last_message
from stages.llm.roles import FIELDS, Roles, load_roles
from stages.llm.scripted import ScriptedEngine
from stages.llm.tokens import ChatTokenizer

DATA = Path(__file__).parent.parent.parent / "data"
ENVS = {
    "service_desk": "service_desk",
    "twenty_questions": "twenty_questions",
    "math_react": "math",
    "tau_bench": "tau_bench",
}
TEMPLATES = {"Qwen2.5": QWEN, "QwQ": QWQ}
SECRET = "the #W9 that only the teacher saw"


@cache
def chats(name: str) -> Any:
    """What encodes and decodes as the engines do: the shipped tokenizers, and one by a template of the large models."""
    made = ChatTokenizer(str(DATA / name) if name.startswith("base") else "none")
    if name in TEMPLATES:
        made.tokenizer = qwen_tokenizer(TEMPLATES[name])
    return made


def of(template: str) -> Any:
    made = ChatTokenizer("none")
    made.tokenizer = qwen_tokenizer(QWEN)
    made.tokenizer.chat_template = template
    return made


def state_of(task: str, folder: Path) -> list[Message]:
    """A conversation with the real system message, before the second action."""
    options = {"path": tau_small.write(folder)} if task == "tau_bench" else {}
    env: Any = envs.make_env(ENVS[task], options, tau_small.customer)()
    first = env.reset(envs.scenarios(ENVS[task], options, "train", 1, 0)[0])
    said: Message = {"role": "assistant", "content": "Thought: I wonder. Action: look"}
    return [{"role": "system", "content": env.system}, *first, said, {"role": "user", "content": "It is there."}]


def told(role: str) -> dict[str, str]:
    """Fields whose text says what the teacher alone may know, where a role has such a field."""
    known = {"action", "thought"}
    return {name: "cancel it" if name in known else SECRET for name in FIELDS[role]}


@pytest.mark.parametrize("task", ENVS)
@pytest.mark.parametrize("history", ["chat", "text"])
def test_every_role_reads_the_whole_system_message_and_all_that_was_said(
    tmp_path: Path, task: str, history: History
) -> None:
    roles, state = load_roles(task, history=history), state_of(task, tmp_path)
    for role in set(roles.templates) - {"policy", "value"}:
        prompt = roles.prompt(role, state, **told(role))
        text = "\n".join(str(message["content"]) for message in prompt)
        assert str(roles.policy(state)[0]["content"]) in text
        assert all(str(m["content"]) in text for m in state if m["role"] == "user")
        assert text.endswith(roles.words(role, **told(role)))
        assert [m["role"] for m in prompt] == (["user"] if history == "text" else [*(m["role"] for m in state), "user"])
        assert ("I wonder" in text) == (history == "chat")
        if task == "tau_bench":
            assert "Be {kind}." in text and "Do cancel_pending_order." in text


@pytest.mark.parametrize("task", ENVS)
@pytest.mark.parametrize("name", ["base", "base_agents", *TEMPLATES])
def test_all_roles_of_a_turn_begin_with_the_policy_s_prompt(tmp_path: Path, task: str, name: str) -> None:
    """To the token, up to what opens the reply."""
    engine, roles, state = chats(name), load_roles(task), state_of(task, tmp_path)
    policy = engine.encode(roles.policy(state))
    tokenizer = engine.tokenizer
    whole = tokenizer.apply_chat_template(
        roles.policy(state), add_generation_prompt=False, tokenize=True, return_dict=False
    )
    assert policy[: len(whole)] == tuple(whole)
    for role in set(roles.templates) - {"policy", "value"}:
        prompt = engine.encode(roles.prompt(role, state, **told(role)))
        assert prompt[: len(whole)] == tuple(whole)
        assert len(prompt) > len(policy)
        assert prompt[len(prompt) - len(policy) + len(whole) :] == policy[len(whole) :]


@pytest.mark.parametrize("task", ENVS)
@pytest.mark.parametrize("history", ["chat", "text"])
def test_what_only_the_teacher_is_told_never_stands_in_the_student_s_prompt(
    tmp_path: Path, task: str, history: History
) -> None:
    roles, state = load_roles(task, history=history), state_of(task, tmp_path)
    for role in ("combine", "evaluator", "refiner", "corrector", "thinker"):
        assert SECRET in str(roles.prompt(role, state, **told(role))[-1]["content"])
    for prompt in (roles.prompt("successor", state, **told("successor")), roles.policy(state)):
        assert SECRET not in "".join(str(message["content"]) for message in prompt)
    with pytest.raises(KeyError):  # a field that it lacks cannot be filled in
        Roles("x", {**roles.templates, "successor": "{observation}"}, history).prompt(
            "successor", state, **told("successor")
        )


_TWO_USERS = """{%- for m in messages %}{%- if not loop.first and m.role == 'user' and messages[loop.index0 - 1].role == 'user' %}
{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"""
_DROPS = QWEN.replace("messages %}\n{%- if message.role", "messages[:4] %}\n{%- if message.role")
_REWRITES = QWEN.replace(
    "+ message.content + '<|im_end|>\\n' }}\n{%- elif message.role == 'tool'",
    "+ (message.content if messages|length == 4 else message.content[-12:]) + '<|im_end|>\\n' }}\n{%- elif message.role == 'tool'",
)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (_TWO_USERS + QWEN, r"refuses it \(roles must alternate\)"),
        (_DROPS, "leaves it out"),
        (_REWRITES, "changes what stands before it"),
    ],
)
def test_a_template_that_has_no_place_for_it_is_refused_with_the_way_out(template: str, reason: str) -> None:
    roles = load_roles("service_desk")
    with pytest.raises(UsageError, match=rf"model\.path: .* {reason}. Set roles\.history to text") as caught:
        check_last_message(of(template), roles)
    assert "\n" not in str(caught.value)
    check_last_message(of(template), load_roles("service_desk", history="text"))


def test_the_templates_in_use_have_a_place_for_it() -> None:
    for task in ENVS:
        for engine in (ScriptedEngine(), *map(chats, ("base", "base_agents", *TEMPLATES))):
            check_last_message(engine, load_roles(task))
