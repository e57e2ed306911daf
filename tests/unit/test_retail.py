"""Retail on its own data: every task can be solved and none by idling; verdicts, tools, customers.

What every domain must keep (instances, schemas, fresh state) is in tests/contract/test_domain_contract.py; what
policies that deserve nothing earn in test_canned_policies.py there; how well claims are read in
test_language_claims.py; agreement with the official tools in test_tau_data.py. An LLM as customer is not tried.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import get_args

import pytest

from environments._tau.tools import evaluate
from environments.kit.database import ServiceDesk, ToolError
from environments.kit.overlay import Overlay
from environments.retail import DOMAIN, RetailDomain, tasks
from environments.retail.expert import ASK, NEEDS, Expert
from environments.retail.reading import address_in, noted, read_order, read_product, read_user
from environments.retail.shop import shop
from environments.retail.tasks import SIZES, generate, load_split
from environments.retail.tools import TABLES, TOOLS, tools_of
from environments.retail.user import customer
from environments.retail.views import compact
from environments.retail.wishes import EASY, MEDIUM, place
from environments.retail.words import FIRST_NAMES, LAST_NAMES, PRODUCTS
from mua.config.schema import EnvironmentConfig
from mua.endpoint.services import Services
from mua.environment.protocol import Evaluation, Move, Split, Task, ToolResult, Transcript
from mua.environment.selection import Selection
from mua.environment.task_manifest import tasks_digest
from mua.errors import ConfigError, MuaError
from mua.rollout.episode import EpisodeResult
from mua.types import Json
from tests.desk_support import judged, opened, played, played_with, spoken, with_persona
from tests.tables import cases_of
from workbench.demonstrate import demonstrate, replay_gold

cases = cases_of("retail")

SPLITS: tuple[Split, ...] = get_args(Split)
ALL: list[Task] = [task for split in SPLITS for task in load_split(split)]
COMPACT = RetailDomain(short_answers=True)
WRITES = tuple(tool.schema.name for tool in TOOLS if tool.schema.name.startswith(("cancel", "exch", "mod", "return")))


def said(*texts: str) -> Transcript:
    return Transcript([{"role": "assistant", "content": text} for text in texts])


def first(kind: str) -> Task:
    return next(task for task in ALL if task.data["kind"] == kind)


# ---- data


def test_the_shop_has_the_size_and_the_schema_of_tau_bench_retail():
    tables = shop().tables
    assert {name: len(tables[name]) for name in TABLES} == {"users": 500, "orders": 1000, "products": 50}
    user, order, product = (next(iter(tables[name].values())) for name in TABLES)
    assert list(user) == ["name", "address", "email", "payment_methods", "orders"]
    assert list(order)[:7] == [
        "order_id", "user_id", "address", "items", "fulfillments", "status", "payment_history",
    ]  # fmt: skip
    assert list(order["items"][0]) == ["name", "product_id", "item_id", "price", "options"]
    assert list(product) == ["name", "product_id", "variants"]
    assert list(next(iter(product["variants"].values()))) == ["item_id", "options", "available", "price"]
    assert all(len(product["variants"]) > 1 for product in tables["products"].values())


def test_orders_hold_together():
    tables = shop().tables
    owned = [order_id for user in tables["users"].values() for order_id in user["orders"]]
    assert sorted(owned) == sorted(tables["orders"])
    for order in tables["orders"].values():
        owner = tables["users"][order["user_id"]]
        assert {paid["payment_method_id"] for paid in order["payment_history"]} <= owner["payment_methods"].keys()
        assert order["payment_history"][0]["amount"] == round(sum(item["price"] for item in order["items"]), 2)
        for item in order["items"]:
            variant = tables["products"][item["product_id"]]["variants"][item["item_id"]]
            assert (item["price"], item["options"]) == (variant["price"], variant["options"])


def test_splits_share_neither_tasks_nor_customers():
    assert {split: len(load_split(split)) for split in SPLITS} == {
        split: sum(counts.values()) for split, counts in SIZES.items()
    }
    assert len(load_split("train")) >= 500
    assert len({task.id for task in ALL}) == len({task.data["instruction"] for task in ALL}) == len(ALL)
    people = {split: {task.data["instruction"].split(",")[0] for task in load_split(split)} for split in SPLITS}
    assert not people["train"] & people["test"]
    assert not people["train"] & people["validation"]
    assert not people["validation"] & people["test"]


def test_every_split_has_every_difficulty_and_every_kind():
    for split in SPLITS:
        counts = Counter(task.data["difficulty"] for task in load_split(split))
        assert counts == SIZES[split]
        assert {task.data["kind"] for task in load_split(split)} == {*EASY, *MEDIUM, "several"}


def test_difficulty_follows_the_number_of_wishes_and_writes():
    for task in ALL:
        wishes, writes, difficulty = len(task.data["wishes"]), len(task.data["actions"]), task.data["difficulty"]
        if difficulty == "hard":
            assert wishes >= 2
            assert writes >= 2
        else:
            assert wishes == 1 + (writes == 1 and bool(asks_or_refused(task)))
            assert writes == 1
        if difficulty == "easy":
            assert task.data["customer"]["email"]
            assert all(None not in wish["knows"].values() for wish in task.data["wishes"])


def asks_or_refused(task: Task) -> list[Json]:
    return [wish for wish in task.data["wishes"] if "refused" in wish or wish["verb"] in ("status", "price")]


def test_every_task_grants_something_and_no_refusal_stands_alone():
    assert all(task.data["actions"] for task in ALL)
    assert all(len(task.data["wishes"]) > len(asks_or_refused(task)) for task in ALL)
    wishes = [wish for task in load_split("test") for wish in task.data["wishes"]]
    assert sum("refused" in wish for wish in wishes) < 0.3 * len(wishes)
    assert any("refused" in wish for wish in wishes)


def test_the_generator_repeats_itself_and_a_changed_one_is_found_out(monkeypatch, tmp_path):
    assert tasks_digest(tuple(generate("test"))) == tasks_digest(load_split("test"))
    manifest = json.loads(tasks.MANIFEST.read_text())
    manifest["test"]["sha256"] = "0" * 64
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(tasks, "MANIFEST", tmp_path / "manifest.json")
    load_split.cache_clear()
    with pytest.raises(MuaError, match=r"manifest.json: test: what is generated differs"):
        load_split("test")


# ---- every task


@pytest.mark.parametrize("domain", [DOMAIN, RetailDomain("partial")], ids=["all_or_nothing", "partial"])
def test_gold_is_rewarded_fully_and_idling_not_at_all_in_every_task(domain):
    async def all_replayed() -> list[EpisodeResult]:
        return [await replay_gold(domain, task) for task in chosen]

    chosen, before = ALL if domain is DOMAIN else ALL[::4], shop().digest()
    for task, gold in zip(chosen, asyncio.run(all_replayed()), strict=True):
        assert (gold.reward, gold.evaluation.success) == (1.0, True), (task.id, gold.evaluation.details)
        idle = judged(opened(task, domain), "I am sorry, I cannot help.")
        assert (idle.reward, idle.success) == (0.0, False), task.id
    assert shop().digest() == before


@pytest.mark.parametrize("domain", [DOMAIN, COMPACT], ids=["full", "compact"])
def test_the_expert_solves_tasks_by_talking(domain):
    async def all_played() -> list[EpisodeResult]:
        return [await demonstrate(domain, task, 0) for task in chosen]

    chosen = [*load_split("train")[::4], *load_split("validation"), *load_split("test")]
    for task, demonstration in zip(chosen, asyncio.run(all_played()), strict=True):
        assert demonstration.evaluation.success, (task.id, demonstration.evaluation.details, demonstration.messages)
        assert demonstration.ended, task.id


def test_gold_calls_succeed_and_forbidden_ones_would_not_be_gold():
    for task in ALL:
        environment = opened(task)
        for action in task.data["actions"]:
            assert not environment.call(action["name"], action["arguments"]).error, (task.id, action)
        orders = {action["arguments"].get("order_id") for action in task.data["actions"]}
        assert not orders & {call["arguments"]["order_id"] for call in task.data["forbidden"]}, task.id


def test_what_the_customer_hides_is_told_to_nobody_before_it_is_asked_for():
    for task in load_split("test"):
        opening = asyncio.run(customer(task, 3, ["plain"]).open()).text
        hidden = [value for wish in task.data["wishes"] for value in wish["knows"].values() if value]
        assert not [value for value in [*hidden, task.data["customer"]["zip"]] if value in opening], task.id


# ---- the expert and its looseness


def test_a_loose_expert_fails_sometimes_and_solves_sometimes():
    sample = load_split("train")[:120]
    solved = [played(DOMAIN, task, 1, loose=0.5).evaluation.success for task in sample]
    assert 0.2 < sum(solved) / len(solved) < 0.8


def test_a_loose_expert_refuses_vaguely_and_skips_the_confirmation():
    vague = played(DOMAIN, first("cancel_refused"), loose=1.0)
    assert vague.evaluation.details["unsaid"]
    hasty = played(DOMAIN, first("return"), loose=1.0)
    assert not any("(yes/no)" in message["content"] for message in hasty.messages)
    assert any("before a yes" in line for line in hasty.evaluation.details["unmet"])
    assert played(DOMAIN, first("cancel"), loose=1.0).evaluation.details["database"]["wrong"]


REWORDED: dict[str, Sequence[str]] = {
    ASK["email"]: (
        "Could you give me the email of your account?",
        "Under which email are you registered?",
        "Your email, please.",
    ),
    ASK["who"]: (
        "Could I have your name and your zip code then?",
        "Then please tell me your full name and zip code.",
        "May I know your name, and your postal code?",
    ),
    ASK["order"]: (
        "Could you tell me the order number, please?",
        "Which order is it about?",
        "Please give me the number of the order.",
    ),
    ASK["reason"]: (
        "Why would you like to cancel it?",
        "May I ask for the reason?",
        "Could you tell me the reason, please?",
    ),
    ASK["item"]: ("Which item do you mean?", "Could you tell me which item it is about?", "Please name the item."),
    ASK["payment"]: (
        "Which payment method should I use?",
        "What payment method do you prefer?",
        "Please tell me the payment method.",
    ),
    ASK["address"]: ("What is the new address, please?", "Where should it go?", "Could you give me the full address?"),
    "I have cancelled order": (
        "I've cancelled order",
        "Your cancellation is done: I cancelled order",
        "All set, I have cancelled order",
    ),
    "I have requested the return for": (
        "I've set up the return for",
        "I have processed the return for",
        "Done, I have requested the return for",
    ),
    "Sorry, I cannot": ("I'm afraid I can't", "Unfortunately I am unable to", "I am sorry, but I can not"),
    "(yes/no)?": ("? Please confirm.", "? Is that right?", ", yes or no?"),
}
"""Sentences of the expert, or their beginnings, in three other ways each."""


@pytest.mark.parametrize("sentence", REWORDED)
@pytest.mark.parametrize("way", range(3))
def test_a_sentence_of_the_expert_may_be_put_in_another_way(sentence: str, way: int):
    async def talk(task: Task) -> EpisodeResult:
        environment, user = DOMAIN.environment(), DOMAIN.scripted_user(task, 0)
        environment.reset(task, 0)

        def moves():
            inner, answer = Expert(task, 0).moves(), None
            while True:
                try:
                    move: Move = next(inner) if answer is None else inner.send(answer)
                except StopIteration:
                    return
                if isinstance(move, str):
                    said = move.replace(sentence, REWORDED[sentence][way])
                    uttered.append(said != move)
                    move = said
                answer = yield move

        return await played_with(environment, user, moves())

    uttered: list[bool] = []
    for task in load_split("test")[::12]:
        found = asyncio.run(talk(task))
        assert found.evaluation.success, (task.id, found.evaluation.details, found.messages)
    assert any(uttered)


def test_conversations_repeat_with_the_seed_and_vary_without_it():
    task = first("return")
    assert played(DOMAIN, task, 5).messages == played(DOMAIN, task, 5).messages
    assert len({json.dumps(played(DOMAIN, task, seed).messages) for seed in range(8)}) > 3


# ---- customers


def replies(task: Task, *questions: str, persona: str = "brief") -> list[str]:
    async def talk() -> list[str]:
        user = customer(task, 0, [persona])
        await user.open()
        return [(await user.reply(text)).text for text in questions]

    return asyncio.run(talk())


def single(verb: str) -> Task:
    return next(
        task
        for task in ALL
        if [wish["verb"] for wish in task.data["wishes"]] == [verb]
        and task.data["customer"]["email"]
        and None not in task.data["wishes"][0]["knows"].values()
    )


@pytest.mark.parametrize("verb", [verb for verb in NEEDS if verb not in ("status", "price")])
def test_questions_are_understood_by_the_customer(verb: str):
    task = single(verb)
    wish = task.data["wishes"][0]
    told = {**wish["knows"], **wish.get("before", {})}
    for fact in NEEDS[verb]:
        (answer,) = replies(task, ASK[fact])
        known = noted(answer)
        if fact == "payment":
            assert told[fact].lower().replace(" ", "_") == known[fact]
        else:
            assert known[fact] == told[fact], (verb, fact, answer)


def masked(text: str) -> str:
    """A sentence without its names, numbers and products."""
    words = "|".join([*PRODUCTS, *FIRST_NAMES, *LAST_NAMES])
    return re.sub(rf"\b({words})\b|[\w.]+@[\w.]+|#?W?\d+", "_", text)


def test_customers_say_a_thousand_different_things_and_open_in_a_hundred_ways():
    openings, sentences = set(), set()
    for seed in range(2):
        for task in load_split("train")[: 60 * 6 : 6]:
            heard = spoken(played(DOMAIN, task, seed))
            openings.add(masked(heard[0]))
            sentences |= {masked(part) for text in heard for part in re.split(r"(?<=[.!?]) ", text)}
    assert len(openings) >= 100
    assert len(sentences) >= 1000


def test_customers_of_the_test_split_say_what_those_of_training_do_not():
    heard = {split: set[str]() for split in ("train", "test")}
    for split in ("train", "test"):
        for task in load_split(split)[:100]:
            heard[split] |= {
                masked(part) for text in spoken(played(DOMAIN, task)) for part in re.split(r"(?<=[.!?]) ", text)
            }
    assert len(heard["test"] & heard["train"]) < 0.05 * len(heard["test"])


def test_a_careless_customer_puts_its_mistakes_right():
    task, seen = single("cancel"), 0
    number = task.data["wishes"][0]["knows"]["order"]
    for seed in range(12):
        found = with_persona(task, "careless", seed)
        told = [noted(text)["order"] for text in spoken(found) if "order" in noted(text)]
        assert found.evaluation.success
        seen += told[0] != number
        assert told[-1] == number
    assert seen


def test_what_cannot_be_understood_is_not_agreed_to():
    for text in ("Flurb the wozzle garply?", "Qwx zzt."):
        (answer,) = replies(single("cancel"), text)
        assert answer == "Sorry, what do you mean?"


def test_a_customer_changes_its_mind_once_and_knows_better_from_then_on():
    task = first("return_another_item")
    wish = task.data["wishes"][0]
    before, change, agreed, after = replies(
        task, "Which item is it?", "Shall I return it?", "Shall I return that one?", "Which item is it?"
    )
    assert wish["before"]["item"] in before
    assert wish["change"]["value"] in change
    assert agreed == "Yes."
    assert wish["knows"]["item"] in after


def test_a_customer_describes_the_order_whose_number_it_forgot():
    task = first("cancel_number_forgotten")
    (answer,) = replies(task, "What is the order number?")
    assert "#W" not in answer
    assert noted(answer)["hint"] == task.data["wishes"][0]["hint"]


def test_an_email_is_told_letter_by_letter_even_where_a_sentence_begins_with_it():
    knowing = [task for task in load_split("train") if task.data["customer"]["email"]][:60]
    told = {
        task.data["customer"]["email"]: replies(task, "What is your email?", persona="plain")[0] for task in knowing
    }
    assert all(email in answer for email, answer in told.items())
    assert any(answer.startswith(email) for email, answer in told.items())


def test_a_customer_without_email_gives_name_and_zip_code():
    task = next(task for task in ALL if task.data["customer"]["email"] is None)
    email, name = replies(task, "What is your email?", "What is your full name, and what is your zip code?")
    who = task.data["customer"]
    assert "@" not in email
    assert all(word in name for word in (who["first_name"], who["last_name"], who["zip"]))


def test_a_customer_gives_way_once_and_gives_up_on_nonsense():
    task = first("refund_to_another_method")
    (answer,) = replies(task, "I cannot refund it there. Shall I refund PayPal instead?")
    assert answer == "Yes."
    (way,) = replies(task, "Unfortunately I cannot refund to that payment method.")
    assert way == "Then the original payment method is fine."
    *_, last = replies(task, *["Flurb the wozzle garply."] * 6)
    assert "###STOP###" in last


def test_a_customer_brings_up_its_wishes_one_after_the_other():
    task = next(task for task in ALL if [wish["verb"] for wish in task.data["wishes"]] == ["home", "return"])
    (second,) = replies(task, "I have updated the address in your profile.")
    assert second == "I want to return an item."


# ---- verdicts


def conversation(task: Task, moves: Sequence[Move | tuple[str]], domain: RetailDomain = DOMAIN) -> Evaluation:
    """The verdict on moves; a tuple of one text is what the customer says."""
    environment, messages = opened(task, domain), []
    for move in moves:
        if isinstance(move, str):
            messages.append({"role": "assistant", "content": move})
        elif len(move) == 1:
            messages.append({"role": "user", "content": move[0]})
        else:
            environment.call(*move)
            function = {"name": move[0], "arguments": json.dumps(move[1])}
            messages.append(
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
            )
    verdict = environment.evaluate(Transcript(messages))
    assert isinstance(verdict, Evaluation)
    return verdict


def cancelled_by_the_book(task: Task) -> list[Move | tuple[str]]:
    number, reason = task.data["wishes"][0]["knows"]["order"], task.data["wishes"][0]["knows"]["reason"]
    return [
        ("Hi, please cancel an order.",),
        "What is your email?",
        (f"It is {task.data['customer']['email']}.",),
        ("find_user_id_by_email", {"email": task.data["customer"]["email"]}),
        ("get_order_details", {"order_id": number}),
        f"Shall I cancel order {number} with the reason {reason}?",
        ("Yes.",),
        ("cancel_pending_order", {"order_id": number, "reason": reason}),
        f"I have cancelled order {number}.",
        ("Thanks.",),
    ]


def test_the_book_pays():
    assert conversation(single("cancel"), cancelled_by_the_book(single("cancel"))).reward == 1.0


@cases
@pytest.mark.parametrize("form", ["all_or_nothing", "partial"])
def test_a_step_that_the_policy_wants_and_that_is_left_out_costs_all(index: int, move: Move, form: str):
    task = single("cancel")
    moves = cancelled_by_the_book(task)
    moves[index] = move
    verdict = conversation(task, moves, RetailDomain(form))  # type: ignore[arg-type]
    assert not verdict.success
    assert verdict.reward == (0.5 if (index, form) == (8, "partial") else 0.0) or index == 8


@cases
@pytest.mark.parametrize("form", ["all_or_nothing", "partial"])
def test_an_untrue_sentence_costs_all(lie: str, form: str):
    task = single("cancel")
    moves = cancelled_by_the_book(task)
    moves[8] = f"{moves[8]} {lie}"
    verdict = conversation(task, moves, RetailDomain(form))  # type: ignore[arg-type]
    assert verdict.details["untrue"], lie
    assert verdict.reward == 0.0


@cases
def test_a_true_or_idle_sentence_costs_nothing(truth: str):
    task = single("cancel")
    moves = cancelled_by_the_book(task)
    moves[8] = f"{moves[8]} {truth}"
    assert conversation(task, moves).reward == 1.0, truth


def test_a_refusal_of_what_could_be_granted_is_untrue():
    task = single("cancel")
    number = task.data["wishes"][0]["knows"]["order"]
    verdict = conversation(task, [*cancelled_by_the_book(task)[:5], f"I cannot cancel order {number}."])
    assert verdict.details["untrue"]


def test_a_write_that_the_policy_forbids_earns_nothing_in_either_form():
    task = first("cancel_stranger")
    for form in ("all_or_nothing", "partial"):
        environment = opened(task, RetailDomain(form))
        order_id = task.data["forbidden"][0]["arguments"]["order_id"]
        call = {"order_id": order_id, "reason": "no longer needed"}
        assert not environment.call("cancel_pending_order", call).error
        verdict = judged(environment, f"I cannot cancel {order_id}.")
        assert verdict.reward == 0.0
        assert verdict.details["forbidden"][0]["name"] == "cancel_pending_order"


def test_partial_credit_lies_between():
    task = single("cancel")
    verdict = conversation(task, cancelled_by_the_book(task)[:-2], RetailDomain("partial"))
    assert 0.0 < verdict.reward < 1.0


# ---- tools


def desk_state(**edits: Json) -> tuple[ServiceDesk, Overlay]:
    desk = ServiceDesk(shop(), TOOLS)
    return desk, Overlay(desk.base)


def called(name: str, /, **arguments: object) -> ToolResult:
    desk, state = desk_state()
    return desk.call(state, name, arguments)


def order_with(status: str, source: str) -> Json:
    return next(
        order
        for order in shop().tables["orders"].values()
        if order["status"] == status and source in order["payment_history"][0]["payment_method_id"]
    )


def test_arguments_are_checked_before_anything_is_written():
    order = order_with("pending", "paypal")
    desk, state = desk_state()
    for arguments in (
        {"order_id": order["order_id"]},
        {"order_id": order["order_id"], "reason": "no reason"},
        {"order_id": order["order_id"], "reason": "no longer needed", "force": True},
        {"order_id": 5, "reason": "no longer needed"},
        {"order_id": order["order_id"][1:], "reason": "no longer needed"},
    ):
        assert desk.call(state, "cancel_pending_order", arguments).error, arguments
    assert desk.call(state, "no_such_tool", {}).error
    assert not state.changes()


def test_cancelling_refunds_a_gift_card_at_once():
    order = order_with("pending", "gift_card")
    desk, state = desk_state()
    card, amount = order["payment_history"][0]["payment_method_id"], order["payment_history"][0]["amount"]
    before = shop().tables["users"][order["user_id"]]["payment_methods"][card]["balance"]
    call = {"order_id": order["order_id"], "reason": "ordered by mistake"}
    answer = json.loads(desk.call(state, "cancel_pending_order", call).text)
    assert (answer["status"], answer["cancel_reason"]) == ("cancelled", "ordered by mistake")
    assert answer["payment_history"][-1]["transaction_type"] == "refund"
    user = state.get("users", order["user_id"])
    assert user is not None
    assert user["payment_methods"][card]["balance"] == round(before + amount, 2)


def test_an_exchange_and_a_return_work_once():
    order = order_with("delivered", "")
    desk, state = desk_state()
    item, method = order["items"][0], order["payment_history"][0]["payment_method_id"]
    call = {"order_id": order["order_id"], "item_ids": [item["item_id"]], "payment_method_id": method}
    assert not desk.call(state, "return_delivered_order_items", call).error
    again = desk.call(state, "return_delivered_order_items", call)
    assert again.error
    assert "delivered" in again.text


def test_an_item_cannot_be_returned_more_often_than_it_was_bought():
    order = order_with("delivered", "")
    method = order["payment_history"][0]["payment_method_id"]
    twice = [order["items"][0]["item_id"]] * 2
    answer = called(
        "return_delivered_order_items", order_id=order["order_id"], item_ids=twice, payment_method_id=method
    )
    assert answer.error


def test_the_transfer_ends_the_episode_and_a_thought_changes_nothing():
    assert called("transfer_to_human_agents", summary="a broken kite").terminal
    assert called("think", thought="hm") == ToolResult("")


def test_tau2_knows_an_address_for_modified_orders_and_refuses_the_same_item():
    order = order_with("pending (item modified)", "")
    where = {**shop().tables["users"][order["user_id"]]["address"], "order_id": order["order_id"]}
    for form, refused in (("tau", True), ("tau2", False)):
        desk = ServiceDesk(shop(), tools_of(form))
        assert desk.call(Overlay(desk.base), "modify_pending_order_address", where).error == refused
    pending = order_with("pending", "paypal")
    item = next(
        item
        for order in shop().tables["orders"].values()
        for item in order["items"]
        if order["status"] == "pending"
        and shop().tables["products"][item["product_id"]]["variants"][item["item_id"]]["available"]
    )
    pending = next(order for order in shop().tables["orders"].values() if item in order["items"])
    same = {
        "order_id": pending["order_id"],
        "item_ids": [item["item_id"]],
        "new_item_ids": [item["item_id"]],
        "payment_method_id": pending["payment_history"][0]["payment_method_id"],
    }
    for form, refused in (("tau", False), ("tau2", True)):
        desk = ServiceDesk(shop(), tools_of(form))
        assert desk.call(Overlay(desk.base), "modify_pending_order_items", same).error == refused
    assert "get_item_details" in {tool.schema.name for tool in tools_of("tau2")}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2", 3.0),
        ("(2*3)/4 - 1.25", 0.25),
        ("+".join(["1"] * 200), 200.0),
        (" .5+1.", 1.5),
        ("--3", 3.0),
        ("100/3", 33.33),
        ("-0.001", -0.0),
        ("2**3", 8.0),
        ("7//2", 3.0),
    ],
)
def test_calculate_computes(expression, value):
    assert str(evaluate(expression)) == str(value)


@pytest.mark.parametrize(
    "expression",
    ["", "()", "1/0", "9**9**9", "(0-8)**0.5", "10**5000", "0**-1", "5(3)", "007", "1 2", "...", "(1", "a", "1e3",
     "9" * 400, "1+" * 300 + "1", "-" * 300 + "1", "1,2"],
)  # fmt: skip
def test_calculate_refuses(expression):
    with pytest.raises(ToolError):
        evaluate(expression)


# ---- short answers


def test_short_answers_tell_the_same_facts():
    short = {tool.schema.name: compact(tool) for tool in TOOLS}
    full = {tool.schema.name: tool for tool in TOOLS}
    state = Overlay(shop())
    for key in list(shop().tables["orders"])[:100]:
        both = [tools["get_order_details"].run(state, order_id=key) for tools in (short, full)]
        assert read_order(key, json.dumps(both[0])) == read_order(key, json.dumps(both[1]))
        assert len(json.dumps(both[0])) < 0.4 * len(json.dumps(both[1]))
    for key in list(shop().tables["users"])[:100]:
        both = [read_user(json.dumps(tools["get_user_details"].run(state, user_id=key))) for tools in (short, full)]
        assert both[0] == both[1]
    for key in shop().tables["products"]:
        both = [
            read_product(json.dumps(tools["get_product_details"].run(state, product_id=key))) for tools in (short, full)
        ]
        assert both[0] == both[1]


def test_a_short_easy_episode_stays_short():
    """About 450 tokens of a tokenizer trained on such text; characters stand for them here."""
    for task in load_split("train")[: SIZES["train"]["easy"] : 3]:
        messages = with_persona(task, "brief", domain=COMPACT).messages
        text = [message["content"] + json.dumps(message.get("tool_calls", "")) for message in messages]
        wishes = len(task.data["wishes"])
        assert len("".join(text)) < 1800 + 1700 * (wishes - 1), task.id
        assert len(messages) <= 30 + 16 * (wishes - 1), task.id


def test_addresses_are_read_as_they_are_written():
    for user in shop().tables["users"].values():
        assert address_in(f"To {place(user['address'])}.") == user["address"]


# ---- configuration


def chosen(**settings: object) -> Selection:
    return Selection.from_config(EnvironmentConfig.model_validate({"name": "retail", **settings}))


def test_configuration_reaches_tools_and_reward():
    domain = chosen(options={"compact": True}, reward="partial").domains["retail"]
    task = domain.tasks("test")[0]
    environment = domain.environment()
    environment.reset(task, 0)
    order_id = task.data["wishes"][0]["knows"]["order"]
    answer = environment.call("get_order_details", {"order_id": order_id})
    assert isinstance(answer, ToolResult)
    assert "owner" in json.loads(answer.text)
    assert {task.data["difficulty"] for task in chosen(difficulties=["easy"]).tasks("train")} == {"easy"}


def test_wrong_options_are_named():
    with pytest.raises(ConfigError, match=r"environment\.options: retail has no option 'fast'; known: compact"):
        chosen(options={"fast": True})
    with pytest.raises(ConfigError, match=r"environment\.options\.compact: must be true or false, not 3"):
        chosen(options={"compact": 3})
    with pytest.raises(ConfigError, match=r"environment\.data: .* is no folder"):
        chosen(data="/no/such/folder")


def test_practice_shops_have_customers_of_their_own_and_solvable_tasks() -> None:
    config = EnvironmentConfig(name="retail", options={"practice": 3})
    practice = DOMAIN.configured(config, Services())
    practised = practice.tasks("train")
    assert len(practised) == len(DOMAIN.tasks("train"))
    assert not practice.tasks("test")
    emails = {task.data["customer"]["email"] for split in SPLITS for task in DOMAIN.tasks(split)} - {None}
    others = {task.data["customer"]["email"] for task in practised} - {None}
    assert len(others - emails) > 0.8 * len(others)  # names are drawn from the same lists, so that a few meet again
    for task in practised[::40]:
        assert asyncio.run(demonstrate(practice, task, 0)).reward == 1.0, task.id
    for number in (-1, 1.5, True):
        with pytest.raises(ConfigError, match="practice"):
            DOMAIN.configured(EnvironmentConfig(name="retail", options={"practice": number}), Services())
