"""``mua algorithms`` lists exactly what the configuration accepts. Does not cover what the lines say."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from typer.testing import CliRunner

from mua.algorithms.listing import LISTING
from mua.cli import app
from mua.config.schema import AlgorithmConfig


@pytest.mark.parametrize("key", LISTING)
def test_every_value_of_the_configuration_is_listed(key: str) -> None:
    assert set(LISTING[key]) == set(get_args(AlgorithmConfig.model_fields[key].annotation))


def test_the_command_prints_it() -> None:
    runner = CliRunner()
    assert json.loads(runner.invoke(app, ["algorithms", "--json"]).stdout) == LISTING
    table = runner.invoke(app, ["algorithms"]).stdout
    assert all(name in table and line in table for values in LISTING.values() for name, line in values.items())
