"""The travel gym: scenarios, reading of questions and queries, rewards, the volunteer, the expert, model oracles.

Models are scripted servers on this machine, reached over HTTP; on the labeled set the judge's server gives the label,
so that the rules are compared with the labels and the judge's path with both. Not covered: how well a real model plays
the traveller; what the contract test asks of every domain.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from environments.gyms._shared import Setting, act
from environments.gyms.travel import DOMAIN, TravelGym
from environments.gyms.travel.catalog import IMPATIENT, VAGUE, catalog, classify, hint, missing
from environments.gyms.travel.game import TravelGame, classified
from environments.gyms.travel.players import query
from mua.environment.protocol import Move, Task
from mua.types import Json
from tests.gyms_support import judged, labeled, modeled, opened, played, real_oracle, say, verdict
from tests.tables import cases_of

cases = cases_of("gym_travel")

TEST = DOMAIN.tasks("test")
LABELLED = labeled("travel")


def a_task(pattern: str = "22") -> Task:
    return next(task for task in TEST if task.data["kind"] == pattern)


def searches(task: Task) -> list[Move]:
    return [act("search", query(catalog()[one["aspect"]], one["arguments"])) for one in task.data["aspects"]]


def option(one: Json, sort: str) -> str:
    return next(row[0] for row in one["options"] if row[1] == sort)


def question(aspect: str, attribute: str) -> Move:
    return act("action", catalog()[aspect].attributes[attribute].question)


@cases
def test_what_a_query_has_to_state(text: str, lacking: list[str]):
    assert missing(text, {"city": "Lyon", "date": "12 May", "guests": "4"}) == lacking


# The rules of the game.


async def test_choices_earn_by_what_they_are_and_the_last_one_ends_the_trip():
    for sorts, expected in ((("best", "best"), 2.0), (("correct", "best"), 1.8), (("wrong", "noise"), 0.0)):
        task = a_task()
        chosen = [option(one, sort) for one, sort in zip(task.data["aspects"], sorts, strict=True)]
        environment = opened(DOMAIN, task)
        *_, first, last = await played(environment, *searches(task), *(act("answer", one) for one in chosen))
        assert first.reward + last.reward == pytest.approx(expected)
        assert (first.terminal, last.terminal) == (False, True)
        assert (await judged(environment)).success == (sorts == ("best", "best"))


async def test_choices_that_cannot_be_are_refused_and_cost_nothing():
    task = a_task()
    one, other = task.data["aspects"]
    environment = opened(DOMAIN, task)
    letter = catalog()[one["aspect"]].letter
    before = await played(environment, act("answer", f"{letter}1"))
    await played(environment, *searches(task))
    two = [row[0] for row in one["options"][:2]]
    refused = await played(
        environment,
        act("answer", ", ".join(two)),
        act("answer", f"{letter}99"),
        act("answer", "Z1"),
        act("answer", "?"),
    )
    assert all(result.error and result.reward == 0 and not result.terminal for result in (*before, *refused))
    (booked,) = await played(environment, act("answer", option(one, "correct")))
    (again,) = await played(environment, act("answer", option(one, "best")))
    assert (booked.error, again.error) == (False, True)
    (last,) = await played(environment, act("answer", option(other, "best").lower()))
    assert last.terminal


async def test_a_wish_is_paid_once_and_told_between_the_lines():
    task = a_task()
    one = task.data["aspects"][0]
    first, second = one["preferences"]
    ask = question(one["aspect"], first["attribute"])
    results = await played(opened(DOMAIN, task), ask, ask, question(one["aspect"], second["attribute"]))
    assert [result.reward for result in results] == [0.8, 0.0, 0.8]
    for result in results[:2]:
        assert hint(first, catalog()[one["aspect"]]) in result.text
    assert "That is all that matters to me" in results[2].text
    assert "That is all" not in results[0].text


async def test_after_two_questions_that_lead_nowhere_wishes_are_told_and_no_longer_paid():
    task = a_task()
    one = task.data["aspects"][0]
    asks = [question(one["aspect"], held["attribute"]) for held in one["preferences"]]
    beside = next(
        attribute.question for attribute in catalog()[one["aspect"]].attributes.values()
        if attribute.question and attribute.name not in {held["attribute"] for held in one["preferences"]}
    )  # fmt: skip
    environment = opened(DOMAIN, task)
    results = await played(environment, act("action", beside), asks[0], act("action", "What else?"), asks[1])
    assert [result.reward for result in results] == [0.0, 0.8, 0.0, 0.0]
    assert [IMPATIENT in result.text for result in results] == [False, False, True, False]
    assert hint(one["preferences"][1], catalog()[one["aspect"]]) in results[3].text
    patient = TravelGym(Setting(options={**DOMAIN.setting.options, "max_useless": 0}))
    results = await played(opened(patient, task), *[act("action", beside)] * 5, asks[0])
    assert results[-1].reward == 0.8 or "way" in results[4].text  # a wish may have been told unasked


async def test_a_question_about_two_things_hits_only_if_both_matter():
    task = a_task("44")
    one = task.data["aspects"][0]
    aspect = catalog()[one["aspect"]]
    first, second = (aspect.attributes[held["attribute"]].question for held in one["preferences"][:2])
    other = next(a for a in aspect.attributes.values() if not a.question)
    both, beside = await say(opened(DOMAIN, task), f"{first} {second}", f"{second} And the {other.name}?")
    assert (both.reward, beside.reward) == (0.8, 0.0)
    (again,) = await say(opened(DOMAIN, task), f"{first} And the {other.name}?")
    assert again.reward == 0.0


async def test_after_three_questions_beside_the_point_a_wish_is_told_unasked_and_unpaid():
    for seed in range(20):
        task = a_task()
        environment = opened(DOMAIN, task, seed=seed)
        results = await say(environment, *["What are your preferences?"] * 4)
        hints = [hint(held, catalog()[one["aspect"]]) for one in task.data["aspects"] for held in one["preferences"]]
        told = [[text for text in hints if text in result.text] for result in results]
        assert [len(found) for found in told] == [0, 0, 1, 0]
        assert sum(result.reward for result in results) == 0
        assert results[0].text in VAGUE
        one, held = next(
            (one, held) for one in task.data["aspects"] for held in one["preferences"]
            if hint(held, catalog()[one["aspect"]]) == told[2][0]
        )  # fmt: skip
        (asked,) = await played(environment, question(one["aspect"], held["attribute"]))
        assert asked.reward == 0  # told already: it can not be earned any more


async def test_one_text_can_not_ask_for_everything():
    for task in TEST[:50]:
        everything = " ".join(
            attribute.question
            for one in task.data["aspects"]
            for attribute in catalog()[one["aspect"]].attributes.values()
        )
        (result,) = await say(opened(DOMAIN, task), everything)
        assert result.reward == 0


async def test_a_search_says_what_it_lacks_covers_one_part_and_fails_now_and_then():
    task = a_task("2222")
    aspects = task.data["aspects"]
    both = " and ".join(query(catalog()[one["aspect"]], one["arguments"]) for one in aspects[:2])
    noun = catalog()[aspects[0]["aspect"]].noun
    results = await played(
        opened(DOMAIN, task),
        act("search", both),
        act("search", noun),
        act("search", "a nice thing"),
        *searches(task)[:3],
    )
    assert "one part of the trip at a time" in results[0].text
    assert all(name in results[1].text for name in aspects[0]["arguments"])
    assert "one part of the trip at a time" in results[2].text
    assert results[3].text.startswith("Options for")
    assert "does not respond" in results[4].text
    assert results[5].text.startswith("Options for")


async def test_no_play_earns_more_than_every_wish_and_every_part():
    rng = random.Random(7)
    patient = TravelGym(Setting(options={**DOMAIN.setting.options, "max_useless": 0}))
    totals: list[float] = []
    for task in TEST[:60]:
        aspects = task.data["aspects"]
        asks = [question(one["aspect"], name) for one in aspects for name in catalog()[one["aspect"]].cared_for()]
        books = [act("answer", row[0]) for one in aspects for row in one["options"]]
        environment = opened(patient, task)
        results = await played(environment, *searches(task), *rng.choices(asks, k=40), *rng.sample(books, 20), *asks)
        most = sum(0.8 * len(one["preferences"]) + 1 for one in aspects)
        totals.append(sum(result.reward for result in results))
        assert totals[-1] <= most + 1e-9
    assert sum(total > 0 for total in totals) > 50


# Rules and models.


def about(label: Json) -> tuple[str, str]:
    aspect, _, attribute = label.get("about", "/").partition("/")
    return aspect, attribute


def test_the_rules_agree_with_the_labels():
    assert len(LABELLED) >= 40
    assert set(Counter(label["kind"] for label in LABELLED)) == {"chat", "hit", "miss", "vague"}
    wrong = []
    for label in LABELLED:
        asked = classify(label["text"], label["pending"])
        if (asked.kind, (asked.aspect, asked.attribute)) != (label["kind"], about(label)):
            wrong.append(label["text"])
    assert wrong == []


def a_trip_that_wants_anything() -> Task:
    """A task with a preference for every attribute there is."""
    aspects = [
        {
            "aspect": name,
            "arguments": {},
            "options": [],
            "preferences": [
                {"attribute": a.name, "value": a.values[0].name, "hint": 0}
                for a in aspect.attributes.values()
                if a.cues
            ],
        }
        for name, aspect in catalog().items()
    ]
    return Task("t", "gyms/travel", "test", {"aspects": aspects})


async def test_the_llm_oracle_agrees_with_labels_and_rules():
    async with real_oracle(DOMAIN) as gym:
        game = TravelGame(gym.setting, a_trip_that_wants_anything(), 0)
        found = [await classified(game, label["text"], label["pending"]) for label in LABELLED]
    same = [one.kind == label["kind"] for one, label in zip(found, LABELLED, strict=True)]
    as_ruled = [one.kind == classify(x["text"], x["pending"]).kind for one, x in zip(found, LABELLED, strict=True)]
    assert sum(same) / len(same) >= 0.85
    assert sum(as_ruled) / len(as_ruled) >= 0.85


async def test_a_model_finds_the_words_for_a_wish_and_is_not_told_any_in_small_talk():
    task = a_task()
    one = task.data["aspects"][0]
    held = one["preferences"][0]
    prompts: list[str] = []

    def user(body: Json) -> str:
        prompts.append(body["messages"][-1]["content"])
        return "I would say so." if len(prompts) > 1 else f"Well, {held['value']}."  # the first one states the wish

    answers = iter([verdict("wish 1"), verdict("chat")])
    async with modeled(DOMAIN, user, lambda body: next(answers)) as gym:
        results = await played(
            opened(gym, task), question(one["aspect"], held["attribute"]), act("action", "Thank you.")
        )
    assert [result.reward for result in results] == [0.8, 0.0]
    assert results[0].text.startswith("I would say so.")
    wishes = [v.wish for a in catalog().values() for t in a.attributes.values() for v in t.values if v.wish]
    assert sum(wish in prompts[0] for wish in wishes) == 1
    assert not any(wish in prompts[-1] for wish in wishes)
