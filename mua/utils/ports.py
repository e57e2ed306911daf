"""Free TCP ports for servers that will bind them a while later."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

LOOPBACK = "127.0.0.1"
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _OF_SGLANG = 15_000, 22_000
"""SGLang draws the port of a server's process group from 22000 on, and binds it, too, seconds later."""
_ABOVE = 1_200
"""SGLang takes further ports up to a thousand above its own."""
_TRIES = 200


def free_port(host: str = LOOPBACK) -> int:
    """A port of that address of this machine that nothing listens on.

    Taken from below the ranges that SGLang draws from and that the system takes for outgoing connections and
    ``bind(0)``: a server needs seconds from here to its own bind, in which gloo, NCCL and HTTP clients open any number.
    """
    try:
        lowest_ephemeral = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        lowest_ephemeral = 32_768
    room = range(_LOWEST, min(lowest_ephemeral, _OF_SGLANG) - _ABOVE)
    for port in random.SystemRandom().sample(room, min(_TRIES, len(room))):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
