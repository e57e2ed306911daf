"""Loading a configuration that is right: extends, environment, overrides, types, dumping.

Not covered: what is wrong with a configuration (test_config_errors.py) and what the trainer makes of the values.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mua.config import dump_config, load_config

BASE = """\
name: base
output: runs/base
model: {path: models/tiny, max_length: 1024}
environment: {name: help_desk}
rollout: {max_tokens: 1000}
trainer: {steps: 3}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE, encoding="utf-8")
    return path


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_fill_what_the_file_leaves_out(base: Path) -> None:
    config = load_config(base)
    assert config.trainer.steps == 3
    assert config.algorithm.group_size == 8
    assert config.output == Path("runs/base")  # relative to the working directory, not to the file


@pytest.mark.parametrize(("text", "value"), [("1e-6", 1e-6), ("2", 2.0), (".5", 0.5), ("1.", 1.0), ("+0.25", 0.25)])
def test_numbers_are_read_as_people_write_them(base: Path, text: str, value: float) -> None:
    config = load_config(base, [f"optimizer.learning_rate={text}"])
    assert config.optimizer.learning_rate == value
    assert isinstance(config.optimizer.learning_rate, float)


@pytest.mark.parametrize(("text", "value"), [("010", 10), ("0x10", 16)])
def test_integers_have_no_hidden_octal(base: Path, text: str, value: int) -> None:
    assert load_config(base, [f"trainer.steps={text}"]).trainer.steps == value


@pytest.mark.parametrize("name", ["no", "1:30", "2024-01-01", "1_000"])
def test_words_that_yaml_1_1_would_convert_stay_strings(base: Path, name: str) -> None:
    assert load_config(base, [f"name={name}"]).name == name


def test_extends_takes_a_list_later_wins_and_names_are_relative_to_the_file(tmp_path: Path, base: Path) -> None:
    write(tmp_path, "parts/a.yaml", "extends: ../base.yaml\ntrainer: {steps: 5, keep: 7}\n")
    write(tmp_path, "parts/b.yaml", "trainer: {steps: 6}\n")
    config = load_config(write(tmp_path, "child.yaml", "extends: [parts/a.yaml, parts/b.yaml]\n"))
    assert (config.trainer.steps, config.trainer.keep) == (6, 7)


def test_overrides_win_over_files_and_reach_sections_not_written(base: Path) -> None:
    config = load_config(
        base, ["trainer.steps=9", "engine.extra.schedule_policy=lpm", "user={kind: replay, replay: traces}"]
    )
    assert config.trainer.steps == 9
    assert config.engine.extra == {"schedule_policy": "lpm"}
    assert config.user.replay == Path("traces")


def test_variables_are_filled_from_the_environment(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUA_TEST_ROOT", "/data")
    config = load_config(base, ["output=${MUA_TEST_ROOT}/runs/${MUA_TEST_NAME:-first}", "name=${MUA_TEST_NAME:-}x"])
    assert (config.output, config.name) == (Path("/data/runs/first"), "x")


def test_dump_reads_back_equal(base: Path, tmp_path: Path) -> None:
    config = load_config(base, ["optimizer.learning_rate=3e-7", "name='yes: no'", "engine.extra={a: 1, b: 0.5}"])
    assert load_config(write(tmp_path, "dumped.yaml", dump_config(config))) == config


def test_dump_masks_secrets(base: Path) -> None:
    config = load_config(base, ["user={kind: llm, llm: {base_url: u, model: m, api_key: sk-first}}"])
    assert "sk-first" not in repr(config) + dump_config(config)
    assert yaml.safe_load(dump_config(config))["user"]["llm"]["api_key"] == "**********"


def test_import_loads_neither_torch_nor_sglang() -> None:
    code = (
        "import sys, mua, mua.config, mua.cli, mua.config.docs\n"
        "print(sorted({'torch', 'sglang', 'transformers', 'megatron', 'tensorboard', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
