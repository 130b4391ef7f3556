"""A shop and an airline in miniature, made up here, in the form of tau_bench's data: for tests that need no real data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.envs.tau_data import TOOLS, Name
from stages.envs.tau_user import STOP
from stages.frame.types import Message


def item(item_id: str, product_id: str, price: float) -> dict[str, Any]:
    return {"name": "Mug", "product_id": product_id, "item_id": item_id, "price": price, "options": {"color": item_id}}


def order(order_id: str, status: str, items: list[dict[str, Any]], method: str) -> dict[str, Any]:
    paid = {
        "transaction_type": "payment",
        "amount": round(sum(i["price"] for i in items), 2),
        "payment_method_id": method,
    }
    address = {"address1": "1 Main St", "address2": "", "city": "Ulm", "country": "USA", "state": "TX", "zip": "10001"}
    return {
        "order_id": order_id,
        "user_id": "ann_1",
        "address": address,
        "items": items,
        "status": status,
        "payment_history": [paid],
    }


def person(first: str, last: str, methods: dict[str, Any], **more: Any) -> dict[str, Any]:
    name, address = {"first_name": first, "last_name": last}, {"address1": "1 Main St", "zip": "10001"}
    return {"name": name, "address": address, "email": f"{first}.{last}@example.com", "payment_methods": methods} | more


MUG = {
    "name": "Mug",
    "product_id": "p1",
    "variants": {
        name: {"item_id": name, "options": {"color": name}, "available": name != "gone", "price": price}
        for name, price in (("red", 10.1), ("blue", 12.3), ("gone", 9.0))
    },
}
SHOP: dict[str, Any] = {
    "orders": {
        "#W1": order("#W1", "delivered", [item("red", "p1", 10.1), item("red", "p1", 10.1)], "card_1"),
        "#W2": order("#W2", "pending", [item("red", "p1", 10.1), item("blue", "p1", 12.3)], "gift_card_1"),
    },
    "products": {"p1": MUG},
    "users": {
        "ann_1": person(
            "Ann",
            "Lee",
            {
                "card_1": {"source": "credit_card", "id": "card_1"},
                "gift_card_1": {"source": "gift_card", "balance": 20.0, "id": "gift_card_1"},
            },
            orders=["#W1", "#W2"],
        ),
        "bob_2": person("Bob", "Lee", {"card_2": {"source": "credit_card", "id": "card_2"}}, orders=[]),
    },
}


def flight(number: str, origin: str, destination: str, departure: str, arrival: str, price: int) -> dict[str, Any]:
    day = {
        "status": "available",
        "available_seats": dict.fromkeys(("basic_economy", "economy", "business"), 2),
        "prices": {"basic_economy": price, "economy": 2 * price, "business": 3 * price},
    }
    return {
        "flight_number": number,
        "origin": origin,
        "destination": destination,
        "scheduled_departure_time_est": departure,
        "scheduled_arrival_time_est": arrival,
        "dates": {
            "2024-05-16": day,
            "2024-05-17": day | {"prices": dict.fromkeys(day["prices"], 7)},
            "2024-05-18": {"status": "delayed"},
        },
    }


AIRLINE: dict[str, Any] = {
    "flights": {
        "HAT001": flight("HAT001", "SFO", "JFK", "06:00:00", "14:00:00", 100),
        "HAT002": flight("HAT002", "JFK", "BOS", "15:00:00", "16:00:00", 50),
        "HAT003": flight("HAT003", "SFO", "JFK", "22:00:00", "02:00:00+1", 60),
    },
    "reservations": {
        "ABC123": {
            "reservation_id": "ABC123",
            "user_id": "ann_1",
            "origin": "SFO",
            "destination": "JFK",
            "flight_type": "one_way",
            "cabin": "economy",
            "flights": [
                {"origin": "SFO", "destination": "JFK", "flight_number": "HAT001", "date": "2024-05-16", "price": 180}
            ],
            "passengers": [{"first_name": "Ann", "last_name": "Lee", "dob": "1990-01-01"}],
            "payment_history": [{"payment_id": "card_1", "amount": 180}],
            "created_at": "2024-05-01T00:00:00",
            "total_baggages": 1,
            "nonfree_baggages": 0,
            "insurance": "no",
        }
    },
    "users": {
        "ann_1": person(
            "Ann",
            "Lee",
            {
                "card_1": {"source": "credit_card", "id": "card_1"},
                "gift_card_1": {"source": "gift_card", "amount": 100, "id": "gift_card_1"},
                "certificate_1": {"source": "certificate", "amount": 100, "id": "certificate_1"},
            },
            reservations=["ABC123"],
        )
    },
}
DATA: dict[Name, dict[str, Any]] = {"retail": SHOP, "airline": AIRLINE}

RETURN: dict[str, Any] = {
    "name": "return_delivered_order_items",
    "kwargs": {"order_id": "#W1", "item_ids": ["red"], "payment_method_id": "card_1"},
}
CANCEL: dict[str, Any] = {"name": "cancel_pending_order", "kwargs": {"order_id": "#W2", "reason": "no longer needed"}}


def task(name: str, instruction: str, actions: Sequence[dict[str, Any]], outputs: Sequence[str] = ()) -> dict[str, Any]:
    return {"id": name, "instruction": instruction, "actions": list(actions), "outputs": list(outputs)}


TASKS: dict[str, list[dict[str, Any]]] = {
    "retail/tasks_train.jsonl": [
        task("train-0", "You are Ann Lee. Return a red mug.", [RETURN]),
        task("train-1", "Cancel #W2.", [CANCEL]),
    ],
    "retail/tasks_dev.jsonl": [task("dev-0", "Return a red mug and cancel #W2.", [RETURN, CANCEL])],
    "retail/tasks_test.jsonl": [
        task("test-0", "Ask what a blue mug costs.", [], ["12.3"]),
        task("test-1", "Ask for a discount.", []),
    ],
    "airline/tasks_test.jsonl": [
        task("air-0", "Cancel ABC123.", [{"name": "cancel_reservation", "kwargs": {"reservation_id": "ABC123"}}])
    ],
}


def write(folder: Path) -> str:
    """The folder that `task.options.path` names."""
    for name, tables in DATA.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for table, records in tables.items():
            (folder / name / f"{table}.json").write_text(json.dumps(records))
        tools = [
            {"type": "function", "function": {"name": tool, "description": f"Do {tool}.", "parameters": {}}}
            for tool in TOOLS[name]
        ]
        (folder / name / "tools.json").write_text(json.dumps(tools))
        (folder / name / "policy.md").write_text(f"# {name}\nBe {{kind}}.\n")
    for file, rows in TASKS.items():
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def customer(messages: Sequence[Message], **sampling: Any) -> str:
    """A customer by rule: says what it wants, goes on whatever it hears, and leaves at "bye"."""
    if len(messages) == 2:
        return "Hello, I need help."
    return STOP if "bye" in str(messages[-1]["content"]).lower() else "Yes."


def said(content: str) -> Message:
    return {"role": "assistant", "content": f"Thought: because.\nAction: {content}"}


def acted(name: str, **arguments: Any) -> Message:
    return said(json.dumps({"name": name, "arguments": arguments}))
