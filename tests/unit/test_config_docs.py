"""docs/configuration.md is what the schema says, and every key says what it is for.

Not covered: whether the prose is true.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from mua.config.docs import configuration_page
from mua.config.schema import ExperimentConfig, Section
from mua.config.section import sections_of

PAGE = Path(__file__).parents[2] / "docs/configuration.md"


def test_the_committed_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == configuration_page(), "run `make docs` and commit the page"


def reachable(annotation: object, above: str) -> Iterator[str]:
    """Every key below a type, through unions, lists and mappings, found without the code under test."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        for name, field in annotation.model_fields.items():
            yield f"{above}{name}"
            yield from reachable(field.annotation, f"{above}{name}.")
    for inner in get_args(annotation):
        yield from reachable(inner, above)


def test_the_page_names_every_key_of_every_member_of_a_union() -> None:
    page, keys = configuration_page(), set(reachable(ExperimentConfig, ""))
    assert {"algorithm.filters.extra_right", "algorithm.filters.turns", "user.llm.fallbacks.base_url"} <= keys
    assert sorted(key for key in keys if f"| `{key}` |" not in page) == []
    for kind in ("range", "balance", "minimum_turns", "overlong"):
        assert f"## `algorithm.filters` with `kind: {kind}`" in page
        assert f"[kind: {kind}](#algorithmfilters-with-kind-{kind})" in page


def undocumented(schema: type[Section], above: str = "") -> Iterator[str]:
    for name, field in schema.model_fields.items():
        for inner in sections_of(field.annotation):
            yield from undocumented(inner, f"{above}{name}.")
        if not sections_of(field.annotation) and not field.description:
            yield above + name


def test_every_key_has_a_docstring() -> None:
    assert list(undocumented(ExperimentConfig)) == []
