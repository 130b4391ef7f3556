"""Tokenizers and chat templates that behave like those of well-known models, made here: bytes or pieces with spaces in
them, control tokens that are special or only added, and templates that strip thoughts, trim, fold the system message
into the user's, quote a tool's output as JSON, or refuse roles that do not alternate.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from qwens import QWEN, qwen_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

WORDS = "Ana wants a refund for the lamp of May. The desk says no, and gives 12 in its place.\nÄrger an der Theke <x> [y] |z|"
ALTERNATE = "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
SYSTEM_FIRST = """{%- if messages[0].role == 'system' %}{% set first = messages[0].content + '\\n\\n' %}{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}"""
QWEN3 = """{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.searching and message.role == 'user' and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
{%- set ns.searching = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}{%- set content = message.content %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{%- set thought = '' %}
{%- if '</think>' in content %}{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if loop.index0 > ns.last and (loop.last or thought) %}{{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA3 = """{{- bos_token }}{%- if messages[0].role == 'system' %}{% set first = messages[0].content | trim %}{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n\\n' + first + '<|eot_id|>' }}
{%- for message in messages %}{%- if message.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + (message.content | trim) + '<|eot_id|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
MISTRAL = (
    "{{- bos_token }}" + SYSTEM_FIRST + "{%- for message in messages %}" + ALTERNATE.replace("'user')", "'user' or message.role == 'tool')")
    + """{%- if message.role == 'tool' %}{{- '[TOOL_RESULTS] ' + (message.content | tojson) + '[/TOOL_RESULTS]' }}{%- elif message.role == 'user' %}{{- '[INST] ' + (first if loop.last else '') + message.content + '[/INST]' }}
{%- else %}{{- ' ' + message.content | trim + eos_token }}{%- endif %}{%- endfor %}"""
)  # fmt: skip
GEMMA = (
    "{{ bos_token }}" + SYSTEM_FIRST + "{%- for message in messages %}" + ALTERNATE
    + """{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' + (first if loop.first else '') + message.content | trim + '<end_of_turn>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{%- endif %}"""
)  # fmt: skip
DEEPSEEK = """{{- bos_token }}{%- for message in messages %}{%- if message.role == 'system' %}{{- message.content }}{%- endif %}{%- endfor %}
{%- for message in messages %}{%- if message.role == 'user' %}{{- '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' %}{{- '<｜Assistant｜>' + message.content.split('</think>')[-1] + eos_token }}
{%- elif message.role == 'tool' %}{{- '<｜tool▁outputs▁begin｜>' + message.content + '<｜tool▁outputs▁end｜>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"""

FAMILIES = ("Qwen2.5", "Qwen3", "Llama-3", "Mistral", "Gemma", "DeepSeek-R1")
ALTERNATING = ("Mistral", "Gemma")
THINK = ("<think>", "</think>")


@cache
def family(name: str) -> Any:
    """A tokenizer as transformers wraps it, with its template."""
    if name == "Qwen2.5":
        return qwen_tokenizer(QWEN)
    if name == "Qwen3":
        made = qwen_tokenizer(QWEN3)
        made.add_tokens([AddedToken(one, normalized=False, special=False) for one in (*THINK, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")])  # fmt: skip
        return made
    if name == "Llama-3":
        return wrapped(bytes_by_pairs(True), ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"), (), LLAMA3)  # fmt: skip
    if name == "Mistral":
        return wrapped(spaced_pieces(["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"], prepend=True), ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"), (), MISTRAL)  # fmt: skip
    if name == "Gemma":
        special = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
        return wrapped(
            spaced_pieces([*special, "<table>"], prepend=False), special, ("<table>", "\n\n", "▁▁", "▁▁▁"), GEMMA
        )
    return wrapped(bytes_by_pairs(False), ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"), ("<｜User｜>", "<｜Assistant｜>", *THINK, "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"), DEEPSEEK)  # fmt: skip


def wrapped(inner: Tokenizer, special: tuple[str, ...], added: tuple[str, ...], template: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    inner.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in special])
    inner.add_tokens([AddedToken(one, special=False, normalized=False) for one in added])
    bos = special[0]
    inner.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, inner.token_to_id(bos))]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=bos, eos_token=special[1])
    made.chat_template = template
    return made


def bytes_by_pairs(ignore_merges: bool) -> Tokenizer:
    inner = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator([WORDS] * 3, trainer)
    return inner


def spaced_pieces(known: list[str], *, prepend: bool) -> Tokenizer:
    """As sentencepiece's, with the control tokens among its pieces, and merges that lead to one."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    trained.train_from_iterator([WORDS] * 3, trainer)
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", *known, *fallback, *trained.get_vocab()]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    import json

    merges = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    one = known[-1]
    for n in range(2, len(one) + 1):  # so that pairs alone would make the control token of its letters
        for piece in (one[:n], one[n - 1], one[: n - 1]):
            vocab.setdefault(piece, len(vocab))
        merges.append((one[: n - 1], one[n - 1]))
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    parts = [normalizers.Prepend("▁")] if prepend else []
    inner.normalizer = normalizers.Sequence([*parts, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence(steps)
    return inner
