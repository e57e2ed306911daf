"""Debian's packages for tests: installed as root where they are missing, one process at a time, no service started."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_PATIENT = ("--option=Acquire::Retries=5", "--option=DPkg::Lock::Timeout=300")
_POLICY = Path("/usr/sbin/policy-rc.d")
_LOCK = Path(tempfile.gettempdir()) / "mua-debian-packages.lock"


class PackagesUnavailable(RuntimeError):
    """Packages are missing and could not be installed; the message names the command."""


def install(packages: Sequence[str], missing: Callable[[], object], seconds: float = 900.0) -> None:
    """Install Debian's ``packages`` while ``missing()`` is true, without starting their services.

    Raises:
        PackagesUnavailable: not Debian, not root, or apt-get failed.
    """
    if not missing():
        return
    command = f"apt-get install --no-install-recommends {' '.join(packages)}"
    if shutil.which("apt-get") is None:
        raise PackagesUnavailable(f"{', '.join(packages)} missing, and there is no apt-get; install them by hand")
    if os.geteuid():
        raise PackagesUnavailable(f"{', '.join(packages)} missing; as root run: {command}")
    with _alone():
        if not missing():  # another process has installed them in the meantime
            return
        print(f"installing {', '.join(packages)}", file=sys.stderr, flush=True)
        with _no_services():
            for arguments in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
                done = subprocess.run(
                    ["apt-get", "-qq", *_PATIENT, *arguments], capture_output=True, text=True, timeout=seconds,
                    env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
                )  # fmt: skip
                if done.returncode:
                    raise PackagesUnavailable(f"apt-get {arguments[0]} failed; run {command}\n{done.stderr[-2000:]}")
    if missing():
        raise PackagesUnavailable(f"apt-get installed {', '.join(packages)}, but their programs are still missing")


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Two that install at once would fail at dpkg's lock, or one remove the policy that the other still needs."""
    with _LOCK.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _no_services() -> Iterator[None]:
    """Debian starts services it installs, unless this file forbids it."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink(missing_ok=True)
