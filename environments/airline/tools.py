"""The airline's fourteen tools over a database of flights, users and reservations, with tau-bench's semantics.

None of them knows the policy: what may be changed is the agent's to decide. Prices are those of the flight's day and
cabin; seats of a change are looked at but not taken. A refusal writes nothing, except that tau-bench's own booking
spends what comes before a certificate that is named twice (see :meth:`AirlineTools.book_reservation`).
"""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from environments._service import shortened
from environments._tau.desk import CALCULATE, THINK, TRANSFER
from environments.airline.rules import TAU2, Dialect
from environments.kit.database import Tool, ToolError, load_tools
from environments.kit.overlay import Overlay, copied
from mua.types import Json

CABINS = ("basic_economy", "economy", "business")

# Flights that can be booked: direct ones, and pairs with one stop.


def direct_flights(database: Overlay, origin: str, destination: str, date: str) -> list[Json]:
    """Every bookable flight of the route on the day, in the order of the table; no date field, as in tau-bench."""
    return [
        _shown(flight, date)
        for _, flight in database.items("flights")
        if flight["origin"] == origin and flight["destination"] == destination and _bookable(flight, date)
    ]


def onestop_flights(database: Overlay, dialect: Dialect, origin: str, destination: str, date: str) -> list[list[Json]]:
    """Every bookable pair, the second flight leaving no earlier than the first arrives."""
    return [
        [
            {**_shown(first, date), "date": date},
            {**_shown(second, date if dialect.overnight_as_today else onward), "date": onward},
        ]
        for first, second in _connections(database, origin, destination)
        if (onward := _onward(dialect, first, second, date)) is not None
        and _bookable(first, date)
        and _bookable(second, onward)
    ]


def _connections(database: Overlay, origin: str, destination: str) -> Iterator[tuple[Json, Json]]:
    flights = [flight for _, flight in database.items("flights")]
    arriving = defaultdict(list)
    for flight in flights:
        if flight["destination"] == destination:
            arriving[flight["origin"]].append(flight)
    for first in flights:
        if first["origin"] == origin:
            for second in arriving[first["destination"]]:
                yield first, second


def _onward(dialect: Dialect, first: Json, second: Json, date: str) -> str | None:
    """The second flight's day; None where it is missed."""
    arrival = first["scheduled_arrival_time_est"]
    onward = _next_day(dialect, date) if "+1" in arrival else date
    if not dialect.overnight_as_today:
        arrival = arrival.removesuffix("+1")
    return None if arrival > second["scheduled_departure_time_est"] else onward


def _next_day(dialect: Dialect, date: str) -> str:
    """tau-bench counts days of May without leading zeros, so that few of its overnight connections are ever found."""
    if dialect.overnight_as_today:
        return f"2024-05-{int(date[-2:]) + 1}"
    try:
        return (datetime.date.fromisoformat(date) + datetime.timedelta(days=1)).isoformat()
    except ValueError:
        return date


def _bookable(flight: Json, date: str) -> bool:
    day = flight["dates"].get(date)
    return day is not None and day["status"] == "available"


def _shown(flight: Json, date: str) -> Json:
    return {**{key: value for key, value in flight.items() if key != "dates"}, **flight["dates"][date]}


INSURANCE = 30
"""Dollars a passenger."""
EXTRA_BAG = 50
"""Dollars for each checked bag beyond the free ones."""
_FLIGHT = ("flight_number", "date")
_PASSENGER_KEYS = ("first_name", "last_name", "dob")
_PAYMENT_KEYS = ("payment_id", "amount")


def airline_tools(dialect: Dialect) -> list[Tool]:
    """The tools in tau-bench's order, which is by name; tau2-bench lacks ``think`` and adds the last one."""
    own = load_tools(Path(__file__).with_suffix(".yaml"), AirlineTools(dialect), CABINS=CABINS)
    status = own.pop("get_flight_status")
    found = sorted([*own.values(), CALCULATE, THINK, TRANSFER], key=lambda tool: tool.schema.name)
    return [*(tool for tool in found if tool is not THINK), status] if dialect is TAU2 else found


