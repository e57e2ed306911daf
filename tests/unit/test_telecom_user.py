"""The scripted user of the telecom domain: what it understands, does, tells, declines, how it talks, when it leaves.

Does not cover whole conversations with the expert (test_telecom.py), how often other people's messages are understood
(the bench of the readers), nor an LLM in its place (test_telecom_rollout.py).
"""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.kit.conduct import agrees
from environments.kit.scripted import reader_of
from environments.telecom.faults import SOLVED
from environments.telecom.user import HERE, MOST, customer, requests
from mua.environment.tool_arguments import validate_arguments
from mua.environment.user import STOP_SIGNAL
from mua.users.personas import DEFAULT, PERSONAS
from tests.tables import cases_of, table
from tests.telecom_support import ALL, Phone, do, first, opened, person, with_fault

cases = cases_of("telecom_user")
TABLE = table("telecom_user")

# ---- what it understands


def asked(text: str, wish: str = "no_data") -> list[str]:
    """What a message asks for, as text."""
    found = []
    for request in requests(reader_of(HERE).read(text, wish).instructs, text):
        values = ",".join(str(value) for value in request.arguments.values())
        found.append(f"{request.tool}({values})")
    return found


@cases
def test_advice_in_plain_words_is_understood(text: str, expected: list[str]):
    assert asked(text) == expected


@cases
def test_what_is_no_advice(text: str):
    assert asked(text) == []


@pytest.mark.parametrize("persona", PERSONAS)
async def test_what_cannot_be_understood_is_never_agreed_to(persona: str):
    for text in TABLE["test_what_cannot_be_understood_is_never_agreed_to"]:
        who, phone = person(first("plan_change"), persona=persona)
        said = (await who.reply(text)).text
        assert "what do you mean" in said.lower(), (persona, text, said)
        assert not agrees(said)
        assert phone.called == []


VOCABULARY = TABLE["VOCABULARY"]
WORDS = VOCABULARY.split()
TOOLS = sorted(tool.name for tool in opened(ALL[0]).user_tools())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=40), st.lists(st.sampled_from(TOOLS), max_size=8)
)
def test_whatever_is_said_the_user_only_does_what_its_tools_allow(words: list[str], instructs: list[str]):
    schemas = {tool.name: tool for tool in opened(ALL[0]).user_tools()}
    for request in requests(instructs, " ".join(words)):
        if request.asks_back:
            assert not request.tool
        elif request.tool != "pay_bill":  # which bill, the phone says
            assert validate_arguments(schemas[request.tool], request.arguments) is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=40), st.integers(0, len(ALL) - 1))
def test_whatever_is_said_the_user_says_something(words: list[str], index: int):
    who, _ = person(ALL[index])
    reply = asyncio.run(who.reply(" ".join(words)))
    assert reply.text.strip()
    assert reply.stop == (STOP_SIGNAL in reply.text)


# ---- what it does


async def test_the_user_does_what_it_is_told_and_nothing_else():
    who, phone = person(first("no_service", "airplane"))
    await who.open()
    for text in ("What is your phone number?", "Shall I look at your bills?", "Hm."):
        await who.reply(text)
    assert phone.called == []
    said = await who.reply("Please turn airplane mode off.")
    assert phone.called == [("set_airplane_mode", {"on": False})]
    assert "airplane mode is off now" in said.text
    assert not said.stop


async def test_a_condition_is_looked_at_before_anything_is_changed():
    text = "Please check whether mobile data is on, and if it is off, turn it on."
    for fault, expected in (
        ("mobile_data", ["check_mobile_data", "set_mobile_data"]),
        ("data_saver", ["check_mobile_data"]),
    ):
        who, phone = person(with_fault(fault))
        await who.reply(text)
        names = [name for name, _ in phone.called]
        assert list(dict.fromkeys(names)) == expected, (fault, names)


async def test_the_user_leaves_when_its_phone_shows_that_the_problem_is_gone():
    who, phone = person(with_fault("airplane"))
    assert not (await who.reply("Does it work now?")).stop
    assert not (await who.reply("Please turn airplane mode off.")).stop
    last = await who.reply("Is it working now?")
    assert last.stop
    assert last.text.endswith(STOP_SIGNAL)
    assert phone.called[-1] == ("check_status_bar", {})


