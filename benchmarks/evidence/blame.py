"""How what an audit says comes back to the steps before it: targets that complain of an earlier action which was right.

    turnwise run desk+nlac_one_step --set seed=0 --set task.options.steps=4
    python -m benchmarks.evidence.blame RUN --tool check

For a run on service_desk: by iteration, and by the step that a target is of, the share of targets that name a broken
rule of `--tool`, where that action was right (should be 0), and where it was wrong (should be 1).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Any

from benchmarks.evidence.desk_run import desk_run
from benchmarks.passes import table_head, table_row
from stages.envs import service_desk as desk
from stages.play.transitions import Transition, transitions


def complains(text: str, key: str, tool: str) -> bool:
    """The future names the rule, as a fact or as a possibility."""
    return any(f"{key} {word} {tool} " in text for word in ("needs", "may need"))


def cells(
    targets: list[Any], by_key: dict[Any, Transition], options: desk.Options, tool: str
) -> dict[str, dict[bool, list[bool]]]:
    """Tool of the target's own step -> was the action of `tool` right? -> does the target complain of it?"""
    book, kind = desk.rule_book(options), {name: kind for name, kind, _ in desk.steps_of(options)}[tool]
    found: dict[str, dict[bool, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for row in targets:
        t = by_key.get((row["episode_id"], row["turn"]))
        done = [*t.past_actions, t.action] if t else []
        taken = next((action for action in done if action.startswith(f"{tool} ")), None)
        if t is None or taken is None or not t.action:  # an unreadable reply is of no step
            continue
        key = desk.key_of(kind, str(t.scenario.data["request"]), str(t.scenario.data["tier"]))
        right = taken == f"{tool} {book[tool, key].option}"
        found[t.action.split()[0]][right].append(complains(row["completion"], key, tool))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--tool", default="check")
    args = parser.parse_args()
    options, iterations, replay = desk_run(args.run, desk.Options)
    rows = [runs for runs in iterations if "targets" in runs]
    by_key = {t.key: t for t in transitions(replay, [runs["collect"] for runs in rows])}
    tools = [tool for tool, _, _ in desk.steps_of(options)]
    table_head("iteration", *(f"{tool}: right, wrong" for tool in tools))
    for number, runs in enumerate(rows):
        by_step = cells(replay.rows("targets", [runs["targets"]]), by_key, options, args.tool)
        shares = [
            [sum(x) / len(x) if (x := by_step[tool][right]) else float("nan") for right in (True, False)]
            for tool in tools
        ]
        table_row(number, *(f"{right:.2f}, {wrong:.2f}" for right, wrong in shares))


if __name__ == "__main__":
    main()
