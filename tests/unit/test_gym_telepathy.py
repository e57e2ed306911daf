"""The gym of guessing: the table, questions in many wordings, names, the expert, the LLM oracle's plumbing.

The rule oracle is compared with labels given by hand, and with a real model where the environment names one. Not
covered: whether every tag of the 702 entities is true; what all gyms share (test_gyms_base.py).
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

from environments.gyms._shared import act
from environments.gyms._shared.oracles import is_yes_no
from environments.gyms.telepathy import A_GUESS, DOMAIN, NOT_THE_NAME
from environments.gyms.telepathy.table import (
    ALIKE,
    SIZES,
    UNSEEN,
    Entity,
    answer,
    asked_for,
    attributes,
    by_name,
    entities,
    is_named,
    truth,
)
from mua.environment.protocol import Task
from mua.types import Json
from mua.utils.errors import JudgeFault, UserFault
from tests.chat_server import fails, says
from tests.gyms_support import (
    SPLITS,
    all_tasks,
    followed,
    judged,
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


def test_the_splits_have_the_sizes_they_promise_and_no_entity_twice():
    assert {split: len(DOMAIN.tasks(split)) for split in SPLITS} == SIZES
    named = [task.data["entity"] for task in all_tasks(DOMAIN)]
    assert len(set(named)) == len(named) >= 440
    assert DOMAIN.held_out


def test_every_question_of_the_table_asks_for_its_own_attribute():
    for attribute in attributes().values():
        for question in attribute.questions:
            assert is_yes_no(question), question
            assert asked_for(question)[0] == [attribute.name], question


def test_every_attribute_holds_of_something_and_not_of_everything():
    for name in attributes():
        values = {truth(one, name) for one in entities()}
        assert "Yes" in values, name
        assert values & {"No", "Maybe"}, name


@cases
def test_questions_are_read(name: str, question: str, said: str):
    assert answer(entity(name), question) == said


def test_the_rules_agree_with_the_labels():
    assert len(QUESTIONS) + len(ANSWERS) >= 40
    wrong = [r for r in QUESTIONS if answer(entity(r["entity"]), r["question"]) not in r["labels"]]
    wrong += [r for r in ANSWERS if is_named(entity(r["entity"]), r["answer"]) != (r["label"] == "Yes")]
    assert wrong == []


def test_every_name_and_synonym_is_accepted_for_its_entity_alone():
    for one in entities():
        for name in one.names():
            assert is_named(one, name.upper())
            assert is_named(one, f"The {name}.")
            assert not is_named(one, f"{name} or something else")


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ("Is it an apple?", A_GUESS),
        ("Could it be a pear?", A_GUESS),
        ("Is it maybe the dog?", A_GUESS),
        ("Is it a fly?", A_GUESS),
        ("Does it start with a letter before B?", NOT_THE_NAME),
        ("Does its name begin with b?", NOT_THE_NAME),
        ("Does it end in e?", NOT_THE_NAME),
        ("Is the first letter a vowel?", NOT_THE_NAME),
        ("Does it rhyme with chapel, that is, are there rhymes?", NOT_THE_NAME),
        ("Is it spelled with two p?", NOT_THE_NAME),
        ("Is it red?", "Yes."),
        ("Does it start to grow in spring?", "Yes."),
    ],
)
async def test_names_and_letters_are_no_questions(question: str, said: str):
    """Else a list of names, or the alphabet, finds everything without a thought about what it is like."""
    (result,) = await say(opened(DOMAIN, task_of("apple")), question)
    assert (result.text, result.reward) == (said, 0.0)


def test_no_category_of_the_test_split_stands_in_another():
    kinds = {split: {task.data["kind"] for task in DOMAIN.tasks(split)} for split in SPLITS}
    assert kinds["test"] == set(UNSEEN)
    assert not kinds["test"] & (kinds["train"] | kinds["validation"])


def test_no_more_things_are_alike_than_there_are_answers():
    alike = Counter(tuple(truth(one, name) for name in attributes()) for one in entities())
    assert max(alike.values()) <= ALIKE == DOMAIN.setting.whole("max_answers")


@scripts("telepathy")
async def test_conversations(script: Json):
    await followed(opened(DOMAIN, task_of(script["task"])), script)


def test_openings_tell_as_much_as_the_difficulty_says():
    for task in DOMAIN.tasks("test"):
        for opening in DOMAIN.openings(task):
            assert task.data["entity"].lower() not in opening.lower().split()
            named = re.search(rf"\ban? {task.data['kind']}\b", opening) is not None
            assert named == (task.data["difficulty"] == "easy")


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


async def test_unreadable_replies_are_faults():
    async with served(DOMAIN, says("It depends on what you mean.")) as (gym, _):
        environment = opened(gym, task_of("bicycle"))
        with pytest.raises(UserFault):
            await say(environment, "Is it red?")
        with pytest.raises(JudgeFault):
            await played(environment, act("answer", "velocipede"))
        assert (await judged(environment)).details["reward"] == 0


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
