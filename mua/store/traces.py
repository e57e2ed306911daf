"""Trajectories as JSON lines, complete enough to read, to replay and to train from.

One file per step, ``step_000012.jsonl``, one :class:`~mua.types.Trajectory` per line. Scalars, messages and details are
plain JSON. The arrays of a segment are base64 of their little-endian bytes, which keeps float32 bit for bit (decimal
text would need nine digits) in a third of the space. To look into one by hand::

    numpy.frombuffer(base64.b64decode(line["segments"][0]["ids"]), "<i4")

with ``<i4`` for ids, version and turn, ``<f4`` for logprobs and a teacher's, ``u1`` for provenance.

Expert choices, where the engine recorded them, are too many for text (384 a token for a policy of 48 layers): they lie
beside the lines in ``step_000012.experts``, raw, one row a token, and a line names offset, shape and type.

A store's trajectories are written as such lines, or as Parquet, and runs that kept no store are read into one.
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mua.store.tables import episodes, json_text, parts, python_scalar, runs, tasks
from mua.store.trajectories import SEGMENT_DTYPES, EpisodeKey, trajectory_inserts
from mua.store.writer import Insert, Write
from mua.types import EVALUATION_ORDINALS, Json, Outcome, Provenance, Segment, Trajectory
from mua.utils.atomic import replacing
from mua.utils.errors import ConfigError, MuaError
from mua.utils.files import naming, private_opener
from mua.utils.strict_json import MAX_FILE_DEPTH, is_number, open_file, printable, read_json

log = logging.getLogger(__name__)

FORMAT = 1


class TraceError(MuaError):
    """A trace file holds a line that is not a trajectory. The message names file and line."""


def trace_file(folder: Path, step: int) -> Path:
    """Where the trajectories of ``step`` lie in a trace folder."""
    return folder / f"step_{step:06d}.jsonl"


def experts_file(path: Path) -> Path:
    """Where the expert choices of the trace file ``path`` lie."""
    return path.with_suffix(".experts")


def read_traces(path: Path) -> Iterator[Trajectory]:
    """The trajectories of a trace file, or of all files of a trace folder in order of steps.

    An unfinished last line, left by a killed run, is skipped with a logged warning; any other broken line raises
    :class:`TraceError`. A last line that is whole but for its newline is read.
    """
    for one in sorted(path.glob("step_*.jsonl")) if path.is_dir() else [path]:
        with open_file(one) as file:
            for number, line in enumerate(file, start=1):
                try:
                    trajectory = decode_trajectory(line, experts_file(one))
                except OSError as error:
                    raise TraceError(f"{one}:{number}: its expert choices are missing: {error.filename}") from error
                except (ValueError, KeyError, TypeError) as error:
                    if line.endswith(b"\n"):
                        what = describe_line_error(error)
                        raise TraceError(f"{one}:{number}: not a trajectory: {what}") from error
                    log.warning("%s:%d: the last line is unfinished (the writer was killed); skipped", one, number)
                    break
                yield trajectory


def describe_line_error(error: Exception) -> str:
    """What is wrong with a record, on one line."""
    return printable(f"{type(error).__name__}: {error}")


def encode_trajectory(trajectory: Trajectory, experts: BinaryIO | None = None) -> str:
    """One line of JSON, without the newline; expert choices are appended to the binary file ``experts``.

    All ASCII: what a policy writes into tool arguments may hold lone surrogates, which UTF-8 cannot carry. Messages,
    metrics and details must be plain JSON (string keys, lists); numpy scalars become Python's.
    """
    record: Json = {"format": FORMAT}
    for field in dataclasses.fields(trajectory):
        record[field.name] = getattr(trajectory, field.name)
    record["outcome"] = trajectory.outcome.value
    record["segments"] = []
    for segment in trajectory.segments:
        written: Json = {}
        for name, kind in SEGMENT_DTYPES.items():
            if (array := getattr(segment, name)) is not None:
                written[name] = base64.b64encode(np.ascontiguousarray(array, dtype=kind).tobytes()).decode()
        if segment.experts is not None:
            if experts is None:
                raise ValueError("expert choices need a file of their own")
            kind = f"<u{segment.experts.itemsize}"
            written["experts"] = {"offset": experts.tell(), "shape": list(segment.experts.shape), "type": kind}
            experts.write(np.ascontiguousarray(segment.experts, dtype=kind).tobytes())
        record["segments"].append(written)
    return json.dumps(record, separators=(",", ":"), default=python_scalar)


def decode_trajectory(line: str | bytes, experts: Path | None = None) -> Trajectory:
    """The exact inverse of :func:`encode_trajectory`. Raises ValueError, KeyError or TypeError on anything else."""
    return trajectory_from_json(read_json(line, strict=False, depth=MAX_FILE_DEPTH), experts)


def trajectory_from_json(record: Any, experts: Path | None = None) -> Trajectory:
    """A trajectory from the JSON of its line; raises as :func:`decode_trajectory`."""
    _require(record, dict, "the line")
    fields = dict(record)
    if fields.pop("format") != FORMAT:
        raise ValueError(f"this version reads trace format {FORMAT}")
    for name, kind in _KINDS.items():
        if name in fields:
            _require(fields[name], kind, name)
    for name, kind in _MEMBERS.items():
        holder = fields.get(name, ())
        for member in holder.values() if isinstance(holder, dict) else holder:
            _require(member, kind, f"a member of {name}")
    fields["outcome"] = Outcome(fields["outcome"])
    fields["segments"] = [_decode_segment(segment, experts) for segment in fields["segments"]]
    return Trajectory(**fields)


_NUMBER = (int, float)
_KINDS: dict[str, type | tuple[type, ...]] = {
    "task_id": str, "ordinal": int, "sample": int, "segments": list, "turn_rewards": list, "reward": _NUMBER,
    "success": bool, "outcome": str, "messages": list, "metrics": dict, "details": dict, "attempts": int,
    "error": (str, type(None)), "domain": str, "sampling": dict,
}  # fmt: skip
_MEMBERS: dict[str, type | tuple[type, ...]] = {
    "segments": dict, "turn_rewards": _NUMBER, "messages": dict, "metrics": _NUMBER,
}  # fmt: skip


def _require(value: Any, kind: type | tuple[type, ...], name: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise TypeError(f"{name} cannot be a {type(value).__name__}")
    if isinstance(value, int) and not is_number(value):
        raise ValueError(f"{name} is too large")


def _decode_segment(record: Json, experts: Path | None) -> Segment:
    arrays: dict[str, Any] = {}
    for name, kind in SEGMENT_DTYPES.items():
        if name not in record and name == "teacher_logprobs":
            continue
        _require(record[name], str, "an array")
        stored = np.frombuffer(base64.b64decode(record[name], validate=True), dtype=kind)
        arrays[name] = stored.astype(stored.dtype.newbyteorder("="))  # writable, in the machine's byte order
    if arrays["provenance"].max(initial=0) > max(Provenance):
        raise ValueError("a token has a provenance that there is not")
    if "experts" not in record:
        return Segment(**arrays)
    place = record["experts"]
    _require(place, dict, "experts")
    if experts is None or place["type"] not in ("<u1", "<u2"):
        raise ValueError("expert choices lie in a file of their own, one or two bytes each")
    rows, columns = place["shape"]
    offset, dtype = place["offset"], np.dtype(place["type"])
    for value in (rows, columns, offset):
        _require(value, int, "a place of expert choices")
    with open_file(experts) as file:
        end = offset + rows * columns * dtype.itemsize
        tokens, size = len(arrays["ids"]), os.fstat(file.fileno()).st_size
        if rows != tokens or columns < 0 or not 0 <= offset <= end <= size:
            raise ValueError("the place of the expert choices is not in their file")
        file.seek(offset)
        chosen: Any = np.frombuffer(file.read(end - offset), dtype=dtype).reshape(rows, columns)
    return Segment(**arrays, experts=chosen.astype(dtype.newbyteorder("=")))


_ROWS = 64
"""Trajectories of one row group, which are in memory together."""


def write_traces(path: Path, found: Iterable[Trajectory]) -> int:
    """Write ``path`` (one trajectory a line), and its expert choices beside it; both are there whole or as before.

    Gives the number of trajectories. Raises :class:`DiskError`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    count, beside = 0, experts_file(path)
    with (
        naming(path),
        replacing(path) as new,
        open(new, "w", encoding="ascii", opener=private_opener) as file,
        replacing(beside) as other,
        open(other, "wb", opener=private_opener) as experts,
    ):
        for trajectory in found:
            file.write(encode_trajectory(trajectory, experts) + "\n")
            count += 1
    if not beside.stat().st_size:
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
    scalar = {
        "domain": pa.string(), "task_json": pa.string(), "ordinal": pa.int64(), "sample": pa.int32(),
        "attempts": pa.int32(), "outcome": pa.string(), "scored": pa.bool_(), "passing": pa.bool_(),
        "reward": pa.float64(), "success": pa.bool_(), "turn_rewards": pa.list_(pa.float64()),
        "error_json": pa.string(), "messages_json": pa.string(), "metrics_json": pa.string(),
        "details_json": pa.string(),
    }  # fmt: skip
    arrays = {name: pa.list_(pa.list_(pa.from_numpy_dtype(kind))) for name, kind in SEGMENT_DTYPES.items()}
    schema = pa.schema(scalar | arrays | {"experts": pa.list_(pa.list_(pa.list_(pa.uint16())))})

    def row(trajectory: Trajectory) -> dict[str, Any]:
        values: dict[str, Any] = {"outcome": trajectory.outcome.value, "task_json": json_text(trajectory.task_id)}
        for name in scalar.keys() - values:
            value = getattr(trajectory, name.removesuffix("_json"))
            values[name] = json_text(value) if name.endswith("_json") else value
        for name in (*SEGMENT_DTYPES, "experts"):
            found = (getattr(segment, name) for segment in trajectory.segments)
            values[name] = [None if array is None else array.tolist() for array in found]
        return values

    count, rest = 0, iter(found)
    with (
        naming(path),
        replacing(path) as new,
        open(new, "wb", opener=private_opener) as file,
        pq.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        while some := list(itertools.islice(rest, _ROWS)):
            writer.write_table(pa.Table.from_pylist([row(trajectory) for trajectory in some], schema=schema))
            count += len(some)
    return count


def exporter(path: Path) -> Callable[[Path, Iterable[Trajectory]], int]:
    """By the end of the file's name. Raises :class:`MuaError` for another one."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise MuaError(f"{path}: name a file that ends in .jsonl or .parquet")
    return write_traces if path.suffix == ".jsonl" else export_parquet


def import_writes(run: str, files: Sequence[Path], *, config: Json | None = None) -> Iterator[Write]:
    """A run of its own with the trajectories of trace files or folders of them; ``config`` is what it was made with.

    The step in a file's name (``step_000012.jsonl``) is the one that took its groups. Raises
    :class:`mua.store.traces.TraceError` for a broken line, :class:`ConfigError` where there is no trajectory.
    """
    now = time.time()
    yield Insert(runs, [{
        "id": run, "output": str(files[0].absolute()), "name": "imported", "state": "done", "started_at": now,
        "ended_at": now, "config": config,
    }])  # fmt: skip
    yield Insert(parts, [{"run_id": run, "part": 1, "from_step": 0, "started_at": now}])
    count = 0
    for file in (one for path in files for one in (sorted(path.glob("step_*.jsonl")) if path.is_dir() else [path])):
        found = re.fullmatch(r"step_(\d+)", file.stem)
        step = int(found.group(1)) if found else None
        groups: dict[int, list[Trajectory]] = {}
        for trajectory in read_traces(file):
            groups.setdefault(trajectory.ordinal, []).append(trajectory)
        for ordinal, members in groups.items():
            evaluation = ordinal >= EVALUATION_ORDINALS
            round_ = (step or 0) + 1 if evaluation else 0
            yield Insert(tasks, [{
                "run_id": run, "round": round_, "ordinal": ordinal, "kind": "evaluation" if evaluation else "train",
                "domain": members[0].domain, "task_id": members[0].task_id, "size": len(members), "made_at": now,
                "state": "complete" if step is None else "taken", "taken_step": None if evaluation else step,
            }])  # fmt: skip
            for trajectory in members:
                key = EpisodeKey(run, 1, round_, ordinal, trajectory.sample, trajectory.attempts)
                yield from trajectory_inserts(key, trajectory, ended_at=now)
                yield Insert(episodes, [{
                    "run_id": run, "round": round_, "ordinal": ordinal, "sample": trajectory.sample, "state": "done",
                    "attempts": trajectory.attempts, "trajectory_id": key.trajectory_id,
                }])  # fmt: skip
            count += len(members)
    if not count:
        raise ConfigError(f"{files[0]}: no trajectory to import")
