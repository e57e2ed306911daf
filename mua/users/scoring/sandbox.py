"""A sandbox for programs that a policy wrote: its start by bubblewrap, its calls, and its end.

::

    start() ──► command (bwrap) ──► sandbox_inside.py, process 1 of the sandbox ──► one tree of processes per call
                 dies with us         ends with its input                            killed when the call ends

Scorer ``code`` runs tests in it. The tool server ``environments.servers.sandbox`` offers it to policies, and brings
containers of Docker and Apptainer, which run the same ``sandbox_inside.py``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import random
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from mua.config.section import Positive, PositiveFloat, Section
from mua.types import Json
from mua.utils.errors import ConfigError, EnvironmentFault
from mua.utils.strict_json import unpaired_surrogate

ProgramKind: TypeAlias = Literal["python", "shell"]

log = logging.getLogger(__name__)

INSIDE = Path(__file__).with_name("sandbox_inside.py")
MIB = 1024 * 1024
PYTHON = "/usr/bin/python3"
BOOT = """\
import json, os, sys
text = b""
while not text.endswith(b"\\n"):
    text += os.read(0, 65536) or sys.exit("no program came")
exec(compile(json.loads(text), "inside.py", "exec"))
"""
"""Takes the program that runs inside from the first line of its input, which shows it to nobody and fits any image."""
VARIABLES = {
    "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/work", "LANG": "C.UTF-8", "TMPDIR": "/tmp", "PYTHONHASHSEED": "0",
}  # fmt: skip
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
LONGEST_PROGRAM = 100_000
"""Bytes of one program; Linux takes 131,072 as one argument."""
_FORKS = """\
import os, signal
made = 0
try:
    while made <= {most}:
        if not os.fork():
            signal.pause()
        made += 1
except OSError:
    pass
print(made)
"""
GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_GRACE = 5.0
"""Seconds beyond a call's deadline after which the sandbox itself is taken for dead."""
_END_SECONDS = 10.0
_LEAVES = 100
"""How often the group of a sandbox that has ended is tried to be removed."""
_LONGEST_ANSWER = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How one call ended."""

    output: str
    """Standard output and error, at most ``output_bytes`` of them and a line that says how many were cut."""
    code: int | None
    """Exit status, negative for a signal; None where the call was killed, or never ran."""
    fault: str = ""
    """Why the call was killed or did not run; empty where it ended itself."""
    lost: bool = False
    """The sandbox ended in the call, and its files with it."""


class SandboxLimits(Section):
    """What one sandbox may use. The system in it is read-only."""

    call_seconds: PositiveFloat = 20.0
    """Deadline of one call by the clock; everything the call started is then killed."""
    cpu_seconds: Positive = 20
    """Processor time of each process."""
    memory_mib: Positive = 512
    """Memory of all processes and sockets together, looked at every 50 ms, and the limit of each address
    space. In a control group, where the machine lets us have one, the kernel keeps it to this and the folders."""
    processes: Positive = 64
    """Processes and threads at once."""
    disk_mib: Positive = 64
    """Size of the working folder and of /tmp, each; they live in memory."""
    files: Positive = 50_000
    """Files and folders that programs may have at once."""
    output_bytes: Annotated[int, Field(ge=64, le=400_000)] = 8000
    """Longest output of a call in bytes; its head and tail are kept, and the number of bytes cut is said."""
    start_seconds: PositiveFloat = 30.0
    """Deadline of starting one."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How one sandbox is started and ended."""

    command: list[str]
    variables: dict[str, str]
    """Of the program that starts the sandbox, never of the sandbox."""
    end: list[str] | None = None
    """What ends it where killing the command is not enough."""
    inherits: tuple[int, ...] = ()
    """File descriptors that the command needs."""
    group: Path | None = None
    """The control group that all of it is in; see :func:`in_group`."""


def check_bubblewrap() -> str:
    """The path of bubblewrap. Raises :class:`ConfigError` where it cannot be used on this machine."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise ConfigError("sandboxes need Linux on x86_64 or aarch64")
    if (bwrap := shutil.which("bwrap")) is None:
        raise ConfigError("sandboxes need the program bwrap, which is not on PATH; install the package bubblewrap")
    if not Path(PYTHON).exists():
        raise ConfigError(f"bubblewrap needs {PYTHON}; install Debian's package python3")
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        raise ConfigError("started as root, bubblewrap needs setpriv; install Debian's package util-linux")
    return bwrap


def limits_text(limits: SandboxLimits, *, counted: bool = True) -> str:
    """For ``sandbox_inside.py``; ``counted``: whether the kernel counts the user's processes for this sandbox alone."""
    return json.dumps({
        "cpu": limits.cpu_seconds, "memory": limits.memory_mib * MIB, "disk": limits.disk_mib * MIB,
        "processes": limits.processes if counted else None, "files": limits.files,
    })  # fmt: skip


