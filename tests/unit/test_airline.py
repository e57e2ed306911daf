"""The airline on its own data: every task of every split can be solved and is not solved by idling; tools and views.

What every domain must keep (leases, schemas, fresh state) is in tests/contract/test_domain_contract.py; the semantics
of the official tools are in test_airline_tools.py. An LLM as customer is not tried.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from environments.airline import DOMAIN, AirlineDomain, reading, rules, tasks
from environments.airline.dialects import OWN
from environments.airline.errands_flights import choose
from environments.airline.expert import Expert
from environments.airline.search import direct_flights, onestop_flights
from environments.airline.tasks import MAKERS, SIZES, generate, load_split, make_split, recipes
from environments.airline.tools import airline_tools
from environments.airline.user import ASKED
from environments.airline.views import compact
from environments.airline.world import AHEAD, PAST, _Maker, world
from mua.config.schema import EnvironmentConfig
from mua.environment.database import DatabaseEnvironment
from mua.environment.demonstrate import Demonstration, demonstrate, replay_gold
from mua.environment.manifest import digest
from mua.environment.overlay import Overlay, digest_of
from mua.environment.protocol import Evaluation, Split, Task, Transcript
from mua.errors import ConfigError, MuaError
from mua.types import Json
from mua.users.scripted import AGREE
from mua.users.services import Services

SPLITS: tuple[Split, ...] = get_args(Split)
ALL: list[Task] = [task for split in SPLITS for task in load_split(split)]
COMPACT = AirlineDomain(short_answers=True)
PARTIAL = AirlineDomain("partial")


def played(domain: AirlineDomain, task: Task, seed: int = 0, loose: float = 0.0) -> Demonstration:
    return asyncio.run(demonstrate(domain, task, seed, loose))


def first(kind: str) -> Task:
    return next(task for task in ALL if task.data["kind"] == kind)


def opened(task: Task, domain: AirlineDomain = DOMAIN) -> DatabaseEnvironment:
    environment = domain.environment()
    assert isinstance(environment, DatabaseEnvironment)
    environment.reset(task, 0)
    return environment


def judged(environment: DatabaseEnvironment, *texts: str) -> Evaluation:
    return environment.evaluate(Transcript([{"role": "assistant", "content": text} for text in texts]))


def tables() -> dict[str, dict[str, Json]]:
    return {name: dict(table) for name, table in world().tables.items()}


# ---- the airline


def test_the_airline_has_the_size_and_schema_of_tau_bench_airline():
    assert {name: len(table) for name, table in tables().items()} == {
        "flights": 300,
        "users": 500,
        "reservations": 2000,
    }
    user, flight, reservation = (next(iter(tables()[name].values())) for name in ("users", "flights", "reservations"))
    assert list(user) == [
        "name", "address", "email", "dob", "payment_methods", "saved_passengers", "membership", "reservations",
    ]  # fmt: skip
    assert list(flight) == [
        "flight_number", "origin", "destination", "scheduled_departure_time_est", "scheduled_arrival_time_est", "dates",
    ]  # fmt: skip
    assert list(reservation) == [
        "reservation_id", "user_id", "origin", "destination", "flight_type", "cabin", "flights", "passengers",
        "payment_history", "created_at", "total_baggages", "nonfree_baggages", "insurance",
    ]  # fmt: skip
    assert {len(one["dates"]) for one in tables()["flights"].values()} == {30}
    statuses = Counter(day["status"] for one in tables()["flights"].values() for day in one["dates"].values())
    assert set(statuses) == {"available", "cancelled", "landed", "flying", "on time", "delayed"}
    assert statuses["available"] > 4000


def test_days_agree_with_the_present():
    for flight in tables()["flights"].values():
        ahead = {flight["dates"][day]["status"] for day in AHEAD}
        assert ahead <= {"available", "cancelled"}
        assert {flight["dates"][day]["status"] for day in PAST} <= {"landed", "cancelled"}
        assert {*AHEAD, *PAST, rules.TODAY} == set(flight["dates"])


def test_reservations_agree_with_flights_customers_and_the_price_of_everything():
    all_of = tables()
    for number, one in all_of["reservations"].items():
        user, count = all_of["users"][one["user_id"]], len(one["passengers"])
        assert number == one["reservation_id"]
        assert user["reservations"].count(number) == 1
        assert reading.reservation_id(number) == number
        assert {"first_name": one["passengers"][0]["first_name"]}.items() <= user["name"].items()
        for leg in one["flights"]:
            flight = all_of["flights"][leg["flight_number"]]
            assert (flight["origin"], flight["destination"]) == (leg["origin"], leg["destination"])
        extra = rules.paid_bags(user["membership"], one["cabin"], count, one["total_baggages"])
        assert one["nonfree_baggages"] == extra
        price = sum(leg["price"] for leg in one["flights"]) * count + 50 * extra
        price += 30 * count if one["insurance"] == "yes" else 0
        assert [part["amount"] for part in one["payment_history"]] == [price]
        assert one["payment_history"][0]["payment_id"] in user["payment_methods"]
        assert one["created_at"][:10] < min(leg["date"] for leg in one["flights"])


def test_the_airline_is_made_alike_every_time_and_is_pinned():
    manifest = json.loads(tasks.MANIFEST.read_text())
    assert digest_of(_Maker().tables()) == world().digest() == manifest["database"]["sha256"]


# ---- tasks


def test_there_are_enough_tasks_of_every_difficulty_and_kind_in_every_split():
    for split in SPLITS:
        found = load_split(split)
        assert len(found) == SIZES[split]
        counts = Counter(task.data["difficulty"] for task in found)
        assert all(counts[level] >= len(found) // 5 for level in ("easy", "medium", "hard")), counts
        kinds = {kind for task in found for kind in task.data["kind"].split("+")}
        assert len(kinds) >= 26, sorted(kinds)
    assert sum(SIZES.values()) >= 300


def test_no_customer_is_in_two_splits_and_no_two_tasks_are_alike():
    users = [{task.data["user"] for task in load_split(split)} for split in SPLITS]
    assert not users[0] & users[1]
    assert not users[0] & users[2]
    assert not users[1] & users[2]
    assert len({json.dumps(task.data, sort_keys=True) for task in ALL}) == len(ALL)


def test_every_maker_is_used_and_every_fact_can_be_asked_for():
    used = {part.rstrip("?~") for recipe in recipes(400) for part in recipe.split(" + ")}
    assert used == set(MAKERS)
    known = {name for task in ALL for errand in task.data["errands"] for name in errand["facts"]}
    assert known | {"user_id"} == set(ASKED)


def test_difficulty_follows_what_there_is_to_do():
    easy = [task for task in ALL if task.data["difficulty"] == "easy"]
    hard = [task for task in ALL if task.data["difficulty"] == "hard"]
    assert all(len(task.data["actions"]) <= 1 and len(task.data["errands"]) == 1 for task in easy)
    assert not any(errand["change"] for task in easy for errand in task.data["errands"])
    changes = sum(bool(errand["change"]) for task in hard for errand in task.data["errands"])
    assert changes > 10
    assert max(len(task.data["actions"]) for task in hard) > 1
    assert any(len(task.data["errands"]) == 3 for task in hard)


def test_gold_pays_on_every_task_of_every_split():
    before = world().digest()
    for task in ALL:
        for domain in (DOMAIN, PARTIAL):
            demonstration = asyncio.run(replay_gold(domain, task))
            assert demonstration.reward == 1, (task.id, demonstration.evaluation.details)
            assert demonstration.evaluation.success
    assert world().digest() == before


@pytest.mark.parametrize("domain", [DOMAIN, PARTIAL], ids=["all_or_nothing", "partial"])
def test_doing_nothing_pays_on_no_task(domain: AirlineDomain):
    for task in ALL:
        environment = opened(task, domain)
        for texts in ((), ("Hello, how can I help you?",), ("I am sorry, I cannot do that.",), ("Done.",)):
            assert judged(environment, *texts).reward == 0, task.id


@pytest.mark.parametrize("domain", [DOMAIN, COMPACT], ids=["full", "compact"])
def test_the_expert_solves_every_test_task_through_conversation(domain: AirlineDomain):
    for task in load_split("test"):
        for seed in (0, 1):
            demonstration = played(domain, task, seed)
            assert demonstration.reward == 1, (task.id, task.data["kind"], demonstration.messages)
            assert demonstration.ended


def test_the_expert_solves_what_it_is_trained_on_too():
    assert all(played(DOMAIN, task).reward == 1 for task in (*load_split("train"), *load_split("validation")))


def test_the_expert_understands_every_opening():
    for task in ALL:
        expert = Expert(task, 0)
        for errand in task.data["errands"]:
            handlers = [expert._handler(opening).__qualname__ for opening in errand["openings"]]
            assert len(set(handlers)) == 1, errand["openings"]
            assert "lost_track" not in handlers[0]


def test_the_expert_uses_nothing_of_the_task_but_the_first_message():
    task = first("change_day")
    bare = Task(task.id, task.domain, task.split, {"errands": [{"openings": task.data["errands"][0]["openings"]}]})
    moves = Expert(bare, 0).moves()
    assert next(moves) == "What is your user id?"
    assert moves.send(task.data["user"]) == ("get_user_details", {"user_id": task.data["user"]})


def test_a_loose_expert_fails_at_times_and_never_crashes():
    rewards = [played(DOMAIN, task, 1, loose=0.5).reward for task in load_split("test")]
    assert 0.4 < sum(rewards) / len(rewards) < 0.95


def test_the_customer_forgets_the_number_or_changes_its_mind_where_the_recipe_says_so():
    plain, missing, change = (generate("train", 9_000, f"add_bags{mark}").data for mark in ("", "?", "~"))
    number = plain["actions"][0]["arguments"]["reservation_id"]
    assert number in plain["errands"][0]["facts"]["reservation"][0]
    number = missing["actions"][0]["arguments"]["reservation_id"]
    assert not any(number in text for text in missing["errands"][0]["facts"]["reservation"])
    assert number not in missing["instruction"]
    told, meant = (reading.bags(change["errands"][0][when]["bags"][0]) for when in ("before", "facts"))
    assert told is not None
    assert meant == told + 1
    assert change["actions"][0]["arguments"]["total_baggages"] == meant


@pytest.mark.parametrize(
    ("kind", "asked", "fact"),
    [
        ("cancel_business", "Sure! Could you please provide your user ID?", None),
        ("cancel_business", "Please share your user id so that I can look up your profile.", None),
        ("cancel_business", "Thank you. What is the reservation number you'd like to cancel?", "reservation"),
        ("cancel_business", "Which booking do you mean?", "reservation"),
        ("cancel_business", "Please let me know the reason for the cancellation.", "reason"),
        ("cancel_business", "May I ask why you want to cancel?", "reason"),
        ("add_bags", "How many bags in total would you like to check?", "bags"),
        ("add_bags", "How would you like to pay for this?", "payment"),
        ("add_bags", "Please tell me which payment method to charge.", "payment"),
        ("rename", "Which passenger's name needs correcting?", "who"),
        ("change_day", "What date would you like to fly instead?", "date"),
        ("change_day", "Which of the two flights should be moved?", "direction"),
        ("change_day", "There are several. Would you prefer the cheapest?", "preference"),
        ("book_one_way", "Will this be one-way or round-trip?", "trip"),
        ("book_one_way", "What cabin class would you like?", "cabin"),
        ("book_one_way", "Who will be traveling with you?", "passengers"),
        ("book_one_way", "How many passengers are there?", "passengers"),
        ("book_one_way", "Would you like to add travel insurance for $30 per passenger?", "insurance"),
    ],
)
def test_the_customer_answers_what_agents_ask_in_their_own_words(kind: str, asked: str, fact: str | None):
    task = first(kind)
    known = task.data["errands"][0]["facts"] | task.data["errands"][0]["before"]
    user = DOMAIN.scripted_user(task, 0)
    reply = asyncio.run(user.reply(asked)).text
    wanted = known[fact] if fact else [task.data["user"]]
    assert any(answer in reply for answer in wanted), reply


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        ("Your reservation has been cancelled. Is there anything else I can help you with?", True),
        ("Your reservation has been cancelled.", True),
        ("Let me look that up.", False),
    ],
)
def test_the_customer_leaves_when_the_wish_is_settled(said: str, ends: bool):
    assert asyncio.run(DOMAIN.scripted_user(first("cancel_business"), 0).reply(said)).stop == ends


@pytest.mark.parametrize(
    "proposal",
    [
        "I will cancel reservation K7QX2M. Do you confirm (yes/no)?",
        "Here is what I would do: cancel the trip and refund $300 to your card. Shall I proceed?",
        "Would you like me to go ahead with the cancellation?",
    ],
)
def test_the_customer_agrees_to_a_proposal(proposal: str):
    assert asyncio.run(DOMAIN.scripted_user(first("cancel_business"), 0).reply(proposal)).text in AGREE


def test_a_change_of_mind_that_is_overheard_costs_the_reward():
    task = generate("train", 9_001, "add_bags~")
    demonstration = played(DOMAIN, task)
    said = [message["content"] for message in demonstration.messages if message["role"] == "user"]
    assert demonstration.reward == 1
    assert any(text in task.data["errands"][0]["change"] for text in said)
    assert any(text in AGREE for text in said)
    environment = opened(task)
    action = task.data["actions"][0]
    bags = action["arguments"]["total_baggages"] - 1
    environment.call(action["name"], action["arguments"] | {"total_baggages": bags})
    assert judged(environment).reward == 0


def test_a_changed_generator_is_noticed(monkeypatch: pytest.MonkeyPatch):
    load_split.cache_clear()
    monkeypatch.setitem(tasks.SIZES, "test", 79)
    with pytest.raises(MuaError, match="test: what is generated differs"):
        load_split("test")
    monkeypatch.undo()
    load_split.cache_clear()
    assert digest(make_split("test")) == digest(load_split("test"))


def test_a_recipe_that_nobody_fits_is_an_error(monkeypatch: pytest.MonkeyPatch):
    def nobody(*_: object) -> None:
        raise tasks.Unfit

    monkeypatch.setitem(tasks.MAKERS, "add_bags", nobody)
    with pytest.raises(MuaError, match="no customer of split train fits the recipe 'add_bags'"):
        generate("train", 0, "add_bags")


# ---- the verdict


def test_every_single_wrong_number_in_a_write_costs_the_reward():
    for task in load_split("test"):
        for place, action in enumerate(task.data["actions"]):
            for key, value in action["arguments"].items():
                if key == "payment_id" or not isinstance(value, int):
                    continue
                environment = opened(task)
                for number, other in enumerate(task.data["actions"]):
                    changed = {key: value + 1} if number == place else {}
                    environment.call(other["name"], other["arguments"] | changed)
                said = [move for move in DOMAIN.gold(task) if isinstance(move, str)]
                assert judged(environment, *said).reward == 0, (task.id, key)


def test_a_forbidden_call_costs_the_reward_and_so_does_a_refusal_without_the_number():
    task = first("refused_cancel")
    number = task.data["forbidden"][0]["arguments"]["reservation_id"]
    environment = opened(task)
    assert judged(environment, "I cannot cancel it.").reward == 0
    assert judged(environment, f"I cannot cancel {number}.").reward == 1
    assert not environment.call("cancel_reservation", {"reservation_id": number}).error
    evaluation = judged(environment, f"I cannot cancel {number}.")
    assert evaluation.reward == 0
    assert evaluation.details["forbidden"]


def test_partial_credit_counts_what_is_done():
    task = next(task for task in ALL if len(task.data["actions"]) == 1 and task.data["statements"])
    environment = opened(task, PARTIAL)
    environment.call(task.data["actions"][0]["name"], task.data["actions"][0]["arguments"])
    assert 0 < judged(environment).reward < 1


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"options": {"compct": True}}, "environment.options: airline has no option 'compct'; known: compact"),
        ({"options": {"compact": "yes"}}, "environment.options.compact: must be true or false, not 'yes'"),
        ({"oracle": "llm"}, "environment.oracle: domain 'airline' has nothing to set there"),
        ({"show_reward": True}, "environment.show_reward: domain 'airline' has nothing to set there"),
        ({"data": Path("/nowhere/at/all")}, "environment.data: /nowhere/at/all is no folder"),
    ],
)
def test_settings_that_cannot_be_had_are_refused(settings: Json, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        DOMAIN.configured(EnvironmentConfig(name="airline", **settings), Services())


def test_settings_reach_tools_and_verdict():
    config = EnvironmentConfig(name="airline", reward="partial", options={"compact": True})
    domain = DOMAIN.configured(config, Services())
    assert isinstance(domain, AirlineDomain)
    assert domain.desk.reward == "partial"
    task = domain.tasks("test")[0]
    answer = domain.desk.call(Overlay(domain.desk.base), "get_user_details", {"user_id": task.data["user"]})
    assert "member" in json.loads(answer.text)
