"""Retail on its own data: every task of every split can be solved and is not solved by idling; tools, customers, views.

What every domain must keep (leases, schemas, fresh state) is in tests/contract/test_domain_contract.py; agreement with
the official tools is in test_tau_data.py. An LLM as customer is not tried.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import get_args

import pytest

from environments._tau.tools import evaluate
from environments.retail import DOMAIN, RetailDomain, tasks
from environments.retail.expert import NEEDS, question
from environments.retail.reading import address_in, hinted, read_order, read_product, read_user, reason_in
from environments.retail.shop import shop
from environments.retail.tasks import SIZES, generate, load_split
from environments.retail.tools import TABLES, TOOLS, tools_of
from environments.retail.user import OPENINGS, customer
from environments.retail.views import compact
from environments.retail.wishes import EASY, MEDIUM, place
from mua.config.schema import EnvironmentConfig
from mua.environment.database import DatabaseEnvironment, ServiceDesk, ToolError
from mua.environment.demonstrate import Demonstration, demonstrate, replay_gold
from mua.environment.manifest import digest
from mua.environment.overlay import Overlay
from mua.environment.protocol import Evaluation, Split, Task, ToolResult, Transcript
from mua.environment.selection import Selection
from mua.errors import ConfigError, MuaError
from mua.types import Json
from mua.users.scripted import AGREE, GIVING_UP
from mua.users.services import Services

SPLITS: tuple[Split, ...] = get_args(Split)
ALL: list[Task] = [task for split in SPLITS for task in load_split(split)]
COMPACT = RetailDomain(short_answers=True)
WRITES = tuple(tool.schema.name for tool in TOOLS if tool.schema.name.startswith(("cancel", "exch", "mod", "return")))


def played(domain: RetailDomain, task: Task, seed: int = 0, loose: float = 0.0) -> Demonstration:
    return asyncio.run(demonstrate(domain, task, seed, loose))


def said(*texts: str) -> Transcript:
    return Transcript([{"role": "assistant", "content": text} for text in texts])


def first(kind: str) -> Task:
    return next(task for task in ALL if task.data["kind"] == kind)


def opened(task: Task, domain: RetailDomain = DOMAIN) -> DatabaseEnvironment:
    environment = domain.environment()
    assert isinstance(environment, DatabaseEnvironment)
    environment.reset(task, 0)
    return environment


def judged(environment: DatabaseEnvironment, *texts: str) -> Evaluation:
    evaluation = environment.evaluate(said(*texts))
    assert isinstance(evaluation, Evaluation)
    return evaluation


def texts_of(demonstration: Demonstration) -> list[str]:
    return [message["content"] for message in demonstration.messages if message["role"] == "user"]


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
            assert wishes == 1
            assert writes <= 1
        if difficulty == "easy":
            assert task.data["customer"]["email"]
            assert None not in task.data["wishes"][0]["knows"].values()


def test_the_generator_repeats_itself_and_a_changed_one_is_found_out(monkeypatch, tmp_path):
    assert digest(tuple(generate("test"))) == digest(load_split("test"))
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
    async def all_replayed() -> list[Demonstration]:
        return [await replay_gold(domain, task) for task in ALL]

    before = shop().digest()
    for task, gold in zip(ALL, asyncio.run(all_replayed()), strict=True):
        assert (gold.reward, gold.evaluation.success) == (1.0, True), (task.id, gold.evaluation.details)
        idle = judged(opened(task, domain), "I am sorry, I cannot help.")
        assert (idle.reward, idle.success) == (0.0, False), task.id
    assert shop().digest() == before


@pytest.mark.parametrize("domain", [DOMAIN, COMPACT], ids=["full", "compact"])
def test_the_expert_solves_every_task_by_talking(domain):
    async def all_played() -> list[Demonstration]:
        return [await demonstrate(domain, task, 0) for task in ALL]

    for task, demonstration in zip(ALL, asyncio.run(all_played()), strict=True):
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
        opening = asyncio.run(customer(task, 3).open()).text
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
    assert played(DOMAIN, first("cancel"), loose=1.0).evaluation.details["database"]["wrong"]


def test_conversations_repeat_with_the_seed_and_vary_without_it():
    task = first("return")
    assert played(DOMAIN, task, 5).messages == played(DOMAIN, task, 5).messages
    assert len({json.dumps(played(DOMAIN, task, seed).messages) for seed in range(8)}) > 3


def test_questions_are_understood_by_the_customer():
    for verb, needs in NEEDS.items():
        task = next(task for task in ALL if task.data["wishes"][0]["verb"] == verb and task.data["customer"]["email"])
        answer = asyncio.run(customer(task, 0).reply(question(("email", *needs)))).text
        knows = task.data["wishes"][0]
        told = {**knows["knows"], **knows.get("before", {})}
        for fact in needs:
            if fact == "reason":
                assert reason_in(answer) == told[fact]
            elif told[fact] is not None:
                assert told[fact] in answer, (verb, fact, answer)
        assert task.data["customer"]["email"] in answer


# ---- customers


def replies(task: Task, *questions: str) -> list[str]:
    async def talk() -> list[str]:
        user = customer(task, 0)
        await user.open()
        return [(await user.reply(text)).text for text in questions]

    return asyncio.run(talk())


def test_a_customer_changes_its_mind_once_and_knows_better_from_then_on():
    task = first("return_another_item")
    wish = task.data["wishes"][0]
    before, change, agreed, after = replies(
        task, "Which item?", "Return it (yes/no)?", "Return that one (yes/no)?", "Which item is it?"
    )
    assert wish["before"]["item"] in before
    assert change == wish["change"]
    assert agreed in AGREE
    assert wish["knows"]["item"] in after


def test_a_customer_describes_the_order_whose_number_it_forgot():
    task = first("cancel_number_forgotten")
    (answer,) = replies(task, "What is the order number?")
    assert "#W" not in answer
    assert hinted(answer)[0] == task.data["wishes"][0]["hint"]


def test_a_customer_without_email_gives_name_and_zip_code():
    task = next(task for task in ALL if task.data["customer"]["email"] is None)
    email, name = replies(task, "Your email?", "Your name and zip code?")
    who = task.data["customer"]
    assert "@" not in email
    assert all(word in name for word in (who["first_name"], who["last_name"], who["zip"]))


def test_a_customer_yields_to_the_original_payment_method_and_gives_up_on_nonsense():
    task = first("refund_to_another_method")
    (answer,) = replies(task, "I cannot refund that. Use the original paypal_1 instead (yes/no)?")
    assert answer.startswith("Yes")
    *kept, last = replies(task, "Well.", "Well.", "Well.", "Well.")
    assert all(answer in OPENINGS["refund_to"] for answer in kept)
    assert last.startswith(GIVING_UP)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("Could you please give me your order ID and the reason for the cancellation?", "order"),
        ("I need your e-mail address and zip code.", "zip"),
        ("Please provide the order number.", "order"),
        ("What size would you like?", "wanted"),
        ("Which payment method should I use?", "payment"),
        ("What is your new address?", "address"),
    ],
)
def test_a_customer_understands_other_ways_to_ask(text, fact):
    task = next(
        task
        for task in ALL
        if {**task.data["wishes"][0]["knows"], "zip": 1}.get(fact) and len(task.data["wishes"]) == 1
    )
    wish = task.data["wishes"][0]
    told = task.data["customer"]["zip"] if fact == "zip" else {**wish["knows"], **wish.get("before", {})}[fact]
    assert told in replies(task, text)[0]


def test_a_customer_agrees_to_a_proposal_whatever_it_names():
    task = first("exchange")
    (answer,) = replies(task, "I will refund the payment method of your email address. Is that right?")
    assert answer in AGREE


def test_a_customer_brings_up_its_wishes_one_after_the_other():
    task = next(task for task in ALL if [wish["verb"] for wish in task.data["wishes"]] == ["home", "return"])
    (second,) = replies(task, "Done, your profile is changed.")
    assert second in OPENINGS["return"]


# ---- verdicts


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


def test_a_refusal_counts_only_with_the_order_and_in_one_message():
    task = first("cancel_refused")
    order_id = task.data["wishes"][0]["knows"]["order"]
    assert judged(opened(task), f"I can't cancel {order_id}.").reward == 1.0
    assert judged(opened(task), "I can't cancel it.").reward == 0.0
    assert judged(opened(task), f"About {order_id}:", "I can't.").reward == 0.0


def test_partial_credit_lies_between():
    task = next(task for task in ALL if len(task.data["actions"]) >= 2 and not task.data["forbidden"])
    environment = opened(task, RetailDomain("partial"))
    action = task.data["actions"][0]
    environment.call(action["name"], action["arguments"])
    assert 0.0 < judged(environment).reward < 1.0


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
    for task in load_split("train")[: SIZES["train"]["easy"]]:
        messages = played(COMPACT, task).messages
        text = [message["content"] + json.dumps(message.get("tool_calls", "")) for message in messages]
        assert len("".join(text)) < 1600, task.id
        assert len(messages) <= 13, task.id


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
