"""Conversion from file to file: bit-exact both ways, continued after a kill, within a bound of memory, faults named.

One process. Checkpoints of other layouts are converted in ``tests/parity/test_checkpoint_layouts.py``. Memory is the
resident set of a new process, so its bound counts everything that process does beyond its imports.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_bridge.hf_folder import verify_hf_folder
from mua.algorithms.losses import CrossEntropyLoss
from mua.megatron import offline
from mua.megatron.checkpoint import checkpoint_folder
from mua.utils.errors import BridgeError, ModelError
from tests.megatron_support import backend, exported, make_batch, write_model

ROOT = Path(__file__).parents[2]


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def killed_after(calls: int) -> Callable[[int], None]:
    counted = iter(range(calls))

    def on_bytes(_: int) -> None:
        if next(counted, None) is None:
            raise Killed

    return on_bytes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "hf"
    write_model(folder)
    (folder / "tokenizer.json").write_bytes(b"\xff\x00 bytes, not text")
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same(found: Path, expected: Path) -> None:
    a, b = tensors(found), tensors(expected)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in b)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("experts", "buffer"), [(0, 1 << 20), (4, 700)])
def test_there_and_back_is_bit_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experts: int, buffer: int
) -> None:
    monkeypatch.setattr(offline, "BUFFER_BYTES", buffer)  # 700: five rows, and chunks of a tensor in several blobs
    write_model(tmp_path / "model", experts=experts)
    offline.hf_to_megatron(tmp_path / "model", tmp_path / "meg")
    offline.megatron_to_hf(tmp_path / "meg", tmp_path / "hf", source=tmp_path / "meg" / "hf", max_shard_bytes=20_000)
    assert_same(tmp_path / "hf", tmp_path / "model")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    assert (tmp_path / "hf" / "config.json").read_bytes() == (tmp_path / "model" / "config.json").read_bytes()
    assert verify_hf_folder(tmp_path / "hf") == len(tensors(tmp_path / "model"))
    assert names(tmp_path) == ["hf", "meg", "model"]


def test_other_files_are_copied_byte_for_byte(model: Path, tmp_path: Path) -> None:
    offline.hf_to_megatron(model, tmp_path / "meg")
    offline.megatron_to_hf(tmp_path / "meg", tmp_path / "out", source=tmp_path / "meg" / "hf")
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_training_checkpoint_is_the_trained_model(model: Path, tmp_path: Path) -> None:
    checkpoint = checkpoint_folder(tmp_path, 1)
    with backend(model) as built:
        built.train_step(make_batch(), CrossEntropyLoss())
        built.save(checkpoint, {})
        trained = exported(built)
    offline.megatron_to_hf(checkpoint, tmp_path / "out", source=model)
    found = tensors(tmp_path / "out")
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], torch.from_numpy(values)) for name, values in trained.items())


def test_the_dtype_can_be_chosen(model: Path, tmp_path: Path) -> None:
    offline.hf_to_megatron(model, tmp_path / "meg", dtype="bfloat16")
    offline.megatron_to_hf(tmp_path / "meg", tmp_path / "out", source=model)
    expected = tensors(model)
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in tensors(tmp_path / "out").items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("direction", ["hf-to-megatron", "megatron-to-hf"])
def test_a_killed_conversion_continues_without_writing_again_what_is_right(
    model: Path, tmp_path: Path, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline.hf_to_megatron(model, tmp_path / "meg")

    def convert(out: str, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        if direction == "hf-to-megatron":
            offline.hf_to_megatron(model, tmp_path / out, on_bytes=on_bytes)
        else:
            offline.megatron_to_hf(tmp_path / "meg", tmp_path / out, source=model, on_bytes=on_bytes)

    partial = tmp_path / ".out.partial"
    with pytest.raises(Killed):
        convert("out", killed_after(8))
    assert not (tmp_path / "out").exists()
    lines = (partial / "checksums.jsonl").read_text().splitlines()
    assert len(lines) == 10  # the header and nine tensors
    damage(partial, json.loads(lines[4]))
    (partial / "checksums.jsonl").write_text("\n".join(lines) + '\n{"name": "cut sho')
    written: list[str] = []
    record_writes(monkeypatch, written)
    convert("out")
    done = {json.loads(line)["name"] for line in lines[1:]}
    assert json.loads(lines[4])["name"] in written
    assert len(done & set(written)) == 1
    monkeypatch.undo()
    convert("straight")
    assert names(tmp_path / "out") == names(tmp_path / "straight")
    if direction == "megatron-to-hf":
        assert_same(tmp_path / "out", model)
        assert verify_hf_folder(tmp_path / "out") == len(tensors(model))
    else:
        offline.megatron_to_hf(tmp_path / "out", tmp_path / "back", source=model)
        assert_same(tmp_path / "back", model)
    assert not partial.exists()


def damage(folder: Path, entry: dict[str, Any]) -> None:
    """Overwrite some bytes of one recorded tensor, as a crash of the machine might leave them."""
    if "offset" in entry:
        path, offset = folder / f"__0_{entry['file']}.distcp", entry["offset"] + entry["length"] // 2
    else:
        path = folder / "model.safetensors"
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        offset = 8 + size + json.loads(content[8 : 8 + size])[entry["name"]]["data_offsets"][0]
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\0\1\2\3" * 4)


def record_writes(monkeypatch: pytest.MonkeyPatch, written: list[str]) -> None:
    from mua.utils.checksums import Sidecar

    add = Sidecar.add

    def recorded(self: Sidecar, name: str, digest: str, **place: Any) -> None:
        written.append(name)
        add(self, name, digest, **place)

    monkeypatch.setattr(Sidecar, "add", recorded)


def test_what_another_conversion_left_is_not_continued(model: Path, tmp_path: Path) -> None:
    offline.hf_to_megatron(model, tmp_path / "meg")
    with pytest.raises(Killed):
        offline.megatron_to_hf(tmp_path / "meg", tmp_path / "out", source=model, on_bytes=killed_after(5))
    changed = {name: tensor + 1 for name, tensor in tensors(model).items()}
    shutil.copytree(model, tmp_path / "other")
    save_file(changed, tmp_path / "other" / "model.safetensors")
    offline.hf_to_megatron(tmp_path / "other", tmp_path / "meg")
    offline.megatron_to_hf(tmp_path / "meg", tmp_path / "out", source=model)
    assert_same(tmp_path / "out", tmp_path / "other")


def test_two_conversions_into_one_folder_are_refused(model: Path, tmp_path: Path) -> None:
    def second(_: int) -> None:
        with pytest.raises(BridgeError, match=r"another process is writing .*meg; wait for it"):
            offline.hf_to_megatron(model, tmp_path / "meg")

    offline.hf_to_megatron(model, tmp_path / "meg", on_bytes=second)
    assert (tmp_path / "meg" / "manifest.json").exists()


def test_a_checkpoint_of_another_model_is_named(model: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "other", layers=3)
    offline.hf_to_megatron(model, tmp_path / "meg")
    with pytest.raises((ModelError, BridgeError), match=r"layers"):
        offline.megatron_to_hf(tmp_path / "meg", tmp_path / "out", source=tmp_path / "other")
    assert not (tmp_path / "out").exists()


def test_an_incomplete_model_is_refused_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "other")
    stored = tensors(model)
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, tmp_path / "other" / "model.safetensors")
    with pytest.raises(BridgeError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        offline.hf_to_megatron(tmp_path / "other", tmp_path / "meg")
    assert names(tmp_path) == ["other"]


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
def both(model, name):
    model, meg, out = Path(model), Path(model).with_name(name + ".meg"), Path(model).with_name(name + ".hf")
    yield offline.hf_to_megatron, (model, meg), {}
    yield offline.megatron_to_hf, (meg, out), {"source": model}
for function, places, more in both(sys.argv[1], "small"):
    function(*places, **more)  # what a first call imports and allocates once is no matter of the model's size
threading.Thread(target=watch, daemon=True).start()
for function, places, more in both(sys.argv[2], "large"):
    before = peak = psutil.Process().memory_info().rss
    function(*places, **more)
    print(peak - before)
stop.set()
"""


@pytest.mark.slow
def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    wide = {"vocab_size": 32768, "intermediate_size": 3072, "num_attention_heads": 8, "head_dim": 64}
    large = write_model(tmp_path / "large", layers=16, hidden=512, tied=False, **wide).bfloat16()
    large.save_pretrained(tmp_path / "large")
    sizes = [tensor.nbytes for tensor in large.state_dict().values()]
    largest, total = max(sizes), sum(sizes)
    del large
    write_model(tmp_path / "small")
    command = [sys.executable, "-W", "ignore", "-c", MEASURED, str(tmp_path / "small"), str(tmp_path / "large")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    peaks = [int(line) for line in done.stdout.split()]
    print([f"{each / 2**20:.0f} MiB" for each in (*peaks, largest, total)])
    assert len(peaks) == 2
    assert total > 2 * largest + 2 * offline.BUFFER_BYTES  # otherwise the whole model would pass
    assert all(0 < peak < 2 * largest + offline.BUFFER_BYTES for peak in peaks), peaks
    assert_same(tmp_path / "large.hf", tmp_path / "large")
