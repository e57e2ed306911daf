"""Column types that keep what models, users and tools wrote exactly, on SQLite and PostgreSQL alike.

PostgreSQL's text cannot hold the character NUL, and UTF-8 no unpaired surrogate; both occur in what a policy samples.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import sqlalchemy as sa
from sqlalchemy import BigInteger, Dialect, Double, Integer, LargeBinary, Text
from sqlalchemy.types import TypeDecorator

from mua.utils.strict_json import MAX_FILE_DEPTH, read_json

_MARK = "\u241bjson:"
"""Begins a text that is stored as JSON, because it holds what a database's text cannot."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def json_text(value: object) -> str:
    """``value`` as JSON on one line; other characters than ASCII stay legible, unpaired surrogates are escaped.

    numpy scalars become Python's. Raises TypeError for what is no plain JSON.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain)
    return _SURROGATE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def parsed_json(text: str | bytes) -> Any:
    """The value of :func:`json_text`. Raises :class:`mua.utils.strict_json.JsonError`."""
    return read_json(text, strict=False, depth=MAX_FILE_DEPTH)


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"the store cannot hold a {type(value).__name__}")


class JsonText(TypeDecorator[Any]):
    """A JSON value as text, so that NaN of a metric and NUL of a message pass; SQL reads it with its JSON functions."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json_text(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else parsed_json(value)


class FreeText(TypeDecorator[str]):
    """Text of any origin, stored as it is; as marked JSON where it holds NUL or an unpaired surrogate."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or not (value.startswith(_MARK) or _UNSTORABLE.search(value)):
            return value
        return _MARK + json_text(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or not value.startswith(_MARK):
            return value
        text = parsed_json(value.removeprefix(_MARK))
        return text if isinstance(text, str) else value


BigInt = BigInteger().with_variant(Integer(), "sqlite")
"""64 bits; on SQLite the type whose primary keys count by themselves."""
Seconds: sa.Double[float] = Double()
"""Since 1970 (UTC) for moments, plain for durations."""
Blob = LargeBinary()
