"""The safetensors reader and writer, and complete folders: slices, shards, damage, what a failure leaves.

Files are checked against the safetensors library in both directions. Damage of checksummed folders is in
test_checkpoint_damage.py, a full disk in tests/parity/test_checkpoint_layouts.py. Models are not covered here.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from exported_tensors import write_hf_folder, write_whole
from safetensors.torch import load_file, save_file

from megatron_bridge.plan import TensorSpec
from megatron_bridge.safetensors_io import INDEX, SafetensorsFolder, SafetensorsWriter
from mua.utils.errors import BridgeError

DTYPES = [torch.bfloat16, torch.float64]


def tensors_of(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (7, 5), "b": (11,), "c": (3, 8), "d": (1, 1)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def specs_of(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


def model_folder(folder: Path, tensors: dict[str, torch.Tensor], dtype: str = "float32") -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(f'{{"dtype":   "{dtype}",\n "odd": 1e-06}}', encoding="utf-8")
    (folder / "tokenizer.json").write_bytes(b"\xff\x00 bytes, not text")
    (folder / "chat_template.jinja").write_text("{{ messages }}\r\n", encoding="utf-8", newline="")
    (folder / "pytorch_model.bin").write_bytes(b"old weights")
    return folder


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_equal_the_librarys_tensor(tmp_path, dtype):
    tensors = tensors_of(dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    with SafetensorsFolder(tmp_path) as folder:
        whole, part, column = torch.empty(4, 5, dtype=dtype), torch.empty(3, 2, dtype=dtype), torch.empty(6, 1)
        folder.read("a", 2, 0, whole)
        folder.read("a", 1, 3, part)
        folder.read("b", 5, 0, column)
    assert torch.equal(whole, tensors["a"][2:6])
    assert torch.equal(part, tensors["a"][1:4, 3:])
    assert torch.equal(column[:, 0], tensors["b"][5:].float())


def test_columns_of_long_rows_are_read_without_the_rest(tmp_path, monkeypatch):
    tensors = {"a": torch.randn(5, 6000)}
    save_file(tensors, tmp_path / "model.safetensors")
    read, preadv = [], os.preadv

    def counted(descriptor, buffers, offset):
        read.append(sum(len(buffer) for buffer in buffers))
        return preadv(descriptor, buffers, offset)

    with SafetensorsFolder(tmp_path) as folder:
        monkeypatch.setattr(os, "preadv", counted)
        target, cast = torch.empty(3, 1000), torch.empty(3, 1000, dtype=torch.float64)
        folder.read("a", 1, 2000, target)
        assert sum(read) == target.nbytes
        folder.read("a", 1, 2000, cast)
    assert torch.equal(target, tensors["a"][1:4, 2000:3000])
    assert torch.equal(cast, target.double())


def test_reading_in_small_steps_and_into_a_strided_target(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_bridge.safetensors_io._BUFFER_BYTES", 48)
    tensors = tensors_of()
    save_file(tensors, tmp_path / "model.safetensors")
    target = torch.zeros(7, 10)
    with SafetensorsFolder(tmp_path) as folder:
        folder.read("a", 0, 0, target[:, ::2])
        assert folder.equal("a", "a")
        assert not folder.equal("a", "c")
    assert torch.equal(target[:, ::2], tensors["a"])
    assert not target[:, 1::2].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_bytes", [1, 1 << 20])
def test_written_shards_are_read_by_the_library(tmp_path, dtype, max_bytes):
    tensors = tensors_of(dtype)
    writer = SafetensorsWriter(tmp_path, specs_of(tensors), max_bytes)
    for name in reversed(tensors):
        write_whole(writer, name, tensors[name])
    writer.finish()
    assert_same(loaded(tmp_path), tensors)
    if max_bytes == 1:
        index = json.loads((tmp_path / INDEX).read_text(encoding="utf-8"))
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
        assert {
            name: name in load_file(tmp_path / file) for name, file in index["weight_map"].items()
        } == dict.fromkeys(tensors, True)
        with SafetensorsFolder(tmp_path) as folder:
            assert set(folder.names) == set(tensors)


def test_the_writer_insists_on_what_was_announced(tmp_path):
    tensors = tensors_of()
    writer = SafetensorsWriter(tmp_path, specs_of(tensors), 1 << 20)
    with pytest.raises(BridgeError, match="a: 40 bytes came, announced were 140"):
        write_whole(writer, "a", tensors["a"][:2])
    write_whole(writer, "a", tensors["a"])
    with pytest.raises(BridgeError, match="a was not announced to the writer, or came twice"):
        write_whole(writer, "a", tensors["a"])
    with pytest.raises(BridgeError, match="3 tensors were never written, first b"):
        writer.finish()
    writer.close()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:-3], "not fully covered"),
        (lambda data: data + b"   ", "not fully covered"),
        (lambda data: data[:8] + b"x" + data[9:], "invalid JSON in header"),
        (lambda data: b"\xff" * 8 + data[8:], "header too large"),
        (lambda data: data.replace(b'"shape":[11]', b'"shape":[10]', 1), "invalid shape, data type, or offset"),
        (lambda data: data.replace(b'"b":', b'"a":', 1), "invalid offset for tensor `a`"),
        (lambda data: data.replace(b'"b":', b'"\x7f":', 1), "has a name or shape that no tensor has"),
        (lambda data: b"", "header too small"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path, damage, reason):
    path = tmp_path / "model.safetensors"
    save_file(tensors_of(), path)
    data = path.read_bytes()
    assert damage(data) != data
    path.write_bytes(damage(data))
    message = rf"model\.safetensors is no safetensors file, damaged or cut short \(.*{reason}.*\); copy it again"
    with pytest.raises(BridgeError, match=message):
        SafetensorsFolder(tmp_path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(tensors_of(), path)
    with SafetensorsFolder(tmp_path) as folder:
        os.truncate(path, folder.entry("a").offset + 8)
        with pytest.raises(BridgeError, match=r"model\.safetensors ends at byte .* inside a tensor"):
            folder.read("a", 0, 0, torch.empty(7, 5))


def test_folders_without_usable_weights(tmp_path):
    with pytest.raises(BridgeError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        SafetensorsFolder(tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "gone.safetensors"}}', encoding="utf-8")
    with pytest.raises(BridgeError, match=r"gone\.safetensors cannot be opened: No such file"):
        SafetensorsFolder(tmp_path)
    save_file({"b": torch.ones(1)}, tmp_path / "gone.safetensors")
    with pytest.raises(BridgeError, match=r"says a is in gone\.safetensors, but it is not there"):
        SafetensorsFolder(tmp_path)
    (tmp_path / INDEX).write_text("{}", encoding="utf-8")
    with pytest.raises(BridgeError, match="is not a safetensors index"):
        SafetensorsFolder(tmp_path)
    save_file({"b": torch.ones(1), "c": torch.ones(1)}, tmp_path / "two.safetensors")
    weight_map = {"b": "gone.safetensors", "c": "two.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    with pytest.raises(BridgeError, match="b is in both"):
        SafetensorsFolder(tmp_path)
    (tmp_path / INDEX).unlink()
    save_file({"a": torch.ones(2, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(BridgeError, match="a has dtype I32"):
        SafetensorsFolder(tmp_path)


def test_folders_that_are_no_models_are_never_replaced(tmp_path):
    tensors = tensors_of()
    source, out = model_folder(tmp_path / "source", tensors), tmp_path / "thesis"
    out.mkdir()
    (out / "chapter.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(BridgeError, match="not empty and no model folder"):
        write_hf_folder(tensors.items(), specs_of(tensors), out, source=source)
    with pytest.raises(BridgeError, match="is a file"):
        write_hf_folder(tensors.items(), specs_of(tensors), out / "chapter.txt", source=source)
    assert (out / "chapter.txt").read_text(encoding="utf-8") == "years of work"


@pytest.mark.parametrize("broken", ["source", "iterator", "incomplete", "mixed"])
def test_any_failure_leaves_the_old_folder_and_nothing_else(tmp_path, broken):
    tensors = tensors_of()
    source = model_folder(tmp_path / "source", tensors)
    out = model_folder(tmp_path / "out", {"old": torch.ones(2)})
    specs, stream, error = specs_of(tensors), iter(tensors.items()), BridgeError
    if broken == "source":
        (source / "config.json").unlink()
    elif broken == "iterator":
        stream, error = failing_stream(tensors), ZeroDivisionError
    elif broken == "incomplete":
        stream = iter(list(tensors.items())[:2])
    else:
        specs[0] = TensorSpec("a", (7, 5), torch.bfloat16)
    with pytest.raises(error):
        write_hf_folder(stream, specs, out, source=source)
    assert_same(loaded(out), {"old": torch.ones(2)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def failing_stream(tensors):
    yield from list(tensors.items())[:1]
    raise ZeroDivisionError


def test_a_replacement_killed_between_its_renames_is_undone(tmp_path):
    tensors = tensors_of()
    source = model_folder(tmp_path / "source", tensors)
    model_folder(tmp_path / ".out.old", {"old": torch.ones(2)})
    (source / "config.json").unlink()
    with pytest.raises(BridgeError, match=r"no config\.json to copy"):
        write_hf_folder(tensors.items(), specs_of(tensors), tmp_path / "out", source=source)
    assert_same(loaded(tmp_path / "out"), {"old": torch.ones(2)})
