"""The gym of strange stories: schemas, facts, points of explanations, gains, the expert, the LLM oracle's plumbing.

The rule oracle is compared with labels given by hand, and with a real model where the environment names one. Not
covered: whether the stories please; what all gyms share (test_gyms_base.py); the canned policies
(tests/contract/test_canned_policies.py).
"""

from __future__ import annotations

import json

import pytest

from environments.gyms._shared import GymEnvironment, act
from environments.gyms.turtle import DOMAIN
from environments.gyms.turtle.players import asking
from environments.gyms.turtle.stories import Story, answer, asked_about, schemas, score, story, story_of
from mua.environment.protocol import Task
from tests.chat_server import says
from tests.gyms_support import all_tasks, judged, labeled, opened, played, real_oracle, say, served
from tests.tables import cases_of, table

cases = cases_of("gym_turtle")
TABLE = table("gym_turtle")

QUESTIONS, ANSWERS = labeled("turtle"), labeled("turtle_answers")


def first_task(schema: str) -> Task:
    """The schema with the first value in every slot."""
    raw = schemas()[schema]
    shown, hidden = ({slot: str(values[0]) for slot, values in raw[part].items()} for part in ("slots", "hidden"))
    data = {"kind": schema, "shown": shown, "hidden": hidden, "surface": "", "difficulty": "easy"}
    return Task(schema, "gyms/turtle", "test", data)


def first(schema: str) -> Story:
    return story_of(first_task(schema))


def scores(filled: Story, text: str) -> list[float]:
    return [score(criterion, text, filled.surface) for criterion in filled.criteria]


def test_an_explanation_with_a_wrong_hidden_value_or_with_several_is_incomplete():
    for name, raw in schemas().items():
        shown = tuple(sorted((slot, str(values[0])) for slot, values in raw["slots"].items()))
        right = {slot: values[0] for slot, values in raw["hidden"].items()}
        for slot, values in raw["hidden"].items():
            filled = story(name, shown, tuple(sorted(right.items())))
            wrong = story(name, shown, tuple(sorted((right | {slot: values[1]}).items())))
            told = " ".join(criterion.statement for criterion in wrong.criteria)
            assert min(scores(filled, told)) < 1.0, (name, slot)
            both = " ".join(criterion.statement for criterion in (*wrong.criteria, *filled.criteria))
            assert min(scores(filled, both)) == 0.0, (name, slot)


def test_the_rules_agree_with_the_labels():
    assert len(QUESTIONS) + len(ANSWERS) >= 40
    said = [(row, answer(first(row["schema"]), row["question"])) for row in QUESTIONS]
    assert [(row, told) for row, told in said if told not in row["labels"] and told != "Maybe"] == []
    assert sum(told in row["labels"] for row, told in said) / len(said) >= 0.95
    points = [
        (given, label)
        for row in ANSWERS
        for given, label in zip(scores(first(row["schema"]), row["answer"]), row["scores"], strict=True)
    ]
    assert sum(given == label for given, label in points) / len(points) >= 0.95


@cases
def test_explanations_are_scored_point_by_point(text: str, expected: list[float]):
    assert scores(first("lighthouse"), text) == expected


async def asked_all(environment: GymEnvironment, task: Task) -> None:
    """Questions that are answered with Yes, about every point."""
    schema, filled = schemas()[task.data["kind"]], story_of(task)
    hidden = [act("action", f"Does it have to do with {aliases[0]}?") for aliases in filled.found.values()]
    results = await played(environment, *asking(schema, task.data["shown"]), *hidden)
    assert {result.text for result in results} == {"Yes."}, task.id


async def test_a_point_counts_once_a_question_about_it_was_answered_with_yes():
    told = "It was a lighthouse. A ferry ran onto the rocks."
    for questions, reward in TABLE["test_a_point_counts_once_a_question_about_it_was_answered_with_yes"]:
        environment = opened(DOMAIN, first_task("lighthouse"))
        *_, result = await played(environment, *(act("action", one) for one in questions), act("answer", told))
        assert result.reward == reward, questions
    for task in all_tasks(DOMAIN):
        filled = story_of(task)
        if answer(filled, filled.surface) == "Yes":
            assert not any(asked_about(point, filled.surface, filled.surface) for point in filled.criteria), task.id


async def test_long_questions_are_refused():
    environment = opened(DOMAIN, first_task("lighthouse"))
    (result,) = await say(environment, "Was it " + "a lighthouse or " * 10 + "a ferry?")
    assert (result.error, result.reward) == (True, 0.0)


async def test_only_what_goes_beyond_the_best_explanation_is_paid():
    environment = opened(DOMAIN, first_task("lighthouse"))
    await asked_all(environment, first_task("lighthouse"))
    moves = [
        act("answer", "It was a lighthouse."),
        act("answer", "A ferry sank."),
        act("answer", "The lighthouse was dark and a ferry sank."),
    ]
    results = await played(environment, *moves)
    assert [r.reward for r in results] == [0.5, 0.0, 0.5]
    assert [r.terminal for r in results] == [False, False, True]
    assert (await judged(environment)).success


async def test_feedback_counts_points_and_quotes_none():
    for task in DOMAIN.tasks("test"):
        filled = story_of(task)
        environment = opened(DOMAIN, task)
        await asked_all(environment, task)
        (result,) = await played(environment, act("answer", filled.criteria[0].statement))
        assert f"of {len(filled.criteria)} points" in result.text
        assert not any(criterion.statement in result.text for criterion in filled.criteria)


async def test_the_llm_oracle_judges_each_point_alone():
    replies = [says("Yes."), *(says(json.dumps({"reason": "", "verdict": v})) for v in ("full", "none"))]
    async with served(DOMAIN, *replies) as (gym, server):
        environment = opened(gym, first_task("lighthouse"))
        results = await played(environment, act("action", "Is it the sea?"), act("answer", "A lighthouse"))
    assert [r.text for r in results] == ["Yes.", "This explanation has 1 of 2 points."]
    assert results[1].reward == 0.5
    asked, *judges = (str(request["messages"]) for request in server.received)
    filled = first("lighthouse")
    assert filled.hidden_story in asked
    assert len(judges) == 2
    assert all("Is it the sea?" in judge for judge in judges)
    assert all("0.5" not in judge and filled.hidden_story not in judge for judge in judges)


@pytest.mark.timeout(1800)
async def test_the_llm_oracle_agrees_with_labels_and_rules():
    async with real_oracle(DOMAIN) as gym:
        right = 0
        for row in QUESTIONS:
            (result,) = await say(opened(gym, first_task(row["schema"])), row["question"])
            right += result.text.rstrip(".") in {*row["labels"], "Maybe"}
        assert right / len(QUESTIONS) >= 0.85
        apart = 0.0
        for row in ANSWERS:
            environment = opened(gym, first_task(row["schema"]))
            schema, filled = schemas()[row["schema"]], first(row["schema"])
            hidden = [act("action", f"Does it have to do with {aliases[0]}?") for aliases in filled.found.values()]
            await played(environment, *asking(schema, first_task(row["schema"]).data["shown"]), *hidden)
            (result,) = await played(environment, act("answer", row["answer"]))
            weights = [criterion.weight for criterion in first(row["schema"]).criteria]
            apart += abs(result.reward - sum(w * s for w, s in zip(weights, row["scores"], strict=True)))
        assert apart / len(ANSWERS) <= 0.15
