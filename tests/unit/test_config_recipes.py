"""Recipes by name, what the package brings beside code, and what is said where an extra is missing.

Not covered: the wheel itself, which ``tests/e2e/test_wheel.py`` builds and installs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mua.cli import app
from mua.config.load import config_file, load_config, recipes
from mua.utils.errors import ConfigError
from mua.utils.source_state import shipped, shipped_files


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_recipe_is_loaded_by_name_from_anywhere(elsewhere: Path) -> None:
    config = load_config(Path("qwen3-8b-1x8"), ["trainer.steps=3"])
    assert (config.name, config.trainer.steps) == ("qwen3-8b-1x8", 3)
    assert config.model.hf_config is not None
    assert config.model.hf_config.is_file()  # beside the recipe, wherever one is


def test_every_recipe_has_a_line_about_it(elsewhere: Path) -> None:
    found = recipes()
    assert {"demo", "qwen3-8b-1x8"} <= {recipe.name for recipe in found}
    assert "base" not in {recipe.name for recipe in found}
    assert all(len(recipe.about) > 20 and recipe.path.is_file() for recipe in found)
    listed = CliRunner().invoke(app, ["recipes", "--json"])
    assert [one["name"] for one in json.loads(listed.stdout)] == [recipe.name for recipe in found]
    assert CliRunner().invoke(app, ["recipes", "demo"]).stdout == shipped("configs/demo.yaml").read_text()


def test_a_file_here_comes_before_a_recipe_and_a_folder_does_not(elsewhere: Path) -> None:
    (elsewhere / "demo").mkdir()
    assert config_file(Path("demo")) == shipped("configs/demo.yaml")
    (elsewhere / "tiny-sft").write_text("")
    assert config_file(Path("tiny-sft")) == Path("tiny-sft")


def test_own_files_extend_recipes_by_name(elsewhere: Path) -> None:
    (elsewhere / "mine").mkdir()
    (elsewhere / "mine/config.yaml").write_text("extends: demo\nname: mine\nmodel: {path: '${MUA_HERE}/policy'}\n")
    config = load_config(Path("mine/config.yaml"))
    assert (config.name, config.environment.name) == ("mine", "help_desk")
    assert config.model.path == Path("mine/policy")


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("qwen3-8b", r"^qwen3-8b: neither a file nor a recipe; .*; did you mean qwen3-8b-1x8\?$"),
        ("x" * 300, "neither a file nor a recipe"),
        ("demo.yaml", r"^demo.yaml: cannot be read"),
    ],
)
def test_what_is_neither_is_named(elsewhere: Path, named: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(Path(named))


def test_the_package_says_where_its_files_lie(elsewhere: Path) -> None:
    names = shipped_files()
    assert {"slurm/train.sbatch", "constraints/cpu-py312.txt", "tools/base/config.json"} <= set(names)
    assert CliRunner().invoke(app, ["files"]).stdout.split() == names
    for name in ("slurm/eval.sbatch", "slurm", "."):
        assert Path(CliRunner().invoke(app, ["files", name]).stdout.strip()) == shipped() / name
    refused = CliRunner().invoke(app, ["files", "slurm/../setup.py"])
    assert (refused.exit_code, refused.stdout) == (2, "")
