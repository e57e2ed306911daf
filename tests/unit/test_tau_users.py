"""The user by rules on official data: what it says unasked, what can be got by asking, when it is content.

Reads all official tau-bench tasks where they are at hand (tests/tau_support.py), and small ones always.
Not covered: whether every sentence is good English, which somebody has to read; telecom's user with its phone
(tests/unit/test_tau2_data.py); how well questions are understood (tests/unit/test_language_understanding.py).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from functools import lru_cache

import pytest
from tau_support import FOLDER, SMALL

from environments._tau.folder import task_of_tau2
from environments._tau.instruction import first_person, read_instruction, spoken, tidied, veiled
from environments._tau.user import PATIENCE, InstructedUser, shortened
from mua.environment.user import UserReply
from tests.tables import cases_of, table

cases = cases_of("tau_users")
TABLE = table("tau_users")

ASKED = TABLE["ASKED"]
IDS = re.compile(
    r"#W\d+|[\w.]+@[\w.]+\w|\b(?:credit_card|gift_card|paypal|certificate)_\d+|\b[a-z]+_[a-z]+_\d{3,}"
    r"|(?<=in )\d{5}\b|(?<=is )\d{5}\b"
    r"|\b\d{10}\b|\b\d{4}-\d\d-\d\d\b|\bHAT\d{3}\b|\b(?=[A-Z]*\d)[A-Z\d]{6}\b"
)
NAMES = re.compile(r"(?:^You are|^Your? name is|called|passenger) ([A-Z][a-z]+(?: [A-Z][a-z]+)?)")


SOME, ALL = 7, 1
"""Of the official training tasks, every so many."""
SHARES = [SOME, pytest.param(ALL, marks=pytest.mark.slow)]


@lru_cache(maxsize=2)
def everybody(share: int) -> list[tuple[str, str]]:
    """Domain and instruction: of the small folders, and of tau-bench's where they are at hand."""
    found = []
    for domain in ASKED:
        entries = json.loads((SMALL / domain / "tasks.json").read_text())
        found += [(domain, task_of_tau2(domain, "test", entry, "here").data["instruction"]) for entry in entries]
        for path in sorted((FOLDER / domain).glob("tasks_*.jsonl")):
            lines = path.read_text().splitlines()[:: share if "test" in path.name else 8 * share - 7]
            found += [(domain, json.loads(line)["instruction"]) for line in lines]
    return found


def replies(domain: str, instruction: str, *texts: str) -> list[UserReply]:
    async def talk() -> list[UserReply]:
        user = InstructedUser(instruction, domain)
        said = [await user.open()]
        for text in texts:
            said.append(await user.reply(text))
            if said[-1].stop:
                break
        await user.close()
        return said

    return asyncio.run(talk())


def texts(domain: str, instruction: str, *said: str) -> list[str]:
    return [reply.text for reply in replies(domain, instruction, *said)]


def failing(share: int, check: Callable[[str, str], bool]) -> list[str]:
    return [text for domain, text in everybody(share) if not check(domain, text)]


# ---- over all instructions


@pytest.mark.parametrize("share", SHARES)
def test_the_opening_is_short_and_holds_no_number(share: int):
    def brief(domain: str, text: str) -> bool:
        (opening,) = texts(domain, text)
        return 3 * len(opening) <= max(len(text), 90) and not IDS.search(opening)

    assert failing(share, brief) == []


@pytest.mark.parametrize("share", SHARES)
def test_nobody_recites_or_speaks_of_themselves_as_you(share: int):
    def plain(domain: str, text: str) -> bool:
        questions = [
            *ASKED[domain],
            "Tell me everything, please.",
            "Do you confirm (yes/no)?",
            "I am sorry, I can not.",
        ]
        said = texts(domain, text, *questions, *["That is done. Is there anything else?"] * 6)
        whole = max(len(one) for one in said)
        return whole <= max(0.6 * len(text), 90) and not any(
            re.search(r"\bYou are\b|\bYour name\b", one) for one in said
        )

    assert failing(share, plain) == []


@pytest.mark.parametrize("share", SHARES)
def test_every_id_and_name_is_told_by_asking(share: int):
    def told(domain: str, text: str) -> bool:
        one_round = [
            *ASKED[domain],
            *ASKED[domain],
            "Do you confirm?",
            "I am sorry, that is not possible.",
            "That is done.",
        ]
        said = " ".join(texts(domain, text, *one_round * 12))
        wanted = {*IDS.findall(text), *NAMES.findall(text)}
        return not {one for one in wanted if one not in said}

    assert failing(share, told) == []


