"""What holds at every service desk, from gold's pay to the cost of a verdict.

Gold pays and idling does not; the expert serves everybody, also in other words; customers talk in many ways, those of
the test split in their own; manifests pin tasks; settings are checked. Not covered: what is particular to a desk
(test_help_desk.py, test_retail.py, test_airline.py, test_telecom.py), canned policies and what every domain must keep
(tests/contract).
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml

import environments
from environments.airline import AirlineDomain
from environments.kit.database import RewardForm
from environments.kit.demonstrate import demonstrate, replay_gold
from environments.kit.scripted import grammar_of
from environments.retail import RetailDomain
from environments.telecom import TelecomDomain
from mua.config.schema import EnvironmentConfig
from mua.environment.domain import Domain
from mua.environment.protocol import Split, Task
from mua.environment.registry import get_domain
from mua.environment.selection import Selection
from mua.environment.user import STOP_SIGNAL
from mua.users.personas import PERSONAS
from mua.utils.errors import MuaError
from tests.desk_support import SPLITS, all_tasks, judged, opened, played, reworded, spoken, with_persona
from tests.tables import cases_of, refused

cases = cases_of("desks")

DESKS = ("airline", "help_desk", "retail", "telecom")
FORMED = {"airline": AirlineDomain, "retail": RetailDomain, "telecom": TelecomDomain}
"""Desks that pay in two forms."""
COMPACT: dict[str, Domain] = {
    "airline": AirlineDomain(short_answers=True),
    "retail": RetailDomain(short_answers=True),
    "telecom": TelecomDomain(compact=True),
}
EVERY = {"airline": 3, "help_desk": 16, "retail": 2}
"""One task in so many: those that are served make some seconds together."""
OWN = ("want", "tell", "change", "gives")
"""What customers say of their wishes, rather than small talk."""
IDLE = ("", "I am sorry, I cannot help.", "Hello, how can I help you?", "I am sorry, I cannot do that.", "Done.")
MEETINGS = 2
"""Tasks that hear a sentence in another way, about."""
REWORDED = {
    name: yaml.safe_load((Path(__file__).parents[1] / f"data/rewordings/{name}.yaml").read_text(encoding="utf-8"))
    for name in ("airline", "retail")
}


@pytest.mark.parametrize("form", ["all_or_nothing", "partial"])
@pytest.mark.parametrize("name", FORMED)
def test_gold_pays_on_every_task_and_idling_on_none(name: str, form: RewardForm):
    """In the other form of reward on one task in four; every third task sees all ways to idle."""
    domain, tasks = FORMED[name](form), all_tasks(name)
    if form == "partial" and name != "telecom":
        tasks = [
            task for index, task in enumerate(tasks) if index % 4 == 0 or (name, task.split) == ("airline", "test")
        ]
    before = opened(tasks[0], domain)._desk.base.digest()

    async def replayed() -> None:
        for number, task in enumerate(tasks):
            gold = await replay_gold(domain, task)
            assert (gold.reward, gold.evaluation.success) == (1.0, True), (task.id, gold.evaluation.details)
            environment = opened(task, domain)
            for text in IDLE if number % 3 == 0 else IDLE[:2]:
                idle = judged(environment, *[text] * bool(text))
                assert (idle.reward, idle.success) == (0.0, False), (task.id, text)
            for action in task.data["actions"]:
                call = environment.user_call if action.get("requestor") == "user" else environment.call
                assert not call(action["name"], action["arguments"]).error, (task.id, action)

    asyncio.run(replayed())
    assert opened(tasks[0], domain)._desk.base.digest() == before


@pytest.mark.parametrize(
    ("name", "compact", "every"),
    [
        ("airline", False, {"train": 8, "validation": 1, "test": 1}),
        ("airline", True, {"test": 1}),
        ("retail", False, {"train": 4, "validation": 1, "test": 1}),
        ("retail", True, {"train": 4, "validation": 1, "test": 1}),
        ("telecom", True, {"test": 3}),
        pytest.param("telecom", False, {"train": 1, "validation": 1, "test": 1}, marks=pytest.mark.slow),
    ],
)
def test_the_expert_solves_one_task_in_so_many_by_talking(name: str, compact: bool, every: dict[Split, int]):
    domain = COMPACT[name] if compact else get_domain(name)
    chosen = [task for split, share in every.items() for task in domain.tasks(split)[::share]]

    async def all_played() -> None:
        for task in chosen:
            found = await demonstrate(domain, task, 0)
            assert (found.reward, found.evaluation.success) == (1.0, True), (task.id, found.evaluation.details)
            assert found.ended, task.id

    asyncio.run(all_played())


@pytest.mark.parametrize("persona", PERSONAS)
@pytest.mark.parametrize("name", EVERY)
def test_the_expert_serves_every_kind_of_person(name: str, persona: str):
    for task in get_domain(name).tasks("test")[sum(map(ord, persona)) % EVERY[name] :: EVERY[name]]:
        found = with_persona(task, persona, 3)
        assert found.evaluation.success, (task.id, found.evaluation.details, found.messages)
        assert found.ended, task.id


@pytest.mark.parametrize("way", range(3))
@pytest.mark.parametrize(("name", "sentence"), [(name, sentence) for name in REWORDED for sentence in REWORDED[name]])
def test_a_sentence_of_the_expert_may_be_put_in_another_way(name: str, sentence: str, way: int):
    meeting = that_meet(name, sentence)
    assert meeting, f"no task meets {sentence!r}"
    for task in meeting[way :: max(3, len(meeting) // MEETINGS)]:  # each way is said to others
        met = 0

        def changed(text: str) -> str:
            nonlocal met
            met += sentence in text
            return text.replace(sentence, REWORDED[name][sentence][way])

        moves = reworded(get_domain(name).expert(task, 0), changed)  # type: ignore[attr-defined]
        found = with_persona(task, "plain", moves=moves)
        assert found.evaluation.success, (task.id, found.evaluation.details, found.messages)
        assert met, task.id


@cache
def said_by_the_expert(name: str) -> list[tuple[Task, str]]:
    """Tasks of the test split, and all that the expert says to a plain customer there."""
    said = []
    for task in get_domain(name).tasks("test"):
        found = with_persona(task, "plain", moves=get_domain(name).expert(task, 0))  # type: ignore[attr-defined]
        said.append((task, "\n".join(str(m["content"]) for m in found.messages if m["role"] == "assistant")))
    return said


def that_meet(name: str, sentence: str) -> list[Task]:
    return [task for task, text in said_by_the_expert(name) if sentence in text]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "split", "least", "most"),
    [("airline", "test", 0.4, 0.95), ("retail", "train", 0.2, 0.8), ("telecom", "validation", 0.05, 0.95)],
)
def test_a_loose_expert_fails_at_times_and_never_crashes(name: str, split: Split, least: float, most: float):
    found = [played(get_domain(name), task, 1, loose=0.5) for task in get_domain(name).tasks(split)[:120]]
    assert least < sum(one.evaluation.success for one in found) / len(found) < most
    assert all(len(one.messages) > 2 for one in found)


def test_conversations_repeat_with_the_seed_and_vary_without_it():
    for name in DESKS:
        task = get_domain(name).tasks("test")[0]
        talks = [json.dumps(played(get_domain(name), task, seed).messages) for seed in (5, *range(8))]
        assert talks[0] == talks[6]
        assert len(set(talks)) > 3


# ---- customers


@pytest.mark.parametrize(("name", "least"), [("airline", 400), ("help_desk", 2048), ("retail", 500), ("telecom", 400)])
def test_splits_share_neither_customers_nor_tasks(name: str, least: int):
    who = {
        "airline": lambda task: task.data["user"],
        "help_desk": lambda task: json.dumps(task.data["world"]),
        "retail": lambda task: task.data["instruction"].split(",")[0],
        "telecom": lambda task: task.data["initial"]["phone"]["phone"]["line_id"],
    }[name]
    people = {split: {who(task) for task in get_domain(name).tasks(split)} for split in SPLITS}
    assert len(set.union(*people.values())) == sum(map(len, people.values()))
    assert len(get_domain(name).tasks("train")) >= least
    contents = [json.dumps(task.data, sort_keys=True) for task in all_tasks(name)]
    assert len(set(contents)) == len({task.id for task in all_tasks(name)}) == len(contents)
    if name in ("help_desk", "telecom"):  # everybody has one task
        assert sum(map(len, people.values())) == len(contents)


NAMES_AND_NUMBERS = re.compile(r"\S*[\d_@#$]\S*|(?<=[\w,] )[A-Z][\w'-]*")


def heard_in(name: str, split: Split, count: int = 130) -> tuple[set[str], set[str]]:
    """Openings and sentences of the customers in dialogues with the expert, without names and numbers."""
    domain, openings, sentences = get_domain(name), set[str](), set[str]()
    tasks = domain.tasks(split)
    for place in range(0, 3 * count, 3):
        texts = spoken(played(domain, tasks[place % len(tasks)], place // len(tasks)))
        masked = [NAMES_AND_NUMBERS.sub("_", text.replace(STOP_SIGNAL, "")) for text in texts]
        openings.add(masked[0])
        sentences |= {part for text in masked for part in re.split(r"(?<=[.!?])\s+", text)}
    return openings, sentences


@pytest.mark.slow
@pytest.mark.parametrize("name", DESKS)
def test_customers_say_a_thousand_things_in_a_hundred_openings_and_those_of_the_test_split_others(name: str):
    train, test = heard_in(name, "train"), heard_in(name, "test")
    for openings, sentences in (train, test):
        assert len(openings) >= 100
        assert len(sentences) >= 1000
    assert not train[0] & test[0]
    assert len(train[1] & test[1]) <= 3, train[1] & test[1]


@pytest.mark.parametrize("name", DESKS)
def test_the_test_split_speaks_in_words_that_training_never_uses(name: str):
    rules = grammar_of(Path(environments.__file__).parent / name)
    own = {rule: set(wordings) for rule, wordings in rules["test"].items() if rule.startswith(OWN)}
    assert own.keys() == {rule for rule in rules["train"] if rule.startswith(OWN)}
    assert not [rule for rule, wordings in own.items() if wordings & set(rules["train"][rule])]


# ---- manifests, settings, cost


@pytest.mark.parametrize("name", DESKS)
def test_the_manifest_pins_what_the_generator_makes(name: str, tmp_path: Path):
    pinned = importlib.import_module(f"environments.{name}.tasks").PINNED
    committed, copy = pinned.manifest.read_text(), tmp_path / "manifest.json"
    pinned = replace(pinned, manifest=copy, _loaded={})
    pinned.pin()
    assert copy.read_text() == committed
    copy.write_text(committed.replace(json.loads(committed)["test"]["sha256"], "0" * 64))
    with pytest.raises(
        MuaError, match=rf"manifest\.json: test: what is generated differs .* python -m environments\.{name}"
    ):
        pinned.load("test")


@cases
def test_settings_that_cannot_be_had_are_refused(settings: dict[str, object], message: str):
    refused(message, Selection.from_config, EnvironmentConfig.model_validate(settings))
