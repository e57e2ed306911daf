"""A checkpoint from elsewhere runs nothing: whatever its pickles name is refused in one line that names the file.

Every payload is first shown to run where Python's own unpickler reads it, and is then put into every part of a
checkpoint of Megatron-LM that is a pickle, and met by importing it. Bytes are also changed at drawn places of the same
parts. Our own checkpoints hold no pickle (``test_megatron_checkpoint.py``).
"""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from mua.compat.plain_pickle import PickleError, PlainUnpickler
from mua.megatron import offline, torch_dist
from mua.megatron.torch_dist import INDEX, ArchivePlace, TorchDistReader, find_tensor
from mua.utils.errors import DamagedCheckpoint
from tests.megatron_support import write_model
from tests.torch_dist import change_index, write_torch_dist

CASES = 300
NORM = "decoder.final_layernorm.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "iter_0000001"
    write_torch_dist(str(model), str(path), {})
    return path


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / saved.name))


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


def text(value: str) -> bytes:
    return pickle.BINUNICODE + len(value.encode()).to_bytes(4, "little") + value.encode()


def calling(module: str, name: str, *arguments: str) -> bytes:
    """A pickle of protocol 4 that calls ``module.name`` with texts; dots in ``name`` are followed."""
    named = text(module) + text(name) + pickle.STACK_GLOBAL
    return b"\x80\x04" + named + b"(" + b"".join(map(text, arguments)) + b"tR."


def by_line(module: str, name: str, *arguments: str) -> bytes:
    """The same in protocol 2, whose names are lines of text."""
    named = f"c{module}\n{name}\n".encode()
    return b"\x80\x02" + named + b"(" + b"".join(map(text, arguments)) + b"tR."


def getattr_of(canary: Path) -> bytes:
    """``getattr(torch.os, "system")(command)``, without a dot in any name."""
    got = text("builtins") + text("getattr") + pickle.STACK_GLOBAL
    return b"\x80\x04" + got + b"(" + text("torch") + text("os") + pickle.STACK_GLOBAL + text("system") + b"tR" + (
        b"(" + text(f"touch {canary}") + b"tR."
    )  # fmt: skip


HARMLESS = "a dotted name behind an admitted class"
"""It runs nothing by itself: that it is refused is all there is to see."""

PAYLOADS: dict[str, Callable[[Path], bytes]] = {
    "a dotted name of torch": lambda canary: calling("torch", "os.system", f"touch {canary}"),
    "a dotted name of an admitted module": lambda canary: calling(
        "torch.distributed.checkpoint.metadata", "os.system", f"touch {canary}"
    ),
    HARMLESS: lambda canary: calling("torch.serialization", "_get_layout.__globals__.__class__", f"touch {canary}"),
    "os.system": lambda canary: calling("os", "system", f"touch {canary}"),
    "posix.system in protocol 2": lambda canary: by_line("posix", "system", f"touch {canary}"),
    "builtins.getattr": getattr_of,
    "builtins.exec": lambda canary: calling("builtins", "exec", f"open({str(canary)!r}, 'w')"),
}


def archive(data: bytes) -> bytes:
    """An archive of torch.save whose pickle is ``data``."""
    original, changed = io.BytesIO(), io.BytesIO()
    torch.save({}, original)
    with zipfile.ZipFile(original) as source, zipfile.ZipFile(changed, "w") as target:
        for name in source.namelist():
            target.writestr(name, data if name.endswith("/data.pkl") else source.read(name))
    return changed.getvalue()


def put(checkpoint: Path, part: str, blob: bytes) -> str:
    """The checkpoint with ``blob`` as its index, or where the index says that a tensor or an object lies; its file."""
    if part == INDEX:
        (checkpoint / INDEX).write_bytes(blob)
        return INDEX
    files = []

    def redirect(index: Any) -> None:
        for key, place in index.storage_data.items():
            if key.fqn == NORM if part == "tensor" else key.offset is None:
                path = checkpoint / place.relative_path
                place.offset, place.length = path.stat().st_size, len(blob)
                files.append(path)

    change_index(checkpoint, redirect)
    with files[0].open("ab") as file:
        file.write(blob)
    return files[0].name


def refused(checkpoint: Path, model: Path) -> str:
    """The one line that an import ends with."""
    with pytest.raises(DamagedCheckpoint) as caught:
        offline.convert_to_hf(checkpoint, checkpoint.with_name("out"), model)
    assert isinstance(caught.value.__cause__, PickleError)
    assert str(caught.value).isprintable()
    assert not checkpoint.with_name("out").exists()
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(PAYLOADS.keys() - {HARMLESS}))
def test_payloads_run_where_they_are_unpickled(name: str, canary: Path) -> None:
    pickle.loads(PAYLOADS[name](canary))
    assert canary.exists()


@pytest.mark.parametrize("part", [INDEX, "tensor"])
@pytest.mark.parametrize("name", PAYLOADS)
def test_a_payload_is_refused_and_does_not_run(
    model: Path, checkpoint: Path, canary: Path, name: str, part: str
) -> None:
    data = PAYLOADS[name](canary)
    file = put(checkpoint, part, data if part == INDEX else archive(data))
    assert {str(checkpoint), file} <= set(refused(checkpoint, model).replace(":", "").split())
    assert not canary.exists()


def test_an_object_is_never_opened(model: Path, checkpoint: Path, canary: Path) -> None:
    put(checkpoint, "object", archive(PAYLOADS["os.system"](canary)))
    for path in (checkpoint / "common.pt", checkpoint / "metadata.json"):
        path.write_bytes(PAYLOADS["os.system"](canary))
    offline.convert_to_hf(checkpoint, checkpoint.with_name("out"), model)
    assert not canary.exists()


