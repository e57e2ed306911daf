"""The fuzzers in small, each in a process of its own as `make fuzz` runs them in full, and their frame.

Not covered: what only many thousand cases find; the frame's memory bound.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import fuzz

ROOT = Path(__file__).parents[2]
CASES = 25
"""Of each subject. `make fuzz` takes the thousands; these are the first of them."""

MADE_UP = """
import json, os, signal, sys, time
from types import SimpleNamespace
from tools import fuzz

fuzz.CPU_SECONDS, fuzz.WAIT_SECONDS = 0.5, 1.0

def faulty(cases, seed):
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

def counted(cases, seed):
    return [str(seed + number) for number in range(cases)]

found = fuzz.fuzz(SimpleNamespace(__name__="tests.fuzz.faulty", run=faulty), 7, seed=10)
chunks = fuzz.fuzz(SimpleNamespace(__name__="tests.fuzz.counted", run=counted, CASES=10, CHUNK=4), None, seed=3)
print(json.dumps([found.cases, found.faults, chunks.cases, chunks.faults]))
"""
"""In an interpreter of its own, because the frame forks, and pytest may have threads."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a small run of all subjects found; one interpreter imports everything once and forks for each."""
    path = tmp_path_factory.mktemp("fuzz") / "report.json"
    done = run("-m", "tools.fuzz", "--cases", str(CASES), "--report", str(path))
    assert path.exists(), done.stderr
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzz.names())
def test_no_damaged_input_gives_anything_but_a_clear_line(report: dict[str, Any], name: str) -> None:
    assert report[name]["cases"] == CASES
    assert report[name]["faults"] == []


def test_every_promised_subject_is_there() -> None:
    promised = {
        "configuration", "conversations", "manifests", "model_folders", "replies", "stores", "tool_calls", "traces",
    }  # fmt: skip
    assert promised <= set(fuzz.names())


def test_the_frame_tells_what_hangs_and_what_dies_and_goes_on_and_runs_every_case_once() -> None:
    done = run("-c", MADE_UP)
    cases, faults, counted, seeds = json.loads(done.stdout)
    assert (cases, counted) == (7, 10)
    told = [
        "seed 11, 1 cases: hang: more than 0.5 s",
        "seed 12, 1 cases: hang: asleep for 1 s",
        "seed 13, 1 cases: the process died, exit code -9",
        "seed 14: the subject itself failed",
        "seed 15: wrong",
    ]
    assert len(faults) == len(told)
    assert all(fault.startswith(words) for words, fault in zip(told, faults, strict=True))
    assert seeds == [str(number) for number in range(3, 13)]
