"""Checks that go wrong in every way a check on a GPU can, for the tests of ``tools/gpu_check.py``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tools.gpu_checks.child import RESULT, Found, Place

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def machine(_: Place) -> Found:
    return Found(machine={"device": "cpu", "gpus": "none"})


def other_machine(_: Place) -> Found:
    return Found(machine={"device": "NVIDIA H100", "gpus": "1"})


def broken_machine(_: Place) -> Found:
    raise RuntimeError("the driver is too old")


def fine(_: Place) -> Found:
    found = Found("a | b")
    found.add("speed", 612.25, "TFLOP/s")
    found.add("tokens", 32768)
    return found


def wrong(_: Place) -> Found:
    found = fine(_)
    found.expect(False, "gradients differ by 0.3")
    return found


def hang(place: Place) -> Found:
    """Takes a helper in its own session along, as an engine is, and one in this session."""
    helpers = [subprocess.Popen(SLEEP), subprocess.Popen(SLEEP, start_new_session=True)]
    file = Path(os.environ["FAULTS"]) / "helpers"
    file.write_text(" ".join(str(helper.pid) for helper in helpers))
    time.sleep(600)
    return Found()


def crash(_: Place) -> Found:
    os.kill(os.getpid(), signal.SIGSEGV)
    return Found()


def killed(_: Place) -> Found:
    os.kill(os.getpid(), signal.SIGKILL)
    return Found()


def leaves(_: Place) -> Found:
    os._exit(7)


def garbage(place: Place) -> Found:
    print("\x00\xff" * 1000)
    (place.work / RESULT).write_bytes(b"\xff{not json")
    os._exit(0)


def other_form(place: Place) -> Found:
    (place.work / RESULT).write_text('{"state": "fine", "figures": [], "message": ""}')
    os._exit(0)


def eats(_: Place) -> Found:
    taken = []
    while True:
        taken.append(b"x" * (32 << 20))
        time.sleep(0.02)


def no_memory(_: Place) -> Found:
    raise MemoryError("tried to allocate 80 GiB")


def missing(_: Place) -> Found:
    import a_package_that_nobody_has.layers  # noqa: F401

    return Found()


def missing_part(_: Place) -> Found:
    import json.no_such_part  # noqa: F401

    return Found()


def counts(_: Place) -> Found:
    """Says how often it ran."""
    file = Path(os.environ["FAULTS"]) / "count"
    runs = int(file.read_text()) + 1 if file.exists() else 1
    file.write_text(str(runs))
    return Found(f"run {runs}")
