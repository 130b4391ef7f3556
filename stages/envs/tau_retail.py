"""The tools of tau_bench's shop: orders, products and users. 13 here and the 3 of stages/envs/tau_tools.py.

Each is a function of a draft of the database and of the arguments as the model wrote them, and returns the observation.
Checks, their order and their words are tau-bench's, for the reward compares what they leave in the database; every
check comes before the first write.
An order is modified, exchanged or returned once: its status changes. Lists are stored sorted.
Source: sierra-research/tau-bench 59a200c (MIT, Copyright Sierra), retail domain; held to its recorded results by
tests/envs/test_tau_bench.py.
"""

from __future__ import annotations

import json

from stages.envs.tau_database import Database, Record
from stages.envs.tau_tools import COMMON, by_name

_ORDER_NOT_FOUND = "Error: order not found"
_USER_NOT_FOUND = "Error: user not found"
_REASONS = ("no longer needed", "ordered by mistake")


def find_user_id_by_email(database: Database, /, email: str) -> str:
    wanted = email.lower()
    return next((name for name, user in database.items("users") if user["email"].lower() == wanted), _USER_NOT_FOUND)


def find_user_id_by_name_zip(database: Database, /, first_name: str, last_name: str, zip: str) -> str:
    first, last = first_name.lower(), last_name.lower()
    for name, user in database.items("users"):
        known = user["name"]
        if (
            known["first_name"].lower() == first
            and known["last_name"].lower() == last
            and user["address"]["zip"] == zip
        ):
            return name
    return _USER_NOT_FOUND


def get_order_details(database: Database, /, order_id: str) -> str:
    return _shown(database.get("orders", order_id), _ORDER_NOT_FOUND)


def get_product_details(database: Database, /, product_id: str) -> str:
    return _shown(database.get("products", product_id), "Error: product not found")


def get_user_details(database: Database, /, user_id: str) -> str:
    return _shown(database.get("users", user_id), _USER_NOT_FOUND)


def list_all_product_types(database: Database, /) -> str:
    return json.dumps(
        dict(sorted((product["name"], product["product_id"]) for _, product in database.items("products")))
    )


def cancel_pending_order(database: Database, /, order_id: str, reason: str) -> str:
    order = database.get("orders", order_id)
    if order is None:
        return _ORDER_NOT_FOUND
    if order["status"] != "pending":
        return "Error: non-pending order cannot be cancelled"
    if reason not in _REASONS:
        return "Error: invalid reason"
    order = database.edit("orders", order_id)
    paid = list(order["payment_history"])
    for payment in paid:
        if (
            "gift_card" in payment["payment_method_id"]
        ):  # at once; other methods take days, which the database does not show
            _credit(_wallet(database, order)[payment["payment_method_id"]], payment["amount"])
    order["status"] = "cancelled"
    order["cancel_reason"] = reason
    order["payment_history"] += [_transaction("refund", p["amount"], p["payment_method_id"]) for p in paid]
    return json.dumps(order)


def modify_pending_order_address(
    database: Database, /, order_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
) -> str:
    if problem := _not_pending(database.get("orders", order_id)):
        return problem
    order = database.edit("orders", order_id)
    order["address"] = {
        "address1": address1,
        "address2": address2,
        "city": city,
        "state": state,
        "country": country,
        "zip": zip,
    }
    return json.dumps(order)


def modify_user_address(
    database: Database, /, user_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
) -> str:
    if database.get("users", user_id) is None:
        return _USER_NOT_FOUND
    user = database.edit("users", user_id)
    user["address"] = {
        "address1": address1,
        "address2": address2,
        "city": city,
        "state": state,
        "country": country,
        "zip": zip,
    }
    return json.dumps(user)


def modify_pending_order_payment(database: Database, /, order_id: str, payment_method_id: str) -> str:
    order = database.get("orders", order_id)
    if problem := _not_pending(order):
        return problem
    assert order is not None
    if payment_method_id not in _user_of(database, order)["payment_methods"]:
        return "Error: payment method not found"
    first = order["payment_history"][0]
    if len(order["payment_history"]) > 1 or first["transaction_type"] != "payment":
        return "Error: there should be exactly one payment for a pending order"
    old, amount = first["payment_method_id"], first["amount"]
    if old == payment_method_id:
        return "Error: the new payment method should be different from the current one"
    if not _covers(_user_of(database, order)["payment_methods"][payment_method_id], amount):
        return "Error: insufficient gift card balance to pay for the order"
    order = database.edit("orders", order_id)
    order["payment_history"] += [
        _transaction("payment", amount, payment_method_id),
        _transaction("refund", amount, old),
    ]
    if _user_of(database, order)["payment_methods"][payment_method_id]["source"] == "gift_card":
        _credit(_wallet(database, order)[payment_method_id], -amount)
    if "gift_card" in old:
        _credit(_wallet(database, order)[old], amount)
    return json.dumps(order)


