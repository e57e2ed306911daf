"""The store on SQLite and on a real PostgreSQL: round trips bit for bit, its writer, what a user may get wrong.

Not here: what runs write (tests of recording), claims of samplers, kills of whole runs.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

import mua.store.database
from mua.store.database import HEAD, MIGRATIONS, Store
from mua.store.faults import StoreError
from mua.store.tables import metadata, runs, uses
from mua.store.trajectories import EpisodeKey, read_trajectories, trajectory_inserts
from mua.store.writer import Insert, Writer, execute
from mua.types import Outcome, Segment, Trajectory
from tests.postgres_support import PostgresServer
from tests.store_support import write_run
from tools.store_migration import FROZEN

RUN = {"id": "r", "output": "/tmp/r", "state": "running", "started_at": 1.0}


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'store.sqlite'}"
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        url = server.database()
    with Store.open(url) as opened:
        yield opened


@pytest.fixture
def with_run(store: Store) -> Store:
    with store.begin() as connection:
        execute(connection, [Insert(runs, [RUN])])
    return store


def segment(length: int, *, experts: bool = False, teacher: bool = False, seed: int = 0) -> Segment:
    draw = np.random.default_rng(seed)
    provenance = draw.integers(0, 5, length).astype(np.uint8)
    logprobs = draw.standard_normal(length).astype(np.float32)
    if length > 3:
        logprobs[:3] = np.array([np.nan, -0.0, np.inf], np.float32)
    return Segment(
        ids=draw.integers(0, 2**31 - 1, length).astype(np.int32),
        provenance=provenance,
        logprobs=logprobs,
        version=np.where(provenance == 4, 7, -1).astype(np.int32),
        turn=np.arange(length, dtype=np.int32),
        experts=draw.integers(0, 300, (length, 6)).astype(np.uint16) if experts else None,
        teacher_logprobs=logprobs[::-1].copy() if teacher else None,
    )


def trajectory(ordinal: int = 3, sample: int = 1, **changes: object) -> Trajectory:
    """One with everything that is hard to keep: NUL, unpaired surrogates, NaN, empty segments."""
    fields: dict[str, object] = {
        "task_id": "täsk\x00\ud800",
        "segments": [segment(50, experts=True), segment(0), segment(9, teacher=True, seed=1)],
        "turn_rewards": [0.1, 1 / 3, -0.0],
        "reward": 1 / 3,
        "success": True,
        "outcome": Outcome.USER_STOP,
        "messages": [{"role": "user", "content": "Grüße \x00 \udfff 𝒳", "n": 10**30}],
        "metrics": {"a": math.nan, "b": math.inf, "c": np.float32(0.1).item()},
        "details": {"deep": [[{"k": None}]]},
        "attempts": 2,
        "error": "bad \x00 byte",
        "domain": "retail",
        "passing": True,
        "sampling": {"temperature": 0.1 + 0.2, "top_p": 0.9, "logprobs_of": "softmax(logits / temperature)"},
    }
    return Trajectory(ordinal=ordinal, sample=sample, **(fields | changes))  # type: ignore[arg-type]


def same(a: Trajectory, b: Trajectory) -> None:
    for name in a.__slots__:
        if name != "segments":
            assert repr(getattr(a, name)) == repr(getattr(b, name)), name
    assert len(a.segments) == len(b.segments)
    for left, right in zip(a.segments, b.segments, strict=True):
        for name in left.__slots__:
            x, y = getattr(left, name), getattr(right, name)
            assert (x is None) == (y is None), name
            if x is not None:
                assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()), name


def key(ordinal: int = 3, sample: int = 1) -> EpisodeKey:
    return EpisodeKey("r", 1, 0, ordinal, sample, 2)


def test_trajectory_comes_back_bit_for_bit(with_run: Store) -> None:
    store = with_run
    plain = trajectory(4, 0, segments=[], metrics={}, details={}, messages=[], error=None, turn_rewards=[])
    with Writer(store) as writer:
        writer.put(lambda: trajectory_inserts(key(), trajectory(), ended_at=2.0))
        writer.put(trajectory_inserts(key(4, 0), plain, ended_at=2.0))
    with store.read() as connection:
        found = list(read_trajectories(connection, [key(4, 0).trajectory_id, key().trajectory_id]))
    same(plain, found[0])
    same(trajectory(), found[1])


def test_no_field_is_left_out_of_the_round_trip() -> None:
    """A field that somebody adds to a trajectory or a segment must be in the one that comes back above."""
    made = trajectory()
    for part in (made, made.segments[0], made.segments[2]):
        given = {field.name for field in fields(part) if repr(getattr(part, field.name)) != repr(field.default)}
        optional = {"experts", "teacher_logprobs"} if part is not made else set()
        assert given | optional == {field.name for field in fields(part)}
    assert made.sampling
    assert made.messages
    assert made.metrics
    assert made.details


def test_new_store_and_migrated_stores_of_all_versions_have_the_tables(store: Store, tmp_path: Path) -> None:
    write_run(store)
    with store.read() as connection:
        rows = {table.name: connection.execute(sa.select(table)).mappings().all() for table in metadata.sorted_tables}
    urls = [store.engine.url]
    dialect = store.engine.dialect.name
    for path in sorted(FROZEN.glob(f"*.{dialect}.sql")):
        version = path.name.partition(".")[0]
        place = store.engine.url.set(database=str(tmp_path / version))
        if dialect == "postgresql":
            with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                place = store.engine.url.set(database=f"{store.engine.url.database}_{version}")
                connection.exec_driver_sql(f'CREATE DATABASE "{place.database}"')
        old = sa.create_engine(place)
        with old.begin() as connection:
            for statement in path.read_text().split(";\n")[:-1]:
                connection.exec_driver_sql(statement)
            connection.exec_driver_sql(f"INSERT INTO alembic_version VALUES ('{version}')")
            for table in metadata.sorted_tables:
                names = {column["name"] for column in sa.inspect(connection).get_columns(table.name)}
                for row in rows[table.name]:
                    known = {name: value for name, value in row.items() if name in names}
                    connection.execute(sa.insert(table).values(known))
        old.dispose()
        urls.append(place)
    assert urls[1:]
    assert urls[-1].database.endswith(HEAD)  # type: ignore[union-attr]
    for url in (url.render_as_string(hide_password=False) for url in urls):
        with Store.open(url) as opened, opened.read() as connection:
            options = {"compare_type": True, "compare_server_default": False}
            assert compare_metadata(MigrationContext.configure(connection, opts=options), metadata) == []
            assert len(connection.execute(sa.select(uses)).all()) == len(rows["uses"]) > 0
        with pytest.raises(sa.exc.IntegrityError), Store.open(url) as opened, opened.begin() as connection:
            connection.execute(sa.delete(runs))


LATER = """
import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "9998", "{head}", None, None


