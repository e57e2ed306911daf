"""Engines of the forked commands, forked from one interpreter that has imported SGLang.

Of the thirteen seconds of processor time that an engine's start takes, eleven import SGLang. Here one process pays for
that once, when the first engine is asked for. What it forks is the guardian (``mua/utils/guardian.py``), which forks
the server: the same code with the same arguments, environment, log, session and, below the guardian, family, but for
two things. The guardian watches its owner by a descriptor instead of as its parent, and in the lists of processes all
have the name of the process they were forked from. What concerns the life of the server's processes is tested with
real ones: ``e2e_support.start(own_engine=True)``, engines of the tests' own process, and ``tools/chaos.py``. A run that
outlives faults of its forked engines is tested besides, in tests/e2e.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from tests.forked_commands import ForkedCommand, Request, receive_with, run, send, serve, settle

ADDRESS = "MUA_TEST_ENGINES"
"""The variable that names the socket where commands ask for engines."""
PRELOADED = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
)
_getppid, _popen = os.getppid, subprocess.Popen


class EngineForker:
    """The process that forks engines. It starts with the first address that is asked for and ends with this one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def address(self, environment: Mapping[str, str]) -> str:
        """The socket where engines are asked for; ``environment`` is that of the commands which will."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="mua-engines-")
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(f"{self._folder.name}/socket")
                listener.listen(64)
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.forked_engines", str(listener.fileno()), str(os.getpid())],
                    env=_environment(environment), pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )  # fmt: skip
        return f"{self._folder.name}/socket"

    def stop(self) -> None:
        """Ends the process that forks; engines that still run end with their owners."""
        if self._process is not None and self._folder is not None:
            self._process.kill()
            self._process.wait()
            self._folder.cleanup()
            self._process = self._folder = None


def _environment(base: Mapping[str, str]) -> dict[str, str]:
    """Variables under which SGLang can be imported."""
    from mua.compat import sglang_cpu, sglang_keys

    return sglang_cpu.cpu_environment(base=sglang_keys.with_plugin(base))


FORKER = EngineForker()
atexit.register(FORKER.stop)


# ---- in a command


def use_forked_engines() -> None:
    """Have this process ask for its engines, if there is somebody to ask."""
    if address := os.environ.get(ADDRESS):
        server = importlib.import_module("mua.engine.server")
        vars(server)["start_process"] = partial(ask, address)


class WithForkedEngines:
    """``function`` for ranks of their own: while it runs there, engines are forked. Can be pickled if that can."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.address = FORKER.address(os.environ)

    def __call__(self, *arguments: Any) -> Any:
        server = importlib.import_module("mua.engine.server")
        real = vars(server)["start_process"]
        vars(server)["start_process"] = partial(ask, self.address)
        try:
            return self.function(*arguments)
        finally:
            vars(server)["start_process"] = real


def ask(address: str, command: list[str], log: BinaryIO, environment: Mapping[str, str]) -> ForkedCommand:
    """In place of :func:`mua.engine.server.start_process`."""
    answers = socket.socket(socket.AF_UNIX)
    answers.connect(address)
    send(answers, (command, os.getcwd(), dict(environment)), [log.fileno()])
    return ForkedCommand(answers)


# ---- in the process that forks


def _become_guardian(command: list[str], cwd: str, environment: dict[str, str], log: int) -> NoReturn:
    settle(cwd, environment)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    _python, _isolated, _bare, script, owner, *server = command
    vars(os)["getppid"] = _watched(int(owner))
    vars(subprocess)["Popen"] = _ForkedServer
    guard = runpy.run_path(script)["guard"]
    run(lambda: sys.exit(guard(int(owner), server)))


def _watched(owner: int) -> Callable[[], int]:
    """A ``getppid`` for a child by adoption: ``owner`` while that runs."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(owner)
        return lambda: 1 if select.select([descriptor], [], [], 0)[0] else owner
    return lambda: 1


class _ForkedServer:
    """What the guardian uses of a ``subprocess.Popen``."""

    def __init__(self, command: list[str], *, stdin: int, preexec_fn: Callable[[], None]) -> None:
        del stdin
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become_server(command, preexec_fn)

    def poll(self) -> int | None:
        if self._status is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status


def _become_server(command: list[str], prepare: Callable[[], None]) -> NoReturn:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    vars(os)["getppid"], vars(subprocess)["Popen"] = _getppid, _popen
    prepare()
    _python, _module, name, *sys.argv[1:] = command
    run(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))


def main() -> None:
    """Serves the listening socket whose descriptor is the first argument, until the process of the second ends.

    Without arguments it imports what it would fork, so that the bytecode is there.
    """
    if len(sys.argv) == 1:
        names = ", ".join(PRELOADED)
        subprocess.run([sys.executable, "-c", f"import {names}"], env=_environment(os.environ), check=True)
        return
    listener, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    _end_with(parent)
    select.select([listener], [], [])
    for name in PRELOADED:
        importlib.import_module(name)

    def next_request() -> Request:
        answers, _ = listener.accept()
        arguments, (log,) = receive_with(answers)
        return (*arguments, log), answers

    serve(listener, next_request, _become_guardian)


def _end_with(parent: int) -> None:
    """SIGKILL when ``parent`` ends (prctl's PR_SET_PDEATHSIG)."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
