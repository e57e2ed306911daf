"""The help desk: every task can be solved truthfully and in order, by nothing less; tasks, tools, customers, expert.

What every domain must keep (instances, schemas, fresh state) is in tests/contract/test_domain_contract.py, what
policies that deserve nothing earn in tests/contract/test_canned_policies.py, how well claims and questions are
understood in tests/unit/test_language_*.py.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence

import pytest

from environments.help_desk import DOMAIN
from environments.help_desk.demonstrations import demonstrations, of_each_rule
from environments.help_desk.tasks import KINDS, PINNED, customer
from environments.help_desk.tools import HelpDesk
from mua.environment.protocol import Move, Task, Transcript
from mua.environment.user import STOP_SIGNAL
from mua.rollout.episode import EpisodeResult
from mua.types import Json
from mua.users.personas import DEFAULT, PERSONAS
from tests.desk_support import all_tasks, in_turn, with_persona

ALL = all_tasks("help_desk")
SAMPLE = ALL[::45]
SOME = {kind: next(task for task in PINNED.load("test") if task.data["kind"] == kind) for kind in KINDS}
WRITES = {"cancel": "cancel_order", "redirect": "change_destination", "return": "return_items"}


def agent(task: Task, moves: Sequence[Move], *, asked: Sequence[str] = ("What is your name?",)) -> EpisodeResult:
    """These moves with the scripted customer, after it was asked for its number, and its name if need be."""
    return with_persona(task, "brief", moves=in_turn(["What is the order number?", *asked, *moves]))


def wished_write(task: Task) -> Move:
    """The write that the customer wishes for, granted or not."""
    known = task.data["known"]
    more: Json = {"redirect": {"address": {"city": known.get("city")}}, "return": {"items": [known.get("item")]}}
    return WRITES[task.data["wish"]], {"order": known["order"], **more.get(task.data["wish"], {})}


def without(moves: Sequence[Move], *names: str) -> list[Move]:
    return [move for move in moves if isinstance(move, str) or move[0] not in names]


# ---- tasks


@pytest.mark.slow
def test_nothing_less_than_all_of_it_is_rewarded():
    for task in [*SOME.values(), *SAMPLE]:
        gold = DOMAIN.gold(task)
        for index, move in enumerate(gold):
            less = [*gold[:index], *gold[index + 1 :]]
            assert not agent(task, less).evaluation.reward, (task.id, move)


@pytest.mark.parametrize("name", PERSONAS)
def test_the_expert_solves_tasks_of_the_test_split_whoever_the_customer_is(name: str):
    """One task in four of a plain customer, whom end-to-end and canned tests meet too, one in sixteen of the others."""
    tasks = PINNED.load("test")[:: 4 if name == "plain" else 16]
    for task in tasks:
        found = with_persona(task, name)
        assert found.reward == 1.0, (task.id, found.evaluation.details, found.messages)
        assert found.messages[-1]["content"].endswith(STOP_SIGNAL)


# ---- what the reward demands


UNTRUE = (
    "I have refunded $9999 to you.",
    "Your other order is cancelled as well.",
    "I have also verified your identity with your bank, and order 1234 is shipped.",
    "Order {order} has been delivered to Atlantis and cancelled.",
    "Order {order} is not on your account.",
    "Order {order} is pending, shipped and delivered.",
)


@pytest.mark.parametrize("lie", UNTRUE)
def test_an_untrue_word_beside_the_gold_moves_costs_everything(lie: str):
    for kind in ("track", "refused_by_status", "return"):
        task = SOME[kind]
        if kind == "track" and "not on your account" not in lie and "$" not in lie:
            continue
        *moves, last = DOMAIN.gold(task)
        assert isinstance(last, str)
        said = f"{lie.format(order=task.data['known']['order'])} {last}"
        found = agent(task, [*moves, said]).evaluation
        assert not found.reward, (kind, said)
        assert found.details["untrue"]


def test_a_change_or_a_refusal_without_looking_is_not_rewarded():
    for kind, task in SOME.items():
        gold = DOMAIN.gold(task)
        for skipped in ("check_owner", "get_order", "get_item"):
            less = without(gold, skipped)
            if less != list(gold):
                found = agent(task, less).evaluation
                assert not found.reward, (kind, skipped)
                assert found.details["unmet"], (kind, skipped)


def test_looking_afterwards_is_too_late():
    task = SOME["cancel"]
    gold = DOMAIN.gold(task)
    look, write, told = gold[:2], gold[2], gold[3]
    assert agent(task, [*look, write, told]).evaluation.success
    assert not agent(task, [write, *look, told]).evaluation.success


def test_an_owner_checked_by_a_name_that_the_customer_never_gave_is_not_checked():
    task = SOME["cancel"]
    gold = DOMAIN.gold(task)

    found = agent(task, gold, asked=()).evaluation
    assert not found.success
    assert any("check_owner" in line for line in found.details["unmet"])


def test_a_stranger_s_wish_granted_is_not_rewarded_though_the_refusal_was_told():
    for kind in ("refused_by_status", "refused_final_sale"):
        task = SOME[kind]
        *moves, last = DOMAIN.gold(task)
        found = agent(task, [*moves, wished_write(task), last]).evaluation
        assert not found.reward
        assert found.details["database"]


def test_facts_count_only_when_the_customer_was_told():
    task = SOME["track"]
    found = agent(task, DOMAIN.gold(task))
    desk = HelpDesk()
    for hidden in ({"tool_calls": []}, {"truncated": True}, {"tool_call_errors": [{}]}, {"role": "user"}):
        desk.reset(task, 0)
        messages = [*found.messages[:-2], found.messages[-2] | hidden, found.messages[-1]]
        verdict = desk.evaluate(Transcript(messages))
        assert bool(verdict.reward) == (hidden == {"tool_calls": []}), hidden
    desk.close()


# ---- splits and demonstrations


def test_demonstrations_are_repeatable_and_of_no_split():
    def made(seed: int) -> list[list[Json]]:
        return list(demonstrations(44, seed, "You are the help desk."))

    first = made(1)
    assert made(1) == first
    assert made(2) != first
    assert all(messages[0] == {"role": "system", "content": "You are the help desk."} for messages in first)
    assert {call["function"]["name"] for m in first for turn in m for call in turn.get("tool_calls", [])} == {
        "get_order", "check_owner", "get_item", *WRITES.values(),
    }  # fmt: skip


def test_demonstrations_show_every_rule_as_often():
    counts = {"track": 6, "cancel": 2, "refused_by_status": 12}
    made = list(of_each_rule(counts, 3, "You are the help desk.", ["brief"]))
    assert made == list(of_each_rule(counts, 3, "You are the help desk.", ["brief"]))
    assert len(made) == 20
    said = {"cancel": "cancel", "city": "redirect", "item": "return"}
    rules = Counter[tuple[str, str]]()
    for talk in made:
        (status,) = (json.loads(m["content"])["status"] for m in talk if "status" in m["content"])
        if talk[-2]["content"].startswith("Sorry"):
            rules[next(wish for word, wish in said.items() if word in talk[1]["content"]), status] += 1
    wrong = {"cancel": ("shipped", "delivered"), "redirect": ("shipped", "delivered"), "return": ("pending", "shipped")}
    assert rules == {(wish, status): 2 for wish, statuses in wrong.items() for status in statuses}


# ---- customers


def known_in(task: Task, text: str) -> set[str]:
    """Names of the customer's facts that ``text`` reveals."""
    return {name for name, value in task.data["known"].items() if re.search(rf"\b{re.escape(value)}\b", text)}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_fact_is_told_when_asked_and_only_that_one(kind: str):
    task = SOME[kind]
    questions = {
        "order": "May I have your order number, please?",
        "name": "And who am I speaking with?",
        "item": "Which item would you like to send back?",
        "city": "Where should we send it instead?",
    }
    for asked, question in questions.items():
        for seed in range(4):
            reply = await customer(task, seed, ["plain"]).reply(question)
            assert not reply.stop
            assert known_in(task, reply.text) == {asked} & task.data["known"].keys(), reply.text


