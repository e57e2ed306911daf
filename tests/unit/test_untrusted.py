"""Reading JSON and files of others: what is refused and how, and that nothing else is raised.

Not covered: damaged files of each kind, which the fuzzers make (tests/fuzz).
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mua.utils.strict_json import (
    MAX_DEPTH,
    JsonError,
    is_number,
    open_file,
    printable,
    read_file,
    read_json,
    read_json_at,
)

PLAIN: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(PLAIN, st.booleans())
def test_what_json_holds_is_read_as_it_is(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert read_json(text) == value
    assert read_json(f" \n{text}\r\n".encode()) == value
    assert read_json_at(f"x{text}", 1) == (value, len(text) + 1)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Expecting value"),
        ('["a\nb"]', "Invalid control character"),
        ("[1] 2", r"text follows the JSON value \(column 5\)"),
        ("[" * 100_000, "nested too deeply"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested too deeply"),
        ("9" * 5000, "an integer has too many digits"),
        (b"[\xff]", r"not UTF-8 text \(byte 1\)"),
        ("\ufeff[]", "Expecting value"),
    ],
)
def test_what_is_no_json_is_one_error_with_its_place(text: str | bytes, says: str, strict: bool) -> None:
    with pytest.raises(JsonError, match=says):
        read_json(text, strict=strict)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[NaN]", "NaN is no JSON value"),
        ("1e999", "too large"),
        ('{"a": 1, "b": {"c": 1, "c": 1}}', "the key 'c' appears twice"),
        ('["\\ud800"]', "unpaired surrogate"),
        ('["\ud800"]', "unpaired surrogate"),
    ],
)
def test_only_a_strict_reader_refuses_what_others_read_otherwise(text: str, says: str) -> None:
    with pytest.raises(JsonError, match=says):
        read_json(text)
    read_json(text, strict=False)
    with pytest.raises(JsonError, match="the key 'c' has two values, 1 and 2"):
        read_json('{"b": {"c": 1, "c": 2}}', strict=False, agreeing=True)
    assert read_json('{"b": {"c": 1, "c": 2}}', strict=False) == {"b": {"c": 2}}


def test_the_depth_is_counted_not_the_brackets() -> None:
    assert len(read_json("[" + "[]," * 10_000 + "[]]")) == 10_001
    assert read_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert read_json("[" * 150 + "]" * 150, depth=150)
    assert read_json('["' + "[" * 1000 + '"]') == ["[" * 1000]


@given(st.text(alphabet='[]{}":,\\\n0e9-.uDdaN', max_size=30) | st.binary(max_size=20), st.booleans())
def test_any_text_is_a_value_or_an_error(text: str | bytes, strict: bool) -> None:
    with suppress(JsonError):
        json.dumps(read_json(text, strict=strict), allow_nan=not strict)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """A FIFO that nobody writes to would be waited for without end."""
    os.mkfifo(tmp_path / "fifo")
    for path, reason in (
        (tmp_path / "fifo", "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "gone", "No such file or directory"),
        (Path("a\0b"), "no file can have this name"),
        (Path("\ud800"), "no file can have this name"),
        (Path("x" * 5000), "File name too long"),
    ):
        with pytest.raises(OSError, match=reason):
            open_file(path)
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    assert read_file(tmp_path / "link") == b"text"


def test_messages_stay_on_one_line() -> None:
    assert printable("a\nb\x1b[2J\ud800é") == "a\\nb\\x1b[2J\\ud800é"
    assert printable("x" * 600, 10) == "x" * 10 + "..."
    assert [is_number(value) for value in (1, 0.5, 10**400, "1", None)] == [True, True, False, False, False]
