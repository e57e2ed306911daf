"""The command line as a whole: JSON where results are printed, completion, the schema for editors.

What each command does is tested where its part is. Not covered: the shells themselves, and editors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import typer
from typer.testing import CliRunner, Result

import mua.cli
from mua.config.docs import editor_schema
from mua.config.tree import parse

ROOT = Path(__file__).parents[2]
WITHOUT_RESULTS = {
    "sample": "rolls out until it is asked to leave",
    "demo": "trains and shows its page",
    "view": "serves a page, or writes one",
    "serve": "serves a model",
    "env play": "is a conversation",
    "config docs": "prints Markdown",
    "config schema": "prints JSON in any case",
}


def mua_(*words: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(mua.cli.app, words, prog_name="mua", env=env)


def commands(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{above}{name} ")
        else:
            yield above + name, command


def test_every_command_that_prints_a_result_prints_json_too() -> None:
    found = dict(commands(typer.main.get_command(mua.cli.app)))
    without = {name for name, command in found.items() if not any("--json" in p.opts for p in command.params)}
    assert without == set(WITHOUT_RESULTS), "give the command --json, or say here why it has no result"


@pytest.mark.parametrize(
    "words",
    [("recipes",), ("files",), ("algorithms",), ("config", "show", "demo"), ("env", "list"), ("metrics",)],
    ids=" ".join,
)
def test_json_is_all_that_stands_on_standard_output(words: tuple[str, ...]) -> None:
    result = mua_(*words, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("mua tra", {"train"}),
        ("mua train qwen3-8", {"qwen3-8b-1x8"}),
        ("mua train demo optimizer.learn", {"optimizer.learning_rate="}),
        ("mua env play reta", {"retail"}),
    ],
)
def test_completion_offers_what_there_is(typed: str, offered: set[str]) -> None:
    words = typed.split()
    env = {"_MUA_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    assert set(mua_(env=env).stdout.split()) == offered


@pytest.fixture(scope="module")
def schema() -> jsonschema_rs.Draft202012Validator:
    made = json.loads(mua_("config", "schema").stdout)
    assert made == json.loads(json.dumps(editor_schema()))
    jsonschema_rs.meta.validate(made)
    return jsonschema_rs.Draft202012Validator(made)


def faults(schema: jsonschema_rs.Draft202012Validator, text: str) -> list[str]:
    data = parse(text, "x.yaml").data
    return [".".join(map(str, error.instance_path)) for error in schema.iter_errors(data)]


@pytest.mark.parametrize("recipe", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_editors_accept_every_recipe(schema: jsonschema_rs.Draft202012Validator, recipe: Path) -> None:
    assert faults(schema, recipe.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("optimizer: {lr: 1}", "optimizer"),
        ("trainer: {steps: '5'}", "trainer.steps"),
        ("algorithm: {loss: ppo}", "algorithm.loss"),
        ("algorithm: {filters: [{kind: balance, extra: 2}]}", "algorithm.filters.0"),
        ("algorithm: {filters: [{minimum: 2}]}", "algorithm.filters.0"),
        ("extends: 3", "extends"),
    ],
)
def test_editors_mark_what_is_wrong(schema: jsonschema_rs.Draft202012Validator, text: str, at: str) -> None:
    assert faults(schema, text) == [at]


def test_variables_and_files_that_only_differ_are_right(schema: jsonschema_rs.Draft202012Validator) -> None:
    text = "extends: [a.yaml, demo]\nmodel: {dtype: '${DTYPE:-float32}'}\nsft: {data: x}\nenvironment: {mix: {a: 1}}"
    assert faults(schema, text) == []
