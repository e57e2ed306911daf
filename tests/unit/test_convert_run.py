"""``mua convert run``: what it converts, what it leaves, and that nothing half-written passes in silence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from mua.cli import app
from mua.megatron.checkpoint import checkpoint_folder
from tests.megatron_support import backend, write_model
from tests.torch_dist import save_torch_dist

STEPS = (1, 2, 3)


def convert(run: Path, *flags: str) -> Result:
    return CliRunner().invoke(app, ["convert", "run", str(run), *flags])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three checkpoints, ours and Megatron-LM's; step n has every weight n larger."""
    root = tmp_path_factory.mktemp("run")
    write_model(root / "model")
    with backend(root / "model") as built:
        for step in STEPS:
            for parameter in built.policy.parameters():
                parameter.data.add_(1)
            built.save(checkpoint_folder(root / "run" / "checkpoints", step), {})
            save_torch_dist(built, root / "upstreams" / f"iter_{step:07d}")
            actor = root / "verl" / f"global_step_{step}" / "actor"
            shutil.copytree(root / "upstreams" / f"iter_{step:07d}", actor / "dist_ckpt")
            shutil.copytree(root / "model", actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    return root


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "run", tmp_path / "run")
    return tmp_path / "run"


def first_value(folder: Path) -> float:
    return float(load_file(folder / "model.safetensors")["model.norm.weight"][0])


@pytest.mark.parametrize("form", ["step_{:08d}", "iter_{:07d}", "global_step_{}"])
def test_every_step_is_converted_and_a_second_call_does_nothing(
    made: Path, run: Path, tmp_path: Path, form: str
) -> None:
    """Ours, Megatron-LM's, and those of MUA-RL and verl, which have configuration and tokenizer beside them."""
    flags, out = list[str](), run / "hf-steps"
    if not form.startswith("step"):
        run, out = made / ("verl" if form.startswith("global") else "upstreams"), tmp_path / "out"
        flags = ["--out", str(out), *(["--source", str(made / "model")] if form.startswith("iter") else [])]
    done = convert(run, *flags, "--json")
    assert json.loads(done.stdout) == {"written": str(out), "converted": 3, "already": 0, "faults": []}
    folders = [out / form.format(step) for step in STEPS]
    values = [first_value(folder) for folder in folders]
    assert [value - values[0] for value in values] == pytest.approx([0.0, 1.0, 2.0], abs=1e-4)
    times = [(folder / "model.safetensors").stat().st_ctime_ns for folder in folders]
    again = convert(run, *flags, "--json")
    assert json.loads(again.stdout) == {"written": str(out), "converted": 0, "already": 3, "faults": []}
    assert [(folder / "model.safetensors").stat().st_ctime_ns for folder in folders] == times


def test_a_half_written_step_is_named_and_the_others_are_converted(run: Path) -> None:
    checkpoints = run / "checkpoints"
    (checkpoints / "step_00000002" / "manifest.json").unlink()
    (checkpoints / ".step_00000004.partial").mkdir()
    done = convert(run)
    assert done.exit_code == 1
    told = [line for line in done.stderr.splitlines() if "manifest.json" in line]
    assert [name in line for name, line in zip(("step_00000002", ".step_00000004.partial"), told, strict=True)]
    assert sorted(path.name for path in (run / "hf-steps").iterdir()) == ["step_00000001", "step_00000003"]


def test_a_damaged_step_is_named_and_leaves_nothing(run: Path) -> None:
    path = run / "checkpoints" / "step_00000001" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    done = convert(run)
    assert done.exit_code == 1
    assert str(path) in done.stderr
    assert sorted(path.name for path in (run / "hf-steps").iterdir()) == ["step_00000002", "step_00000003"]


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
    content = path.read_bytes()
    path.unlink()  # it is a link
    path.write_bytes(content[:-10])
    done = convert(run)
    assert done.exit_code == 1
    assert str(path) in done.stderr


def test_a_folder_that_is_no_run_is_an_error(tmp_path: Path) -> None:
    done = convert(tmp_path)
    assert done.exit_code == 2
    assert "step_*" in done.stderr
