"""The airline's tools as the model sees them: tau-bench's names, arguments and nesting, described in our own words."""

from __future__ import annotations

from collections.abc import Sequence

from mua.types import Json, ToolSchema

CABINS = ("basic_economy", "economy", "business")


def _text(description: str) -> Json:
    return {"type": "string", "description": description}


def _choice(*values: str) -> Json:
    return {"type": "string", "enum": list(values)}


def _object(properties: Json, required: Sequence[str] | None = None) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties if required is None else required)}


def _list(description: str, properties: Json) -> Json:
    return {"type": "array", "description": description, "items": _object(properties)}


_USER = _text("Whose profile it is, for example 'nora_field_2840'.")
_RESERVATION = _text("Six letters and digits, for example 'K7QX2M'.")
_FROM = _text("Airport of departure, three letters (IATA).")
_TO = _text("Airport of arrival, three letters (IATA).")
_DATE = _text("Day of departure as YYYY-MM-DD.")
_PAYMENT = _text("One of the payment methods in the profile, such as 'credit_card_4418820' or 'gift_card_9034417'.")
_SEGMENT: Json = {"flight_number": _text("Number of the flight, three letters and three digits."), "date": _DATE}
_PASSENGER: Json = {
    "first_name": _text("Given name."),
    "last_name": _text("Family name."),
    "dob": _text("Date of birth as YYYY-MM-DD."),
}
_PART: Json = {"payment_id": _PAYMENT, "amount": {"type": "number", "description": "Dollars taken from it."}}
_ROUTE: Json = {"origin": _FROM, "destination": _TO, "date": _DATE}


def _count(description: str) -> Json:
    return {"type": "integer", "description": description}


BOOK_RESERVATION = ToolSchema(
    "book_reservation",
    "Make a new reservation and take the payment for it. The parts of the payment have to add up to the price of all "
    "flights for all passengers, with insurance and extra bags.",
    _object(
        {
            "user_id": _USER,
            "origin": _FROM,
            "destination": _TO,
            "flight_type": _choice("one_way", "round_trip"),
            "cabin": _choice(*CABINS),
            "flights": _list("Every flight of the journey in order, there and back.", _SEGMENT),
            "passengers": _list("Everyone who travels.", _PASSENGER),
            "payment_methods": _list("What is paid with what.", _PART),
            "total_baggages": _count("Checked bags of the whole reservation, free ones included."),
            "nonfree_baggages": _count("How many of these bags are paid for."),
            "insurance": _choice("yes", "no"),
        }
    ),
)
CANCEL_RESERVATION = ToolSchema(
    "cancel_reservation",
    "Cancel a reservation as a whole and return what was paid to where it came from.",
    _object({"reservation_id": _RESERVATION}),
)
GET_RESERVATION_DETAILS = ToolSchema(
    "get_reservation_details",
    "Look a reservation up: flights, passengers, bags, insurance, payments.",
    _object({"reservation_id": _RESERVATION}),
)
GET_USER_DETAILS = ToolSchema(
    "get_user_details",
    "Look a customer up: membership, payment methods, saved passengers, numbers of all reservations.",
    _object({"user_id": _USER}),
)
LIST_ALL_AIRPORTS = ToolSchema("list_all_airports", "Which city each airport serves.", _object({}))
SEARCH_DIRECT_FLIGHT = ToolSchema(
    "search_direct_flight",
    "Flights without a stop on one day that can be booked, with free seats and price by cabin.",
    _object(_ROUTE),
)
SEARCH_ONESTOP_FLIGHT = ToolSchema(
    "search_onestop_flight",
    "Connections with one stop that can be booked, each a pair of flights with free seats and prices by cabin.",
    _object(_ROUTE),
)
SEND_CERTIFICATE = ToolSchema(
    "send_certificate",
    "Give a customer a travel certificate. This is money: see that the policy allows it.",
    _object({"user_id": _USER, "amount": {"type": "number", "description": "Its worth in dollars."}}),
)
UPDATE_RESERVATION_BAGGAGES = ToolSchema(
    "update_reservation_baggages",
    "Set how many checked bags a reservation has; additional paid ones are charged.",
    _object(
        {
            "reservation_id": _RESERVATION,
            "total_baggages": _count("Checked bags of the whole reservation afterwards, free ones included."),
            "nonfree_baggages": _count("How many of these are paid for afterwards."),
            "payment_id": _PAYMENT,
        }
    ),
)
UPDATE_RESERVATION_FLIGHTS = ToolSchema(
    "update_reservation_flights",
    "Set the flights and the cabin of a reservation; the difference in price is charged or returned.",
    _object(
        {
            "reservation_id": _RESERVATION,
            "cabin": _choice(*CABINS),
            "flights": _list("ALL flights of the reservation afterwards, also those that stay as they are.", _SEGMENT),
            "payment_id": _PAYMENT,
        }
    ),
)
UPDATE_RESERVATION_PASSENGERS = ToolSchema(
    "update_reservation_passengers",
    "Set who travels on a reservation; as many passengers as before.",
    _object({"reservation_id": _RESERVATION, "passengers": _list("Everyone who travels.", _PASSENGER)}),
)
GET_FLIGHT_STATUS = ToolSchema(
    "get_flight_status",
    "How a flight stands on one day. Only tau2-bench has this tool.",
    _object({"flight_number": _SEGMENT["flight_number"], "date": _DATE}),
)
