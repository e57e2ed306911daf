"""One run writes into an output folder at a time.

The lock is the operating system's, on a file in the folder (``flock``, which Linux carries over NFS): it ends with the
process that holds it, however that ends, so nothing has to be cleaned up. What stands in the file only tells others who
holds it. A child never holds it: the file is closed when a program is started, and by a fork as soon as it is made.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from mua.errors import ConfigError

LOCK_FILE = ".lock"
REQUEUED_SECONDS = 180.0
"""How long a job that Slurm started again waits for the attempt before it: the server of a shared folder frees what a
dead node held after its lease only (NFS: 90 s)."""
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_POLL_S = 0.1

log = logging.getLogger(__name__)
_held: set[BinaryIO] = set()


def _close_in_child() -> None:
    """Without this a fork that outlives its parent, such as the writer of a checkpoint, would hold the lock on."""
    while _held:
        _held.pop().close()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """A block in which this process alone writes into ``folder``, which must be there.

    A file system without locks is told of in the log, and the block entered all the same. Raises :class:`ConfigError`
    with host, process and start of whoever writes there.
    """
    path = folder / LOCK_FILE
    with path.open("ab+") as file:
        _held.add(file)
        try:
            _acquire(file, path)
            yield
        finally:
            _held.discard(file)


def _acquire(file: BinaryIO, path: Path) -> None:
    deadline = time.monotonic() + (REQUEUED_SECONDS if int(os.environ.get("SLURM_RESTART_COUNT") or 0) else 0.0)
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                log.warning("%s: this file system has no locks: make sure that one run at a time writes here", path)
                return
            if time.monotonic() >= deadline:
                raise ConfigError(_in_use(file, path)) from None
            time.sleep(_POLL_S)
        else:
            _sign(file)
            return


def _sign(file: BinaryIO) -> None:
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": since, "command": sys.argv[1:2]}
    file.truncate(0)
    file.write(json.dumps(holder).encode() + b"\n")
    file.flush()


def _in_use(file: BinaryIO, path: Path) -> str:
    file.seek(0)
    try:
        holder = json.loads(file.read())
        who = (
            f"mua {' '.join(holder['command'])} (process {holder['pid']} on {holder['host']}, since {holder['since']})"
        )
    except (ValueError, KeyError, TypeError):  # it has the lock and has not signed yet
        who = "another run, which began this moment,"
    return f"output: {who} writes into {path.parent}; wait for it, end it, or choose another output"
