"""A checkpoint from elsewhere runs nothing: whatever its pickles name is refused in one line that names the file.

Every payload is first shown to run where Python's or torch's own unpickler reads it, and is then put into every part of
a checkpoint that is a pickle, under a manifest that fits, and met by resuming and by conversion. Bytes are also changed
at drawn places of the same parts. Damage that the manifest notices is in ``test_checkpoint_damage.py``.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mua.compat.checkpoint_reading import read_index
from mua.compat.plain_archive import read_archive
from mua.compat.plain_pickle import PickleError, PlainUnpickler
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader

import mua.megatron.checkpoint
from mua.compat import plain_index
from mua.megatron import checkpoint_manifest, offline
from mua.megatron.checkpoint import checkpoint_folder
from mua.trainer.learner import Learner
from mua.utils.errors import ModelError
from tests.megatron_support import backend, write_model

ENTRANCES = ("resume", "conversion")
PARTS = (".metadata", "rng_00000.pt", "common.pt", "object")
CASES = 300


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learner]:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    with backend(folder) as result:
        yield result


@pytest.fixture(scope="module")
def saved(built: Learner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = checkpoint_folder(tmp_path_factory.mktemp("run"), 1)
    built.save(path, {})
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


def evil_file(canary: Path) -> Path:
    path = canary.with_name("evil.pickle")
    path.write_bytes(calling("os", "system", f"touch {canary}"))
    return path


def evil_repository(canary: Path) -> Path:
    folder = canary.with_name("repository")
    folder.mkdir(exist_ok=True)
    (folder / "hubconf.py").write_text(f"def model():\n    open({str(canary)!r}, 'w').close()\n")
    return folder


def hub(canary: Path) -> bytes:
    """``torch.hub.load(repository, "model", source="local")``: the source has to be a keyword, hence ``partial``."""
    partial = text("functools") + text("partial") + pickle.STACK_GLOBAL
    load = text("torch") + text("hub.load") + pickle.STACK_GLOBAL
    state = b"(" + load + b")}" + text("source") + text("local") + b"s}t"
    return (
        b"\x80\x04" + partial + b"(" + load + b"tR" + state + b"b" + b"(" + text(str(evil_repository(canary)))
        + text("model") + b"tR."
    )  # fmt: skip


def getattr_of(canary: Path) -> bytes:
    """``getattr(torch.os, "system")(command)``, without a dot in any name."""
    got = text("builtins") + text("getattr") + pickle.STACK_GLOBAL
    return b"\x80\x04" + got + b"(" + text("torch") + text("os") + pickle.STACK_GLOBAL + text("system") + b"tR" + (
        b"(" + text(f"touch {canary}") + b"tR."
    )  # fmt: skip


PAYLOADS: dict[str, Callable[[Path], bytes]] = {
    "a dotted name of torch": lambda canary: calling("torch", "os.system", f"touch {canary}"),
    "a dotted name of an admitted module": lambda canary: calling(
        "torch.distributed.checkpoint.metadata", "os.system", f"touch {canary}"
    ),
    "a dotted name behind an admitted class": lambda canary: calling(
        "torch.serialization", "_get_layout.__globals__.__class__", f"touch {canary}"
    ),
    "os.system": lambda canary: calling("os", "system", f"touch {canary}"),
    "posix.system in protocol 2": lambda canary: by_line("posix", "system", f"touch {canary}"),
    "builtins.getattr": getattr_of,
    "torch.hub.load": hub,
    "torch.utils.collect_env.run": lambda canary: calling("torch.utils.collect_env", "run", f"touch {canary}"),
    "pickle.load": lambda canary: calling("torch", "serialization.pickle.loads", "x"),
    "builtins.exec": lambda canary: calling("builtins", "exec", f"open({str(canary)!r}, 'w')"),
}
HARMLESS = {"a dotted name behind an admitted class", "pickle.load"}
"""They run nothing by themselves: that they are refused is all there is to see."""


def archive(data: bytes) -> bytes:
    """An archive of torch.save whose pickle is ``data``."""
    original, changed = io.BytesIO(), io.BytesIO()
    torch.save({}, original)
    with zipfile.ZipFile(original) as source, zipfile.ZipFile(changed, "w") as target:
        for name in source.namelist():
            target.writestr(name, data if name.endswith("/data.pkl") else source.read(name))
    return changed.getvalue()


def put(checkpoint: Path, part: str, data: bytes) -> str:
    """The checkpoint with the pickle ``data`` in one part, and a manifest that fits; the file that then holds it."""
    content = checkpoint_manifest.read_manifest(checkpoint)
    if part == ".metadata":
        (checkpoint / part).write_bytes(data)
    elif part == "object":
        part = put_object(checkpoint, archive(data))
    else:
        (checkpoint / part).write_bytes(archive(data))
    seal(checkpoint, content)
    return part


def put_object(checkpoint: Path, blob: bytes) -> str:
    """Let the index say that the common state lies at the end of a file, where ``blob`` is."""
    index = FileSystemReader(checkpoint).read_metadata()
    key = next(key for key in index.storage_data if key.fqn.startswith("common_state"))
    place = index.storage_data[key]
    path = checkpoint / place.relative_path
    place.offset, place.length = path.stat().st_size, len(blob)
    with path.open("ab") as file:
        file.write(blob)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    return str(place.relative_path)


def seal(checkpoint: Path, content: dict[str, Any]) -> None:
    (checkpoint / checkpoint_manifest.NAME).unlink()
    checkpoint_manifest.write_manifest(
        checkpoint, {name: value for name, value in content.items() if name not in ("format", "files")}
    )


def meet(entrance: str, checkpoint: Path, built: Learner) -> None:
    if entrance == "resume":
        built.load(checkpoint)
    else:
        offline.megatron_to_hf(checkpoint, checkpoint.with_name("out"), source=checkpoint.with_name("model"))


@pytest.mark.parametrize("name", sorted(PAYLOADS.keys() - HARMLESS))
def test_payloads_run_where_they_are_unpickled(name: str, canary: Path) -> None:
    pickle.loads(PAYLOADS[name](canary))
    assert canary.exists()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", PAYLOADS)
def test_a_payload_is_refused_and_does_not_run(
    built: Learner, checkpoint: Path, canary: Path, name: str, part: str
) -> None:
    file = put(checkpoint, part, PAYLOADS[name](canary))
    for entrance in ENTRANCES:
        with pytest.raises(ModelError, match=r"holds what no \w+ holds \(it names \S+\); do not load it") as caught:
            meet(entrance, checkpoint, built)
        assert "\n" not in str(caught.value)
        assert f"{file} " in str(caught.value)
        assert not canary.exists()


@pytest.mark.parametrize("part", PARTS)
def test_a_payload_put_there_after_the_check_does_not_run_either(
    built: Learner, checkpoint: Path, canary: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(folder: Path, *_: Any) -> None:
        put(folder, part, PAYLOADS["a dotted name of torch"](canary))

    monkeypatch.setattr(mua.megatron.checkpoint, "check_pickles", swapped)
    with pytest.raises(ModelError, match=r"it names torch\.os\.system"):
        built.load(checkpoint)
    assert not canary.exists()


def test_torch_load_of_another_file_is_refused(built: Learner, checkpoint: Path, canary: Path) -> None:
    put(checkpoint, ".metadata", calling("torch", "load", str(evil_file(canary))))
    for entrance in ENTRANCES:
        with pytest.raises(ModelError, match=r"it names torch\.load"):
            meet(entrance, checkpoint, built)
        assert not canary.exists()


@pytest.mark.parametrize("part", PARTS[1:])
def test_an_archive_of_the_old_kind_is_refused(built: Learner, checkpoint: Path, canary: Path, part: str) -> None:
    content = checkpoint_manifest.read_manifest(checkpoint)
    data = calling("os", "system", f"touch {canary}")
    if part == "object":
        put_object(checkpoint, data)
    else:
        (checkpoint / part).write_bytes(data)
    seal(checkpoint, content)
    for entrance in ENTRANCES:
        with pytest.raises(ModelError, match=r"it is no archive of torch\.save"):
            meet(entrance, checkpoint, built)
        assert not canary.exists()


def test_the_states_of_modules_are_not_handed_on(built: Learner, checkpoint: Path) -> None:
    """Transformer Engine unpickles them by itself, from the bytes of a tensor."""
    content = checkpoint_manifest.read_manifest(checkpoint)
    index = FileSystemReader(checkpoint).read_metadata()
    blob = io.BytesIO()
    torch.save([torch.frombuffer(bytearray(calling("os", "system", "true")), dtype=torch.uint8)], blob)
    path = checkpoint / "__0_0.distcp"
    place = next(iter(index.storage_data.values()))
    entry = type(place)(path.name, path.stat().st_size, len(blob.getvalue()))
    key = type(next(iter(index.storage_data)))("decoder.layers.self_attention._extra_state/shard_0_1")
    index.storage_data[key] = entry
    with path.open("ab") as file:
        file.write(blob.getvalue())
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    seal(checkpoint, content)
    for entrance in ENTRANCES:
        with pytest.raises(ModelError, match=r"__0_0\.distcp at byte \d+ .*_extra_state\S* has a state of its own"):
            meet(entrance, checkpoint, built)


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
        PlainUnpickler(b"\x80\x04" + program, plain_index.NAMES).read_value()


def test_names_from_a_file_do_not_reach_the_terminal_as_they_are() -> None:
    for name in ("a\nb", "\x1b[2J", "x" * 100_000, "\u2028"):
        with pytest.raises(PickleError) as caught:
            PlainUnpickler(calling("torch", name), plain_index.NAMES).read_value()
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 200


def test_memory_is_in_proportion_to_the_bytes() -> None:
    """Python's unpickler would make room for four billion values, and for a text of four gigabytes."""
    assert PlainUnpickler(b"\x80\x02Nr\xff\xff\xff\xff.", {}).read_value() is None
    with pytest.raises(PickleError, match="cut short"):
        PlainUnpickler(b"\x80\x02X\xff\xff\xff\xffabc.", {}).read_value()


