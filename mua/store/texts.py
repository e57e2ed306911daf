"""Bodies of messages, stored once under their hash, and lists of messages that cost only what is new in them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from mua.store.arrays import compress, decompress
from mua.store.column_types import json_text, parsed_json
from mua.store.faults import DamagedRecord
from mua.store.tables import texts
from mua.store.writer import Insert
from mua.types import Json

_MANY = 500


def text_hash(value: Any) -> str:
    """32 hexadecimal digits (BLAKE2b, 128 bits) of a JSON value: a message, a list of tools, a tool's result."""
    return _hash(_body(value))


def hashed_text(value: Any) -> tuple[str, bytes]:
    """The hash of a JSON value, and the body that :func:`text_row` takes."""
    body = _body(value)
    return _hash(body), body


def text_row(name: str, body: bytes) -> Json:
    """The row of ``texts`` of what :func:`hashed_text` gave."""
    return {"hash": name, "body": compress(body)}


def text_inserts(values: Iterable[Any]) -> tuple[list[str], list[Insert]]:
    """The hashes of JSON values, in order, and the writes that store those that are not there."""
    found = [hashed_text(value) for value in values]
    rows = [text_row(name, body) for name, body in dict(found).items()]
    return [name for name, _ in found], [Insert(texts, rows, "keep")] if rows else []


def read_texts(connection: Connection, hashes: Iterable[str]) -> dict[str, Any]:
    """The values of ``hashes``. Raises :class:`DamagedRecord` for one that is missing or is not what it was."""
    wanted, found = list(dict.fromkeys(hashes)), {}
    for at in range(0, len(wanted), _MANY):
        chosen = sa.select(texts.c.hash, texts.c.body).where(texts.c.hash.in_(wanted[at : at + _MANY]))
        for name, blob in connection.execute(chosen):
            found[name] = check_text(name, blob)
    if missing := [name for name in wanted if name not in found]:
        raise DamagedRecord(f"text {missing[0]}: not in the store")
    return found


def check_text(name: str, blob: bytes) -> Any:
    """The value of one row of ``texts``, whose hash is compared."""
    body = decompress(blob, f"text {name}")
    if _hash(body) != name:
        raise DamagedRecord(f"text {name}: its content has another hash, {_hash(body)}")
    return parsed_json(body)


class Continuation(NamedTuple):
    """A request's messages as a difference to those of an earlier request of the same role and attempt."""

    follows: int | None
    """Its number; None: to none."""
    kept: int | None
    """How many of its messages, from the first."""
    new: list[str]
    """Hashes of those after them."""


def continuation(earlier: Mapping[int, Sequence[str]], now: Sequence[str]) -> Continuation:
    """``now`` as a difference to that of ``earlier`` (by number) with which it shares most."""
    best, longest = None, 0
    for number, messages in earlier.items():
        shared = next((i for i, (a, b) in enumerate(zip(messages, now, strict=False)) if a != b), None)
        shared = min(len(messages), len(now)) if shared is None else shared
        if shared >= longest and shared:
            best, longest = number, shared
    return Continuation(best, longest if best is not None else None, list(now[longest:]))


def message_lists(requests: Iterable[Mapping[str, Any]]) -> dict[int, list[str]]:
    """The whole lists of hashes of all requests of one role and attempt, by number.

    Raises :class:`DamagedRecord` where one goes on from a request that is not there before it.
    """
    lists: dict[int, list[str]] = {}
    for row in sorted(requests, key=lambda row: row["number"]):
        if row["messages"] is None:
            continue
        start: list[str] = []
        if row["follows"] is not None:
            if row["follows"] not in lists or not 0 <= (row["kept"] or 0) <= len(lists[row["follows"]]):
                raise DamagedRecord(
                    f"request {row['number']}: goes on from request {row['follows']}, which is not there"
                )
            start = lists[row["follows"]][: row["kept"]]
        lists[row["number"]] = [*start, *row["messages"]]
    return lists


def pack_messages(messages: Sequence[Json]) -> bytes:
    """A conversation as a blob."""
    return compress(_body(messages))


def unpack_messages(blob: bytes, what: str = "messages") -> list[Json]:
    """The inverse of :func:`pack_messages`. Raises :class:`DamagedRecord`."""
    found = parsed_json(decompress(blob, what))
    if not isinstance(found, list) or not all(isinstance(message, dict) for message in found):
        raise DamagedRecord(f"{what}: no list of messages")
    return found


def _body(value: Any) -> bytes:
    return json_text(value).encode()


def _hash(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()
