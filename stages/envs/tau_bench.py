"""tau_bench: an agent serves a customer, by tools on a shop's or an airline's database and by talking, under a written
policy.

An action is one tool call, {"name": ..., "arguments": {...}}, or a message to the customer: "respond" with "content",
or any action that does not begin with "{". Reward, at the end, in {0, 1}: the database equals the one that the ground
truth's calls leave, and each required output is a part of one message to the customer (lower case, commas taken out of
the message). The episode ends when the customer says ###STOP###, at a transfer to a human agent, and after `max_steps`
actions: then with reward 0, whatever the database. That limit is a rule of the benchmark, hence terminated, not
truncated.
An agent that does nothing wins 19 of airline's 50 test tasks and 7 of retail's 115: `describe` gives evaluate that
floor, to stand beside a win rate.
Source: sierra-research/tau-bench 59a200c (MIT); arXiv 2406.12045. Departures: a failed call changes nothing
(stages/envs/tau_tools.py), a failed customer is no reward of 0 but SimulatorError, JSON that cannot be read is
malformed and not sent to the customer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import Field

from stages.envs.splits import check_split, draw
from stages.envs.tau_data import Domain, Name, load_domain, split_tasks
from stages.envs.tau_database import Changes, Database
from stages.envs.tau_tools import TERMINATE, check_call
from stages.envs.tau_user import STOP, UserPrompt, answer, conversation
from stages.frame.contract import Config, DataPath
from stages.frame.react import parse_react
from stages.frame.types import Ask, Env, Episode, Malformed, Message, Scenario, Step, UsageError

RESPOND = "respond"
_FORM = '{"name": "<tool>", "arguments": {<arguments>}}'

_SYSTEM = """{policy}

# Available tools
{tools}

# Instruction
You are the agent. Help the user with the tools above, according to the policy above. At each step write one thought and one action:
Thought: <one line: what you know and what to do next>
Action: {form}
The action must be valid JSON. What a tool gives back follows as "API output: ...". To say something to the user, use the name "{respond}":
Action: {{"name": "{respond}", "arguments": {{"content": "<your message>"}}}}
Do not use made-up or placeholder arguments. Try to be helpful and always follow the policy."""


class Options(Config):
    """Which data, and who plays the customer how."""

    path: DataPath = Field(
        "", description="Folder that holds retail/ and airline/; required. [ours; data: sierra-research/tau-bench]"
    )
    domain: Name = Field("retail", description="The shop, or the airline, which has test tasks only. [paper: both]")
    user_prompt: UserPrompt = Field(
        "original",
        description="What the simulated user is told: the benchmark's words, or also to wait until the agent has done it. [original; patient: ours]",
    )
    user_temperature: float = Field(
        1.0,
        ge=0,
        description="Sampling temperature of the simulated user. [tau-bench: sends none, so the provider's own, 1 at OpenAI's]",
    )
    max_steps: int = Field(
        30, ge=1, description="Actions, tool calls included, after which an episode is lost. [tau-bench]"
    )
    validation_tasks: int = Field(
        0,
        ge=0,
        description="Training tasks that are held out for validation, beside those of the benchmark's dev split. [ours]",
    )
    split_seed: int = Field(0, description="Another number holds out other training tasks. [ours]")


OPTIONS = Options


class TauBench:
    """One customer."""

    def __init__(self, options: Options, domain: Domain, ask: Ask) -> None:
        tools = "\n".join(_rendered(definition) for definition in domain.definitions)
        self.system = _SYSTEM.format(policy=domain.policy.strip(), tools=tools, form=_FORM, respond=RESPOND)
        self.tools: Sequence[Mapping[str, Any]] = domain.definitions
        self._options, self._domain, self._ask = options, domain, ask
        self._task: Mapping[str, Any] | None = None
        self._database = Database(domain.base)
        self._talk: list[Message] = []  # as the customer sees it
        self._steps = self._seed = 0

    def reset(self, scenario: Scenario) -> tuple[Message, ...]:
        """The customer's first line. Raises SimulatorError."""
        self._task, talk = None, conversation(str(scenario.data["instruction"]), self._options.user_prompt)
        self._seed = scenario.seed
        first = self._heard(talk)
        self._task, self._database, self._steps = scenario.data, Database(self._domain.base), 0
        return ({"role": "user", "content": first},)

    def step(self, message: Message) -> Step:
        """Make a call or say something. Raises Malformed, SimulatorError, and RuntimeError after the end."""
        if self._task is None:
            raise RuntimeError("tau_bench: there is no customer, or they are gone; call reset first")
        name, arguments = read_action(message)
        if name == RESPOND:
            observation, over = self._say(arguments["content"])
        else:
            self._database, text = self._domain.call(self._database, name, arguments)
            observation, over = _observed(message, text), name == TERMINATE
        self._steps += 1
        if not over and self._steps < self._options.max_steps:
            return Step((observation,))
        return self._end(self._task, observation, over, transferred=name == TERMINATE)

    def _say(self, text: str) -> tuple[Message, bool]:
        said = self._heard([*self._talk, {"role": "user", "content": text}])
        return {"role": "user", "content": said}, STOP in said

    def _heard(self, talk: list[Message]) -> str:
        """The customer's next line, which is kept with `talk`. Raises SimulatorError, and keeps nothing then."""
        said = answer(self._ask, talk, temperature=self._options.user_temperature, seed=self._seed)
        self._talk = [*talk, {"role": "assistant", "content": said}]
        return said

    def _end(self, task: Mapping[str, Any], observation: Message, over: bool, *, transferred: bool) -> Step:
        wanted, found = self._domain.solution(task["actions"]), self._database.changes()
        # The customer's first message is not the agent's; of the rest the agent's are in the role of the customer's
        # "user".
        told = [str(message["content"]) for message in self._talk[2:] if message["role"] == "user"]
        database, outputs = found == wanted, says_all(task["outputs"], told)
        info = {
            "needs_write": bool(wanted),
            "unchanged": not found,
            "transferred": transferred,
            "database": database,
            "outputs": outputs,
        }
        self._task = None
        return Step((observation,), float(over and database and outputs), terminated=True, info=info)


