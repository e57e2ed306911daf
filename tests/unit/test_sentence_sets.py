"""The labeled sentences in tests/data: what an agent's message does, and whether what it says is true.

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

DATA = Path(__file__).parents[1] / "data"
DOMAINS: dict[str, Domain] = {domain.name: domain for domain in (AIRLINE, HELP_DESK, RETAIL, TELECOM)}
PHONE = {tool.schema.name for tool in phone_tools.TOOLS}

LEAST = table("sentence_sets")
"""Lines a domain in a folder, and with such an act or label."""


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


@pytest.mark.parametrize("name", DOMAINS)
@pytest.mark.parametrize("folder", ["users", "users/heldout", "users/heldout2", "users/heldout3", "users/heldout4"])
def test_messages_are_well_formed_and_those_held_out_use_the_known_labels(folder: str, name: str) -> None:
    wishes = {line["wish"] for line in lines("users", name)}
    for line in lines(folder, name):
        assert line.keys() == {"say", "wish", "acts"}, line
        assert all((line["say"].strip(), line["wish"] in wishes, line["wish"], line["acts"])), line
        assert len(set(line["acts"])) == len(line["acts"]), line
        assert line["acts"] == ["unclear"] or "unclear" not in line["acts"], line
    assert acts(folder, name) <= acts("users", name) | {f"instruct:{tool}" for tool in PHONE}


@pytest.mark.parametrize("name", DOMAINS)
def test_labels_of_messages_are_acts_with_what_they_need_and_no_message_is_told_twice(name: str) -> None:
    allowed = {*LEAST["users"]["acts"], *(["instruct"] if name == "telecom" else [])}
    assert {family(act) for act in acts("users", name)} <= allowed
    assert all((":" in act) == (family(act) in ("ask", "instruct")) for act in acts("users", name))
    assert {act.split(":")[1] for act in acts("users", name) if family(act) == "instruct"} <= PHONE
    assert not repeated([(folded(line["say"]), line["wish"]) for line in lines("users", name)])


@pytest.mark.parametrize("name", DOMAINS)
@pytest.mark.parametrize("folder", ["claims", "claims/heldout", "claims/fresh"])
def test_statements_are_well_formed_and_use_the_known_scenes(folder: str, name: str) -> None:
    for line in lines(folder, name):
        assert line.keys() == {"scene", "say", "label"}, line
        assert line["say"].strip(), line
        assert line["label"] in LEAST["claims"]["labels"], line
    assert {line["scene"] for line in lines(folder, name)} == set(scenes(name))
    assert 5 <= len(scenes(name)) <= 8
    assert not repeated([(line["scene"], folded(line["say"])) for line in lines("claims", name)])


@pytest.mark.parametrize("name", DOMAINS)
@pytest.mark.parametrize("folder", LEAST)
def test_there_are_enough_sentences_of_every_sort(folder: str, name: str) -> None:
    least = LEAST[folder]
    assert len(lines(folder, name)) >= least["lines"]
    kinds = (
        {family(act) for act in line["acts"]} if "acts" in least else {line["label"]} for line in lines(folder, name)
    )
    count = Counter(kind for found in kinds for kind in found)
    wanted = least.get("acts") or least["labels"]
    assert not {kind: count[kind] for kind, few in wanted.items() if count[kind] < few}


def acts(folder: str, name: str) -> set[str]:
    return {act for line in lines(folder, name) for act in line["acts"]}


@pytest.mark.parametrize(("name", "scene"), [(name, scene) for name in DOMAINS for scene in scenes(name)])
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


@pytest.mark.parametrize("name", DOMAINS)
@pytest.mark.parametrize(
    ("folder", "held"),
    [*(("users", f"heldout{number}") for number in ("", 2, 3, 4)), ("claims", "heldout"), ("claims", "fresh")],
)
def test_no_sentence_is_held_out_twice_or_known(folder: str, held: str, name: str) -> None:
    held_out = [folded(line["say"]) for line in lines(f"{folder}/{held}", name)]
    assert not repeated([(say,) for say in held_out])
    known = {folded(line["say"]) for line in lines(folder, name)}
    assert not [say for say in held_out if say in known]
