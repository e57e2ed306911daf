"""Megatron-Core reads checkpoints without unpickling anything.

Upstream: megatron-core 0.19.2, ``dist_checkpointing``. It opens a folder with torch's ``FileSystemReader``, which
unpickles the index and every object without restriction, and a ``common.pt``, where there is one, by ``torch.load``
with its default, which a variable of the environment turns off. Both are replaced where Megatron-Core takes them from,
for every load in this process: by :class:`PlainReader` and by :func:`mua.compat.plain_archive.read_archive`. What
upstream unpickles then are bytes that were written here, from values that were read as plain data.
Goes when: ``tests/unit/test_checkpoint_attacks.py::test_upstream_still_unpickles_an_index`` and
``test_upstream_still_unpickles_an_object`` fail.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron_bridge.plain_files import label
from mua.compat.plain_archive import Archive, read_archive
from mua.compat.plain_index import StorageInfo, parse_index
from mua.compat.plain_pickle import PickleError
from mua.errors import DamagedCheckpoint

INDEX = ".metadata"
COMMON = "common.pt"
_EXTRA_STATE = "_extra_state/"
_latest: dict[tuple[Any, ...], Metadata] = {}
"""The index that was read last, by its file: upstream asks for it several times during one load."""


def read_index(folder: Path) -> Metadata:
    """The index of the checkpoint ``folder``.

    Raises:
        DamagedCheckpoint: it is missing, damaged, or a pickle of anything else than an index.
    """
    path = folder / INDEX
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            identity = (str(path), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            if identity not in _latest:
                index = parse_index(file.read(), _sizes(folder))
                _latest.clear()
                _latest[identity] = index
    except OSError as error:
        raise DamagedCheckpoint(
            f"checkpoint {folder}: its index {path.name} cannot be read: {error.strerror}"
        ) from error
    except PickleError as error:
        raise DamagedCheckpoint(
            f"checkpoint {folder}: its index {path.name} is damaged or holds what no index holds ({error}); "
            "do not load it"
        ) from error
    return _latest[identity]


def forget_index() -> None:
    """Give the memory of the index that was read last back, once a checkpoint is loaded."""
    _latest.clear()


def _sizes(folder: Path) -> Any:
    known: dict[str, int] = {}

    def size(name: str) -> int:
        if name not in known:
            known[name] = os.stat(folder / name).st_size
        return known[name]

    return size


def read_common(folder: Path) -> Any:
    """The common state that a checkpoint of an older format keeps in a file of its own; None where there is none.

    Raises:
        DamagedCheckpoint: it is damaged, or holds what no checkpoint holds.
    """
    path = folder / COMMON
    try:
        return read_archive(path) if path.exists() else None
    except (OSError, PickleError) as error:
        raise refusal(folder, COMMON, error) from error


def refusal(folder: Path, where: str, error: Exception) -> DamagedCheckpoint:
    """The one line about a part of a checkpoint that cannot be read as plain data."""
    return DamagedCheckpoint(
        f"checkpoint {folder}: {where} is damaged or holds what no checkpoint holds ({error}); do not load it"
    )


class PlainReader(FileSystemReader):
    """torch's reader of a folder, without its unpickling."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index."""
        index = read_index(Path(self.path))
        index.storage_meta = StorageMeta(load_id=self.load_id)
        return index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Everything that ``plan`` asks for, file by file."""
        files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            files.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in files.items():
            descriptor = os.open(Path(self.path) / name, os.O_RDONLY | os.O_NONBLOCK)
            try:
                for item in items:
                    self._read(descriptor, item, planner)
            finally:
                os.close(descriptor)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, descriptor: int, item: ReadItem, planner: LoadPlanner) -> None:
        place = self.storage_data[item.storage_index]
        try:
            value = Archive(descriptor, place.offset, place.length).value()
            if item.type == LoadItemType.BYTE_IO:
                _check_object(item.storage_index.fqn, value)
                planner.load_bytes(item, _rewritten(value))
                return
        except PickleError as error:
            raise refusal(Path(self.path), described(place), error) from error
        values = _narrowed(value, item)
        target = planner.resolve_tensor(item).detach()
        if values is None or values.shape != target.shape:
            raise refusal(
                Path(self.path), described(place), PickleError(f"no {label(item.storage_index.fqn)} is there")
            )
        target.copy_(values)
        planner.commit_tensor(item, target)


def described(place: StorageInfo) -> str:
    """Where a part of a checkpoint lies, for a message."""
    return f"{label(place.relative_path)} at byte {place.offset}"


def check_pickles(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Read the index, and of every other pickle in the folder but tensors the ``part`` of ``parts``; keep nothing.

    Raises:
        DamagedCheckpoint: one of them is no plain data.
    """
    index = read_index(folder)
    objects = sorted((key.fqn, place) for key, place in index.storage_data.items() if key.offset is None)
    for name, place in objects[part::parts]:
        _read_object(folder, name, place)
    for path in sorted(folder.glob("rng_*.pt"))[part::parts]:
        read_random_states(path)
    if part == 0:
        read_common(folder)


