"""The runner of ``tools/gpu_check.py``: what goes wrong in a check stays there, budget, resumption, the table.

The checks themselves run on the CPU in tests/e2e/test_gpu_check_on_cpu.py. Nothing here has seen a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tools import gpu_check
from tools.gpu_check import Session, Usage
from tools.gpu_checks import CHECKS, Check

ROOT = Path(__file__).parents[2]


def check(function: str, *, estimate: float = 1.0, deadline: float = 60.0, cuda_only: str = "") -> Check:
    return Check(function, "proof", "tests.gpu_check_faults", function, estimate, deadline, cuda_only)


def run(
    out: Path, *functions: str | Check, budget: float | None = None, memory: float | None = None, **how: Any
) -> int:
    checks = [f if isinstance(f, Check) else check(f) for f in ("machine", *functions)]
    return Session(out, "cpu", budget, memory).run(checks, **how)


def results(out: Path) -> dict[str, dict[str, Any]]:
    return {r["name"]: r for r in map(json.loads, (out / gpu_check.RESULTS).read_text().splitlines())}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_check, "PRELOADED", ())
    monkeypatch.setattr(gpu_check, "END_SECONDS", 0.2)
    monkeypatch.setenv("FAULTS", str(tmp_path))


def test_every_fault_is_its_own_and_the_next_check_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    faults = [
        check("hang", deadline=1.0),
        *["crash", "killed", "leaves", "garbage", "other_form", "no_memory", "missing", "missing_part"],
    ]
    assert run(out, *faults, "wrong", "fine") == 1
    found = results(out)
    said = {name: (record["state"], record.get("message", "")) for name, record in found.items()}
    assert said["hang"] == ("failed", "did not end within 1 s")
    assert said["crash"] == ("failed", "its process was killed by SIGSEGV")
    assert said["killed"] == ("failed", "its process was killed by SIGKILL (memory of the host?)")
    assert said["leaves"] == ("failed", "its process ended with status 7")
    assert said["no_memory"] == ("failed", "MemoryError: tried to allocate 80 GiB")
    assert said["missing"] == ("skipped", "a_package_that_nobody_has is not installed")
    assert said["missing_part"] == ("failed", "ModuleNotFoundError: No module named 'json.no_such_part'")
    for name in ("garbage", "other_form"):
        assert said[name][0] == "failed"
        assert "without a result that can be read" in said[name][1]
    assert said["wrong"] == ("failed", "gradients differ by 0.3; a | b")
    assert said["fine"] == ("ok", "a | b")
    assert found["fine"]["figures"][0] == {"name": "speed", "value": 612.25, "unit": "TFLOP/s"}
    for pid in map(int, (tmp_path / "helpers").read_text().split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert "in hang" in (out / gpu_check.LOG).read_text(errors="replace"), "a check that hangs shows where"
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [json.loads(line)["name"] for line in lines] == list(found)


def test_a_check_that_takes_the_hosts_memory_is_stopped(tmp_path: Path) -> None:
    allowed = psutil.Process().memory_info().rss / 1e9 + 0.3  # a check begins with what this process holds
    assert run(tmp_path / "out", "eats", "fine", memory=allowed) == 1
    found = results(tmp_path / "out")
    assert f"GB of the host's memory, {allowed:.1f} are allowed" in found["eats"]["message"]
    assert found["fine"]["state"] == "ok"


def test_what_the_budget_leaves_out_is_named_and_run_next_time(tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = [check("fine", estimate=0.0), check("counts", estimate=500.0), check("hang", estimate=0.0)]
    assert run(out, *plan[:2], budget=100.0) == 3
    left = results(out)["counts"]
    assert left["state"] == "skipped"
    assert left["message"].startswith("not run: ")
    assert left["message"].endswith("of the budget, it takes about 500 s")
    assert run(out, *plan[:2]) == 0
    assert results(out)["counts"]["message"] == "run 1"
    assert run(out, plan[2], budget=2.0) == 3, "the budget ended it, not its own deadline"
    assert results(out)["hang"]["message"] == "not run: stopped where the budget ended"


def test_what_is_done_is_not_run_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(out, "counts", "wrong") == 1
    with (out / gpu_check.RESULTS).open("a") as file:
        file.write('{"name": "counts", "sta')  # killed while it wrote
    assert run(out, "counts", "wrong") == 1
    assert (tmp_path / "count").read_text() == "1"
    assert run(out, "counts", "wrong", only=["counts"]) == 1
    assert (tmp_path / "count").read_text() == "2"
    assert run(out, "counts", "wrong", retry=True) == 1
    assert (tmp_path / "count").read_text() == "2", "only what failed is run again"


def test_results_of_another_machine_are_not_mixed(tmp_path: Path) -> None:
    assert run(tmp_path, "fine") == 0
    other = Check("machine", "", "tests.gpu_check_faults", "other_machine", 1, 60)
    with pytest.raises(Usage, match=r"results\.jsonl holds results of cpu, this is NVIDIA H100; give another --out"):
        Session(tmp_path, "cpu", None).run([other, check("fine")])


def test_without_a_device_nothing_else_runs_and_on_a_cpu_what_needs_one_says_why(tmp_path: Path) -> None:
    broken = Check("machine", "", "tests.gpu_check_faults", "broken_machine", 1, 60)
    assert Session(tmp_path / "a", "cpu", None).run([broken, check("fine")]) == 1
    found = results(tmp_path / "a")
    assert found["machine"]["message"] == "RuntimeError: the driver is too old"
    assert found["fine"]["message"] == "not run: machine did not end well"
    assert run(tmp_path / "b", check("fine", cuda_only="nothing to compare")) == 0
    assert results(tmp_path / "b")["fine"]["message"] == "no CUDA device: nothing to compare"


def test_the_table_is_a_page_of_markdown(tmp_path: Path) -> None:
    run(tmp_path, "fine", "wrong")
    text = (tmp_path / gpu_check.PAGE).read_text()
    assert "cpu, by `python tools/gpu_check.py`: 2 ok, 1 failed, 0 skipped." in text
    assert "This proves the script and nothing of a GPU." in text
    (row,) = (line for line in text.splitlines() if line.startswith("| fine "))
    assert row.endswith(r"| speed 612.2 TFLOP/s; tokens 32,768; a \| b | proof |")


@pytest.mark.parametrize("command", [["tools/gpu_check.py"], ["-m", "tools.gpu_check"]], ids=["file", "module"])
def test_the_command_needs_the_standard_library_alone(command: list[str], tmp_path: Path) -> None:
    """``-S`` hides what is installed, torch too."""
    start = [sys.executable, "-I", "-S"] if command[0] != "-m" else [sys.executable, "-S"]
    done = subprocess.run([*start, *command, "--list"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [check.name for check in CHECKS]


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    assert gpu_check.main(["--out", str(tmp_path), "--only", "speed"]) == 2
    (tmp_path / "file").write_text("")
    assert gpu_check.main(["--out", str(tmp_path / "file")]) == 2
    err = capsys.readouterr().err.splitlines()
    assert [word in line for word, line in zip(("--out", "speed", "File exists"), err, strict=True)] == [True] * 3
