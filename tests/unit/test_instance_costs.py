"""A private database for every rollout costs next to nothing beside a copy: in calls made and in bytes held.

On the made database of tools/bench/environment_instances.py. Times and the official database are the benchmark's
(docs/benchmarks/environment_instances.md).
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mua.environment import tool_arguments
from mua.environment.tool_arguments import validate_arguments
from mua.types import ToolSchema
from tests.counting import operations
from tools.bench.environment_instances import Meter, Subject, made_subject, many_instances, measure_live, opened, play


@pytest.fixture(scope="module")
def shop() -> Subject:
    """With a few of its tasks; the gold state of each is found once, so that it burdens no measurement."""
    made = made_subject()
    few = replace(made, tasks=made.tasks[:5])
    asyncio.run(many_instances(few, len(few.tasks)))
    return few


@pytest.mark.slow
def test_the_made_database_is_as_large_as_tau_benchs_and_is_never_written(shop: Subject):
    tables = shop.base.tables
    assert {name: len(records) for name, records in tables.items()} == {"orders": 1000, "products": 50, "users": 500}
    assert 1.2e6 < len(json.dumps(tables)) < 3e6
    before = shop.base.digest()
    measure_live("overlay", 20, True, False, shop)
    assert shop.base.digest() == before == made_subject().base.digest()


def test_a_rollout_does_a_fraction_of_the_work_of_a_copy(shop: Subject):
    task = shop.tasks[0]
    rollouts: list[Callable[[], Any]] = [
        lambda: opened(shop, task),
        lambda: play(opened(shop, task), task),
        lambda: asyncio.run(many_instances(shop, 1)),  # with the event loop's own work
    ]
    whole = operations(lambda: copy.deepcopy(shop.base.tables))
    assert [operations(rollout) * 100 < whole for rollout in rollouts] == [True] * 3


@pytest.mark.parametrize("way", [pytest.param("overlay", marks=pytest.mark.slow), "manager"])
def test_a_rollout_holds_a_fraction_of_the_memory_of_a_copy(shop: Subject, way: str):
    whole, count = measure_live("deepcopy", 1, False, True, shop)["held"], 20
    for gold in (False, True):
        held = measure_live(way, count, gold, True, shop)["held"] / count
        assert held * 50 < whole
        assert gold or held < 20_000


def test_instance_that_are_given_back_leave_nothing(shop: Subject):
    meter = Meter(traced=True)
    asyncio.run(many_instances(shop, 200))
    # One order copied and kept an instance would be half a megabyte.
    assert meter.read()["held"] < 50_000


def test_checking_arguments_writes_a_schema_down_once(monkeypatch: pytest.MonkeyPatch):
    def asks(kind: str) -> ToolSchema:
        return ToolSchema("t", "", {"type": "object", "properties": {"n": {"type": kind}}})

    number, text = asks("integer"), asks("string")
    assert validate_arguments(number, {"n": 1}) is None
    assert "n" in (validate_arguments(text, {"n": 1}) or "")

    def refuse(*_: object) -> str:
        raise AssertionError("written down again")

    monkeypatch.setattr(tool_arguments, "json", SimpleNamespace(dumps=refuse))
    assert validate_arguments(number, {"n": 2}) is None
    assert "'2' is not of type 'integer'" in (validate_arguments(number, {"n": "2"}) or "")
    assert validate_arguments(text, {"n": "2"}) is None
    with pytest.raises(AssertionError, match="written down again"):
        validate_arguments(asks("integer"), {"n": 1})
