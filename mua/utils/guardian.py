"""Runs one program and makes sure that nothing of it outlives the process that asked for it.

    trainer ──spawns──► guardian ──spawns──► an engine, a tool server, an agent ──► whatever that starts
       ▲                   │ watches: parent gone? SIGTERM? program gone?
       └── getppid, SIGUSR1 ┘ then: every descendant is killed and reaped, and the guardian exits

The guardian leads its own session, so that Ctrl-C in the terminal does not reach the server before the
trainer has decided what to do. It is a child subreaper: a scheduler whose parent was killed becomes its child
and is found. Should the guardian itself be killed, the kernel kills the server (PR_SET_PDEATHSIG).

The program has the guardian's standard input, output and error, so that no message passes through the guardian. It is
killed rather than asked to leave: its client has already given up its requests, and SGLang's own shutdown kills
Python's resource tracker, which then leaves semaphores in /dev/shm. Here the tracker is spared until it has cleaned up.
SGLang's other shared memory has no tracker: the guardian takes note of it when the trainer says, by SIGUSR1, that the
server is ready, and now and then; what is noted is removed at the end.

Started as a script, with the standard library only: ``python -I -S guardian.py PARENT_PID [--no-engine] CMD...``.
Without SGLang nothing is looked for in shared memory. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

NO_ENGINE = "--no-engine"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.5
_NOTE_SECONDS = 2.0
_TRACKER_SECONDS = 2.0
_SHARED_MEMORY = ("/dev/shm/sglang_", "/dev/shm/sgl_shm_")


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""


def _descendants() -> set[int]:
    """Every process below this one; zombies are left out."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _read(f"/proc/{entry}/stat")):
            state, parent = stat.rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(entry)] = int(parent)
    found: set[int] = set()
    frontier = {os.getpid()}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def _shared_memory() -> set[str]:
    """Files under /dev/shm that SGLang made and that processes below this one have open."""
    paths = set()
    for pid in _descendants():
        with contextlib.suppress(OSError):
            for descriptor in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    paths.add(os.readlink(descriptor.path))
    return {path for path in paths if path.startswith(_SHARED_MEMORY)}


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def guard(parent: int, command: list[str]) -> int:
    """Run the program until it is time to end everything; its exit status."""
    engine, command = command[0] != NO_ENGINE, command[command[0] == NO_ENGINE :]
    received: set[int] = set()
    wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, lambda number, _: received.add(number))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def prepare() -> None:  # SIGUSR1, which Slurm sends to every process of a job, is the trainer's
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    server = subprocess.Popen(command, stdin=0, preexec_fn=prepare)
    with open(os.devnull, "r+b") as nothing:  # so that the program alone holds its pipes
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    noted, shared_memory = time.monotonic(), set[str]()
    while server.poll() is None and signal.SIGTERM not in received and os.getppid() == parent:
        if select.select([wake], [], [], _POLL_SECONDS)[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
        if engine and (signal.SIGUSR1 in received or time.monotonic() - noted > _NOTE_SECONDS):
            received.discard(signal.SIGUSR1)
            noted = time.monotonic()
            shared_memory |= _shared_memory()  # what killed processes cannot remove; a crash gives no notice
    shared_memory |= _shared_memory() if engine else set()
    code = server.poll()
    patience = time.monotonic() + _TRACKER_SECONDS
    while left := _descendants():  # resource trackers get a moment to finish by themselves
        for pid in left:
            is_tracker = "multiprocessing.resource_tracker" in _read(f"/proc/{pid}/cmdline")
            if time.monotonic() > patience or not is_tracker:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        _reap()
    _reap()  # whoever died since; left to init, it would keep its number for a while
    for path in shared_memory:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return 0 if code is None else code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), sys.argv[2:]))