def test_values_within_values_end(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(archive(b"\x80\x02]q\x00h\x00a."))  # a list that holds itself
    with pytest.raises(PickleError, match="nested deeper"):
        read_archive(path)
    path.write_bytes(archive(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."))
    with pytest.raises(PickleError, match="nested deeper"):
        read_archive(path)
    path.write_bytes(archive(b"\x80\x02K\x01" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(50)) + b"."))
    assert read_archive(path)  # a value of 2 ** 50 leaves, each made once


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda place: setattr(place, "relative_path", "../../etc/passwd"), "no file of a checkpoint"),
        (lambda place: setattr(place, "relative_path", "/etc/passwd"), "no file of a checkpoint"),
        (lambda place: setattr(place, "relative_path", "absent.distcp"), "absent.distcp: No such file"),
        (lambda place: setattr(place, "offset", -1), "bytes from -1 on"),
        (lambda place: setattr(place, "length", 1 << 40), "bytes from"),
        (lambda place: setattr(place, "length", 8), "does not say where"),
        (lambda place: setattr(place, "transform_descriptors", ["zstd"]), "transformed"),
    ],
)  # fmt: skip
def test_places_outside_the_files_are_refused(checkpoint: Path, change: Callable[[Any], None], message: str) -> None:
    index = FileSystemReader(checkpoint).read_metadata()
    change(next(place for key, place in index.storage_data.items() if key.offset is not None))
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ModelError, match=message):
        read_index(checkpoint)


