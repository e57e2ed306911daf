"""Checkpoints as model folders: ours linked, copied or cast, Megatron-LM's imported bit for bit, also after a kill.

One process; checkpoints are written by Megatron-Core's own ``dist_checkpointing``. Those of other layouts are imported
in ``tests/parity/test_checkpoint_layouts.py``. Memory is the resident set of a new process, so its bound counts
everything that process does beyond its imports.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from megatron_bridge.hf_folder import verify_hf_folder
from mua.algorithms.losses import CrossEntropyLoss
from mua.cli import app
from mua.megatron import checkpoint_manifest, offline
from mua.megatron.checkpoint import checkpoint_folder
from mua.utils.checksums import Sidecar
from mua.utils.errors import BridgeError, DamagedCheckpoint, ModelError
from tests.bridge_support import EXAMPLES, write_hf_model
from tests.megatron_support import backend, make_batch, write_model
from tests.torch_dist import save_torch_dist, write_torch_dist

ROOT = Path(__file__).parents[2]


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "hf"
    write_model(folder)
    (folder / "tokenizer.json").write_bytes(b"\xff\x00 bytes, not text")
    return folder


@pytest.fixture(scope="module")
def upstreams(model: Path) -> Path:
    """A checkpoint of Megatron-LM."""
    write_torch_dist(str(model), str(model.with_name("upstreams")), {})
    return model.with_name("upstreams")


@pytest.fixture(scope="module")
def ours(model: Path) -> Path:
    folder = checkpoint_folder(model.parent, 1)
    with backend(model) as built:
        built.train_step(make_batch(), CrossEntropyLoss())
        built.save(folder, {})
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same(found: Path, expected: Path) -> None:
    a, b = tensors(found), tensors(expected)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in b)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- ours


def test_weights_of_ours_are_linked_and_what_people_edit_is_copied(ours: Path, tmp_path: Path) -> None:
    offline.convert_to_hf(ours, tmp_path / "out")
    assert names(tmp_path / "out") == sorted({*names(ours)} - {"optimizer", "manifest.json"})
    for path in (tmp_path / "out").iterdir():
        assert path.samefile(ours / path.name) is (path.suffix == ".safetensors"), path.name
    assert offline.is_exported(ours, tmp_path / "out")


def test_it_is_copied_to_another_file_system(ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def apart(*_: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", apart)
    offline.convert_to_hf(ours, tmp_path / "out")
    for path in (tmp_path / "out").iterdir():
        assert not path.samefile(ours / path.name)
        assert path.read_bytes() == (ours / path.name).read_bytes()


def test_a_routers_bias_stays_precise_where_the_rest_is_cast(tmp_path: Path) -> None:
    write_hf_model(EXAMPLES["glm4_moe biases"], tmp_path / "model")
    (tmp_path / "out").mkdir()
    offline._cast(tmp_path / "model", tmp_path / "out", "bfloat16", 1 << 30)
    expected, found = tensors(tmp_path / "model"), tensors(tmp_path / "out")
    biases = {name for name in expected if name.endswith("e_score_correction_bias")}
    assert biases
    for name, tensor in found.items():
        assert tensor.dtype == (torch.float32 if name in biases else torch.bfloat16), name
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


def test_it_is_cast(ours: Path, tmp_path: Path) -> None:
    offline.convert_to_hf(ours, tmp_path / "out", dtype="bfloat16", shard_bytes=20_000)
    expected = tensors(ours)
    found = tensors(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in found.items())
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert "manifest.json" not in names(tmp_path / "out")
    assert verify_hf_folder(tmp_path / "out") == len(expected)
    assert names(tmp_path) == ["out"]


# ---- Megatron-LM's


@pytest.mark.parametrize("experts", [0, 4])
def test_an_import_is_bit_exact(model: Path, upstreams: Path, tmp_path: Path, experts: int) -> None:
    if experts:
        model, upstreams = tmp_path / "model", tmp_path / "upstreams"
        write_model(model, experts=experts)
        write_torch_dist(str(model), str(upstreams), {})
    offline.convert_to_hf(upstreams, tmp_path / "hf", model, shard_bytes=20_000)
    assert_same(tmp_path / "hf", model)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            assert (tmp_path / "hf" / path.name).read_bytes() == path.read_bytes(), path.name
    assert verify_hf_folder(tmp_path / "hf") == len(tensors(model))
    assert {*names(tmp_path)} <= {"hf", "model", "upstreams"}


def test_what_an_import_needs_and_cannot_do_is_told(model: Path, upstreams: Path, tmp_path: Path) -> None:
    for arguments, option in (((), "--source"), ((model, "bfloat16"), "--dtype")):
        with pytest.raises(ModelError, match=option):
            offline.convert_to_hf(upstreams, tmp_path / "out", *arguments)
    write_model(tmp_path / "other", layers=3)
    with pytest.raises((ModelError, BridgeError), match=r"model\.layers\.2\.|decoder\.layers"):
        offline.convert_to_hf(upstreams, tmp_path / "out", tmp_path / "other")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_the_old_form_is_named_with_a_command_that_works(
    model: Path, upstreams: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(upstreams, tmp_path / "a run" / "step_00000001"))
    shutil.copytree(model, folder / "hf")
    (folder / checkpoint_manifest.NAME).write_text(json.dumps({"format": 3, "files": {}}))
    with backend(model) as built, pytest.raises(ModelError) as told:
        built.load(folder)
    with pytest.raises(ModelError) as caught:
        offline.verify(folder)
    assert str(caught.value) == str(told.value)
    assert not isinstance(caught.value, DamagedCheckpoint)
    program, *words = shlex.split(str(told.value).partition("; ")[2].partition(" imports")[0])
    assert program == "mua"
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, words).exit_code == 0
    assert_same(tmp_path / "OUT", model)


def meet_tensors(monkeypatch: pytest.MonkeyPatch, meet: Callable[[str], None]) -> None:
    """Calls ``meet`` with the name of every tensor as it is completed, after it was recorded."""
    add = Sidecar.add

    def recorded(self: Sidecar, name: str, digest: str, **place: Any) -> None:
        add(self, name, digest, **place)
        meet(name)

    monkeypatch.setattr(Sidecar, "add", recorded)


def interrupted(checkpoint: Path, out: Path, model: Path) -> list[str]:
    """Kill an import after its ninth tensor; the lines of its sidecar."""
    count = iter(range(8))

    def kill(_: str) -> None:
        if next(count, None) is None:
            raise Killed

    with pytest.MonkeyPatch.context() as patched:
        meet_tensors(patched, kill)
        with pytest.raises(Killed):
            offline.convert_to_hf(checkpoint, out, model)
    assert not out.exists()
    return (out.with_name(f".{out.name}.partial") / "checksums.jsonl").read_text().splitlines()


def test_a_killed_import_continues_without_writing_again_what_is_right(
    model: Path, upstreams: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, partial = interrupted(upstreams, tmp_path / "out", model), tmp_path / ".out.partial"
    assert len(lines) == 10  # the header and nine tensors
    damaged = json.loads(lines[4])["name"]
    damage(partial / "model.safetensors", damaged)
    (partial / "checksums.jsonl").write_text("\n".join(lines) + '\n{"name": "cut sho')
    written: list[str] = []
    meet_tensors(monkeypatch, written.append)
    offline.convert_to_hf(upstreams, tmp_path / "out", model)
    assert {json.loads(line)["name"] for line in lines[1:]} & {*written} == {damaged}
    monkeypatch.undo()
    offline.convert_to_hf(upstreams, tmp_path / "straight", model)
    assert names(tmp_path / "out") == names(tmp_path / "straight")
    assert_same(tmp_path / "out", model)
    assert verify_hf_folder(tmp_path / "out") == len(tensors(model))
    assert not partial.exists()


def damage(path: Path, name: str) -> None:
    """Overwrite some bytes of one tensor, as a crash of the machine might leave them."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    with path.open("r+b") as file:
        file.seek(8 + size + json.loads(content[8 : 8 + size])[name]["data_offsets"][0])
        file.write(b"\0\1\2\3" * 4)


