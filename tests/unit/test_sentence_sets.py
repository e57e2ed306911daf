"""The labeled sentences in tests/data: what an agent's message does, and whether what it says is true.

The sets in the folders ``heldout`` and ``fresh`` give the published figures: they share no sentence with the others.
Not covered: whether a label is right, and how well the code that reads messages does on these sentences.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from environments.airline import DOMAIN as AIRLINE
from environments.help_desk import DOMAIN as HELP_DESK
from environments.retail import DOMAIN as RETAIL
from environments.telecom import DOMAIN as TELECOM
from mua.environment.domain import Domain
from tests.tables import table

DATA = Path(__file__).parents[1] / "data"
DOMAINS: dict[str, Domain] = {domain.name: domain for domain in (AIRLINE, HELP_DESK, RETAIL, TELECOM)}

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