def in_group(config: SandboxLimits, launch: Launch) -> Launch:
    """``launch`` in a control group of its own, where this machine lets us make one, else as it is.

    The kernel then counts all memory of the sandbox, its folders and what it takes for sockets and the like included,
    and ends a process where it would be more. cgroup v1 needs our group to be writable, v2 the one above it.
    """
    most = (config.memory_mib + 2 * config.disk_mib + 64) * MIB
    for line in OWN_GROUPS.read_text(encoding="ascii").splitlines() if OWN_GROUPS.exists() else ():
        _, controllers, own = line.split(":", 2)
        if "memory" in controllers.split(","):
            parent = GROUPS / "memory" / own.lstrip("/")
            limits = {"memory.limit_in_bytes": most, "memory.memsw.limit_in_bytes": most}
        elif not controllers and own != "/":
            parent, limits = (GROUPS / own.lstrip("/")).parent, {"memory.max": most, "memory.swap.max": 0}
        else:
            continue
        for left in parent.glob("mua-sandbox-*"):
            if not Path(f"/proc/{left.name.split('-')[2]}").exists():  # its run was killed
                with suppress(OSError):
                    left.rmdir()
        group = parent / f"mua-sandbox-{os.getpid()}-{random.SystemRandom().getrandbits(32):08x}"
        written = 0
        with suppress(OSError):  # there may be no swap to count
            group.mkdir()
            for name, value in limits.items():
                written += (group / name).write_text(str(value), encoding="ascii")
        if written:
            enter = ["/bin/sh", "-c", '{ echo 0 > "$0/cgroup.procs"; } 2> /dev/null; exec "$@"', str(group)]
            return replace(launch, command=[*enter, *launch.command], group=group)
        with suppress(OSError):
            group.rmdir()
    return launch


def bubblewrap(config: SandboxLimits, info: int) -> Launch:
    """Nothing of the machine but its system, read-only, is in it. Raises as :func:`check_bubblewrap`.

    Started as root, each sandbox gets a user id of its own that exists nowhere else, so that the kernel's limit on
    processes counts (it exempts root) and no sandbox owns a file of the machine. By ``setpriv``, because Python changes
    users only in a copy of itself, which takes long where it is large.
    """
    command = [check_bubblewrap(), "--info-fd", str(info), "--unshare-all", "--unshare-user", "--uid", "65534",
               "--gid", "65534", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv",
               "--hostname", "sandbox", "--cap-drop", "ALL"]  # fmt: skip
    for path in _SYSTEM:
        if Path(path).is_symlink():
            command += ["--symlink", os.readlink(path), path]
        elif Path(path).exists():
            command += ["--ro-bind", path, path]
    size = str(config.disk_mib * MIB)
    # /dev/full gives zeros too, and cannot be mapped: shared mappings of /dev/zero are memory that nothing counts.
    command += ["--proc", "/proc", "--dev", "/dev", "--dev-bind", "/dev/full", "/dev/zero"]
    command += ["--size", "1048576", "--tmpfs", "/dev/shm"]
    command += ["--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", "/work", "--chdir", "/work"]
    for name, value in VARIABLES.items():
        command += ["--setenv", name, value]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", PYTHON, "-I", "-c", BOOT, limits_text(config)]
    user, group = (_unused(Path(f"/proc/self/{kind}_map")) for kind in ("uid", "gid"))
    if os.geteuid() == 0 and user is not None and group is not None:
        identity = ["--reuid", str(user), "--regid", str(group), "--clear-groups"]
        command = [str(shutil.which("setpriv")), *identity, "--", *command]
    return in_group(config, Launch(command, {}, inherits=(info,)))


def _unused(ids: Path) -> int | None:
    """An id that nobody else has, of those that there are here; None in a namespace of one id, whose root is limited.

    A container without root on its host has some ten thousand ids, in which two sandboxes may rarely meet.
    """
    ranges = [tuple(map(int, line.split())) for line in ids.read_text(encoding="ascii").splitlines()]
    first, _, count = max(ranges, key=lambda one: one[2])
    if count >= 1 << 31:
        return random.SystemRandom().randrange(1 << 20, 1 << 30)
    low = max(first, 1)
    return random.SystemRandom().randrange(low, first + count) if first + count > low else None


