"""The tools of tau_bench's airline: flights, reservations and users. 11 here and the 3 of stages/envs/tau_tools.py.

Each is a function of a draft of the database and of the arguments as the model wrote them, and returns the observation.
Checks, their order and their words are tau-bench's, and so are its oddities, for the reward compares what they leave in
the database: seats are never counted down, an update of flights leaves the cabin of the reservation as it was, a
certificate is used up whole, new ids come from short lists.
Source: sierra-research/tau-bench 59a200c (MIT, Copyright Sierra), airline domain; held to its recorded results by
tests/envs/test_tau_bench.py.
"""

from __future__ import annotations

import json
from typing import Any

from stages.envs.tau_database import Database, Record
from stages.envs.tau_tools import COMMON, by_name

_NOW = "2024-05-15T15:00:00"
_RESERVATION_IDS = ("HATHAT", "HATHAU", "HATHAV")  # the last one is given again and again
_CERTIFICATE_IDS = ("certificate_3221322", "certificate_3221323", "certificate_3221324")
_RESERVATION_NOT_FOUND = "Error: reservation not found"
_USER_NOT_FOUND = "Error: user not found"
_AIRPORTS = {
    "SFO": "San Francisco",
    "JFK": "New York",
    "LAX": "Los Angeles",
    "ORD": "Chicago",
    "DFW": "Dallas",
    "DEN": "Denver",
    "SEA": "Seattle",
    "ATL": "Atlanta",
    "MIA": "Miami",
    "BOS": "Boston",
    "PHX": "Phoenix",
    "IAH": "Houston",
    "LAS": "Las Vegas",
    "MCO": "Orlando",
    "EWR": "Newark",
    "CLT": "Charlotte",
    "MSP": "Minneapolis",
    "DTW": "Detroit",
    "PHL": "Philadelphia",
    "LGA": "LaGuardia",
}


def get_reservation_details(database: Database, /, reservation_id: str) -> str:
    return _shown(database.get("reservations", reservation_id))


def get_user_details(database: Database, /, user_id: str) -> str:
    return _shown(database.get("users", user_id))


def list_all_airports(database: Database, /) -> str:
    return json.dumps(_AIRPORTS)


def search_direct_flight(database: Database, /, origin: str, destination: str, date: str) -> str:
    found = []
    for _, flight in database.items("flights"):
        there = flight["origin"] == origin and flight["destination"] == destination
        if there and date in flight["dates"] and flight["dates"][date]["status"] == "available":
            found.append(_on(flight, date))
    return json.dumps(found)


def search_onestop_flight(database: Database, /, origin: str, destination: str, date: str) -> str:
    """Pairs of flights. After an arrival on the next day the second one leaves then, but it is shown with the seats and
    prices of `date`.
    """
    flights = [flight for _, flight in database.items("flights")]
    found = []
    for first in (flight for flight in flights if flight["origin"] == origin):
        for second in (
            flight
            for flight in flights
            if flight["destination"] == destination and flight["origin"] == first["destination"]
        ):
            arrival = first["scheduled_arrival_time_est"]
            date2 = f"2024-05-{int(date[-2:]) + 1}" if "+1" in arrival else date
            if (
                arrival > second["scheduled_departure_time_est"]
                or date not in first["dates"]
                or date2 not in second["dates"]
            ):
                continue
            if first["dates"][date]["status"] == "available" and second["dates"][date2]["status"] == "available":
                found.append([_on(first, date) | {"date": date}, _on(second, date) | {"date": date2}])
    return json.dumps(found)


