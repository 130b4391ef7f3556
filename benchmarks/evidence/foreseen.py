"""What a critic foresees of an action on the wide desk, against the rule book: where NLAC's successor goes wrong.

    turnwise run wide --set task.options.slots=5
    python -m benchmarks.evidence.foreseen RUN

For a run that is told slot and value. Of fresh actions with a wrong slot, the shares of futures by what they say first
of the step: its first wrong slot with the right value; a slot with the value that the action has already; something
else; or nothing. Of right actions, the share of futures that blame nothing. Then what the rewrite did: the share of
judged actions that have more slots right after it, and fewer (an unreadable one has none). A line is an iteration.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.evidence.desk_run import desk_run
from benchmarks.passes import table_head, table_row
from stages.envs import wide_rules as rules
from stages.envs.wide_words import SLOTS, STEPS, Phrase, phrase_of, wrong_slots
from stages.frame.react import parse_react
from stages.frame.types import Malformed

BLAME = re.compile(rf"\b({'|'.join(STEPS)}) ({'|'.join(SLOTS)}) (?:needs|may need) ([a-z]+)\.")
EXACT, HAS_IT, OTHER, SILENT = "first wrong slot, right value", "a value that it has", "something else", "nothing"


def kind(future: str, tool: str, chosen: Phrase, right: Phrase) -> str:
    """What a future says of the step of this tool. Its first sentence on it counts, as for the evaluator."""
    told = next(((SLOTS.index(slot), value) for name, slot, value in BLAME.findall(future) if name == tool), None)
    if told is None:
        return SILENT
    wrong = wrong_slots(chosen, right)
    if wrong and told == (wrong[0], right[wrong[0]]):
        return EXACT
    return HAS_IT if told in enumerate(chosen) else OTHER


def judged(
    rows: Sequence[Mapping[str, Any]], scenarios: Mapping[str, Any], options: rules.Options
) -> Iterator[tuple[Phrase, Phrase, int, list[str]]]:
    """(fresh phrase, right phrase, right slots that the rewrite added, what each future says) of the rows of `judgements`
    that were judged and kept.
    """
    for row in rows:
        if row["refined"] and row["futures"]:
            fresh, after = (parse_react(row[name])[1] for name in ("action", "refined"))
            tool, who = fresh.split()[0], scenarios[row["episode_id"]]
            right = rules.needed(options, who["request"], who["tier"])[rules.tools_of(options).index(tool)]
            before = phrase_of(fresh, tool, options.slots, options.values)
            gain = len(wrong_slots(before, right)) - wrong_in(after, tool, right, options)
            yield before, right, gain, [kind(future, tool, before, right) for future in row["futures"]]


def wrong_in(action: str, tool: str, right: Phrase, options: rules.Options) -> int:
    """Wrong slots of an action; all of one that the desk cannot read."""
    try:
        return len(wrong_slots(phrase_of(action, tool, options.slots, options.values), right))
    except Malformed:
        return options.slots


def shares(
    rows: Sequence[Mapping[str, Any]], scenarios: Mapping[str, Any], options: rules.Options
) -> tuple[dict[str, float], float, float, float]:
    """Of wrong actions the share of each kind of future, of right ones that of silence, and of all the shares of rewrites
    with more and with fewer slots right. NaN where there is none of a sort.
    """
    of, moved = {True: Counter[str](), False: Counter[str]()}, Counter[int]()
    for before, right, gain, kinds in judged(rows, scenarios, options):
        of[before == right].update(kinds)
        moved[(gain > 0) - (gain < 0)] += 1
    wrong = {name: share(of[False], name) for name in (EXACT, HAS_IT, OTHER, SILENT)}
    return wrong, share(of[True], SILENT), share(moved, 1), share(moved, -1)


def share(counts: Counter[Any], one: Any) -> float:
    return counts[one] / counts.total() if counts else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN")
    options, iterations, replay = desk_run(parser.parse_args().run, rules.Options)
    rows = [runs for runs in iterations if "refine" in runs]
    episodes = replay.rows("episodes", [runs["collect"] for runs in rows])
    scenarios = {one["episode_id"]: one["scenario"] for one in episodes}
    table_head("iteration", f"wrong: {EXACT}", HAS_IT, OTHER, SILENT, f"right: {SILENT}", "rewrites: better", "worse")
    for number, runs in enumerate(rows):
        wrong, *others = shares(replay.rows("judgements", [runs["refine"]]), scenarios, options)
        table_row(number, *(f"{one:.2f}" for one in (*wrong.values(), *others)))


if __name__ == "__main__":
    main()
