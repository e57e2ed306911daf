"""Runs one program and makes sure that nothing of it outlives the process that asked for it.

::

    run ── socket ──► keeper ── fork ──► the server ──► its children, also those that detach (setsid, double fork)
     ▲                  │ subreaper: whoever loses its parent becomes its child
     │                  │ ends when the socket does (the run closed it, or is dead), or when the server does
     └── report ◄───────┘ then: every descendant is killed and reaped

The server has the keeper's standard input and output, so that no message passes through the keeper. Its standard error
is read here, as fast as it comes: only the last :data:`TAIL` bytes are kept, and reported with its exit status. Should
the keeper itself be killed, the kernel kills the server (PR_SET_PDEATHSIG), but not what has detached from it.

Started as a script, with the standard library only: ``python -I -S keeper.py SOCKET_FD PARENT_PID CMD...``. Linux only.
The report is the exit status in decimal (negative: a signal, empty: it was still running), a line end, and the tail.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys

TAIL = 8192
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_MS = 1000
_KILL_ROUNDS = 2000
_LAST_READS = 32
_LIBC = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _below() -> set[int]:
    """Every live process below this one; zombies are left out."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state != b"Z":
                    parents[int(entry)] = int(parent)
    found: set[int] = set()
    frontier = {os.getpid()}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def _reap(server: int) -> int | None:
    """Collect whoever has ended; the server's wait status, if it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, ended = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            if pid == server:
                status = ended
    return status


def _become(command: list[str], errors: int, keeper: int) -> None:
    """In the child: turn into the server."""
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(127)
        os.dup2(errors, 2)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _watch(line: int, parent: int, server: int, errors: int, wake: int) -> tuple[int | None, bytes]:
    """Until the run or the server has ended: the server's wait status, and the end of what it said."""
    watched = select.poll()
    for descriptor in (line, errors, wake):
        watched.register(descriptor, select.POLLIN)
    tail, status, wanted = b"", None, True
    while wanted and status is None and os.getppid() == parent:
        for descriptor, _ in watched.poll(_LOOK_MS):
            if descriptor == line:
                wanted = False
                continue
            got = b""
            with contextlib.suppress(BlockingIOError):
                got = os.read(descriptor, 65536)
            if descriptor == errors:
                tail = (tail + got)[-TAIL:]
                if not got:
                    watched.unregister(errors)
        status = _reap(server)
    with contextlib.suppress(OSError):
        for _ in range(_LAST_READS):  # what the pipe still holds; a server that runs on could write for ever
            tail = (tail + os.read(errors, 65536))[-TAIL:]
    return status, tail


def keep(line: int, parent: int, command: list[str]) -> None:
    """Run the program until it is time to end everything; then report."""
    wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C and a cluster's notice to leave are the run's to handle
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    os.set_inheritable(line, False)
    errors, errors_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(errors_write, True)
    keeper = os.getpid()
    server = os.fork()
    if server == 0:
        _become(command, errors_write, keeper)
    os.close(errors_write)
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    status, tail = _watch(line, parent, server, errors, wake)
    for _ in range(_KILL_ROUNDS):
        if not (left := _below()):
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap(server)
        select.select([], [], [], 0.002)
    _reap(server)
    code = "" if status is None else str(os.waitstatus_to_exitcode(status))
    with contextlib.suppress(OSError):
        os.write(line, f"{code}\n".encode() + tail)


if __name__ == "__main__":
    keep(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
