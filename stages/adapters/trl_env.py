"""TRL: our environments for GRPOTrainer(environment_factory=...), as TRL 1.x documents it ("OpenEnv").

    make = envs.make_env("game24", {})
    trainer = GRPOTrainer(
        model=..., train_dataset=Dataset.from_list(trl_rows(make, envs.scenarios("game24", {}, "train", 500, 0))),
        environment_factory=trl_environment(make, "game24", max_turns=12),
    )

tests/adapters/test_trl_trainer.py trains so, with TRL 1.16. The class has `reset(**row)`, one tool, `act`, and
`get_reward()`. TRL shows a tool's error to the policy and goes on. For TRL an episode ends only when the policy is
silent. So a failure is kept, and `get_reward` raises it: training stops, and the failure gives no reward. After the end
`act` raises ValueError, which TRL shows to the policy, as it recommends. TRL is not imported. [ours]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stages.adapters.play import Play, scenario_of, scenario_text
from stages.frame.types import Env, Scenario


def trl_rows(make_env: Callable[[], Env], scenarios: Sequence[Scenario]) -> list[dict[str, Any]]:
    """The data set: prompt, and the scenario, which `reset` reads. The first observation follows at reset, behind the
    empty user message. An environment that has no system message before a scenario is begun for it.
    """
    rows = []
    for scenario in scenarios:
        env = make_env()
        if not env.system:
            env.reset(scenario)
        prompt = [{"role": "system", "content": env.system}, {"role": "user", "content": ""}]
        rows.append({"prompt": prompt, "scenario": scenario_text(scenario)})
    return rows


def trl_environment(
    make_env: Callable[[], Env],
    name: str,
    *,
    max_turns: int,
    malformed_allowance: int = 1,
    form: Callable[[str], str] = "Action: {}".format,
) -> type:
    """A class without arguments, one instance a rollout.

    name: of the class, which TRL logs its reward under (rewards/NAME/mean).
    form: the reply that our environment is handed, by the action that the tool was called with; of math that itself.
    max_turns: calls, after which the episode is truncated. Instances tell `terminated` and `truncated`.
    """

    class TurnwiseEnvironment:
        def __init__(self) -> None:
            self._play: Play | None = None

        def reset(self, *, scenario: str, prompt: Sequence[Mapping[str, Any]], **_: Any) -> str:
            self._play = None
            play = Play(make_env, scenario_of(scenario), max_turns=max_turns, malformed_allowance=malformed_allowance)
            if play.system != prompt[0]["content"]:
                raise RuntimeError("the environment's system message is another one than its row's: make the rows anew")
            self._play = play
            return play.text

        def act(self, action: str) -> str:
            """
            Do one action in the environment, and see what comes of it.

            Args:
                action: The action, in the form that the system message asks for after "Action:".

            Returns:
                What the environment answers.
            """
            play = self._begun
            if play.over:
                raise ValueError("The episode is over.")
            return play.act(form(action))

        def get_reward(self) -> float:
            return self._begun.reward()

        @property
        def terminated(self) -> bool:
            return self._begun.terminated

        @property
        def truncated(self) -> bool:
            return self._begun.truncated

        @property
        def _begun(self) -> Play:
            if self._play is None:
                raise RuntimeError("the episode has not begun: call reset first")
            return self._play

    TurnwiseEnvironment.__name__ = TurnwiseEnvironment.__qualname__ = name
    return TurnwiseEnvironment
