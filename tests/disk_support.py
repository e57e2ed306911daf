"""Disks that are full: a small file system of one's own, or a bound on the size of files, which everybody may set."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """A file system in memory, mounted at ``folder``; the test is skipped where that is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    try:
        mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("a file system cannot be mounted here; the bound on the size of files is tested everywhere")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=60)


def fill(folder: Path, left: int = 0) -> None:
    """Leave ``left`` bytes free on the disk of ``folder``, less what a last block holds."""
    with (folder / "ballast").open("wb", buffering=0) as file:
        for size in (4096, 1):
            while os.statvfs(folder).f_bavail * os.statvfs(folder).f_bsize > left:
                try:
                    file.write(b"x" * size)
                except OSError:
                    break


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process grows beyond ``size`` bytes; a write that would is refused (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
