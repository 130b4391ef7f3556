"""Where visits of the desk are lost: at which steps the policy is wrong on validation, and how often each was taught.

    turnwise run demo --set task.options.steps=5 --set task.max_turns=12 --set roles.max_future_tokens=120
    python -m benchmarks.lost RUN

For a run on service_desk, by iteration: the share of validation visits that chose a wrong option at each step (of some
several), and that had a turn which was not understood; then how many labels of each step the policy had learned from in
that iteration's refine stage.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from benchmarks.desk_run import desk_run
from benchmarks.passes import table_head, table_row
from stages.envs import service_desk as desk
from stages.frame.react import parse_react
from stages.frame.types import Malformed, Row, Scenario
from stages.play.transitions import Transition, transitions

UNREAD = "not understood"


def faults(actions: Iterable[str], scenario: Scenario, options: desk.Options) -> set[str]:
    """The steps of one visit at which a wrong option was chosen, and UNREAD where a turn was not understood."""
    found, done = set[str](), list[str]()
    for action in actions:
        try:
            right = desk.truth(options.model_dump(), scenario, [*done, action]).optimal
        except Malformed:  # it was answered with a hint, and the step stayed
            found.add(UNREAD)
            continue
        done.append(action)
        if not right:
            found.add(action.split()[0])
    return found


def taught(judgements: Iterable[Row]) -> Counter[str]:
    """How many labels there are of each step."""
    found = Counter[str]()
    for row in judgements:
        if not row["info"]["dropped"]:
            with suppress(Malformed):
                found[parse_react(row["refined"])[1].split()[0]] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    options, iterations, replay = desk_run(parser.parse_args().run)
    steps = [tool for tool, _, _ in desk.steps_of(options)]
    table_head("iteration", *(f"{tool} wrong" for tool in steps), UNREAD, *(f"{tool} taught" for tool in steps))
    for i, runs in enumerate(iterations, -1):
        visits: dict[str, list[Transition]] = {}
        for t in sorted(transitions(replay, [runs["evaluate"]]), key=lambda t: t.key):
            visits.setdefault(t.episode_id, []).append(t)
        wrong = Counter(
            fault
            for turns in visits.values()
            for fault in faults((t.action for t in turns), turns[0].scenario, options)
        )
        labels = taught(replay.rows("judgements", [runs["refine"]])) if "refine" in runs else Counter[str]()
        shares = (f"{wrong[name] / max(1, len(visits)):.2f}" for name in (*steps, UNREAD))
        table_row("base" if i < 0 else i, *shares, *(labels[tool] for tool in steps))


if __name__ == "__main__":
    main()
