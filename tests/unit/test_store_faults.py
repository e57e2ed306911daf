"""What a user, a disk and a database server may do to a store: one clear error each, nothing lost, nothing twice.

Not here: whole runs that are killed, or whose server goes away.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection
from typer.testing import CliRunner

import mua.store.database
from mua.cli import app
from mua.store.blobs import pack_arrays, unpack_arrays
from mua.store.database import HEAD, Store
from mua.store.faults import DamagedData, StoreError, StoreFull, StoreUnreachable
from mua.store.tables import runs, segments, texts
from mua.store.trajectories import EpisodeKey, trajectory_inserts
from mua.store.verification import verify
from mua.store.writer import Insert, Update, Writer, execute
from tests.disk_support import fill, small_disk
from tests.postgres_support import PostgresServer, postgres_server
from tests.store_support import count, played, spoil, write_run


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """One that may be stopped."""
    with postgres_server() as started:
        yield started


def text(n: int) -> Insert:
    return Insert(texts, [{"hash": f"{n}", "body": b"x"}])


def test_damage_of_a_blob_is_seen_or_harmless() -> None:
    arrays = {
        "a": np.arange(50, dtype=np.int32),
        "b": np.array([[np.nan, -0.0]], np.float32),
        "c": np.zeros((0, 3), np.uint16),
        "d": np.array(True),
        "e": np.arange(6, dtype=">i8").reshape(2, 3).T,
    }
    blob = pack_arrays(arrays)
    back = unpack_arrays(blob)
    assert list(back) == list(arrays)
    for name, array in arrays.items():
        assert back[name].shape == array.shape
        assert back[name].dtype == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(back[name], array)
        back[name][...] = 0
    for at in range(len(blob)):
        for bit in (0, 5):
            broken = bytearray(blob)
            broken[at] ^= 1 << bit
            try:
                found = unpack_arrays(bytes(broken))
            except DamagedData:
                continue
            assert all(found[n].tobytes() == unpack_arrays(blob)[n].tobytes() for n in arrays), (at, bit)
    for cut in range(0, len(blob), 7):
        with pytest.raises(DamagedData, match="the blob"):
            unpack_arrays(blob[:cut], "the blob")
    with pytest.raises(DamagedData):
        unpack_arrays(blob + b"x")
    with pytest.raises(TypeError, match="dtype object"):
        pack_arrays({"o": np.array([None])})


def test_writer_keeps_order_and_writes_puts_whole(tmp_path: Path) -> None:
    run = {"id": "r", "output": "", "state": "running", "started_at": 0.0}
    with Store.open(tmp_path) as store, Writer(store, every_seconds=0.01, group_bytes=4000) as writer:
        writer.put([Insert(runs, [run])])
        for n in range(200):
            writer.put(lambda n=n: [text(n), Update(runs, {"id": "r"}, {"state": f"{n}"})], size=500)
        writer.flush(30)
        with store.read() as connection:
            assert connection.execute(sa.select(runs.c.state)).scalar_one() == "199"
        assert count(store, texts) == 200
        assert 20 <= writer.figures.groups < 200
        writer.put([Insert(runs, [run], "keep"), Insert(texts, [{"hash": "0", "body": b"y"}], "replace")])
        writer.flush(30)
        assert count(store, texts, texts.c.body == b"y") == 1
        assert count(store, runs) == 1


def test_what_cannot_be_written_ends_the_writer_and_leaves_nothing_half(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        writer = Writer(store, every_seconds=0.01)
        writer.put([text(1)])
        writer.flush(30)
        writer.put([text(2), text(1)])
        with pytest.raises(StoreError, match="could not be written: IntegrityError"):
            writer.flush(30)
        with pytest.raises(StoreError, match="could not be written"):
            writer.put([text(3)])
        with pytest.raises(StoreError, match="could not be written"):
            writer.close()
        assert count(store, texts) == 1


def test_full_queue_makes_who_puts_wait_and_the_loop_go_on(tmp_path: Path) -> None:
    import asyncio

    async def play(writer: Writer, release: threading.Event) -> list[str]:
        seen = []

        async def tick() -> None:
            await asyncio.sleep(0.05)
            seen.append("loop went on")
            release.set()

        beside = asyncio.create_task(tick())
        for n in range(3):
            await writer.put_from_loop([text(n)], size=100)
        seen.append("put")
        await beside
        return seen

    with Store.open(tmp_path) as store:
        release = threading.Event()

        def slow() -> Iterator[Insert]:
            release.wait(30)
            yield text(99)

        with Writer(store, every_seconds=0.01, queue_bytes=150) as writer:
            writer.put(slow, size=100)
            assert asyncio.run(play(writer, release)) == ["loop went on", "put"]
        assert count(store, texts) == 4
        assert writer.figures.blocked_seconds > 0


def test_server_that_goes_away_for_a_while_costs_nothing(
    server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    with Store.open(server.database()) as store:
        with Writer(store, every_seconds=0.01, outage_seconds=60) as writer:
            for n in range(300):
                writer.put([text(n)])
                if n in (100, 200):
                    server.stop(signal.SIGQUIT if n == 100 else signal.SIGINT)
                    time.sleep(0.3)
                    writer.put([text(1000 + n)])
                    server.start()
                time.sleep(0.001)
            writer.flush(60)
        assert count(store, texts) == 302
    assert "waiting up to 60 s for it" in caplog.text
    assert "answers again" in caplog.text
    assert server.password not in caplog.text


def test_commit_whose_answer_was_lost_is_not_done_twice(postgres: PostgresServer) -> None:
    """The connection ends after the commit and before its answer: the group is in, and the writer cannot know."""
    with Store.open(postgres.database()) as store:
        lost = []

        @sa.event.listens_for(store.engine, "commit")
        def cut(connection: Connection) -> None:
            if connection.info.pop("mua_group", False) and len(lost) < 3:
                lost.append(1)
                connection.connection.driver_connection.commit()
                connection.connection.driver_connection.close()

        @sa.event.listens_for(store.engine, "before_cursor_execute")
        def mark(connection: Connection, *_: Any) -> None:
            connection.info["mua_group"] = True

        with Writer(store, every_seconds=0.01, outage_seconds=30) as writer:
            for n in range(6):
                writer.put([text(n)])
                writer.flush(30)
        assert len(lost) == 3
        assert writer.figures.retries >= 3
        assert count(store, texts) == 6


def test_server_that_stays_away_ends_the_writer_with_one_error(server: PostgresServer) -> None:
    with Store.open(server.database()) as store:
        writer = Writer(store, every_seconds=0.01, outage_seconds=0.5)
        server.stop()
        try:
            writer.put([text(1)])
            with pytest.raises(StoreUnreachable, match=r"waited 0\.5 s \(store.outage_seconds\)") as caught:
                writer.flush(60)
            assert caught.value.passing
            assert server.password not in str(caught.value)
            with pytest.raises(StoreUnreachable):
                writer.close()
            full = Writer(store, every_seconds=0.01, outage_seconds=0.5, queue_bytes=10)
            full.put([text(1)], size=100)
            with pytest.raises(StoreUnreachable, match="waited"):
                full.put([text(2)], size=100)
        finally:
            server.start()


def test_several_writers_of_the_same_texts(postgres: PostgresServer) -> None:
    """In different orders, each waits for the other's transaction: the database gives one up, which is tried again."""
    with Store.open(postgres.database()) as store:
        writers = [Writer(store, every_seconds=0.001, outage_seconds=60, name=f"w{n}") for n in range(3)]
        for turn in range(15):
            for n, writer in enumerate(writers):
                chosen = np.random.default_rng([turn, n]).permutation(60)[:30]
                rows = [{"hash": f"{turn}/{i}", "body": b"x"} for i in chosen.tolist()]
                writer.put([Insert(texts, [row], "keep") for row in rows])
                writer.put([Insert(texts, [{"hash": f"own {n} {turn}", "body": b"y"}])])
        for writer in writers:
            writer.close()
        assert count(store, texts, texts.c.body == b"y") == 45
        pairs = {(turn, i) for turn in range(15) for n in range(3)
                 for i in np.random.default_rng([turn, n]).permutation(60)[:30].tolist()}  # fmt: skip
        assert count(store, texts, texts.c.body == b"x") == len(pairs)


