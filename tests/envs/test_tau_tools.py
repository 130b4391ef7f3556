"""tau_bench's tools and database on a miniature: oddities that no recorded task shows, evil arguments, and that a call
is whole or nothing.
"""

from __future__ import annotations

import copy
import inspect
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tau_small import AIRLINE, CANCEL, DATA, RETURN, SHOP

from stages.envs.tau_data import TOOLS, Name
from stages.envs.tau_database import Base, Database, canonical
from stages.envs.tau_tools import TERMINATE, call, misfit

BASES: dict[Name, Base] = {name: Base(copy.deepcopy(tables)) for name, tables in DATA.items()}
ANN = {"first_name": "Ann", "last_name": "Lee", "dob": "1990-01-01"}


def act(database: Database, name: str, /, **arguments: Any) -> tuple[Database, str]:
    """In the domain whose tables the database has."""
    domain: Name = "retail" if "orders" in database._base.tables else "airline"
    return call(TOOLS[domain], database, name, arguments)


def shop() -> Database:
    return Database(BASES["retail"])


def airline() -> Database:
    return Database(BASES["airline"])


def test_the_tools_are_those_of_the_benchmark() -> None:
    assert (len(TOOLS["retail"]), len(TOOLS["airline"])) == (16, 14)
    for tools in TOOLS.values():
        assert tools[TERMINATE](None, summary="x") == "Transfer successful"
        assert tools["think"](None, thought="x") == ""


def test_an_unknown_tool_and_wrong_arguments_are_told_and_change_nothing() -> None:
    database = shop()
    for name, arguments, told in (
        ("fly", {}, "Unknown action fly"),
        ("cancel_pending_order", {"order_id": "#W2"}, "Error: CancelPendingOrder.invoke() missing 1 required positional argument: 'reason'"),
        ("cancel_pending_order", CANCEL["kwargs"] | {"why": "so"}, "Error: CancelPendingOrder.invoke() got an unexpected keyword argument 'why'"),
        ("cancel_pending_order", CANCEL["kwargs"] | {"database": {}}, "Error: CancelPendingOrder.invoke() got an unexpected keyword argument 'database'"),
        ("cancel_pending_order", CANCEL["kwargs"] | {"order_id": ["#W2"]}, "Error: unhashable type: 'list'"),
        ("cancel_pending_order", CANCEL["kwargs"] | {"order_id": "W2"}, "Error: order not found"),
        ("cancel_pending_order", CANCEL["kwargs"] | {"reason": "bored"}, "Error: invalid reason"),
        ("cancel_pending_order", CANCEL["kwargs"] | {"order_id": "#W1"}, "Error: non-pending order cannot be cancelled"),
        ("return_delivered_order_items", RETURN["kwargs"] | {"item_ids": ["red"] * 3}, "Error: some item not found"),
        ("return_delivered_order_items", RETURN["kwargs"] | {"item_ids": 5}, "Error: 'int' object is not iterable"),
        ("find_user_id_by_email", {"email": None}, "Error: 'NoneType' object has no attribute 'lower'"),
    ):  # fmt: skip
        after, observation = act(database, name, **arguments)
        assert observation == told
        assert after.changes() == {}


def original(name: str, parameters: list[str]) -> Callable[..., str]:
    """A function called and declared as tau-bench's own is, for Python itself to refuse what does not fit."""
    scope: dict[str, Any] = {}
    title = "".join(word.capitalize() for word in name.split("_"))
    exec(f"class {title}:\n    @staticmethod\n    def invoke(data, {', '.join(parameters)}):\n        return ''", scope)
    made: Callable[..., str] = scope[title].invoke
    return made


@pytest.mark.parametrize("domain", ["retail", "airline"])
def test_arguments_that_do_not_fit_are_refused_in_python_s_words_for_the_original(domain: Name) -> None:
    rng, refused = random.Random(0), 0
    for name, tool in TOOLS[domain].items():
        parameters = list(inspect.signature(tool).parameters)[1:]
        called = original(name, parameters)
        for _ in range(20):
            keys = rng.sample([*parameters, "why", "database"], rng.randint(0, len(parameters) + 2))
            try:
                told = called(data=None, **dict.fromkeys(keys, 1))
            except TypeError as error:
                told = str(error).partition(". Did you mean")[0]  # Python 3.13 and later
                refused += 1
            assert misfit(tool, dict.fromkeys(keys, 1)) == told
    assert refused > 100


