"""Machines emulated on this one: each with a network, a host name, process ids, files and a clock, and a cable to pull.

A machine is a network namespace behind a bridge; this machine is the address :attr:`Hosts.head` on the bridge. What
runs on a machine has process ids and a host name of its own, does not see the folders that are hidden from it, cannot
reach the loopback address of this machine, and reads a clock that is off by as many seconds as a test likes (Debian's
libfaketime). It needs root and iproute2.

Not covered: another processor, another kernel, bandwidth and latency of a network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e_support import environment
from tools.debian_packages import PackagesUnavailable, install

_LIBRARIES = Path("/usr/lib")


@dataclass(frozen=True)
class Host:
    """One machine."""

    name: str
    address: str
    cable: str
    """The bridge's end of its cable."""

    def plug(self, state: str) -> None:
        """``down`` pulls the cable, of which nobody is told; ``up`` puts it in again."""
        _ip("link", "set", self.cable, state)

    def start(
        self, *arguments: str | Path, cwd: Path, hidden: Sequence[Path], clock_seconds: int = 0
    ) -> subprocess.Popen[str]:
        """``mua arguments`` on it, output to the files ``stdout`` and ``stderr`` of ``cwd``; killing it kills all it
        has started. ``hidden`` are folders it does not see; its clock is ``clock_seconds`` ahead."""
        mounts = "".join(f"mount -t tmpfs none '{folder}' && " for folder in hidden)
        script = f'{mounts}hostname {self.name} && exec "$@"'
        clock = (f"LD_PRELOAD={_faketime()}", f"FAKETIME={clock_seconds:+d}", "FAKETIME_DONT_FAKE_MONOTONIC=1")
        with (cwd / "stdout").open("w") as out, (cwd / "stderr").open("w") as err:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, "unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child",
                 "--mount-proc", "sh", "-c", script, "sh", "env", *clock, sys.executable, "-m", "mua.cli",
                 *map(str, arguments)],
                cwd=cwd, env=environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True,
                start_new_session=True,
            )  # fmt: skip


@dataclass(frozen=True)
class Hosts:
    """This machine and those it reaches."""

    head: str
    """Address of this machine."""
    others: list[Host]


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """``count`` machines beside this one, or the test is skipped with the reason."""
    try:
        install(("iproute2",), lambda: shutil.which("ip") is None)
        install(("libfaketime",), lambda: _faketime() is None)
    except PackagesUnavailable as error:
        pytest.skip(str(error))
    if os.geteuid():
        pytest.skip("network namespaces need root")
    mark, net = f"mua{os.getpid()}", f"10.231.{os.getpid() % 250 + 1}"
    with ExitStack() as stack:
        made = subprocess.run(["ip", "link", "add", mark, "type", "bridge"], capture_output=True, text=True, timeout=30)
        if made.returncode:
            pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
        stack.callback(_ip, "link", "del", mark)
        _ip("addr", "add", f"{net}.1/24", "dev", mark)
        _ip("link", "set", mark, "up")
        others = []
        for number in range(count):
            host = Host(f"{mark}-h{number}", f"{net}.{number + 10}", f"{mark}c{number}")
            _ip("netns", "add", host.name)
            stack.callback(_ip, "netns", "del", host.name)
            _ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _ip("link", "set", host.cable, "master", mark, "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host.name, "link", "set", device, "up")
            others.append(host)
        yield Hosts(f"{net}.1", others)


def _faketime() -> Path | None:
    return next(iter(sorted(_LIBRARIES.glob("*/faketime/libfaketime.so.1"))), None)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)
