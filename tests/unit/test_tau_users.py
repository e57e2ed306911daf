"""The user by rules on official data: what it says unasked, what can be got by asking, when it is content.

Reads all official tau-bench tasks where they are at hand (tests/tau_support.py), and the project's small folders always.
Not covered: whether every sentence is good English, which somebody has to read; telecom's user with its phone
(tests/unit/test_tau2_data.py); how well questions are understood (tests/unit/test_language_understanding.py).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from functools import lru_cache

import pytest
from tau_support import FOLDER, SMALL

from environments._tau.instruction import read_instruction
from environments._tau.speech import first_person, spoken, tidied
from environments._tau.tau2 import task_of_tau2
from environments._tau.typed import veiled
from environments._tau.user import PATIENCE, InstructedUser, shortened
from mua.users.protocol import UserReply

ASKED = {
    "retail": (
        "What is your name?",
        "Could you tell me your zip code?",
        "What is your email address?",
        "What is your user id?",
        "What is the order number?",
        "Which item is it?",
        "What would you like instead?",
        "Which payment method should I use?",
        "What is the new address?",
        "What is the reason?",
    ),
    "airline": (
        "What is your name?",
        "What is your user id?",
        "What is the reservation number?",
        "Which flight is it?",
        "Which payment method should I use?",
        "Who are the passengers?",
        "What is the date of birth?",
        "Which date?",
        "What is the reason?",
    ),
}
IDS = re.compile(
    r"#W\d+|[\w.]+@[\w.]+\w|\b(?:credit_card|gift_card|paypal|certificate)_\d+|\b[a-z]+_[a-z]+_\d{3,}|(?<=in |s )\d{5}\b"
    r"|\b\d{10}\b|\b\d{4}-\d\d-\d\d\b|\bHAT\d{3}\b|\b(?=[A-Z]*\d)[A-Z\d]{6}\b"
)
NAMES = re.compile(r"(?:^You are|^Your? name is|called|passenger) ([A-Z][a-z]+(?: [A-Z][a-z]+)?)")


@lru_cache(maxsize=1)
def instructions() -> dict[str, list[str]]:
    """By domain: those of the small folders, and tau-bench's where they are at hand."""
    found: dict[str, list[str]] = {}
    for domain in ASKED:
        entries = json.loads((SMALL / domain / "tasks.json").read_text())
        found[domain] = [task_of_tau2(domain, "test", entry, "here").data["instruction"] for entry in entries]
        for path in sorted((FOLDER / domain).glob("tasks_*.jsonl")):
            found[domain] += [json.loads(line)["instruction"] for line in path.read_text().splitlines()]
    return found


def everybody() -> Iterator[tuple[str, str]]:
    for domain, texts in instructions().items():
        yield from ((domain, text) for text in texts)


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


def failing(check: Callable[[str, str], bool]) -> list[str]:
    return [text for domain, text in everybody() if not check(domain, text)]


# ---- over all instructions


def test_the_opening_is_short_and_holds_no_number():
    def brief(domain: str, text: str) -> bool:
        (opening,) = texts(domain, text)
        return 3 * len(opening) <= max(len(text), 90) and not IDS.search(opening)

    assert failing(brief) == []


def test_nobody_recites_or_speaks_of_themselves_as_you():
    def plain(domain: str, text: str) -> bool:
        questions = [*ASKED[domain], "Tell me everything, please.", "Do you confirm (yes/no)?", "I am sorry, I can not."]
        said = texts(domain, text, *questions, *["That is done. Is there anything else?"] * 6)
        whole = max(len(one) for one in said)
        return whole < max(0.8 * len(text), 90) and not any(re.search(r"\bYou are\b|\bYour name\b", one) for one in said)

    assert failing(plain) == []


def test_every_id_and_name_is_told_by_asking():
    def told(domain: str, text: str) -> bool:
        one_round = [*ASKED[domain], *ASKED[domain], "Do you confirm?", "I am sorry, that is not possible.", "That is done."]
        said = " ".join(texts(domain, text, *one_round * 12))
        wanted = {*IDS.findall(text), *NAMES.findall(text)}
        return not {one for one in wanted if one not in said}

    lost = failing(told)
    assert len(lost) <= 0.01 * sum(map(len, instructions().values())), lost


def test_everybody_leaves_in_the_end():
    def leaves(domain: str, text: str) -> bool:
        done = replies(domain, text, *["That is done. Is there anything else?"] * 30)
        ignored = replies(domain, text, *["The weather is fine."] * (PATIENCE + 20))
        return done[-1].stop and ignored[-1].stop

    assert failing(leaves) == []
