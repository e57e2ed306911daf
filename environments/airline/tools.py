"""The airline's fourteen tools over a database of flights, users and reservations, with tau-bench's semantics.

None of them knows the policy: what may be changed is the agent's to decide. Prices are those of the flight's day and
cabin; seats of a change are looked at but not taken. A refusal writes nothing, except that tau-bench's own booking
spends what comes before a certificate that is named twice (see :meth:`AirlineTools.book_reservation`).
"""

from __future__ import annotations

from typing import Any

from environments._tau.tools import CALCULATE, THINK, TRANSFER
from environments.airline import schemas
from environments.airline.dialects import Dialect
from environments.airline.search import direct_flights, onestop_flights
from environments.kit.database import Tool, ToolError
from environments.kit.overlay import Overlay, copied
from mua.types import Json

INSURANCE = 30
"""Dollars a passenger."""
EXTRA_BAG = 50
"""Dollars for each checked bag beyond the free ones."""
_FLIGHT = ("flight_number", "date")
_PASSENGER = ("first_name", "last_name", "dob")
_PART = ("payment_id", "amount")


def airline_tools(dialect: Dialect) -> list[Tool]:
    """The tools in tau-bench's order."""
    tools = AirlineTools(dialect)
    return [
        Tool(schemas.BOOK_RESERVATION, tools.book_reservation),
        CALCULATE,
        Tool(schemas.CANCEL_RESERVATION, tools.cancel_reservation),
        Tool(schemas.GET_RESERVATION_DETAILS, tools.get_reservation_details),
        Tool(schemas.GET_USER_DETAILS, tools.get_user_details),
        Tool(schemas.LIST_ALL_AIRPORTS, tools.list_all_airports),
        Tool(schemas.SEARCH_DIRECT_FLIGHT, tools.search_direct_flight),
        Tool(schemas.SEARCH_ONESTOP_FLIGHT, tools.search_onestop_flight),
        Tool(schemas.SEND_CERTIFICATE, tools.send_certificate),
        THINK,
        TRANSFER,
        Tool(schemas.UPDATE_RESERVATION_BAGGAGES, tools.update_reservation_baggages),
        Tool(schemas.UPDATE_RESERVATION_FLIGHTS, tools.update_reservation_flights),
        Tool(schemas.UPDATE_RESERVATION_PASSENGERS, tools.update_reservation_passengers),
    ]


def flight_status_tool() -> Tool:
    """The tool that tau2-bench adds."""
    return Tool(schemas.GET_FLIGHT_STATUS, get_flight_status)


class AirlineTools:
    """Each method is one tool; its first argument is the episode's database."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect

    def get_user_details(self, database: Overlay, user_id: str) -> Json:
        return _record(database, "users", user_id)

    def get_reservation_details(self, database: Overlay, reservation_id: str) -> Json:
        return _record(database, "reservations", reservation_id)

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
        booked, passengers = self._rows(flights, _FLIGHT), self._rows(passengers, _PASSENGER)
        payment_methods, price = self._rows(payment_methods, _PART), 0
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
        reservation["passengers"] = self._rows(passengers, _PASSENGER)
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


def get_flight_status(database: Overlay, flight_number: str, date: str) -> str:
    return str(_day(_record(database, "flights", flight_number), date)["status"])


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