class AirlineTools:
    """Each method is one tool; its first argument is the episode's database."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect

    def get_user_details(self, database: Overlay, user_id: str) -> Json:
        return _record(database, "users", user_id)

    def get_reservation_details(self, database: Overlay, reservation_id: str) -> Json:
        return _record(database, "reservations", reservation_id)

    def get_flight_status(self, database: Overlay, flight_number: str, date: str) -> str:
        return str(_day(_record(database, "flights", flight_number), date)["status"])

    def list_all_airports(self, database: Overlay) -> Json:
        return dict(self._dialect.airports)

    def search_direct_flight(self, database: Overlay, origin: str, destination: str, date: str) -> list[Json]:
        return direct_flights(database, origin, destination, date)

    def search_onestop_flight(self, database: Overlay, origin: str, destination: str, date: str) -> list[list[Json]]:
        return onestop_flights(database, self._dialect, origin, destination, date)

    def book_reservation(
        self,
        database: Overlay,
        user_id: str,
        origin: str,
        destination: str,
        flight_type: str,
        cabin: str,
        flights: list[Json],
        passengers: list[Json],
        payment_methods: list[Json],
        total_baggages: int,
        nonfree_baggages: int,
        insurance: str,
    ) -> Json:
        """Checks all before it writes. On tau-bench's data a certificate named twice passes the checks and is missing
        when it is to be spent the second time: the call fails with the parts before it spent, as in tau-bench."""
        user = _record(database, "users", user_id)
        reservation_id = self._new_reservation(database)
        booked, passengers = self._rows(flights, _FLIGHT), self._rows(passengers, _PASSENGER_KEYS)
        payment_methods, price = self._rows(payment_methods, _PAYMENT_KEYS), 0
        if self._dialect.careful:
            payment_methods = _sound_payment(payment_methods)
            _check_bags(total_baggages, nonfree_baggages)
        for flight in booked:
            price += _priced(database, flight, cabin, len(passengers)) * len(passengers)
        if insurance == "yes":
            price += INSURANCE * len(passengers)
        price += EXTRA_BAG * nonfree_baggages
        _check_payment(user, payment_methods, price)
        self._pay(database, user_id, payment_methods)
        if self._dialect.seats_are_taken:
            _take_seats(database, booked, cabin, len(passengers))
        reservation: Json = {
            "reservation_id": reservation_id,
            "user_id": user_id,
            "origin": origin,
            "destination": destination,
            "flight_type": flight_type,
            "cabin": cabin,
            "flights": booked,
            "passengers": passengers,
            "payment_history": payment_methods,
            "created_at": self._dialect.now,
            "total_baggages": total_baggages,
            "nonfree_baggages": nonfree_baggages,
            "insurance": insurance,
        }
        database.insert("reservations", reservation_id, reservation)
        database.edit("users", user_id)["reservations"].append(reservation_id)
        return reservation

    def cancel_reservation(self, database: Overlay, reservation_id: str) -> Json:
        self._changeable(database, reservation_id)
        reservation = database.edit("reservations", reservation_id)
        history = reservation["payment_history"]
        history += [{"payment_id": part["payment_id"], "amount": -part["amount"]} for part in history]
        reservation["status"] = "cancelled"
        return reservation

    def send_certificate(self, database: Overlay, user_id: str, amount: float) -> str:
        user = _record(database, "users", user_id)
        if self._dialect.careful and amount <= 0:
            raise ToolError("a certificate must be worth something")
        amount = _whole(amount) if self._dialect.careful else amount
        number = next((new for new in self._dialect.new_certificates if new not in user["payment_methods"]), None)
        if number is None:
            raise ToolError(f"user {user_id} cannot be sent another certificate")
        methods = database.edit("users", user_id)["payment_methods"]
        methods[number] = {"source": "certificate", "amount": amount, "id": number}
        return f"Certificate {number} added to user {user_id} with amount {amount}."

    def update_reservation_baggages(
        self, database: Overlay, reservation_id: str, total_baggages: int, nonfree_baggages: int, payment_id: str
    ) -> Json:
        """Charges the paid bags that are added; taking bags away returns nothing."""
        before = self._changeable(database, reservation_id)
        if self._dialect.careful:
            _check_bags(total_baggages, nonfree_baggages)
        price = EXTRA_BAG * max(0, nonfree_baggages - before["nonfree_baggages"])
        self._settle(database, before, payment_id, price)
        reservation = database.edit("reservations", reservation_id)
        reservation["total_baggages"] = total_baggages
        reservation["nonfree_baggages"] = nonfree_baggages
        return reservation

    def update_reservation_flights(
        self, database: Overlay, reservation_id: str, cabin: str, flights: list[Json], payment_id: str
    ) -> Json:
        """Flights that stay, in the same cabin, keep the price they were bought at; others cost what they cost now."""
        before = self._changeable(database, reservation_id)
        count, changed, price = len(before["passengers"]), self._rows(flights, _FLIGHT), 0
        for flight in changed:
            kept = _kept(before, flight, cabin)
            if kept is None:
                price += _priced(database, flight, cabin, count) * count
            else:
                flight.update({key: kept[key] for key in ("price", "origin", "destination")})
                price += kept["price"] * count
        price -= sum(flight["price"] for flight in before["flights"]) * count
        self._settle(database, before, payment_id, price)
        reservation = database.edit("reservations", reservation_id)
        reservation["flights"] = changed
        if not self._dialect.cabin_is_kept:
            reservation["cabin"] = cabin
        return reservation

    def update_reservation_passengers(self, database: Overlay, reservation_id: str, passengers: list[Json]) -> Json:
        before = self._changeable(database, reservation_id)
        if len(passengers) != len(before["passengers"]):
            raise ToolError(f"reservation {reservation_id} is for {len(before['passengers'])} passengers")
        reservation = database.edit("reservations", reservation_id)
        reservation["passengers"] = self._rows(passengers, _PASSENGER_KEYS)
        return reservation

    def _rows(self, given: list[Json], fields: tuple[str, ...]) -> Any:
        """A copy of an argument that will be written down."""
        if not self._dialect.extras_are_dropped:
            return copied(given)
        return [{field: row[field] for field in fields} for row in given]

    def _changeable(self, database: Overlay, reservation_id: str) -> Json:
        reservation = _record(database, "reservations", reservation_id)
        if self._dialect.careful and reservation.get("status") == "cancelled":
            raise ToolError(f"reservation {reservation_id} is cancelled")
        return reservation

    def _new_reservation(self, database: Overlay) -> str:
        for new in self._dialect.new_reservations:
            if database.get("reservations", new) is None:
                return new
        if not self._dialect.last_id_again:
            raise ToolError("no more reservations can be made now")
        return self._dialect.new_reservations[-1]

    def _settle(self, database: Overlay, reservation: Json, payment_id: str, price: Any) -> None:
        """Charge ``price``, or return it where it is below zero, and note it in the reservation unless it is zero."""
        method = _record(database, "users", reservation["user_id"])["payment_methods"].get(payment_id)
        if method is None:
            raise ToolError(f"payment method {payment_id} not found in the profile of {reservation['user_id']}")
        if method["source"] == "certificate":
            raise ToolError("a certificate cannot pay for a change")
        if method["source"] == "gift_card" and method["amount"] < price:
            raise ToolError(f"gift card {payment_id} holds {method['amount']}, which does not cover {price}")
        if price == 0:
            return
        self._pay(database, reservation["user_id"], [{"payment_id": payment_id, "amount": price}])
        history = database.edit("reservations", reservation["reservation_id"])["payment_history"]
        history.append({"payment_id": payment_id, "amount": price})

    def _pay(self, database: Overlay, user_id: str, parts: list[Json]) -> None:
        """Take amounts off gift cards, and certificates as a whole; credit cards bear anything."""
        for part in parts:
            payment_id = part["payment_id"]
            methods = _record(database, "users", user_id)["payment_methods"]
            if methods[payment_id]["source"] == "gift_card":
                database.edit("users", user_id)["payment_methods"][payment_id]["amount"] -= part["amount"]
            elif methods[payment_id]["source"] == "certificate":
                del database.edit("users", user_id)["payment_methods"][payment_id]


def _record(database: Overlay, table: str, key: str) -> Json:
    record = database.get(table, key)
    if record is None:
        raise ToolError(f"{table[:-1]} {key} not found")
    return record


def _day(flight: Json, date: str) -> Json:
    day: Json | None = flight["dates"].get(date)
    if day is None:
        raise ToolError(f"flight {flight['flight_number']} does not fly on {date}")
    return day


def _priced(database: Overlay, flight: Json, cabin: str, count: int) -> Any:
    """Complete ``flight`` in place from the table and return its price; refuses one that cannot be booked."""
    number, date = flight["flight_number"], flight["date"]
    found = _record(database, "flights", number)
    day = _day(found, date)
    if day["status"] != "available":
        raise ToolError(f"flight {number} cannot be booked on {date}: it is {day['status']}")
    if day["available_seats"][cabin] < count:
        raise ToolError(f"flight {number} has {day['available_seats'][cabin]} {cabin} seats left on {date}")
    flight.update(price=day["prices"][cabin], origin=found["origin"], destination=found["destination"])
    return flight["price"]


def _kept(reservation: Json, flight: Json, cabin: str) -> Json | None:
    """The reservation's own flight that ``flight`` names, if the cabin stays."""
    if cabin != reservation["cabin"]:
        return None
    wanted = (flight["flight_number"], flight["date"])
    own: list[Json] = reservation["flights"]
    return next((one for one in own if (one["flight_number"], one["date"]) == wanted), None)