async def first_replies(persona: str, question: str, count: int = 12) -> list[str]:
    tasks = PINNED.load("train")[:count]
    return [(await customer(task, 0, [persona]).reply(question)).text for task in tasks]


async def test_how_much_is_told_at_once_depends_on_the_person():
    question, tasks = "What are your name and your order number?", PINNED.load("train")[:12]
    shown = {name: await first_replies(name, question) for name in ("terse", "plain")}
    counts = {
        name: {len(known_in(task, text)) for task, text in zip(tasks, texts, strict=True)}
        for name, texts in shown.items()
    }
    assert counts == {"terse": {1}, "plain": {2}}
    for task in tasks:
        assert known_in(task, (await customer(task, 0, ["forthcoming"]).open()).text) == task.data["known"].keys()
        assert known_in(task, (await customer(task, 0, ["plain"]).open()).text) == set()


async def test_the_forgetful_look_for_it_first_and_the_careless_put_it_right():
    tasks, ask = PINNED.load("train")[:40], "What is the order number?"
    forgot = erred = 0
    for task in tasks:
        person = customer(task, 0, ["forgetful"])
        if not known_in(task, (await person.reply(ask)).text):
            forgot += 1
            assert "order" in known_in(task, (await person.reply(ask)).text)
        person = customer(task, 0, ["careless"])
        if "order" not in known_in(task, (await person.reply(ask)).text):
            erred += 1
            assert "order" in known_in(task, (await person.reply("One moment, I am looking it up.")).text)
    assert forgot > 10
    assert erred > 8


async def test_patience_ends_sooner_for_some():
    async def lasts(name: str) -> int:
        person, count = customer(SOME["track"], 0, [name]), 0
        while not (await person.reply("The weather is a lovely green colander.")).stop:
            count += 1
        return count

    assert [await lasts(name) for name in ("impatient", "plain", "talkative")] == [1, 4, 6]


async def test_the_stubborn_ask_once_more_before_they_accept_a_refusal():
    for name, stops in (("stubborn", [False, True]), ("plain", [True])):
        person = customer(SOME["refused_by_status"], 0, [name])
        refusal = "I'm sorry, but that order has already shipped, so I can't cancel it."
        assert [(await person.reply(refusal)).stop for _ in stops] == stops


async def test_what_is_not_understood_is_said_so():
    for name in DEFAULT:
        reply = await customer(SOME["cancel"], 0, [name]).reply("Blue ideas sleep furiously beneath the ladder.")
        assert "hat do you mean" in reply.text
        assert not reply.stop
