"""The help desk: every task of every split can be solved and is not solved by idling; claims, customer, tools.

What every domain must keep (leases, schemas, fresh state) is in tests/contract/test_domain_contract.py.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import get_args

import pytest

from environments.help_desk import DOMAIN
from environments.help_desk import demonstrations as demonstrations_module
from environments.help_desk import tasks as tasks_module
from environments.help_desk.claims import claims, missing_facts
from environments.help_desk.database import Database, World, difference
from environments.help_desk.demonstrations import demonstrations
from environments.help_desk.tasks import FIRST_SEED, KINDS, SIZES, generate, load_split, write_manifest
from environments.help_desk.tools import HelpDesk, gold_snapshot
from environments.help_desk.user import GIVING_UP, OPENINGS, PATIENCE, THANKS, UNKNOWN, ScriptedCustomer
from mua.environment.demonstrate import Demonstration, demonstrate
from mua.environment.protocol import Evaluation, Split, Task, Transcript
from mua.errors import MuaError
from mua.types import Json
from mua.users.protocol import STOP_SIGNAL

SPLITS: tuple[Split, ...] = get_args(Split)
ALL: list[Task] = [task for split in SPLITS for task in load_split(split)]
PHRASES = {
    "place": "{subject} is in {value}",
    "status": "{subject} is {value}",
    "account": "{subject} is {value}",
    "sale": "{subject} is {value}",
}
WRITES = {"cancel": "cancel_order", "redirect": "change_destination", "return": "return_items"}


def told(*texts: str) -> Transcript:
    return Transcript([{"role": "assistant", "content": text} for text in texts])


def facts_of(task: Task) -> list[str]:
    return [PHRASES[fact["attribute"]].format(**fact) for fact in task.data["facts"]]


def judged(task: Task, calls: list[Json], transcript: Transcript) -> Evaluation:
    desk = HelpDesk()
    desk.reset(task, 0)
    for action in calls:
        assert not desk.call(action["name"], action["arguments"]).error
    verdict = desk.evaluate(transcript)
    desk.close()
    return verdict


def forbidden(task: Task) -> Json:
    """The write that the customer of a refused wish asks for."""
    known = task.data["known"]
    more = {
        "cancel": lambda: {},
        "redirect": lambda: {"address": {"city": known["city"]}},
        "return": lambda: {"items": [known["item"]]},
    }[task.data["wish"]]()
    return {"name": WRITES[task.data["wish"]], "arguments": {"order": known["order"], **more}}


# ---- tasks


def test_gold_actions_and_the_required_facts_are_rewarded_in_every_task():
    for task in ALL:
        verdict = judged(task, task.data["actions"], told(*facts_of(task)))
        assert (verdict.reward, verdict.success) == (1.0, True), (task.id, verdict.details)


def test_doing_and_saying_nothing_is_rewarded_in_none():
    assert not any(judged(task, [], told()).reward for task in ALL)


def test_half_of_the_task_is_not_rewarded():
    for task in ALL:
        if task.data["actions"]:
            assert not judged(task, [], told("Done.", *facts_of(task))).reward, task.id
        if task.data["facts"]:
            assert not judged(task, task.data["actions"], told("Done.")).reward, task.id


def test_each_task_changes_something_or_requires_a_fact():
    for task in ALL:
        database = Database(World(**task.data["world"]))
        changes = difference(database.snapshot(), gold_snapshot(task))
        database.close()
        assert bool(changes) == bool(task.data["actions"]), task.id
        assert changes or task.data["facts"], task.id


def test_the_scripted_expert_solves_every_task_with_the_scripted_customer():
    async def all_of_them() -> list[Demonstration]:
        return [await demonstrate(DOMAIN, task, 0) for task in ALL]

    for task, played in zip(ALL, asyncio.run(all_of_them()), strict=True):
        assert (played.reward, played.evaluation.success) == (1.0, True), (task.id, played.evaluation.details)
        assert played.messages[-1]["role"] == "user"
        assert played.messages[-1]["content"].removesuffix(f" {STOP_SIGNAL}") in THANKS


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
async def test_the_expert_solves_them_with_other_wordings(kind: str, seed: int):
    played = await demonstrate(DOMAIN, generate("test", 5_000_000 + seed, kind), seed)
    assert played.evaluation.success


async def test_an_expert_loose_of_tongue_fails_exactly_where_a_fact_must_be_told():
    for task in load_split("validation"):
        verdict = (await demonstrate(DOMAIN, task, 0, loose=1.0)).evaluation
        assert verdict.success == (not task.data["facts"]), task.id
        assert not verdict.details["database"]


def test_a_forbidden_write_is_not_rewarded_though_the_refusal_was_told():
    refused = [task for task in ALL if not task.data["actions"] and task.data["wish"] in WRITES]
    assert len(refused) > len(ALL) // 2
    for task in refused:
        verdict = judged(task, [forbidden(task)], told(*facts_of(task)))
        assert not verdict.reward, task.id
        assert verdict.details["database"]
        assert not verdict.details["unsaid"]


def test_cancelling_a_shipped_order_works_and_is_wrong():
    task = next(t for t in ALL if t.data["kind"] == "cancel_refused" and t.data["facts"][0]["value"] == "shipped")
    order = task.data["known"]["order"]
    verdict = judged(task, [{"name": "cancel_order", "arguments": {"order": order}}], told(f"order {order} is shipped"))
    assert (verdict.reward, verdict.success) == (0.0, False)
    (line,) = verdict.details["database"]
    assert line.startswith(f"orders {order}: is ")


def test_a_write_too_many_is_not_rewarded():
    for task in [t for t in ALL if t.data["kind"] == "cancel"][:20]:
        other = next(row[0] for row in task.data["world"]["orders"] if row[0] != task.data["known"]["order"])
        extra = {"name": "cancel_order", "arguments": {"order": other}}
        assert not judged(task, [*task.data["actions"], extra], told()).reward


def test_facts_count_only_when_the_customer_was_told():
    task = next(task for task in ALL if task.data["kind"] == "track")
    (fact,) = facts_of(task)
    for hidden in ({"tool_calls": [{}]}, {"truncated": True}, {"tool_call_errors": [{}]}, {"role": "user"}):
        message = {"role": "assistant", "content": fact, **hidden}
        assert not judged(task, [], Transcript([message])).reward
    assert judged(task, [], told(fact)).reward


def test_splits_are_disjoint_by_seed_and_by_content():
    seeds = {split: {int(task.id.rpartition("/")[2]) for task in load_split(split)} for split in SPLITS}
    worlds = {split: {json.dumps(task.data["world"]) for task in load_split(split)} for split in SPLITS}
    for found in (seeds, worlds):
        assert {split: len(members) for split, members in found.items()} == SIZES
        assert len(set().union(*found.values())) == sum(SIZES.values())


def test_every_split_has_every_kind_in_equal_parts():
    for split in SPLITS:
        counts = [sum(task.data["kind"] == kind for task in load_split(split)) for kind in KINDS]
        assert max(counts) - min(counts) <= 1


def test_demonstrations_are_repeatable_and_of_no_split():
    def made(seed: int) -> list[list[Json]]:
        return list(demonstrations(44, 0.5, seed, "You are the help desk."))

    first = made(1)
    assert made(1) == first
    assert made(2) != first
    assert all(messages[0] == {"role": "system", "content": "You are the help desk."} for messages in first)
    assert {call["function"]["name"] for m in first for turn in m for call in turn.get("tool_calls", [])} == {
        "get_order", "check_owner", "get_item", *WRITES.values(),
    }  # fmt: skip


def test_demonstrations_begin_behind_the_seeds_of_the_training_split():
    last = FIRST_SEED["train"] + SIZES["train"]
    assert last < demonstrations_module._FIRST_SEED
    assert FIRST_SEED["validation"] > demonstrations_module._FIRST_SEED + 100_000


def test_a_changed_generator_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tasks_module, "PRODUCTS", ("Table", *tasks_module.PRODUCTS[1:]))
    with pytest.raises(MuaError) as caught:
        load_split.__wrapped__("validation")
    message = str(caught.value)
    assert "manifest.json: validation: what is generated differs from what is pinned" in message
    assert "python -m environments.help_desk.tasks" in message


def test_the_manifest_is_what_the_generator_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    committed = tasks_module.MANIFEST.read_text()
    monkeypatch.setattr(tasks_module, "MANIFEST", tmp_path / "manifest.json")
    write_manifest()
    assert (tmp_path / "manifest.json").read_text() == committed


# ---- claims

SHIPPED = [{"subject": "order K7", "attribute": "status", "value": "shipped"}]


@pytest.mark.parametrize(
    "text",
    [
        "order K7 is shipped",
        "ORDER k7 IS Shipped.",
        "Sorry, Order  K7\nis   shipped, so I cannot do that.",
        "I looked: order K7 is shipped! Order L1 is pending.",
    ],
)
def test_wordings_of_a_claim(text: str):
    assert missing_facts(SHIPPED, [text]) == []


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([], "nothing"),
        (["It is shipped."], "nothing"),
        (["order L1 is shipped"], "nothing"),
        (["order K77 is shipped"], "nothing"),
        (["order K7 is pending"], "pending"),
        (["order K7 is shippedish"], "nothing"),
        (["order K7 is not shipped"], "nothing"),
        (["order K7 is in Oslo"], "nothing"),
        (["order K7 is shipped, order K7 is pending"], "pending, shipped"),
        (["order K7 is shipped", "Wait.", "Order K7 is delivered"], "delivered, shipped"),
    ],
)
def test_what_is_no_claim_or_cancels_one(texts: list[str], said: str):
    assert missing_facts(SHIPPED, texts) == [f"order K7 is shipped (said: {said})"]


def test_repeating_a_claim_is_no_contradiction():
    assert missing_facts(SHIPPED, ["order K7 is shipped", "Order K7 is shipped."]) == []


@pytest.mark.parametrize(
    ("text", "claim"),
    [
        ("order K7 is in Oslo", (("order k7", "place"), {"oslo"})),
        ("the Lamp is final sale", (("lamp", "sale"), {"final sale"})),
        ("order K7 is not  on your account", (("order k7", "account"), {"not on your account"})),
        ("order K7 is delivered", (("order k7", "status"), {"delivered"})),
    ],
)
def test_every_attribute(text: str, claim: tuple):
    assert list(claims([text]).items()) == [claim]


def test_the_policy_page_states_facts_in_words_that_count():
    section = DOMAIN.system_prompt("full").split("## How to say it")[1]
    examples = re.findall(r"^- `(.+?)`", section, re.MULTILINE)
    assert len(examples) == 4
    assert all(len(claims([example])) == 1 for example in examples)


# ---- customer

SOME = [next(task for task in ALL if task.data["kind"] == kind) for kind in KINDS]
QUESTIONS = {
    "order": "What is the order number?",
    "name": "What is your name?",
    "item": "Which item is it?",
    "city": "Which city should it go to?",
}


def known_in(task: Task, text: str) -> set[str]:
    """Names of the customer's facts that ``text`` reveals."""
    return {name for name, value in task.data["known"].items() if re.search(rf"\b{re.escape(value)}\b", text)}


