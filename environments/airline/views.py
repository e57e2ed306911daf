"""Short answers of the tools, for policies with little context (``environment.options.compact: true``).

The same facts as far as the policy page needs them:

==============  =====================================================================================================
user            ``{"name": "Ann Bee", "born": "1990-01-31", "member": "gold", "pays": ["credit_card_1 visa 1234",
                "gift_card_2 50"], "reservations": ["K7QX2M"]}``; gift cards and certificates with what they hold
reservation     ``{"trip": "AUS-BNA", "cabin": "economy", "flights": ["QLX101 AUS-BNA 2025-03-20 137"], "passengers":
                ["Ann Bee 1990-01-31"], "bags": "2, 1 paid", "insurance": "no", "made": "2025-03-15T13:20:01", "paid":
                324}``; a flight with what was paid a passenger
direct flights  ``["QLX101 07:35-09:50 basic_economy 12 87, economy 10 122, business 13 471"]``: seats and price
one stop        pairs of these, each flight after its day
after a write   ``{"reservation_id": "K7QX2M", "status": "updated"}``
==============  =====================================================================================================

Texts and errors stay as they are. :mod:`environments.airline.reading` reads both forms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from environments._service import shortened
from environments.kit.database import Tool
from mua.types import Json


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