def test_wrong_urls(postgres: PostgresServer, tmp_path: Path) -> None:
    good, secret = postgres.database(), "pa55@w:ord/"
    quoted = "pa55%40w%3Aord%2F"
    cases = {
        good.replace(postgres.password, quoted): "password authentication failed",
        good.replace(good.rsplit("/", 1)[1], "nowhere"): 'database "nowhere" does not exist',
        good.replace("mua:", "nobody:"): "password authentication failed",
        f"mysql://u:{quoted}@h/d": "not a URL of a store",
        f"nonsense://u:{quoted}@h/d": "not a URL of a store",
        f"postgresql+asyncpg2://u:{quoted}@h/d": "not a URL of a store",
        f"postgresql://u:{quoted}@h:port/d": "not a URL of a store",
        f"postgresql+pg8000://u:{quoted}@h/d": "not installed",
        "sqlite://": "in memory",
        f"{tmp_path}/none/store.sqlite": "folder does not exist",
    }
    for url, words in cases.items():
        with pytest.raises(StoreError, match=words) as caught:
            Store.open(url)
        for part in (secret, quoted, postgres.password):
            assert part not in str(caught.value), url
    port = f":{postgres.port}/"
    with pytest.raises(StoreUnreachable, match="does not answer"):
        Store.open(good.replace(port, ":1/"))
    with pytest.raises(StoreError, match="no such file"):
        Store.open(tmp_path, create=False)
    with pytest.raises(StoreError, match="holds no store"):
        Store.open(good, create=False)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(StoreError, match="not a regular file"):
        Store.open(tmp_path / "fifo")


