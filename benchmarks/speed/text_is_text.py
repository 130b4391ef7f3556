"""What it costs to look for control tokens in a chat's texts, as a share of what reading the chat costs without.

    python -m benchmarks.speed.text_is_text                       # visits to the service desk, data/base
    python -m benchmarks.speed.text_is_text --model FOLDER        # another tokenizer and template
    python -m benchmarks.speed.text_is_text --hostile             # and every observation holds a control token

Episodes grow turn by turn, as a rollout asks; the look and the reading take turns, each with what it kept itself.
Printed: median processor time of all prompts of a rollout, and the median share over pairs with half its interquartile
range. With --hostile there is much to do: the share is that of the whole way.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence

from stages.frame.types import Message
from stages.llm.tokens import ChatTokenizer

WORDS = [
    "the",
    "customer",
    "Ana",
    "of",
    "the",
    "gold",
    "tier",
    "wants",
    "a",
    "refund",
    "for",
    "the",
    "lamp",
    "that",
    "broke",
    "in",
    "May",
    "check",
    "order",
    "photo",
    "ledger",
]
Chats = list[list[Message]]


def episodes(n: int, turns: int, words: int, more: str) -> list[Chats]:
    """The prompts of each tick: n chats, a turn longer each time."""
    rng = random.Random(0)
    said = lambda k: " ".join(rng.choices(WORDS, k=k))  # noqa: E731
    chats: Chats = [
        [{"role": "system", "content": said(4 * words)}, {"role": "user", "content": said(words)}] for _ in range(n)
    ]
    ticks = [[list(chat) for chat in chats]]
    for _ in range(turns - 1):
        for chat in chats:
            chat += [{"role": "assistant", "content": f"Thought: {said(words)}\nAction: check photo"}]
            chat += [{"role": "user", "content": f"{said(words)}{more}"}]
        ticks.append([list(chat) for chat in chats])
    return ticks


def read(encode: Callable[[Sequence[Sequence[Message]]], object], ticks: list[Chats]) -> float:
    started = time.process_time()
    for chats in ticks:
        encode(chats)
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="data/base", help="folder of a tokenizer with its template")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--words", type=int, default=40, help="of a message; four times as many of the system message")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--more", default="", metavar="TEXT", help="behind each observation, as ' a < b, c > d.'")
    parser.add_argument("--hostile", action="store_true", help="the tokenizer's end token behind each observation")
    args = parser.parse_args()
    chats = ChatTokenizer(args.model)
    more = chats.tokenizer.eos_token if args.hostile else args.more
    ticks = episodes(args.episodes, args.turns, args.words, more)
    look = chats.encode_all if args.hostile else lambda tick: [chats._is_harmless(chat) for chat in tick]
    looking, plain = [], []
    for i in range(args.pairs + 2):
        for times, work in ((looking, look), (plain, chats._plain))[:: 1 if i % 2 else -1]:
            chats.forget()
            gc.collect()
            times.append(read(work, ticks))
    shares = [a / b for a, b in zip(looking[2:], plain[2:], strict=True)]
    low, middle, high = statistics.quantiles(shares, n=4)
    what = f"{len(ticks) * args.episodes} prompts: {1e3 * statistics.median(plain):.1f} ms"
    print(f"{what}; {'as text' if args.hostile else 'the look'} {1e3 * statistics.median(looking):.1f} ms")
    print(f"share {middle:.3f} ± {(high - low) / 2:.3f} ({args.pairs} pairs)")


if __name__ == "__main__":
    main()