def _check_payment(user: Json, parts: list[Json], price: Any) -> None:
    for part in parts:
        payment_id, amount = part["payment_id"], part["amount"]
        method = user["payment_methods"].get(payment_id)
        if method is None:
            raise ToolError(f"payment method {payment_id} not found")
        if method["source"] in ("gift_card", "certificate") and method["amount"] < amount:
            raise ToolError(f"payment method {payment_id} holds {method['amount']}, not {amount}")
    paid = sum(part["amount"] for part in parts)
    if paid != price:
        raise ToolError(f"the price is {price}, but the payments add up to {paid}")


def _sound_payment(parts: list[Json]) -> list[Json]:
    if len({part["payment_id"] for part in parts}) != len(parts):
        raise ToolError("a payment method is named twice")
    if any(part["amount"] <= 0 for part in parts):
        raise ToolError("every amount paid must be above 0")
    return [{**part, "amount": _whole(part["amount"])} for part in parts]


def _check_bags(total: int, paid: int) -> None:
    if not 0 <= paid <= total:
        raise ToolError("bags cannot be fewer than none, nor the paid ones more than all")


def _whole(amount: float) -> float:
    """60.0 is written as 60: states are compared with their types, and every price is a whole number."""
    return int(amount) if isinstance(amount, float) and amount.is_integer() else amount


