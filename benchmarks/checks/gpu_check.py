"""What a GPU makes of the training steps: are packed rows right there, how long does a step take, how much memory, what
share of the peak?

    make gpu-check                            # on a machine with CUDA: shapes of Qwen2.5-0.5B and 7B, random weights
    python -m benchmarks.checks.gpu_check --smoke    # the same code at a tiny shape on the CPU; its times mean nothing

First table: how far separate passes and a packed row by each kernel are from the truth, separate passes of the same
weights in fp64. Separate passes are off by rounding alone; a packed row may be FACTOR times as far off, and no further.

Second: the engine `hf`. Third: whole steps of Self-AC, of an NLAC tree, and of GRPO on Self-AC's episodes, by kernels
and attention. first: the first step, which compiles. share of peak: work by flows/cost/estimate.py / seconds / the
device's peak on its data sheet. GiB: the largest that was allocated, beside what `turnwise plan` would have said.

What does not fit the device, or the `--minutes`, is told as skipped. The output is Markdown.
Exit status 1 where there is no CUDA device, or a number of the first table is above what is allowed.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

import torch

from benchmarks.checks.gpu_engine import engine
from benchmarks.checks.gpu_equality import SHAPES, TINY, wrongs
from benchmarks.checks.gpu_steps import HEAD, steps
from benchmarks.passes import table_head
from flows.cost.shapes import DEVICES, Device
from stages.learn.kernels import no_liger

SMOKE = {
    "shapes": ["tiny"], "turns": 2, "length": 6, "row_tokens": 120, "repeats": 1, "requests": 4, "new_tokens": 3,
    "nlac": {"turns": 4, "system": 60, "turn": 6, "words": 3, "reply": 4},
}  # fmt: skip
NLAC = {"turns": 13, "system": 4800, "turn": 300, "words": 120, "reply": 128}  # tau-bench's shape


def peak_of(device_name: str) -> Device | None:
    """The data sheet of the device that is there; None of one that is not in the table."""
    known = device_name.lower().replace(" ", "").replace("-", "")
    return next((device for name, device in sorted(DEVICES.items(), reverse=True) if name.split("-")[0] in known), None)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny shape on the CPU")
    parser.add_argument("--shapes", nargs="+", default=["0.5b", "7b"], choices=list(SHAPES))
    parser.add_argument("--turns", type=int, default=8, help="of an episode of Self-AC and GRPO")
    parser.set_defaults(nlac=NLAC)
    parser.add_argument("--length", type=int, default=200, help="tokens of an action, and of an observation")
    parser.add_argument("--row-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of a row, at most")
    parser.add_argument("--requests", type=int, default=96, help="requests of the engine, side by side")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=4.0, help="no row of a table begins later")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    args.until = time.perf_counter() + 60 * args.minutes
    if args.smoke:
        device = "cpu"
        vars(args).update(SMOKE)
    elif torch.cuda.is_available():
        device = "cuda"
    else:
        print(
            f"gpu-check wants a CUDA device, torch {torch.__version__} sees none; --smoke runs the same code on the CPU.",
            file=sys.stderr,
        )
        return 1
    found = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    peak = peak_of(found)
    print(
        f"{found}, torch {torch.__version__}, peak {f'{peak.bf16:g} TFLOP/s in bf16' if peak else 'not known'}. ",
        end="",
    )
    print(f"{no_liger(device) or 'Liger is installed.'}\n")
    wrong = wrongs(TINY if args.smoke else replace(SHAPES["0.5b"], layers=4), device)
    print()
    engine(args.shapes[0], device, args)
    print()
    table_head(*HEAD)
    for name in args.shapes:
        steps(name, device, peak, args)
        if device == "cuda":
            torch.cuda.empty_cache()
    sys.stderr.writelines(f"{one}\n" for one in wrong)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
