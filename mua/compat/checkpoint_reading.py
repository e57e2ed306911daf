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
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from mua.compat.plain_archive import Archive, read_archive
from mua.compat.plain_index import StorageInfo, parse_index
from mua.compat.plain_pickle import PickleError
from mua.utils.errors import DamagedCheckpoint
from mua.utils.strict_json import label, open_regular

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
        with open(open_regular(path), "rb") as file:
            found = os.fstat(file.fileno())
            identity = (str(path), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            if identity not in _latest:
                index = parse_index(file.read(), cache(lambda name: os.stat(folder / name).st_size))
                forget_index()
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


@contextmanager
def plain_part(folder: Path, where: str | StorageInfo) -> Iterator[None]:
    """A block that reads a part of a checkpoint: raises DamagedCheckpoint, in one line, if it is no plain data."""
    try:
        yield
    except (OSError, PickleError) as error:
        part = where if isinstance(where, str) else f"{label(where.relative_path)} at byte {where.offset}"
        raise DamagedCheckpoint(
            f"checkpoint {folder}: {part} is damaged or holds what no checkpoint holds ({error}); do not load it"
        ) from error


def read_common(folder: Path) -> Any:
    """The common state that a checkpoint of an older format keeps in a file of its own; None where there is none.

    Raises:
        DamagedCheckpoint: it is damaged, or holds what no checkpoint holds.
    """
    with plain_part(folder, COMMON):
        return read_archive(folder / COMMON) if (folder / COMMON).exists() else None


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
            with open(open_regular(Path(self.path) / name), "rb") as file:
                for item in items:
                    place = self.storage_data[item.storage_index]
                    with plain_part(Path(self.path), place):
                        self._read(Archive(file.fileno(), place.offset, place.length).value(), item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, value: Any, item: ReadItem, planner: LoadPlanner) -> None:
        if item.type == LoadItemType.BYTE_IO:
            _check_object(item.storage_index.fqn, value)
            buffer = io.BytesIO()
            torch.save(value, buffer)
            buffer.seek(0)
            planner.load_bytes(item, buffer)
            return
        target = planner.resolve_tensor(item).detach()
        if isinstance(value, torch.Tensor) and value.dim() == target.dim():
            ends = map(sum, zip(item.storage_offsets, item.lengths, strict=True))
            value = value[tuple(map(slice, item.storage_offsets, ends))]
        if not isinstance(value, torch.Tensor) or value.shape != target.shape:
            raise PickleError(f"no {label(item.storage_index.fqn)} is there")
        target.copy_(value)
        planner.commit_tensor(item, target)


def check_pickles(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Read the index, and of every other pickle in the folder but tensors the ``part`` of ``parts``; keep nothing.

    Raises:
        DamagedCheckpoint: one of them is no plain data.
    """
    index = read_index(folder)
    objects = sorted((key.fqn, place) for key, place in index.storage_data.items() if key.offset is None)
    for name, place in objects[part::parts]:
        with plain_part(folder, place), open(open_regular(folder / place.relative_path), "rb") as file:
            _check_object(name, Archive(file.fileno(), place.offset, place.length).value())
    for path in sorted(folder.glob("rng_*.pt"))[part::parts]:
        read_random_states(path)
    if part == 0:
        read_common(folder)


def read_random_states(path: Path) -> dict[str, Any]:
    """Random states of one rank as bytes, uint8 ``[size]``: ``cpu``, ``cuda`` or None, and ``tracker`` by name.

    Raises:
        DamagedCheckpoint: the file is damaged or holds anything else.
    """
    with plain_part(path.parent, path.name):
        state = read_archive(path)
        if not (isinstance(state, dict) and isinstance(state.get("tracker"), dict) and "cuda" in state):
            raise PickleError("it has no random states")
        for value in [
            state.get("cpu"),
            *state["tracker"].values(),
            *([] if state["cuda"] is None else [state["cuda"]]),
        ]:
            if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8 or value.dim() != 1:
                raise PickleError("it has something else where a random state should be")
    return state


def _check_object(name: str, value: Any) -> None:
    """Transformer Engine unpickles the extra state of a module by itself; only empty ones are let through."""
    if _EXTRA_STATE in name and not _is_empty(value, set()):
        raise PickleError(f"{label(name)} has a state of its own, which is not supported")


def _is_empty(value: Any, seen: set[int]) -> bool:
    """Whether nothing but empty values is in ``value``; what stands in several places is looked at once."""
    if isinstance(value, list | tuple | dict):
        new = id(value) not in seen
        seen.add(id(value))
        return not new or all(_is_empty(e, seen) for e in (value.values() if isinstance(value, dict) else value))
    if isinstance(value, torch.Tensor):
        return value.numel() == 0
    return value is None or (isinstance(value, io.BytesIO) and not value.getbuffer().nbytes)


def repair_strategy(module: Any, without_cuda: bool) -> None:
    """Gives the imported ``dist_checkpointing.strategies.torch`` the plain reader."""
    module._get_filesystem_reader = lambda folder, *args, **kwargs: PlainReader(folder)
    module.FileSystemReader = PlainReader


def repair_common(module: Any, without_cuda: bool) -> None:
    """Gives the imported ``dist_checkpointing.strategies.common`` a plain reading of ``common.pt``."""
    module.load_common = lambda folder: read_common(Path(folder))
