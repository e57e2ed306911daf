"""Which of the machine's cores a process runs on.

A trainer rank launches kernels and feeds its GPU, which takes longer from another socket's cores. So it keeps to the
NUMA node of its GPU, with all cores there that the process was given: rank 0 also plays the episodes, in an event loop
and threads that a smaller share would starve, and which of the others is busy changes from phase to phase.

Whatever a rank starts would inherit its cores. Engines serve GPUs of other sockets too, and environments should stay
out of the ranks' way: both get all cores back (:func:`all_cores`). SGLang then binds its own processes to their GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path

_given = frozenset(os.sched_getaffinity(0))
"""By whoever started this process: a job's cores on this node, or all of the machine."""


def given_cores() -> Set[int]:
    """The cores that this process was started with, whatever it has been bound to since."""
    return _given


@contextmanager
def all_cores() -> Iterator[None]:
    """A block in which the calling thread, and so what it starts, may use every core that the process was given."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _given)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def bind_near(pci_address: str, devices: Path = Path("/sys/bus/pci/devices")) -> Set[int]:
    """Bind all threads of this process to the given cores next to a device; the cores, all where none are known.

    ``pci_address`` is the kernel's name of the device, such as ``0000:17:00.0``.
    """
    cores = _given
    with suppress(OSError, ValueError):
        cores = parse_cores((devices / pci_address / "local_cpulist").read_text(encoding="ascii")) & _given or _given
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)
    return cores


def parse_cores(text: str) -> frozenset[int]:
    """Numbers of a list in the kernel's form, such as ``0-3,8``.

    Raises :class:`ValueError` for another form.
    """
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(core for low, _, high in ranges for core in range(int(low), int(high or low) + 1))
