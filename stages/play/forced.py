"""Episodes that start from a state of the replay with a given action, to see what follows. Ours."""

from __future__ import annotations

from collections.abc import Sequence

from stages.frame.contract import Context
from stages.frame.types import Completion, Episode
from stages.llm.roles import Roles
from stages.play.environment import environment
from stages.play.rollout import rollout, rollout_settings
from stages.play.transitions import Transition


def played_on(
    context: Context,
    roles: Roles,
    starts: Sequence[tuple[Transition, Completion]],
    *,
    n: int,
    adapter: str | None,
    seed: int,
) -> list[list[Episode]]:
    """n episodes for each (state, reply): the replies before the state, this one, the policy of `adapter` to the end.

    Its state is reached by acting the episode's replies anew, so the environment must be deterministic, or be content
    with an estimate. Replies that were not generated here carry no token ids. Raises EngineUnavailable.
    """
    scenarios, forced = [], []
    for state, reply in starts:
        said = [str(m["content"]) for m in state.state if m["role"] == "assistant"]
        scenarios += [state.scenario] * n
        forced += [[*said, reply.text]] * n
    settings = rollout_settings(context, adapter, seed=seed)
    episodes = rollout(context.engine, environment(context), scenarios, roles, settings, forced=forced)
    return [episodes[start : start + n] for start in range(0, len(episodes), n)]