def _take_seats(database: Overlay, flights: list[Json], cabin: str, count: int) -> None:
    for flight in flights:
        database.edit("flights", flight["flight_number"])["dates"][flight["date"]]["available_seats"][cabin] -= count


# Short answers of the tools, for policies with little context (``environment.options.compact: true``).
#
# The same facts as far as the policy page needs them:
#
# ==============  =====================================================================================================
# user            ``{"name": "Ann Bee", "born": "1990-01-31", "member": "gold", "pays": ["credit_card_1 visa 1234",
#                 "gift_card_2 50"], "reservations": ["K7QX2M"]}``; gift cards and certificates with what they hold
# reservation     ``{"trip": "AUS-BNA", "cabin": "economy", "flights": ["QLX101 AUS-BNA 2025-03-20 137"], "passengers":
#                 ["Ann Bee 1990-01-31"], "bags": "2, 1 paid", "insurance": "no", "made": "2025-03-15T13:20:01", "paid":
#                 324}``; a flight with what was paid a passenger
# direct flights  ``["QLX101 07:35-09:50 basic_economy 12 87, economy 10 122, business 13 471"]``: seats and price
# one stop        pairs of these, each flight after its day
# after a write   ``{"reservation_id": "K7QX2M", "status": "updated"}``
# ==============  =====================================================================================================
#
# Texts and errors stay as they are. :mod:`environments.airline.reading` reads both forms.


def _user(user: Json) -> Json:
    return {
        "name": f"{user['name']['first_name']} {user['name']['last_name']}",
        "born": user["dob"],
        "member": user["membership"],
        "pays": [_method(method) for method in user["payment_methods"].values()],
        "reservations": user["reservations"],
    }


def _method(method: Json) -> str:
    if method["source"] == "credit_card":
        return f"{method['id']} {method['brand']} {method['last_four']}"
    return f"{method['id']} {method['amount']}"


def _reservation(one: Json) -> Json:
    status = {"status": one["status"]} if "status" in one else {}
    return {
        "trip": f"{one['origin']}-{one['destination']}",
        "cabin": one["cabin"],
        "flights": [
            f"{leg['flight_number']} {leg['origin']}-{leg['destination']} {leg['date']} {leg['price']}"
            for leg in one["flights"]
        ],
        "passengers": [f"{who['first_name']} {who['last_name']} {who['dob']}" for who in one["passengers"]],
        "bags": f"{one['total_baggages']}, {one['nonfree_baggages']} paid",
        "insurance": one["insurance"],
        "made": one["created_at"],
        "paid": sum(part["amount"] for part in one["payment_history"]),
        **status,
    }


def _flight(flight: Json) -> str:
    start, end = (flight[f"scheduled_{which}_time_est"] for which in ("departure", "arrival"))
    late = "+1" if end.endswith("+1") else ""
    cabins = (f"{cabin} {seats} {flight['prices'][cabin]}" for cabin, seats in flight["available_seats"].items())
    return f"{flight['flight_number']} {start[:5]}-{end[:5]}{late} {', '.join(cabins)}"


def _flights(found: list[Json]) -> list[str]:
    return [_flight(flight) for flight in found]


def _pairs(found: list[list[Json]]) -> list[list[str]]:
    return [[f"{flight['date']} {_flight(flight)}" for flight in pair] for pair in found]


def _written(reservation: Json) -> Json:
    return {"reservation_id": reservation["reservation_id"], "status": reservation.get("status", "updated")}


_SHORT: dict[str, Callable[[Any], Any]] = {
    "get_user_details": _user,
    "get_reservation_details": _reservation,
    "search_direct_flight": _flights,
    "search_onestop_flight": _pairs,
    "book_reservation": _written,
    "cancel_reservation": _written,
    "update_reservation_baggages": _written,
    "update_reservation_flights": _written,
    "update_reservation_passengers": _written,
}


def compact(tool: Tool) -> Tool:
    """The tool with its short answer."""
    return shortened(tool, _SHORT.get(tool.schema.name))