def upgrade():
    with op.batch_alter_table("runs") as batch:
        batch.add_column(sa.Column("mood", sa.Text(), nullable=False, server_default="calm"))
    {then}
"""


def test_older_store_is_migrated_whole_or_not_at_all(
    with_run: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, later = with_run, tmp_path / "migrations"
    url = store.engine.url.render_as_string(hide_password=False)
    shutil.copytree(MIGRATIONS, later)
    monkeypatch.setattr(mua.store.database, "MIGRATIONS", later)
    monkeypatch.setattr(mua.store.database, "HEAD", "9998")
    (later / "versions" / "schema_9998.py").write_text(LATER.format(head=HEAD, then="raise OSError('half way')"))
    with pytest.raises(OSError, match="half way"):
        Store.open(url)
    with store.read() as connection:
        assert "mood" not in {column["name"] for column in sa.inspect(connection).get_columns("runs")}
    (later / "versions" / "schema_9998.py").write_text(LATER.format(head=HEAD, then=""))
    with pytest.raises(StoreError, match="mua store migrate brings it to 9998"):
        Store.open(url, write=False)
    with ThreadPoolExecutor(4) as pool:
        for opened in pool.map(lambda _: Store.open(url), range(4)):
            opened.close()
    with Store.open(url, write=False) as opened, opened.read() as connection:
        assert connection.execute(sa.text("SELECT id, mood FROM runs")).all() == [("r", "calm")]


def test_new_store_is_made_once_by_several(postgres: PostgresServer, tmp_path: Path) -> None:
    for url in (postgres.database(), str(tmp_path / "new.sqlite")):
        with ThreadPoolExecutor(4) as pool:
            for opened in pool.map(lambda _, url=url: Store.open(url), range(4)):
                opened.close()