async def test_no_opening_reveals_anything():
    for task in ALL:
        for seed in range(3):
            opening = await ScriptedCustomer(task, seed).open()
            assert opening.text in OPENINGS[task.data["wish"]]
            assert not opening.stop
            assert known_in(task, opening.text) == set()


@pytest.mark.parametrize("task", SOME, ids=lambda task: task.data["kind"])
async def test_a_fact_is_told_when_asked_and_only_that_one(task: Task):
    for asked, question in QUESTIONS.items():
        for seed in range(6):
            reply = await ScriptedCustomer(task, seed).reply(question)
            assert not reply.stop
            assert known_in(task, reply.text) == {asked} & task.data["known"].keys()
            assert (reply.text in UNKNOWN) == (asked not in task.data["known"])


async def test_two_questions_get_two_answers():
    (task,) = [task for task in SOME if task.data["kind"] == "return"]
    reply = await ScriptedCustomer(task, 0).reply("What is your name, and which item is it?")
    assert known_in(task, reply.text) == {"name", "item"}


async def test_small_talk_reveals_nothing_and_wears_the_patience_out():
    for task in SOME:
        customer = ScriptedCustomer(task, 0)
        for _ in range(PATIENCE):
            reply = await customer.reply("One moment please.")
            assert reply.text in OPENINGS[task.data["wish"]]
            assert not reply.stop
        reply = await customer.reply("How are you today?")
        assert reply.stop
        assert reply.text.removesuffix(f" {STOP_SIGNAL}") in GIVING_UP


