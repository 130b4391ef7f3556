"""What a finished run's value function is good for: what it tells of the return, best of n, early abort. A threshold is
chosen on validation.

    turnwise run desk+self_ac
    python -m benchmarks.evidence.value_use RUN --episodes 200 --best-of 4

RUN: a pipeline run of self_ac that is finished. Its final adapter is evaluated twice more, on the validation and on the
test split, as runs of the stage evaluate, reused where they are there. Early abort: the threshold that saves most
tokens on validation at no more than `--lost` of the wins, judged on test; beside it, the same with the values of each
turn dealt to other episodes, so that all they can know is the turn.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any

import pyarrow.parquet as pq

from benchmarks.evidence.finals import final_evaluation
from flows.workspace import find_home, open_workspace
from stages.judge.values import TABLE
from stages.learn.value_use import abort_table, abort_thresholds, choose_threshold
from stages.store.execute import execute
from stages.store.workspace import StageRun, Workspace

SHUFFLES = 20
Judged = tuple[list[list[float]], list[list[int]], list[bool]]


def evaluated(workspace: Workspace, run: str, split: str, episodes: int, best_of: int) -> StageRun:
    """The final adapter on a split, as a run of evaluate."""
    sets = [
        f"evaluate.split={split}",
        f"evaluate.episodes={episodes}",
        f"evaluate.best_of={best_of}",
        "evaluate.audit_turns=0",
    ]
    again = final_evaluation(workspace, run, sets, of="its final adapter")
    call = again.call
    return execute(
        call.stage, run=call.run, inputs=call.inputs, iteration=call.iteration, workspace=workspace, tags=again.tags
    )


def judged_of(workspace: Workspace, run_id: str) -> Judged:
    """(V of states 0 .. N-1, tokens of actions 0 .. N-1, won) of every episode whose values were read."""
    values: dict[str, list[float]] = {}
    for row in pq.read_table(
        workspace.tracking.artifact(run_id, TABLE), filters=[("terminal", "=", False)]
    ).to_pylist():
        values.setdefault(row["episode_id"], []).append(row["value"])
    tokens: dict[str, list[int]] = {}
    for turn in workspace.replay.rows("turns", [run_id]):
        tokens.setdefault(turn["episode_id"], []).append(len(turn["action_ids"]))
    won = {row["episode_id"]: row["total_reward"] >= 1 for row in workspace.replay.rows("episodes", [run_id])}
    return list(values.values()), [tokens[name] for name in values], [won[name] for name in values]


def dealt(values: Sequence[Sequence[float]], rng: random.Random) -> list[list[float]]:
    """The values of each turn dealt anew to the episodes that have the turn."""
    found = [list(v) for v in values]
    for k in range(max(map(len, found))):
        having = [i for i, v in enumerate(found) if k < len(v)]
        for i, value in zip(having, rng.sample([values[i][k] for i in having], len(having)), strict=True):
            found[i][k] = value
    return found


def abort(validation: Judged, test: Judged, lost: float) -> dict[str, Any]:
    """The test split's row at the threshold that validation chose."""
    values, tokens, wins = validation
    threshold = choose_threshold(abort_table(values, tokens, wins, abort_thresholds(values)), lost)
    return abort_table(*test, [threshold])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--episodes", type=int, default=200, help="scenarios of each split")
    parser.add_argument("--best-of", type=int, default=4)
    parser.add_argument(
        "--lost", type=float, default=0.05, help="share of the wins that early abort may lose, on validation"
    )
    args = parser.parse_args()
    workspace = open_workspace(find_home())
    runs = {
        split: evaluated(workspace, args.run, split, args.episodes, args.best_of) for split in ("validation", "test")
    }
    print("| metric | validation | test |\n|---|---|---|")
    names = sorted(
        {name for run in runs.values() for name in run.metrics if name.startswith(("value/", "best_of/"))}
        | {"evaluate/win_rate"}
    )
    for name in names:
        print(
            f"| {name} | {' | '.join(f'{run.metrics[name]:.3f}' if name in run.metrics else '' for run in runs.values())} |"
        )
    validation, test = (judged_of(workspace, run.run_id) for run in runs.values())
    rng = random.Random(0)
    chance = [
        abort((dealt(validation[0], rng), *validation[1:]), (dealt(test[0], rng), *test[1:]), args.lost)
        for _ in range(SHUFFLES)
    ]
    rows = {
        "V": abort(validation, test, args.lost),
        "V dealt anew": {key: sum(row[key] for row in chance) / SHUFFLES for key in chance[0]},
    }
    print(
        f"\n| early abort on test, at most {args.lost:g} of the wins lost on validation | threshold | aborted | tokens saved | wins lost |"
    )
    print("|---|---|---|---|---|")
    for name, row in rows.items():
        print(
            f"| {name} | {row['threshold']:.3f} | {row['aborted']:.2f} | {row['tokens_saved']:.2f} | {row['wins_lost']:.2f} |"
        )


if __name__ == "__main__":
    main()
