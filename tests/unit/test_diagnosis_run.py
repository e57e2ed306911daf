"""A run that the real trainer makes while its tools fail: the cause is named first, training said so when it happened,
and the trajectory that is named can be looked at.

One run of one cause; all others are made by ``python -m tools.bench.diagnose``, whose results are in
docs/benchmarks/diagnosis.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mua.cli import app
from tools.kit import ROOT

pytestmark = pytest.mark.slow


def test_tools_that_fail_are_named_by_the_command_and_by_training(tmp_path: Path) -> None:
    chosen = ["--only", "tool_errors", "--most", "1", "--keep", str(tmp_path)]
    command = [sys.executable, "-m", "tools.bench.diagnose", *chosen]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    (alarm,) = [line for line in done.stderr.splitlines() if "tool errors, from step 0" in line]
    assert "alarm after step 5" in alarm
    (folder,) = tmp_path.glob("tool_errors-*")
    told = CliRunner().invoke(app, ["diagnose", str(folder), "--json"])
    assert told.exit_code == 1
    first = json.loads(told.stdout)["findings"][0]
    assert (first["cause"], first["step"]) == ("tool_errors", 0)
    shown = CliRunner().invoke(app, ["show", str(folder), first["trajectory"]])
    assert shown.exit_code == 0
    assert "the service is not available" in shown.stdout