def test_changed_bytes_of_every_pickle_are_one_error_or_none(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "fuzzed"))
    whole = {name: (saved / name).read_bytes() for name in (".metadata", "rng_00000.pt")}
    drawn = random.Random(5)
    messages = list[str]()
    for _ in range(CASES):
        name = drawn.choice(sorted(whole))
        data = bytearray(whole[name])
        for _ in range(drawn.choice((1, 1, 4, 32))):
            data[drawn.randrange(len(data))] = drawn.randrange(256)
        if drawn.random() < 0.2:
            del data[drawn.randrange(len(data)) :]
        (folder / name).write_bytes(data)
        try:
            read_index(folder) if name == ".metadata" else read_archive(folder / name)
        except (ModelError, PickleError) as error:
            messages.append(str(error))
    assert not any("\n" in message for message in messages)
    assert len(messages) > CASES // 3


def test_upstream_still_unpickles_an_index(tmp_path: Path, canary: Path) -> None:
    (tmp_path / ".metadata").write_bytes(PAYLOADS["a dotted name of torch"](canary))
    with pytest.raises(AttributeError):
        FileSystemReader(tmp_path).read_metadata()
    assert canary.exists()


def test_upstream_still_unpickles_an_object(canary: Path) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.state_dict = {}
    item: Any = SimpleNamespace(dest_index=SimpleNamespace(fqn="object"))
    planner.load_bytes(item, io.BytesIO(archive(PAYLOADS["a dotted name of torch"](canary))))
    assert canary.exists()


def test_no_variable_of_the_environment_changes_it(
    built: Learner, checkpoint: Path, canary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    put(checkpoint, "common.pt", PAYLOADS["os.system"](canary))
    with pytest.raises(ModelError, match=r"common\.pt"):
        built.load(checkpoint)
    assert not canary.exists()
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"
