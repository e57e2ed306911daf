"""What every recipe becomes on a GPU, whole, against the files under ``tests/data/golden``.

A difference is shown as a diff; where it is meant, ``make goldens`` rewrites the files. Not covered: that a GPU
computes what the settings say.
"""

from __future__ import annotations

import difflib

import pytest

from tools import goldens, kit


@pytest.mark.parametrize("recipe", goldens.RECIPES)
@pytest.mark.parametrize("implementation", goldens.IMPLEMENTATIONS)
def test_settings_are_the_golden_ones(recipe: str, implementation: str) -> None:
    path = goldens.FOLDER / recipe / f"{implementation}.yaml"
    golden, found = path.read_text(), goldens.as_yaml(goldens.settings_of(recipe, implementation))
    name = str(path.relative_to(kit.ROOT))
    diff = difflib.unified_diff(golden.splitlines(), found.splitlines(), name, "now", lineterm="", n=0)
    assert found == golden, "make goldens accepts this:\n" + "\n".join(diff)


def test_every_recipe_has_golden_files() -> None:
    recipes = {path.stem for path in (kit.ROOT / "configs").glob("qwen*.yaml")}
    assert recipes == set(goldens.RECIPES) == {path.name for path in goldens.FOLDER.iterdir()}


def test_the_page_shows_what_differs_between_the_implementations() -> None:
    page = (kit.ROOT / "docs" / "megatron_options.md").read_text()
    assert goldens.differences() in page, "make goldens writes the table anew"
