"""Which errors a person can do something about, and the lines that say what."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from mua.utils.errors import MuaError
from mua.utils.optional_deps import advice

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


def readable(error: BaseException) -> Iterator[str]:
    """The lines that tell a person what to fix; none for a fault of the program.

    Readable are the project's own errors, errors of the operating system that name a file or say that a disk is full
    or closed to us, missing packages of an extra, and groups (of concurrent tasks) that hold nothing else.
    """
    if isinstance(error, MuaError):
        yield from str(error).splitlines() or [type(error).__name__]
    elif isinstance(error, OSError) and (error.filename is not None or error.errno in _DISK):
        name = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes | os.PathLike) else ""
        yield f"{name}{error.strerror} (MUA_TRACEBACK=1 shows where)"
    elif isinstance(error, ModuleNotFoundError) and (line := advice(error)):
        yield line
    elif isinstance(error, BaseExceptionGroup):
        lines = [list(readable(inner)) for inner in error.exceptions]
        if all(lines):
            yield from dict.fromkeys(line for inner in lines for line in inner)