def book_reservation(
    database: Database,
    /,
    user_id: str,
    origin: str,
    destination: str,
    flight_type: str,
    cabin: str,
    flights: list[Record],
    passengers: list[Record],
    payment_methods: list[Record],
    total_baggages: int,
    nonfree_baggages: int,
    insurance: str,
) -> str:
    user = database.get("users", user_id)
    if user is None:
        return _USER_NOT_FOUND
    price: Any = 0
    for flight in flights:
        if problem := _put_on(database, flight, cabin, len(passengers)):
            return problem
        price += flight["price"] * len(passengers)
    price += 30 * len(passengers) if insurance == "yes" else 0
    price += 50 * nonfree_baggages
    if problem := _cannot_pay(user, payment_methods, price):
        return problem
    user = database.edit("users", user_id)
    wallet = user["payment_methods"]
    for payment in payment_methods:
        if wallet[payment["payment_id"]]["source"] == "gift_card":
            wallet[payment["payment_id"]]["amount"] -= payment["amount"]
        elif wallet[payment["payment_id"]]["source"] == "certificate":
            del wallet[payment["payment_id"]]
    name = next((name for name in _RESERVATION_IDS if database.get("reservations", name) is None), _RESERVATION_IDS[-1])
    reservation = {
        "reservation_id": name,
        "user_id": user_id,
        "origin": origin,
        "destination": destination,
        "flight_type": flight_type,
        "cabin": cabin,
        "flights": flights,
        "passengers": passengers,
        "payment_history": payment_methods,
        "created_at": _NOW,
        "total_baggages": total_baggages,
        "nonfree_baggages": nonfree_baggages,
        "insurance": insurance,
    }
    database.put("reservations", name, reservation)
    user["reservations"].append(name)
    return json.dumps(reservation)


def cancel_reservation(database: Database, /, reservation_id: str) -> str:
    if database.get("reservations", reservation_id) is None:
        return _RESERVATION_NOT_FOUND
    reservation = database.edit("reservations", reservation_id)
    reservation["payment_history"] += [
        _payment(paid["payment_id"], -paid["amount"]) for paid in reservation["payment_history"]
    ]
    reservation["status"] = "cancelled"
    return json.dumps(reservation)


def update_reservation_flights(
    database: Database, /, reservation_id: str, cabin: str, flights: list[Record], payment_id: str
) -> str:
    reservation = database.get("reservations", reservation_id)
    if reservation is None:
        return _RESERVATION_NOT_FOUND
    heads, price = len(reservation["passengers"]), 0
    for flight in flights:
        # A flight that is kept keeps its price, unless the cabin changes.
        kept = [
            old
            for old in reservation["flights"]
            if old["flight_number"] == flight["flight_number"]
            and old["date"] == flight["date"]
            and cabin == reservation["cabin"]
        ]
        if kept:
            flight |= {key: kept[0][key] for key in ("price", "origin", "destination")}
        elif problem := _put_on(database, flight, cabin, heads):
            return problem
        price += flight["price"] * heads
    price -= sum(old["price"] for old in reservation["flights"]) * heads
    if problem := _cannot_charge(database, reservation, payment_id, price):
        return problem
    reservation = database.edit("reservations", reservation_id)
    reservation["flights"] = flights
    _charge(database, reservation, payment_id, price)
    return json.dumps(reservation)


def update_reservation_baggages(
    database: Database, /, reservation_id: str, total_baggages: int, nonfree_baggages: int, payment_id: str
) -> str:
    reservation = database.get("reservations", reservation_id)
    if reservation is None:
        return _RESERVATION_NOT_FOUND
    price = 50 * max(0, nonfree_baggages - reservation["nonfree_baggages"])
    if problem := _cannot_charge(database, reservation, payment_id, price):
        return problem
    reservation = database.edit("reservations", reservation_id)
    reservation["total_baggages"], reservation["nonfree_baggages"] = total_baggages, nonfree_baggages
    _charge(database, reservation, payment_id, price)
    return json.dumps(reservation)


def update_reservation_passengers(database: Database, /, reservation_id: str, passengers: list[Record]) -> str:
    reservation = database.get("reservations", reservation_id)
    if reservation is None:
        return _RESERVATION_NOT_FOUND
    if len(passengers) != len(reservation["passengers"]):
        return "Error: number of passengers does not match"
    reservation = database.edit("reservations", reservation_id)
    reservation["passengers"] = passengers
    return json.dumps(reservation)