def test_an_order_is_cancelled_and_the_gift_card_gets_its_money_back() -> None:
    after, _ = act(shop(), "cancel_pending_order", **CANCEL["kwargs"])
    user, order = after.get("users", "ann_1"), after.get("orders", "#W2")
    assert user is not None and order is not None
    assert user["payment_methods"]["gift_card_1"]["balance"] == 42.4
    assert order["payment_history"][-1] == {
        "transaction_type": "refund",
        "amount": 22.4,
        "payment_method_id": "gift_card_1",
    }
    assert set(after.changes()) == {("orders", "#W2"), ("users", "ann_1")}
    assert act(after, "cancel_pending_order", **CANCEL["kwargs"])[1] == "Error: non-pending order cannot be cancelled"


def test_items_are_replaced_one_after_the_other() -> None:
    """red -> blue, then the first blue, which was red, -> red: so does the original."""
    arguments = {
        "order_id": "#W2",
        "item_ids": ["red", "blue"],
        "new_item_ids": ["blue", "red"],
        "payment_method_id": "card_1",
    }
    after, _ = act(shop(), "modify_pending_order_items", **arguments)
    order = after.get("orders", "#W2")
    assert order is not None
    assert [i["item_id"] for i in order["items"]] == ["red", "blue"]
    assert order["payment_history"][-1]["transaction_type"] == "refund"
    assert (
        act(shop(), "modify_pending_order_items", **(arguments | {"new_item_ids": ["gone", "red"]}))[1]
        == "Error: new item gone not found or available"
    )
    assert act(after, "modify_pending_order_items", **arguments)[1] == "Error: non-pending order cannot be modified"


def booking(**changes: Any) -> dict[str, Any]:
    return {
        "user_id": "ann_1", "origin": "SFO", "destination": "JFK", "flight_type": "one_way", "cabin": "economy",
        "flights": [{"flight_number": "HAT001", "date": "2024-05-16", "note": "mine"}], "passengers": [ANN | {"age": 5}],
        "payment_methods": [{"payment_id": "card_1", "amount": 200}], "total_baggages": "1", "nonfree_baggages": 0, "insurance": "no",
    } | changes  # fmt: skip


def test_a_fourth_booking_overwrites_the_third_and_no_seat_is_taken() -> None:
    database = airline()
    for k, name in enumerate(("HATHAT", "HATHAU", "HATHAV", "HATHAV")):
        database, observation = act(database, "book_reservation", **booking(total_baggages=k))
        assert json.loads(observation)["reservation_id"] == name
    user, last = database.get("users", "ann_1"), database.get("reservations", "HATHAV")
    assert user is not None and last is not None
    assert user["reservations"] == ["ABC123", "HATHAT", "HATHAU", "HATHAV", "HATHAV"] and last["total_baggages"] == 3
    assert database.get("flights", "HAT001") == AIRLINE["flights"]["HAT001"]


def test_what_the_model_wrote_is_stored_as_it_is() -> None:
    arguments = booking()
    database, _ = act(airline(), "book_reservation", **arguments)
    stored = database.get("reservations", "HATHAT")
    assert stored is not None
    assert stored["passengers"] == [ANN | {"age": 5}] and stored["total_baggages"] == "1"
    assert stored["flights"] == [
        {
            "flight_number": "HAT001",
            "date": "2024-05-16",
            "note": "mine",
            "price": 200,
            "origin": "SFO",
            "destination": "JFK",
        }
    ]
    arguments["passengers"][0]["age"] = 6  # the message may change later
    assert stored["passengers"][0]["age"] == 5
    other, _ = act(airline(), "book_reservation", **booking(total_baggages=1))
    assert other.changes() != database.changes()


def test_a_booking_pays_by_gift_card_and_uses_a_certificate_up() -> None:
    paid = [
        {"payment_id": "certificate_1", "amount": 50},
        {"payment_id": "gift_card_1", "amount": 60},
        {"payment_id": "card_1", "amount": 90},
    ]
    database, _ = act(airline(), "book_reservation", **booking(payment_methods=paid))
    user = database.get("users", "ann_1")
    assert user is not None
    assert user["payment_methods"]["gift_card_1"]["amount"] == 40 and "certificate_1" not in user["payment_methods"]
    for methods, told in (
        (
            [{"payment_id": "card_1", "amount": 199}],
            "Error: payment amount does not add up, total price is 200, but paid 199",
        ),
        ([{"payment_id": "gift_card_1", "amount": 200}], "Error: not enough balance in payment method gift_card_1"),
        ([{"payment_id": "card_9", "amount": 200}], "Error: payment method card_9 not found"),
        ([{"payment_id": "card_1", "amount": "200"}], "Error: unsupported operand type(s) for +: 'int' and 'str'"),
    ):
        assert act(airline(), "book_reservation", **booking(payment_methods=methods))[1] == told


