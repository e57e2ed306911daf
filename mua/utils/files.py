"""Lines of a file that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from mua.utils.errors import DiskError

PRIVATE = 0o600
"""Mode of files that hold conversations or keys: their owner reads them, and nobody else."""


def private_opener(name: str, flags: int) -> int:
    """For :func:`open`: a file that it makes is :data:`PRIVATE`."""
    return os.open(name, flags | os.O_CLOEXEC, PRIVATE)


class LineFile:
    """A file that lines are added to, each of them whole or not at all. Use as a context manager or :meth:`close`."""

    def __init__(self, path: Path) -> None:
        """Raises :class:`DiskError` where the file cannot be opened."""
        self.path = path
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        with naming(path):
            self._descriptor = os.open(path, flags, PRIVATE)

    def write(self, line: str) -> None:
        """Add ``line``; it is with the operating system when this returns.

        Raises :class:`DiskError`, and leaves nothing of the line behind.
        """
        left = memoryview(f"{line}\n".encode())
        with naming(self.path):
            end = os.fstat(self._descriptor).st_size
            try:
                while left:
                    left = left[os.write(self._descriptor, left) :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, end)
                raise

    def fileno(self) -> int:
        """The descriptor, for locks."""
        return self._descriptor

    def close(self) -> None:
        """Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A block that writes into ``path``: what the operating system refuses becomes a :class:`DiskError` that names it.

    An error of a write that a full disk refuses does not name its file by itself.
    """
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"{path}: cannot be written: {error.strerror}; make room there (or raise the quota) and give the same "
            "command again"
        ) from None
