"""The persuade gym: debates, notes, what moves the holder, rewards that can not be farmed, expert, model oracles.

Models are scripted servers on this machine, reached over HTTP; on the labeled set the judge's server gives the label.
Not covered: how well a real model plays the holder; what the contract test asks of every domain; the canned policies
(tests/contract/test_canned_policies.py).
"""

from __future__ import annotations

import random
import re

import pytest

from environments.gyms.persuade import DOMAIN
from environments.gyms.persuade.game import LONGEST_COPY, STANCES, Ears, PersuadeGame, heard, judged_stance
from environments.gyms.persuade.players import argument
from environments.gyms.persuade.topics import LEVELS, SIZES, Note, looked_up, notes, numbers, themes, topics
from mua.environment.protocol import Task
from mua.types import Json
from tests.gyms_support import judged, labeled, modeled, opened, real_oracle, say, verdict

TASKS = {split: DOMAIN.tasks(split) for split in SIZES}
LABELLED = labeled("persuade")


def fitting(task: Task) -> list[Note]:
    """The note that meets each concern, weightiest first."""
    found = notes(task)
    names = [one["theme"] for one in sorted(task.data["concerns"], key=lambda one: -one["weight"])]
    return [next(n for n in found[name] if suits(task, n)) for name in names]


def suits(task: Task, note: Note) -> bool:
    return note.against(task.data["side"]) and note.setting == task.data["setting"]


def met_by(task: Task) -> list[str]:
    """An argument for each concern, weightiest first."""
    return [argument(note, task.data["side"], random.Random(3)) for note in fitting(task)]


def failing(task: Task, count: int) -> list[str]:
    """Well-formed arguments on what nobody has on their mind."""
    cared_for = [one["theme"] for one in task.data["concerns"]]
    others = [note for name, some in notes(task).items() if name not in cared_for for note in some]
    return [argument(note, task.data["side"], random.Random(3)) for note in others[:count]]


def of(difficulty: str) -> Task:
    return next(task for task in TASKS["test"] if task.data["difficulty"] == difficulty)


async def test_an_argument_earns_the_weight_of_the_concern_it_meets_once():
    for difficulty in ("easy", "medium", "hard"):
        task = of(difficulty)
        sentences = met_by(task)
        results = await say(
            opened(DOMAIN, task), sentences[0], sentences[0].replace("The ", "The very "), *sentences[1:]
        )
        weights = sorted((one["weight"] for one in task.data["concerns"]), reverse=True)
        assert [result.reward * LEVELS for result in results] == pytest.approx([weights[0], 0, *weights[1:]])
        assert [result.terminal for result in results] == [False] * len(weights) + [True]


async def test_the_second_argument_that_fails_ends_it_and_ground_is_lost_in_between():
    task = of("easy")
    environment = opened(DOMAIN, task)
    (first,) = await say(environment, met_by(task)[0])
    before = await judged(environment)
    results = await say(
        environment, failing(task, 1)[0], "What is on your mind?", *failing(task, 5)[4:], met_by(task)[1]
    )
    after = await judged(environment)
    assert first.reward > 0
    assert [result.reward for result in results] == [0.0] * 4
    assert [result.terminal for result in results[:3]] == [False, False, True]
    assert results[3].error
    assert STANCES.index(after.details["stance"]) == STANCES.index(before.details["stance"]) - 1
    assert after.details["furthest"] == before.details["stance"]


async def test_random_talk_never_earns_more_than_one():
    rng = random.Random(5)
    for task in TASKS["test"]:
        pool = [*met_by(task), "No.", "I simply know that you are quite wrong about it.", task.data["argument"]]
        results = await say(opened(DOMAIN, task), *rng.choices(pool, k=15))
        assert 0 <= sum(result.reward for result in results) <= 1 + 1e-9


async def test_the_words_of_a_convincing_argument_in_another_order_move_nobody():
    rng = random.Random(7)
    for task in TASKS["test"]:
        for text in met_by(task):
            words = text.split()
            (result,) = await say(opened(DOMAIN, task), " ".join(rng.sample(words, len(words))))
            assert result.reward == 0.0, text


async def test_all_notes_at_once_and_bare_keywords_move_nobody():
    for task in TASKS["test"]:
        everything = " ".join(met_by(task))
        results = await say(opened(DOMAIN, task), everything, "noise homes meals sport", task.data["argument"])
        assert [result.reward for result in results] == [0.0, 0.0, 0.0], task.data


