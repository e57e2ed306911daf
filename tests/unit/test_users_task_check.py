"""The check of what an LLM's user says: planted faults, replies by hand, ordinary talk; what domains may add to it.

A small version of tools/bench/user_check.py. Not covered: replies of a real model; users that are read by a judge.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from environments.kit.scripted import ScriptedUser
from mua.environment.domain import HasUserFacts
from mua.environment.protocol import Task
from mua.environment.registry import get_domain
from mua.users.task_check import Knowledge, TaskCheck, Vocabulary, values_in
from mua.users.utterance_check import LeakCheck, misused_signal, unusable, with_signal
from mua.utils.errors import UserFaultKind
from tools.bench import user_check as bench

PERSONA = (
    "You are Mei Tanaka, zip code 60614. Your email is mei.tanaka@post.com.\nYou want to exchange the Desk Lamp of "
    "order #W4471 for a white one, and settle the difference with your gift card."
)


def check(*heard: str) -> TaskCheck:
    found = TaskCheck(PERSONA)
    for text in heard:
        found.heard(text)
    return found


# ---- how well it does


@pytest.mark.parametrize("name", bench.DOMAINS)
async def test_planted_faults_are_found_and_dialogues_as_they_are_pass(name: str) -> None:
    domain = get_domain(name)
    result = await bench.measure(domain, bench.spread(domain.tasks("test"), 12), seed=3)
    assert result.examples == []
    assert result.replies > 40
    for kind, counts in result.kinds.items():
        share = 0.6 if kind in (UserFaultKind.ENDS_TOO_EARLY, UserFaultKind.CHANGES_WISH) else 0.9
        assert counts.planted >= 8, kind
        assert counts.named >= share * counts.planted, (kind, counts.missed)


def test_replies_by_hand_are_judged_as_they_are_marked() -> None:
    records = [record for record in bench.read_replies() if "reply" in record]
    assert len(records) >= 120
    assert 0.4 < sum(record["fault"] is None for record in records) / len(records) < 0.6
    result = bench.measure_replies()
    assert result.examples == []
    planted = sum(counts.planted for counts in result.kinds.values())
    assert sum(counts.named for counts in result.kinds.values()) >= 0.95 * planted


@pytest.mark.parametrize("path", [bench.LOOKED_AT, bench.APART], ids=["looked at", "held apart"])
@pytest.mark.parametrize("name", bench.DOMAINS)
def test_replies_by_hand_to_tasks_of_the_domains(name: str, path: Path) -> None:
    result = bench.measure_replies(path, name)
    assert result.replies >= 30
    assert sum(result.refused.values()) <= 0.02 * result.replies, result.examples
    planted = sum(counts.planted for counts in result.kinds.values())
    assert planted >= 15
    missed = [text for counts in result.kinds.values() for text in counts.missed]
    assert len(missed) <= 0.15 * planted, missed


@pytest.mark.parametrize("name", bench.DOMAINS)
def test_whatever_a_customer_of_any_kind_may_tell_is_known(name: str) -> None:
    """What every seed's customer has in its facts and wishes, mistakes and changes of mind among it."""
    domain = get_domain(name)
    assert isinstance(domain, HasUserFacts)
    for task in bench.spread(domain.tasks("train"), 40):
        known = Knowledge(values=domain.known(task))
        listed = {text for texts in domain.known(task).values() for text in texts}
        for seed in range(3):
            user = domain.scripted_user(task, seed)
            assert isinstance(user, ScriptedUser)
            wishes = user._wishes
            facts = [*user._facts.values(), *(f for w in wishes for f in (*w.facts.values(), *w.before.values()))]
            told = {text for fact in facts for text in (fact.value, fact.wrong) if text}
            assert told <= listed, (task.id, told - listed)
            assert all(known.has(value) for text in told for value in values_in(text))
            assert len(domain.wishes(task)) == len(wishes)


def test_a_copy_of_prose_is_a_leak_and_a_copy_of_values_is_none() -> None:
    """With few words allowed: a value is a cut, and what the persona puts in the user's own voice may be said."""
    persona = "Ask for a seat at the window of train IC 77 to Bergen Central. Pay with my card ending in 12 at once."
    copied = "a seat at the window of train IC 77 to Bergen Central"
    assert LeakCheck(7, persona).quotation(copied)
    assert not LeakCheck(7, persona, stated=["window of train IC 77 to Bergen Central"]).quotation(copied)
    assert not LeakCheck(7, persona).quotation("Pay with my card ending in 12 at once")
    assert LeakCheck(7, persona, stated=["12"]).quotation("ask for a seat at the window of it")


