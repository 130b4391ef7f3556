"""The token certificate of a turn: does the next state hold its tokens, and how far apart are engine and trainer?

A conversation is rendered anew at each turn. The template or the tokenizer may write a reply differently from the
engine. Then the next state does not begin with the turn's prompt and action. The row breaks there, and the difference
is kept as text. No tensors, so that the command line reads it without torch. Source: [ours].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from stages.frame.types import Row

AROUND = 4  # tokens that are kept before the first one that differs, and from it on
Turn = tuple[str, int]  # episode id, turn
Decode = Callable[[Sequence[int]], str]


def certificates(turns: Sequence[Row], final_ids: Sequence[int] | None, decode: Decode) -> list[Row]:
    """A row of table `certificates` for every turn of an episode; its gap is still to be filled in.

    turns: rows of table `turns`, in order. final_ids: of the state after the last turn, its messages rendered now; None
    where nothing reads that state. extended: whether the next state begins with the turn's prompt and action, None of a
    last turn without `final_ids`. position: the first token that differs, counted from the episode's start. produced,
    rendered: the texts of the tokens around it, of the turn and of the next state. All three None: nothing differs.
    """
    states = [*(turn["prompt_ids"] for turn in turns[1:]), final_ids]
    return [_certificate(turn, after, decode) for turn, after in zip(turns, states, strict=True)]


def shown(tokens: Sequence[str]) -> str:
    """The texts of tokens as one, with a bar between two and line breaks written out; "nothing" of none."""
    return repr("|".join(tokens)) if tokens else "nothing"


def turn_gaps(turns: Iterable[Turn], engine: Iterable[float], trainer: Iterable[float]) -> dict[Turn, dict[str, float]]:
    """gap_mean and gap_max of every turn: |log-prob of the engine - of the trainer| over its action tokens, in nats.

    turns, engine, trainer: one entry an action token, in any order."""
    found: dict[Turn, list[float]] = {}
    for turn, old, new in zip(turns, engine, trainer, strict=True):
        found.setdefault(turn, []).append(abs(new - old))
    return {turn: {"gap_mean": sum(gaps) / len(gaps), "gap_max": max(gaps)} for turn, gaps in found.items()}


def with_gaps(rows: Iterable[Row], gaps: Mapping[Turn, Mapping[str, float]]) -> list[Row]:
    """The rows with their gaps, None of a turn that has none."""
    return [{**row, **gaps.get((row["episode_id"], row["turn"]), {})} for row in rows]


def cert_metrics(stage: str, rows: Sequence[Row], max_gap: float) -> dict[str, float]:
    """Turns that were checked and that broke; of the gaps their mean, the largest, how many means are above max_gap."""
    checked = [row for row in rows if row["extended"] is not None]
    gaps = [row for row in rows if row["gap_mean"] is not None]
    found = {"turns": len(checked), "broken": sum(not row["extended"] for row in checked), "gap_turns": len(gaps)}
    if gaps:
        found |= {
            "gap_mean": sum(row["gap_mean"] for row in gaps) / len(gaps),
            "gap_max": max(row["gap_max"] for row in gaps),
        }
        found["gap_above"] = sum(row["gap_mean"] > max_gap for row in gaps)
    return {f"{stage}/cert_{name}": float(value) for name, value in found.items()}


def first_difference(before: Sequence[int], after: Sequence[int]) -> int | None:
    """Position of the first token that differs; None where `after` begins with all of `before`."""
    if tuple(after[: len(before)]) == tuple(before):
        return None
    shared = min(len(before), len(after))
    return next((t for t in range(shared) if before[t] != after[t]), shared)


def _certificate(turn: Row, after: Sequence[int] | None, decode: Decode) -> Row:
    before = [*turn["prompt_ids"], *turn["action_ids"]]
    position = None if after is None else first_difference(before, after)
    row = {
        "episode_id": turn["episode_id"],
        "turn": turn["turn"],
        "extended": None if after is None else position is None,
        "position": position,
    }
    row |= {"produced": None, "rendered": None, "gap_mean": None, "gap_max": None}
    if after is None or position is None:
        return row
    span = slice(max(position - AROUND, 0), position + AROUND)
    produced, rendered = ([decode([token]) or f"<{token}>" for token in ids[span]] for ids in (before, after))
    if produced == rendered:  # other tokens of the same text
        produced, rendered = ([f"<{token}>" for token in ids[span]] for ids in (before, after))
    return row | {"produced": produced, "rendered": rendered}
