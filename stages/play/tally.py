"""Metrics of a stage that plays episodes, and a check that at least one of them says something about the policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stages.frame.types import Episode, Outcome, TurnwiseError, UsageError
from stages.llm.tokens import OUT_OF_CONTEXT


def check_environment(episodes: Sequence[Episode]) -> None:
    """Raises TurnwiseError where no episode says anything of the policy, UsageError where no first prompt fits."""
    if not episodes:
        raise TurnwiseError("no episode was run: the environment has no scenario for this split and these task.options")
    if all(e.error.startswith(OUT_OF_CONTEXT) and not e.turns for e in episodes):
        raise UsageError(
            f"no episode could begin, first error: {episodes[0].error}. Set model.path to a model with a longer context, or shorten the first prompt by task.options. With a server, raise its own limit"
        )
    if not any(e.outcome.trainable for e in episodes):
        raise TurnwiseError(
            f"no episode could be scored: {episodes[0].outcome} on all {len(episodes)}, first error: {episodes[0].error}"
        )


def env_steps(episodes: Sequence[Episode]) -> int:
    """Replies that were acted on, in however many turns each."""
    return sum(len({t.state_len for t in e.turns}) for e in episodes)  # the turns of one reply have one state_len


def summary(episodes: Sequence[Episode], stage: str) -> dict[str, float]:
    """Counts, means and rates over episodes that the policy answers for. A reply is a step of the environment."""
    counts = Counter(e.outcome for e in episodes)
    ours = [e for e in episodes if e.outcome.trainable]
    turns = sum(len(e.turns) for e in ours)
    replies = env_steps(ours)
    tokens = sum(len(t.completion.token_ids) for e in ours for t in e.turns)
    return {
        f"{stage}/episodes": float(len(episodes)),
        f"{stage}/retries": float(sum(e.attempts - 1 for e in episodes)),
        f"{stage}/win_rate": sum(e.won for e in ours) / len(ours),
        f"{stage}/return": sum(e.total_reward for e in ours) / len(ours),
        f"{stage}/turns": turns / len(ours),
        f"{stage}/tokens": float(tokens),
        f"{stage}/env_steps": float(replies),
        f"{stage}/malformed_frac": sum(t.malformed for e in ours for t in e.turns) / max(replies, 1),
        f"{stage}/out_of_context": float(sum(e.error.startswith(OUT_OF_CONTEXT) for e in episodes)),
        **{f"{stage}/{outcome}": float(counts[outcome]) for outcome in Outcome},
    }
