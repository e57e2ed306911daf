"""The tables of cases: none is left over; values are put in where paths say. Not covered: how they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tables import FOLDER, changed, table


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_table_is_named_in_its_test_file(path: Path):
    code = Path(__file__).with_name(f"test_{path.stem}.py").read_text(encoding="utf-8")
    assert [key for key in table(path.stem) if key not in code] == []


def test_values_are_put_in_at_their_paths():
    value = {"a": [{"b": 1}, 2], "c": {}}
    assert changed(value, {"a/0/b": 3, "a/1": 4, "c/new": 5}) == {"a": [{"b": 3}, 4], "c": {"new": 5}}
    assert changed([{"id": 1}, {"id": 2}], {"*/id": 7}) == [{"id": 7}, {"id": 2}]
    assert changed(value, {"": []}) == []