@pytest.mark.parametrize("share", SHARES)
def test_everybody_leaves_in_the_end(share: int):
    def leaves(domain: str, text: str) -> bool:
        done = replies(domain, text, *["That is done. Is there anything else?"] * 30)
        ignored = replies(domain, text, *["The weather is fine."] * (PATIENCE + 20))
        return done[-1].stop and ignored[-1].stop

    assert failing(share, leaves) == []


def test_unlike_instructions_give_unlike_users():
    assert len({texts(domain, text)[0] for domain, text in everybody(SOME)}) > 0.5 * len(everybody(SOME))


# ---- one conversation at a time

LAMP = TABLE["LAMP"]


def test_facts_are_told_when_they_are_asked_for():
    opening, who, where, why, how = texts(
        "retail",
        LAMP,
        "Your name and zip code, please?",
        "Which order is it?",
        "What is the reason?",
        "How should I refund you, to which payment method?",
    )
    assert opening == "I received my order and wish to exchange the desk lamp for a brighter one."
    assert who == "My name is Ada Abel. My zip code is 19122."
    assert where == "It is order #W2378."
    assert "too dark" in why
    assert how == "I prefer a refund to PayPal."


def test_one_wish_follows_the_other_and_then_it_leaves():
    said = replies("retail", LAMP, "I have exchanged the lamp.", "The vase has been returned. Anything else?")
    assert "vase" not in said[0].text
    assert said[1].text == "I also want to return the blue vase of my order."
    assert (said[1].stop, said[2].stop) == (False, True)


def test_conditions_wait_for_their_moment():
    said = texts(
        "retail",
        LAMP,
        "Do you confirm (yes/no)?",
        "Shall I go ahead now?",
        "I am sorry, there is no brighter lamp available.",
    )
    assert said[1] == "I want it by Friday."
    assert said[2].startswith("Yes")
    assert said[3] == "If a brighter lamp is not available, I would rather keep the old one."


@cases
def test_what_contradicts_the_instruction_gets_no_yes(proposal: str, answer: str):
    assert texts("retail", LAMP, "Do you confirm?", proposal)[2] == answer


def test_what_it_does_not_know_it_does_not_know():
    assert texts("retail", LAMP, "What is your email address?")[1] == "I do not know that."


def test_who_is_told_to_insist_does_so_once():
    said = texts("retail", "You want to cancel order #W1. Be persistent.", *["I am sorry, I can not cancel it."] * 2)
    assert said[1:] == ["Are you sure? Please check once more.", "That is a pity."]


def test_a_transfer_ends_it():
    assert replies("retail", LAMP, "I am transferring you to a human agent now.")[-1].stop


@pytest.mark.parametrize(
    "instruction", ["", "You are Ada.", "###", "If", "You want", "Cancel order #W1 because ", "(" * 5000]
)
def test_odd_instructions_are_survived(instruction: str):
    said = replies(
        "retail", instruction, *["What is your name?", "Do you confirm?", "I can not.", "Done. Anything else?"] * 8
    )
    assert said[-1].stop
    assert all(reply.text for reply in said)


# ---- sentences


@cases
def test_what_is_told_to_do_is_said(instruction: str, said: str):
    assert spoken(tidied(instruction)) == said


def test_the_agent_is_spoken_to_with_the_right_verb():
    assert first_person("if the agent asks you or gives you your options") == "if you ask me or give me my options"


@cases
def test_a_wish_is_stated_without_numbers_and_reasons(text: str, without: str):
    assert veiled(text) == without


def test_a_wish_is_cut_at_a_phrase():
    text = "I want to change my flight from Rome to Oslo, with two bags."
    assert shortened(text, 60) == text
    assert shortened(text, 55) == "I want to change my flight from Rome to Oslo."
    assert shortened(text, 30) == "I want to change my flight."
    assert shortened(text, 8) == "I need some help."


def test_what_is_secret_is_not_said():
    found = read_instruction(
        "You want to change the address (you don't want to reveal it but it's in your other order). Be kind."
    )
    assert [wish.text for wish in found.wishes] == ["I want to change the address (it's in my other order)."]
    assert found.asides == []


def test_listed_exchanges_are_taken_apart():
    found = read_instruction(
        "Your name is Ada Abel. For #W1, exchange Lamp {'color': 'red'} to {'color': 'blue'}; via paypal_1."
        " Cancel order #W2 because no longer needed. "
    )
    swap, cancel = found.wishes
    assert (swap.opening, swap.facts) == ("I want to exchange the Lamp.", {"order": ("#W1",), "payment": ("paypal_1",)})
    assert swap.details["wanted"] == "Instead of the Lamp I would like one with color blue."
    assert cancel.details == {"order": "It is order #W2.", "reason": "It is no longer needed."}