def send_certificate(database: Database, /, user_id: str, amount: float) -> str:
    user = database.get("users", user_id)
    if user is None:
        return _USER_NOT_FOUND
    free = [name for name in _CERTIFICATE_IDS if name not in user["payment_methods"]]
    if not free:
        return (
            "Error: no more certificates can be sent to this user"  # tau-bench answers None, on which its agent fails
        )
    database.edit("users", user_id)["payment_methods"][free[0]] = {
        "source": "certificate",
        "amount": amount,
        "id": free[0],
    }
    return f"Certificate {free[0]} added to user {user_id} with amount {amount}."


def _shown(record: Record | None) -> str:
    return _USER_NOT_FOUND if record is None else json.dumps(record)  # "user", of a reservation too: so in tau-bench


def _on(flight: Record, date: str) -> Record:
    """A flight on one of its days."""
    day: Record = flight["dates"][date]
    return {key: value for key, value in flight.items() if key != "dates"} | day


def _put_on(database: Database, flight: Record, cabin: str, heads: int) -> str:
    """Writes price, origin and destination into the flight, or says what is wrong with it."""
    number, date = flight["flight_number"], flight["date"]
    known = database.get("flights", number)
    if known is None:
        return f"Error: flight {number} not found"
    if date not in known["dates"]:
        return f"Error: flight {number} not found on date {date}"
    day = known["dates"][date]
    if day["status"] != "available":
        return f"Error: flight {number} not available on date {date}"
    if day["available_seats"][cabin] < heads:
        return f"Error: not enough seats on flight {number}"
    flight |= {"price": day["prices"][cabin], "origin": known["origin"], "destination": known["destination"]}
    return ""


def _payment(payment_id: str, amount: Any) -> Record:
    return {"payment_id": payment_id, "amount": amount}


def _cannot_pay(user: Record, payments: list[Record], price: Any) -> str:
    """What is wrong with the payments of a booking. Each is held against its balance alone, also where one method is
    named twice.
    """
    for payment in payments:
        name, amount = payment["payment_id"], payment["amount"]
        if name not in user["payment_methods"]:
            return f"Error: payment method {name} not found"
        method = user["payment_methods"][name]
        if method["source"] in ("gift_card", "certificate") and method["amount"] < amount:
            return f"Error: not enough balance in payment method {name}"
    paid = sum(payment["amount"] for payment in payments)
    return "" if paid == price else f"Error: payment amount does not add up, total price is {price}, but paid {paid}"


def _cannot_charge(database: Database, reservation: Record, payment_id: str, price: Any) -> str:
    methods = (database.get("users", reservation["user_id"]) or {})["payment_methods"]
    if payment_id not in methods:
        return "Error: payment method not found"
    if methods[payment_id]["source"] == "certificate":
        return "Error: certificate cannot be used to update reservation"
    if methods[payment_id]["source"] == "gift_card" and methods[payment_id]["amount"] < price:
        return "Error: gift card balance is not enough"
    return ""


def _charge(database: Database, reservation: Record, payment_id: str, price: Any) -> None:
    user = database.get("users", reservation["user_id"]) or {}
    if user["payment_methods"][payment_id]["source"] == "gift_card":
        database.edit("users", reservation["user_id"])["payment_methods"][payment_id]["amount"] -= price
    if price != 0:
        reservation["payment_history"].append(_payment(payment_id, price))


TOOLS = COMMON | by_name(
    get_reservation_details,
    get_user_details,
    list_all_airports,
    search_direct_flight,
    search_onestop_flight,
    book_reservation,
    cancel_reservation,
    update_reservation_flights,
    update_reservation_baggages,
    update_reservation_passengers,
    send_certificate,
)
