"""Models and devices for the estimate of cost: parameters, work and bytes a token; peak, bandwidth, memory.

A shape comes from the model folder's config.json. The papers' models are known by name, because no hub is asked. The
layout is that of Llama and Qwen2: grouped-query attention and a gated feed-forward part. Nothing here imports torch.
[ours]
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.shipped import bring
from stages.envs import nearest
from stages.frame.types import UsageError
from stages.llm.folder import reading

GIB = 2**30
CHUNK = 1024  # tokens that go through the vocabulary projection at a time (learn/losses.py)


@dataclass(frozen=True)
class Shape:
    """A decoder: Q = heads x head_dim wide queries, KV = kv_heads x head_dim wide keys and values."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    tied: bool = False
    attention_bias: bool = False
    positions: int = 32768

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of every linear layer of a block: query, key, value, output, gate, up, down."""
        d, i = self.width, self.inner
        return (d, self.q), (d, self.kv), (d, self.kv), (self.q, d), (d, i), (d, i), (i, d)

    @property
    def body(self) -> int:
        """Weights that every token is multiplied with, without the vocabulary projection."""
        return self.layers * sum(a * b for a, b in self.linears)

    @property
    def head(self) -> int:
        return self.width * self.vocabulary

    @property
    def parameters(self) -> int:
        small = self.layers * (2 * self.width + (self.q + 2 * self.kv if self.attention_bias else 0)) + self.width
        return self.body + small + self.head * (1 if self.tied else 2)

    def lora(self, rank: int) -> int:
        """Parameters of an adapter on every linear layer but the vocabulary projection."""
        return self.layers * rank * sum(a + b for a, b in self.linears)

    def kv_bytes(self, itemsize: float) -> float:
        """Of the KV cache, a token. itemsize: bytes of a number in it."""
        return 2 * self.layers * self.kv * itemsize

    def attention_flops(self, pairs: float, products: int) -> float:
        """Of so many pairs of a query and a key: 2 products forward; backward 5, where the scores are worked out again."""
        return 2.0 * products * pairs * self.q * self.layers

    def activation_bytes(self, itemsize: int, rank: int, *, checkpointing: bool) -> tuple[float, float]:
        """(bytes a token that all layers keep for the backward pass, bytes a token of the one layer that is worked out
        again).

        Per layer: inputs of both norms in fp32; inputs of the adapter's A and B; queries, keys, values and attention
        output; gate, its activation, up. With a 16-bit base, A's inputs are cast to fp32 for each linear layer. The
        base is frozen: its layers keep no inputs.
        """
        d, i = self.width, self.inner
        a_inputs = 5 * d + self.q + i if itemsize < 4 else 2 * d + self.q + i
        layer = 4 * (2 * d + a_inputs + len(self.linears) * rank) + itemsize * (2 * self.q + 2 * self.kv + 3 * i)
        if not checkpointing:
            return float(self.layers * layer), 0.0
        return float(self.layers * itemsize * d), float(layer)

    def logits_bytes(self, itemsize: int) -> float:
        """Of a chunk of tokens on its way through the vocabulary projection and back: logits, in fp32, their softmax
        and its gradient.
        """
        return float(CHUNK * self.vocabulary * (itemsize + 3 * 4))


@dataclass(frozen=True)
class Device:
    """bf16, fp32: peak of dense matrix products, TFLOP/s. bandwidth: of its memory, TB/s. memory: what a program gets,
    GiB.
    """

    bf16: float
    fp32: float
    bandwidth: float
    memory: float

    def peak(self, dtype: str) -> float:
        """FLOP/s."""
        return 1e12 * (self.bf16 if dtype == "bfloat16" else self.fp32)


# The makers' data sheets (SXM where there are several), without sparsity; memory as the driver tells it, rounded down.
DEVICES = {
    "a100": Device(312, 19.5, 2.04, 79),
    "a100-40": Device(312, 19.5, 1.56, 39),
    # Two cores of a server, as this project's own machine: measured products, and its memory.
    "cpu": Device(0.9, 0.216, 0.02, 15),
    "b200": Device(2250, 75, 8.0, 178),
    "h100": Device(989, 67, 3.35, 79),
    "h20": Device(148, 44, 4.0, 95),
    "h200": Device(989, 67, 4.8, 139),
    "l40s": Device(362, 91.6, 0.86, 44),
    "rtx4090": Device(165, 82.6, 1.01, 23),
}

SMOL = Shape(30, 576, 9, 3, 64, 1536, 49152, tied=True, positions=8192)
KNOWN = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": SMOL,
    "data/models/smollm2": SMOL,
    "data/models/smollm2_desk": SMOL,
    "Qwen/Qwen2.5-0.5B-Instruct": Shape(24, 896, 14, 2, 64, 4864, 151936, tied=True, attention_bias=True),
    "Qwen/Qwen2.5-7B-Instruct": Shape(28, 3584, 28, 4, 128, 18944, 152064, attention_bias=True),
    "Qwen/Qwen2.5-32B-Instruct": Shape(64, 5120, 40, 8, 128, 27648, 152064, attention_bias=True),
    "Qwen/QwQ-32B": Shape(64, 5120, 40, 8, 128, 27648, 152064, attention_bias=True, positions=40960),
}


def device_of(name: str) -> Device:
    """Raises UsageError with the nearest name."""
    if name not in DEVICES:
        raise UsageError(
            f"--device: there is no device {name!r}{nearest(name, list(DEVICES))} Known: {', '.join(DEVICES)}."
        )
    return DEVICES[name]


def shape_of(path: str) -> Shape:
    """Shape of a model folder, or of a known hub name. Raises UsageError where neither tells it."""
    bring(path)
    file = Path(path) / "config.json"
    if not file.is_file():
        # A folder is often named like the model in it.
        found = next((shape for name, shape in KNOWN.items() if name.split("/")[-1] == Path(path).name), None)
        if found is None:
            raise UsageError(
                f"model.path: there is no config.json in {path!r} to plan with. Give a model's folder, or one of {', '.join(KNOWN)}."
            )
        return found
    with reading(path, file.name):
        return read_shape(json.loads(file.read_text(encoding="utf-8")), str(file))


def read_shape(config: Mapping[str, Any], where: str) -> Shape:
    """Shape of a transformers config as plain values. Raises UsageError naming the key that is missing."""
    try:
        heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
        return Shape(
            layers=int(config["num_hidden_layers"]), width=width, heads=heads, kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or width // heads), inner=int(config["intermediate_size"]), vocabulary=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)), attention_bias=config.get("model_type") == "qwen2" or bool(config.get("attention_bias")),
            positions=int(config.get("max_position_embeddings") or 32768),
        )  # fmt: skip
    except KeyError as error:
        raise UsageError(
            f"model.path: {where} has no {error}; wanted the config.json of a decoder like Llama or Qwen2."
        ) from None