def read_random_states(path: Path) -> dict[str, Any]:
    """Random states of one rank as bytes, uint8 ``[size]``: ``cpu``, ``cuda`` or None, and ``tracker`` by name.

    Raises:
        DamagedCheckpoint: the file is damaged or holds anything else.
    """
    try:
        state = read_archive(path)
        if not (isinstance(state, dict) and isinstance(state.get("tracker"), dict) and "cuda" in state):
            raise PickleError("it has no random states")
        if not all(map(_is_bytes, [state.get("cpu"), *state["tracker"].values()])):
            raise PickleError("it has something else where a random state should be")
        if state["cuda"] is not None and not _is_bytes(state["cuda"]):
            raise PickleError("it has something else where a random state should be")
    except (OSError, PickleError) as error:
        raise refusal(path.parent, path.name, error) from error
    return state


def _is_bytes(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.dim() == 1


def _read_object(folder: Path, name: str, place: StorageInfo) -> None:
    try:
        descriptor = os.open(folder / place.relative_path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            _check_object(name, Archive(descriptor, place.offset, place.length).value())
        finally:
            os.close(descriptor)
    except (OSError, PickleError) as error:
        raise refusal(folder, described(place), error) from error


def _check_object(name: str, value: Any) -> None:
    """Transformer Engine unpickles the extra state of a module by itself; only empty ones are let through."""
    if _EXTRA_STATE in name and not _is_empty(value):
        raise PickleError(f"{label(name)} has a state of its own, which is not supported")


def _is_empty(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return all(_is_empty(each) for each in (value.values() if isinstance(value, dict) else value))
    if isinstance(value, torch.Tensor):
        return value.numel() == 0
    return value is None or (isinstance(value, io.BytesIO) and not value.getbuffer().nbytes)


def _rewritten(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def _narrowed(value: Any, item: ReadItem) -> torch.Tensor | None:
    """The part of a stored tensor that is asked for."""
    offsets, lengths = item.storage_offsets, item.lengths
    if not isinstance(value, torch.Tensor) or not value.dim() == len(offsets) == len(lengths):
        return None
    for dim, (start, count) in enumerate(zip(offsets, lengths, strict=True)):
        if start + count > value.shape[dim]:
            return None
        value = value.narrow(dim, start, count)
    return value


def repair_strategy(module: Any, without_cuda: bool) -> None:
    """Gives the imported ``dist_checkpointing.strategies.torch`` the plain reader."""
    module._get_filesystem_reader = lambda folder, *args, **kwargs: PlainReader(folder)
    module.FileSystemReader = PlainReader


def repair_common(module: Any, without_cuda: bool) -> None:
    """Gives the imported ``dist_checkpointing.strategies.common`` a plain reading of ``common.pt``."""
    module.load_common = lambda folder: read_common(Path(folder))
