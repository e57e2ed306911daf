"""Traces: what is read equals what was written, bit for bit; torn and broken lines are told apart.

Not covered: replaying or training from a trace (mua.users, mua.trainer).
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mua.store.traces import (
    TraceError,
    decode_trajectory,
    encode_trajectory,
    experts_file,
    read_traces,
    trace_file,
    write_traces,
)
from mua.types import Outcome, Provenance, Segment, Trajectory

TEXT = st.text(st.characters(), max_size=20)  # lone surrogates included: a policy can write "\ud800" into JSON
NUMBERS = st.floats(allow_nan=False)
PLAIN: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def array(draw: Any, length: int, element: st.SearchStrategy[Any], kind: type) -> Any:
    return np.asarray(draw(st.lists(element, min_size=length, max_size=length)), dtype=kind)


@st.composite
def segments(draw: Any) -> Segment:
    length = draw(st.integers(0, 6))
    int32 = st.integers(-(2**31), 2**31 - 1)
    return Segment(
        ids=array(draw, length, int32, np.int32),
        provenance=array(draw, length, st.sampled_from(list(Provenance)), np.uint8),
        logprobs=array(draw, length, st.floats(width=32, allow_nan=False), np.float32),
        version=array(draw, length, int32, np.int32),
        turn=array(draw, length, int32, np.int32),
    )


TRAJECTORIES = st.builds(
    Trajectory,
    task_id=TEXT,
    ordinal=st.integers(0, 2**40),
    sample=st.integers(0, 64),
    segments=st.lists(segments(), max_size=3),
    turn_rewards=st.lists(NUMBERS, max_size=3),
    reward=NUMBERS,
    success=st.booleans(),
    outcome=st.sampled_from(list(Outcome)),
    messages=st.lists(st.dictionaries(TEXT, PLAIN, max_size=3), max_size=3),
    metrics=st.dictionaries(TEXT, NUMBERS, max_size=3),
    details=st.dictionaries(TEXT, PLAIN, max_size=3),
    attempts=st.integers(1, 4),
    error=st.none() | TEXT,
)


def assert_same(left: Trajectory, right: Trajectory) -> None:
    for field in dataclasses.fields(Trajectory):
        if field.name != "segments":
            assert getattr(left, field.name) == getattr(right, field.name), field.name
    assert len(left.segments) == len(right.segments)
    for a, b in zip(left.segments, right.segments, strict=True):
        for field in dataclasses.fields(Segment):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if x is None or y is None:
                assert x is y, field.name
                continue
            assert x.shape == y.shape
            assert x.dtype == y.dtype
            assert x.tobytes() == y.tobytes(), field.name


@settings(deadline=None)
@given(TRAJECTORIES)
def test_decode_is_the_exact_inverse_of_encode(trajectory: Trajectory) -> None:
    line = encode_trajectory(trajectory)
    assert "\n" not in line
    assert_same(decode_trajectory(line), trajectory)


def example(number: int = 0) -> Trajectory:
    ids = np.arange(5, dtype=np.int32)
    provenance = np.asarray([0, 1, 3, 4, 4], dtype=np.uint8)
    logprobs = np.asarray([0, 0, 0, -0.1, -1e-30], dtype=np.float32)
    version = np.asarray([-1, -1, -1, 2, 3], dtype=np.int32)
    segment = Segment(ids, provenance, logprobs, version, np.zeros(5, np.int32))
    return Trajectory(f"task-{number}", number, 0, [segment], [1.0], 1.0, True, Outcome.USER_STOP)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_expert_choices_lie_beside_the_lines(tmp_path: Path, kind: type) -> None:
    written = [example(number) for number in range(3)]
    random = np.random.default_rng(1)
    for trajectory in written[1:]:
        (segment,) = trajectory.segments
        experts = random.integers(0, np.iinfo(kind).max + 1, (len(segment), 6)).astype(kind)
        trajectory.segments = [dataclasses.replace(segment, experts=experts)]
    write_traces(path := trace_file(tmp_path, 4), written)
    assert experts_file(path).stat().st_size == 2 * 5 * 6 * np.dtype(kind).itemsize
    for left, right in zip(read_traces(path), written, strict=True):
        assert_same(left, right)
    experts_file(path).unlink()
    with pytest.raises(TraceError, match=r"step_000004.jsonl:2: its expert choices are missing"):
        list(read_traces(path))


def test_files_are_by_step_and_a_folder_reads_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    write_traces(trace_file(folder, 12), [example(3)])
    write_traces(trace_file(folder, 2), [example(1), example(2)])
    assert [t.ordinal for t in read_traces(folder)] == [1, 2, 3]
    write_traces(trace_file(folder, 2), [example(5)])  # a step that is run again replaces its file
    assert [t.ordinal for t in read_traces(folder)] == [5, 3]


def test_a_torn_last_line_is_skipped_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_traces(path := trace_file(tmp_path, 1), [example(1), example(2)])
    path.write_bytes(path.read_bytes()[:-3])
    with caplog.at_level(logging.WARNING):
        assert [t.ordinal for t in read_traces(path)] == [1]
    assert f"{path}:2" in caplog.text
