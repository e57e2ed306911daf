"""``mua convert run``: what it converts, what it leaves, and that nothing half-written passes in silence.

Checkpoints are made by conversion (weights alone), which to this command are checkpoints like those of training.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from mua.cli import app
from mua.megatron import offline
from tests.megatron_support import write_model

STEPS = (1, 2, 3)


def convert(run: Path, *flags: str) -> Result:
    return CliRunner().invoke(app, ["convert", "run", str(run), *flags])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three checkpoints; step n has every weight n larger."""
    root = tmp_path_factory.mktemp("run")
    write_model(root / "model")
    tensors = load_file(root / "model" / "model.safetensors")
    for step in STEPS:
        save_file({name: tensor + step for name, tensor in tensors.items()}, root / "model" / "model.safetensors")
        offline.hf_to_megatron(root / "model", root / "run" / "checkpoints" / f"step_{step:08d}")
    return root / "run"


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


def first_value(folder: Path) -> float:
    return float(load_file(folder / "model.safetensors")["model.norm.weight"][0])


def test_every_step_is_converted_and_a_second_call_does_nothing(run: Path) -> None:
    done = convert(run)
    assert done.exit_code == 0
    assert "3 converted, 0 were there already, 0 failed" in done.stdout
    folders = [run / "hf-steps" / f"step_{step:08d}" for step in STEPS]
    values = [first_value(folder) for folder in folders]
    assert torch.allclose(torch.tensor(values) - values[0], torch.tensor([0.0, 1.0, 2.0]))
    times = [(folder / "model.safetensors").stat().st_mtime_ns for folder in folders]
    again = convert(run, "--json")
    assert again.exit_code == 0
    assert [(folder / "model.safetensors").stat().st_mtime_ns for folder in folders] == times
    told = {"written": str(run / "hf-steps"), "converted": 0, "already": 3, "faults": []}
    assert json.loads(again.stdout) == told


def test_a_half_written_step_is_named_and_the_others_are_converted(run: Path) -> None:
    checkpoints = run / "checkpoints"
    (checkpoints / "step_00000002" / "manifest.json").unlink()
    (checkpoints / ".step_00000004.partial").mkdir()
    done = convert(run)
    assert done.exit_code == 1
    assert "2 converted, 0 were there already, 2 failed" in done.stdout
    lines = done.stderr.splitlines()
    assert any("step_00000002" in line and "not whole: it has no manifest.json" in line for line in lines)
    assert any(".step_00000004.partial" in line and "not whole" in line for line in lines)
    assert sorted(path.name for path in (run / "hf-steps").iterdir()) == ["step_00000001", "step_00000003"]


def test_a_damaged_step_is_named_and_leaves_nothing(run: Path) -> None:
    path = run / "checkpoints" / "step_00000001" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-10])
    done = convert(run)
    assert done.exit_code == 1
    assert "step_00000001 is damaged: __0_0.distcp has" in done.stderr
    assert not (run / "hf-steps" / "step_00000001").exists()
    assert (run / "hf-steps" / "step_00000003").exists()


def test_a_step_that_was_saved_again_is_converted_again(run: Path) -> None:
    assert convert(run).exit_code == 0
    before = first_value(run / "hf-steps" / "step_00000001")
    shutil.rmtree(run / "checkpoints" / "step_00000001")
    shutil.copytree(run / "checkpoints" / "step_00000003", run / "checkpoints" / "step_00000001")
    assert convert(run).exit_code == 0
    assert first_value(run / "hf-steps" / "step_00000001") == pytest.approx(before + 2, abs=1e-4)


def test_a_converted_folder_that_was_cut_short_is_named(run: Path) -> None:
    assert convert(run).exit_code == 0
    path = run / "hf-steps" / "step_00000002" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    done = convert(run)
    assert done.exit_code == 1
    assert "cut short" in done.stderr


def test_a_folder_that_is_no_run_is_an_error(tmp_path: Path) -> None:
    done = convert(tmp_path)
    assert done.exit_code == 2
    assert "no step_* folder" in done.stderr
