"""The output folder when several ranks prepare it at once. Its other duties are tested with the commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from mua.config.load import load_config
from mua.observe.output import CONFIG_FILE, prepare_output

RECIPE = "name: n\noutput: {folder}/out\nmodel: {{path: m}}\nenvironment: {{name: help_desk}}\ntrainer: {{steps: 1}}\n"


def test_ranks_that_write_at_the_same_moment_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=tmp_path))
    config, replace = load_config(recipe), Path.replace

    def while_another_rank_does_the_same(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        monkeypatch.setenv("RANK", "1")
        prepare_output(config)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", while_another_rank_does_the_same)
    prepare_output(config)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [CONFIG_FILE]
