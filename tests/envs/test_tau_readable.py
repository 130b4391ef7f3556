"""Which calls of tau_bench somebody should learn to make: those of the tools' declared form."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tau_small
from shared_data import DATA, needs
from tau_small import said

from stages import envs
from stages.envs.tau_data import load_domain, load_tasks
from stages.envs.tau_tools import check_call
from stages.frame.types import Malformed

RETURN = {
    "type": "object",
    "properties": {
        "order_id": {"type": "string"},
        "item_ids": {"type": "array", "items": {"type": "string"}},
        "n": {"type": "integer"},
    },
    "required": ["order_id", "item_ids"],
}
DEFINITIONS = [
    {"function": {"name": "give_back", "parameters": RETURN}},
    {"function": {"name": "list_all", "parameters": {"properties": {}}}},
]


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [
        ("give_back", {"order_id": "#W1", "item_ids": ["1"]}, ""),
        ("give_back", {"order_id": "#W1", "item_ids": ["1"], "n": 2}, ""),
        ("list_all", {}, ""),
        ("give_back", {"order_id": "#W1"}, "'item_ids' is a required property"),
        ("give_back", {"order_id": 1, "item_ids": ["1"]}, "1 is not of type 'string'"),
        ("give_back", {"order_id": "#W1", "item_ids": "1"}, "'1' is not of type 'array'"),
        ("give_back", {"order_id": "#W1", "item_ids": [1]}, "1 is not of type 'string'"),
        ("give_back", {"order_id": "#W1", "item_ids": [], "n": True}, "True is not of type 'integer'"),
        (
            "give_back",
            {"order_id": "#W1", "item_ids": [], "why": "x"},
            "has no argument 'why'; wanted order_id, item_ids, n",
        ),
        ("list_all", {"order_id": "#W1"}, "has no argument 'order_id'; wanted none"),
        ("return_items", {}, "there is no tool 'return_items'; wanted one of give_back, list_all"),
    ],
)
def test_a_call_is_of_the_declared_form_or_the_complaint_says_why(
    name: str, arguments: dict[str, Any], complaint: str
) -> None:
    if not complaint:
        check_call(DEFINITIONS, name, arguments)
        return
    with pytest.raises(Malformed) as caught:
        check_call(DEFINITIONS, name, arguments)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("action", "read"),
    [
        ("Hello.", True),
        ('{"name": "respond", "arguments": {"content": "Hello."}}', True),
        ('{"name": "think", "arguments": {"thought": "hm"}}', True),
        ('{"name": "respond", "arguments": {}}', False),
        ('{"name": "return_items"}', False),
        ('{"name": "return_items", "arguments": {}}', False),
        ('{"name": "think", "arguments": {"thought": "hm"}', False),
    ],
)
def test_broken_json_and_unknown_tools_are_refused(tmp_path: Any, action: str, read: bool) -> None:
    options = {"path": tau_small.write(tmp_path)}
    reply = str(said(action)["content"])
    if read:
        envs.check_readable("tau_bench", options, [], reply)
        return
    with pytest.raises(Malformed):
        envs.check_readable("tau_bench", options, [], reply)


@needs(DATA / "tau_bench")
@pytest.mark.parametrize(("domain", "splits"), [("retail", ("train", "validation", "test")), ("airline", ("test",))])
def test_every_call_of_every_ground_truth_is_of_the_declared_form(domain: Any, splits: tuple[str, ...]) -> None:
    """1,474 calls; a check that refused one of them would keep the policy from a win."""
    path = str(DATA / "tau_bench")
    definitions = load_domain(path, domain).definitions
    calls = [action for split in splits for task in load_tasks(path, domain, split) for action in task["actions"]]
    assert len(calls) > 100
    for action in calls:
        check_call(definitions, action["name"], json.loads(json.dumps(action["kwargs"])))
