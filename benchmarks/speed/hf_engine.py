"""The engine `hf` on two cores: a decoding step, prompt tokens a second, and the draw of a token, against the plain way.

    python -m benchmarks.speed.hf_engine              # a random model of SmolLM2-135M's shape
    python -m benchmarks.speed.hf_engine --model data/base

The plain way: batches padded to their longest prompt, a row that is done leaves the KV cache at once, and each draw is
worked out in fp64 over the whole vocabulary. Both ways answer the same requests of 60 to 300 prompt tokens and 24 new
ones, in turn. Ratios are plain / engine: above 1 the engine is faster.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.frame.types import Request
from stages.llm import hf
from stages.llm.hf import HfEngine

NEW, ROUNDS = 24, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model's folder (default: random weights, 135 M of them)")
    parser.add_argument("--requests", type=int, default=96, metavar="N", help="requests of a batch (default: 96)")
    args = parser.parse_args()
    n = args.requests
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or random_model(Path(scratch))
        engine = HfEngine(str(folder), dtype="float32" if args.model else "bfloat16", batch=n)
        asked = requests(engine, n)
        prompts = sum(len(one.prompt_ids) for one in asked)
        reading = [Request(one.prompt_ids, 1, one.temperature, one.seed) for one in asked]
        print(f"{engine._n_weights / 1e6:.1f} M weights, {n} prompts of {prompts} tokens, {NEW} new tokens each\n")
        print("| | plain | engine | plain / engine |")
        print("|---|---|---|---|")
        plain, own = in_turn(lambda: with_plain(engine, reading), lambda: engine.generate(reading))
        print(f"| prompt tokens a second | {prompts / plain:,.0f} | {prompts / own:,.0f} | {plain / own:.2f} |")
        whole = in_turn(lambda: with_plain(engine, asked), lambda: engine.generate(asked))
        steps = [(w - r) / (NEW - 1) * 1e3 for w, r in zip(whole, (plain, own), strict=True)]
        print(f"| ms a decoding step | {steps[0]:.1f} | {steps[1]:.1f} | {steps[0] / steps[1]:.2f} |")
    logits, heat = torch.randn(n, engine._base.config.vocab_size), torch.ones(n, 1)
    uniform = torch.rand(n, dtype=torch.float64)
    draws = in_turn(lambda: plain_sample(logits, heat, uniform), lambda: hf.sample(logits, heat, uniform))
    print(f"| ms a draw of {n} rows | {draws[0] * 1e3:.1f} | {draws[1] * 1e3:.1f} | {draws[0] / draws[1]:.2f} |")


def random_model(folder: Path) -> Path:
    """A Llama of SmolLM2-135M's shape with random weights, and the tokenizer of data/base."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained("data/base").save_pretrained(folder)
    return folder


def requests(engine: HfEngine, n: int) -> list[Request]:
    rng, known = random.Random(0), min(engine._base.config.vocab_size, 300)
    lengths = [rng.randint(60, 300) for _ in range(n)]
    return [Request(tuple(rng.choices(range(6, known), k=k)), NEW, 1.0, i) for i, k in enumerate(lengths)]


def plain_sample(logits_BV: Tensor, temperature_B1: Tensor, uniform_B: Tensor) -> Tensor:
    cumulative = (logits_BV.double() / temperature_B1.clamp(min=1e-6)).softmax(1).cumsum(1)
    drawn = torch.searchsorted(cumulative, uniform_B[:, None] * cumulative[:, -1:], right=True)[:, 0]
    return torch.where(temperature_B1[:, 0] > 0, drawn.clamp(max=logits_BV.shape[1] - 1), logits_BV.argmax(1))


def with_plain(engine: HfEngine, asked: list[Request]) -> None:
    before = hf.sample, hf.CUT, hf.LARGE
    hf.sample, hf.CUT, hf.LARGE = plain_sample, float("inf"), 10**18
    try:
        engine.generate(asked)
    finally:
        hf.sample, hf.CUT, hf.LARGE = before


def in_turn(*ways: Callable[[], Any]) -> list[float]:
    """Seconds of each way: the median of a few rounds, after one that is not counted."""
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(ROUNDS + 1):
        for way, found in zip(ways, seconds, strict=True):
            start = time.perf_counter()
            way()
            found.append(time.perf_counter() - start)
    return [statistics.median(found[1:]) for found in seconds]


if __name__ == "__main__":
    main()