def test_a_call_that_fails_half_way_changes_nothing() -> None:
    """The same certificate twice passes every check, and is gone at the second payment."""
    twice = [{"payment_id": "certificate_1", "amount": 100}, {"payment_id": "certificate_1", "amount": 100}]
    database, observation = act(airline(), "book_reservation", **booking(payment_methods=twice))
    assert observation == "Error: 'certificate_1'"
    assert database.changes() == {}
    user = database.get("users", "ann_1")
    assert user is not None and "certificate_1" in user["payment_methods"]


def test_an_update_of_flights_keeps_the_price_of_what_is_kept_unless_the_cabin_changes() -> None:
    kept, new = {"flight_number": "HAT001", "date": "2024-05-16"}, {"flight_number": "HAT002", "date": "2024-05-16"}
    arguments = {"reservation_id": "ABC123", "cabin": "economy", "flights": [kept], "payment_id": "card_1"}
    same, observation = act(airline(), "update_reservation_flights", **arguments)
    assert json.loads(observation)["flights"][0]["price"] == 180  # as bought, not the 200 of today
    assert len(json.loads(observation)["payment_history"]) == 1  # a difference of 0 is no payment
    more = json.loads(act(same, "update_reservation_flights", **(arguments | {"flights": [kept, new]}))[1])
    assert more["payment_history"][-1] == {"payment_id": "card_1", "amount": 100}
    business = json.loads(act(same, "update_reservation_flights", **(arguments | {"cabin": "business"}))[1])
    assert (business["flights"][0]["price"], business["cabin"]) == (300, "economy")
    refused = act(same, "update_reservation_flights", **(arguments | {"payment_id": "certificate_1"}))[1]
    assert refused == "Error: certificate cannot be used to update reservation"


def test_connections_over_midnight_are_found_with_the_next_day_s_date_and_today_s_prices() -> None:
    found = json.loads(act(airline(), "search_onestop_flight", origin="SFO", destination="BOS", date="2024-05-16")[1])
    assert [[flight["flight_number"] for flight in pair] for pair in found] == [
        ["HAT001", "HAT002"],
        ["HAT003", "HAT002"],
    ]
    assert [pair[1]["date"] for pair in found] == ["2024-05-16", "2024-05-17"]
    assert (
        found[0][1]["prices"] == found[1][1]["prices"] == AIRLINE["flights"]["HAT002"]["dates"]["2024-05-16"]["prices"]
    )
    assert act(airline(), "search_onestop_flight", origin="SFO", destination="BOS", date="soon")[1].startswith(
        "Error: invalid literal for int()"
    )
    assert act(airline(), "search_direct_flight", origin="SFO", destination="JFK", date="2024-05-18")[1] == "[]"
    assert len(json.loads(act(airline(), "list_all_airports")[1])) == 20


def test_a_fourth_certificate_is_refused_and_a_negative_one_is_not() -> None:
    database = airline()
    for k in range(3):
        database, observation = act(database, "send_certificate", user_id="ann_1", amount=-k)
        assert observation == f"Certificate certificate_322132{2 + k} added to user ann_1 with amount {-k}."
    after, observation = act(database, "send_certificate", user_id="ann_1", amount=1)
    assert observation.startswith("Error: no more certificates")
    assert after.changes() == database.changes()


def test_an_unknown_reservation_is_told_in_the_benchmark_s_words() -> None:
    assert act(airline(), "get_reservation_details", reservation_id="X")[1] == "Error: user not found"
    assert act(airline(), "cancel_reservation", reservation_id="X")[1] == "Error: reservation not found"


