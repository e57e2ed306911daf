"""docs/configuration.md is what the schema says, and every key says what it is for.

Not covered: whether the prose is true.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mua.config.docs import configuration_page
from mua.config.schema import ExperimentConfig, Section
from mua.config.section import all_keys, section_of

PAGE = Path(__file__).parents[2] / "docs/configuration.md"


def test_the_committed_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == configuration_page(), "run `make docs` and commit the page"


def test_the_page_names_every_key() -> None:
    page = configuration_page()
    assert [key for key in map(".".join, all_keys(ExperimentConfig)) if f"`{key}`" not in page] == []


def undocumented(schema: type[Section], above: str = "") -> Iterator[str]:
    for name, field in schema.model_fields.items():
        inner = section_of(field.annotation)
        if inner:
            yield from undocumented(inner, f"{above}{name}.")
        elif not field.description:
            yield above + name


def test_every_key_has_a_docstring() -> None:
    assert list(undocumented(ExperimentConfig)) == []


def test_types_bounds_and_defaults_are_shown() -> None:
    page = configuration_page()
    assert "| `trainer.steps` | integer > 0 | **required** |" in page
    assert "| `optimizer.beta1` | number ≥ 0, ≤ 1 | `0.9` |" in page
    assert "| `engine.dtype` | `float32`, `bfloat16` or null | `null` |" in page
