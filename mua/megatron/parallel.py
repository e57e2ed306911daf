"""Process groups and devices, real ones and those of one rank without its processes and without memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import random as megatron_random

from mua.compat.fake_ranks import fake_rank
from mua.compat.megatron_optimizer import plain_adam
from mua.config.schema import MegatronConfig
from mua.megatron.layouts import check_layout
from mua.utils.errors import ConfigError, MuaError

COLLECTIVE_SECONDS = 1800.0
"""Deadline of one collective operation, after which the process group raises instead of hanging."""

_device: torch.device | None = None


def device() -> torch.device:
    """The device of this process's model: its CUDA device if there is one, else the CPU; see :func:`models_on`."""
    if _device is not None:
        return _device
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@contextmanager
def models_on(where: torch.device) -> Iterator[None]:
    """Within it, :func:`device` answers ``where``, whatever the machine has."""
    global _device
    before, _device = _device, where
    try:
        yield
    finally:
        _device = before


def own_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A gloo group of all ranks for one purpose; collective."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    return group


def initialize(config: MegatronConfig, seed: int) -> bool:
    """Starts torch.distributed and Megatron's process groups; seeds the random states of each rank.

    Reads torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) or, without them, runs as a
    single process. A process group that is already running is used as it is.

    Returns:
        whether torch.distributed was started here, which :func:`shutdown` wants to know.

    Raises:
        MuaError: the layout is not a proven one (:mod:`mua.megatron.layouts`).
        ConfigError: the layout needs another number of processes than were started.
    """
    check_layout(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    started = not dist.is_initialized()
    if started:
        alone: dict[str, Any] = {}
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=COLLECTIVE_SECONDS), **alone)
    if (running := dist.get_world_size()) != config.world_size:
        shutdown(started)
        raise ConfigError(
            f"megatron: tensor_parallel {config.tensor_parallel} x pipeline_parallel {config.pipeline_parallel} x "
            f"context_parallel {config.context_parallel} x data_parallel {config.data_parallel} needs "
            f"{config.world_size} processes, but {running} run; change the sizes or the launch"
        )
    start_groups(config, seed)
    return started


def start_groups(config: MegatronConfig, seed: int) -> None:
    """Megatron's process groups over the running ones of torch, and its random states; replaces those there are."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        virtual_pipeline_model_parallel_size=virtual_stages(config),
        context_parallel_size=config.context_parallel,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=config.expert_tensor_parallel,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed, use_cudagraphable_rng=config.cuda_graphs, force_reset_rng=True
    )


def virtual_stages(config: MegatronConfig) -> int | None:
    """Model chunks a rank, or None for a pipeline that is not interleaved, as Megatron wants it said."""
    return None if config.virtual_pipeline == 1 else config.virtual_pipeline


def shutdown(started: bool) -> None:
    """Ends Megatron's process groups, and torch.distributed if :func:`initialize` started it."""
    parallel_state.destroy_model_parallel()
    if started and dist.is_initialized():
        dist.destroy_process_group()


def reports_results() -> bool:
    """Whether this rank holds log-probabilities that no other rank adds too; context-parallel ranks hold their own."""
    return parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0


@contextmanager
def meta_rank(megatron: MegatronConfig, rank: int) -> Iterator[None]:
    """This process as global rank ``rank`` of the layout, on the meta device, until the end of the block.

    Every object of the training backend can be built as that rank would build it: model chunks, their gradient buffers,
    the optimizer, of a plain Adam. Shapes, dtypes and names are real, their tensors have no values. Other tensors stay
    on the CPU. ``mua plan`` reads byte counts off them, offline conversion the names and shapes of every shard.

    Process groups are torch's fake ones: their members and sizes are right, their collectives move nothing. Random
    states are as before afterwards; so is everything else, whether the block ended or raised. Ranks may follow each
    other in one process.

    Raises:
        MuaError: the layout is not a tested one, has no such rank, or this process already has process groups, or sees
            CUDA (:func:`mua.compat.without_cuda.without_cuda`).
    """
    if torch.cuda.is_available():
        raise MuaError("a rank on the meta device needs a process that sees no CUDA; set CUDA_VISIBLE_DEVICES= for it")
    if dist.is_initialized():
        raise MuaError("a rank on the meta device needs a process without process groups of its own")
    if not 0 <= rank < megatron.world_size:
        raise MuaError(f"megatron: the layout has {megatron.world_size} ranks; there is no rank {rank}")
    meta = torch.device("meta")
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(models_on(meta))
        stack.enter_context(plain_adam())
        stack.callback(megatron_random.initialize_rng_tracker, force_reset=True)
        stack.callback(shutdown, started=True)
        stack.enter_context(fake_rank(rank, megatron.world_size, meta))
        initialize(megatron.model_copy(update={"threads": None}), seed=0)
        yield
