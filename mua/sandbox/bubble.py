"""One rollout's sandbox under bubblewrap: its calls, limits and end.

::

    start ──► bwrap (own user, PID, mount, network, IPC namespace) ──► inside.py ──► one process tree a call
                 dies with us, and everything in it with it                killed when the call ends

Started as root, each sandbox gets a user id of its own that exists nowhere else, so that the kernel's limit on
processes counts (it exempts root) and no sandbox owns a file of the machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from mua.config.sandbox_section import SandboxConfig
from mua.errors import ConfigError, EnvironmentFault

_GRACE = 5.0
"""Seconds beyond a call's deadline after which the sandbox itself is taken for dead."""
_WATCH = 0.05
_MIB = 1024 * 1024
_LONGEST_ANSWER = 16 * _MIB
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_PYTHON = "/usr/bin/python3"


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How one call ended."""

    output: str
    """Standard output and error, cut to ``output_characters``."""
    code: int | None
    """Exit status, negative for a signal; None where the call was killed for time or memory."""
    fault: str = ""
    """Why the call was killed; empty where it ended itself."""


class Sandbox:
    """Lives from :meth:`start` to :meth:`close`; files in ``/work`` last that long. Calls come one at a time."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Raises :class:`ConfigError` without bubblewrap, :class:`EnvironmentFault` when it cannot start here."""
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise ConfigError("the sandbox needs bubblewrap: install Debian's package bubblewrap (bwrap)")
        if not Path(_PYTHON).exists():
            raise ConfigError(f"the sandbox needs {_PYTHON}: install Debian's package python3")
        identity = random.SystemRandom().randrange(1 << 20, 1 << 30) if os.geteuid() == 0 else None
        self._process = await asyncio.create_subprocess_exec(
            *bubblewrap_command(bwrap, self._config),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={}, user=identity, group=identity, extra_groups=[] if identity is not None else None,
            cwd="/", start_new_session=True, limit=_LONGEST_ANSWER,
        )  # fmt: skip
        try:
            result = await self._call(["/bin/true"], 10.0)
        except BaseException:
            await self.close()
            raise
        if result.code != 0:
            await self.close()
            raise EnvironmentFault(f"the sandbox does not start: {result.fault or result.output}")

    async def python(self, code: str) -> SandboxResult:
        """Run ``code`` as a program of its own; variables are not kept, files are."""
        return await self._call([_PYTHON, "-c", code], self._config.call_seconds)

    async def shell(self, command: str) -> SandboxResult:
        """Run ``command`` with ``/bin/sh`` in the working folder."""
        return await self._call(["/bin/sh", "-c", command], self._config.call_seconds)

    async def close(self) -> None:
        """Kill everything in the sandbox; its files go with it."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
        await process.wait()

    async def _call(self, command: list[str], seconds: float) -> SandboxResult:
        if any("\0" in word for word in command):
            return SandboxResult("", 1, "not run: the text has a zero byte")
        if max(map(len, command)) > 100_000:
            return SandboxResult("", 1, "not run: longer than 100000 characters; write it to a file in parts")
        async with self._turn:
            process = self._process
            if process is None or process.returncode is not None:
                return SandboxResult("", None, "the sandbox has ended")
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            request = {"command": command, "seconds": seconds, "output": self._config.output_characters}
            watch = asyncio.create_task(self._watch_memory(process))
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                line = await asyncio.wait_for(process.stdout.readline(), seconds + _GRACE)
                answer = json.loads(line) if line else None
                return self._result(answer) if answer is not None else await self._dead(process, watch)
            except (TimeoutError, ValueError, KeyError, TypeError, ConnectionError):
                return await self._dead(process, watch)
            finally:
                watch.cancel()

    def _result(self, answer: dict[str, object]) -> SandboxResult:
        output, code = str(answer["output"])[: 2 * self._config.output_characters], int(str(answer["code"]))
        if answer["late"]:
            return SandboxResult(output, None, f"killed after {self._config.call_seconds:g} s")
        return SandboxResult(output, code)

    async def _dead(self, process: asyncio.subprocess.Process, watch: asyncio.Task[bool]) -> SandboxResult:
        """The sandbox ended in a call: for memory, or because the program attacked it. It does not come back."""
        over = watch.done() and not watch.cancelled() and watch.result()
        assert process.stderr is not None
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        said = (await process.stderr.read(2000)).decode("utf-8", "replace").strip()
        why = f"used more than {self._config.memory_mib} MiB" if over else (said or "its processes were killed")
        return SandboxResult("", None, f"the sandbox has ended: {why}")

    async def _watch_memory(self, process: asyncio.subprocess.Process) -> bool:
        """Kill the sandbox when all its processes together hold more than ``memory_mib``; whether that happened."""
        while process.returncode is None:
            if await asyncio.to_thread(resident_bytes, process.pid) > self._config.memory_mib * _MIB:
                with suppress(ProcessLookupError):
                    process.kill()
                return True
            await asyncio.sleep(_WATCH)
        return False


def resident_bytes(pid: int) -> int:
    """Memory of ``pid`` and all below it, private pages only, so that shared ones are not counted repeatedly."""
    total = 0
    with suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                memory = process.memory_info()
                total += memory.rss - memory.shared
    return total


def bubblewrap_command(bwrap: str, config: SandboxConfig) -> list[str]:
    """The command that starts a sandbox: nothing of the machine but its system, read-only, is in it."""
    limits = [config.cpu_seconds, config.memory_mib * _MIB, config.processes, config.disk_mib * _MIB]
    command = [bwrap, "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534", "--die-with-parent",
               "--new-session", "--clearenv", "--hostname", "sandbox", "--cap-drop", "ALL"]  # fmt: skip
    for path in _SYSTEM:
        if Path(path).is_symlink():
            command += ["--symlink", os.readlink(path), path]
        elif Path(path).exists():
            command += ["--ro-bind", path, path]
    size = str(config.disk_mib * _MIB)
    command += ["--proc", "/proc", "--dev", "/dev", "--size", "1048576", "--tmpfs", "/dev/shm"]
    command += ["--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", "/work", "--chdir", "/work"]
    for name, value in {"PATH": "/usr/bin:/bin", "HOME": "/work", "LANG": "C.UTF-8", "TMPDIR": "/tmp"}.items():
        command += ["--setenv", name, value]
    program = Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
    return [*command, "--remount-ro", "/", _PYTHON, "-I", "-c", program, json.dumps(limits)]


if sys.platform != "linux":  # pragma: no cover
    raise ImportError("sandboxes need Linux")
