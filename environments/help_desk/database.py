"""The shop's database: one private in-memory SQLite database an episode, and the comparison of two of them.

The schema is small on purpose: three tables that tools read and write. A database is rebuilt from a
:class:`World`, plain data that a task carries, so that gold and actual state start from the same rows.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

# The words that the shop is made of: people, products, cities, order numbers.

_NAMES = (
    "Ada Abel Alma Amir Anna Arno Bea Ben Berta Bilal Cara Cleo Clara Dan Dario Dora Edda Elias Elsa Emil Erik Eva "
    "Farid Felix Finn Flora Frida Gina Greta Gustav Hanna Hugo Ida Ines Iris Ivan Jan Jonas Judith Kamal Karl Kira "
    "Lara Lea Leo Lina Luca Mara Marie Max Mila Mona Nadia Nils Nora Olga Omar Oscar Otto Paul Petra Pia Rita Robin "
    "Rosa Sami Sara Silas Sofia Sven Tara Theo Tilda Uwe Vera Victor Wanda Yara Yusuf Zita"
)
NAMES = tuple(_NAMES.split())
_PRODUCTS = (
    "Lamp Desk Chair Clock Radio Kettle Mirror Carpet Vase Shelf Basket Blanket Bottle Bucket Candle Drum Easel Frame "
    "Guitar Hammer Helmet Jacket Ladder Mug Pillow Rake Scarf Teapot Toaster Wallet"
)
PRODUCTS = tuple(_PRODUCTS.split())
CITIES = ("Oslo", "Rome", "Paris", "Lima", "Cairo", "Quito", "Delhi", "Tokyo", "Bonn", "Kyiv", "Doha", "Riga")
STATUSES = ("pending", "shipped", "delivered")
FIRST_ORDER, LAST_ORDER = 1000, 9999


Row: TypeAlias = tuple[Any, ...]
Snapshot: TypeAlias = dict[str, dict[str, Row]]
"""Table name -> primary key -> row."""

SCHEMA = """
CREATE TABLE customers (id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE orders (
    id TEXT PRIMARY KEY,
    customer TEXT NOT NULL REFERENCES customers (id),
    status TEXT NOT NULL CHECK (status IN ('pending', 'shipped', 'delivered', 'cancelled')),
    place TEXT NOT NULL,
    destination TEXT NOT NULL
);
CREATE TABLE items (
    id TEXT PRIMARY KEY,
    order_id TEXT NOT NULL REFERENCES orders (id),
    product TEXT NOT NULL,
    price INTEGER NOT NULL,
    final_sale INTEGER NOT NULL,
    returned INTEGER NOT NULL DEFAULT 0
);
"""
TABLES = ("customers", "orders", "items")


@dataclass(frozen=True, slots=True)
class World:
    """The rows of one shop, in the column order of :data:`SCHEMA` (``returned`` left out of items)."""

    customers: list[list[Any]]
    orders: list[list[Any]]
    items: list[list[Any]]

    def order(self, order: str) -> dict[str, Any]:
        """One order's columns by name; KeyError if there is none."""
        for row in self.orders:
            if row[0] == order:
                return dict(zip(("id", "customer", "status", "place", "destination"), row, strict=True))
        raise KeyError(order)

    def items_of(self, order: str) -> list[dict[str, Any]]:
        """The items of one order, by column name."""
        names = ("id", "order_id", "product", "price", "final_sale")
        return [dict(zip(names, row, strict=True)) for row in self.items if row[1] == order]


class Database:
    """One shop's state behind the statements the tools need."""

    def __init__(self, world: World) -> None:
        # The environment manager calls from one worker thread at a time, but not always from the same one.
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        self._connection.deserialize(_empty())  # several times as fast as running SCHEMA
        self._connection.executemany("INSERT INTO customers VALUES (?, ?)", world.customers)
        self._connection.executemany("INSERT INTO orders VALUES (?, ?, ?, ?, ?)", world.orders)
        self._connection.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?, 0)", world.items)
        self._connection.row_factory = sqlite3.Row

    def rows(self, sql: str, *parameters: str) -> list[dict[str, Any]]:
        """Run a query; one dictionary a row."""
        return [dict(row) for row in self._connection.execute(sql, parameters)]

    def write(self, sql: str, *parameters: str) -> int:
        """Run a statement; the number of rows it changed."""
        return self._connection.execute(sql, parameters).rowcount

    def snapshot(self) -> Snapshot:
        """Every row of every table, by primary key."""
        return {table: dict(self._table(table)) for table in TABLES}

    def close(self) -> None:
        self._connection.close()

    def _table(self, table: str) -> Iterator[tuple[str, Row]]:
        for row in self._connection.execute(f"SELECT * FROM {table}"):
            yield row[0], tuple(row)


@cache
def _empty() -> bytes:
    """A database of empty tables, as SQLite keeps it."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        return connection.serialize()


def difference(actual: Snapshot, gold: Snapshot) -> list[str]:
    """What differs, one readable line a row; empty when the two databases are equal."""
    lines = []
    for table in TABLES:
        for key in sorted(actual[table].keys() | gold[table].keys()):
            have, want = actual[table].get(key), gold[table].get(key)
            if have != want:
                lines.append(f"{table} {key}: is {have}, should be {want}")
    return lines
