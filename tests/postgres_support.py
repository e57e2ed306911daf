"""A real PostgreSQL on this machine for tests: one server a session, a database each, and the server can go away.

It runs from Debian's packages in a temporary folder, on the loopback address or another one, as an unprivileged user,
because PostgreSQL refuses root. Where it is missing, root installs it; elsewhere the tests are skipped with the reason.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mua.utils.ports import free_port
from tools.debian_packages import PackagesUnavailable, install

PACKAGE = "postgresql-15"
_VERSIONS = Path("/usr/lib/postgresql")
_USERS = ("postgres", "nobody")


class PostgresUnavailable(RuntimeError):
    """PostgreSQL is not here and could not be installed or started; the message names the fix."""


def programs() -> Path:
    """The folder of ``initdb`` and ``postgres``; installs them as root. Raises :class:`PostgresUnavailable`."""
    try:
        install((PACKAGE,), lambda: not _folders())
    except PackagesUnavailable as error:
        raise PostgresUnavailable(str(error)) from None
    return _folders()[0]


def _folders() -> list[Path]:
    found = shutil.which("initdb")
    folders = (*sorted(_VERSIONS.glob("*/bin"), reverse=True), *([Path(found).parent] if found else []))
    return [folder for folder in folders if (folder / "initdb").exists() and (folder / "postgres").exists()]


class PostgresServer:
    """A server in a temporary folder. ``start``, ``stop`` and ``kill`` as often as a test likes; ``remove`` at last."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self._bin, self._address = programs(), address
        self.folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
        self.port = free_port()
        self.password = secrets.token_hex(12)
        self._process: subprocess.Popen[bytes] | None = None
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = next(pwd.getpwnam(name) for name in _USERS if _has_user(name))
            os.chown(self.folder, user.pw_uid, user.pw_gid)
            self._as = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        secret = self.folder / "password"
        secret.write_text(self.password)
        secret.chmod(0o644)
        made = subprocess.run(
            [self._bin / "initdb", "-D", self.folder / "data", "-U", "mua", "-A", "scram-sha-256", "-E", "UTF8",
             "--locale=C.UTF-8", "--pwfile", secret, "--no-sync", "--no-instructions"],
            capture_output=True, text=True, cwd=self.folder, timeout=120, **self._as,
        )  # fmt: skip
        if made.returncode:
            self.remove()
            raise PostgresUnavailable(f"initdb failed: {made.stderr[-1000:]}")
        with (self.folder / "data" / "pg_hba.conf").open("a") as who:
            who.write(f"host all all {address}/24 scram-sha-256\n")
        self.start()

    def start(self, seconds: float = 60.0) -> None:
        """Start it on its port and wait until it answers."""
        settings = {
            "listen_addresses": self._address, "port": str(self.port), "unix_socket_directories": "", "fsync": "off",
            "shared_buffers": "16MB", "max_connections": "200", "autovacuum": "off", "max_wal_size": "64MB",
        }  # fmt: skip
        flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._bin / "postgres", "-D", self.folder / "data", *flags], stdout=log, stderr=log, cwd=self.folder,
                start_new_session=True, **self._as,
            )  # fmt: skip
        import psycopg

        deadline = time.monotonic() + seconds
        while True:
            try:
                psycopg.connect(self.dsn("postgres"), connect_timeout=5).close()
                return
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise PostgresUnavailable(f"does not start: {(self.folder / 'log').read_text()[-1000:]}") from None
                time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End it: SIGINT cuts all connections, SIGQUIT crashes it, so that it recovers at the next start."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(60)
            self._process = None

    def dsn(self, database: str) -> str:
        return f"postgresql://mua:{self.password}@{self._address}:{self.port}/{database}"

    def database(self) -> str:
        """The URL of a new empty database."""
        import psycopg

        name = f"t{secrets.token_hex(6)}"
        with psycopg.connect(self.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')  # type: ignore[arg-type]
        return self.dsn(name)

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def _has_user(name: str) -> bool:
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(name) is not None
    return False


@contextmanager
def postgres_server(address: str = "127.0.0.1") -> Iterator[PostgresServer]:
    """A server at an address of this machine, or the test is skipped with the reason."""
    pytest.importorskip("psycopg", reason="pip install 'mua[postgres]'")
    try:
        server = PostgresServer(address)
    except PostgresUnavailable as error:
        pytest.skip(str(error))
    try:
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """The session's server, for every test (tests/conftest.py). Do not stop it: a test of outages has one of its own
    (:func:`postgres_server`)."""
    with postgres_server() as server:
        yield server
