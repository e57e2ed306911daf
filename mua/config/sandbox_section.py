"""Limits of a sandbox in which tools run programs that a policy wrote."""

from __future__ import annotations

from mua.config.section import Positive, PositiveFloat, Section


class SandboxConfig(Section):
    """What one rollout's sandbox may use. There is no network, and the system is read-only."""

    call_seconds: PositiveFloat = 20.0
    """Deadline of one call by the clock; everything the call started is then killed."""
    cpu_seconds: Positive = 20
    """Processor time of each process."""
    memory_mib: Positive = 512
    """Memory of all processes together; watched from outside, and the limit of each process's address space."""
    processes: Positive = 64
    """Processes and threads at once."""
    disk_mib: Positive = 64
    """Size of the working folder and of /tmp, each; they live in memory."""
    output_characters: Positive = 8000
    """Longest result of a call; its head and tail are kept, and what is cut is said."""