@pytest.mark.parametrize(
    "text", ["Done, order K7 cancelled.", "Sorry, order K7 is shipped.", "Order K7 is in Oslo.", "I cannot do that."]
)
async def test_an_answer_ends_the_conversation_with_the_stop_signal(text: str):
    reply = await ScriptedCustomer(SOME[0], 0).reply(text)
    assert reply.stop
    assert reply.text.endswith(STOP_SIGNAL)


async def test_a_question_ends_nothing_however_sorry_it_is():
    reply = await ScriptedCustomer(SOME[0], 0).reply("Sorry, what is the order number?")
    assert not reply.stop
    assert known_in(SOME[0], reply.text) == {"order"}


async def test_wording_varies_with_the_seed_and_with_nothing_else():
    async def words(seed: int) -> tuple[str, ...]:
        customer = ScriptedCustomer(SOME[0], seed)
        said = [await customer.open(), *[await customer.reply(question) for question in QUESTIONS.values()]]
        return tuple(reply.text for reply in said)

    assert len({await words(seed) for seed in range(20)}) > 10
    assert [await words(seed) for seed in range(5)] == [await words(seed) for seed in range(5)]


def test_an_llm_customer_is_told_what_the_scripted_one_knows():
    for task in ALL:
        assert known_in(task, DOMAIN.persona(task)) == task.data["known"].keys(), task.id


