"""One of our episodes as another library plays it: replies in, texts out, the reward summed. A failure can never pass
for a reward. Ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from stages.adapters.gymnasium_text import ToGymnasium
from stages.frame.types import Env, Scenario


class Play:
    """text: the first observation. system, tools: what the policy must see. Raises what the environment raises."""

    def __init__(
        self, make_env: Callable[[], Env], scenario: Scenario, *, max_turns: int, malformed_allowance: int
    ) -> None:
        self._env = ToGymnasium(make_env, [scenario], max_turns=max_turns, malformed_allowance=malformed_allowance)
        self.text, info = self._env.reset()
        self.system, self.tools = str(info["system"]), list(info["tools"])
        self.terminated = self.truncated = False
        self._reward, self._failure = 0.0, ""

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated or bool(self._failure)

    def act(self, reply: str) -> str:
        """The observation after a reply. Raises what the environment raises, and RuntimeError after the end."""
        try:
            text, reward, self.terminated, self.truncated, _ = self._env.step(reply)
        except Exception as error:  # kept besides, since a library may show an error to the policy and go on
            self._failure = f"{type(error).__name__}: {error}"
            raise
        self._reward += reward
        return text

    def reward(self) -> float:
        """The sum of the rewards so far. Raises RuntimeError where the episode failed: not the policy's doing."""
        if self._failure:
            raise RuntimeError(f"the episode failed and has no reward: {self._failure}")
        return self._reward


def scenario_text(scenario: Scenario) -> str:
    """A scenario as text, which every form of a data set can hold."""
    return json.dumps(
        {"task": scenario.task, "split": scenario.split, "id": scenario.id, "data": dict(scenario.data)},
        ensure_ascii=False,
    )


def scenario_of(text: str) -> Scenario:
    row: Mapping[str, Any] = json.loads(text)
    return Scenario(row["task"], row["split"], row["id"], row["data"])
