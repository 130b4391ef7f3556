"""What a tally makes of the visits of a run on service_desk: a control that is told the same words, counts them, and has neither a critic nor a model.

    turnwise run ladder --set task.options.audit=fault --set task.options.audit_noise=0.4
    python -m benchmarks.evidence.vote RUN RUN ..

The words of a visit are read as the parser of `rft.labels = "told"` reads them (`lessons`), and each is a vote: for the
option that it names or lets stand, or against the one that it blames. For each customer and step the option with the
largest share of votes for it is taken. Two tallies: one knows the customer alone (request and tier); the other also
knows what each step's rule hangs on, which nobody tells a method. A table of the iterations: the share of visits that
such a policy wins, which is exact, and what the policy of the run itself won as it collected. Several runs are averaged.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import product
from typing import Any

from benchmarks.evidence.desk_run import desk_run
from benchmarks.passes import table_head, table_row
from stages.envs import service_desk as desk

Visit = tuple[str, str, bool, Sequence[tuple[str, str]]]
"""Request, tier, won, and (action, observation) of each turn."""
Votes = Mapping[tuple[str, str], Mapping[str, Sequence[int]]]
"""(tool, key) -> option -> votes against it and for it."""


def tally(options: desk.Options, visits: Iterable[Visit], *, knows_keys: bool) -> Votes:
    """The votes of all words. knows_keys: a step's rule is counted by what it hangs on, not by the whole customer."""
    kinds = {tool: kind for tool, kind, _ in desk.steps_of(options)}
    votes: dict[tuple[str, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for request, tier, won, turns in visits:
        lessons = desk.lessons(turns, won=won)
        if all(lesson is None for lesson in lessons):  # nothing was said
            continue
        for (action, _), lesson in zip(turns, lessons, strict=True):
            tool, _, option = (action if lesson is None else lesson).partition(" ")
            if tool in kinds:  # an unreadable reply is of no step
                key = desk.key_of(kinds[tool] if knows_keys else "pair", request, tier)
                votes[tool, key][option][lesson is not None] += 1
    return votes


def win_rate(options: desk.Options, votes: Votes, *, knows_keys: bool) -> float:
    """Of a policy that takes the best option of the tally, over all customers; of equal ones each is as likely. An option
    without a vote counts as one with as many for as against it.
    """
    book = desk.rule_book(options)
    customers = list(product(desk.REQUESTS[: options.requests], desk.TIERS[: options.tiers]))
    won = 0.0
    for request, tier in customers:
        chance = 1.0
        for tool, kind, choices in desk.steps_of(options):
            cast = votes.get((tool, desk.key_of(kind if knows_keys else "pair", request, tier)), {})
            shares = {option: share(*cast.get(option, (0, 0))) for option in choices}
            best = [option for option in choices if shares[option] == max(shares.values())]
            chance *= (book[tool, desk.key_of(kind, request, tier)].option in best) / len(best)
        won += chance
    return won / len(customers)


def share(against: int, in_favour: int) -> Fraction:
    """Of the votes in favour, with one more of either kind: a single vote does not decide."""
    return Fraction(in_favour + 1, against + in_favour + 2)


def visits_of(replay: Any, collected: Sequence[str]) -> list[Visit]:
    turns = defaultdict[str, list[tuple[str, str]]](list)
    for row in replay.read("turns", collected, ("episode_id", "action", "observation")):
        turns[row["episode_id"]].append((row["action"], row["observation"]))
    return [
        (
            str(one["scenario"]["request"]),
            str(one["scenario"]["tier"]),
            one["total_reward"] == 1,
            turns[one["episode_id"]],
        )
        for one in replay.rows("episodes", collected)
        if turns[one["episode_id"]]
    ]


def curve(run: str) -> list[tuple[int, float, float, float]]:
    """Of each iteration: visits so far, win rates of the two tallies of these, and of the visits of the iteration."""
    options, iterations, replay = desk_run(run, desk.Options)
    found, seen = [], list[Visit]()
    for runs in iterations:
        if "collect" in runs:
            new = visits_of(replay, [runs["collect"]])
            seen += new
            rates = [
                win_rate(options, tally(options, seen, knows_keys=knows), knows_keys=knows) for knows in (False, True)
            ]
            found.append((len(seen), *rates, sum(won for _, _, won, _ in new) / len(new)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    curves = [curve(run) for run in parser.parse_args().runs]
    table_head(
        "visits", "a tally by customer", "a tally that knows what rules hang on", "the run's policy, as it collected"
    )
    for points in zip(*curves, strict=True):
        means = [sum(point[i] for point in points) / len(points) for i in range(4)]
        table_row(f"{means[0]:.0f}", *(f"{mean:.2f}" for mean in means[1:]))


if __name__ == "__main__":
    main()