def says_all(outputs: Sequence[str], told: Sequence[str]) -> bool:
    """Each output is a part of one message. Commas are taken out of the message only; "10" is found in "$1,105.10",
    too: so is the benchmark.
    """
    plain = [text.lower().replace(",", "") for text in told]
    return all(any(output.lower() in text for text in plain) for output in outputs)


def read_action(message: Message) -> tuple[str, dict[str, Any]]:
    """(name, arguments) of a reply: of its first tool call where it has the key "tool_calls", else of its ReAct action.
    Raises Malformed.

    A reply with that key and no call in it is a message to the customer, as OpenAI's form has it.
    """
    if "tool_calls" not in message:
        return parse_action(parse_react(str(message.get("content") or ""))[1])
    if not message["tool_calls"]:
        return _checked(RESPOND, {"content": message.get("content")})
    try:
        function = message["tool_calls"][0]["function"]
        name, arguments = function["name"], function["arguments"]
    except (LookupError, TypeError):
        raise Malformed("the tool call has no function with name and arguments") from None
    return _checked(name, _json(arguments) if isinstance(arguments, str) else arguments)


def parse_action(action: str) -> tuple[str, dict[str, Any]]:
    """(name, arguments) of an action's text. Only what begins with "{" means to be a call; the rest is said to the
    customer. Raises Malformed.
    """
    if not action.startswith("{"):
        return RESPOND, {"content": action}
    found = _json(action)
    if "name" not in found or "arguments" not in found:
        raise Malformed(f"the action lacks {'name' if 'name' not in found else 'arguments'}; wanted {_FORM}")
    return _checked(found["name"], found["arguments"])


def readable(options: Mapping[str, Any], state: Sequence[Message], reply: str) -> None:
    """Raises Malformed where `step` would, and for a call that is not of its tool's declared form
    (`tau_tools.check_call`).

    Such a call `step` answers with an error, as the benchmark does, and the conversation goes on; but nobody should
    learn to make it.
    """
    checked = Options.model_validate(dict(options))
    name, arguments = read_action({"content": reply})
    if name != RESPOND:
        check_call(load_domain(checked.path, checked.domain).definitions, name, arguments)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise Malformed("the JSON of the action is nested too deeply") from None
    except ValueError as error:  # no JSON, or a number of more digits than Python reads
        raise Malformed(f"the action is not valid JSON: {error}; wanted {_FORM}") from None


