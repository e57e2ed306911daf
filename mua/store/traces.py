"""Trajectories as JSON lines, complete enough to read, to replay and to train from.

One file per step, ``step_000012.jsonl``, one :class:`~mua.types.Trajectory` per line. Scalars, messages and details are
plain JSON. The arrays of a segment are base64 of their little-endian bytes, which keeps float32 bit for bit (decimal
text would need nine digits) in a third of the space. To look into one by hand::

    numpy.frombuffer(base64.b64decode(line["segments"][0]["ids"]), "<i4")

with ``<i4`` for ids, version and turn, ``<f4`` for logprobs and a teacher's, ``u1`` for provenance.

Expert choices, where the engine recorded them, are too many for text (384 a token for a policy of 48 layers): they lie
beside the lines in ``step_000012.experts``, raw, one row a token, and a line names offset, shape and type.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mua.types import Json, Outcome, Provenance, Segment, Trajectory
from mua.utils.errors import MuaError
from mua.utils.files import LineFile, naming
from mua.utils.strict_json import MAX_FILE_DEPTH, is_number, open_file, printable, read_json

log = logging.getLogger(__name__)

FORMAT = 1
_ARRAYS = {"ids": "<i4", "provenance": "u1", "logprobs": "<f4", "version": "<i4", "turn": "<i4"}
_OPTIONAL_ARRAYS = {"teacher_logprobs": "<f4"}


class TraceError(MuaError):
    """A trace file holds a line that is not a trajectory. The message names file and line."""


class TraceWriter:
    """Writes the trajectories of each step into ``folder``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}.jsonl"

    def write(self, step: int, trajectories: Iterable[Trajectory]) -> Path:
        """Write the file of ``step``, replacing what an interrupted run left there. Gives its path.

        Raises :class:`DiskError`; what was written before consists of whole lines.
        """
        path = self.path(step)
        experts = experts_file(path)
        with LineFile(path, replace=True) as file, naming(experts), experts.open("wb") as beside:
            for trajectory in trajectories:
                line = encode_trajectory(trajectory, beside)
                beside.flush()  # what the line names is there before the line
                file.write(line)
            empty = beside.tell() == 0
        if empty:
            experts.unlink()
        return path


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
                        what = describe_record_error(error)
                        raise TraceError(f"{one}:{number}: not a trajectory: {what}") from error
                    log.warning("%s:%d: the last line is unfinished (the writer was killed); skipped", one, number)
                    break
                yield trajectory


def describe_record_error(error: Exception) -> str:
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
        for name, kind in (_ARRAYS | _OPTIONAL_ARRAYS).items():
            if (array := getattr(segment, name)) is not None:
                written[name] = base64.b64encode(np.ascontiguousarray(array, dtype=kind).tobytes()).decode()
        if segment.experts is not None:
            if experts is None:
                raise ValueError("expert choices need a file of their own")
            kind = f"<u{segment.experts.itemsize}"
            written["experts"] = {"offset": experts.tell(), "shape": list(segment.experts.shape), "type": kind}
            experts.write(np.ascontiguousarray(segment.experts, dtype=kind).tobytes())
        record["segments"].append(written)
    return json.dumps(record, separators=(",", ":"), default=_plain)


def decode_trajectory(line: str | bytes, experts: Path | None = None) -> Trajectory:
    """The exact inverse of :func:`encode_trajectory`. Raises ValueError, KeyError or TypeError on anything else."""
    return trajectory_from_record(read_json(line, strict=False, depth=MAX_FILE_DEPTH), experts)


def trajectory_from_record(record: Any, experts: Path | None = None) -> Trajectory:
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
    present = _ARRAYS | {name: kind for name, kind in _OPTIONAL_ARRAYS.items() if name in record}
    arrays: dict[str, Any] = {}
    for name, kind in present.items():
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


def _plain(value: object) -> object:
    """numpy scalars, which metrics and details may hold, as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a trace cannot hold a {type(value).__name__}")
