"""The outcome of a judged action (kept, rewritten or dropped), as rows and as metrics."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from stages.frame.react import thought_of
from stages.frame.types import Completion, Message, Row
from stages.judge.critique import Judgement
from stages.judge.rethink import LEAK, LOST
from stages.learn.statistics import leak_rate
from stages.llm.roles import prompt_text
from stages.llm.tokens import OUT_OF_CONTEXT
from stages.play.transitions import Transition

UNREADABLE = "unreadable action"
"""Why a row is dropped whose action the environment could not read."""


@dataclass(frozen=True)
class Refinement:
    """One state with the fresh action, what the critic said of it, and the action to be learned (None: dropped)."""

    state: Transition
    prompt_ids: tuple[int, ...]
    action: Completion
    judgement: Judgement | None = None
    teacher: tuple[tuple[int, ...], tuple[Message, ...]] = ((), ())
    raw: Completion | None = None
    learned: Completion | None = None
    refused: str = ""  # the rewritten action that the gate refused; the fresh one is learned instead
    dropped: str = ""
    episodes: int = 0  # played by the gate
    env_steps: int = 0

    @property
    def kept_action(self) -> bool:
        return self.learned is self.action


def cap_yes(refined: Sequence[Refinement], most: float, rng: random.Random) -> list[Refinement]:
    """The rows to be learned, at most the share `most` kept by "Yes": else a pleased critic teaches only itself."""
    yes = [r for r in refined if not r.dropped and r.kept_action and not r.refused]
    no = [r for r in refined if not r.dropped and (not r.kept_action or r.refused)]
    allowed = len(yes) if most >= 1 else int(most * len(no) / (1 - most) + 1e-9)  # 0.7 * 3 / (1 - 0.7) is 6.9999...
    return no + (rng.sample(yes, allowed) if allowed < len(yes) else yes)


def by_action(refined: Sequence[Refinement]) -> dict[object, Refinement]:
    """One entry for every state and try, however often its action was rewritten."""
    return {(r.state.key, id(r.action)): r for r in refined}


def metrics(refined: Sequence[Refinement], kept: Sequence[Refinement]) -> dict[str, float]:
    actions = by_action(refined).values()
    verdicts = [r.judgement.verdict for r in actions if r.judgement]
    new = [r for r in kept if not r.kept_action and r.raw and r.learned]
    told = [r.judgement.critique if r.judgement else "" for r in new]
    known = [prompt_text(r.state.state) for r in new]
    before, after = ([c.text for r in new if (c := getattr(r, part))] for part in ("raw", "learned"))
    return {
        "refine/states": float(len(actions)),
        "refine/rows": float(len(kept)),
        "refine/dropped": float(sum(bool(r.dropped) for r in refined)),
        "refine/unreadable": float(sum(r.dropped == UNREADABLE for r in refined)),
        "refine/thoughts": float(sum(bool(thought_of(r.learned.text)) for r in new if r.learned)),
        "refine/thought_leak": float(sum(r.dropped == LEAK for r in refined)),
        "refine/thought_lost": float(sum(r.dropped in LOST for r in refined)),
        "refine/out_of_context": float(sum(r.dropped == OUT_OF_CONTEXT for r in refined)),
        "refine/refused": float(sum(bool(r.refused) for r in refined)),
        "refine/episodes": float(sum(r.episodes for r in refined)),
        "refine/env_steps": float(sum(r.env_steps for r in refined)),
        "refine/yes_rate": sum(v == "yes" for v in verdicts) / max(len(verdicts), 1),
        "refine/changed_frac": len(new) / max(len(kept), 1),
        # Words of the critique that the state lacks: what is to be learned is among them, so compare before with after.
        "refine/leak_before": leak_rate(before, told, known)[1],
        "refine/leak_after": leak_rate(after, told, known)[1],
    }


def drawn_again(tries: Sequence[Sequence[Refinement]], kept: Sequence[Refinement], wanted: int) -> dict[str, float]:
    """States that were drawn in the place of dropped ones, in how many tries, and how many are missing still."""
    first, *others = [len(by_action(rows)) for rows in tries]
    return {
        "refine/tries": float(len(tries)),
        "refine/drawn_again": float(sum(others)),
        "refine/drawn_again_frac": sum(others) / (first + sum(others)),
        "refine/missing": float(wanted - len({r.state.key for r in kept})),
    }


def judgement_row(r: Refinement) -> Row:
    j = r.judgement or Judgement((), "", "malformed")
    return {
        "episode_id": r.state.episode_id, "turn": r.state.turn, "state_len": len(r.state.state), "action": r.action.text, "futures": list(j.futures),
        "critique": j.critique, "verdict": j.verdict, "refined": r.learned.text if r.learned else "", "info": {"dropped": r.dropped, "refused": r.refused},
    }  # fmt: skip