def test_an_archive_of_the_old_kind_is_refused(model: Path, checkpoint: Path, canary: Path) -> None:
    put(checkpoint, "tensor", calling("os", "system", f"touch {canary}") * 20)
    refused(checkpoint, model)
    assert not canary.exists()


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(32, dtype=torch.bfloat16), torch.zeros(31), torch.zeros(64)[::2], [torch.zeros(32)]],
    ids=["dtype", "shape", "holes", "list"],
)
def test_another_tensor_than_the_index_says_is_refused(model: Path, checkpoint: Path, tensor: Any) -> None:
    blob = io.BytesIO()
    torch.save(tensor, blob)
    put(checkpoint, "tensor", blob.getvalue())
    refused(checkpoint, model)


SIZE = text("torch") + text("Size") + pickle.STACK_GLOBAL
OTHER_INSTRUCTIONS = {
    "an extension": pickle.EXT1 + b"\x01.",
    "a persistent id by line": b"Pos.system\n.",
    "an object by mark": b"(" + SIZE + b"o.",
    "an instance by line": b"(iposix\nsystem\n.",
    "a call with keywords": SIZE + b")}\x92.",
    "an addition to a set": b"\x8f(K\x01\x90.",
    "a number by line": b"I1\n.",
    "a call of what is no name": b"K\x01)R.",
    "a name made of numbers": b"K\x01K\x02\x93.",
    "a change of a name": SIZE + b"}" + text("__init__") + b"K\x01sb.",
    "a second state": SIZE + b")\x81}b}b.",
    "an extension of no list": b"}K\x01a.",
    "a key that is a list": b"}]K\x01s.",
    "nothing": b".",
    "a mark that is not there": b"t.",
    "a value that was not kept": b"h\x07.",
}


@pytest.mark.parametrize("program", OTHER_INSTRUCTIONS.values(), ids=OTHER_INSTRUCTIONS.keys())
def test_other_instructions_of_pickle_are_refused(program: bytes) -> None:
    with pytest.raises(PickleError):
        PlainUnpickler(b"\x80\x04" + program, torch_dist._NAMES).read_value()


def test_names_from_a_file_do_not_reach_the_terminal_as_they_are() -> None:
    for name in ("a\nb", "\x1b[2J", "x" * 100_000, "\u2028"):
        with pytest.raises(PickleError) as caught:
            PlainUnpickler(calling("torch", name), torch_dist._NAMES).read_value()
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 200


def test_memory_is_in_proportion_to_the_bytes() -> None:
    """Python's unpickler would make room for four billion values, and for a text of four gigabytes."""
    assert PlainUnpickler(b"\x80\x02Nr\xff\xff\xff\xff.", {}).read_value() is None
    with pytest.raises(PickleError):
        PlainUnpickler(b"\x80\x02X\xff\xff\xff\xffabc.", {}).read_value()


@pytest.mark.parametrize(
    "value",
    [
        b"]q\x00h\x00a.",  # a list that holds itself
        b"]" * 100_000 + b"a" * 99_999 + b".",
        b"K\x01" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(50)) + b".",  # 2 ** 50 leaves, each made once
    ],
)
def test_values_within_values_end(tmp_path: Path, value: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(archive(b"\x80\x02" + value))
    with path.open("rb") as file, pytest.raises(PickleError):
        find_tensor(file.fileno(), ArchivePlace("file", 0, path.stat().st_size))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("relative_path", "../../etc/passwd"),
        ("relative_path", "/etc/passwd"),
        ("relative_path", "absent.distcp"),
        ("offset", -1),
        ("length", 1 << 40),
        ("length", 8),
        ("transform_descriptors", ["zstd"]),
    ],
)
def test_places_outside_the_files_are_refused(checkpoint: Path, name: str, value: Any) -> None:
    change_index(checkpoint, lambda index: [
        setattr(place, name, value) for key, place in index.storage_data.items() if key.fqn == NORM
    ])  # fmt: skip
    with pytest.raises(DamagedCheckpoint, match=INDEX):
        TorchDistReader(checkpoint)


def test_changed_bytes_of_every_pickle_are_one_error_or_none(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "fuzzed"))
    with closing(TorchDistReader(saved)) as reader:
        ((_, place),) = reader._index[NORM].chunks.values()
    with (saved / place.file).open("rb") as file:
        whole = {"index": (saved / INDEX).read_bytes(), "archive": os.pread(file.fileno(), place.length, place.offset)}
    drawn, refusals = random.Random(5), list[str]()
    for _ in range(CASES):
        name = drawn.choice(sorted(whole))
        data = bytearray(whole[name])
        for _ in range(drawn.choice((1, 1, 4, 32))):
            data[drawn.randrange(len(data))] = drawn.randrange(256)
        if drawn.random() < 0.2:
            del data[drawn.randrange(len(data)) :]
        (folder / (INDEX if name == "index" else "archive")).write_bytes(data)
        try:
            if name == "index":
                TorchDistReader(folder).close()
            else:
                with (folder / "archive").open("rb") as file:
                    find_tensor(file.fileno(), ArchivePlace("archive", 0, len(data)))
        except (DamagedCheckpoint, PickleError) as error:
            refusals.append(str(error))
    assert not any("\n" in told for told in refusals)
    assert len(refusals) > CASES // 3


def test_upstream_still_unpickles_an_index(tmp_path: Path, canary: Path) -> None:
    (tmp_path / INDEX).write_bytes(PAYLOADS["a dotted name of torch"](canary))
    with pytest.raises(AttributeError):
        FileSystemReader(tmp_path).read_metadata()
    assert canary.exists()
