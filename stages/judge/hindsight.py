"""What really came of an action, told as a successor would have told it: futures for an evaluator that has no successor.

    f = B(s_k, a_k, r_k, s_k+1, B(s_k+1, a_k+1, ...)),   merged from the episode's end back, corrected as a target is

Source: self-distillation, an ablation of arXiv 2512.04601 (its second version): the refiner sees rollouts of the policy,
here the one that the action is of. [ours: one, and its own]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stages.frame.contract import Context
from stages.frame.types import Completion
from stages.judge.backup import Backup, bellman_backup
from stages.llm.roles import Roles
from stages.play.chains import Drawn, following, read_in_full
from stages.play.transitions import Candidate, Transition


def lived_actions(context: Context, drawn: Sequence[Transition]) -> list[tuple[tuple[int, ...], Completion]]:
    """The action that the episode took in each state, with the ids of the policy's prompt."""
    return [
        (tuple(t.prompt_ids), Completion(context.engine.decode(t.action_ids), tuple(t.action_ids), (), "stop"))
        for t in drawn
    ]


def lived_futures(
    context: Context, roles: Roles, drawn: Sequence[Candidate], pool: Mapping[tuple[str, int], Candidate]
) -> list[Backup]:
    """The rest of each one's episode as a future, in `target`; `dropped` says where a role's reply could not be read.

    pool: what may follow, by key. An episode that was cut short ends in a sampled future, as a target does.
    """
    chains = [Drawn(following(t, pool, len(pool)), 1.0) for t in drawn]
    return bellman_backup(context, roles, [Backup(*one) for one in read_in_full(context.replay, chains)])
