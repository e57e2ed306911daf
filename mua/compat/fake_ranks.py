"""One process as a rank of a process group of any size, whose collectives move nothing.

Upstream: torch 2.14.1 has a ``fake`` backend and keeps its store in a private module; megatron-core 0.19.2 names gloo
for some of its groups, beside which there is no other than the fake one, and asks CUDA for the current device.
Goes when: ``torch.distributed`` exports the store of its ``fake`` backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from mua.compat import megatron_cpu


@contextmanager
def fake_rank(rank: int, world_size: int, device: torch.device) -> Iterator[None]:
    """Rank ``rank`` of ``world_size``, on ``device`` for Megatron-Core; the process group is the caller's to end.

    Members and sizes of the groups made inside are right.
    """

    def create_group(*args: Any, **kwargs: Any) -> Any:
        return upstream(*args, **(kwargs | {"backend": None}))

    upstream = parallel_state.create_group
    with ExitStack() as stack:
        stack.enter_context(_replaced(megatron_cpu.cuda(), "current_device", lambda: device))
        stack.enter_context(_replaced(parallel_state, "create_group", create_group))
        if device.type == "meta":  # drawing values that nobody keeps takes torch a millisecond for each tensor
            stack.enter_context(_replaced(torch.nn.init, "normal_", lambda tensor, *_, **__: tensor))
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)  # an instance's method is the class's again
