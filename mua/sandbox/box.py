"""One rollout's sandbox: its calls, and its end.

::

    start() ──► backend's command ──► inside.py, process 1 of the sandbox ──► one tree of processes a call
                 dies with us            ends with its input                    killed when the call ends
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mua.config.tools import ProgramKind, SandboxConfig
from mua.sandbox.backends import Launch, check_backend, launch
from mua.utils.errors import EnvironmentFault
from mua.utils.strict_json import unpaired_surrogate

log = logging.getLogger(__name__)

INSIDE = Path(__file__).with_name("inside.py")
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
_GRACE = 5.0
"""Seconds beyond a call's deadline after which the sandbox itself is taken for dead."""
_END_SECONDS = 10.0
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


class Sandbox:
    """Lives from :meth:`start` to :meth:`close`; files in ``/work`` last that long. Calls come one at a time."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
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
        check_backend(self._config)
        told, tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._launch = launch(self._config, tell)
            await self._start(self._launch)
            self._know_first(told)
            result = await self._run("shell", "exit 7", self._config.start_seconds)
            if result.code != 7:
                why = result.fault or result.output.strip() or f"exit status {result.code}"
                raise EnvironmentFault(f"sandbox ({self._config.backend}) runs no program: {why}", passing=True)
        except BaseException:
            self._know_first(told)
            await self.close()
            raise
        finally:
            os.close(told)
            os.close(tell)

    async def python(self, code: str) -> SandboxResult:
        """Run ``code`` as a program of its own; variables are not kept, files are."""
        return await self.run("python", code)

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
            raise EnvironmentFault(f"sandbox ({self._config.backend}) runs no Python: {why}")
        if int(made) > most:
            raise EnvironmentFault(
                f"sandbox ({self._config.backend}): this machine does not keep it to {most} processes; start the run "
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
            if self._launch is not None and self._launch.end is not None:
                await _quietly(self._launch.end, self._launch.variables)
        finally:
            if first >= 0:
                os.close(first)

    def last_words(self) -> str:
        """How the sandbox ended by itself, where it did."""
        status = self._process.returncode if self._process is not None else None
        return "it was closed" if status is None else ending(status)

    # ---- inside

    async def _start(self, start: Launch) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *start.command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, env=start.variables, cwd="/", start_new_session=True, limit=_LONGEST_ANSWER,
            pass_fds=start.inherits,
        )  # fmt: skip
        assert self._process.stdin is not None
        name = f"sandbox ({self._config.backend})"
        try:
            self._process.stdin.write(json.dumps(INSIDE.read_text(encoding="utf-8")).encode() + b"\n")
            async with asyncio.timeout(self._config.start_seconds):
                greeting = await self._answer(0)
        except TimeoutError:
            late = f"it is not ready within {self._config.start_seconds:g} s (start_seconds)"
            raise EnvironmentFault(f"{name}: {late}", passing=True) from None
        if greeting is None:
            raise EnvironmentFault(f"{name} does not start: {await self._said()}", passing=True)

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
        try:
            process.stdin.write(json.dumps(request | {"output": config.output_bytes}).encode() + b"\n")
            async with asyncio.timeout(seconds + _GRACE):
                answer = await self._answer(number)
            if answer is None:
                why = await self._said()
            elif answer["why"] == "files":
                why = f"there were more than {config.files} files"
            else:
                return self._result(answer)
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

    async def _answer(self, number: int) -> dict[str, object] | None:
        """The answer to a request; those to earlier ones, which nobody waits for any more, are dropped."""
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            if answer["id"] == number:
                found: dict[str, object] = answer
                return found
        return None

    def _result(self, answer: dict[str, object]) -> SandboxResult:
        config = self._config
        output, code, why = str(answer["output"]), int(str(answer["code"])), str(answer["why"])
        told = {
            "late": f"killed after {config.call_seconds:g} s",
            "memory": f"killed: its processes held more than {config.memory_mib} MiB of memory",
            "stopped": "stopped",
        }
        if why:
            return SandboxResult(output, None, told[why])
        if code == -signal.SIGXCPU:
            return SandboxResult(output, code, f"killed after {config.cpu_seconds} s of processor time")
        return SandboxResult(output, code)

    async def _said(self) -> str:
        """What a sandbox said in ending."""
        process = self._process
        assert process is not None
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
                if first >= 0:
                    await _ended(first)
        except TimeoutError:
            log.warning("sandbox (%s): it does not end", self._config.backend)


async def _ended(pidfd: int) -> None:
    """Wait for a process that is no child of ours."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()

    def ready() -> None:
        if not over.done():
            over.set_result(None)

    loop.add_reader(pidfd, ready)
    try:
        await over
    finally:
        loop.remove_reader(pidfd)


async def _quietly(command: list[str], variables: dict[str, str]) -> None:
    """Run ``command``, which may find nothing to end."""
    devnull = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *command, stdin=devnull, stdout=devnull, stderr=devnull, env=variables
    )
    try:
        async with asyncio.timeout(_END_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        log.warning("%s does not end", " ".join(command))


def ending(status: int) -> str:
    """What an exit status says; negative for a signal."""
    if status >= 0:
        return f"exit status {status}"
    with suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"killed by signal {-status}"