async def test_the_user_goes_on_to_its_next_wish():
    who, _ = person(first("speed_and_bar"))
    assert not (await who.reply("Sorry, I cannot make it faster.")).stop
    last = await who.reply("Done, premium numbers are barred. Is there anything else I can help you with?")
    assert last.stop


async def test_a_user_may_decline_a_factory_reset():
    keeps = next(task for task in ALL if task.data["keeps_phone_data"])
    gives = next(task for task in ALL if not task.data["keeps_phone_data"])
    for task, expected in ((keeps, []), (gives, [("factory_reset", {})])):
        who, phone = person(task)
        said = await who.reply("Please do a factory reset of your phone.")
        assert phone.called == expected
        assert ("photos" in said.text) == (expected == []) or expected


@pytest.mark.parametrize("persona", ["impatient", "plain", "talkative"])
async def test_what_brings_it_no_further_costs_patience(persona: str):
    who, phone = person(first("no_data"), persona=persona)
    patience = PERSONAS[persona].patience
    replies = [await who.reply("Lorem ipsum dolor sit amet.") for _ in range(patience + 1)]
    assert [reply.stop for reply in replies] == [False] * patience + [True]
    assert phone.called == []


async def test_a_long_list_is_cut_and_the_user_says_so():
    who, phone = person(first("no_data"))
    said = await who.reply(
        "Turn the VPN off. Turn Wi-Fi on. Turn the data saver off. Turn the battery saver off. Restart your phone. "
        "Reset the APN. Turn mobile data on. Turn airplane mode off. Run a speed test."
    )
    assert len(phone.called) == MOST
    assert "a lot at once" in said.text


# ---- what it wants and does not


async def test_the_user_changes_its_mind_and_keeps_to_amounts():
    task = first("plan_change_of_mind")
    who, _ = person(task)
    wish = task.data["wishes"][0]
    assert wish["first"] in (await who.open()).text
    assert wish["plan"] in (await who.reply(f"The {wish['first']} plan it is. Shall I change it?")).text
    assert agrees((await who.reply(f"The {wish['plan']} plan then. Shall I change it?")).text)
    task = first("refuel")
    who, _ = person(task)
    gb = task.data["wants"]["gb"]
    assert f"{gb} GB" in (await who.reply(f"Shall I add {gb + 1} GB?")).text
    assert agrees((await who.reply(f"Shall I add {gb} GB?")).text)


@pytest.mark.parametrize("persona", DEFAULT)
async def test_the_user_declines_what_it_never_asked_for(persona: str):
    for text in TABLE["test_the_user_declines_what_it_never_asked_for"]:
        who, _ = person(with_fault("airplane"), persona=persona)
        assert not agrees((await who.reply(text)).text), text


async def test_a_user_that_will_not_pay_does_not():
    who, phone = person(first("will_not_pay"))
    assert "cannot pay" in (await who.reply("Would you like to pay the bill now?")).text
    assert "cannot pay" in (await who.reply("Please pay the bill on your phone.")).text
    assert phone.called == []


# ---- what it tells


async def test_without_a_phone_in_its_hands_the_user_says_so():
    said = (await customer(ALL[0], 0, ["brief"]).reply("What does the status bar show?")).text
    assert "do not know" in said


# ---- how it talks


# ---- every gold action can be had by words

WORDINGS: dict[str, tuple[str, ...]] = TABLE["WORDINGS"]


@pytest.mark.parametrize("seed", range(3))
async def test_every_gold_action_of_the_user_can_be_had_by_words(seed: int):
    """Whatever the user says: only its phone counts, and that it leaves once its problem is gone."""
    for task in ALL[seed::5]:
        environment = opened(task)
        who, phone = customer(task, seed, ["talkative"]), Phone(environment)
        who.take_tools(phone)
        for number, action in enumerate(task.data["actions"]):
            if action.get("requestor") == "user":
                ways = WORDINGS[action["name"]]
                await who.reply(ways[(number + seed) % len(ways)].format(**action["arguments"]))
                assert (action["name"], action["arguments"]) in phone.called, (task.id, action, phone.called)
            else:
                do(environment, action)
        if set(task.data["assertions"]) & set(SOLVED.values()):
            assert (await who.reply("Does it work now?")).stop or len(task.data["wishes"]) > 1
