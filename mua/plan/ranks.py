"""Exact bytes of one rank: the objects of the training backend, built on the meta device and counted."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mua.config.schema import ExperimentConfig, MegatronConfig, OptimizerConfig
from mua.megatron.model import build_chunks
from mua.megatron.optimizer import Optimizer, wrap_data_parallel
from mua.megatron.parallel import meta_rank
from mua.plan.architecture import Architecture


@dataclass(frozen=True, slots=True)
class ObjectBytes:
    """Bytes of the tensors that live as long as the trainer does."""

    parameters: int
    """Weights and persistent buffers; padded where the distributed optimizer keeps them in one buffer."""
    gradients: int
    """Float32 buffers, padded as Megatron's data-parallel wrapper pads them."""
    main_weights: int
    """Float32 copies of bfloat16 weights; with the distributed optimizer this rank's shard."""
    moments: int
    """Adam's two; with the distributed optimizer this rank's shard. Allocated by the first optimizer step."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.main_weights + self.moments


@dataclass(frozen=True, slots=True)
class RankBytes:
    """One rank of a layout."""

    rank: int
    stage: int
    """Pipeline stage, from 0."""
    layers: int
    weights: int
    """Parameters of the policy this rank holds, as a number."""
    bytes: ObjectBytes
    """Of the policy."""
    critic: ObjectBytes | None = None
    """Of the critic, where there is one."""


def measure(chunks: Sequence[Any], wrapped: Sequence[Any], optimizer: Optimizer) -> ObjectBytes:
    """Counts storages, each once, of model chunks, their gradient buffers and the optimizer; on any device.

    Args:
        chunks: Megatron's model chunks.
        wrapped: the same, wrapped by :func:`mua.megatron.optimizer.wrap_data_parallel`.
    """
    seen: set[StorageWeakRef] = set()
    model = [*itertools.chain.from_iterable((*chunk.parameters(), *chunk.buffers()) for chunk in chunks)]
    buffers = [b.grad_data for chunk in wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    parts = optimizer.megatron.chained_optimizers
    updated = [p for part in parts for group in part.optimizer.param_groups for p in group["params"]]
    moments = [t for part in parts for state in part.optimizer.state.values() for t in state.values()]
    return ObjectBytes(
        parameters=_storage_bytes(model, seen),
        gradients=_storage_bytes(buffers, seen),
        main_weights=_storage_bytes(updated, seen),
        moments=_storage_bytes([t for t in moments if isinstance(t, Tensor)], seen),
    )


def _storage_bytes(tensors: Iterable[Tensor], seen: set[StorageWeakRef]) -> int:
    """Bytes of the storages behind ``tensors`` that are not in ``seen`` yet; adds them."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if (key := StorageWeakRef(storage)) not in seen:
            seen.add(key)
            total += storage.nbytes()
    return total


def rank_bytes(architecture: Architecture, config: ExperimentConfig, rank: int) -> RankBytes:
    """Builds ``rank``'s model, gradient buffers and optimizer on the meta device and counts them; the critic's too.

    Raises:
        MuaError: the layout is not a tested one.
    """
    megatron, hf_config = config.megatron, architecture.hf_config
    with meta_rank(megatron, rank):
        chunks = build_chunks(hf_config, config.model, megatron)
        critic = None
        if config.algorithm.advantage == "gae":
            values = build_chunks(hf_config, config.model, megatron, critic=True)
            critic = _trained_bytes(values, megatron, config.critic.optimizer)
        return RankBytes(
            rank=rank,
            stage=rank // (megatron.world_size // megatron.pipeline_parallel),
            layers=sum(len(chunk.decoder.layers) for chunk in chunks),
            weights=sum(p.numel() for chunk in chunks for p in chunk.parameters()),
            bytes=_trained_bytes(chunks, megatron, config.optimizer),
            critic=critic,
        )


def _trained_bytes(chunks: list[Any], megatron: MegatronConfig, optimizer: OptimizerConfig) -> ObjectBytes:
    """Of the chunks with all that training them takes."""
    wrapped = wrap_data_parallel(chunks, megatron.distributed_optimizer)
    built = Optimizer(wrapped, optimizer, megatron.distributed_optimizer, total_steps=1 << 30)
    for part in built.megatron.chained_optimizers:
        part.init_state_fn(part.optimizer)
    return measure(chunks, wrapped, built)


def first_ranks(megatron: MegatronConfig) -> Iterator[int]:
    """The first rank of each pipeline stage, which stands for the others of the stage.

    They hold the same, but that with the distributed optimizer the last shards of a buffer can be some padding smaller.
    """
    stage = megatron.world_size // megatron.pipeline_parallel
    return iter(range(0, megatron.world_size, stage))