def _checked(name: Any, arguments: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(name, str):
        raise Malformed(f"the name of a tool is a text; wanted {_FORM}")
    if not isinstance(arguments, dict):
        raise Malformed(f"the arguments of {name} are no JSON object; wanted {_FORM}")
    content = arguments.get("content")
    if name == RESPOND and not (isinstance(content, str) and content.strip()):
        raise Malformed(f"{RESPOND} says nothing; wanted {{'content': a text}}")
    return name, arguments


def _observed(message: Message, text: str) -> Message:
    if "tool_calls" not in message:
        return {"role": "user", "content": f"API output: {text}"}
    first = message["tool_calls"][0]
    return {"role": "tool", "tool_call_id": first.get("id", ""), "name": first["function"]["name"], "content": text}


def _rendered(definition: Mapping[str, Any]) -> str:
    function = definition["function"]
    return f"{function['name']}: {function.get('description', '')}\n  arguments: {json.dumps(function.get('parameters', {}))}"


def make(options: Mapping[str, Any], ask: Ask | None) -> Callable[[], Env]:
    """Environments over one loaded domain. Raises UsageError where data or a simulated user is missing."""
    checked = Options.model_validate(dict(options))
    domain = load_domain(checked.path, checked.domain)
    if ask is None:
        raise UsageError("task.oracle: no rule can play the user of tau_bench. Set task.oracle to engine or openai.")
    return lambda: TauBench(checked, domain, ask)


def scenarios(options: Mapping[str, Any], split: str, n: int | None, seed: int) -> list[Scenario]:
    """Tasks of an official split in an order fixed by the seed; train begins anew where n is larger. Validation is
    retail's dev, with the training tasks that `validation_tasks` holds out.
    """
    checked = Options.model_validate(dict(options))
    check_split("tau_bench", split)
    dealt = split_tasks(checked.path, checked.domain, split, checked.validation_tasks, checked.split_seed)
    tasks = draw(dealt, split, n, seed)
    return [
        Scenario("tau_bench", split, task["id"], {key: task[key] for key in ("instruction", "actions", "outputs")})
        for task in tasks
    ]


def describe(options: Mapping[str, Any], episodes: Sequence[Episode]) -> dict[str, float]:
    """What a win rate on these episodes is worth; a share of nothing is left out. `stages/evaluate.py` reports it.

    floor: scenarios that an agent wins by doing nothing. needs_write: those whose ground truth changes the database.
    win_needs_write, win_needs_none: wins among those and among the others. transferred: episodes that were handed to a
    human agent. unchanged: episodes that left the database as it was; unchanged_won: the same among wins.
    stopped_short: lost episodes in which the user ended the conversation while writes were missing and none was wrong;
    the user may have left too early, or the agent told it that all was done.
    """
    checked = Options.model_validate(dict(options))
    domain = load_domain(checked.path, checked.domain)
    seen = [_seen(domain, episode) for episode in episodes]
    shares = {
        "floor": [not wanted and not e.scenario.data["outputs"] for e, wanted, _, _ in seen],
        "needs_write": [bool(wanted) for _, wanted, _, _ in seen],
        "win_needs_write": [e.won for e, wanted, _, _ in seen if wanted],
        "win_needs_none": [e.won for e, wanted, _, _ in seen if not wanted],
        "transferred": [name == TERMINATE for _, _, _, name in seen],
        "unchanged": [not found for _, _, found, _ in seen],
        "unchanged_won": [not found for e, _, found, _ in seen if e.won],
        "stopped_short": [
            STOP in str(e.messages[-1]["content"]) and name == RESPOND and found.items() < wanted.items()
            for e, wanted, found, name in seen
            if e.total_reward < 1
        ],
    }
    return {name: sum(values) / len(values) for name, values in shares.items() if values}


def _seen(domain: Domain, episode: Episode) -> tuple[Episode, Changes, Changes, str]:
    """(episode, changes wanted, changes made, name of the last action), by making its calls again."""
    database, name = Database(domain.base), ""
    for message in episode.messages:
        if message["role"] != "assistant":
            continue
        try:
            name, arguments = read_action(message)
        except Malformed:
            continue  # it changed nothing
        if name != RESPOND:
            database, _ = domain.call(database, name, arguments)
    return episode, domain.solution(episode.scenario.data["actions"]), database.changes(), name
