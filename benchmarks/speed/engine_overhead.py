"""What collecting costs beside the engine below it: tokens a second of a rollout, as a share of those of the bare
engine.

    python -m benchmarks.speed.engine_overhead                                    # transformers, and the shipped base of 0.66
        M parameters
    python -m benchmarks.speed.engine_overhead --width 512 --layers 8             # and a random Llama of 27 M
    .venv-vllm/bin/python -m benchmarks.speed.engine_overhead --engine vllm       # vLLM; `make test-vllm` makes that
        environment, and says what to set

The model plays `--episodes` visits to the service desk side by side. What the rollout asked of the engine is noted;
then the whole (encoding, sampling, environment, rows for the replay) and the bare engine with the same requests, each
as soon as the one before it is answered, run in turn, and must produce the same tokens. Ratios: tokens a second of the
whole / those of the bare engine, median over pairs, ± half the interquartile range: by the clock, which wants a machine
with nothing else to do, and by processor time of all threads, which sees no gain in that the tokenizer uses several
cores. The model has one thread. Writing rows and metrics to the stores is left out: it costs the same whatever was
generated.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from benchmarks.passes import in_turn, table_head, table_row
from benchmarks.speed.inference_cost import SHIPPED, write_random_base
from flows import presets
from flows.workspace import make_engine
from stages import envs
from stages.frame.types import Engine, More, Replies, Request, Wait
from stages.llm.metered import Metered
from stages.llm.roles import load_roles
from stages.llm.streams import stream
from stages.llm.tokens import ChatTokenizer
from stages.play.rollout import RolloutSettings, rollout
from stages.play.transitions import episode_rows

ENV = "service_desk"


class Noting(Metered):
    """`Engine` that notes what another one is asked of each episode, and counts what it says."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.talks: dict[int, list[Request]] = defaultdict(list)

    def stream(self, more: More) -> Replies:
        def noted(wait: Wait) -> Sequence[tuple[int, Request]] | None:
            asked = more(wait)
            for number, request in asked or ():
                self.talks[number].append(request)
            return asked

        return super().stream(noted)


def collect(engine: Engine, episodes: int, max_tokens: int) -> int:
    """Episodes as the stage `collect` plays them, made into rows, from a tokenizer that has read none of them. Returns
    the number of tokens in them.
    """
    if isinstance(engine, ChatTokenizer):
        engine.forget()
    scenarios = envs.scenarios(ENV, {}, "train", episodes, 0)
    settings = RolloutSettings(None, 1.0, max_tokens, max_turns=8, malformed_allowance=1, slots=256, attempts=1, seed=0)
    played = rollout(engine, envs.make_env(ENV, {}), scenarios, load_roles(ENV), settings)
    return sum(len(row["action_ids"]) for row in episode_rows(played, 0)["turns"])


def bare(engine: Engine, talks: Iterable[Sequence[Request]]) -> int:
    """The same requests, each as soon as the one before it is answered. Returns the number of tokens."""
    left = [deque(talk) for talk in talks]
    answered, tokens = list(range(len(left))), 0

    def more(wait: Wait) -> Sequence[tuple[int, Request]] | None:
        asked = [(i, left[i].popleft()) for i in answered if left[i]]
        answered.clear()
        return asked if asked or wait == "none" else None

    for ended in stream(engine, more):
        tokens += sum(len(done.token_ids) for _, done in ended)
        answered.extend(i for i, _ in ended)
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["hf", "vllm"], default="hf")
    parser.add_argument("--width", type=int, default=0, help="of a random Llama in place of the shipped base")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if args.width:
            write_random_base(Path(folder), args.width, args.layers, positions=256)
        engine = make_engine(
            presets.load("tiny", [f"model.engine={args.engine}", f"model.path={folder if args.width else SHIPPED}"])
        )
    noting = Noting(engine)
    tokens = collect(noting, args.episodes, args.max_tokens)
    again = bare(engine, noting.talks.values())
    if not tokens == noting.tokens == again:
        raise SystemExit(
            f"the two did not do the same work: {tokens} tokens in rows, {noting.tokens} generated, {again} of the bare engine"
        )
    by_clock, processor = (
        in_turn(
            lambda: collect(engine, args.episodes, args.max_tokens),
            lambda: bare(engine, noting.talks.values()),
            args.pairs,
            clock,
        )
        for clock in (time.perf_counter, time.process_time)
    )
    model = f"random, width {args.width}, {args.layers} layers" if args.width else "shipped base"
    table_head(
        "engine", "model", "turns", "tokens", "collect, tokens/s", "bare, tokens/s", "ratio", "of processor time"
    )
    speeds = (f"{tokens / seconds:.0f}" for seconds in (by_clock.first_s, by_clock.second_s))
    table_row(args.engine, model, sum(map(len, noting.talks.values())), tokens, *speeds, by_clock, processor)


if __name__ == "__main__":
    main()
