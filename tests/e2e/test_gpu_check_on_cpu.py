"""All of ``tools/gpu_check.py`` at toy size on the CPU, and without the packages that a bare machine lacks.

Processes are forked from one that has imported torch and Megatron-Core, engines from one that has imported SGLang. What
this cannot show is a GPU: its kernels, its memory, CUDA IPC. The runner: tests/unit/test_gpu_check.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e_support import ROOT, assert_nothing_left
from tests.forked_engines import ADDRESS, EngineForker
from tools import gpu_check
from tools.gpu_checks import CHECKS

BLOCKER = """\
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


CUDA_ONLY = {"attention-speed", "learns", "rl-large"}

FORKING = "import sys; from tools import gpu_check; gpu_check.PRELOADED += ('tests.gpu_check_engines',); "


def checked(out: Path, *arguments: str, **variables: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Exit status, results and standard error of the command, which must leave no process behind."""
    out.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    command = [str(ROOT / "tools/gpu_check.py")]
    if ADDRESS in variables:
        command = ["-c", f"{FORKING} sys.exit(gpu_check.main())"]
    done = subprocess.run(
        [sys.executable, *command, "--out", str(out), *arguments],
        cwd=out, env=environment, capture_output=True, text=True, timeout=840,
    )  # fmt: skip
    assert_nothing_left(out)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, {record["name"]: record for record in map(json.loads, lines)}, done.stderr


def figures(record: dict[str, Any]) -> dict[str, Any]:
    return {figure["name"]: figure["value"] for figure in record.get("figures", [])}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_check_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What SGLang imports when it starts: its memory saver, too, which other tests' engines do not have.
    variables = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tools/gpu_checks/no_gpu")])}
    forker = EngineForker()
    try:
        status, found, err = checked(tmp_path / "out", **variables, **{ADDRESS: forker.address(os.environ | variables)})
    finally:
        forker.stop()
    states = {name: (record["state"], record.get("message")) for name, record in found.items()}
    assert status == 0, (states, err, (tmp_path / "out" / gpu_check.LOG).read_text(errors="replace")[-4000:])
    assert list(found) == [check.name for check in CHECKS]
    assert {name for name, (state, _) in states.items() if state == "skipped"} == CUDA_ONLY
    assert all(states[name][1].startswith("no CUDA device: ") for name in CUDA_ONLY)
    assert figures(found["checkpoint"])["the resumed run went on bit for bit"] is True
    assert figures(found["parity-dense"])["float32: log-probabilities off by"] < 1e-5
    assert figures(found["ipc"])["tensors"] > 20
    assert "every tensor in every engine equals the trainer's" in states["doctor-sync"][1]
    assert figures(found["rl"])["train/train_rollout_logprob_abs_diff"] < 1e-4
    page = (tmp_path / "out" / gpu_check.PAGE).read_text()
    assert f"{len(CHECKS) - len(CUDA_ONLY)} ok, 0 failed, {len(CUDA_ONLY)} skipped" in page
    assert all(f"| {check.name} | " in page for check in CHECKS)


@pytest.mark.slow
def test_a_bare_machine_skips_by_name(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        BLOCKER.format(absent={"sglang", "megatron", "transformers", "pydantic"})
    )
    only = ["machine", "attention", "parity-dense", "engine", "rl"]
    status, found, err = checked(tmp_path / "out", "--only", *only, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert status == 0, (found, err)
    assert found["machine"]["state"] == "ok"
    said = {name: record["message"] for name, record in found.items() if record["state"] == "skipped"}
    assert said.keys() == set(only) - {"machine"}
    for message in said.values():
        assert message.endswith(" is not installed")
        assert message.split()[0] in ("sglang", "megatron", "transformers", "pydantic")
