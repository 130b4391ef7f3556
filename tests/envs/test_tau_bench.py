"""tau_bench on its real tasks: what the original tools returned and left, replayed through our environment, and what
doing nothing wins.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
from shared_data import DATA, needs
from tau_small import acted, customer, said

from stages import envs
from stages.envs import tau_bench
from stages.envs.tau_bench import RESPOND, TauBench
from stages.envs.tau_data import Domain, Name, load_domain
from stages.envs.tau_database import Database
from stages.envs.tau_tools import TERMINATE
from stages.frame.types import Message, Scenario, Step, UsageError

TAU = DATA / "tau_bench"
RECORDED: list[tuple[Name, str]] = [("retail", "test"), ("retail", "validation"), ("airline", "test")]
# Indices of the tasks that an agent wins by doing nothing, of all 115 and all 50; which of them are here depends on the
# files.
NOTHING: dict[Name, set[int]] = {
    "retail": {10, 12, 25, 50, 57, 65, 106},
    "airline": {12, 13, 15, 17, 18, 21, 24, 29, *range(35, 43), 47, 48, 49},
}
Action = dict[str, Any]

pytestmark = needs(TAU)


@cache
def expected(name: Name, split: str) -> dict[str, dict[str, Any]]:
    file = TAU / name / f"expected_{'dev' if split == 'validation' else split}.jsonl"
    return {row["id"]: row for row in map(json.loads, file.read_text().splitlines())}


@cache
def all_of(name: Name, split: str) -> list[Scenario]:
    found = envs.scenarios("tau_bench", {"path": str(TAU), "domain": name}, split, None, 0)
    assert {s.id for s in found} == set(expected(name, split)) and len(found) == len(expected(name, split))
    return found


def domain(name: Name) -> Domain:
    return load_domain(str(TAU), name)


def make(name: Name, **options: Any) -> TauBench:
    env = tau_bench.make({"path": str(TAU), "domain": name} | options, customer)()
    assert isinstance(env, TauBench)
    return env


def play(env: TauBench, scenario: Scenario, actions: Sequence[Action]) -> Iterator[tuple[Action, Step]]:
    """The actions, then whatever must be said, then the end: a transfer where the actions have one, else a goodbye."""
    env.reset(scenario)
    for action in actions:
        if action["name"] != TERMINATE:
            yield action, env.step(acted(action["name"], **action["kwargs"]))
    told = " and ".join(scenario.data["outputs"]) or "nothing"
    transfer = next((action for action in actions if action["name"] == TERMINATE), None)
    if transfer is not None:
        env.step(acted(RESPOND, content=told))
        yield transfer, env.step(acted(TERMINATE, **transfer["kwargs"]))
    else:
        yield {"name": RESPOND}, env.step(acted(RESPOND, content=f"{told}, bye"))


def won(env: TauBench, scenario: Scenario, actions: Sequence[Action]) -> bool:
    *_, (_, last) = play(env, scenario, actions)
    assert last.terminated and not last.truncated and last.reward in (0.0, 1.0)
    return last.reward == 1


def after(name: Name, actions: Sequence[Action]) -> list[Database]:
    """The state before the first action, and after each one."""
    states = [Database(domain(name).base)]
    for action in actions:
        transfer = action["name"] == TERMINATE
        states.append(states[-1] if transfer else domain(name).call(states[-1], action["name"], action["kwargs"])[0])
    return states


def writes(name: Name, actions: Sequence[Action]) -> list[int]:
    """Which of the actions change the database."""
    states = after(name, actions)
    return [i for i in range(len(actions)) if states[i].changes() != states[i + 1].changes()]


@pytest.mark.parametrize(("name", "split"), RECORDED)
def test_the_ground_truth_gives_every_recorded_observation_and_hash_and_wins(name: Name, split: str) -> None:
    env = make(name)
    for scenario in all_of(name, split):
        recorded = expected(name, split)[scenario.id]
        env.reset(scenario)
        assert env._database.full_hash() == recorded["initial_hash"]
        observed = [
            (action["name"], step.messages[0]["content"])
            for action, step in play(env, scenario, scenario.data["actions"])
        ]
        # The environment's last state stays readable after the end.
        assert env._database.full_hash() == recorded["final_hash"]
        calls = [
            (call["name"], f"API output: {call['observation']}")
            for call in recorded["trace"]
            if call["name"] != TERMINATE
        ]
        assert [call for call in observed if call[0] not in (RESPOND, TERMINATE)] == calls
        assert won(env, scenario, scenario.data["actions"])


@pytest.mark.parametrize("name", ["retail", "airline"])
def test_called_as_tools_they_answer_in_openai_s_form(name: Name) -> None:
    env = make(name)
    for scenario in all_of(name, "test"):
        env.reset(scenario)
        for call in expected(name, "test")[scenario.id]["trace"][:2]:
            function = {"name": call["name"], "arguments": json.dumps(call["kwargs"])}
            second = {"id": "2", "type": "function", "function": {"name": "no_such_tool", "arguments": "{}"}}
            reply: Message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": function}, second],
            }
            (answer,) = env.step(reply).messages
            content = "Transfer successful" if call["name"] == TERMINATE else call["observation"]
            assert answer == {"role": "tool", "tool_call_id": "1", "name": call["name"], "content": content}


@pytest.mark.parametrize(("name", "split"), RECORDED)
def test_without_the_last_write_it_is_lost(name: Name, split: str) -> None:
    env, lost = make(name), 0
    for scenario in all_of(name, split):
        actions = scenario.data["actions"]
        if changing := writes(name, actions):
            assert not won(env, scenario, [action for i, action in enumerate(actions) if i != changing[-1]])
            lost += 1
    assert lost == sum(row["initial_hash"] != row["final_hash"] for row in expected(name, split).values()) > 10


@pytest.mark.parametrize("name", ["retail", "airline"])
def test_another_value_in_a_write_loses_and_so_does_another_type(name: Name) -> None:
    """In the last write, each number one larger or as a float, each text of an address or a passenger with a letter
    more.

    Not in earlier writes: a task may set an address twice.
    """
    env, tried = make(name), 0
    for scenario in all_of(name, "test"):
        actions = scenario.data["actions"]
        for i in writes(name, actions)[-1:]:
            for path, value in leaves(actions[i]["kwargs"]):
                number = isinstance(value, int | float)
                if not (number or path[-1] in ("address1", "address2", "city", "zip", "first_name", "dob")):
                    continue
                for other in (value + 1, float(value)) if number else (f"{value}x",):
                    if repr(other) != repr(value):
                        assert not won(env, scenario, changed(actions, i, path, other)), (scenario.id, path, other)
                        tried += 1
    assert tried > 20


def leaves(item: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    inner = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else None
    if inner is None:
        yield path, item
    for key, value in inner or ():
        yield from leaves(value, (*path, key))


def changed(actions: Sequence[Action], i: int, path: tuple[Any, ...], value: Any) -> list[Action]:
    found: list[Action] = copy.deepcopy(list(actions))
    place: Any = found[i]["kwargs"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return found


@pytest.mark.parametrize("name", ["retail", "airline"])
def test_doing_nothing_wins_exactly_the_listed_tasks(name: Name) -> None:
    env, scenarios = make(name), all_of(name, "test")
    indices = {
        row["id"]: row["index"] for row in map(json.loads, (TAU / name / "tasks_test.jsonl").read_text().splitlines())
    }
    ended = {}
    for scenario in scenarios:
        env.reset(scenario)
        last = env.step(said("Bye."))
        env.reset(scenario)
        assert env.step(acted(TERMINATE, summary="x")).reward == last.reward  # handing over at once wins the same
        ended[scenario.id] = last
    assert {indices[key] for key, last in ended.items() if last.reward} == NOTHING[name] & set(indices.values())
    recorded = expected(name, "test")
    assert all(
        last.info["needs_write"] == (recorded[key]["initial_hash"] != recorded[key]["final_hash"])
        for key, last in ended.items()
    )


@pytest.mark.parametrize("name", ["retail", "airline"])
def test_a_required_output_must_be_said_and_commas_are_taken_from_what_is_said_alone(name: Name) -> None:
    env, tried = make(name), 0
    for scenario in all_of(name, "test"):
        outputs = scenario.data["outputs"]
        if not outputs:
            continue
        calls = [acted(a["name"], **a["kwargs"]) for a in scenario.data["actions"] if a["name"] != TERMINATE]
        # "10" is said by who says "10.5": so is the benchmark, and such an output cannot be left out.
        alone = [
            o for o in outputs if len(o) > 1 and not any(o.lower() in other.lower() for other in outputs if other != o)
        ]
        commas = [",".join(output).upper() for output in outputs]
        cases: list[tuple[list[str], bool]] = [([], False), (commas, True), ([" ".join(commas)], True)]
        for output in alone:
            rest = [other for other in outputs if other != output]
            cases += [(rest, False), ([*rest, output[:1], output[1:]], False)]
        for told, right in cases:
            env.reset(scenario)
            for call in (*calls, *(acted(RESPOND, content=text) for text in told)):
                env.step(call)
            # A text beside a tool call is no message to the customer, though it names every output.
            env.step(
                {
                    "role": "assistant",
                    "content": f"Thought: {outputs}\nAction: "
                    + json.dumps({"name": "think", "arguments": {"thought": outputs}}),
                }
            )
            assert env.step(said("Bye.")).reward == right, (scenario.id, told)
            tried += 1
    assert tried >= 8


def test_every_training_task_is_won_by_its_ground_truth() -> None:
    env = make("retail", max_steps=40)
    scenarios = all_of("retail", "train")
    assert len(scenarios) == 500
    unchanged = 0
    for scenario in scenarios:
        assert won(env, scenario, scenario.data["actions"])
        recorded = expected("retail", "train")[scenario.id]
        assert env._database.full_hash() == recorded["final_hash"]
        assert bool(env._database.changes()) == (recorded["initial_hash"] != recorded["final_hash"])
        unchanged += not env._database.changes()
    assert unchanged == 5


@pytest.mark.parametrize("name", ["retail", "airline"])
def test_equal_changes_are_equal_hashes(name: Name) -> None:
    """After every write of every ground truth, the records that were touched tell what the hash of the whole tells."""
    pairs = set()
    for scenario in all_of(name, "test"):
        states = after(name, scenario.data["actions"])
        for i in writes(name, scenario.data["actions"]):
            pairs.add((tuple(sorted(states[i + 1].changes().items())), states[i + 1].full_hash()))
    assert len(pairs) > 40
    assert len({changes for changes, _ in pairs}) == len({full for _, full in pairs}) == len(pairs)


@pytest.mark.parametrize("name", ["retail", "airline"])
def test_the_full_hash_is_that_of_the_tables_written_out(name: Name) -> None:
    """The plain way: a copy of everything, made into tuples, sorted, printed and hashed. It shares no code with ours."""

    def nested(item: Any) -> Any:
        if isinstance(item, dict):
            return tuple((key, nested(item[key])) for key in sorted(item))
        return tuple(map(nested, item)) if isinstance(item, list) else item

    actions = max((s.data["actions"] for s in all_of(name, "test")), key=lambda actions: len(writes(name, actions)))
    state = after(name, actions)[-1]
    tables = copy.deepcopy({table: dict(records) for table, records in domain(name).base.tables.items()})
    for (table, key), _ in state.changes().items():
        record = state.get(table, key)
        assert record is not None
        tables[table][key] = record
    assert len(state.changes()) > 1
    assert state.full_hash() == hashlib.sha256(str(nested(tables)).encode()).hexdigest()


def test_the_shared_tables_are_never_changed() -> None:
    for name in ("retail", "airline"):
        before = Database(load_domain(str(TAU), name).base).full_hash()
        env = make(name)
        for scenario in all_of(name, "test")[:20]:
            list(play(env, scenario, scenario.data["actions"]))
        fresh = load_domain.__wrapped__(str(TAU), name)
        assert fresh.base.tables == domain(name).base.tables
        assert Database(fresh.base).full_hash() == before


def test_airline_has_no_training_tasks_and_says_so() -> None:
    with pytest.raises(UsageError, match=r"no split 'train' of airline.*Train on retail.*never on the test tasks"):
        envs.scenarios("tau_bench", {"path": str(TAU), "domain": "airline"}, "train", None, 0)
