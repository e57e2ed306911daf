"""The gym of guessing: the table, questions in many wordings, names, the expert, the LLM oracle's plumbing.

The rule oracle is compared with labels given by hand, and with a real model where the environment names one. Not
covered: whether every tag of the 702 entities is true; what all gyms share (test_gyms_base.py).
"""

from __future__ import annotations

import pytest

from environments.gyms._shared import act
from environments.gyms.telepathy import DOMAIN
from environments.gyms.telepathy.table import (
    Entity,
    answer,
    attributes,
    by_name,
    is_named,
)
from mua.environment.protocol import Task
from mua.types import Json
from tests.chat_server import fails, says
from tests.gyms_support import (
    followed,
    labeled,
    opened,
    played,
    real_oracle,
    say,
    scripts,
    sentences,
    served,
)
from tests.tables import cases_of

cases = cases_of("gym_telepathy")

QUESTIONS, ANSWERS = labeled("telepathy"), labeled("telepathy_answers")


def entity(name: str) -> Entity:
    return by_name()[name.lower()]


def task_of(name: str) -> Task:
    data = {"entity": name, "kind": entity(name).category, "broad": entity(name).broad, "difficulty": "easy"}
    return Task(name, "gyms/telepathy", "test", data)


@cases
def test_questions_are_read(name: str, question: str, said: str):
    assert answer(entity(name), question) == said


def test_the_rules_agree_with_the_labels():
    assert len(QUESTIONS) + len(ANSWERS) >= 40
    wrong = [r for r in QUESTIONS if answer(entity(r["entity"]), r["question"]) not in r["labels"]]
    wrong += [r for r in ANSWERS if is_named(entity(r["entity"]), r["answer"]) != (r["label"] == "Yes")]
    assert wrong == []


@cases
async def test_names_and_letters_are_no_questions(question: str, said: str):
    """Else a list of names, or the alphabet, finds everything without a thought about what it is like."""
    (result,) = await say(opened(DOMAIN, task_of("apple")), question)
    assert (result.text, result.reward) == (said, 0.0)


@scripts("telepathy")
async def test_conversations(script: Json):
    await followed(opened(DOMAIN, task_of(script["task"])), script)


async def test_answers_do_not_name_the_entity():
    environment = opened(DOMAIN, task_of("penguin"))
    results = await played(environment, *[act("action", q) for a in attributes().values() for q in a.questions][:19])
    assert "penguin" not in sentences([{"role": "tool", "content": r.text} for r in results])


async def test_the_llm_oracle_answers_and_judges():
    verdict = '{"reason": "another spelling", "verdict": "Yes"}'
    async with served(DOMAIN, says("yes"), says(verdict)) as (gym, server):
        environment = opened(gym, task_of("bicycle"))
        results = await played(environment, act("action", "Do you ride it?"), act("answer", "velocipede"))
    assert [r.text for r in results] == ["Yes.", "Yes, that is it."]
    assert results[1].reward == 1.0
    asked, judge = (str(request["messages"]) for request in server.received)
    assert "bicycle" in asked
    assert "velocipede" in judge


async def test_the_plain_name_needs_no_judge():
    async with served(DOMAIN, fails(500)) as (gym, server):
        (result,) = await played(opened(gym, task_of("bicycle")), act("answer", "a bike"))
    assert (result.reward, server.received) == (1.0, [])


@pytest.mark.timeout(1800)
async def test_the_llm_oracle_agrees_with_labels_and_rules():
    async with real_oracle(DOMAIN) as gym:
        right = 0
        for row in QUESTIONS:
            (result,) = await say(opened(gym, task_of(row["entity"])), row["question"])
            right += result.text.rstrip(".") in {*row["labels"], answer(entity(row["entity"]), row["question"])}
        for row in ANSWERS:
            (result,) = await played(opened(gym, task_of(row["entity"])), act("answer", row["answer"]))
            right += (result.reward == 1.0) == (row["label"] == "Yes")
    assert right / (len(QUESTIONS) + len(ANSWERS)) >= 0.85
