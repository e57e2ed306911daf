"""Which of the demonstration's commands an override reaches.

The commands themselves are not run: ``make demo`` is, by hand, and its figures are in docs/benchmarks/demo.md.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workbench import demo

OVERRIDES = ["engine.extra.attention_backend=triton", "model.dtype=bfloat16", "trainer.steps=2", "evaluation.tasks=8"]


def test_what_the_machine_needs_reaches_every_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    typed: dict[str, list[str]] = {}

    def said(command: str, *arguments: str) -> None:
        typed[command] = list(arguments)
        folder = next(argument.partition("=")[2] for argument in arguments if argument.startswith("output="))
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "evaluation.json").write_text(json.dumps({"kinds": {}}))
        if command == "train":
            raise KeyboardInterrupt  # what comes after needs figures of a run

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "mua", said)
    with pytest.raises(KeyboardInterrupt):
        demo.run_seed(1, {}, OVERRIDES)
    assert [item for item in typed["sft"] if item in OVERRIDES] == ["model.dtype=bfloat16"]
    assert [item for item in typed["eval"] if item in OVERRIDES] == [OVERRIDES[i] for i in (0, 1, 3)]
    assert [item for item in typed["train"] if item in OVERRIDES] == OVERRIDES
