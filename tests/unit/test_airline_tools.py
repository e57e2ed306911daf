"""The airline's tools: prices, payments, refusals, and where tau-bench's, tau2-bench's and our own airline differ.

Not covered: agreement with recorded answers of the official tools, its cost, and the official tasks' gold
(test_tau_data.py). tau2-bench's own data is not at hand: its form is tried on a small folder made here.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from environments._tau.desk import OfficialDesk
from environments.airline import TABLES, official_tools
from environments.airline.rules import OWN, TAU, TAU2, Dialect
from environments.airline.tools import airline_tools
from environments.kit.database import ServiceDesk
from environments.kit.overlay import Base, Overlay
from mua.environment.protocol import ToolResult
from mua.types import Json
from tests.desk_support import judged, opened
from tests.tables import cases_of, table
from tests.tau_support import over

ANN = {"first_name": "Ann", "last_name": "Bee", "dob": "1990-01-31"}
BEN = {"first_name": "Ben", "last_name": "Bee", "dob": "1992-02-01"}
cases = cases_of("airline_tools")
CARD, GIFT, PAPER = "credit_card_1", "gift_card_2", "certificate_3"


def small() -> Base:
    """Four flights, a customer, a reservation of two passengers."""
    return Base(copy.deepcopy(table("airline_tools")["DATABASE"]))


class Counter:
    """A desk with one episode at it."""

    def __init__(self, dialect: Dialect) -> None:
        made = ServiceDesk if dialect is OWN else OfficialDesk
        self.desk = made(small(), airline_tools(dialect))
        self.state = Overlay(self.desk.base)

    def call(self, name: str, **arguments: Any) -> ToolResult:
        return self.desk.call(self.state, name, arguments)

    def done(self, name: str, **arguments: Any) -> Any:
        result = self.call(name, **arguments)
        assert not result.error, result.text
        return json.loads(result.text) if result.text[:1] in "[{" else result.text

    def refused(self, name: str, **arguments: Any) -> str:
        result = self.call(name, **arguments)
        assert result.error, result.text
        return result.text

    def methods(self) -> Json:
        user = self.state.get("users", "ann_bee_1")
        assert user is not None
        return user["payment_methods"]


def booking(**changes: Any) -> Json:
    """Ann to New York with one stop, 190 dollars."""
    return {
        "user_id": "ann_bee_1",
        "origin": "SFO",
        "destination": "JFK",
        "flight_type": "one_way",
        "cabin": "economy",
        "flights": [{"flight_number": number, "date": "2024-05-20"} for number in ("AAA001", "AAA002")],
        "passengers": [ANN],
        "payment_methods": [{"payment_id": CARD, "amount": 190}],
        "total_baggages": 0,
        "nonfree_baggages": 0,
        "insurance": "no",
        **changes,
    }


def paid(*parts: tuple[str, float]) -> list[Json]:
    return [{"payment_id": payment_id, "amount": amount} for payment_id, amount in parts]


EVERY = pytest.mark.parametrize("dialect", [OWN, TAU, TAU2], ids=["own", "tau", "tau2"])


# ---- booking


@EVERY
def test_a_booking_takes_what_it_costs_from_each_method(dialect: Dialect):
    counter = Counter(dialect)
    extras = {"insurance": "yes", "total_baggages": 5, "nonfree_baggages": 1}
    parts = paid((PAPER, 200), (GIFT, 50), (CARD, 20))
    made = counter.done("book_reservation", **booking(payment_methods=parts, **extras))
    assert made["reservation_id"] == dialect.new_reservations[0]
    assert [leg["price"] for leg in made["flights"]] == [100, 90]
    assert (made["flights"][1]["origin"], made["flights"][1]["destination"]) == ("DEN", "JFK")
    assert made["created_at"] == dialect.now
    assert made["payment_history"] == parts
    assert PAPER not in counter.methods()
    assert counter.methods()[GIFT]["amount"] == 100
    user = counter.done("get_user_details", user_id="ann_bee_1")
    assert user["reservations"] == ["RES001", made["reservation_id"]]
    seats = counter.done("search_direct_flight", origin="SFO", destination="DEN", date="2024-05-20")[0]
    assert seats["available_seats"]["economy"] == (4 if dialect is TAU2 else 5)


@EVERY
@cases
def test_a_booking_that_cannot_be_is_refused_and_writes_nothing(dialect: Dialect, changes: Json):
    counter = Counter(dialect)
    counter.refused("book_reservation", **booking(**changes))
    assert counter.state.changes() == {}


def test_a_certificate_named_twice_spends_what_comes_before_on_tau_bench_alone():
    twice = booking(payment_methods=paid((GIFT, 40), (PAPER, 100), (PAPER, 50)))
    counter = Counter(TAU)
    counter.refused("book_reservation", **twice)
    assert counter.methods()[GIFT]["amount"] == 110
    assert PAPER not in counter.methods()
    assert list(counter.state.changes()) == ["users"]
    careful = Counter(OWN)
    careful.refused("book_reservation", **twice)
    assert careful.state.changes() == {}


def test_the_fourth_booking_replaces_the_third_on_tau_bench_and_is_refused_elsewhere():
    made = [Counter(TAU), Counter(TAU2)]
    for counter in made:
        ids = [counter.done("book_reservation", **booking())["reservation_id"] for _ in range(3)]
        assert ids == ["HATHAT", "HATHAU", "HATHAV"]
    assert made[0].done("book_reservation", **booking(origin="DEN"))["reservation_id"] == "HATHAV"
    assert made[0].done("get_reservation_details", reservation_id="HATHAV")["origin"] == "DEN"
    made[1].refused("book_reservation", **booking())


def test_official_bookings_take_arguments_as_they_come_and_ours_are_checked():
    odd = booking(flight_type="one_wayx", insurance="maybe", total_baggages="3")
    assert Counter(TAU).done("book_reservation", **odd)["total_baggages"] == "3"
    for name in ("flight_type", "insurance", "total_baggages"):
        assert f": {name}:" in Counter(OWN).refused("book_reservation", **booking(**{name: odd[name]}))
    for dialect in (TAU, OWN):
        assert "surprise" in Counter(dialect).refused("book_reservation", **booking(surprise=1))
    whole = Counter(OWN).done("book_reservation", **booking(payment_methods=paid((CARD, 190.0))))
    assert json.dumps(whole["payment_history"]) == json.dumps(paid((CARD, 190)))


def test_what_a_booking_was_given_can_change_afterwards_without_harm():
    counter, given = Counter(OWN), booking(passengers=[dict(ANN)])
    counter.done("book_reservation", **given)
    given["passengers"][0]["first_name"] = "Eve"
    given["payment_methods"].clear()
    found = counter.done("get_reservation_details", reservation_id="NEWRS1")
    assert found["passengers"] == [ANN]
    assert found["payment_history"] == paid((CARD, 190))


@pytest.mark.parametrize(("dialect", "kept"), [(OWN, False), (TAU, True), (TAU2, False)])
def test_fields_that_no_schema_knows_are_written_on_tau_bench_alone(dialect: Dialect, kept: bool):
    flights = [leg | {"gate": 4} for leg in booking()["flights"]]
    made = Counter(dialect).done("book_reservation", **booking(flights=flights, passengers=[ANN | {"age": 30}]))
    assert ("gate" in made["flights"][0]) == ("age" in made["passengers"][0]) == kept
    changed = Counter(dialect).done(
        "update_reservation_passengers", reservation_id="RES001", passengers=[ANN | {"age": 30}, BEN]
    )
    assert ("age" in changed["passengers"][0]) == kept


# ---- changing


@EVERY
def test_flights_that_stay_keep_their_price_and_others_cost_what_they_cost_now(dialect: Dialect):
    counter = Counter(dialect)
    same = {"flight_number": "AAA001", "date": "2024-05-20"}
    change = {"reservation_id": "RES001", "cabin": "economy", "payment_id": GIFT}
    assert counter.done("update_reservation_flights", flights=[same], **change)["flights"][0]["price"] == 80
    assert counter.state.changes() == {}
    later = counter.done("update_reservation_flights", flights=[same | {"date": "2024-05-21"}], **change)
    assert later["payment_history"][1:] == paid((GIFT, 2 * (130 - 80)))
    assert counter.methods()[GIFT]["amount"] == 50
    counter.done("update_reservation_flights", flights=[same], **change)
    assert counter.methods()[GIFT]["amount"] == 50 + 2 * (130 - 100)


@pytest.mark.parametrize(("dialect", "cabin"), [(OWN, "business"), (TAU, "economy"), (TAU2, "business")])
def test_a_change_of_cabin_is_written_down_except_on_tau_bench(dialect: Dialect, cabin: str):
    flights = [{"flight_number": "AAA001", "date": "2024-05-20"}]
    change = {"reservation_id": "RES001", "cabin": "business", "flights": flights, "payment_id": CARD}
    changed = Counter(dialect).done("update_reservation_flights", **change)
    assert changed["cabin"] == cabin
    assert changed["flights"][0]["price"] == 400
    assert changed["payment_history"][1:] == paid((CARD, 640))


@EVERY
@cases
def test_a_change_that_cannot_be_is_refused_and_writes_nothing(dialect: Dialect, name: str, changes: Json):
    given: Json = {
        "update_reservation_flights": {
            "cabin": "economy",
            "flights": [{"flight_number": "AAA001", "date": "2024-05-21"}],
            "payment_id": CARD,
        },
        "update_reservation_baggages": {"total_baggages": 3, "nonfree_baggages": 1, "payment_id": CARD},
        "update_reservation_passengers": {"passengers": [ANN, BEN]},
        "cancel_reservation": {},
    }[name]
    counter = Counter(dialect)
    counter.refused(name, **{"reservation_id": "RES001", **given, **changes})
    assert counter.state.changes() == {}


@EVERY
def test_bags_charge_what_is_added_and_return_nothing(dialect: Dialect):
    counter = Counter(dialect)
    bags = {"reservation_id": "RES001", "payment_id": GIFT}
    more = counter.done("update_reservation_baggages", total_baggages=8, nonfree_baggages=2, **bags)
    assert more["payment_history"][1:] == paid((GIFT, 100))
    fewer = counter.done("update_reservation_baggages", total_baggages=1, nonfree_baggages=0, **bags)
    assert fewer["payment_history"] == more["payment_history"]
    assert counter.methods()[GIFT]["amount"] == 50


@EVERY
def test_a_cancellation_reverses_the_payments(dialect: Dialect):
    counter = Counter(dialect)
    done = counter.done("cancel_reservation", reservation_id="RES001")
    assert done["status"] == "cancelled"
    assert done["payment_history"] == paid((CARD, 160), (CARD, -160))
    if dialect is OWN:
        assert "is cancelled" in counter.refused("cancel_reservation", reservation_id="RES001")
    else:
        assert len(counter.done("cancel_reservation", reservation_id="RES001")["payment_history"]) == 4


@EVERY
def test_certificates_are_numbered_and_end_after_three(dialect: Dialect):
    counter = Counter(dialect)
    said = [counter.done("send_certificate", user_id="ann_bee_1", amount=amount) for amount in (100, 50, 75)]
    number = dialect.new_certificates[1]
    assert said[1] == f"Certificate {number} added to user ann_bee_1 with amount 50."
    assert counter.methods()[number] == {"source": "certificate", "amount": 50, "id": number}
    counter.refused("send_certificate", user_id="ann_bee_1", amount=25)
    counter.refused("send_certificate", user_id="ann_bee_2", amount=25)


# ---- searching


def test_a_connection_over_midnight_shows_the_wrong_day_on_tau_bench_alone():
    asked = {"origin": "SFO", "destination": "JFK", "date": "2024-05-20"}
    wrong, right = (Counter(dialect).done("search_onestop_flight", **asked) for dialect in (TAU, TAU2))
    numbers = [[leg["flight_number"] for leg in pair] for pair in wrong]
    assert numbers == [["AAA001", "AAA002"], ["AAA003", "AAA004"]]
    assert [[leg["flight_number"] for leg in pair] for pair in right] == numbers
    assert [pair[1]["date"] for pair in wrong] == [pair[1]["date"] for pair in right] == ["2024-05-20", "2024-05-21"]
    assert wrong[1][1]["prices"]["economy"] == 50
    assert right[1][1]["prices"]["economy"] == 60
    Counter(TAU).refused("search_onestop_flight", **asked | {"date": "soon"})
    assert Counter(OWN).done("search_onestop_flight", **asked | {"date": "soon"}) == []


@EVERY
def test_a_direct_search_lists_what_can_be_booked(dialect: Dialect):
    counter = Counter(dialect)
    found = counter.done("search_direct_flight", origin="DEN", destination="JFK", date="2024-05-21")
    assert [one["flight_number"] for one in found] == ["AAA004"]
    assert "dates" not in found[0]
    assert found[0]["prices"] == {"basic_economy": 20, "economy": 60, "business": 360}
    assert counter.done("search_direct_flight", origin="DEN", destination="SFO", date="2024-05-21") == []


# ---- tau2-bench's form


def test_tau2_benchs_folder_loads_with_its_tools(tmp_path: Path):
    database = {name: dict(small().tables[name]) for name in TABLES}
    (tmp_path / "db.json").write_text(json.dumps(database))
    (tmp_path / "policy.md").write_text("Be kind.")
    action = {"action_id": "0", "name": "cancel_reservation", "arguments": {"reservation_id": "RES001"}}
    task = {
        "id": "0",
        "user_scenario": {"instructions": {"domain": "airline", "reason_for_call": "Cancel RES001."}},
        "evaluation_criteria": {
            "actions": [action],
            "communicate_info": [],
            "nl_assertions": None,
            "reward_basis": ["DB", "COMMUNICATE"],
        },
    }
    (tmp_path / "tasks.json").write_text(json.dumps([task]))
    domain = over("airline", tmp_path)
    environment = opened(domain.tasks("test")[0], domain)
    names = [tool.name for tool in environment.tools()]
    assert "think" not in names
    assert names == [tool.schema.name for tool in official_tools("tau2")]
    asked = {"flight_number": "AAA002", "date": "2024-05-21"}
    assert environment.call("get_flight_status", asked).text == "cancelled"
    assert judged(environment).reward == 0
    assert not environment.call("cancel_reservation", {"reservation_id": "RES001"}).error
    assert judged(environment).reward == 1
