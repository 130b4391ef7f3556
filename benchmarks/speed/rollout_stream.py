"""What a rollout gains where its engine is a stream: tokens a second, as a share of those of the same engine asked tick
by tick.

    .venv-vllm/bin/python -m benchmarks.speed.rollout_stream                  # vLLM; `make test-vllm` makes that environment,
        and says what to set
    python -m benchmarks.speed.rollout_stream --engine hf                     # no stream: both ways are the same, and the
        ratio is 1 but for noise

The shipped base plays `--episodes` visits to the service desk, `--slots` of them side by side. In a tick all wait for
the longest reply, and for the slowest customer: each answer of a customer takes a time drawn from an exponential
distribution of mean `--wait` seconds, as an LLM behind a server takes one; 0 is the desk as it is. The episodes of both
ways must be the same. Ratio: median over pairs that run in turn, ± half the interquartile range.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.passes import in_turn, table_head, table_row
from benchmarks.speed.inference_cost import SHIPPED
from flows import presets
from flows.workspace import make_engine
from stages import envs
from stages.frame.types import Engine, Env, Message, More, Replies, Scenario, Step
from stages.llm.metered import Metered
from stages.llm.roles import load_roles
from stages.llm.streams import ticks
from stages.play.rollout import RolloutSettings, rollout

ENV = "service_desk"


class InTicks(Metered):
    """An engine that is asked tick by tick, stream or not."""

    def stream(self, more: More) -> Replies:
        return ticks(self._engine, more)


class Patient:
    """`Env` whose customer takes time to answer; how much depends on the scenario and the turn alone."""

    def __init__(self, env: Env, wait_s: float) -> None:
        self._env, self._wait_s = env, wait_s
        self.system, self.tools = env.system, env.tools

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        self._random = random.Random(scenario.id)
        return self._env.reset(scenario)

    def step(self, message: Message) -> Step:
        time.sleep(self._random.expovariate(1 / self._wait_s))
        return self._env.step(message)


def play(engine: Engine, episodes: int, slots: int, workers: int, wait_s: float) -> Sequence[tuple[int, ...]]:
    """The ids of each turn."""
    make = envs.make_env(ENV, {})
    settings = RolloutSettings(
        None,
        1.0,
        20,
        max_turns=8,
        malformed_allowance=1,
        slots=slots,
        attempts=1,
        seed=0,
        workers=workers if wait_s else 1,
    )
    scenarios = envs.scenarios(ENV, {}, "train", episodes, 0)
    played = rollout(
        engine, (lambda: Patient(make(), wait_s)) if wait_s else make, scenarios, load_roles(ENV), settings
    )
    return [turn.completion.token_ids for episode in played for turn in episode.turns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["hf", "vllm"], default="vllm")
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--customers", type=int, default=16, help="that answer at once, as task.oracle_concurrency")
    parser.add_argument("--wait", type=float, nargs="+", default=[0.0, 0.01, 0.1], metavar="SECONDS")
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    engine = make_engine(presets.load("tiny", [f"model.engine={args.engine}", f"model.path={SHIPPED}"]))
    table_head("engine", "a customer's answer, s", "turns", "tokens", "stream, tokens/s", "ticks, tokens/s", "ratio")
    for wait_s in args.wait:
        as_stream, in_ticks = (
            partial(play, each, args.episodes, args.slots, args.customers, wait_s) for each in (engine, InTicks(engine))
        )
        turns = as_stream()
        if turns != in_ticks():
            raise SystemExit("the two ways did not play the same episodes")
        found = in_turn(as_stream, in_ticks, args.pairs, time.perf_counter)
        tokens = sum(map(len, turns))
        speeds = (f"{tokens / seconds:.0f}" for seconds in (found.first_s, found.second_s))
        table_row(args.engine, wait_s, len(turns), tokens, *speeds, found)


if __name__ == "__main__":
    main()
