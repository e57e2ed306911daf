"""Commands of ``mua`` as processes that are forked from one interpreter which has imported everything.

A command imports Megatron-Core, torch and transformers, which costs it some five seconds of processor time. Here one
process pays for that once; every command is a fork of it with a session, a working folder, an environment and output
files of its own. It computes nothing before it forks, so a fork starts with clean state, except that all of them have
one hash seed: what must hold over hash seeds is tested with a fresh interpreter (``e2e_support.start(fresh=True)``).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = ("mua.cli", "mua.trainer.rl", "mua.trainer.sft", "mua.trainer.evaluation.evaluator", "mua.trainer.learner")
START_SECONDS = 300.0
Request = tuple[tuple[Any, ...], socket.socket]
"""What to become, and where to tell how it ends."""


class ForkedCommand:
    """What is used of a ``subprocess.Popen``, for a process that is a child of another."""

    def __init__(self, answers: socket.socket) -> None:
        answers.settimeout(START_SECONDS)
        self.pid: int = receive(answers)
        answers.settimeout(None)
        self.returncode: int | None = None
        self._answers = answers

    def poll(self) -> int | None:
        """The status, negative for a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The status; raises ``subprocess.TimeoutExpired``."""
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(["mua"], timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(receive(self._answers))
            self._answers.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """As ``Popen.send_signal``: nothing where the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)


class Forker:
    """The process that forks commands. It starts with the first command and ends with this one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._lock = threading.Lock()

    def start(self, arguments: list[str], cwd: Path, environment: dict[str, str]) -> ForkedCommand:
        """``mua arguments`` in ``cwd``, its output in the files ``stdout`` and ``stderr`` there."""
        with self._lock:
            if self._process is None:
                self._requests, theirs = socket.socketpair()
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.forked_commands", str(theirs.fileno())],
                    env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip
                theirs.close()
            assert self._requests is not None
            ours, theirs = socket.socketpair()
            send(self._requests, (arguments, str(cwd), environment), [theirs.fileno()])
            theirs.close()
        return ForkedCommand(ours)

    def stop(self) -> None:
        """Ends the process that forks; commands that still run are none of its business."""
        if self._process is not None and self._requests is not None:
            self._requests.close()
            self._process.kill()
            self._process.wait()
            self._process = None


FORKER = Forker()
atexit.register(FORKER.stop)


def send(to: socket.socket, value: Any, descriptors: list[int] | None = None) -> None:
    data = pickle.dumps(value)
    socket.send_fds(to, [struct.pack("!I", len(data))], descriptors or [])
    to.sendall(data)


def receive(source: socket.socket) -> Any:
    return receive_with(source)[0]


def receive_with(source: socket.socket) -> tuple[Any, list[int]]:
    """One value and the descriptors that came with it; raises EOFError at the other side's end."""
    header, descriptors, _, _ = socket.recv_fds(source, 4, 1)
    if len(header) < 4:
        raise EOFError
    (left,) = struct.unpack("!I", header)
    data = b""
    while len(data) < left:
        part = source.recv(left - len(data))
        if not part:
            raise EOFError
        data += part
    return pickle.loads(data), list(descriptors)


def serve(source: socket.socket, receive: Callable[[], Request], become: Callable[..., NoReturn]) -> None:
    """Forks a process for each request and tells its end; returns when nobody asks any more.

    ``receive`` is called when ``source`` is readable, and raises EOFError at its end.
    """
    running: dict[int, socket.socket] = {}
    wakeup, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([source, wakeup], [], [])
        if wakeup in ready:
            os.read(wakeup, 4096)
            _tell_ends(running)
        if source in ready:
            try:
                arguments, answers = receive()
            except EOFError:
                return
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (source, answers, *running.values()):
                    other.close()
                os.close(wakeup)
                os.close(waker)
                become(*arguments)
            running[pid] = answers
            with contextlib.suppress(OSError):
                send(answers, pid)


def _tell_ends(running: dict[int, socket.socket]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        answers = running.pop(pid)
        with contextlib.suppress(OSError):  # nobody waits for it any more
            send(answers, status)
        answers.close()


def settle(cwd: str, environment: dict[str, str]) -> None:
    """Make this fork a process of its own session, folder and environment."""
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry not in sys.path]


def run(main: Callable[[], object]) -> NoReturn:
    """``main`` as the whole of this process."""
    status = 1
    try:
        main()
        status = 0
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        _leave(status)


def _become(arguments: list[str], cwd: str, environment: dict[str, str]) -> NoReturn:
    settle(cwd, environment)
    for number, name in ((1, "stdout"), (2, "stderr")):
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv = ["mua", *arguments]
    from mua.cli import main
    from tests.forked_engines import use_forked_engines

    use_forked_engines()
    run(main)


def _leave(status: int) -> NoReturn:
    """What the interpreter does at its end: wait for threads, run exit handlers, flush."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    """Serves the socket whose descriptor is the argument."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        __import__(name)

    def next_request() -> Request:
        arguments, (descriptor,) = receive_with(requests)
        return arguments, socket.socket(fileno=descriptor)

    serve(requests, next_request, _become)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
