"""The audit of a critic that is a number: does Q rank actions like the returns, and like the environment's truth? It
uses the same actions as the audit of a language critic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stages.frame.contract import Context
from stages.frame.types import Episode
from stages.judge.audit import Audit, Case, audited, intervals, order, row, truths
from stages.judge.critique import Judgement
from stages.judge.q_values import open_q, q_prompts, q_values
from stages.learn.statistics import auroc, spearman
from stages.llm.roles import Roles


def q_audit(context: Context, roles: Roles, episodes: Sequence[Episode], n_turns: int) -> Audit:
    """Q's order of actions against returns and exact Q*, under the names that the order by futures has."""
    pairs, counts = audited(context, roles, episodes, n_turns)
    prompts = q_prompts(context, roles, [(e.messages[: t.state_len], a) for e, t, a, _ in pairs])
    known = [(pair, ids) for pair, ids in zip(pairs, prompts, strict=True) if ids]
    counts["audit/out_of_context"] += float(len(pairs) - len(known))
    if not known:
        return Audit(counts, [], {})
    critic = open_q(context)
    numbers = q_values(critic.model, critic.head, [ids for _, ids in known])
    cases = [
        Case(e, t, a, Judgement((), f"Q = {q:.3f}", "none"), q, own)
        for ((e, t, a, own), _), q in zip(known, numbers, strict=True)
    ]
    own, (read, facts) = [c for c in cases if c.own], truths(context, cases)
    returns, values = [c.episode.total_reward for c in own], [c.predicted for c in own]
    table = [
        order("audit/future_return_spearman", spearman, own, values, returns),
        order("audit/future_return_auroc", auroc, own, values, [int(r >= 1) for r in returns]),
        *(
            [order("audit/future_q_spearman", spearman, read, [c.predicted for c in read], [f.q for f in facts])]
            if read
            else []
        ),
    ]
    metrics = {one["name"]: one["value"] for one in table if not math.isnan(one["value"])}
    return Audit(metrics | counts, [row(c) for c in cases], intervals(context.workdir, table))
