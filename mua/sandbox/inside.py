"""Runs inside a sandbox, with the standard library alone: one call per line of JSON on standard input.

No process outlives its call: whatever it started, detached or not, is killed before the answer is written.
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress


def limit(cpu: int, memory: int, processes: int, disk: int) -> None:
    """Lower the limits of this process and of all that it starts; ``memory`` and ``disk`` in bytes."""
    for kind, most in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_FSIZE, disk),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 256),
    ):
        resource.setrlimit(kind, (most, most))


def kept(head: bytearray, tail: bytearray, total: int, most: int) -> str:
    """Head and tail of an output of ``total`` bytes, with what was cut between them."""
    if total <= most:
        return bytes(head + tail).decode("utf-8", "replace")
    cut = total - len(head) - len(tail)
    return f"{head.decode('utf-8', 'replace')}\n[... {cut} bytes cut ...]\n{tail.decode('utf-8', 'replace')}"


def run(call: dict, limits: list) -> dict:
    """Run ``call["command"]`` until it ends or ``call["seconds"]`` are over."""
    most = call["output"]
    head, tail, total = bytearray(), bytearray(), 0
    child = subprocess.Popen(
        call["command"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, preexec_fn=lambda: limit(*limits),
    )  # fmt: skip
    pipe, end, late = child.stdout, time.monotonic() + call["seconds"], False
    assert pipe is not None
    os.set_blocking(pipe.fileno(), False)
    while True:
        left = end - time.monotonic()
        if left <= 0:
            late = True
            break
        ended = child.poll() is not None
        if not select.select([pipe], [], [], 0 if ended else min(left, 0.05))[0]:
            if ended:
                break
            continue
        data = os.read(pipe.fileno(), 65536)
        if not data:
            break
        total += len(data)
        room = most // 2 - len(head)
        head += data[:room]
        tail = (tail + data[room:])[-(most - most // 2) :]
    with suppress(subprocess.TimeoutExpired):
        child.wait(0 if late else max(0.0, end - time.monotonic()))
    late = child.returncode is None
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    code = child.wait()
    pipe.close()
    return {"code": code, "late": late, "output": kept(head, tail, total, most)}


def main() -> None:
    """Answer calls until standard input ends."""
    limits = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = run(json.loads(line), limits)
        except OSError as error:
            answer = {"code": 1, "late": False, "output": f"cannot start: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