def test_what_another_import_left_is_not_continued(model: Path, upstreams: Path, tmp_path: Path) -> None:
    interrupted(upstreams, tmp_path / "out", model)
    with backend(model) as built:
        built.train_step(make_batch(), CrossEntropyLoss())
        save_torch_dist(built, tmp_path / "other")
        built.save_hf(tmp_path / "trained")
    offline.convert_to_hf(tmp_path / "other", tmp_path / "out", model)
    assert_same(tmp_path / "out", tmp_path / "trained")


def test_two_imports_into_one_folder_are_refused(
    model: Path, upstreams: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second(_: str) -> None:
        with pytest.raises(BridgeError, match=r"another process is writing .*out"):
            offline.convert_to_hf(upstreams, tmp_path / "out", model)

    meet_tensors(monkeypatch, second)
    offline.convert_to_hf(upstreams, tmp_path / "out", model)
    assert_same(tmp_path / "out", model)


MEASURED = """
import sys, threading
from pathlib import Path
import psutil, torch
from mua.megatron import offline
torch.set_num_threads(1)
peak, stop = 0, threading.Event()
def watch():
    global peak
    while not stop.wait(0.002):
        peak = max(peak, psutil.Process().memory_info().rss)
for size in ("small", "large"):
    model, upstreams, out = (Path(sys.argv[1]) / (size + end) for end in ("", ".upstreams", ".out"))
    if size == "large":
        before = peak = psutil.Process().memory_info().rss
        threading.Thread(target=watch, daemon=True).start()
    # What a first call imports and allocates once is no matter of the model's size.
    offline.convert_to_hf(upstreams, out, model)
stop.set()
print(peak - before)
"""


@pytest.mark.slow
def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    write_model(tmp_path / "small")
    write_model(tmp_path / "large", hidden=256, layers=16, vocab_size=16384, intermediate_size=1536, tied=False)
    for size in ("small", "large"):
        write_torch_dist(str(tmp_path / size), str(tmp_path / f"{size}.upstreams"), {"dtype": "bfloat16"})
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, "-W", "ignore", "-c", MEASURED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    peak, sizes = int(done.stdout.split()[-1]), [each.nbytes for each in tensors(tmp_path / "large.out").values()]
    print([f"{each / 2**20:.0f} MiB" for each in (peak, max(sizes), sum(sizes))])
    assert sum(sizes) > 3 * max(sizes)  # otherwise the whole model would pass
    assert 0 < peak < 2 * max(sizes) + (2 << 20)
