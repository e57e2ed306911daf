"""Runs inside a sandbox as its first process, with the standard library alone; lines of JSON in and out.

::

    {"id": 3, "kind": "shell", "text": "ls", "seconds": 20, "output": 8000}   ─► {"id": 3, "code": 0, ...}
    {"stop": 3}                                                               ─► the call under way is killed
    end of input                                                              ─► everything is killed

Programs run one at a time under the same user, so this process keeps itself from them: as process 1 of the namespace it
gets no signal it does not ask for, it is not dumpable (nobody reads its memory or opens its pipes through /proc), and a
filter of system calls, which all programs inherit, keeps them from changing its limits. No process outlives its call:
whatever a program started, detached or not, is killed before the answer is written.
"""

import codecs
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from contextlib import suppress

LOOK = 0.05
"""Seconds between two looks at memory, files and the clock."""
FOLDERS = ("/work", "/tmp", "/dev/shm")
REFUSED = {
    # memfd_create, memfd_secret, shmget, msgget, semget, keyctl, add_key, request_key, bpf, perf_event_open,
    # userfaultfd, io_uring_setup, io_uring_enter, io_uring_register, unshare, setns, vmsplice
    "x86_64": (319, 447, 29, 68, 64, 250, 248, 249, 321, 298, 323, 425, 426, 427, 272, 308, 278),
    "aarch64": (279, 447, 194, 186, 190, 219, 217, 218, 280, 241, 282, 425, 426, 427, 97, 268, 75),
}
"""System calls that take memory which no limit counts, make namespaces, or reach into the kernel for no good."""
ARCHITECTURES = {"x86_64": (0xC000003E, 56, 435, 302, 9), "aarch64": (0xC00000B7, 220, 435, 261, 222)}
"""AUDIT_ARCH and the numbers of clone, clone3, prlimit64 and mmap."""
OF_PROCESS = ("RssAnon:", "RssShmem:", "VmSwap:", "VmPTE:", "HugetlbPages:")
OF_SHARES = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:", "Private_Hugetlb:", "Shared_Hugetlb:")
SOCKET_BYTES = 425_984
"""What the buffers of a socket hold at most, by the kernel's defaults; those of TCP tell what they hold."""


def guard() -> None:
    """Make this process unreadable and install the filter. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)

    def control(*arguments: object) -> None:
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl")

    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("900")
    control(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    code = filter_of(os.uname().machine)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer)), 16)
    control(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    control(22, 2, program, 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def filter_of(machine: str) -> bytes:
    """The filter as classic BPF; what it refuses fails with EPERM, clone3 with ENOSYS, so that libraries use clone."""
    audit, clone, clone3, prlimit, mmap = ARCHITECTURES[machine]
    load, equal, above, bits, give = 0x20, 0x15, 0x35, 0x45, 0x06
    refuse, unknown = (give, 0, 0, 0x00050001), (give, 0, 0, 0x00050026)
    allow = (give, 0, 0, 0x7FFF0000)
    number, architecture, first, fourth = 0, 4, 16, 40
    code = [(load, 0, 0, architecture), (equal, 1, 0, audit), refuse, (load, 0, 0, number)]
    code += [(above, 0, 1, 0x40000000), refuse]  # the numbers of x32
    for one in REFUSED[machine]:
        code += [(equal, 0, 1, one), refuse]
    code += [(equal, 0, 1, clone3), unknown]
    code += [(equal, 0, 4, clone), (load, 0, 0, first), (bits, 0, 1, 0x10000000), refuse, allow]  # CLONE_NEWUSER
    code += [(equal, 0, 4, prlimit), (load, 0, 0, first), (equal, 1, 0, 0), refuse, allow]  # of others
    # Shared memory without a name stays when it is not mapped any more but for a page: MAP_ANONYMOUS with MAP_SHARED.
    code += [(equal, 0, 4, mmap), (load, 0, 0, fourth), (bits, 0, 2, 0x20), (bits, 0, 1, 0x01), refuse]
    return b"".join(struct.pack("HBBI", *one) for one in [*code, allow])


def limit(limits: dict) -> None:
    """Lower the limits of this process and of all that it starts."""
    os.nice(10)
    for kind, most in (
        (resource.RLIMIT_CPU, limits["cpu"]),
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_FSIZE, limits["disk"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 256),
    ):
        if most is not None:
            more = most + 1 if kind == resource.RLIMIT_CPU else most  # so that SIGXCPU tells before SIGKILL
            resource.setrlimit(kind, (most, more))


def others() -> list:
    """The processes of the namespace but this one."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def memory_used(most: int) -> int:
    """Bytes of all programs and their sockets; pages that several share once, where the sum is more than ``most``.

    Each thread is asked until one tells: a process whose first thread has ended tells nothing by itself.
    """
    sockets, total = in_sockets(), 0
    for _ in range(5):
        every = {pid: _of_threads(pid, "status", OF_PROCESS) for pid in others()}
        total = max(total, sum(every.values()))
        if all(every.values()):  # else one has ended meanwhile, and what it held may be another's by now
            break
    if total + sockets <= most:
        return total + sockets
    # What made itself unreadable tells its status still.
    return sockets + sum(_of_threads(pid, "smaps_rollup", OF_SHARES) or held for pid, held in every.items())


