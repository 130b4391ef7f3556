"""What asks for a value closes the assistant's turn and is a user's message, in the words of each chat template."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from qwens import QWEN, QWQ, qwen_tokenizer

from stages.frame.types import Message, UsageError
from stages.judge.values import prompt_ids
from stages.llm.roles import load_roles
from stages.llm.tokens import ChatTokenizer

_LLAMA_3 = """{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"""
_FOLD = """{%- if messages[0].role == 'system' %}{%- set first = messages[0].content + '\n\n' %}{%- set rest = messages[1:] %}
{%- else %}{%- set first = '' %}{%- set rest = messages %}{%- endif %}"""
_TURN = "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ first if loop.first }}{{ m.content }}<|im_end|>\n"
_GEMMA = "{%- for m in rest %}" + _TURN + "{% endfor %}{%- if add_generation_prompt %}<|im_start|>model\n{% endif %}"
_INST = "{%- for m in rest %}{%- if m.role == 'user' %}[INST] {{ first if loop.first }}{{ m.content }} [/INST]{% else %}{{ m.content }}</s>{% endif %}{%- endfor %}"
_ALTERNATE = "{%- if not rest or rest[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
_REFUSE = "{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"

_LAST = "{%- for m in messages %}{%- if not loop.last %}[{{ m.content }}]{% endif %}{% endfor %}"
_NO_REPLIES = "{%- for m in messages %}{%- if m.role == 'user' %}[{{ m.content }}]{% endif %}{% endfor %}"

TEMPLATES = {
    "Qwen2.5": QWEN,
    "QwQ": QWQ,
    "Llama 3": _LLAMA_3,
    "Gemma 3, which puts it before the user's": _FOLD + _GEMMA,
    "Gemma 2, which refuses it": _REFUSE + _FOLD + _GEMMA,
    "Llama 2, of which nothing is left": _FOLD + _INST,
    "Mistral, which wants a user's after it": _FOLD + _ALTERNATE + _INST,
}
DATA = Path(__file__).parent.parent.parent / "data"
ROLES = load_roles("service_desk")
TEXT = ROLES.templates["value"].strip()


@cache
def tokenizer() -> Any:
    return qwen_tokenizer(QWEN)


def of(template: str) -> Any:
    """What encodes and decodes by this template, as the engines do."""
    made = ChatTokenizer("none")
    made.tokenizer = tokenizer()
    made.tokenizer.chat_template = template
    return made


CLOSED = {
    "Qwen2.5": "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    "QwQ": "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n",
    "Llama 3": "<|im_end|><|im_start|>user\n\n{}<|im_end|><|im_start|>assistant\n\n",
    "Gemma 3, which puts it before the user's": "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>model\n",
    "Gemma 2, which refuses it": "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>model\n",
    "Llama 2, of which nothing is left": "</s>[INST] {} [/INST]",
    "Mistral, which wants a user's after it": "</s>[INST] {} [/INST]",
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_assistant_s_turn_is_closed_and_a_user_asks_for_a_value(kind: str) -> None:
    """Behind a prompt it is what the template itself makes of an empty reply and a user's message."""
    chats = of(TEMPLATES[kind])
    found = prompt_ids(chats, ROLES)
    assert chats.tokenizer.decode(found) == CLOSED[kind].format(TEXT)


def test_on_the_shipped_models_it_begins_with_the_end_token() -> None:
    for name, task in (("base", "service_desk"), ("base_agents", "math")):
        chats: Any = ChatTokenizer(str(DATA / name))
        roles = load_roles(task)
        found, end = prompt_ids(chats, roles), chats.tokenizer.eos_token_id
        assert found[0] == end
        state: list[Message] = [{"role": "user", "content": "Ana wants refund."}]
        asked: Message = {"role": "user", "content": roles.templates["value"].strip()}
        rendered = chats.encode([*state, {"role": "assistant", "content": ""}, asked])
        assert (*chats.encode(state), *found) == rendered


@pytest.mark.parametrize("template", [_LAST, "<|im_start|>model\n", _NO_REPLIES])
def test_a_template_that_drops_it_is_refused_in_one_sentence(template: str) -> None:
    with pytest.raises(
        UsageError, match=r"model\.path: the chat template leaves out .* self_ac\.soft_prompt"
    ) as caught:
        prompt_ids(of(template), ROLES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "reason"), [("{{ raise_exception('no chats') }}", "no chats"), ("", "of a chat it leaves nothing")]
)
def test_a_template_that_refuses_every_chat_is_refused_with_its_reason(template: str, reason: str) -> None:
    with pytest.raises(UsageError, match=rf"model\.path: .*\({reason}\)"):
        prompt_ids(of(template), ROLES)


def test_a_chat_that_a_template_refuses_is_one_sentence_with_its_reason() -> None:
    chat = [{"role": "system", "content": "Desk."}, {"role": "user", "content": "Hello."}]
    with pytest.raises(UsageError, match=r"model\.path: .*\(System role not supported\)") as caught:
        of(TEMPLATES["Gemma 2, which refuses it"]).encode(chat)
    assert "\n" not in str(caught.value)
    assert of(TEMPLATES["Gemma 3, which puts it before the user's"]).encode(chat)
