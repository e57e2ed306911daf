"""Trajectories as files: JSON lines in the form of trace files, and Parquet. A file is there whole or not at all."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mua.store.column_types import json_text
from mua.store.records import SEGMENT_ARRAYS
from mua.store.traces import encode_trajectory, experts_file
from mua.types import Segment, Trajectory
from mua.utils.errors import DiskError, MuaError
from mua.utils.files import naming

_ROWS = 64
"""Trajectories of one row group, which are in memory together."""


def export_lines(path: Path, found: Iterable[Trajectory]) -> int:
    """Write ``path`` (one trajectory a line, as :mod:`mua.store.traces`), and its expert choices beside it.

    Gives the number of trajectories. Raises :class:`DiskError`.
    """
    count = 0
    with _whole(path) as partial, _whole(experts_file(path)) as beside, naming(path):
        with partial.open("w", encoding="ascii") as file, beside.open("wb") as experts:
            for trajectory in found:
                file.write(encode_trajectory(trajectory, experts) + "\n")
                count += 1
            empty = experts.tell() == 0
        if empty:
            beside.unlink()
    return count


def export_parquet(path: Path, found: Iterable[Trajectory]) -> int:
    """Write ``path``, a row a trajectory; arrays are a list a segment, text fields that hold JSON end in ``_json``.

    Gives the number of trajectories. Raises :class:`DiskError`, and :class:`MuaError` where pyarrow is missing.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MuaError("a Parquet file needs pyarrow: pip install 'mua[parquet]', or export to .jsonl") from None
    schema = _schema(pa)
    count, rest = 0, iter(found)
    with _whole(path) as partial, naming(path), pq.ParquetWriter(partial, schema, compression="zstd") as writer:
        while some := list(itertools.islice(rest, _ROWS)):
            writer.write_table(pa.Table.from_pylist([_row(trajectory) for trajectory in some], schema=schema))
            count += len(some)
    return count


def exporter(path: Path) -> Callable[[Path, Iterable[Trajectory]], int]:
    """By the end of the file's name. Raises :class:`MuaError` for another one."""
    chosen = {".jsonl": export_lines, ".parquet": export_parquet}.get(path.suffix)
    if chosen is None:
        raise MuaError(f"{path}: name a file that ends in .jsonl or .parquet")
    return chosen


_LISTS = {"ids": "int32", "provenance": "uint8", "logprobs": "float32", "version": "int32", "turn": "int32",
          "teacher_logprobs": "float32"}  # fmt: skip


def _schema(pa: Any) -> Any:
    scalar = {
        "domain": pa.string(), "task_json": pa.string(), "ordinal": pa.int64(), "sample": pa.int32(),
        "attempts": pa.int32(), "outcome": pa.string(), "scored": pa.bool_(), "passing": pa.bool_(),
        "reward": pa.float64(), "success": pa.bool_(), "turn_rewards": pa.list_(pa.float64()),
        "error_json": pa.string(), "messages_json": pa.string(), "metrics_json": pa.string(),
        "details_json": pa.string(),
    }  # fmt: skip
    arrays = {name: pa.list_(pa.list_(getattr(pa, kind)())) for name, kind in _LISTS.items()}
    return pa.schema(scalar | arrays | {"experts": pa.list_(pa.list_(pa.list_(pa.uint16())))})


def _row(trajectory: Trajectory) -> dict[str, Any]:
    names = ("domain", "ordinal", "sample", "attempts", "scored", "passing", "reward", "success", "turn_rewards")
    values = {name: getattr(trajectory, name) for name in names}
    parsed = {
        "task": trajectory.task_id, "error": trajectory.error, "messages": trajectory.messages,
        "metrics": trajectory.metrics, "details": trajectory.details,
    }  # fmt: skip
    return (
        values
        | {"outcome": trajectory.outcome.value}
        | {f"{name}_json": json_text(value) for name, value in parsed.items()}
        | {name: [_list(segment, name) for segment in trajectory.segments] for name in (*SEGMENT_ARRAYS, "experts")}
    )


def _list(segment: Segment, name: str) -> list[Any] | None:
    array = getattr(segment, name)
    return None if array is None else array.tolist()


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A hidden file to write, which takes the place of ``path`` at the end of the block, if it is still there."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        with naming(path):
            if partial.exists():
                os.replace(partial, path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise DiskError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)
