"""The critic prompt stands in the row whatever a chat template does with a system message that no other follows."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from qwens import QWEN, QWQ, qwen_tokenizer

from stages.frame.types import UsageError
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

TEMPLATES = {
    "Qwen2.5": QWEN,
    "QwQ": QWQ,
    "Llama 3": _LLAMA_3,
    "Gemma 3, which puts it before the user's": _FOLD + _GEMMA,
    "Gemma 2, which refuses it": _REFUSE + _FOLD + _GEMMA,
    "Llama 2, of which nothing is left": _FOLD + _INST,
    "Mistral, which wants a user's after it": _FOLD + _ALTERNATE + _INST,
}
AS_SYSTEM = ("Qwen2.5", "QwQ", "Llama 3")
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


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_text_that_asks_for_a_value_stands_in_the_prompt_once(kind: str) -> None:
    chats = of(TEMPLATES[kind])
    found = prompt_ids(chats, ROLES)
    assert chats.decode(found).count(TEXT) == 1
    role = "system" if kind in AS_SYSTEM else "user"
    assert found == chats.encode([{"role": role, "content": TEXT}])


@pytest.mark.parametrize("template", ["", "{{ raise_exception('no chats') }}", "<|im_start|>model\n"])
def test_a_template_that_drops_it_as_any_message_is_refused_in_one_sentence(template: str) -> None:
    with pytest.raises(UsageError, match=r"model\.path: wanted a chat template .* self_ac\.soft_prompt") as caught:
        prompt_ids(of(template), ROLES)
    assert "\n" not in str(caught.value)


def test_a_chat_that_a_template_refuses_is_one_sentence_with_its_reason() -> None:
    chat = [{"role": "system", "content": "Desk."}, {"role": "user", "content": "Hello."}]
    with pytest.raises(UsageError, match=r"model\.path: .*\(System role not supported\)") as caught:
        of(TEMPLATES["Gemma 2, which refuses it"]).encode(chat)
    assert "\n" not in str(caught.value)
    assert of(TEMPLATES["Gemma 3, which puts it before the user's"]).encode(chat)
