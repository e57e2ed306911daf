"""The report of a run: how good the first policy was and how good the one is that the run hands over.

Its tasks (``evaluation.report_split``) are played twice, before the first step and after the last. Nothing of the run
is decided by them: which policy is handed over (``trainer.export``) only ``evaluation.split`` says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from megatron_bridge.atomic import replace_text
from mua.config.schema import ExperimentConfig
from mua.errors import MuaError
from mua.types import Json
from mua.untrusted import JsonError, read_file, read_json

REPORT_FILE = "report.json"


class Report:
    """``<output>/report.json``: ``split``, and ``first`` and ``final``, each with its ``step`` and metrics."""

    def __init__(self, config: ExperimentConfig) -> None:
        """Raises :class:`MuaError` where the file of an earlier part of the run cannot be read."""
        self._path = config.output / REPORT_FILE
        self._split = config.evaluation.report_split
        self._export = config.trainer.export
        self._parts = {name: part for name, part in _read(self._path).items() if name in ("first", "final")}

    def first(self, metrics: Mapping[str, float]) -> None:
        """What the policy of step 0 reached; a report that was there is of an earlier run."""
        self._parts = {"first": {"step": 0, **metrics}}
        self._write()

    def final(self, step: int, metrics: Mapping[str, float]) -> None:
        """What the policy after ``step`` steps reached, which the run hands over. Prints both."""
        self._parts["final"] = {"step": step, "export": self._export, **metrics}
        self._write()
        for name, part in self._parts.items():
            print(f"report on {self._split}, {name} policy (step {part['step']}): success {self._success(part)}")

    def _success(self, part: Json) -> str:
        mean, low, high = (part.get(f"evaluation/{self._split}_success{end}") for end in ("", "_low", "_high"))
        return "unknown" if mean is None or low is None or high is None else f"{mean:.3f} ({low:.3f} to {high:.3f})"

    def _write(self) -> None:
        replace_text(self._path, json.dumps({"split": self._split, **self._parts}, indent=2) + "\n")


def _read(path: Path) -> Json:
    if not path.exists():
        return {}
    try:
        found = read_json(read_file(path))
    except (JsonError, OSError) as error:
        raise MuaError(f"{path}: cannot be read ({error}); remove it, and the report lacks the first policy") from None
    if not isinstance(found, dict) or not all(isinstance(found.get(name, {}), dict) for name in ("first", "final")):
        raise MuaError(f"{path}: not a report of a run; remove it, and the report lacks the first policy")
    return found
