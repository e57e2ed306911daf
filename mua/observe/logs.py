"""The log file of a process: ``<output>/logs/<verb>.log``, with time, level and where; the terminal stays as it is.

The leading rank keeps what the project's own code says (INFO) and what others warn of. Every other rank has a file of
its own, ``<verb>-rank-<n>.log``, once it has a warning to keep; commands of which many work for one run have a file per
process, ``<verb>-<host>-<pid>.log``. An error that ends the process is in the file with its
traceback. Texts of policies and users may hold anything: control characters are shown as pictures, further lines are
indented, so that no text looks like a line of the log.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from mua.utils.files import private_opener
from mua.utils.masking import mask_secrets
from mua.utils.strict_json import pictured

FOLDER = "logs"
OWN = ("mua", "megatron_bridge", "environments", "workbench")
"""Loggers of this project."""
_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class _Lines(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")

    def format(self, record: logging.LogRecord) -> str:
        return mask_secrets(pictured(super().format(record))).replace("\n", "\n    ")


class _LogFile(logging.FileHandler):
    """A disk that is full must not end a run for its log: it is said once, and no more is written."""

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=private_opener)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        logging.getLogger().removeHandler(self)
        print(f"mua: {self.baseFilename}: cannot be written, the log ends here: {error}", file=sys.stderr)


def log_file(output: Path, verb: str, *, one_of_many: bool = False) -> Path:
    """Where this process logs."""
    if one_of_many:
        return output / FOLDER / f"{verb}-{socket.gethostname()}-{os.getpid()}.log"
    rank = int(os.environ.get("RANK", "0"))
    return output / FOLDER / (f"{verb}.log" if rank == 0 else f"{verb}-rank-{rank}.log")


@contextmanager
def logging_to(output: Path, verb: str, *, one_of_many: bool = False) -> Iterator[None]:
    """A block whose log records go into :func:`log_file` as well. Where it cannot be made that is said, and no more.

    ``one_of_many``: further processes of this verb work for the same run, on any machine.
    """
    leads = one_of_many or os.environ.get("RANK", "0") == "0"
    path = log_file(output, verb, one_of_many=one_of_many)
    root = logging.getLogger()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(path, encoding="utf-8", delay=not leads)
    except OSError as error:
        logging.getLogger(__name__).warning("%s: no log is kept: %s", path, error.strerror)
        yield
        return
    handler.setLevel(logging.INFO if leads else logging.WARNING)
    handler.setFormatter(_Lines(_FORMAT))
    handlers: list[logging.Handler] = [handler]
    if not root.handlers:  # Python's own for the terminal goes where there is another
        handlers.append(terminal := logging.StreamHandler())
        terminal.setLevel(logging.WARNING)
        terminal.setFormatter(_Lines("%(message)s"))
    levels = {name: logging.getLogger(name).level for name in OWN}
    for name in OWN:
        logging.getLogger(name).setLevel(logging.INFO)
    for one in handlers:
        root.addHandler(one)
    log = logging.getLogger("mua")
    try:
        log.info("mua %s begins in process %d", verb, os.getpid())
        yield
        log.info("mua %s is done", verb)
    except BaseException as error:
        quiet = isinstance(error, KeyboardInterrupt)  # into the file alone: the command line says it on the terminal
        level, trace = (logging.WARNING, None) if quiet else (logging.ERROR, (type(error), error, error.__traceback__))
        message = f"mua {verb} ends: {type(error).__name__}: {error}"
        handler.handle(logging.LogRecord("mua", level, __file__, 0, message, None, trace))
        raise
    finally:
        for one in handlers:
            root.removeHandler(one)
        handler.close()
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
