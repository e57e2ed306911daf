"""The labelled sentences in tests/data: what an agent's message does, and whether what it says is true.

Counts, labels and duplicates are checked, and that the calls of every scene run on the domain's environment. The sets
in the folders ``heldout`` and ``fresh`` give the published figures: they share labels, wishes and scenes with the
others, and no sentence.
Not covered: whether a label is right, and how well the code that reads messages does on these sentences.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from environments.airline import DOMAIN as AIRLINE
from environments.help_desk import DOMAIN as HELP_DESK
from environments.retail import DOMAIN as RETAIL
from environments.telecom import DOMAIN as TELECOM
from environments.telecom import phone_tools
from mua.environment.domain import Domain
from mua.environment.protocol import Task, ToolResult, UserControlled
from tests.tables import table

TABLE = table("sentence_sets")

DATA = Path(__file__).parents[1] / "data"
DOMAINS: dict[str, Domain] = {domain.name: domain for domain in (AIRLINE, HELP_DESK, RETAIL, TELECOM)}
PHONE = {tool.schema.name for tool in phone_tools.TOOLS}

LEAST_ACTS = TABLE["LEAST_ACTS"]
"""Lines a domain with such an act."""
LEAST_LABELS = {"true": 120, "false": 120, "irrelevant": 70}


def having(folder: str, ending: str) -> list[str]:
    """The domains that have such a file."""
    return [name for name in sorted(DOMAINS) if (DATA / folder / f"{name}{ending}").exists()]


@cache
def lines(folder: str, name: str) -> list[Any]:
    return [json.loads(line) for line in (DATA / folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@cache
def scenes(name: str) -> Any:
    return yaml.safe_load((DATA / "claims" / f"{name}-scenes.yaml").read_text(encoding="utf-8"))


def repeated(keys: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [key for key, count in Counter(keys).items() if count > 1]


def family(act: str) -> str:
    """``ask`` of ``ask:name``."""
    return act.split(":")[0]


def folded(text: str) -> str:
    return " ".join(text.lower().split())


@pytest.mark.parametrize("name", ["airline", "help_desk", "retail", "telecom"])
def test_the_sets_are_there(name: str) -> None:
    assert name in having("users", ".jsonl")
    assert name in having("claims", ".jsonl")
    assert name in having("claims", "-scenes.yaml")


@pytest.mark.parametrize("name", having("users", ".jsonl"))
def test_messages_are_well_formed_and_told_once(name: str) -> None:
    allowed = {*LEAST_ACTS, *(["instruct"] if name == "telecom" else [])}
    for line in lines("users", name):
        assert line.keys() == {"say", "wish", "acts"}, line
        assert all((line["say"].strip(), line["wish"], line["acts"])), line
        assert len(set(line["acts"])) == len(line["acts"]), line
        assert {family(act) for act in line["acts"]} <= allowed, line
        assert all((":" in act) == (family(act) in ("ask", "instruct")) for act in line["acts"]), line
        assert all(act.split(":")[1] in PHONE for act in line["acts"] if family(act) == "instruct"), line
        assert line["acts"] == ["unclear"] or "unclear" not in line["acts"], line
    assert not repeated([(folded(line["say"]), line["wish"]) for line in lines("users", name)])


@pytest.mark.parametrize("name", having("users", ".jsonl"))
def test_there_are_enough_messages_of_every_sort(name: str) -> None:
    assert len(lines("users", name)) >= 260
    count = Counter(kind for line in lines("users", name) for kind in {family(act) for act in line["acts"]})
    assert not {act: count[act] for act, least in LEAST_ACTS.items() if count[act] < least}


@pytest.mark.parametrize("name", having("claims", ".jsonl"))
def test_statements_are_well_formed_and_told_once(name: str) -> None:
    for line in lines("claims", name):
        assert line.keys() == {"scene", "say", "label"}, line
        assert line["say"].strip(), line
        assert line["label"] in LEAST_LABELS, line
        assert line["scene"] in scenes(name), line
    assert not repeated([(line["scene"], folded(line["say"])) for line in lines("claims", name)])


@pytest.mark.parametrize("name", having("claims", ".jsonl"))
def test_there_are_enough_statements_of_every_label(name: str) -> None:
    assert len(lines("claims", name)) >= 330
    assert 5 <= len(scenes(name)) <= 8
    count = Counter(line["label"] for line in lines("claims", name))
    assert not {label: count[label] for label, least in LEAST_LABELS.items() if count[label] < least}
    assert {line["scene"] for line in lines("claims", name)} == set(scenes(name))


@pytest.mark.parametrize(
    ("name", "scene"), [(name, scene) for name in having("claims", "-scenes.yaml") for scene in scenes(name)]
)
def test_the_calls_of_a_scene_run_without_error(name: str, scene: str) -> None:
    state = scenes(name)[scene]
    assert state.keys() == {"task", "heard", "calls"}
    assert all(isinstance(text, str) and text for text in state["heard"])
    environment = DOMAINS[name].environment()
    environment.reset(Task(f"{name}/{scene}", name, "test", state["task"]), 0)
    for call in state["calls"]:
        by_user = name == "telecom" and call["name"] in PHONE
        run = cast(UserControlled, environment).user_call if by_user else environment.call
        result = run(call["name"], call["arguments"])
        assert isinstance(result, ToolResult), call
        assert not result.error, (call, result)
    environment.close()


LEAST_HELD_OUT_ACTS = TABLE["LEAST_HELD_OUT_ACTS"]
"""Lines a domain with such an act in the held-out set."""
LEAST_HELD_OUT_LABELS = {"true": 45, "false": 50, "irrelevant": 20}
HELD_OUT = sorted(DOMAINS)


def acts(folder: str, name: str) -> set[str]:
    return {act for line in lines(folder, name) for act in line["acts"]}


@pytest.mark.parametrize("name", HELD_OUT)
@pytest.mark.parametrize("folder", ["users/heldout", "users/heldout2", "users/heldout3", "users/heldout4"])
def test_held_out_messages_are_well_formed_and_use_the_known_labels(folder: str, name: str) -> None:
    wishes = {line["wish"] for line in lines("users", name)}
    for line in lines(folder, name):
        assert line.keys() == {"say", "wish", "acts"}, line
        assert all((line["say"].strip(), line["wish"] in wishes, line["acts"])), line
        assert len(set(line["acts"])) == len(line["acts"]), line
        assert line["acts"] == ["unclear"] or "unclear" not in line["acts"], line
    assert acts(folder, name) <= acts("users", name) | {f"instruct:{tool}" for tool in PHONE}


@pytest.mark.parametrize("name", HELD_OUT)
@pytest.mark.parametrize("folder", ["claims/heldout", "claims/fresh"])
def test_held_out_statements_are_well_formed_and_use_the_known_scenes(folder: str, name: str) -> None:
    for line in lines(folder, name):
        assert line.keys() == {"scene", "say", "label"}, line
        assert line["say"].strip(), line
        assert line["label"] in LEAST_LABELS, line
    assert {line["scene"] for line in lines(folder, name)} == set(scenes(name))


@pytest.mark.parametrize("name", HELD_OUT)
def test_there_are_enough_held_out_sentences_of_every_sort(name: str) -> None:
    assert len(lines("users/heldout", name)) >= 140
    assert len(lines("claims/heldout", name)) >= 130
    count = Counter(kind for line in lines("users/heldout", name) for kind in {family(act) for act in line["acts"]})
    assert not {act: count[act] for act, least in LEAST_HELD_OUT_ACTS.items() if count[act] < least}
    count = Counter(line["label"] for line in lines("claims/heldout", name))
    assert not {label: count[label] for label, least in LEAST_HELD_OUT_LABELS.items() if count[label] < least}


@pytest.mark.parametrize("name", HELD_OUT)
@pytest.mark.parametrize(
    ("folder", "held"),
    [*(("users", f"heldout{number}") for number in ("", 2, 3, 4)), ("claims", "heldout"), ("claims", "fresh")],
)
def test_no_sentence_is_held_out_twice_or_known(folder: str, held: str, name: str) -> None:
    held_out = [folded(line["say"]) for line in lines(f"{folder}/{held}", name)]
    assert not repeated([(say,) for say in held_out])
    known = {folded(line["say"]) for line in lines(folder, name)}
    assert not [say for say in held_out if say in known]