def test_what_the_users_tools_show_lets_it_end_only_if_all_is_well() -> None:
    wishes = [{"verb": ["no service"], "shown": ["4 bars"]}]
    user = TaskCheck("You are Ada. Your phone finds no network.", {}, wishes)
    user.heard("What does the status bar show?")
    user.saw("no service, airplane mode")
    assert user.find("Bye ###STOP###", acted=True) is not None
    user.saw("4 bars, 5g")
    assert user.find("It works now! ###STOP###", acted=True) is None


@pytest.mark.parametrize(
    ("persona", "text", "fine"),
    [
        ("You want to cancel order K71.", "I changed my mind about it, so cancel K71.", True),
        ("You want to cancel order K71.", "I changed my mind, I'd like to keep it after all.", False),
        ("You want order K71 sent to Rome.", "I don't need it any more.", False),
        ("Your user id is ada_lovelace_771.", "ada_lovelane_771", False),
        ("Your user id is ada_lovelace_771.", "The number at the end is 771.", True),
        ("You live in Waco, TX 76701.", "I live in Waco, Texas.", True),
        ("You live in Waco, TX 76701.", "It is for my sister Ottilie.", True),
        ("You live in Waco, TX 76701.", "My name is Ottilie.", False),
        ("You paid $12.50 and $4.25.", "So that is $16.75.", True),
        ("You paid $12.50 and $4.25.", "So that is $18.75.", False),
    ],
)
def test_slips_are_told_from_faults(persona: str, text: str, fine: bool) -> None:
    found = TaskCheck(persona)
    found.heard("Who are you?")
    assert (found.find(text) is None) == fine


ORDINARY = """\
Hi! I hope you're having a great day. I'd like some help with an order, please.
Ugh, Monday mornings, right? Anyway, I need some help.
I've been waiting for 3 weeks now, this is RIDICULOUS!!
Sorry, I don't know that off the top of my head.
What does that mean? I'm not very technical.
It's 2024, this should be possible online.
I called yesterday at 3pm and nobody picked up.
Mhm, go on.
Alrighty then!
Thank you, Daniel. Yes please.
I bought it as a birthday gift for my sister, so it matters to me.
I'm writing from my iPhone, so excuse the typos.
Please don't transfer me again.
You asked me that already, didn't you?
Is it going to cost anything?
Could you please check it for me?
I'd like to know what you can offer.
Can you tell me how long that will take?
The customer service was great last time, by the way.
My instructions booklet got lost, does that matter?
Thank you for your help, you've been very patient."""


@pytest.mark.parametrize("text", ORDINARY.splitlines())
def test_ordinary_talk_passes(text: str) -> None:
    assert unusable(text) is None
    assert check("Hello, this is Daniel. How may I help you?").find(text) is None


# ---- what is found


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("My email is mei.tanaka@post.org.", UserFaultKind.INVENTS_FACTS),
        ("It is order #W4417.", UserFaultKind.INVENTS_FACTS),
        ("I paid $19.99 for it.", UserFaultKind.INVENTS_FACTS),
        ("I need it by March 3.", UserFaultKind.INVENTS_FACTS),
        ("Send it to Reykjavik, please.", UserFaultKind.INVENTS_FACTS),
        ("Reykjavik.", UserFaultKind.INVENTS_FACTS),
        ("my name is bartholomew", UserFaultKind.INVENTS_FACTS),
        ("Please cancel the order instead.", UserFaultKind.CHANGES_WISH),
        ("I changed my mind, keep it as it is.", UserFaultKind.CHANGES_WISH),
        ("Thanks! ###STOP###", UserFaultKind.ENDS_TOO_EARLY),
    ],
)
def test_what_does_not_fit_the_task_is_named(text: str, kind: UserFaultKind) -> None:
    found = check("Which order is it, and which city should it go to?").find(text)
    assert found is not None
    assert found.kind is kind


