"""Make the successor's training targets for (s, a): one real step and a sampled rest (stages/judge/backup.py).

    f = B(s, a, r, s', f'),   a' ~ pi(.|s'),   f' ~ M_target(.|s', a')        terminal s': f is made from r and the last
        observation

Source: arXiv 2512.04601, section 4 (successor training) and Algorithm 1; a fresh a', the terminal prompt and the
sampling shares are ours (docs/reference/paper-map.md). Each target keeps two information sets: the student prompt x
(conversation, action) and the teacher prompt x+ (with s', r, f'). Only x reaches a training row.

    turnwise rerun targets --of RUN --set targets.transitions=512
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence

from pydantic import Field

from stages.frame.contract import Context, Outputs, Stage
from stages.frame.types import Row, TurnwiseError
from stages.judge.backup import UNREADABLE, Backup, bellman_backup, successor_prompt
from stages.learn.statistics import leak_rate
from stages.llm.last_message import check_last_message
from stages.llm.roles import Roles, check_student, policy_text, prompt_text, roles_of
from stages.llm.tokens import OUT_OF_CONTEXT, nothing_fits
from stages.play.chains import DrawConfig, drawn_chains


class TargetsConfig(DrawConfig):
    """Which transitions are backed up, and how."""

    correct: bool = Field(True, description="CoT correction of the combined future. [paper]")


def run(context: Context) -> Outputs:
    """Rows of `targets`. Raises MissingInput without a transition, TurnwiseError if nothing is readable, UsageError."""
    roles = roles_of(context.run.roles)
    check_last_message(context.engine, roles)
    drawn, n_pool = drawn_chains(context, "targets", "critic")
    backups = bellman_backup(context, roles, [Backup(*one) for one in drawn])
    kept, too_long = [b for b in backups if not b.dropped], sum(b.dropped == OUT_OF_CONTEXT for b in backups)
    if too_long == len(backups):
        raise nothing_fits("targets", too_long, context.engine.context)
    if not kept:
        raise nothing_readable(backups)
    rows = [target_row(context, roles, b) for b in kept]
    return Outputs(
        {
            "targets/rows": float(len(rows)),
            "targets/dropped": float(len(backups) - len(rows)),
            "targets/unreadable": float(sum(b.dropped == UNREADABLE for b in backups)),
            "targets/out_of_context": float(too_long),
            "targets/terminal_frac": sum(b.t.terminal for b in kept) / max(len(kept), 1),
            "targets/tokens": float(sum(len(b.target.token_ids) for b in kept if b.target)),
            "targets/pool": float(n_pool),
            **leaks(roles, kept),
        },
        {"targets": rows},
    )


def nothing_readable(backups: Sequence[Backup]) -> TurnwiseError:
    """The error of an engine that returns garbage. A finished run without targets would be reused forever."""
    counts = ", ".join(f"{reason}: {n}" for reason, n in Counter(b.dropped for b in backups).most_common())
    replies = [b.target for b in backups if b.target]
    found = next((f"; for example {reply.text[:60]!r}" for reply in replies), "")
    cut = sum(reply.finish_reason != "stop" for reply in replies)
    if 2 * cut > len(replies):
        advice = f"{cut} of them were cut at their limit: raise roles.max_future_tokens, or roles.max_thought_tokens for a model that thinks first"
    else:
        advice = "Look at the engine's model (does model.path follow instructions?) and its prompts (roles.prompts)"
    wanted = f"targets wanted futures of {len(backups)} transitions"
    return TurnwiseError(
        f"{wanted}, but no reply could be read ({counts}{found}). {advice}, then run the command again"
    )


def target_row(context: Context, roles: Roles, b: Backup) -> Row:
    assert b.combined is not None and b.target is not None
    action = b.t.action or "unreadable"
    student_ids = context.engine.encode(successor_prompt(roles, b.t.state, action))
    student = context.engine.decode(student_ids)
    template = roles.templates["successor"].format(action=action, thought="")
    known = f"{policy_text(roles, b.t.state)}\n{template}"
    check_student(student, known, [*(t.observation for t in b.chain), b.future if b.future != "none" else ""])
    ids, messages = b.teacher
    return {
        "target_id": f"{b.t.episode_id}-{b.t.turn}-{context.iteration}", "role": "successor", "episode_id": b.t.episode_id, "turn": b.t.turn,
        "terminal": b.t.terminal, "student_ids": list(student_ids), "completion_ids": list(b.target.token_ids),
        "teacher_ids": list(ids), "student_prompt": student, "teacher_prompt": json.dumps([m["content"] for m in messages]),
        "raw": b.combined.text, "completion": b.target.text, "weight": b.weight,
        "info": {"next_action": b.next_action, "future": b.future, "reward": b.t.reward},
    }  # fmt: skip


def leaks(roles: Roles, kept: Sequence[Backup]) -> dict[str, float]:
    """Share of targets that say something only the teacher could know, before and after correction.

    leak: any content word of the merged observations that is not in x. It also counts what is to be learned. So compare
    it with `leak_shuffled`, the same measure against another row's s'. leak_name: capitalised names alone, which nobody
    can learn to predict.
    """
    if not kept:
        return {}
    before, after = ([c.text for b in kept if (c := getattr(b, part))] for part in ("combined", "target"))
    privileged = ["\n".join(t.observation for t in b.chain) for b in kept]
    known = [prompt_text(successor_prompt(roles, b.t.state, b.t.action)) for b in kept]
    shuffled = privileged[1:] + privileged[:1]
    return {
        "targets/leak_before": leak_rate(before, privileged, known)[0],
        "targets/leak_after": leak_rate(after, privileged, known)[0],
        "targets/leak_shuffled": leak_rate(after, shuffled, known)[0],
        "targets/leak_name_before": leak_rate(names(before), names(privileged), names(known))[0],
        "targets/leak_name_after": leak_rate(names(after), names(privileged), names(known))[0],
    }


def names(texts: Sequence[str]) -> list[str]:
    """Only the capitalised words of each text, role markers ("Future:") aside."""
    return [" ".join(re.findall(r"\b[A-Z][a-z]+\b(?!:)", text)) for text in texts]


STAGE = Stage(
    "targets", 5, TargetsConfig, inputs=("collect", "critic", "distill"), roles=("policy", "successor", "combine", "corrector"), run=run,
    outputs=("targets",), shares=True,
)  # fmt: skip
