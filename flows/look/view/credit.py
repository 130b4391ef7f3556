"""Each turn's reward and share of the loss, from the credit ledger of a self_ac run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.frame.types import Row

STAGE = "self_ac"
FILE = "ledger.parquet"  # its artifact


def turn_lines(entries: Sequence[Row], texts: Mapping[int, str]) -> list[Row]:
    """One line a turn and one for the end state, in the order of the ledger. texts: of the turns."""
    groups: dict[tuple[int, int], list[Row]] = {}
    for entry in entries:
        if entry["turn"] >= 0:
            groups.setdefault((entry["first_turn"], entry["turn"]), []).append(entry)
    return [_line(mine, texts) for mine in groups.values()]


def _line(entries: Sequence[Row], texts: Mapping[int, str]) -> dict[str, Any]:
    first, in_action = entries[0], entries[0]["in_action"]
    targets = [value for name, value in first.items() if name.startswith("target_") and value is not None]
    return {
        "turn": first["turn"],
        "first_turn": first["first_turn"],
        "text": " ".join(texts.get(first["turn"], "").split()) if in_action else "(end)",
        "tokens": len(entries) if in_action else 0,
        "reward": first["reward"],
        "value": first["value"],
        "target": sum(targets) / len(targets) if targets else None,
        "advantage": first["advantage"],
        "ratio": [entry["ratio"] for entry in entries if entry["ratio"] is not None],
        "clipped": any(entry["clipped"] for entry in entries),
        "share": sum(entry["loss_share"] for entry in entries),
    }
