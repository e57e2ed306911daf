"""Retail on its own data: tasks, verdicts, tools, customers.

That every task can be solved and none by idling is in test_desks.py with all that holds at every desk.

What every domain must keep (instances, schemas, fresh state) is in tests/contract/test_domain_contract.py; what
policies that deserve nothing earn in test_canned_policies.py there; how well claims are read in
test_language_claims.py; agreement with the official tools in test_tau_data.py. An LLM as customer is not tried.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from environments._tau.desk import evaluate
from environments.kit.database import ServiceDesk, ToolError
from environments.kit.demonstrate import demonstrate
from environments.kit.overlay import Overlay
from environments.retail import DOMAIN, RetailDomain
from environments.retail.expert import ASK, NEEDS
from environments.retail.reading import noted, read_order, read_product, read_user
from environments.retail.shop import shop
from environments.retail.tasks import PINNED, customer
from environments.retail.tools import TOOLS, tools_of
from environments.retail.views import compact
from mua.config.schema import EnvironmentConfig
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Move, Task, ToolResult
from mua.environment.selection import Selection
from mua.types import Json
from tests.desk_support import SPLITS, Turn, all_tasks, conversation, judged, opened, played
from tests.tables import cases_of

cases = cases_of("retail")

ALL = all_tasks("retail")
COMPACT = RetailDomain(short_answers=True)
WRITES = tuple(tool.schema.name for tool in TOOLS if tool.schema.name.startswith(("cancel", "exch", "mod", "return")))


def first(kind: str) -> Task:
    return next(task for task in ALL if task.data["kind"] == kind)


# ---- data


# ---- every task


def test_what_the_customer_hides_is_told_to_nobody_before_it_is_asked_for():
    for task in PINNED.load("test"):
        opening = asyncio.run(customer(task, 3, ["plain"]).open()).text
        hidden = [value for wish in task.data["wishes"] for value in wish["knows"].values() if value]
        assert not [value for value in [*hidden, task.data["customer"]["zip"]] if value in opening], task.id


# ---- the expert and its looseness


def test_a_loose_expert_refuses_vaguely_and_skips_the_confirmation():
    vague = played(DOMAIN, first("cancel_refused"), loose=1.0)
    assert vague.evaluation.details["unsaid"]
    hasty = played(DOMAIN, first("return"), loose=1.0)
    assert not any("(yes/no)" in message["content"] for message in hasty.messages)
    assert any("before a yes" in line for line in hasty.evaluation.details["unmet"])
    assert played(DOMAIN, first("cancel"), loose=1.0).evaluation.details["database"]["wrong"]


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


def test_a_customer_gives_way_once_and_gives_up_on_nonsense():
    task = first("refund_to_another_method")
    (answer,) = replies(task, "I cannot refund it there. Shall I refund PayPal instead?")
    assert answer == "Yes."
    (way,) = replies(task, "Unfortunately I cannot refund to that payment method.")
    assert way == "Then the original payment method is fine."
    *_, last = replies(task, *["Flurb the wozzle garply."] * 6)
    assert "###STOP###" in last


# ---- verdicts


def cancelled_by_the_book(task: Task) -> list[Turn]:
    number, reason = task.data["wishes"][0]["knows"]["order"], task.data["wishes"][0]["knows"]["reason"]
    return [
        {"user": "Hi, please cancel an order."},
        "What is your email?",
        {"user": f"It is {task.data['customer']['email']}."},
        ("find_user_id_by_email", {"email": task.data["customer"]["email"]}),
        ("get_order_details", {"order_id": number}),
        f"Shall I cancel order {number} with the reason {reason}?",
        {"user": "Yes."},
        ("cancel_pending_order", {"order_id": number, "reason": reason}),
        f"I have cancelled order {number}.",
        {"user": "Thanks."},
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


def test_canceling_refunds_a_gift_card_at_once():
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


def test_practice_shops_have_customers_of_their_own_and_solvable_tasks() -> None:
    config = EnvironmentConfig(name="retail", options={"practice": 3})
    practice = DOMAIN.configured(config, Services())
    practiced = practice.tasks("train")
    assert len(practiced) == len(DOMAIN.tasks("train"))
    assert not practice.tasks("test")
    emails = {task.data["customer"]["email"] for split in SPLITS for task in DOMAIN.tasks(split)} - {None}
    others = {task.data["customer"]["email"] for task in practiced} - {None}
    assert len(others - emails) > 0.8 * len(others)  # names are drawn from the same lists, so that a few meet again
    for task in practiced[::40]:
        assert asyncio.run(demonstrate(practice, task, 0)).reward == 1.0, task.id
