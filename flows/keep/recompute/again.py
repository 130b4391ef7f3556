"""Stages that read only stored rows, adapters and the base model run once more in a scratch folder. All results are
compared. The seed decides the draws, so they must be equal.
"""

from __future__ import annotations

from flows.keep.recompute import compare
from flows.keep.recompute.compare import Compared, Stored
from flows.registry import load_stage
from stages.frame.contract import Context

STAGES = ("critic", "distill", "rft", "grpo", "self_ac")


def check(context: Context, stored: Stored) -> Compared:
    """The stage's metrics, rows and files."""
    outputs = load_stage(stored.stage).run(context)
    known = {name: value for name, value in stored.metrics.items() if not name.endswith("_s")}
    done = compare.metrics(stored.metrics, dict.fromkeys(known, float("nan")) | dict(outputs.metrics))
    done += compare.total(compare.rows(table, stored.rows(table), rows) for table, rows in outputs.rows.items())
    if stored.is_dropped:
        return done
    return done + compare.total(
        compare.files(name, stored.artifacts / name, file) for name, file in outputs.files.items()
    )