def _of_threads(pid: int, name: str, fields: tuple) -> int:
    """The sum of ``fields`` in a file of the first thread that has them; they are the same in all."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/{name}") as file:
                if found := [1024 * int(line.split()[1]) for line in file if line.startswith(fields)]:
                    return sum(found)
    return 0


def in_sockets() -> int:
    """Bytes that the sockets of the namespace may hold: of TCP what is in its queues, of others their buffers."""
    used = queued = 0
    for name in ("sockstat", "tcp", "tcp6"):
        with suppress(OSError), open(f"/proc/net/{name}") as file:
            lines = [line.split() for line in file]
            if name == "sockstat":
                used = sum(int(line[2]) for line in lines if line[0] == "sockets:")
            else:
                used -= len(lines) - 1
                queued += sum(int(half, 16) for line in lines[1:] for half in line[4].split(":"))
    return max(0, used) * SOCKET_BYTES + queued


def files_used() -> int:
    """Files and folders in all places that can be written to."""
    used = 0
    for folder in FOLDERS:
        with suppress(OSError):
            found = os.statvfs(folder)
            used += found.f_files - found.f_ffree
    return used


class Kept:
    """Head and tail of an output, at most ``most`` bytes."""

    def __init__(self, most: int) -> None:
        self.total = 0
        self._most = most
        self._head, self._tail = bytearray(), bytearray()

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._most // 2 - len(self._head)
        self._head += data[:room]
        if len(data) > room:
            self._tail = (self._tail + data[room:])[-(self._most - self._most // 2) :]

    def text(self) -> str:
        """What is left, with what was cut between; what is no UTF-8 becomes U+FFFD."""
        if self.total <= self._most:
            return bytes(self._head + self._tail).decode("utf-8", "replace")
        # Neither ends or begins within a character.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        head = decoder.decode(bytes(self._head))
        tail = bytes(self._tail[:3]).lstrip(bytes(range(0x80, 0xC0))) + bytes(self._tail[3:])
        cut = self.total - len(self._head) + len(decoder.getstate()[0]) - len(tail)
        return f"{head}\n[... {cut} bytes cut ...]\n{tail.decode('utf-8', 'replace')}"


class Programs:
    """The calls, one after the other."""

    def __init__(self, limits: dict) -> None:
        self._limits = limits
        self._queue: list = []
        self._rest = b""
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def serve(self) -> None:
        """Answer calls until input ends."""
        self._answer({"id": 0})
        while True:
            while not self._queue:
                self._read(None)
            if "id" in (request := self._queue.pop(0)):
                try:
                    answer = self._run(request)
                except (OSError, ValueError, subprocess.SubprocessError) as error:
                    kill_all()
                    answer = {"code": 126, "why": "", "output": f"cannot start: {error}"}
                self._answer({"id": request["id"], **answer})

    def _answer(self, answer: dict) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def _read(self, seconds: "float | None") -> None:
        """Queue what comes within ``seconds``. Ends everything where input has ended."""
        if not select.select([0], [], [], seconds)[0]:
            return
        data = os.read(0, 1 << 20)
        if not data:
            kill_all()
            os._exit(0)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._queue += [json.loads(line) for line in lines]

    def _run(self, call: dict) -> dict:
        """Run one program until it ends, its time is over, it takes too much, or it is stopped."""
        interpreter = [sys.executable, "-c"] if call["kind"] == "python" else [shutil.which("bash") or "/bin/sh", "-c"]
        kept = Kept(call["output"])
        child = subprocess.Popen(
            [*interpreter, call["text"]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=lambda: limit(self._limits),
        )  # fmt: skip
        pipe = child.stdout
        assert pipe is not None
        ends = os.pidfd_open(child.pid)
        try:
            why = self._watch(call, child, [0, pipe.fileno(), ends], kept)
            kill_all(child)
            with suppress(BlockingIOError):
                while data := os.read(pipe.fileno(), 65536):  # its writers are dead: what is in the pipe is all
                    kept.add(data)
        finally:
            os.close(ends)
            pipe.close()
        return {"code": child.returncode, "why": why, "output": kept.text()}

    def _watch(self, call: dict, child: subprocess.Popen, inputs: list, kept: Kept) -> str:
        """Why the program has to be killed; empty where it ended itself. ``inputs``: requests, output, its end."""
        end, look, output = time.monotonic() + call["seconds"], 0.0, inputs[1]
        os.set_blocking(output, False)
        while True:
            now = time.monotonic()
            reap(child)
            if child.returncode is not None:
                return ""
            if {"stop": call["id"]} in self._queue:  # it may have come together with the call
                return "stopped"
            if now >= end:
                return "late"
            if now >= look:
                look = now + LOOK
                if memory_used(self._limits["memory"]) > self._limits["memory"]:
                    return "memory"
                if files_used() > self._limits["files"]:
                    return "files"
            ready = select.select(inputs, [], [], max(0.0, min(end, look) - now))[0]
            if output in ready:
                data = os.read(output, 65536)
                kept.add(data)
                if not data:
                    inputs.remove(output)
            if 0 in ready:
                self._read(0)


def reap(child: subprocess.Popen) -> None:
    """Take all processes that have ended; those that lost their parents are this one's."""
    with suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == child.pid:
                child.wait()
            else:
                os.waitpid(ended.si_pid, os.WNOHANG)


def kill_all(child: "subprocess.Popen | None" = None) -> None:
    """Kill every process but this one; on return none is left."""
    end = time.monotonic() + 5
    while True:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        if child is not None:
            reap(child)
        else:
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        if not others():
            return
        if time.monotonic() > end:
            os._exit(3)
        time.sleep(0.0005)


def main() -> None:
    """Guard this process, then serve."""
    if os.getpid() != 1:
        sys.exit("the sandbox has no process namespace of its own: its first process is not process 1")
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        sys.exit(f"no filter of system calls for the processor {machine}; there are {', '.join(ARCHITECTURES)}")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored for process 1, and for nobody whom it starts
    guard()
    Programs(json.loads(sys.argv[1])).serve()


if __name__ == "__main__":
    main()
