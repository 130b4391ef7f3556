"""Values in words from rollouts: n rollouts of an action, each told as a future, and all judged together.

Source: NLRL, as arXiv 2512.04601 compares with it: the value of an action from 4 rollouts in context. Ours: they are
told backwards, turn by turn, with the roles that make a target. So they read like a successor's futures, and the same
evaluator can judge them.

And in hindsight: the real outcome of the action that an episode took, merged from its end back. The evaluator then
needs no successor. Source: self-distillation, an ablation of the paper's second version, there with rollouts. Ours uses
one: the episode itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from stages.frame.contract import Context
from stages.frame.react import parse_react
from stages.frame.types import Completion, Episode
from stages.judge.backup import Backup, bellman_backup, learner
from stages.judge.critique import Judgement, verdicts
from stages.llm.roles import Roles, mix
from stages.play.chains import Drawn, following, read_in_full
from stages.play.forced import played_on
from stages.play.tally import env_steps
from stages.play.transitions import Candidate, Transition, transitions_of


@dataclass(frozen=True)
class Rolled:
    """The evaluator's word on an action, and what was played for it. "malformed" where no rollout could be told."""

    judgement: Judgement
    episodes: int
    env_steps: int


def judge_rolled(
    context: Context, roles: Roles, pairs: Sequence[tuple[Transition, Completion]], *, n: int, seed: int
) -> list[Rolled]:
    """The evaluator's word on each (state, reply) after reading what came of it in n rollouts of the current policy.

    A rollout that failed, or that cannot be told, is left out. Raises EngineUnavailable.
    """
    adapter = context.adapter(learner(context))
    groups = played_on(context, roles, pairs, n=n, adapter=adapter, seed=mix(seed, "rollouts"))
    known = [[e for e in group if e.outcome.trainable] for group in groups]
    chains = [_backup(t, e) for (t, _), group in zip(pairs, known, strict=True) for e in group]
    told = iter(bellman_backup(context, roles, chains))
    futures = [[b.target for b in islice(told, len(group)) if b.target and not b.dropped] for group in known]
    live = [i for i, texts in enumerate(futures) if texts]
    asked = [(pairs[i][0].state, parse_react(pairs[i][1].text)[1]) for i in live]
    words = verdicts(context, roles, asked, [futures[i] for i in live], adapter=adapter, seed=seed)
    said = dict(zip(live, words, strict=True))
    return [
        Rolled(said.get(i, Judgement((), "", "malformed")), len(group), env_steps(group))
        for i, group in enumerate(groups)
    ]


def _backup(at: Transition, played: Episode) -> Backup:
    """All of the episode from the state on."""
    return Backup(tuple(t for t in transitions_of(played) if t.turn >= at.turn), 1.0)


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