def test_stores_of_other_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store.open(tmp_path).close()
    with Store.open(tmp_path) as store:
        spoil(store, "UPDATE alembic_version SET version_num = '9999'")
    for write in (True, False):
        with pytest.raises(StoreError, match="schema version 9999, this program knows up to"):
            Store.open(tmp_path, write=write)
    (tmp_path / "other").mkdir()
    with sqlite3.connect(tmp_path / "other" / "store.sqlite") as connection:
        connection.execute("CREATE TABLE runs (id)")
    with pytest.raises(StoreError, match="holds no store"):
        Store.open(tmp_path / "other", write=False)
    with pytest.raises(StoreError, match="holds other tables"):
        Store.open(tmp_path / "other")
    with sqlite3.connect(tmp_path / "store.sqlite") as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (HEAD,))
    monkeypatch.setattr(mua.store.database, "HEAD", "0999")
    for given in ({"write": False}, {"migrate": False}):
        with pytest.raises(StoreError, match="mua store migrate brings it to 0999"):
            Store.open(tmp_path, **given)


def test_files_that_are_damaged(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(StoreError, match="damaged, or no database"):
        Store.open(path)
    path.unlink()
    with Store.open(path) as store, Writer(store) as writer:
        for n in range(3000):
            writer.put([text(n)])
    content = bytearray(path.read_bytes())
    content[8192:] = b"\x55" * (len(content) - 8192)
    path.write_bytes(content)
    with pytest.raises(StoreError, match="damaged"), Store.open(path) as store:
        count(store, texts, texts.c.body == b"y")
    path.write_bytes(content[:5000])
    with pytest.raises(StoreError, match="damaged"), Store.open(path) as store:
        count(store, texts)


def test_read_only(tmp_path: Path) -> None:
    """As another user where the tests run as root, whom nothing stops."""
    folder = tmp_path / "run"
    folder.mkdir()
    with Store.open(folder) as store, Writer(store) as writer:
        writer.put([text(1)])
    (folder / "store.sqlite").chmod(0o444)
    folder.chmod(0o555)
    for path in (folder, *folder.parents):
        if path.stat().st_uid == os.geteuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    program = (
        "import sys; from pathlib import Path\n"
        "from mua.store.database import Store\n"
        "from mua.store.tables import texts\n"
        "import os\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "import sqlalchemy as sa\n"
        "with Store.open(sys.argv[1], write=False, create=False) as store, store.read() as c:\n"
        "    print(c.execute(sa.select(sa.func.count()).select_from(texts)).scalar())\n"
        "try:\n"
        "    with Store.open(sys.argv[1]) as store, store.begin() as c:\n"
        "        c.execute(sa.delete(texts))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, timeout=60)
    folder.chmod(0o755)
    lines = done.stdout.splitlines()
    assert lines[:1] == ["1"], done.stderr
    assert lines[1].startswith("StoreError")
    assert "cannot be opened or written" in lines[1]
    with Store.open(folder, write=False) as store, pytest.raises(StoreError, match="for reading alone"), store.begin():
        pass


def test_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2000) as disk, Store.open(disk) as store:
        writer = Writer(store, every_seconds=0.01)
        writer.put([text(1)])
        writer.flush(30)
        fill(disk, 20_000)
        writer.put([Insert(texts, [{"hash": "big", "body": os.urandom(500_000)}])])
        with pytest.raises(StoreFull, match="disk is full"):
            writer.flush(30)
        (disk / "ballast").unlink()
        assert count(store, texts) == 1
        with Writer(store) as again:
            again.put([text(2)])
        assert count(store, texts) == 2


@pytest.mark.parametrize("left", [0, 40_000])
def test_a_store_on_a_full_disk_is_read_and_pruned(tmp_path: Path, left: int) -> None:
    with small_disk(tmp_path / "disk", 6000) as disk:
        with Store.open(disk) as store:
            write_run(store)
            with store.begin() as connection:
                for n in range(100, 130):  # so large that no journal has room for what is dropped
                    large = played(n, 0, 0, success=False, length=9000)
                    execute(connection, trajectory_inserts(EpisodeKey("r", 1, 0, n, 0), large, ended_at=1.0))
        size = (disk / "store.sqlite").stat().st_size
        fill(disk, left)
        for words in (("show", disk, "r/1/0/0/0/1", "--json"), ("store", "ls", disk, "trajectories"),
                      ("view", disk, "--export", tmp_path / "page.html")):  # fmt: skip
            result = CliRunner().invoke(app, [str(word) for word in words])
            assert result.exit_code == 0, result.output
        rules = ("--keep-arrays-steps", "1", "--no-keep-successes", "--no-checkpoints")
        result = CliRunner().invoke(app, ["store", "prune", str(disk), *rules, "--json"])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["dropped"]["arrays"] == 36
        assert (disk / "store.sqlite").stat().st_size < size / 4, "there is room on the disk again"
        with Store.open(disk) as store, store.read() as connection:
            assert not list(verify(connection))
            assert count(store, segments, segments.c.arrays.is_not(None)) == 2
        with Store.open(disk) as store, Writer(store) as writer:  # the run goes on
            writer.put([Insert(texts, [{"hash": "big", "body": os.urandom(500_000)}])])


_PAIRS = """
import sys
from mua.store.database import Store
from mua.store.tables import texts
from mua.store.writer import Insert, Writer
first = int(sys.argv[2])
with Store.open(sys.argv[1]) as store, Writer(store, every_seconds=0.002) as writer:
    for n in range(first, first + 10**6):
        writer.put([Insert(texts, [{"hash": f"{n:07}{half}", "body": b"x" * 300}]) for half in "ab"])
        if n % 20 == 0:
            writer.flush()
            print(n, flush=True)
"""
"""Writes pairs, from a number on, and says what was flushed."""


def killed(url: str, first: int, flushes: int, more_seconds: float) -> int:
    """Kill a process that writes from pair ``first`` on, a while after so many flushes; the pairs that are there then.

    They are whole, in order, without a gap, and hold all that was flushed."""
    command = [sys.executable, "-c", _PAIRS, url, str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        flushed = [int(process.stdout.readline()) for _ in range(flushes)][-1]
        time.sleep(more_seconds)
        process.kill()
    with Store.open(url) as store:
        if store.postgres:  # the server may not have seen yet that its client is gone
            with store.begin() as connection:
                connection.exec_driver_sql(
                    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
        with store.read() as connection:
            found = sorted(connection.execute(sa.select(texts.c.hash)).scalars())
    pairs = len(found) // 2
    assert found == [f"{n:07}{half}" for n in range(pairs) for half in "ab"]
    assert pairs > flushed
    return pairs


@pytest.mark.slow
def test_process_that_is_killed_leaves_whole_puts(tmp_path: Path) -> None:
    first = killed(str(tmp_path / "store.sqlite"), 0, 1, 0.0)
    killed(str(tmp_path / "store.sqlite"), first, 4, 0.003)


def test_store_of_another_process(tmp_path: Path) -> None:
    with Store.open(tmp_path, busy_seconds=0.2) as store, store.begin():
        other = Store.open(tmp_path, busy_seconds=0.2)
        with pytest.raises(StoreUnreachable, match="locked"), other.begin():
            pass
        other.close()
        with Store.open(tmp_path, write=False) as reader, reader.read() as connection:
            assert connection.execute(sa.select(sa.func.count()).select_from(texts)).scalar() == 0
