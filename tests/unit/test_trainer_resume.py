"""What a run says that continues under another configuration, and what it refuses: another model, another tokenizer.

Loop and output folder are real, policy and engines are stand-ins; that a run goes on bit for bit is in tests/e2e.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mua.config.schema import ExperimentConfig
from mua.observe.provenance import changed_keys
from mua.store.database import Store, store_url
from mua.store.starts import begin_part
from mua.trainer.run_folder import Run
from mua.utils.errors import ModelError
from mua.view.run_overview import _starts
from tests.unit.test_trainer_bounds import ALL, StandIn, experiment, rollouts, train


class Policy(StandIn):
    """Its checkpoints say what they were made with."""

    def save(self, folder: Path, extra_state: dict[str, Any], made: dict[str, Any], **_: Any) -> None:  # type: ignore[override]
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps(made | extra_state | {"weights": self.updates}))


FILES = {"config.json": "{}", "model.safetensors": "weights", "tokenizer.json": "{}", "merges.txt": "a b"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def chosen(output: Path, model: Path, **changes: object) -> ExperimentConfig:
    config = experiment(output, steps=3)
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": model})})
    return config.model_copy(update=changes)


def continued(output: Path, config: ExperimentConfig, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says first of the configuration of a run of three steps, which goes on under ``config``."""
    caplog.clear()
    with caplog.at_level(logging.INFO), Run(config, Policy()) as run:  # type: ignore[arg-type]
        lines = [record.message for record in caplog.records if record.message.startswith("since step")]
        assert lines == [f"since step 3: {change}" for change in run.changes]
    return lines


def test_each_changed_key_is_a_line(tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = chosen(tmp_path, model)
    train(config, Policy(), rollouts(ALL))
    assert continued(tmp_path, config, caplog) == []
    optimizer = config.optimizer.model_copy(update={"learning_rate": 3e-5})
    environment = config.environment.model_copy(update={"name": "retail", "difficulties": ["easy"]})
    other = chosen(tmp_path, model, seed=7, optimizer=optimizer, environment=environment)
    assert continued(tmp_path, other, caplog) == [
        'since step 3: environment.difficulties [] → ["easy"]', 'since step 3: environment.name "help_desk" → "retail"',
        "since step 3: optimizer.learning_rate 1e-06 → 3e-05", "since step 3: seed 1 → 7",
    ]  # fmt: skip


def test_a_moved_model_is_the_same_one(tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(chosen(tmp_path, model), Policy(), rollouts(ALL))
    (model / "README.md").write_text("A card.")
    (model / "tokenizer.d").mkdir()
    (line,) = continued(tmp_path, chosen(tmp_path, model.rename(tmp_path / "moved")), caplog)
    assert line.startswith("since step 3: model.path ")


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("tokenizer", lambda folder: (folder / "tokenizer.json").write_text("[]")),
        ("tokenizer", lambda folder: (folder / "merges.txt").unlink()),
        ("tokenizer", lambda folder: (folder / "added_tokens.json").write_text("{}")),
        ("tokenizer", lambda folder: (folder / "chat_template.jinja").write_text("other")),
        ("model", lambda folder: (folder / "model.safetensors").write_text("WEIGHTS")),
        ("model", lambda folder: (folder / "config.json").write_text('{"rope_theta": 1}')),
    ],
)
def test_another_policy_is_refused_with_both(
    tmp_path: Path, model: Path, what: str, change: Callable[[Path], object]
) -> None:
    train(chosen(tmp_path, model), Policy(), rollouts(ALL))
    other = tmp_path / "other"
    other.mkdir()
    for name, text in FILES.items():
        (other / name).write_text(text)
    change(other)
    with pytest.raises(
        ModelError, match=rf"{re.escape(str(other))} has another {what} .* than {re.escape(str(model))} "
    ):
        Run(chosen(tmp_path, other), Policy())  # type: ignore[arg-type]


def test_sections_that_come_and_go_are_lines_of_their_keys() -> None:
    before, after = {"a": {"b": 1, "c": [1]}, "sft": None}, {"a": {"b": 1, "c": [2]}, "sft": {"data": "x"}}
    assert changed_keys(before, after) == ["a.c [1] → [2]", 'sft.data null → "x"']
    assert changed_keys(after, before) == ["a.c [2] → [1]", 'sft.data "x" → null']


def test_the_viewer_has_the_lines_of_every_start(tmp_path: Path) -> None:
    config = experiment(tmp_path)
    with Store.open(store_url(tmp_path, config.store)) as store:
        for seed, step in ((1, 0), (1, 2), (5, 4)):
            made = {"seed": seed, "name": "n"}
            run, _, _ = begin_part(store, tmp_path, "n", made, {}, from_step=step, seconds=1.0)
        with store.read() as connection:
            found = [event["text"] for event in _starts(connection, run) if event["kind"] == "setting"]
    assert found == ["since step 4: seed 1 → 5"]
