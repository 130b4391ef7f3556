"""verifiers, in its classic form (0.1.5 to 0.1.7): a MultiTurnEnv as one of ours, and one of ours as a MultiTurnEnv.

    FromVerifiers   its setup_state, is_completed, env_response and reward functions are played as an Env
    ToVerifiers     the same methods over one of ours; `as_verifiers` makes it a verifiers.MultiTurnEnv

It uses the methods only, as verifiers' own rollout calls them (verifiers/envs/multiturn_env.py of 0.1.5 and 0.1.7).
Only `as_verifiers` imports the package. From 0.1.8 on the loop differs and is not supported. Since 0.4 there is no such
class: see adapters/verifiers_v1.py. [ours]

Two things differ, so that a failure is never a reward. A reward function that raises is an error
(adapters/verifiers_rubric.py). The turn limit is kept apart from the end (verifiers knows only one end).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from stages.adapters.play import Play, scenario_of, scenario_text
from stages.adapters.tool_text import observed, spoken, with_tools
from stages.adapters.verifiers_rubric import check_rubric, limit_by_threads, reward_of
from stages.frame.loops import event_loop
from stages.frame.types import Env, Message, Scenario, Step, UsageError

State = dict[str, Any]


class FromVerifiers:
    """One running episode. A scenario's data is a row of its data set: `prompt` (chat messages), and `answer`, `task`,
    `info`, `example_id` where there are any.

    env: a MultiTurnEnv of chat messages; it is only called, so many episodes may share it. Its tools are told in the
    system message and called by a ReAct action (adapters/tool_text.py). Its reward comes at the end, as there. An
    episode that ends by env.max_turns alone is truncated; set task.max_turns above it, since an episode that ends by
    task.max_turns is not scored. Raises UsageError for a rubric that scores groups.
    """

    def __init__(self, env: Any) -> None:
        check_rubric(env.rubric)
        limit_by_threads()
        self.system = ""
        self.tools: Sequence[Mapping[str, Any]] = ()
        self._env = env
        self._state: State | None = None

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        """The prompt without its system message, which becomes `system`. Raises whatever `env` raises."""
        row = scenario.data
        prompt = [dict(message) for message in row["prompt"]]
        info = dict(row.get("info") or {})
        state: State = {
            "id": 0,
            "prompt": prompt,
            "completion": [],
            "answer": row.get("answer", ""),
            "task": row.get("task", "default"),
            "info": info,
            "example_id": row.get("example_id", 0),
            "responses": [],
            "turn": 0,
            "timing": {"generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0},
        }
        self._state = None
        state = _wait(self._env.setup_state(state))
        if self._is_completed(state):
            raise RuntimeError("the environment is over before the first reply")
        self._state = state
        # As there: what a row offers is called; the environment writes its own tools into its rows.
        self.tools = tuple(info.get("oai_tools") or getattr(self._env, "oai_tools", None) or ())
        said = "\n\n".join(str(message["content"]) for message in prompt if message["role"] == "system")
        self.system = with_tools(said, self.tools)
        return tuple(observed(message) for message in prompt if message["role"] != "system")

    def step(self, message: Message) -> Step:
        """Pass on the reply. Raises Malformed for an unreadable tool call, RuntimeError after the end,
        BrokenEnvironment for a reward that is not finite, and whatever `env` raises.
        """
        state = self._state
        if state is None:
            raise RuntimeError("the episode has not begun, or is over: call reset first")
        reply = spoken(str(message.get("content") or ""), self.tools, f"call_{state['turn']}")
        self._state = None  # so that an error leaves no episode to go on with
        state["responses"].append(_response(reply))
        if "tool_calls" in reply:
            reply["tool_calls"] = [_as_handed_over(call) for call in reply["tool_calls"]]
        state["completion"] = [*state["completion"], reply]
        state["turn"] += 1
        answer: list[Message] = []
        if not self._is_completed(state):
            answer, state = _wait(self._env.env_response(self._messages(state), state))
            state["completion"] = [*state["completion"], *answer]
            if not self._is_completed(state):
                self._state = state
                return Step(tuple(observed(one) for one in answer))
        truncated = self._only_out_of_turns(state)
        told = tuple(observed(one) for one in answer) or ({"role": "user", "content": "The end."},)
        return Step(told, self._reward(state), terminated=not truncated, truncated=truncated)

    def _messages(self, state: State) -> list[Message]:
        asked = getattr(self._env, "get_context_messages", None)  # from 0.1.6 on
        return list(_wait(asked(state)) if asked else [*state["prompt"], *state["completion"]])

    def _is_completed(self, state: State) -> bool:
        return bool(_wait(self._env.is_completed(self._messages(state), state)))

    def _only_out_of_turns(self, state: State) -> bool:
        """Whether it would go on if there were more turns: asked again as in its first turn."""
        reached: Callable[[State], Any] | None = getattr(self._env, "max_turns_reached", None)
        return reached is not None and bool(_wait(reached(state))) and not self._is_completed({**state, "turn": 0})

    def _reward(self, state: State) -> float:
        known = {name: state[name] for name in ("prompt", "completion", "answer", "task", "info", "example_id")}
        return float(_wait(reward_of(self._env.rubric, {**known, "state": state})))


def _response(reply: Message) -> Any:
    """The completion of a model that said this, as OpenAI's client gives it."""
    from openai.types.chat import ChatCompletion

    ended = "tool_calls" if "tool_calls" in reply else "stop"
    choice = {"index": 0, "message": reply, "finish_reason": ended, "logprobs": None}
    given = {"id": "turnwise", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
    return ChatCompletion.model_validate(given)


def _as_handed_over(call: Mapping[str, Any]) -> Any:
    """A tool call as the library puts it into a message: an object of OpenAI's client up to 0.1.6, a dict from 0.1.7 on."""
    try:
        old = tuple(map(int, version("verifiers").split(".")[:3])) < (0, 1, 7)
    except PackageNotFoundError:  # an object of the same methods
        old = False
    if not old:
        return dict(call)
    from openai.types.chat import ChatCompletionMessageToolCall

    return ChatCompletionMessageToolCall.model_validate(call)


class ToVerifiers:
    """Our environment with the methods that verifiers calls. max_turns: replies after which an episode is truncated.
    verifiers' own limit must be off: it ends an episode before the last reply is read. state["turnwise"] is the episode
    (adapters/play.py), with terminated and truncated.
    """

    def __init__(
        self,
        make_env: Callable[[], Env],
        scenarios: Sequence[Scenario],
        *,
        max_turns: int,
        malformed_allowance: int = 1,
    ) -> None:
        self._make_env, self._scenarios = make_env, scenarios
        self._max_turns, self._allowance = max_turns, malformed_allowance

    def rows(self) -> list[dict[str, Any]]:
        """The data set: prompt, answer, task, info. Every scenario is begun once, for its first observation."""
        return [
            {
                "prompt": _prompt(self._begin(one)),
                "answer": "",
                "task": one.task,
                "info": {"scenario": scenario_text(one)},
            }
            for one in self._scenarios
        ]

    def _begin(self, scenario: Scenario) -> Play:
        return Play(self._make_env, scenario, max_turns=self._max_turns, malformed_allowance=self._allowance)

    async def setup_state(self, state: State, **_: Any) -> State:
        """Begin the episode. Raises RuntimeError where it begins otherwise than its row says."""
        play = await asyncio.to_thread(self._begin, scenario_of(state["info"]["scenario"]))
        if _prompt(play) != [{"role": message["role"], "content": message["content"]} for message in state["prompt"]]:
            raise RuntimeError("the environment begins differently each time, which a data set of prompts cannot hold")
        return {**state, "turnwise": play}

    async def is_completed(self, messages: Sequence[Message], state: State, **_: Any) -> bool:
        return bool(state["turnwise"].over)

    async def env_response(self, messages: Sequence[Message], state: State, **_: Any) -> tuple[list[Message], State]:
        """What the environment answers to the last message. Raises whatever it raises, which ends the generation."""
        # In a thread, since an environment may wait for an LLM, and other rollouts go on meanwhile.
        text = await asyncio.to_thread(state["turnwise"].act, str(messages[-1].get("content") or ""))
        return [{"role": "user", "content": text}], state

    def reward(self, state: State) -> float:
        """The one reward function: the sum of the episode's rewards."""
        return float(state["turnwise"].reward())


def _prompt(play: Play) -> list[Message]:
    return [{"role": "system", "content": play.system}, {"role": "user", "content": play.text}]


def as_verifiers(ours: ToVerifiers, **settings: Any) -> Any:
    """A verifiers.MultiTurnEnv around it; `settings` go to its constructor. Raises UsageError where verifiers is not
    there, or not in its classic form.
    """
    try:
        import verifiers
        from datasets import Dataset
    except ImportError:
        raise UsageError(
            "as_verifiers needs verifiers in its classic form. Run: pip install 'verifiers>=0.1.5,<0.1.8'"
        ) from None
    base = getattr(verifiers, "MultiTurnEnv", None)
    if base is None or "messages" not in inspect.signature(base.is_completed).parameters:
        raise UsageError(
            "as_verifiers needs verifiers 0.1.5 to 0.1.7, found another one. Run: pip install 'verifiers>=0.1.5,<0.1.8'"
        )
    methods = {name: staticmethod(getattr(ours, name)) for name in ("setup_state", "is_completed", "env_response")}
    made = type("TurnwiseEnv", (base,), methods)
    return made(
        dataset=Dataset.from_list(ours.rows()), rubric=verifiers.Rubric(funcs=[ours.reward]), max_turns=-1, **settings
    )


def _wait(value: Any) -> Any:
    """The value, awaited where it must be, on a loop of this module: an environment keeps to one."""
    if not inspect.isawaitable(value):
        return value

    async def awaited() -> Any:
        return await value

    future = asyncio.run_coroutine_threadsafe(awaited(), event_loop("verifiers"))
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