def test_what_was_heard_may_be_repeated() -> None:
    asked = check("I found the lamp at $94.50, to Reykjavik, on 2026-05-03. Shall I exchange it for #W9999?")
    for text in ("$94.50 is fine.", "Yes, to Reykjavik on May 3.", "W9999? Yes."):
        assert asked.find(text) is None
    asked.saw("4 bars, KX99Z")
    assert asked.find("It says KX99Z.") is None


def test_the_end_may_come_once_everything_is_settled() -> None:
    settled = check("Which order?", "Done, the lamp of order #W4471 is exchanged.")
    assert settled.find("Thanks! ###STOP###") is None
    other = check("Done, the lamp is exchanged.")
    assert (other.find("Bye ###STOP###") or settled).kind is UserFaultKind.ENDS_TOO_EARLY  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("March 9, 1974", "1974-03-09"),
        ("the 9th of March", "03/09"),
        ("555-210-8834", "555 210 8834"),
        ("#W4471", "w4471"),
        ("$1,250", "1250 dollars"),
        ("A@b.com", "a@b.com."),
        ("three bags", "3 bags"),
    ],
)
def test_a_value_is_the_same_however_it_is_written(one: str, other: str) -> None:
    known = Knowledge([one])
    values = list(values_in(other))
    assert values
    assert all(known.has(value) for value in values)


class Listing:
    """A domain that lists what its user knows."""

    name = "listing"

    def tasks(self, split: str) -> list[Task]:
        return [Task("a", "listing", "train", {})] if split == "train" else []

    def persona(self, task: Task) -> str:
        return "You are Ada. You want a seat in another city."

    def known(self, task: Task) -> Mapping[str, Sequence[str]]:
        return {"city": ["Tromsdalen"], "seat": ["B7"]}

    def wishes(self, task: Task) -> Sequence[Mapping[str, Sequence[str]]]:
        return [{"verb": ["book"], "seat": ["B7"]}, {"verb": ["cancel"], "seat": ["C9"]}]


def test_a_domain_may_list_what_its_user_knows_and_wants() -> None:
    domain = Listing()
    assert isinstance(domain, HasUserFacts)
    asked = Vocabulary(domain).of(domain.tasks("train")[0])  # type: ignore[arg-type]
    asked.heard("Which city?")
    assert asked.find("To Tromsdalen, seat B7 please.") is None
    assert asked.find("Please cancel C9.") is None
    assert (asked.find("Seat B8, please.") or asked).kind is UserFaultKind.INVENTS_FACTS  # type: ignore[union-attr]
    asked.heard("Done, B7 is booked.")
    assert "c9" in str(asked.find("Bye ###STOP###")), "the second wish has not been spoken of"
    asked.heard("Done, C9 is cancelled.")
    assert asked.find("Bye ###STOP###") is None


# ---- forms


@pytest.mark.parametrize(
    "text", ["### STOP ###", "###stop###", "**###STOP###**", "STOP", "# STOP #", "[STOP]", "##STOP"]
)
def test_the_signal_to_stop_is_read_however_it_is_written(text: str) -> None:
    assert "###STOP###" in with_signal(text)
    assert "###STOP###" in with_signal(f"Thanks! {text}") or text in ("STOP", "[STOP]")


@pytest.mark.parametrize(
    "text", ["Stop it, please!", "Please stop.", "I want you to stop asking.", "Non-stop flights?"]
)
def test_the_word_stop_is_no_signal(text: str) -> None:
    assert with_signal(text) == text


def test_a_user_that_goes_on_after_the_signal_speaks_of_it() -> None:
    assert misused_signal("###STOP### I was to write this at the end") is not None
    assert misused_signal("All right. ###STOP### Bye!") is None


@pytest.mark.parametrize(
    "text",
    ["what " * 3000, "a_" * 7900, "a-" * 7900, "@" * 15_000, "1 " * 7900, "A. " * 5000, "{" * 15_000, '{"a":' * 3000,
     "Action " * 2000, "your order " * 1400, "w" * 15_900, "a@a." * 3900, "please " * 2200, "$1," * 5000],
)  # fmt: skip
def test_nothing_that_may_be_said_takes_long(text: str) -> None:
    """Quadratic patterns would take minutes here; the bound is far above what is needed."""
    asked, started = check(text), time.process_time()
    asked.heard(text * 20)
    unusable(text)
    asked.find(f"{with_signal(text)} ###STOP###")
    assert time.process_time() - started < 20
