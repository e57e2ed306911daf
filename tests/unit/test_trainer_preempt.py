"""The listener for signals that ask a run to leave: first and second signal, twins of the first, the exit statuses.

In processes of their own, with real signals. What a training run does with them is in ``tests/e2e/test_preempt.py``.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mua.trainer.preempt import Preemption
from mua.utils.errors import Preempted

BUSY = """
import time
from mua.trainer.preempt import Preemption
with Preemption() as preemption:
    print("ready", flush=True)
    while not preemption.requested:
        time.sleep(0.01)
    print("asked", flush=True)
    {then}
"""


@contextmanager
def _program(text: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_asks_and_does_not_kill(number: signal.Signals) -> None:
    with _program(BUSY.format(then="preemption.check()")) as process:
        process.send_signal(number)
        assert _line(process) == "asked"
        assert "Preempted" in process.communicate(timeout=60)[1]
        assert process.returncode == 1  # the exception's; the command line makes 75 of it


TWICE = """
import signal
from mua.trainer import preempt
preempt.SAME_SIGNAL_SECONDS = 1e9
print("ready", flush=True)
with preempt.Preemption() as preemption:
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
print("alive" if preemption.requested else "deaf", flush=True)
"""


def test_the_same_signal_passed_on_twice_is_one() -> None:
    with _program(TWICE) as process:  # both have been read when its block is left
        assert _line(process) == "alive"


def test_a_second_signal_ends_the_process_at_once() -> None:
    later = "from mua.trainer import preempt; preempt.SAME_SIGNAL_SECONDS = -1.0\n"
    with _program(later + BUSY.format(then="time.sleep(600)")) as process:
        process.send_signal(signal.SIGUSR1)
        assert _line(process) == "asked"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM


def test_the_handlers_before_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)]
    with Preemption() as preemption:
        assert not preemption.requested
        preemption.check()
        signal.raise_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 30
        while not preemption.requested:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(Preempted):
            preemption.check()
    assert [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)] == before


def test_one_that_does_not_listen_never_asks() -> None:
    Preemption().check()
