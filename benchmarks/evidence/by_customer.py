"""Which customers a run on service_desk still loses, and by which steps: is it credit that it lacks, or has it stopped
to try?

    turnwise run desk+self_ac
    python -m benchmarks.evidence.by_customer RUN --last 5

Episodes of the last `--last` collect runs. A row is a customer's request and tier: the share of visits that were won,
and for each step the option that was taken most with its share; "!" marks one that the rule book does not want.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from typing import Any

from benchmarks.evidence.desk_run import desk_run
from benchmarks.passes import table_head, table_row
from stages.envs import service_desk as desk

Customer = tuple[str, str]


def visits(
    episodes: list[Any], turns: list[Any]
) -> tuple[dict[Customer, list[float]], dict[tuple[Customer, str], Counter[str]]]:
    """Rewards of each (request, tier), and the options that it was given by each tool."""
    rewards: dict[Customer, list[float]] = defaultdict(list)
    options: dict[tuple[Customer, str], Counter[str]] = defaultdict(Counter)
    customer = {}
    for episode in episodes:
        customer[episode["episode_id"]] = who = (str(episode["scenario"]["request"]), str(episode["scenario"]["tier"]))
        rewards[who].append(float(episode["total_reward"]))
    for turn in turns:
        if len(words := turn["action"].split()) == 2:  # an unreadable reply has none
            options[customer[turn["episode_id"]], words[0]][words[1]] += 1
    return rewards, options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--last", type=int, default=5)
    args = parser.parse_args()
    options, iterations, replay = desk_run(args.run, desk.Options)
    collected = [runs["collect"] for runs in iterations if "collect" in runs][-args.last :]
    rewards, taken = visits(replay.rows("episodes", collected), replay.rows("turns", collected))
    book, steps = desk.rule_book(options), desk.steps_of(options)
    table_head("customer", "visits", "won", *(tool for tool, _, _ in steps))
    for who in sorted(rewards, key=lambda who: -sum(rewards[who]) / len(rewards[who])):
        cells = []
        for tool, kind, _ in steps:
            option, count = taken[who, tool].most_common(1)[0]
            wrong = "" if book[tool, desk.key_of(kind, *who)].option == option else "!"
            cells.append(f"{wrong}{option} {count / taken[who, tool].total():.2f}")
        table_row(" ".join(reversed(who)), len(rewards[who]), f"{sum(rewards[who]) / len(rewards[who]):.2f}", *cells)


if __name__ == "__main__":
    main()