def modify_pending_order_items(
    database: Database, /, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
) -> str:
    order = database.get("orders", order_id)
    if problem := _not_pending(order):
        return problem
    assert order is not None
    price = _price_difference(database, order, item_ids, new_item_ids)
    if isinstance(price, str):
        return price
    if payment_method_id not in _user_of(database, order)["payment_methods"]:
        return "Error: payment method not found"
    method = _user_of(database, order)["payment_methods"][payment_method_id]
    if not _covers(method, price):
        return "Error: insufficient gift card balance to pay for the new item"
    order = database.edit("orders", order_id)
    # Not rounded here, unlike the difference of an exchange.
    order["payment_history"].append(_transaction("payment" if price > 0 else "refund", abs(price), payment_method_id))
    if method["source"] == "gift_card":
        _credit(_wallet(database, order)[payment_method_id], -price)
    for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
        # One after the other: an item that was already replaced is found under its new id.
        item = _item(order, item_id)
        variant = _variants(database, item)[new_item_id]
        item |= {"item_id": new_item_id, "price": variant["price"], "options": dict(variant["options"])}
    order["status"] = "pending (item modified)"
    return json.dumps(order)


def exchange_delivered_order_items(
    database: Database, /, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
) -> str:
    order = database.get("orders", order_id)
    if order is None:
        return _ORDER_NOT_FOUND
    if order["status"] != "delivered":
        return "Error: non-delivered order cannot be exchanged"
    price = _price_difference(database, order, item_ids, new_item_ids)
    if isinstance(price, str):
        return price
    price = round(price, 2)
    if payment_method_id not in _user_of(database, order)["payment_methods"]:
        return "Error: payment method not found"
    if not _covers(_user_of(database, order)["payment_methods"][payment_method_id], price):
        return "Error: insufficient gift card balance to pay for the price difference"
    order = database.edit("orders", order_id)
    order["status"] = "exchange requested"
    order["exchange_items"] = sorted(item_ids)
    order["exchange_new_items"] = sorted(new_item_ids)
    order["exchange_payment_method_id"] = payment_method_id
    order["exchange_price_difference"] = price
    return json.dumps(order)


def return_delivered_order_items(
    database: Database, /, order_id: str, item_ids: list[str], payment_method_id: str
) -> str:
    order = database.get("orders", order_id)
    if order is None:
        return _ORDER_NOT_FOUND
    if order["status"] != "delivered":
        return "Error: non-delivered order cannot be returned"
    if payment_method_id not in _user_of(database, order)["payment_methods"]:
        return "Error: payment method not found"
    if "gift_card" not in payment_method_id and payment_method_id != order["payment_history"][0]["payment_method_id"]:
        return "Error: payment method should be either the original payment method or a gift card"
    if _missing(order, item_ids):
        return "Error: some item not found"
    order = database.edit("orders", order_id)
    order["status"] = "return requested"
    order["return_items"] = sorted(item_ids)
    order["return_payment_method_id"] = payment_method_id
    return json.dumps(order)


def _shown(record: Record | None, problem: str) -> str:
    return problem if record is None else json.dumps(record)


def _not_pending(order: Record | None) -> str:
    if order is None:
        return _ORDER_NOT_FOUND
    return "" if order["status"] == "pending" else "Error: non-pending order cannot be modified"


def _user_of(database: Database, order: Record) -> Record:
    user = database.get("users", order["user_id"])
    if user is None:
        raise LookupError(f"user {order['user_id']} of the order not found")
    return user


def _wallet(database: Database, order: Record) -> dict[str, Record]:
    """The payment methods of the order's user, to be changed."""
    wallet: dict[str, Record] = database.edit("users", order["user_id"])["payment_methods"]
    return wallet


def _credit(gift_card: Record, amount: float) -> None:
    gift_card["balance"] = round(gift_card["balance"] + amount, 2)


def _covers(method: Record, amount: float) -> bool:
    return bool(method["source"] != "gift_card" or method["balance"] >= amount)


def _transaction(kind: str, amount: float, payment_method_id: str) -> Record:
    return {"transaction_type": kind, "amount": amount, "payment_method_id": payment_method_id}


def _item(order: Record, item_id: str) -> Record:
    """The first item of that id."""
    found: Record = [item for item in order["items"] if item["item_id"] == item_id][0]  # noqa: RUF015 (an IndexError, not a StopIteration)
    return found


def _variants(database: Database, item: Record) -> dict[str, Record]:
    product = database.get("products", item["product_id"])
    if product is None:
        raise LookupError(f"product {item['product_id']} not found")
    variants: dict[str, Record] = product["variants"]
    return variants


def _missing(order: Record, item_ids: list[str]) -> str:
    """ "Error: ..." with the first id that is wanted more often than the order has it, or ""."""
    has = [item["item_id"] for item in order["items"]]
    # Stops at the first one: counting on would take hours where the model wrote a long text for the list.
    return next(
        (f"Error: {item_id} not found" for item_id in item_ids if item_ids.count(item_id) > has.count(item_id)), ""
    )


def _price_difference(database: Database, order: Record, item_ids: list[str], new_item_ids: list[str]) -> float | str:
    """What the new items cost more than the old ones, or what is wrong with them."""
    if problem := _missing(order, item_ids):
        return problem
    if len(item_ids) != len(new_item_ids):
        return "Error: the number of items to be exchanged should match"
    price: float = 0
    for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
        item = _item(order, item_id)
        variant = _variants(database, item).get(new_item_id)
        if variant is None or not variant["available"]:
            return f"Error: new item {new_item_id} not found or available"
        price += variant["price"] - item["price"]
    return price


TOOLS = COMMON | by_name(
    find_user_id_by_email,
    find_user_id_by_name_zip,
    get_order_details,
    get_product_details,
    get_user_details,
    list_all_product_types,
    cancel_pending_order,
    modify_pending_order_address,
    modify_user_address,
    modify_pending_order_payment,
    modify_pending_order_items,
    exchange_delivered_order_items,
    return_delivered_order_items,
)
