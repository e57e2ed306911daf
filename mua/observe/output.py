"""The folder a run writes into, and the lock by which one run at a time writes there.

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
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from mua.config.load import dump_config
from mua.config.schema import ExperimentConfig
from mua.utils.atomic import replace_text
from mua.utils.errors import ConfigError

CONFIG_FILE = "config.yaml"
REPORT_FILE = "report.json"
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
            break
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                log.warning("%s: this file system has no locks: make sure that one run at a time writes here", path)
                return
            if time.monotonic() < deadline:
                time.sleep(_POLL_S)
                continue
        file.seek(0)
        try:
            by = json.loads(file.read())
            who = f"mua {' '.join(by['command'])} (process {by['pid']} on {by['host']}, since {by['since']})"
        except (ValueError, KeyError, TypeError):  # it has the lock and has not signed yet
            who = "another run, which began this moment,"
        raise ConfigError(f"output: {who} writes into {path.parent}; wait for it, end it, or choose another output")
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": since, "command": sys.argv[1:2]}
    file.truncate(0)
    file.write(json.dumps(holder).encode() + b"\n")
    file.flush()


@contextmanager
def output_of(config: ExperimentConfig) -> Iterator[None]:
    """A block in which this run alone writes into ``config.output``, which is made.

    Only the leading rank holds the lock: the others write what it tells them to. Raises :class:`ConfigError` when the
    folder is in use or cannot be written into.
    """
    with ExitStack() as stack:
        if int(os.environ.get("RANK", "0")) == 0:
            try:
                config.output.mkdir(parents=True, exist_ok=True)
                stack.enter_context(only_run(config.output))
            except OSError as error:
                raise _not_writable(config, error) from None
        yield


def prepare_output(config: ExperimentConfig, name: str = CONFIG_FILE) -> Path:
    """Make ``config.output``, prove that files can be written there, and leave the configuration in it (masked).

    Gives the path of the written file. A verb that does not make checkpoints passes another ``name``, because
    ``config.yaml`` is what :func:`find_config` takes the checkpoints of the folder to be made with. Raises
    :class:`ConfigError` with the operating system's reason.
    """
    file = config.output / name
    try:
        replace_text(file, dump_config(config))  # all ranks of a run come here at once
    except OSError as error:
        raise _not_writable(config, error) from None
    return file


def _not_writable(config: ExperimentConfig, error: OSError) -> ConfigError:
    return ConfigError(f"output: cannot write into {config.output}: {error.strerror}")


def find_config(checkpoint: Path) -> Path:
    """The ``config.yaml`` of the run a checkpoint lies in: in its folder or the nearest folder above it."""
    if not checkpoint.exists():
        raise ConfigError(f"{checkpoint}: no such checkpoint")
    for folder in (checkpoint, *checkpoint.resolve().parents):
        if (folder / CONFIG_FILE).is_file():
            return folder / CONFIG_FILE
    raise ConfigError(f"{checkpoint}: no {CONFIG_FILE} in this folder or above it; name the run's file with --config")
