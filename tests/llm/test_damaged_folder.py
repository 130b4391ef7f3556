"""A damaged file of a model's folder is one sentence that names it, whatever the libraries that read it raise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.frame.types import ChatRefused, Message, Request, UsageError
from stages.llm.hf import HfEngine

CHAT: list[Message] = [{"role": "system", "content": "Desk."}, {"role": "user", "content": "w1 w2"}]
DEEP = b"[" * 100_000 + b"]" * 100_000
TEMPLATES = [
    "{% for %}", "{{ messages", "{{ nosuch.x.y }}", "{{ 1 / 0 }}", "{{ 1 + 'a' }}", "{{ 1 | nosuch }}", "{{ 'a' * 10**12 }}", "",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% include '/etc/passwd' %}", "{{ messages[9].content }}", "{{ range | tojson }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
]  # fmt: skip


def keys(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps(json.loads(content) | changes).encode()


def exactly(content: bytes) -> Callable[[bytes], bytes]:
    return lambda _: content


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


JSON = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
DAMAGES: list[tuple[str, Callable[[bytes], bytes]]] = [
    *((name, damage) for name in JSON for damage in (cut, *map(exactly, (b"", b"\xff\xfe{}", b"[]", b"null", DEEP)))),
    ("config.json", keys(model_type="nosuch")),
    ("config.json", keys(model_type=[])),
    ("config.json", keys(hidden_size="many")),
    ("config.json", keys(num_attention_heads=0)),
    ("config.json", keys(num_key_value_heads=0)),
    ("config.json", keys(vocab_size=-5)),
    ("config.json", keys(hidden_act="nosuch")),
    ("config.json", keys(rope_parameters={"rope_type": "default", "rope_theta": "x"})),
    ("config.json", keys(pad_token_id=10**9)),
    ("config.json", keys(dtype="float3")),
    ("generation_config.json", keys(eos_token_id="x")),
    ("generation_config.json", keys(eos_token_id=[[1]])),
    ("generation_config.json", keys(eos_token_id=10**30)),
    ("generation_config.json", keys(max_new_tokens=-3)),
    ("generation_config.json", keys(pad_token_id="x")),
    ("tokenizer_config.json", keys(eos_token=3)),
    ("tokenizer_config.json", keys(added_tokens_decoder={"0": 3})),
    ("tokenizer.json", exactly(b"{}")),
    ("tokenizer.json", keys(model={"type": "WordLevel", "vocab": [], "unk_token": "x"})),
    ("tokenizer.json", keys(model={"type": "WordLevel", "vocab": {}, "unk_token": "x"})),
    ("tokenizer.json", keys(model={"type": "WordLevel", "vocab": {"a": 99_999}, "unk_token": "a"})),
    ("tokenizer.json", keys(normalizer={"type": "Replace", "pattern": {"Regex": "("}, "content": ""})),
    ("chat_template.jinja", exactly(b"\xff\xfe")),
    ("special_tokens_map.json", exactly(b"{")),
    ("model.safetensors", cut),
    ("model.safetensors", exactly(b"<html>not found</html>")),
    ("model.safetensors", lambda content: (2**62).to_bytes(8, "little") + content[8:]),
]


def answer(path: str) -> None:
    engine = HfEngine(path)
    engine.generate([Request(engine.encode(CHAT), 2, 1.0, 0)])


def damaged(base: Path, folder: Path, name: str, damage: Callable[[bytes], bytes]) -> str:
    shutil.copytree(base, folder)
    file = folder / name
    file.write_bytes(damage(file.read_bytes() if file.exists() else b""))
    return str(folder)


@pytest.mark.parametrize("number", range(len(DAMAGES)), ids=lambda n: f"{DAMAGES[n][0]}-{n}")
def test_a_damaged_file_is_one_sentence_that_names_it(number: int, base: Path, tmp_path: Path) -> None:
    name, damage = DAMAGES[number]
    path = damaged(base, tmp_path / "model", name, damage)
    with pytest.raises(UsageError, match=r"^model\.path: ") as caught:
        answer(path)
    told = str(caught.value)
    assert (name in told and path in told) or f"eos_token_id in {name}" in told
    assert "\n" not in told and len(told) < 500


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_that_fails_is_one_sentence_and_reads_no_file(
    template: str, base: Path, tmp_path: Path
) -> None:
    path = damaged(base, tmp_path / "model", "chat_template.jinja", exactly(template.encode()))
    with pytest.raises(
        ChatRefused, match=r"^model\.path: wanted a chat template .* refuses such a chat \(.+\)"
    ) as caught:
        HfEngine(path).encode(CHAT)
    assert "\n" not in str(caught.value) and "root:" not in str(caught.value)


def test_a_folder_without_a_chat_template_is_one_sentence(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    with pytest.raises(ChatRefused, match=r"chat_template is not set"):
        HfEngine(str(tmp_path / "model")).encode(CHAT)


def test_no_code_of_a_folder_runs(base: Path, tmp_path: Path) -> None:
    """Neither a module that its config names, nor a pickle."""
    ran = tmp_path / "ran"
    path = damaged(
        base, tmp_path / "model", "config.json",
        keys(auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}),
    )  # fmt: skip
    (Path(path) / "evil.py").write_text(f"open({str(ran)!r}, 'w')\n")
    (Path(path) / "pytorch_model.bin").write_bytes(b"cbuiltins\nopen\n(V" + str(ran).encode() + b"\nVw\ntR.")
    HfEngine(path)
    (Path(path) / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"^model\.path: "):
        HfEngine(path)
    assert not ran.exists()
