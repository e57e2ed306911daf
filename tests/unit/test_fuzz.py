"""The fuzzers in small, each in a process of its own as `make fuzz` runs them in full, and their frame.

Not covered: what only many thousand cases find; the frame's memory bound.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools import fuzz

ROOT = Path(__file__).parents[2]
CASES = 60
"""Of each subject. `make fuzz` takes the thousands; these are the first of them."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a small run of all subjects found; one interpreter imports everything once and forks for each."""
    path = tmp_path_factory.mktemp("fuzz") / "report.json"
    command = [sys.executable, "-m", "tools.fuzz", "--cases", str(CASES), "--report", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert path.exists(), done.stderr
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", fuzz.names())
def test_no_damaged_input_gives_anything_but_a_clear_line(report: dict[str, Any], name: str) -> None:
    assert report[name]["cases"] == CASES
    assert report[name]["faults"] == []


def test_every_promised_subject_is_there() -> None:
    assert {"configuration", "conversations", "replies", "tool_calls", "traces"} <= set(fuzz.names())


def subject(run: Any, **more: Any) -> Any:
    return SimpleNamespace(__name__="tests.fuzz.made_up", run=run, **more)


def test_the_frame_tells_what_hangs_and_what_dies_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "CPU_SECONDS", 0.5)
    monkeypatch.setattr(fuzz, "WAIT_SECONDS", 1.0)

    def run(cases: int, seed: int) -> list[str]:
        if seed == 11:
            while True:
                pass
        if seed == 12:
            time.sleep(3600)
        if seed == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        if seed == 14:
            raise KeyError("the fuzzer's own")
        return [f"seed {seed}: wrong"] if seed == 15 else []

    found = fuzz.fuzz(subject(run), 7, seed=10)
    assert found.cases == 7
    told = [
        "hang: more than 0.5 s",
        "hang: asleep for 1 s",
        "died, exit code -9",
        "the fuzzer's own",
        "seed 15: wrong",
    ]
    assert len(found.faults) == len(told)
    assert all(words in fault for words, fault in zip(told, found.faults, strict=True))


def test_chunks_cover_every_case_once_and_a_full_run_is_the_subjects_own(tmp_path: Path) -> None:
    seen = tmp_path / "seen"

    def run(cases: int, seed: int) -> list[str]:
        with seen.open("a") as file:
            file.writelines(f"{seed + number}\n" for number in range(cases))
        return []

    assert fuzz.fuzz(subject(run, CASES=10, CHUNK=4), None, seed=3).cases == 10
    assert seen.read_text().split() == [str(number) for number in range(3, 13)]
