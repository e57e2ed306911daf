"""Which machine each trainer rank is on, and by which address the others reach this one."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import torch.distributed as dist

from megatron_bridge.collective import gathered
from mua.errors import ConfigError
from mua.ports import LOOPBACK


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines of a run. Machine 0 is rank 0's."""

    own: int
    """This rank's machine."""
    leaders: tuple[int, ...]
    """Of each machine, the rank that looks after its engines: the one with local rank 0."""

    @property
    def several(self) -> bool:
        return len(self.leaders) > 1


def find_nodes(group: dist.ProcessGroup | None) -> Nodes:
    """Ask all ranks of ``group`` (all of the run; None for a single process). Collective.

    Reads what torchrun sets: LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK (or the rank divided by the local size).
    Raises :class:`ConfigError` when a machine has no local rank 0.
    """
    if group is None:
        return Nodes(0, (0,))
    rank = dist.get_rank()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    mine = (int(os.environ.get("GROUP_RANK", rank // local_size)), int(os.environ.get("LOCAL_RANK", rank)))
    found = gathered(mine, group)
    numbers = sorted({node for node, _ in found}, key=[node for node, _ in found].index)
    leaders = {node: rank for rank, (node, local) in enumerate(found) if local == 0}
    if missing := [node for node in numbers if node not in leaders]:
        raise ConfigError(f"machine {missing[0]} of the run has no process with LOCAL_RANK 0; check the launcher")
    return Nodes(numbers.index(mine[0]), tuple(leaders[node] for node in numbers))


def reachable_address() -> str:
    """The address of this machine on its way to rank 0's (MASTER_ADDR), which is one that rank 0 can answer."""
    master = os.environ.get("MASTER_ADDR", LOOPBACK)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, int(os.environ.get("MASTER_PORT", "1"))))  # sends nothing
        return str(probe.getsockname()[0])
