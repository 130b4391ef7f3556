"""What Self-AC adds to the model, and what it costs to run it: parameters, logits after merging, tokens a second.

    python -m benchmarks.speed.inference_cost                        # the shipped base, and a random Llama of width 256
    python -m benchmarks.speed.inference_cost --width 768 --layers 12 --new-tokens 32

The adapter is random, and large enough to change what the model says. merged: base + adapter as `turnwise export`
writes it, loaded from its folder; the value head stays behind. beside: the base with the adapter as a module of its
own, as collecting and training run it. base again: the same model twice, which tells the noise. Greedy decoding by
`HfEngine`, the base and the other in turn, every row to its full length, one thread.
ratio: tokens a second / those of the base, median over pairs, ± half the interquartile range. off: largest |difference|
of any logit between base + adapter and the merged model, in shares of the largest |logit|; moved: the same between base
and base + adapter, in fp32.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.passes import RANK, in_turn, one_thread, random_base, shake, table_head, table_row
from stages.frame.types import Request
from stages.learn.adapter import new_adapter, save_adapter
from stages.learn.value_head import new_head
from stages.llm.hf import HfEngine, load_base, merge_adapter

SHIPPED = Path("data/base")
PROMPT_TOKENS = 32


def write_random_base(folder: Path, width: int, layers: int, positions: int) -> None:
    """A random Llama with the shipped base's tokenizer."""
    tokenizer = [SHIPPED / name for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")]
    random_base(
        width, layers, positions, vocabulary=load_base(str(SHIPPED), "float32")[0].config.vocab_size
    ).save_pretrained(folder)
    for file in tokenizer:
        shutil.copy(file, folder)


def parameters_and_logits(name: str, base: Path, folder: Path) -> None:
    """Leaves `adapter` and `merged` in the folder, and prints a row: what is added, and whether merging it loses
    anything.
    """
    engine = HfEngine(str(base))
    model = load_base(str(base), "float32")[0]
    n_base = count(model.parameters())
    model = shake(new_adapter(model, rank=RANK, alpha=2 * RANK, seed=0)).eval()
    n_lora, n_head = (
        count(p for p in model.parameters() if p.requires_grad),
        count(new_head(model, seed=0).parameters()),
    )
    save_adapter(model, folder / "adapter", engine.model_hash)
    merge_adapter(str(base), folder / "adapter", folder / "merged")
    merged = load_base(str(folder / "merged"), "float32")[0]
    ids = torch.randint(model.config.vocab_size, (16, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        adapted, alone = model(ids).logits, merged(ids).logits
        with model.disable_adapter():
            before = model(ids).logits
        # In 64 bits only a difference that is no rounding would be left.
        exact = model.double()(ids).logits
        rounding = share(exact - model.merge_and_unload()(ids).logits, exact)
    added_row(
        name,
        n_base,
        n_lora,
        n_head,
        count(merged.parameters()) - n_base,
        share(adapted - alone, adapted),
        rounding,
        share(adapted - before, adapted),
    )


def count(parameters: Any) -> int:
    return sum(p.numel() for p in parameters)


def share(x: Tensor, of: Tensor) -> float:
    return float(x.abs().max() / of.abs().max())


def added_row(name: str, n_base: int, n_lora: int, n_head: int, *rest: float | str) -> None:
    cells = (f"{one:.1g}" if isinstance(one, float) else one for one in rest)
    table_row(name, f"{n_base:,}", f"{n_lora:,}", f"{n_head:,}", f"{(n_lora + n_head) / n_base:.1%}", *cells)


def parameters_of_shape(name: str) -> None:
    """A row for a model that is not here: its config's shape is enough to count."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    }
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(vocab_size=152064, tie_word_embeddings=False, **shape))
        n_base = count(model.parameters())
        model = new_adapter(model, rank=RANK, alpha=2 * RANK, seed=0)
    n_lora = count(p for p in model.parameters() if p.requires_grad)
    added_row(name, n_base, n_lora, shape["hidden_size"] + 1, *["-"] * 4)


def speeds(name: str, base: Path, folder: Path, args: argparse.Namespace) -> None:
    """A row for each model that is compared with the base."""
    beside = HfEngine(str(base))
    beside.load_adapter("a", folder / "adapter")
    plain = generation(HfEngine(str(base)), None, args)
    others = {
        "base again": generation(HfEngine(str(base)), None, args),
        "merged": generation(HfEngine(str(folder / "merged")), None, args),
        "beside": generation(beside, "a", args),
    }
    n_tokens = args.batch * args.new_tokens
    for other, step in others.items():
        # Both make the same number of tokens, so tokens a second go as the seconds the other way round.
        found = in_turn(step, plain, args.pairs)
        table_row(name, other, f"{n_tokens / found.second_s:.0f}", f"{n_tokens / found.first_s:.0f}", found)


def generation(engine: HfEngine, adapter: str | None, args: argparse.Namespace) -> Callable[[], object]:
    # No token ends a row: models that say different things would else do different work.
    engine._stops = [-1]
    prompts = [tuple((7 * i + t * t) % 100 for t in range(PROMPT_TOKENS)) for i in range(args.batch)]
    requests = [Request(prompt, args.new_tokens, 0.0, 0, adapter) for prompt in prompts]

    def step() -> None:
        made = sum(len(one.token_ids) for one in engine.generate(requests))
        assert made == args.batch * args.new_tokens, made

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256, help="of the random Llama")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16, help="rows decoded side by side")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=11)
    args = parser.parse_args()
    one_thread()
    with tempfile.TemporaryDirectory() as scratch:
        random_folder = Path(scratch, "random")
        write_random_base(random_folder, args.width, args.layers, PROMPT_TOKENS + args.new_tokens)
        bases = {str(SHIPPED): SHIPPED, f"random, width {args.width}": random_folder}
        table_head("model", "base", "LoRA", "head", "share", "left after merging", "off", "off in fp64", "moved")
        for name, base in bases.items():
            parameters_and_logits(name, base, Path(scratch, name.replace("/", "_")))
        parameters_of_shape("shape of Qwen2.5-7B")
        print()
        table_head("model", "other", "base tokens/s", "other tokens/s", "ratio")
        for name, base in bases.items():
            speeds(name, base, Path(scratch, name.replace("/", "_")), args)


if __name__ == "__main__":
    main()
