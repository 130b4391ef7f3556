"""Gymnasium: a text environment as one of ours, and one of ours as a text environment.

    FromGymnasium   reset(seed=, options=) -> (text, info), step(text) -> (text, reward, terminated, truncated, info) is
        played as an Env
    ToGymnasium     an Env is played by the same five-tuple; `as_gymnasium` makes it a gymnasium.Env, which wrappers ask
        for

The interface is that of Gymnasium 1.x (gymnasium.Env), by its methods only. Any object with these methods will do, and
only `as_gymnasium` imports the package. terminated and truncated stay apart. A failure raises on both sides and is
never a reward: Gymnasium has no value for it. Both sides check what they get (stages/frame/border.py). [ours]
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from stages.frame.border import At, flag_of, number_of, shown, text_of
from stages.frame.checked_env import checked
from stages.frame.react import parse_react
from stages.frame.types import Env, Malformed, Message, Scenario, Step, UsageError


class TextEnv(Protocol):
    """What is asked of a Gymnasium environment."""

    @property
    def reset(self) -> Callable[..., tuple[Any, dict[str, Any]]]: ...  # of `seed`, `options`, or what it has of them

    def step(self, action: str) -> tuple[Any, Any, bool, bool, dict[str, Any]]: ...


def action_of_react(text: str) -> str:
    """What stands after "Action:". Raises Malformed."""
    return parse_react(text)[1]


class FromGymnasium:
    """One running episode. A scenario's data is what `reset` is given: `seed`, `options`, both optional.

    env: played, and reset by this object alone. system: tells the policy what the task is and how it replies. read: the
    action of a reply; raises Malformed.
    malformed: errors of `env.step` that blame the action and have changed nothing; they become Malformed.
    """

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(
        self,
        env: TextEnv,
        *,
        system: str,
        read: Callable[[str], str] = action_of_react,
        malformed: tuple[type[Exception], ...] = (),
    ) -> None:
        self.system = system
        self._env, self._read, self._malformed = env, read, malformed
        self._where = f"FromGymnasium of {type(env).__name__}"
        self._running = False

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        self._running = False
        # Only what there is: GEM's environments take no options, others no seed.
        given = {name: scenario.data[name] for name in ("seed", "options") if scenario.data.get(name) is not None}
        answer, at = self._env.reset(**given), At(self._where, "reset")
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise at.broken("(observation, info)", shown(answer), "that is what reset gives since Gymnasium 0.26")
        self._running = True
        return (_observed(at, answer[0]),)

    def step(self, message: Message) -> Step:
        """Act. Raises Malformed; RuntimeError after the end; BrokenEnvironment; whatever `env` raises."""
        if not self._running:
            raise RuntimeError("the episode has not begun, or is over: call reset first")
        action = self._read(str(message.get("content") or ""))
        self._running = False  # so that an error leaves no episode to go on with
        try:
            answer = self._env.step(action)
        except self._malformed as error:
            self._running = True
            raise Malformed(str(error) or "the action cannot be read") from error
        at, wanted = At(self._where, "step"), "(observation, reward, terminated, truncated, info)"
        if not (isinstance(answer, tuple) and len(answer) == 5):
            raise at.broken(wanted, shown(answer), "that is what step gives since Gymnasium 0.26")
        observation, reward, terminated, truncated, info = answer
        over = flag_of(at, "terminated", terminated)
        # Gymnasium allows both (a time limit reached by the last action); what is over by itself has no future to be
        # bootstrapped.
        cut = flag_of(at, "truncated", truncated) and not over
        step = Step((_observed(at, observation),), number_of(at, "reward", reward), over, cut, dict(info))
        self._running = not (step.terminated or step.truncated)
        return step


def _observed(at: At, observation: Any) -> Message:
    if not isinstance(observation, str):
        fix = "wrap the environment in one that describes it"
        raise at.broken("a text as observation", shown(observation), fix)
    return {"role": "user", "content": text_of(at, "observation", observation) or "(nothing)"}


class ToGymnasium:
    """Our environment by Gymnasium's methods. An action is a whole reply; the observation is the text that answers it.

    `reset(seed=n)` plays scenario n modulo their number, `reset()` the next, `reset(options={"scenario": id})` that.
    Its info has the system message and the tools, which a policy must see. An unreadable reply is observed
    (info["malformed"]); past `malformed_allowance` of them the episode is terminated with reward 0, the policy's
    failure. max_turns: replies, after which it is truncated.
    Simulators and engines that fail raise, and the episode is over without a reward.
    """

    metadata: ClassVar[Mapping[str, Any]] = {"render_modes": []}

    def __init__(
        self,
        make_env: Callable[[], Env],
        scenarios: Sequence[Scenario],
        *,
        max_turns: int,
        malformed_allowance: int = 1,
    ) -> None:
        if not scenarios:
            raise UsageError("ToGymnasium: there are no scenarios to play. Name a split that has some.")
        self._make_env, self._scenarios = checked(make_env), list(scenarios)
        self._max_turns, self._allowance = max_turns, malformed_allowance
        self._env: Env | None = None
        self._next = self._turns = self._malformed = 0

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """(first observation, info). Raises UsageError for an id that there is not; whatever the environment raises."""
        self._env = None
        scenario = self._chosen(seed, (options or {}).get("scenario"))
        env = self._make_env()
        first = env.reset(scenario)
        self._env, self._turns, self._malformed = env, 0, 0
        tools = [dict(tool) for tool in env.tools]
        return joined(first), {"system": env.system, "tools": tools, "scenario": scenario.id}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The five-tuple of Gymnasium. Raises RuntimeError after the end; whatever the environment raises."""
        env, self._env = self._env, None  # so that an error leaves no episode to go on with
        if env is None:
            raise RuntimeError("the episode has not begun, or is over: call reset first")
        try:
            step = env.step({"role": "assistant", "content": action})
            info = {**step.info, "malformed": False}
        except Malformed as error:
            self._malformed += 1
            step = Step(({"role": "user", "content": str(error)},), terminated=self._malformed > self._allowance)
            info = {"malformed": True}
        self._turns += 1
        truncated = not step.terminated and (step.truncated or self._turns >= self._max_turns)
        if not (step.terminated or truncated):
            self._env = env
        return joined(step.messages), step.reward, step.terminated, truncated, info

    def _chosen(self, seed: int | None, name: str | None) -> Scenario:
        if name is not None:
            found = next((scenario for scenario in self._scenarios if scenario.id == name), None)
            if found is None:
                raise UsageError(f"ToGymnasium: there is no scenario {name!r} among the {len(self._scenarios)} given.")
            return found
        number = self._next if seed is None else seed
        self._next = number + 1
        return self._scenarios[number % len(self._scenarios)]


def joined(messages: Sequence[Message]) -> str:
    return "\n".join(str(message["content"]) for message in messages)


def as_gymnasium(env: ToGymnasium, *, longest: int = 200_000) -> Any:
    """A gymnasium.Env around it, with Text spaces up to so many printable ASCII characters. Needs gymnasium."""
    try:
        import gymnasium
    except ImportError:
        raise UsageError("as_gymnasium needs gymnasium, which is not installed. Run: pip install gymnasium") from None

    class TurnwiseEnv(gymnasium.Env):  # type: ignore[misc, unused-ignore]
        metadata: ClassVar[dict[str, Any]] = dict(env.metadata)
        # A Text space lists its characters, so it cannot hold all of Unicode; what a text has beyond is outside of the
        # space and still comes.
        observation_space = action_space = gymnasium.spaces.Text(longest, min_length=0, charset=string.printable)

        def reset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[str, dict[str, Any]]:
            super().reset(seed=seed)
            return env.reset(seed=seed, options=options)

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return env.step(action)

    return TurnwiseEnv()
