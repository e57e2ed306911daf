"""``mua algorithms`` lists exactly what the configuration accepts. Does not cover what the lines say."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from typer.testing import CliRunner

from mua.algorithms.listing import LISTING
from mua.cli import app
from mua.config.schema import AlgorithmConfig, Section


def accepted(key: str) -> set[str]:
    """The values of a choice, the kinds of a list of sections, the keys of a section."""
    section, _, field = key.rpartition(".")
    owner = AlgorithmConfig.model_fields[section].annotation if section else AlgorithmConfig
    annotation = owner.model_fields[field].annotation
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return set(annotation.model_fields)
    if key == "filters":
        kinds = get_args(get_args(get_args(annotation)[0])[0])
        return {value for kind in kinds for value in get_args(kind.model_fields["kind"].annotation)}
    return set(get_args(annotation))


@pytest.mark.parametrize("key", LISTING)
def test_every_value_of_the_configuration_is_listed(key: str) -> None:
    assert set(LISTING[key]) == accepted(key)


def test_the_command_prints_it() -> None:
    runner = CliRunner()
    assert json.loads(runner.invoke(app, ["algorithms", "--json"]).stdout) == LISTING
    table = runner.invoke(app, ["algorithms"]).stdout
    assert all(name in table and line in table for values in LISTING.values() for name, line in values.items())
