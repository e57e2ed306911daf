"""Leaving when asked to: SIGUSR1 or SIGTERM, such as Slurm sends before a job's time is over.

    signal ──► Preemption.requested ──► the loop reaches a safe point ──► Preempted
                                                                            │ checkpoint of the last completed step
                                                                            ▼
               the same command continues later ◄── exit status 75 ◄── engines stopped

Safe points lie between steps and in every wait for engines, episodes and evaluations, never inside an optimizer step, a
weight sync or a checkpoint: those are completed. What is lost is the unfinished rollout.

Every rank listens, so that none dies of the signal, but only rank 0 decides: the others follow its announcements and
leave with the same status. A second signal ends the process at once. Signals within :data:`SAME_SIGNAL_SECONDS` of the
first are taken as the first: Slurm and torchrun both pass one on.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import Self

from mua.utils.errors import Preempted

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
SAME_SIGNAL_SECONDS = 2.0

log = logging.getLogger(__name__)


class Preemption:
    """Whether this run was asked to leave. It listens inside a ``with`` block, which the main thread must enter."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._asked.is_set()

    def check(self) -> None:
        """Raise :class:`Preempted` if a signal has come. For safe points."""
        if self.requested:
            raise Preempted("asked to leave by a signal")

    def __enter__(self) -> Self:
        # Python runs a handler only when the main thread comes back from the collective it waits in. The byte that a
        # signal writes into the pipe is read by a thread that never waits for anything else.
        self._read, self._write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(target=self._listen, name="preemption", daemon=True)
        self._thread.start()
        self._previous_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        # Python's side of the handler has nothing to do: the pipe has told the listener already.
        self._previous = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._write)
        self._thread.join()
        os.close(self._read)

    def _listen(self) -> None:
        first = 0.0
        while byte := os.read(self._read, 1):
            if byte[0] not in SIGNALS:
                continue
            name = signal.Signals(byte[0]).name
            if not self.requested:
                first = time.monotonic()
                self._asked.set()
                log.warning("%s: leaving at the next safe point; a second signal ends this process at once", name)
            elif time.monotonic() - first > SAME_SIGNAL_SECONDS:
                os.write(2, f"mua: {name} again: ending at once\n".encode())
                os._exit(128 + byte[0])
