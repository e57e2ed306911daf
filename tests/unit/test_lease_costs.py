"""A private database for every rollout costs next to nothing, compared within one run.

On the made database of tools/bench/leases.py. Wall times and the official database are the benchmark's
(docs/benchmarks/leases.md).
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from mua.environment import schema as schema_module
from mua.environment.protocol import ToolSchema
from mua.environment.schema import validate_arguments
from tools.bench.leases import Meter, Subject, made_subject, many_leases, measure_live


@pytest.fixture(scope="module")
def shop() -> Subject:
    return made_subject()


def test_the_made_database_is_as_large_as_tau_benchs_and_is_never_written(shop: Subject):
    tables = shop.base.tables
    assert {name: len(records) for name, records in tables.items()} == {"orders": 1000, "products": 50, "users": 500}
    assert 1.2e6 < len(json.dumps(tables)) < 3e6
    before = shop.base.digest()
    measure_live("overlay", 20, True, False, shop)
    assert shop.base.digest() == before == made_subject().base.digest()


@pytest.fixture(scope="module")
def copy(shop: Subject) -> dict[str, float]:
    """CPU seconds and bytes of one copied database."""
    copies = 3
    measured = {name: measure_live("deepcopy", copies, False, name == "held", shop)[name] for name in ("cpu", "held")}
    return {name: value / copies for name, value in measured.items()}


@pytest.mark.parametrize("way", ["overlay", "manager"])
def test_a_rollout_costs_a_fraction_of_a_copy(shop: Subject, copy: dict[str, float], way: str):
    count = 50
    for gold in (False, True):
        cpu = measure_live(way, count, gold, False, shop)["cpu"] / count
        held = measure_live(way, count, gold, True, shop)["held"] / count
        assert cpu * 20 < copy["cpu"]
        assert held * 50 < copy["held"]
        assert gold or held < 20_000


def test_leases_that_are_given_back_leave_nothing(shop: Subject):
    asyncio.run(many_leases(shop, 100))
    meter = Meter(traced=True)
    asyncio.run(many_leases(shop, 400))
    # One order copied and kept a lease would be 1 MB.
    assert meter.read()["held"] < 50_000


def test_checking_arguments_writes_a_schema_down_once(monkeypatch: pytest.MonkeyPatch):
    def asks(kind: str) -> ToolSchema:
        return ToolSchema("t", "", {"type": "object", "properties": {"n": {"type": kind}}})

    number, text = asks("integer"), asks("string")
    assert validate_arguments(number, {"n": 1}) is None
    assert "n" in (validate_arguments(text, {"n": 1}) or "")

    def refuse(*_: object) -> str:
        raise AssertionError("written down again")

    monkeypatch.setattr(schema_module, "json", SimpleNamespace(dumps=refuse))
    assert validate_arguments(number, {"n": 2}) is None
    assert "'2' is not of type 'integer'" in (validate_arguments(number, {"n": "2"}) or "")
    assert validate_arguments(text, {"n": "2"}) is None
    with pytest.raises(AssertionError, match="written down again"):
        validate_arguments(asks("integer"), {"n": 1})
