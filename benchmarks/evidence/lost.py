"""Where visits of the desk are lost: at which steps the policy is wrong on validation, and how often each was taught.

    turnwise run demo --set task.options.steps=5 --set task.max_turns=12 --set roles.max_future_tokens=120
    python -m benchmarks.evidence.lost RUN

For a run on service_desk, by iteration: the share of validation visits that chose a wrong option at each step (of some
several), and that had a turn which was not understood; then how many labels of each step the policy had learned from in
that iteration's refine stage.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from benchmarks.evidence.desk_run import desk_run
from benchmarks.passes import table_head, table_row
from stages.envs import service_desk as desk
from stages.frame.react import parse_react
from stages.frame.types import Malformed, Row
from stages.play.transitions import Transition, transitions

UNREAD = "not understood"


def fault(t: Transition, options: desk.Options) -> str:
    """The step at which a wrong option was chosen, UNREAD where the turn was not understood, "" where it was right."""
    if t.malformed:
        return UNREAD
    known = options.model_dump(), t.scenario, [*t.past_actions, t.action]
    return "" if desk.truth(*known).optimal else t.action.split()[0]


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
    options, iterations, replay = desk_run(parser.parse_args().run, desk.Options)
    steps = [tool for tool, _, _ in desk.steps_of(options)]
    table_head("iteration", *(f"{tool} wrong" for tool in steps), UNREAD, *(f"{tool} taught" for tool in steps))
    for i, runs in enumerate(iterations, -1):
        turns = transitions(replay, [runs["evaluate"]])
        visits = {t.episode_id for t in turns}
        wrong = Counter(name for _, name in {(t.episode_id, fault(t, options)) for t in turns})
        labels = taught(replay.rows("judgements", [runs["refine"]])) if "refine" in runs else Counter[str]()
        shares = (f"{wrong[name] / max(1, len(visits)):.2f}" for name in (*steps, UNREAD))
        table_row("base" if i < 0 else i, *shares, *(labels[tool] for tool in steps))


if __name__ == "__main__":
    main()
