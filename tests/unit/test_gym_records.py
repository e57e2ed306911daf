"""UserRL's records and rows: what is read, how it maps onto the gyms' tasks, what is wrong with a file.

tests/data/userrl has small files in UserRL's form, made by this project. With ``MUA_USERRL`` naming a clone of UserRL,
its own records (and its tables, where pyarrow is there) are read too. What gyms make of them is covered by
tests/unit/test_gym_official.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from environments.gyms._shared import records as reading
from environments.gyms._shared.records import (
    FunctionRecord,
    GymName,
    Record,
    of_rows,
    parse_rule,
    read_records,
    read_rows,
    rule_at,
)
from environments.gyms.function.records import rule_value
from environments.gyms.function.rules import text
from mua.utils.errors import ConfigError
from tests.tables import cases_of, changed, refused

cases = cases_of("gym_records")

FOLDER = Path(__file__).parents[1] / "data/userrl"
GYMS: tuple[GymName, ...] = get_args(GymName)


def small() -> dict[GymName, tuple[Record, ...]]:
    return {gym: read_records(gym, FOLDER / f"{gym}.json") for gym in GYMS}


# ---- what is read


def test_every_gym_has_its_records_and_every_row_its_record():
    paired = list(of_rows(read_rows(FOLDER / "train.jsonl"), small(), "train.jsonl"))
    assert [row.gym for _, row, _ in paired] == list(GYMS)
    assert [type(record) for _, _, record in paired] == [reading.KINDS[row.gym] for _, row, _ in paired]
    row = paired[4][1]
    assert (row.split, row.index, row.opening) == ("train", 4, "I want to see Cork for a weekend.")
    assert row.given == {"env_name": "TravelGym", "id": "22_1"}, "columns that are empty are no settings"


def test_a_function_record_is_a_task_of_the_function_gym():
    for record in small()["function"]:
        assert isinstance(record, FunctionRecord)
        assert float(rule_value(record.rule, record.test_case)) == pytest.approx(record.expected_result)
        assert parse_rule(text(record.rule)) == record.rule  # type: ignore[arg-type]


@cases
def test_rules_mean_what_arithmetic_means(rule, value):
    """At a, b, c, d = 2, 3, 3, 5; powers from the right."""
    assert rule_at(parse_rule(rule), {"a": 2, "b": 3, "c": 3, "d": 5}) == pytest.approx(value)


@cases
def test_rules_are_arithmetic_and_nothing_else(rule):
    with pytest.raises(ValueError, match=r"rule|expression"):
        parse_rule(rule)


# ---- what is wrong


@cases
def test_what_is_wrong_with_a_record_is_named_with_its_place(tmp_path, gym, changes, message):
    (tmp_path / f"{gym}.json").write_text(
        json.dumps(changed(json.loads((FOLDER / f"{gym}.json").read_text()), changes))
    )
    with pytest.raises(ConfigError, match=message) as error:
        read_records(gym, tmp_path / f"{gym}.json")
    assert f"{gym}.json" in str(error.value)


def test_two_records_with_one_id_are_refused(tmp_path):
    records = json.loads((FOLDER / "persuade.json").read_text())
    (tmp_path / "persuade.json").write_text(json.dumps([*records, records[0]]))
    with pytest.raises(ConfigError, match=r"persuade\.json.*record 1: another record has the id '3' too"):
        read_records("persuade", tmp_path / "persuade.json")


def rows(tmp_path: Path, change: Callable[[Any], object]) -> Path:
    row = json.loads((FOLDER / "train.jsonl").read_text().splitlines()[0])
    change(row)
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(row))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row.pop("extra_info"), "row 0: 'extra_info' must be an object"),
        (lambda row: row["extra_info"].pop("tools_kwargs"), r"create_kwargs\.env_name' must be one of FunctionGym, "),
        (lambda row: row["extra_info"].update(index=None), "row 0: index: "),
        (lambda row: row["prompt"].pop(), "'prompt' must be a list of messages with one of the role user"),
        (
            lambda row: row["extra_info"]["tools_kwargs"]["interact_with_env"]["create_kwargs"].pop("id"),
            "row 0: name: ",
        ),
    ],
)
def test_what_is_wrong_with_a_row_is_named(tmp_path, change, message):
    refused(message, read_rows, rows(tmp_path, change))


def test_a_row_whose_record_is_not_there_is_refused(tmp_path):
    found = read_rows(FOLDER / "train.jsonl")
    with pytest.raises(ConfigError, match="train, row 0: no record has the name 'func-1' in the gym 'function'"):
        list(of_rows(found, {**small(), "function": ()}, "train"))
    bells = small()["turtle"]
    twice = (*bells, bells[0].model_copy(update={"id": "6"}))
    with pytest.raises(ConfigError, match="row 2: 2 records have the name 'The Quiet Bell'"):
        list(of_rows(found, {**small(), "turtle": twice}, "train"))


def test_parquet_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    def lacking(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(reading.importlib, "import_module", lacking)
    with pytest.raises(
        ConfigError, match=r"parquet is read by the package pyarrow; install it \(pip install 'mua\[parquet\]'\), or "
    ):
        read_rows(tmp_path / "train.parquet")


# ---- UserRL's own
