"""Opening the store: SQLite in a file, or PostgreSQL by URL; its schema's version; transactions.

Everything here blocks: call it from a thread that is not the event loop's.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from mua.config.storage import StoreConfig
from mua.store.faults import NoStore, StoreError, StoreUnreachable, explained, shown
from mua.store.tables import metadata
from mua.utils.files import PRIVATE

FILE = "store.sqlite"
"""In the output folder of a run."""
MIGRATIONS = Path(__file__).with_name("migrations")
HEAD = max((path.stem[-4:] for path in (MIGRATIONS / "versions").glob("schema_[0-9]*.py")), default="0000")
"""The newest schema version, which this program reads and writes."""
CONNECT_SECONDS = 10
IDLE_SECONDS = 60
"""So long PostgreSQL waits for the next statement of a transaction that may write, before it undoes it."""
_LOCK = 0x6D7561  # key of PostgreSQL's advisory lock while a schema is made or changed
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class Store:
    """An open database. Safe in threads; a process that forks opens its own. Use as a context manager or close it."""

    def __init__(self, engine: Engine, *, writable: bool) -> None:
        self.engine, self.writable = engine, writable
        self._process = os.getpid()

    @classmethod
    def open(
        cls,
        url: str | Path,
        *,
        create: bool = True,
        write: bool = True,
        migrate: bool = True,
        journal: bool = True,
        busy_seconds: float = 30.0,
    ) -> Self:
        """The store at ``url``: a folder with ``store.sqlite``, a file, or a URL of SQLAlchemy's.

        Args:
            url: ``postgresql://USER:PASSWORD@HOST:PORT/DATABASE``, ``sqlite:///FILE``, or a path.
            create: make what is not there; False: an error names it.
            write: False opens for reading alone, also where nobody may write.
            migrate: bring an older schema to this program's when writing; False: an error.
            journal: False on a disk that is full: SQLite then changes a file that nobody else uses and keeps what it
                needs to undo that in memory; who kills it meanwhile damages the file.
            busy_seconds: how long to wait for another process's transaction on SQLite.

        Raises:
            StoreError: no store is there, it is of a newer version, damaged, or may not be used.
            StoreUnreachable: the database server does not answer.
        """
        place = _url(url)
        try:
            if place.get_backend_name() == "sqlite":
                engine = _sqlite_engine(Path(str(place.database)), create and write, write, journal, busy_seconds)
            else:
                engine = _postgres_engine(place, write)
        except ImportError as error:
            raise StoreError(
                f"store {shown(place)}: the driver {error.name} is not installed; pip install 'mua[postgres]'"
            ) from None
        store = cls(engine, writable=write)
        try:
            store._check_schema(create and write, migrate and write)
        except BaseException:
            store.close()
            raise
        return store

    @property
    def name(self) -> str:
        """For messages: the URL without its password, or the file."""
        return shown(self.engine.url)

    @property
    def postgres(self) -> bool:
        return self.engine.dialect.name == "postgresql"

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """A block that is one transaction, which may write: all of it is done at its end, or none.

        On SQLite it holds the only lock for writing from its beginning. Raises :class:`StoreError`; a constraint that
        is violated stays SQLAlchemy's IntegrityError.
        """
        if not self.writable:
            raise StoreError(f"store {self.name}: opened for reading alone")
        with self._connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A block whose reads see one state of the database. Raises :class:`StoreError`."""
        with self._connect() as connection:
            options: dict[str, Any] = {"mua_read": True}
            if self.postgres:
                options |= {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
            connection = connection.execution_options(**options)
            with connection.begin():
                yield connection

    def patiently(
        self, function: Callable[[Connection], Result], seconds: float, *, stop: Callable[[], bool] = lambda: False
    ) -> Result:
        """``function`` in a transaction, again and again while the database does not answer, for ``seconds`` at most.

        A commit whose answer was lost may have been done: ``function`` must bear to be run twice. Raises
        :class:`StoreUnreachable` after ``seconds``, or as soon as ``stop`` says so.
        """
        deadline, pause, told = time.monotonic() + seconds, _FIRST_PAUSE_S, False
        while True:
            try:
                with self.begin() as connection:
                    result = function(connection)
            except StoreUnreachable as error:
                left = deadline - time.monotonic()
                if left <= 0 or stop():
                    raise StoreUnreachable(
                        f"{error}; waited {seconds:g} s (store.outage_seconds); start the database again, then give "
                        "the same command, which continues"
                    ) from None
                if not told:
                    log.warning("%s; waiting up to %.0f s for it", error, seconds)
                    told = True
                time.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                if told:
                    log.warning("store %s: answers again", self.name)
                return result

    def compact(self) -> None:
        """Give the room of what was deleted back to the disk, which SQLite does only when it is asked to.

        Raises :class:`StoreError` while another process uses the file.
        """
        if self.postgres:
            return
        connection = self.engine.raw_connection()
        try:
            connection.cursor().execute("VACUUM")
        except Exception as error:
            raise StoreError(f"store {self.name}: cannot be compacted: {error}") from None
        finally:
            connection.close()

    def close(self) -> None:
        """Safe to call twice."""
        self.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _connect(self) -> Iterator[Connection]:
        if os.getpid() != self._process:
            raise StoreError(f"store {self.name}: opened before a fork; open it in this process")
        try:
            with self.engine.connect() as connection:
                yield connection
        except SQLAlchemyError as error:
            if (known := explained(error, self.engine.url)) is None:
                raise
            raise known from None

    def _check_schema(self, create: bool, migrate: bool) -> None:
        with self.read() as connection:
            found, others = _schema_version(connection), sa.inspect(connection).get_table_names()
        if found == HEAD:
            return
        if found is None and not create:
            raise NoStore(f"store {self.name}: holds no store; name the output folder or database of a run")
        if found is None and others:
            raise StoreError(f"store {self.name}: holds other tables ({', '.join(others[:3])}); name an empty database")
        if found is not None and not (found.isdigit() and 0 < int(found) <= int(HEAD)):
            raise StoreError(
                f"store {self.name}: has schema version {found}, this program knows up to {HEAD}; use the newer mua "
                "that wrote it"
            )
        if found is not None and not migrate:
            raise StoreError(
                f"store {self.name}: has schema version {found}, this program's is {HEAD}; where a run "
                f"goes on there, use the mua that runs it, else mua store migrate brings it to {HEAD}"
            )
        # Make the tables, or migrate those of an older version, in one transaction; of several processes at once, one
        # does it.
        from alembic import command
        from alembic.config import Config

        settings = Config()
        settings.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
        with self._connect() as connection, ExitStack() as transaction:
            if not self.postgres:  # a table that is made anew drops the old one, which others refer to
                connection.detach()
                connection.connection.cursor().execute("PRAGMA foreign_keys=OFF")
            transaction.enter_context(connection.begin())
            if self.postgres:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
            settings.attributes["connection"] = connection
            logger = logging.getLogger("alembic")  # says only what is wrong
            before = logger.level
            logger.setLevel(logging.WARNING)
            try:
                if _schema_version(connection) is None:
                    metadata.create_all(connection)
                    command.stamp(settings, HEAD)
                else:
                    command.upgrade(settings, HEAD)
            finally:
                logger.setLevel(before)


def database_clock(connection: Connection) -> float:
    """Seconds since 1970 by the clock that leases run by."""
    if connection.dialect.name == "postgresql":
        return float(connection.execute(sa.text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())
    return time.time()  # SQLite is shared by the processes of one machine


def store_url(output: Path, config: StoreConfig) -> str:
    """Where a run's store is: ``store.url``, or else the file in its output folder."""
    return str(output / FILE) if config.url is None else config.url.get_secret_value()


def _url(url: str | Path) -> URL:
    text = str(url)
    if "://" not in text:
        path = Path(text)
        return URL.create("sqlite", database=str(path / FILE if path.is_dir() else path))
    try:
        parsed = make_url(text)
        name = parsed.drivername
        if name in ("postgres", "postgresql"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        parsed.get_dialect()
    except (ArgumentError, NoSuchModuleError, ValueError):
        parsed = None
    if parsed is None or parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise StoreError(
            f"store {shown(text)}: not a URL of a store; write postgresql://USER:PASSWORD@HOST:PORT/DATABASE, "
            "sqlite:///FILE or a path"
        )
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise StoreError("store: a database in memory is gone with its process; name a file")
    return parsed


def _postgres_engine(url: URL, write: bool) -> Engine:
    """An engine both of whose ends notice when the other is gone.

    The server's own keepalives take two hours by default. So long it would keep the locks of a machine that vanished,
    or was suspended, in the middle of a transaction: its rows, which others skip, would hold up the run.
    """
    settings = {"tcp_keepalives_idle": 30, "tcp_keepalives_interval": 10, "tcp_keepalives_count": 3}
    if write:  # who only reads holds no lock that another waits for, and may take its time between two rows
        settings["idle_in_transaction_session_timeout"] = IDLE_SECONDS * 1000
    engine = sa.create_engine(
        url,
        pool_pre_ping=True,
        pool_size=8,
        max_overflow=24,
        pool_timeout=60,
        hide_parameters=True,
        connect_args={
            "connect_timeout": CONNECT_SECONDS,
            "keepalives_idle": 30,
            "keepalives_interval": 10,
            "keepalives_count": 3,
            "tcp_user_timeout": 60_000,
            "application_name": "mua",
        },
    )

    @sa.event.listens_for(engine, "connect")
    def tell_server(connection: Any, _: object) -> None:
        connection.execute("; ".join(f"SET {name} = {value}" for name, value in settings.items()))
        connection.commit()

    return engine


def _sqlite_engine(path: Path, create: bool, write: bool, journal: bool, busy_seconds: float) -> Engine:
    """An engine whose transactions begin where ``begin`` says: Python's own do so at the first write, and a transaction
    that has read before may then fail without waiting."""
    if path.exists() and not path.is_file():
        raise StoreError(f"store {path}: not a regular file")
    if not path.exists() and not create:
        raise NoStore(f"store {path}: no such file")
    if not path.parent.is_dir():
        raise StoreError(f"store {path}: its folder does not exist")
    wal = path.with_name(f"{path.name}-wal")

    if write:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
            if (found := os.fstat(descriptor)).st_uid == os.geteuid():
                os.fchmod(descriptor, found.st_mode & ~0o077)  # and of what SQLite puts beside it
            os.close(descriptor)
        except OSError as error:
            raise StoreError(f"store {path}: cannot be opened or written ({error.strerror})") from None

    def connect() -> Any:
        import sqlite3

        # What a reader of a WAL needs beside the file cannot be made on a full disk, nor in a folder of others.
        for mode in ("rwc",) if write else ("ro", "ro&immutable=1"):
            file = f"file:{quote(str(path.absolute()))}?mode={mode}"
            connection = sqlite3.connect(
                file,
                uri=True,
                timeout=busy_seconds,
                isolation_level=None,
                check_same_thread=False,
                cached_statements=256,
            )
            try:
                if write:
                    if not journal:
                        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
                    connection.execute(f"PRAGMA journal_mode={'WAL' if journal else 'MEMORY'}")
                    connection.execute("PRAGMA synchronous=FULL")  # a checkpoint is on the disk when its step is done
                    connection.execute("PRAGMA foreign_keys=ON")
                else:
                    connection.text_factory = _text
                connection.execute("PRAGMA cache_size=-16000")
                connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
                return connection
            except sqlite3.OperationalError:
                connection.close()
                if mode != "ro" or (wal.exists() and wal.stat().st_size):
                    raise
            except BaseException:
                connection.close()
                raise
        raise AssertionError("one mode is the last")

    engine = sa.create_engine(
        URL.create("sqlite", database=str(path)),
        creator=connect,
        poolclass=sa.pool.QueuePool,
        pool_size=8 if journal else 1,
        max_overflow=24 if journal else 0,
        pool_timeout=60,
        hide_parameters=True,
    )

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        reads = connection.get_execution_options().get("mua_read", False)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


def _text(raw: bytes) -> str | bytes:
    """A text as SQLite has it; what is no UTF-8 stays bytes, which no column of texts takes for one."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _schema_version(connection: Connection) -> str | None:
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    found = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalars().all()
    return str(found[0]) if found else None
