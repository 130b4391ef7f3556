"""A part of gpu_check: tokens a second of the engine `hf`, transformers on this device, with random weights."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.checks.gpu_equality import SHAPES, random_base
from benchmarks.passes import table_head, table_row
from benchmarks.speed.inference_cost import SHIPPED
from stages.frame.types import Request
from stages.llm.hf import HfEngine

DTYPE = torch.bfloat16


def engine(name: str, device: str, args: argparse.Namespace) -> None:
    """Prints the second table of gpu_check: requests side by side, prompts of unlike length, sampled at temperature 1.

    The folder has the shape's weights and the tokenizer of the small base model that ships.
    """
    shape = SHAPES[name]
    table_head("shape", "requests", "prompt tokens", "new tokens", "first, s", "s", "new tokens/s")
    if time.perf_counter() > args.until:
        table_row(name, args.requests, "skipped: the time is over", *[""] * 4)
        return
    with tempfile.TemporaryDirectory() as folder:
        random_base(shape, DTYPE, device).save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(SHIPPED / file, Path(folder))
        hf = HfEngine(folder, dtype=str(DTYPE).removeprefix("torch."), batch=args.requests)
        lengths = [args.length * (1 + i % 4) // 2 for i in range(args.requests)]
        asked = [
            Request(tuple((i + 7 * t) % shape.vocabulary for t in range(n)), args.new_tokens, 1.0, i)
            for i, n in enumerate(lengths)
        ]
        seconds, written = [], 0
        for _ in range(2):
            start = time.perf_counter()
            written = sum(len(done.token_ids) for done in hf.generate(asked))
            seconds.append(time.perf_counter() - start)
    rate = f"{written / seconds[1]:.0f}"
    table_row(name, len(asked), sum(lengths), written, *(f"{s:.1f}" for s in seconds), rate)
