"""``mua algorithms`` lists just what the configuration accepts; the tests that docs/algorithms.md names are there.

Does not cover what the lines say.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

from mua.cli import app
from mua.config.schema import AlgorithmConfig, Section
from workbench.algorithms import LISTING


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


def test_the_tests_that_the_documentation_names_are_there() -> None:
    root = Path(__file__).parents[2]
    table = (root / "docs" / "algorithms.md").read_text().partition("## Sources and tests")[2]
    file, named = "", 0
    for match in re.finditer(r"`([\w/.]*test_\w+\.py)?(?:::(test_\w+))?`", table):
        file = match[1] or file
        source = (root / file if "/" in file else root / "tests" / "unit" / file).read_text()
        assert match[2] is None or f"def {match[2]}(" in source, match[0]
        named += match[2] is not None
    assert named > 40
