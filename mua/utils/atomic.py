"""Files, links and folders that are there whole or not at all: the one place where something is written and renamed.

A folder is written into a hidden one beside the target, ``.NAME.partial``, flushed to the disk and renamed, so a
reader sees the old folder or the new one; a file or link goes the same way by :func:`replace_text` and
:func:`replace_link`. The hidden folder is locked while it is written. One without a lock was left
by a process that was killed: the same job continues it, anything else starts it anew.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from mua.utils.checksums import NAME as CHECKSUMS
from mua.utils.checksums import same_job
from mua.utils.errors import BridgeError

_LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def replace_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write ``text`` to ``path``, folders included: a reader, or whoever comes after a crash, finds old or new.

    ``mode`` says who may read and write it, less what the process's umask forbids. Several processes may write one path
    at once, also from several machines: the last one wins. Raises ``OSError`` with the name of ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with replacing(path) as new, os.fdopen(os.open(new, flags, mode), "w", encoding="utf-8") as file:
        file.write(text)


def replace_link(link: Path, target: str) -> None:
    """Have ``link`` be a symbolic link to ``target``, otherwise as :func:`replace_text`."""
    with replacing(link) as new:
        new.symlink_to(target)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A hidden name beside ``path`` for the file, link or folder that takes its place once the block is done.

    Several processes may do so at once. Raises ``OSError`` with the name of ``path``, also where a folder that is not
    empty has the name already.
    """
    new = path.with_name(f".{path.name}.{uuid4().hex}.new")
    try:
        yield new
        new.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
        with suppress(OSError):
            new.unlink(missing_ok=True)


def refuse_overlap(out: Path, *sources: Path) -> None:
    """Raise unless ``out`` and every one of ``sources`` lie apart: neither is in the other, nor are they the same."""
    real = out.resolve()
    for source in (source.resolve() for source in sources):
        if real == source or source in real.parents or real in source.parents:
            raise BridgeError(f"{out} would be written over or into {source}, which is read; give a folder elsewhere")


def hidden_folder(out: Path) -> Path:
    """Where ``out`` is assembled."""
    return out.parent / f".{out.name}.partial"


@contextmanager
def staged_folder(
    out: Path, *, job: str | None = None, foreign: Callable[[Path], str | None] | None = None
) -> Iterator[Path]:
    """The hidden folder of ``out``, locked; :func:`publish_folder` gives it its name, or it is gone afterwards.

    Args:
        job: what is being done, from what: a folder that an interrupted run of the same job left is continued, and
            one that fails is left for the next run.
        foreign: why an ``out`` that is not empty must not be replaced; by default it may be if it has a config.json.

    Raises:
        BridgeError: for errors of files, in one line; ``out`` is something else; another process is writing it.
    """
    folder, old, held = hidden_folder(out), _old(out), -1
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if old.exists() and out.exists():  # a replacement was killed after its two renames, or between them
            shutil.rmtree(old)
        elif old.exists():
            os.rename(old, out)
        _refuse_foreign(out, foreign)
        held = _lock(folder, out)
        if job is None or not same_job(folder / CHECKSUMS, job):
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != _LOCK:
                    path.unlink()
        yield folder
    except OSError as error:
        raise write_error(out, error, resumable=job is not None) from error
    finally:
        if held >= 0:
            if job is None:
                shutil.rmtree(folder, ignore_errors=True)
            os.close(held)


def write_error(out: Path, error: OSError, *, resumable: bool = False) -> BridgeError:
    """One line for an error of the operating system while ``out`` was written."""
    end = "run it again to continue" if resumable else "nothing was changed"
    return BridgeError(f"cannot write {out}: {error.strerror or error}; {end}")


def publish_folder(folder: Path, out: Path) -> None:
    """Flush the finished hidden folder to the disk and give it its name; an older ``out`` goes."""
    (folder / _LOCK).unlink(missing_ok=True)
    for path in [*folder.rglob("*"), folder]:
        flush(path)
    old = _old(out)
    if out.exists():
        os.rename(out, old)
    try:
        os.rename(folder, out)
    except OSError:
        if old.exists():
            os.rename(old, out)
        raise
    flush(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def flush(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replaceable(foreign: Callable[[Path], str | None], *, force: bool) -> Callable[[Path], str | None]:
    """The ``foreign`` of a :func:`staged_folder` of a command that has ``--force``."""

    def reason(out: Path) -> str | None:
        found = None if force else foreign(out)
        return found and (
            f"{out} holds what this command did not write ({found}); give another folder, or --force to replace it "
            "with everything in it"
        )

    return reason


def _lock(folder: Path, out: Path) -> int:
    """An open descriptor that holds the folder until it is closed, also by the death of this process."""
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise BridgeError(f"another process is writing {out}; wait for it, or give another folder") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:  # a shared file system may have no locks; the rename is atomic all the same
            os.close(descriptor)
            raise
    return descriptor


def _old(out: Path) -> Path:
    return out.parent / f".{out.name}.old"


def _refuse_foreign(out: Path, foreign: Callable[[Path], str | None] | None) -> None:
    if out.exists() and not out.is_dir():
        raise BridgeError(f"{out} is a file; give a folder")
    if out.is_dir() and any(out.iterdir()):
        place = out.resolve()
        if place in (Path.home(), *Path.cwd().parents, Path.cwd()) or place.is_mount():
            raise BridgeError(f"{out} is never replaced; give a folder of its own")
        reason = foreign(out) if foreign else None
        if foreign is None and not (out / "config.json").exists():
            reason = f"{out} is not empty and no model folder; give another folder"
        if reason is not None:
            raise BridgeError(reason)
