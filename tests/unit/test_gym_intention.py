"""The gym of vague requests: schemas, what a question covers, rewards, leaks, the expert, the LLM oracle's plumbing.

The rule oracle is compared with labels given by hand, and with a real model where the environment names one. Not
covered: wordings that no keyword foresees; what all gyms share (test_gyms_base.py).
"""

from __future__ import annotations

import json

import pytest

from environments.gyms.intention import DOMAIN, worth
from environments.gyms.intention.schemas import TOO_BROAD, Kind, covered_by_rule, kinds
from mua.environment.protocol import Task
from mua.types import Json
from tests.chat_server import says
from tests.gyms_support import (
    followed,
    judged,
    labeled,
    opened,
    real_oracle,
    say,
    scripts,
    served,
)

LABELLED = labeled("intention")


def task_of(kind: Kind) -> Task:
    """A task that misses every detail of its kind, each with its first option."""
    details = [
        {
            "key": d.key,
            "description": d.topic,
            "importance": d.importance,
            "inquiry": d.inquiry,
            "options": list(d.options),
            "preference": d.options[0],
        }
        for d in kind.details
    ]
    data = {"kind": kind.name, "difficulty": "hard", "request": kind.requests[0], "details": details}
    return Task(kind.name, "gyms/intention", "test", data)


def covered(row: Json) -> set[str]:
    details = task_of(kinds()[row["kind"]]).data["details"]
    return {details[i]["key"] for i in covered_by_rule(row["kind"], details, row["question"])}


TRIP = task_of(kinds()["trip"])


def test_the_rules_agree_with_the_labels():
    assert len(LABELLED) >= 40
    right = [covered(row) == set(row["covered"]) for row in LABELLED]
    assert sum(right) / len(right) >= 0.95


@pytest.mark.parametrize(
    ("importances", "reward"),
    [([3], 1.0), ([2], 0.7), ([1], 0.4), ([3, 1], 0.8), ([1, 1], 0.2), ([1, 1, 1, 1], 0.0), ([3] * 7, 0.0), ([], 0.0)],
)
def test_worth_of_a_question(importances: list[int], reward: float):
    assert worth(importances) == pytest.approx(reward)


@scripts("intention")
async def test_conversations(script: Json):
    await followed(opened(DOMAIN, task_of(kinds()[script["task"]])), script)


async def test_asking_for_everything_at_once_earns_nothing_and_is_told_so():
    texts = [" ".join(detail["inquiry"] for detail in TRIP.data["details"]), "Which day, which place and what budget?"]
    results = await say(opened(DOMAIN, TRIP), *texts)
    assert all(r.text in TOO_BROAD and not r.reward and not r.terminal for r in results)


async def test_words_strung_together_are_no_question():
    task = task_of(kinds()["ring"])
    texts = ["What about the wall fish metal skin?", "Metal, honey, tree, roof, bottle, skin?", "Which metal?"]
    results = await say(opened(DOMAIN, task), *texts)
    assert [r.reward for r in results] == [0.0, 0.0, 1.0]
    assert all(r.text in TOO_BROAD for r in results[:2])


async def test_the_person_tells_what_is_asked_for_and_nothing_more():
    for task in DOMAIN.tasks("test"):
        environment = opened(DOMAIN, task)
        said = await say(environment, "What exactly do you want?", "Tell me more.")
        hidden = [detail["preference"] for detail in task.data["details"]]
        replies = [r.text for r in said]
        assert not any(preference.lower() in reply.lower() for preference in hidden for reply in replies), task.id
        for detail in task.data["details"]:
            (result,) = await say(environment, detail["inquiry"])
            told = [p for p in hidden if p.lower() in result.text.lower()]
            assert detail["preference"] in told
            others = [p for p in told if p != detail["preference"] and p.lower() not in detail["preference"].lower()]
            assert others == [], task.id


async def test_the_llm_person_knows_only_what_was_asked_for():
    verdict = json.dumps({"reason": "", "numbers": [1]})
    async with served(DOMAIN, says(verdict), says("Somewhere with mountains.")) as (gym, server):
        (result,) = await say(opened(gym, TRIP), "Which region appeals to you?")
    assert (result.text, result.reward) == ("Somewhere with mountains.", 1.0)
    judge, person = (str(request["messages"]) for request in server.received)
    asked_for, *hidden = TRIP.data["details"]
    assert asked_for["preference"] in person
    assert not any(detail["preference"] in person for detail in hidden)
    assert not any(detail["preference"] in judge for detail in TRIP.data["details"])


@pytest.mark.timeout(1800)
async def test_the_llm_oracle_agrees_with_labels_and_rules():
    async with real_oracle(DOMAIN) as gym:
        right = 0
        for row in LABELLED:
            environment = opened(gym, task_of(kinds()[row["kind"]]))
            await say(environment, row["question"])
            found = set((await judged(environment)).details["covered"])
            right += found in (set(row["covered"]), covered(row))
    assert right / len(LABELLED) >= 0.85