class Sandbox:
    """Lives from :meth:`start` to :meth:`close`; files in ``/work`` last that long. Calls come one at a time."""

    def __init__(
        self, config: SandboxLimits, backend: str = "bubblewrap",
        launch: Callable[[SandboxLimits, int], Launch] = bubblewrap,
    ) -> None:  # fmt: skip
        """``launch`` says how to start it, given the descriptor that its first process is written to."""
        self._config = config
        self._backend = backend
        self._start_command = launch
        self._launch: Launch | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._first = -1
        """A file descriptor of the sandbox's first process; -1 where it is not known."""
        self._turn = asyncio.Lock()
        self._number = 0

    @property
    def alive(self) -> bool:
        """Whether a call can be tried."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Raises :class:`ConfigError` without its backend, :class:`EnvironmentFault` for one that fails."""
        told, tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            launch = self._launch = self._start_command(self._config, tell)
            process = self._process = await asyncio.create_subprocess_exec(
                *launch.command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE, env=launch.variables, cwd="/", start_new_session=True,
                limit=_LONGEST_ANSWER, pass_fds=launch.inherits,
            )  # fmt: skip
            assert process.stdin is not None
            process.stdin.write(json.dumps(INSIDE.read_text(encoding="utf-8")).encode() + b"\n")
            name = f"sandbox ({self._backend})"
            try:
                async with asyncio.timeout(self._config.start_seconds):
                    greeting = await self._answer(process, 0)
            except TimeoutError:
                late = f"it is not ready within {self._config.start_seconds:g} s (start_seconds)"
                raise EnvironmentFault(f"{name}: {late}", passing=True) from None
            if greeting is None:
                raise EnvironmentFault(f"{name} does not start: {await self._said(process)}", passing=True)
            self._know_first(told)
            if launch.group is not None and not (launch.group / "cgroup.procs").read_bytes():
                log.warning("%s cannot enter %s: its own first process alone limits its memory", name, launch.group)
            result = await self._run("shell", "exit 7", self._config.start_seconds)
            if result.code != 7:
                why = result.fault or result.output.strip() or f"exit status {result.code}"
                raise EnvironmentFault(f"sandbox ({self._backend}) runs no program: {why}", passing=True)
        except BaseException:
            self._know_first(told)
            await self.close()
            raise
        finally:
            os.close(told)
            os.close(tell)

    async def shell(self, command: str) -> SandboxResult:
        """Run ``command`` with ``bash``, or ``sh`` where there is none, in the working folder."""
        return await self.run("shell", command)

    async def run(self, kind: ProgramKind, text: str) -> SandboxResult:
        """Run a program under ``call_seconds``. Whatever it does gives a result; a cancellation kills it."""
        if "\0" in text:
            return SandboxResult("", None, "not run: the text has a zero byte")
        if (at := unpaired_surrogate(text)) is not None:
            return SandboxResult("", None, f"not run: character {at} is an unpaired surrogate, no text")
        if (size := len(text.encode())) > LONGEST_PROGRAM:
            return SandboxResult(
                "", None, f"not run: {size} bytes, more than {LONGEST_PROGRAM}; write it to a file in parts"
            )
        async with self._turn:
            if not self.alive:
                return SandboxResult("", None, "the sandbox has ended", lost=True)
            return await self._run(kind, text, self._config.call_seconds)

    async def prove_limit(self) -> None:
        """Try to have more processes than allowed. Raises :class:`EnvironmentFault` where that works."""
        most = self._config.processes
        result = await self._run("python", _FORKS.format(most=most), self._config.start_seconds)
        made = result.output.strip()
        if result.code != 0 or not made.isdigit():
            why = result.fault or result.output.strip()[-500:] or f"exit status {result.code}"
            raise EnvironmentFault(f"sandbox ({self._backend}) runs no Python: {why}")
        if int(made) > most:
            raise EnvironmentFault(
                f"sandbox ({self._backend}): this machine does not keep it to {most} processes; start the run "
                "as a user that the kernel does not take for root"
            )

    async def close(self) -> None:
        """Kill everything in the sandbox; on return nothing of it is left, its files included."""
        process, self._process = self._process, None
        first, self._first = self._first, -1
        if process is None:
            return
        try:
            await self._kill(process, first)
            if self._launch is not None and self._launch.end is not None:  # it may find nothing to end
                devnull = asyncio.subprocess.DEVNULL
                ending = await asyncio.create_subprocess_exec(
                    *self._launch.end, stdin=devnull, stdout=devnull, stderr=devnull, env=self._launch.variables
                )
                try:
                    async with asyncio.timeout(_END_SECONDS):
                        await ending.wait()
                except TimeoutError:
                    ending.kill()
                    log.warning("%s does not end", " ".join(self._launch.end))
        finally:
            if first >= 0:
                os.close(first)
            for _ in range(_LEAVES):
                if self._launch is None or self._launch.group is None or not self._launch.group.exists():
                    break
                with suppress(OSError):  # its last process may still be on its way out
                    self._launch.group.rmdir()
                await asyncio.sleep(0.01)

    # ---- inside

    def _know_first(self, told: int) -> None:
        """Open the sandbox's first process, if its backend has said which it is."""
        if self._first < 0:
            with suppress(OSError, ValueError, KeyError):
                self._first = os.pidfd_open(json.loads(os.read(told, 4096))["child-pid"])

    async def _run(self, kind: ProgramKind, text: str, seconds: float) -> SandboxResult:
        process, config = self._process, self._config
        assert process is not None
        assert process.stdin is not None
        self._number += 1
        number = self._number
        request = {"id": number, "kind": kind, "text": text, "seconds": seconds}
        killed_before = self._killed_for_memory()
        try:
            process.stdin.write(json.dumps(request | {"output": config.output_bytes}).encode() + b"\n")
            async with asyncio.timeout(seconds + _GRACE):
                answer = await self._answer(process, number)
            if answer is None:
                why = await self._said(process)
            elif answer["why"] == "files":
                why = f"there were more than {config.files} files"
            else:
                output, code, killed = str(answer["output"]), int(str(answer["code"])), str(answer["why"])
                told = {
                    "late": f"killed after {config.call_seconds:g} s",
                    "memory": f"killed: its processes held more than {config.memory_mib} MiB of memory",
                    "stopped": "stopped",
                }
                if self._killed_for_memory() > killed_before:
                    killed = "memory"
                if killed:
                    return SandboxResult(output, None, told[killed])
                too_long = f"killed after {config.cpu_seconds} s of processor time" if code == -signal.SIGXCPU else ""
                return SandboxResult(output, code, too_long)
        except asyncio.CancelledError:
            with suppress(OSError, RuntimeError):
                process.stdin.write(json.dumps({"stop": number}).encode() + b"\n")
            raise
        except TimeoutError:
            why = f"it did not answer within {seconds + _GRACE:g} s"
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            why = f"what it says cannot be read ({type(error).__name__})"
        await self._kill(process, self._first)
        return SandboxResult("", None, f"the sandbox has ended: {why}", lost=True)

    def _killed_for_memory(self) -> int:
        """How many processes the kernel has ended at the limit of the sandbox's group."""
        group = self._launch.group if self._launch is not None else None
        for name in ("memory.events", "memory.oom_control"):
            if group is None:
                break
            with suppress(OSError):
                lines = (group / name).read_text(encoding="ascii").splitlines()
                return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
        return 0

    async def _answer(self, process: asyncio.subprocess.Process, number: int) -> Json | None:
        """The answer to a request; those to earlier ones, which nobody waits for any more, are dropped."""
        assert process.stdout is not None
        while line := await process.stdout.readline():
            answer: Json = json.loads(line)
            if answer["id"] == number:
                return answer
        return None

    async def _said(self, process: asyncio.subprocess.Process) -> str:
        """What a sandbox said in ending."""
        assert process.stderr is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                said = (await process.stderr.read(4000)).decode("utf-8", "replace").split()
                await process.wait()
                return " ".join(said)[-500:] if said else ending(process.returncode or 0)
        return "its output has ended"

    async def _kill(self, process: asyncio.subprocess.Process, first: int) -> None:
        """Kill the sandbox's first process, with which everything in it and its command go, or else the command."""
        if first >= 0:
            with suppress(OSError):
                signal.pidfd_send_signal(first, signal.SIGKILL)
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await process.wait()
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
        try:
            async with asyncio.timeout(_END_SECONDS):
                await process.wait()
                if first >= 0:  # it is no child of ours
                    ended = asyncio.Event()
                    asyncio.get_running_loop().add_reader(first, ended.set)
                    try:
                        await ended.wait()
                    finally:
                        asyncio.get_running_loop().remove_reader(first)
        except TimeoutError:
            log.warning("sandbox (%s): it does not end", self._backend)


def ending(status: int) -> str:
    """What an exit status says; negative for a signal."""
    if status >= 0:
        return f"exit status {status}"
    with suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"killed by signal {-status}"