async def test_what_is_on_the_holders_mind_shines_through_by_difficulty():
    def hinted(task: Task, text: str) -> bool:
        weightiest = fitting(task)[0].theme
        return any(hint in text for hint in weightiest.hints)

    for difficulty, expected in (("easy", [True, True, True]), ("medium", [True, True, True]), ("hard", [1, 0, 1])):
        task = of(difficulty)
        results = await say(opened(DOMAIN, task), *["You are wrong."] * 3)
        assert [hinted(task, result.text) for result in results] == [bool(one) for one in expected]
        results = await say(opened(DOMAIN, task), "You are wrong.", "What is on your mind?")
        assert hinted(task, results[1].text)
    for difficulty, expected in (("easy", True), ("medium", False), ("hard", False)):
        task = of(difficulty)
        (result,) = await say(opened(DOMAIN, task), met_by(task)[0])
        assert any(hint in result.text for theme in themes().values() for hint in theme.hints) is expected


def test_notes_are_found_by_one_theme_at_a_time():
    task = of("easy")
    found, topic = notes(task), topics()[task.data["kind"]]
    assert looked_up("decibels at night", found, topic).count("\n") == 3
    assert looked_up("The look of the streets.", found, topic).count("\n") == 3
    assert looked_up("noise and rubbish", found, topic) == (
        "Search for one thing at a time. There are notes on noise, rubbish."
    )
    assert looked_up("?", found, topic).startswith(
        "There are no notes on that. There are notes on accidents and crime,"
    )
    assert numbers("from 1,200 to 31") == [1200, 31]


# Rules and models.


def holder() -> Task:
    """Somebody in a harbour town who has noise on their mind and nothing else."""
    topic = topics()["cash"]
    data = {
        "kind": topic.name,
        "side": "for",
        "difficulty": "easy",
        "claim": topic.positions["for"],
        "argument": topic.reasons["for"][0],
        "setting": "harbour town",
        "concerns": [{"theme": "noise", "weight": LEVELS}],
    }
    return Task("t", "gyms/persuade", "test", data)


def filled(label: Json) -> str:
    """The labeled text with a place and its figures."""
    found, home = notes(holder()), "harbour town"
    wanted = {"for": (False, True), "elsewhere": (True, False)}.get(label["note"], (True, True))
    some = found["food" if label["note"] == "beside" else "noise"]
    note = next(one for one in some if (one.against("for"), one.setting == home) == wanted)
    way, wrong = ("rose", "fell") if note.after > note.before else ("fell", "rose")
    other = found["food"][0].place
    written = note.text(topics()["cash"])
    return str(label["text"]).format(
        place=note.place, before=note.before, after=note.after, way=way, wrong=wrong, other=other, note=written
    )


def test_the_rules_agree_with_the_labels():
    assert len(LABELLED) >= 30
    shown = [looked_up("noise", notes(holder()), topics()["cash"])]
    ears = Ears("for", "harbour town", "noise", [], shown)
    wrong = [
        (label, found.verdict)
        for label in LABELLED
        if (found := heard(filled(label), notes(holder()), ears)).verdict != label["verdict"]
    ]
    assert wrong == []
    seen = {label["verdict"] for label in LABELLED}
    assert seen == {
        "moved", "beside", "agreeing", "elsewhere", "scattered", "muddled", "loose", "parroted", "asked", "remark",
    }  # fmt: skip
    assert len(shown[0].split()) > LONGEST_COPY


async def test_a_judge_that_gives_the_labels_moves_as_the_rules_do():
    def judge(body: Json) -> str:
        prompt = body["messages"][-1]["content"]
        text = re.search(r"the latest message:\n<<<\n(.*?)\n>>>", prompt, re.DOTALL)[1]  # type: ignore[index]
        label = next(label for label in LABELLED if filled(label) == text)
        return verdict(STANCES[LEVELS if label["verdict"] == "moved" else 0])

    async with modeled(DOMAIN, lambda body: "unused", judge) as gym:
        for label in LABELLED:
            by_judge = await judged_stance(PersuadeGame(gym.setting, holder(), 0), filled(label), STANCES)
            (by_rule,) = await say(opened(DOMAIN, holder()), filled(label))
            assert (by_judge == STANCES[LEVELS]) == by_rule.terminal == (label["verdict"] == "moved"), label


async def test_the_llm_oracle_agrees_with_labels_and_rules():
    same, as_ruled = [], []
    async with real_oracle(DOMAIN) as gym:
        for label in LABELLED:
            stance = await judged_stance(PersuadeGame(gym.setting, holder(), 0), filled(label), STANCES)
            (by_rule,) = await say(opened(DOMAIN, holder()), filled(label))
            same.append((stance != STANCES[0]) == (label["verdict"] == "moved"))
            as_ruled.append((stance != STANCES[0]) == (by_rule.reward > 0))
    assert sum(same) / len(same) >= 0.8
    assert sum(as_ruled) / len(as_ruled) >= 0.8
