"""Every command of docs/first-gpu-day.md exists as it stands there; those that take seconds without a GPU are run.

Plans of the other recipes: tests/unit/test_plan_recipes.py. The longer ones are run on the CPU at toy size by
tests/e2e/test_gpu_check_on_cpu.py (gpu_check, doctor sync, training), tests/e2e/test_shrunk_recipe.py and
tests/unit/test_wheelhouse.py. What a GPU prints is not covered.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import page_commands
import pytest

from tools.gpu_checks import CHECKS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/first-gpu-day.md").read_text(encoding="utf-8")
COMMANDS = [line[2:] for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
OURS = [line for line in COMMANDS if re.match(r"(mua|torchrun .*-m mua\.cli) ", line)]
TOOLS = [line for line in COMMANDS if line.startswith("python ")]
SYSTEM = ("nvidia-smi", "df", "python3.12 -m pip ")


def test_every_command_is_known() -> None:
    assert len(OURS) > 10
    assert [line for line in COMMANDS if line not in OURS + TOOLS and not line.startswith(SYSTEM)] == []


@pytest.mark.parametrize("line", OURS)
def test_a_command_of_mua_takes_its_options_and_its_configuration_loads(line: str, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    page_commands.check(line)


@pytest.mark.parametrize("line", TOOLS)
def test_a_tool_takes_its_options(line: str) -> None:
    """``--list`` runs; of the others the parser is asked."""
    words = shlex.split(line)[1:]
    run = words if "--list" in words else [*words[: 2 if words[0] == "-m" else 1], "--help"]
    done = subprocess.run([sys.executable, *run], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    options = [word for word in words if word.startswith("--")]
    assert [option for option in options if option not in done.stdout and option != "--list"] == []


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in OURS if "--dry-run" in line])
def test_a_dry_run_starts_nothing(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUA_USER_BASE_URL", "http://user.example:30000/v1")
    command = [sys.executable, "-m", "mua.cli", *shlex.split(line)[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    # A dry run tells what would be wrong here: the model is not downloaded, and the disk may be too small.
    told = [line for line in done.stderr.splitlines() if line.startswith("mua: ")]
    missing = [line for line in told if ": model.path: " in line or ": output: " in line]
    assert told == missing, done.stderr
    assert done.returncode == (2 if missing else 0)
    assert "# submit with: sbatch" in done.stdout


def test_every_check_is_explained() -> None:
    names = set(re.findall(r"`([a-z0-9-]+)`", PAGE.split("## 5 Plan")[0].split("## 4 gpu_check")[1]))
    assert {check.name for check in CHECKS} - names <= {"experts", "attention-speed"}