# ---- tools


@pytest.fixture
def task() -> Task:
    return next(task for task in ALL if task.data["kind"] == "return")


def wrong_calls(task: Task) -> list[tuple[str, object]]:
    order, item = task.data["known"]["order"], task.data["known"]["item"]
    return [
        ("no_such_tool", {}),
        ("get_order", {}),
        ("get_order", {"order": 7}),
        ("get_order", {"order": order, "verbose": True}),
        ("get_order", [order]),
        ("get_order", {"order": "' OR 1=1 --"}),
        ("check_owner", {"order": "Z99", "name": "Ada"}),
        ("get_item", {"order": order, "item": "Anvil"}),
        ("cancel_order", {"order": "Z99"}),
        ("cancel_order", {"order": None}),
        ("return_items", {"order": order, "items": []}),
        ("return_items", {"order": order, "items": item}),
        ("return_items", {"order": order, "items": [item, "Anvil"]}),
        ("return_items", {"order": "Z99", "items": [item]}),
        ("change_destination", {"order": order, "address": "Oslo"}),
        ("change_destination", {"order": order, "address": {}}),
        ("change_destination", {"order": order, "address": {"city": "Atlantis"}}),
        ("change_destination", {"order": order, "address": {"city": "Oslo", "street": "x"}}),
        ("change_destination", {"order": "Z99", "address": {"city": "Oslo"}}),
        ("transfer_to_human", {}),
    ]


def test_wrong_calls_are_error_results_and_change_nothing(task: Task):
    desk = HelpDesk()
    desk.reset(task, 0)
    before = desk._db.snapshot()
    for name, arguments in wrong_calls(task):
        result = desk.call(name, arguments)
        assert (result.error, result.terminal) == (True, False), (name, arguments)
        assert "error" in result.text
    assert desk._db.snapshot() == before
    desk.close()


def test_reading_tools_give_the_rows_of_the_task_and_change_nothing(task: Task):
    desk = HelpDesk()
    desk.reset(task, 0)
    before = desk._db.snapshot()
    world = World(**task.data["world"])
    for row in world.orders:
        order, items = world.order(row[0]), world.items_of(row[0])
        assert json.loads(desk.call("get_order", {"order": row[0]}).text) == {
            "status": order["status"],
            "place": order["place"],
            "items": [item["product"] for item in items],
        }
        for item in items:
            answer = desk.call("get_item", {"order": row[0], "item": item["product"]}).text
            assert json.loads(answer) == {"price": item["price"], "final_sale": bool(item["final_sale"])}
        for customer, name in world.customers:
            answer = desk.call("check_owner", {"order": row[0], "name": name.upper()}).text
            assert json.loads(answer) == {"owner": customer == order["customer"]}
    assert desk._db.snapshot() == before
    desk.close()


def test_each_writing_tool_changes_exactly_its_rows(task: Task):
    order, item = task.data["known"]["order"], task.data["known"]["item"]
    desk = HelpDesk()
    desk.reset(task, 0)
    start = desk._db.snapshot()
    assert desk.call("return_items", {"order": order, "items": [item]}).text == '{"ok": true}'
    assert desk.call("change_destination", {"order": order, "address": {"city": "Riga"}}).text == '{"ok": true}'
    assert desk.call("cancel_order", {"order": order}).text == '{"ok": true}'
    changed = desk._db.snapshot()
    desk.close()
    (returned,) = [key for key in start["items"] if start["items"][key] != changed["items"][key]]
    assert changed["items"][returned] == (*start["items"][returned][:-1], 1)
    assert start["items"][returned][1:3] == (order, item)
    assert [key for key in start["orders"] if start["orders"][key] != changed["orders"][key]] == [order]
    assert (changed["orders"][order][2], changed["orders"][order][4]) == ("cancelled", "Riga")


def test_a_transfer_is_terminal(task: Task):
    desk = HelpDesk()
    desk.reset(task, 0)
    result = desk.call("transfer_to_human", {"reason": "asked"})
    assert (result.error, result.terminal) == (False, True)
    assert not desk.evaluate(told("I transfer you.")).reward
    desk.close()
