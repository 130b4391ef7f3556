"""Does V order a search? Game of 24 solved by tree search with one trained policy, its frontier in one order or
another.

    turnwise run game24
    python -m benchmarks.evidence.tree_search RUN --puzzles 100 --budget 12

RUN: a run of self_ac on game24, or a pipeline run with one (then its final adapter, else its last). Puzzles are of the
test split. Every order may add as many nodes, and a node is told the same proposals whoever asks, so that only the
order differs. "truth" is exact search as score: what a perfect critic would solve with these proposals. "V against ..."
counts the puzzles that one order solves and the other does not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.evidence.search import (
    Found,
    Score,
    at_random,
    breadth_first,
    by_truth,
    by_value,
    depth_first,
    policy_proposals,
    root_of,
    search,
)
from flows import presets
from flows.book import EXPERIMENT
from flows.rerun import stage_run_of, stored_summary
from flows.workspace import find_home, open_workspace
from stages import envs
from stages.frame.types import Engine, UsageError
from stages.judge.values import Critic, load_critic
from stages.learn.statistics import wilson
from stages.llm.roles import Roles, roles_of
from stages.store.workspace import Workspace


@dataclass(frozen=True)
class Player:
    """A trained policy with its critic, and the config that it was trained with."""

    config: Any
    engine: Engine
    adapter: str
    roles: Roles
    critic: Critic


def opened(workspace: Workspace, run: str) -> Player:
    """The player of a run of self_ac; of a pipeline run that of its final adapter, else of its last iteration."""
    run_id, tracking = workspace.tracking.find(run), workspace.tracking
    final = stored_summary(workspace, run_id)["final"] if tracking.experiment(run_id) == EXPERIMENT else {}
    found = str(final["adapter"]) if final else stage_run_of("self_ac", run_id, workspace)
    if found is None or tracking.experiment(found) != "self_ac":
        raise UsageError(
            f"wanted a run of self_ac, or a pipeline run with one, found {run!r}. See: turnwise runs --stage self_ac"
        )
    stored = json.loads(tracking.artifact(found, "config.json").read_text(encoding="utf-8"))
    config: Any = presets.resolve({**stored["config"], "seed": stored["seed"], "preset": "tree_search"})
    if config.task.env != "game24":
        raise UsageError(f"wanted a run on game24, found one on {config.task.env}")
    engine, roles = workspace.engine(config), roles_of(config.roles)
    engine.load_adapter(found, tracking.artifact(found, "adapter"))
    if (critic := load_critic(engine, roles, config.model, lambda path: tracking.artifact(found, path))) is None:
        raise UsageError(f"run {found[:8]} trained no critic, its self_ac.alpha is 0")
    return Player(config, engine, found, roles, critic)


def table_row(name: str, runs: Sequence[Found]) -> str:
    wins, n = sum(found.won for found in runs), len(runs)
    low, high = wilson(wins, n)
    proposals = sum(found.proposals for found in runs)
    nodes, refused = sum(found.n_nodes for found in runs) / n, sum(found.refused for found in runs) / max(proposals, 1)
    return f"| {name} | {wins}/{n} | {wins / n:.2f} ({low:.2f}-{high:.2f}) | {nodes:.1f} | {proposals / n:.1f} | {refused:.2f} |"


def compare(player: Player, args: argparse.Namespace) -> dict[str, list[Found]]:
    """Searches of every puzzle in every order."""
    options, engine, roles = player.config.task.options, player.engine, player.roles
    found: dict[str, list[Found]] = {}
    for i, scenario in enumerate(envs.scenarios("game24", options, "test", args.puzzles, args.seed)):
        propose = policy_proposals(
            engine, roles, options, scenario,
            adapter=player.adapter, width=args.width, temperature=args.temperature, max_tokens=player.config.roles.action_room, seed=args.seed,
        )  # fmt: skip
        value = by_value(player.critic, engine, roles, options, scenario)
        orders: dict[str, Score] = {
            "V": value, "breadth first": breadth_first, "depth first": depth_first, "chance": at_random(scenario, args.seed), "truth": by_truth,
        }  # fmt: skip
        for name, score in orders.items():
            found.setdefault(name, []).append(search(root_of(scenario, args.budget), propose, score))
        print(f"\r{i + 1}/{args.puzzles} puzzles", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--puzzles", type=int, default=100)
    parser.add_argument("--budget", type=int, default=12, help="nodes that a search may add")
    parser.add_argument("--width", type=int, default=4, help="proposals a node")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the proposals")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found = compare(opened(open_workspace(find_home()), args.run), args)
    print("| order | solved | share, 95 % | nodes | proposals | refused |\n|---|---|---|---|---|---|")
    for name, runs in found.items():
        print(table_row(name, runs))
    for name in ("breadth first", "depth first", "chance"):
        pairs = [(mine.won, other.won) for mine, other in zip(found["V"], found[name], strict=True)]
        print(
            f"V against {name}: V alone solves {pairs.count((True, False))}, {name} alone {pairs.count((False, True))}"
        )


if __name__ == "__main__":
    main()
