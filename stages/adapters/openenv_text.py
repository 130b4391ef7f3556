"""OpenEnv (seen with 0.10.0): an environment behind one of its servers as one of ours, and ours as such a server.

    FromOpenEnv     reset(**data) -> result, step(action) -> result with observation, reward, done is played as an Env
    as_openenv      a FastAPI app that serves ours, to be run by uvicorn

It uses only the client's methods; only `as_openenv` imports the package. A failure raises on both sides. OpenEnv knows
one end, `done`. A truncated episode is marked in the observation's text field `cut`. [ours]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from stages.adapters.gymnasium_text import ToGymnasium, action_of_react
from stages.frame.border import At, flag_of, number_of, text_of
from stages.frame.types import Env, Message, Scenario, Step, UsageError


class SyncClient(Protocol):
    """What is asked of a client: openenv.core's, `.sync()`."""

    def reset(self, **given: Any) -> Any: ...

    def step(self, action: Any) -> Any: ...


class FromOpenEnv:
    """One running episode. A scenario's data is what `reset` is given: `seed`, `split`, `index`, whatever it takes.

    client: of this episode alone. tell: an observation as text. act: the action of a reply; raises Malformed.
    """

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(
        self,
        client: SyncClient,
        *,
        system: str,
        tell: Callable[[Any], str],
        act: Callable[[str], Any] = action_of_react,
    ) -> None:
        self.system = system
        self._client, self._tell, self._act = client, tell, act
        self._where = f"FromOpenEnv of {type(client).__name__}"
        self._running = False

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        self._running = False
        result = self._client.reset(**scenario.data)
        at = At(self._where, "reset")
        if flag_of(at, "done", result.done):
            raise RuntimeError("the environment is over before the first reply")
        self._running = True
        return (self._told(at, result.observation),)

    def step(self, message: Message) -> Step:
        """Act. Raises Malformed; RuntimeError after the end; BrokenEnvironment; whatever the client raises."""
        if not self._running:
            raise RuntimeError("the episode has not begun, or is over: call reset first")
        action = self._act(str(message.get("content") or ""))
        self._running = False  # so that an error leaves no episode to go on with
        result = self._client.step(action)
        at, seen = At(self._where, "step"), result.observation
        # It may leave out what is not at the end.
        reward = 0.0 if result.reward is None else number_of(at, "reward", result.reward)
        done = flag_of(at, "done", result.done)
        cut = done and bool(seen.get("cut") if isinstance(seen, Mapping) else getattr(seen, "cut", False))
        step = Step((self._told(at, seen),), reward, terminated=done and not cut, truncated=cut)
        self._running = not done
        return step

    def _told(self, at: At, observation: Any) -> Message:
        return {"role": "user", "content": text_of(at, "observation", self._tell(observation)) or "(nothing)"}


def as_openenv(
    make_env: Callable[[], Env],
    scenarios: Sequence[Scenario],
    *,
    max_turns: int,
    malformed_allowance: int = 1,
    at_once: int,
) -> Any:
    """A FastAPI app of ours, so many episodes at once. An action is {"reply": a whole reply of the policy}; an
    observation has `text`, `system`, and `cut` where the episode ended by `max_turns`. `reset(seed=n)` plays scenario n.
    """
    try:
        from openenv.core.env_server import create_fastapi_app
        from openenv.core.env_server.interfaces import Environment
        from openenv.core.env_server.types import Action, Observation, State
    except ImportError:
        raise UsageError("as_openenv needs openenv, which is not installed. Run: pip install openenv") from None

    class Reply(Action):  # type: ignore[misc, unused-ignore]
        reply: str

    class Seen(Observation):  # type: ignore[misc, unused-ignore]
        text: str
        system: str
        cut: bool = False

    class TurnwiseEnvironment(Environment):  # type: ignore[misc, unused-ignore]
        SUPPORTS_CONCURRENT_SESSIONS: ClassVar[bool] = True

        def __init__(self) -> None:
            super().__init__()
            self._env = ToGymnasium(make_env, scenarios, max_turns=max_turns, malformed_allowance=malformed_allowance)
            self._system, self._state = "", State()

        def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Any:
            text, info = self._env.reset(seed=seed, options=options)
            self._system, self._state = info["system"], State(episode_id=episode_id)
            return Seen(text=text, system=self._system)

        def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
            text, reward, terminated, truncated, _info = self._env.step(action.reply)
            self._state.step_count += 1
            return Seen(text=text, system=self._system, cut=truncated, reward=reward, done=terminated or truncated)

        @property
        def state(self) -> Any:
            return self._state

    return create_fastapi_app(TurnwiseEnvironment, Reply, Seen, max_concurrent_envs=at_once)
