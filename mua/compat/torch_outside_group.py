"""A process group between this process and others that are not in its default group.

Reason: SGLang's ``/init_weights_update_group`` makes a group of the engine's ranks and one trainer rank. The engines
have a default process group of their own, and ``torch.distributed.new_group`` only divides the default one.
``_new_process_group_helper``, which SGLang calls itself (``init_custom_process_group``), makes a group from any store;
both sides must call it alike, because it derives the store's keys and the backend's options. Importing SGLang's
function instead would load all of SGLang into the trainer.

Upstream: torch 2.14.1, sglang 0.5.23. Goes when:
``tests/unit/test_megatron_compat.py::test_upstream_groups_outside_the_default_one_are_private`` fails.
``tests/parity/test_engine_transports.py`` sends weights through one.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def meeting_socket() -> socket.socket:
    """Listens on a free port of every address of this machine; whoever connects waits for :func:`outside_group`.

    A port that is only looked for here and bound later may be taken in between.
    """
    return socket.create_server(("", 0), backlog=1024)


def outside_group(
    backend: str, host: str, meeting: socket.socket, *, world_size: int, name: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Join, as rank 0, the group ``name`` that ``world_size - 1`` other processes join at the port of ``meeting``.

    Blocks until all have come or ``timeout`` has passed, which raises torch's ``DistStoreError`` or ``RuntimeError``.
    ``meeting``, of :func:`meeting_socket`, is the group's afterwards, or closed.
    """
    public: Any = dist  # its stubs do not export the stores
    private: Any = distributed_c10d
    port = meeting.getsockname()[1]
    store = public.TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=True,
        master_listen_fd=meeting.detach(),
    )
    group, _ = private._new_process_group_helper(
        world_size, 0, [], dist.Backend(backend), public.PrefixStore(name, store), group_name=name, timeout=timeout
    )
    private._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group
