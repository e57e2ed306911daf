"""The airline on its own data: the world, tasks, verdicts, customers.

That every task can be solved and none by idling is in test_desks.py with all that holds at every desk; what every
domain must keep (instances, schemas, fresh state) is in tests/contract/test_domain_contract.py; what
policies that deserve nothing earn in test_canned_policies.py there; the semantics of the official tools are in
test_airline_tools.py. How well statements are read is measured here on half of the labeled sentences, on which the
phrases were tuned too, so that it is a floor and no measure of what is new. An LLM as customer is not tried.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Sequence
from functools import reduce
from typing import TypeAlias

import pytest

from environments.airline import DOMAIN, AirlineDomain, reading, rules
from environments.airline.errands import choose
from environments.airline.expert import WISHES, stated
from environments.airline.rules import OWN
from environments.airline.tasks import HERE, PINNED, customer, generate
from environments.airline.tools import airline_tools, compact, direct_flights, onestop_flights
from environments.airline.world import AHEAD, world
from environments.kit.database import RewardForm
from environments.kit.language.voice import Voice
from environments.kit.overlay import Overlay
from environments.kit.scripted import grammar_of
from mua.config.schema import EnvironmentConfig
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Evaluation, Move, Task
from mua.types import Json
from tests.desk_support import all_tasks, conversation, in_turn, judged, opened, played, spoken, with_persona
from tests.tables import cases_of, table

cases = cases_of("airline")
TABLE = table("airline")

Call: TypeAlias = tuple[str, dict[str, str]]
ALL = all_tasks("airline")
COMPACT = AirlineDomain(short_answers=True)
PARTIAL = AirlineDomain("partial")


def first(kind: str) -> Task:
    return next(task for task in ALL if task.data["kind"] == kind)


def by_the_book(domain: AirlineDomain, moves: Sequence[str | Call]) -> Evaluation:
    """The verdict on moves, with their slots filled, to a plain customer who wants a business reservation cancelled."""
    task = generate("train", 9_100, "cancel_business")
    number = task.data["actions"][0]["arguments"]["reservation_id"]
    record, user = (tables()[table][key] for table, key in (("reservations", number), ("users", task.data["user"])))
    paid, membership = record["payment_history"][0]["amount"], user["membership"]
    slots = {
        "number": number,
        "user": task.data["user"],
        "paid": str(paid),
        "membership": membership,
        "other": "gold" if membership != "gold" else "silver",
    }

    def filled(text: str) -> str:
        return reduce(lambda so_far, slot: so_far.replace(f"{{{slot[0]}}}", slot[1]), slots.items(), text)

    said_and_done: list[Move] = [
        filled(move) if isinstance(move, str) else (move[0], {key: filled(value) for key, value in move[1].items()})
        for move in moves
    ]
    return with_persona(task, "plain", moves=in_turn(said_and_done), domain=domain).evaluation


def tables() -> dict[str, dict[str, Json]]:
    return {name: dict(table) for name, table in world().tables.items()}


# ---- the airline


# ---- tasks


@pytest.mark.parametrize("part", ["brief", "train", "test"])
def test_the_expert_tells_the_wishes_apart_whatever_else_is_said(part: str):
    voice = Voice(grammar_of(HERE), part, random.Random(part))
    values = {"places": "from Austin to Nashville on March 20", "city": "Reno", "special": "take my dog along"}
    for verb in WISHES:
        cabin = "business class" if verb == "change_cabin" else "economy"
        for _ in range(60):
            text = voice.say(f"want_{verb}", cabin=cabin, **values)
            assert stated(text) == verb, text
    for rule in ("aside", "greeting", "insist", "waver", "what", "wait", "put_off", "unknown", "mistake"):
        for _ in range(150):
            text = voice.say(rule)
            assert stated(text) == "", text


@cases
def test_the_customer_answers_what_agents_ask_in_their_own_words(kind: str, asked: str, fact: str | None):
    task = first(kind)
    known = task.data["errands"][0]["facts"] | task.data["errands"][0]["before"]
    user = customer(task, 0, ["plain"])
    reply = asyncio.run(user.reply(asked)).text
    assert (known[fact] if fact else task.data["user"]).lower() in reply.lower(), reply


@cases
def test_the_customer_leaves_when_the_wish_is_settled(said: str, ends: bool):
    assert asyncio.run(customer(first("cancel_business"), 0, ["plain"]).reply(said)).stop == ends


def test_a_change_of_mind_that_is_overheard_costs_the_reward():
    task = generate("train", 9_001, "add_bags~")
    demonstration = played(DOMAIN, task)
    assert demonstration.reward == 1
    wanted = task.data["errands"][0]["facts"]["bags"]
    assert any(wanted in text for text in spoken(demonstration))
    environment = opened(task)
    action = task.data["actions"][0]
    bags = action["arguments"]["total_baggages"] - 1
    environment.call(action["name"], action["arguments"] | {"total_baggages": bags})
    assert judged(environment).reward == 0


# ---- the verdict


def test_every_single_wrong_number_in_a_write_costs_the_reward():
    for task in PINNED.load("test")[::2]:
        for place, action in enumerate(task.data["actions"]):
            for key, value in action["arguments"].items():
                if key == "payment_id" or not isinstance(value, int):
                    continue
                moves = list(DOMAIN.gold(task))
                written = [index for index, move in enumerate(moves) if move == (action["name"], action["arguments"])]
                moves[written[0]] = (action["name"], action["arguments"] | {key: value + 1})
                assert conversation(task, moves).reward == 0, (task.id, key, place)


BOOK: Sequence[str | Call] = TABLE["BOOK"]
"""By the book: how a business reservation is cancelled for somebody plain."""


@pytest.mark.parametrize("form", ["all_or_nothing", "partial"])
def test_the_book_pays_and_nothing_of_it_may_be_left_out(form: RewardForm):
    domain = AirlineDomain(form)
    assert by_the_book(domain, BOOK).reward == 1
    left_out = {1: "the profile", 3: "the reservation", 4: "the reason", 5: "the yes", 7: "the end"}
    for index, what in left_out.items():
        found = by_the_book(domain, [move for place, move in enumerate(BOOK) if place != index])
        assert found.reward < (1 if index == 7 and form == "partial" else 0.01), what
    vague = ["Shall I go ahead with reservation {number}?" if index == 5 else move for index, move in enumerate(BOOK)]
    assert by_the_book(domain, vague).reward == 0


@cases
@pytest.mark.parametrize("form", ["all_or_nothing", "partial"])
def test_an_untrue_sentence_costs_all(lie: str, form: RewardForm):
    moves = [*BOOK[:4], BOOK[4], *BOOK[5:7], f"{BOOK[7]} {lie}"]
    found = by_the_book(AirlineDomain(form), moves)
    assert found.reward == 0, found.details
    assert found.details["untrue"]


@cases
def test_a_true_or_idle_sentence_costs_nothing(truth: str):
    found = by_the_book(DOMAIN, [*BOOK[:7], f"{BOOK[7]} {truth}"])
    assert found.reward == 1, found.details


def test_a_refusal_counts_once_the_reservation_was_read():
    task = first("refused_cancel")
    number = task.data["errands"][0]["facts"]["reservation"]
    moves = list(DOMAIN.gold(task))
    assert conversation(task, moves).reward == 1
    calls = [move for move in moves if not isinstance(move, str)]
    assert conversation(task, [*calls, "I cannot cancel it."]).reward == 1, "what is under discussion need not be named"
    assert conversation(task, [*calls, "I am sorry."]).reward == 0
    assert conversation(task, [*calls[:-1], f"I cannot do that for reservation {number}."]).reward == 0
    written = [*moves[:-1], ("cancel_reservation", {"reservation_id": number}), moves[-1]]
    found = conversation(task, written)
    assert found.reward == 0
    assert found.details["forbidden"]


def test_partial_credit_counts_what_is_done():
    task = next(task for task in ALL if task.data["kind"] == "add_bags+refused_cancel")
    moves = list(DOMAIN.gold(task))
    assert 0 < conversation(task, moves[:-1], PARTIAL).reward < 1


# ---- policy page, views, settings


def test_the_policy_page_states_the_rules_that_tasks_are_made_by():
    page = DOMAIN.system_prompt("full")
    rows = re.findall(r"\| (regular|silver|gold) \| (\d) \| (\d) \| (\d) \|", page)
    cabins = ("basic_economy", "economy", "business")
    assert {row[0]: dict(zip(cabins, map(int, row[1:]), strict=True)) for row in rows} == rules.ALLOWANCE
    assert "March 16, 2025, 12:00" in page
    assert OWN.now.startswith("2025-03-16T12:00")
    assert "30 dollars a passenger" in page
    assert "costs 50 dollars" in page
    assert f"{rules.CERTIFICATE} dollars for each passenger" in page
    assert len(DOMAIN.system_prompt("short")) < 100


def test_short_answers_hold_what_the_long_ones_do():
    desks = [{tool.schema.name: tool for tool in made} for made in (airline_tools(OWN), COMPACT.desk.tools.values())]
    database, saved = Overlay(world()), 0
    for number, record in tables()["reservations"].items():
        long, short = (desk["get_reservation_details"].run(database, reservation_id=number) for desk in desks)
        read = [reading.reservation(json.dumps(answer)) for answer in (long, short)]
        facts = (
            "cabin", "flights", "passengers", "total_baggages", "nonfree_baggages", "insurance", "created_at", "paid",
            "origin", "destination",
        )  # fmt: skip
        assert all(read[0][key] == read[1][key] for key in facts), record
        saved += len(json.dumps(long)) - len(json.dumps(short))
    assert saved / len(tables()["reservations"]) > 200
    for number in tables()["users"]:
        long, short = (desk["get_user_details"].run(database, user_id=number) for desk in desks)
        assert {**reading.profile(json.dumps(long))} == {**reading.profile(json.dumps(short))}


def test_short_searches_choose_the_same_flight():
    database = Overlay(world())
    shortened = compact(next(tool for tool in airline_tools(OWN) if tool.schema.name == "search_direct_flight"))
    for flight in list(tables()["flights"].values())[:60]:
        asked = {"origin": flight["origin"], "destination": flight["destination"], "date": AHEAD[3]}
        long = direct_flights(database, **asked)
        short = reading.flights(json.dumps(shortened.run(database, **asked)))
        for preference in ("cheapest", "earliest", "latest"):
            one, other = (choose(found, "economy", 1, preference) for found in (long, short))
            assert (one and one["flight_number"]) == (other and other["flight_number"])


def test_connections_leave_after_they_arrive_and_show_the_day_they_leave():
    database, found = Overlay(world()), 0
    flights = tables()["flights"]
    for origin, destination in [("AUS", "YYZ"), ("SAN", "TPA"), ("PDX", "MCI"), ("CLE", "OAK")]:
        for first_leg, second in onestop_flights(database, OWN, origin, destination, AHEAD[0]):
            assert first_leg["destination"] == second["origin"]
            late = "+1" in first_leg["scheduled_arrival_time_est"]
            assert second["date"] == (AHEAD[1] if late else AHEAD[0])
            assert second["prices"] == flights[second["flight_number"]]["dates"][second["date"]]["prices"]
            assert first_leg["scheduled_arrival_time_est"][:8] <= second["scheduled_departure_time_est"]
            found += 1
    assert found > 5


def test_settings_reach_tools_and_verdict():
    config = EnvironmentConfig(name="airline", reward="partial", options={"compact": True})
    domain = DOMAIN.configured(config, Services())
    assert isinstance(domain, AirlineDomain)
    assert domain.desk.reward == "partial"
    task = domain.tasks("test")[0]
    answer = domain.desk.call(Overlay(domain.desk.base), "get_user_details", {"user_id": task.data["user"]})
    assert "member" in json.loads(answer.text)