def test_what_is_changed_back_is_no_change() -> None:
    address = SHOP["users"]["ann_1"]["address"]
    full = {"address2": "", "city": "Ulm", "state": "TX", "country": "USA"}
    database = Database(
        Base({"orders": {}, "products": {}, "users": {"ann_1": SHOP["users"]["ann_1"] | {"address": address | full}}})
    )
    moved, _ = act(database, "modify_user_address", user_id="ann_1", **(address | full | {"zip": "1"}))
    back, _ = act(moved, "modify_user_address", user_id="ann_1", **(address | full))
    assert moved.changes() and not back.changes()
    assert back.full_hash() == database.full_hash() != moved.full_hash()


def test_a_state_does_not_change_with_the_one_made_from_it() -> None:
    first, _ = act(shop(), "cancel_pending_order", **CANCEL["kwargs"])
    before, record = first.changes(), copy.deepcopy(first.get("users", "ann_1"))
    second, _ = act(
        first, "modify_user_address", user_id="ann_1", address1="2", address2="", city="", state="", country="", zip="2"
    )
    assert first.changes() == before and first.get("users", "ann_1") == record != second.get("users", "ann_1")
    assert BASES["retail"].tables == SHOP


def test_the_hash_tells_types_order_and_truth_apart() -> None:
    values: list[Any] = [5, 5.0, "5", True, 1, [1, 2], [2, 1], {}, None]
    texts = [canonical({"a": value}) for value in values]
    assert len(set(texts)) == len(texts)
    assert canonical({"b": 1, "a": [{}]}) == str((("a", ((),)), ("b", 1))) == canonical({"a": [{}], "b": 1})
    assert canonical({}) == canonical([])  # the benchmark's own: an empty dict and an empty list are the same tuple


WORDS = [
    "#W1",
    "#W2",
    "ann_1",
    "card_1",
    "gift_card_1",
    "red",
    "blue",
    "gone",
    "ABC123",
    "HAT001",
    "2024-05-16",
    "economy",
    "no longer needed",
    "yes",
]
KEYS = ["flight_number", "date", "payment_id", "amount", "first_name", "price", "x"]
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 10**20), st.floats(), st.text(max_size=5), st.sampled_from(WORDS),
    st.just("\ud800"),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)),
    max_leaves=6,
)


@pytest.mark.parametrize("domain", ["retail", "airline"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_no_argument_breaks_a_tool_and_a_failed_call_changes_nothing(domain: Name, data: st.DataObject) -> None:
    database = Database(BASES[domain])
    for _ in range(3):
        name = data.draw(st.sampled_from(sorted(TOOLS[domain])))
        code = TOOLS[domain][name].__code__
        wanted = code.co_varnames[1 : code.co_argcount]
        arguments = {key: data.draw(VALUES) for key in wanted if data.draw(st.integers(0, 9))}
        before = database.changes()
        database, observation = call(TOOLS[domain], database, name, arguments)
        assert isinstance(observation, str)
        if observation.startswith("Error:"):
            assert database.changes() == before
    assert len(database.full_hash()) == 64
    assert BASES[domain].tables == DATA[domain]


@pytest.mark.parametrize("domain", ["retail", "airline"])
def test_a_text_of_a_megabyte_is_told_or_stored(domain: Name) -> None:
    """Each tool, with that for every argument and with that for one of them."""
    long = "x" * 10**6
    known = {"user_id": "ann_1", "order_id": "#W1", "item_ids": ["red"], "payment_method_id": "card_1"} | booking()
    for name, tool in TOOLS[domain].items():
        wanted = tool.__code__.co_varnames[1 : tool.__code__.co_argcount]
        for arguments in (
            dict.fromkeys(wanted, long),
            *({key: known.get(key, "x") for key in wanted} | {one: long} for one in wanted),
        ):
            database, observation = call(TOOLS[domain], Database(BASES[domain]), name, arguments)
            assert not (database.changes() and observation.startswith("Error:"))
            assert len(database.full_hash()) == 64


def test_arguments_that_cannot_be_stored_are_an_error() -> None:
    deep: Any = "x"
    for _ in range(900):
        deep = [deep]
    for passengers in ([deep], [ANN | {"age": 10**4299 * 9}], [ANN | {"dob": float("nan")}]):
        database, observation = act(
            airline(), "update_reservation_passengers", reservation_id="ABC123", passengers=passengers
        )
        assert (database.changes() == {}) == observation.startswith("Error: ")
        assert database.full_hash()
    assert (
        act(airline(), "update_reservation_passengers", reservation_id="ABC123", passengers=[deep])[1]
        == "Error: the arguments are nested too deeply"
    )
