"""One rank of a layout of any size, without its processes and without memory.

Inside :func:`meta_rank` every object of the training backend can be built as that rank would build it: model chunks,
their gradient buffers, the optimizer. Shapes, dtypes and names are real; their tensors are on torch's meta device and
have no values. Other tensors stay on the CPU: torch's default device is not touched. ``mua plan`` reads byte counts
off them, offline conversion the names and shapes of every shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as megatron_random
from torch.testing._internal.distributed.fake_pg import FakeStore

from mua.compat import megatron_cpu
from mua.config.schema import MegatronConfig
from mua.errors import MuaError
from mua.megatron import parallel


@contextmanager
def meta_rank(megatron: MegatronConfig, rank: int) -> Iterator[None]:
    """This process as global rank ``rank`` of the layout, on the meta device, until the end of the block.

    Process groups are torch's fake ones: their members and sizes are right, their collectives move nothing. Random
    states are as before afterwards; so is everything else, whether the block ended or raised. Ranks may follow each
    other in one process.

    Raises:
        MuaError: the layout is not a tested one, has no such rank, or this process already has process groups.
    """
    if dist.is_initialized():
        raise MuaError("a rank on the meta device needs a process without process groups of its own")
    if not 0 <= rank < megatron.world_size:
        raise MuaError(f"megatron: the layout has {megatron.world_size} ranks; there is no rank {rank}")
    meta = torch.device("meta")
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(parallel.models_on(meta))
        stack.enter_context(_replaced(megatron_cpu.cuda(), "current_device", lambda: meta))
        stack.enter_context(_replaced(parallel_state, "create_group", _fake_group(parallel_state.create_group)))
        stack.callback(_end)
        dist.init_process_group("fake", rank=rank, world_size=megatron.world_size, store=FakeStore())
        parallel.initialize(megatron.model_copy(update={"threads": None}), seed=0)
        yield


def _fake_group(create_group: Any) -> Any:
    """Megatron names gloo for some of its groups; beside the fake backend there is no other."""

    def create(*args: Any, **kwargs: Any) -> Any:
        return create_group(*args, **(kwargs | {"backend": None}))

    return create


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


def _end() -> None:
    parallel.shutdown(started=True)
    megatron_random.initialize_rng_tracker(force_reset=True)
