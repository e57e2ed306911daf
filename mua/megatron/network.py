"""One network on this rank, policy or critic: model chunks, gradient buffers, optimizer, a batch's way through them.

sequences ──► packed rows ──► micro-batches ──► Megatron's schedule ──► per scored token: what ``read`` finds
                                                                └────► loss ``terms`` ──► gradients ──► a step
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

import megatron_bridge
from megatron_bridge import BridgeError
from megatron_bridge.convert import check_sizes
from megatron_bridge.family import HfConfig
from megatron_bridge.safetensors_io import SafetensorsFolder
from mua.config.schema import MegatronConfig, ModelConfig, OptimizerConfig
from mua.errors import ModelError, MuaError, one_line
from mua.megatron import forward, moe, parallel
from mua.megatron.microbatch import scoring_micro_batch, training_micro_batch
from mua.megatron.optimizer import Optimizer, wrap_data_parallel
from mua.megatron.packing import Alignment, Packed, check_first_tokens, check_ids, pack
from mua.megatron.workload import Workload
from mua.types import Float32Array, TrainSequence

ChunkBuilder: TypeAlias = Callable[[HfConfig, ModelConfig, MegatronConfig], list[GPTModel]]


@dataclass(frozen=True, slots=True)
class Step:
    """What one optimizer step found."""

    sums: dict[str, float]
    """Of the loss's terms over the whole batch, the same on every rank."""
    maxima: dict[str, float]
    metrics: dict[str, float]
    """``grad_norm``, ``learning_rate``, ``rows``, ``padding_share``, ``merged_share``, ``skipped``,
    ``forward_backward_seconds``, ``optimizer_seconds``, those of :class:`mua.megatron.workload.Spread`, and of the
    experts' load."""


class Network:
    """Chunks that hold their first weights, wrapped and with an optimizer. All methods are collective.

    Args:
        chunks: this rank's, with the Hugging Face configuration attached.
        optimizer: of this network.
        total_steps: its optimizer steps in the run; a decaying schedule ends there.
        section: of the configuration that ``optimizer`` is, for messages.
    """

    def __init__(
        self,
        chunks: list[GPTModel],
        megatron: MegatronConfig,
        optimizer: OptimizerConfig,
        total_steps: int,
        *,
        section: str = "optimizer",
    ) -> None:
        self._config = megatron
        self._alignment = Alignment.of(megatron)
        self.vocab_size: int = chunks[0].hf_config["vocab_size"]
        """Tokens of the true vocabulary."""
        self._workload = Workload.from_hf(chunks[0].hf_config)
        for chunk in chunks:
            chunk.config.finalize_model_grads_func = forward.sum_gradients
        self.chunks = chunks
        self.wrapped = wrap_data_parallel(chunks, megatron.distributed_optimizer)
        self.optimizer = Optimizer(
            self.wrapped, optimizer, megatron.distributed_optimizer, total_steps, section=section
        )
        self.skipped_steps = 0
        """Steps left out because the gradient norm was not finite."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Of this rank's chunks, in a fixed order."""
        return (parameter for chunk in self.chunks for parameter in chunk.parameters())

    def train_step(self, sequences: Sequence[TrainSequence], terms: forward.Terms) -> Step:
        """One optimizer step on the whole batch: gradients are plain sums of those of ``terms``.

        A step whose gradient norm is not finite changes nothing and is counted.

        Raises:
            MuaError: a sequence is longer than a row, trains its first token, or holds a token the model lacks.
        """
        check_first_tokens(sequences)
        packed = self._packed(sequences)
        start = time.perf_counter()
        rows = [
            training_micro_batch([sequences[i] for i in row.sequences], self._alignment, packed.plan, row.forest)
            for row in packed.rows[parallel_state.get_data_parallel_rank()]
        ]
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums, maxima = forward.train(self.wrapped, rows, terms, packed.plan.least)
        between = time.perf_counter()
        step = self.optimizer.step()
        self.skipped_steps += not step.applied
        metrics = {
            "grad_norm": step.grad_norm,
            "learning_rate": step.learning_rate,
            "rows": float(packed.plan.row_count),
            "padding_share": packed.plan.padding_share,
            "merged_share": packed.merged_share,
            "skipped": float(not step.applied),
            "forward_backward_seconds": between - start,
            "optimizer_seconds": time.perf_counter() - between,
        }
        experts = moe.collect_metrics(self.chunks, self._config.moe_aux_loss, self._config.moe_z_loss)
        return Step(sums, maxima, metrics | packed.spread.metrics() | experts)

    def score(self, sequences: Sequence[TrainSequence], read: forward.Read) -> list[Float32Array]:
        """What ``read`` finds for every token but a sequence's first.

        Returns:
            per sequence, in the order given, float32 ``[T]``; entry 0 is 0.0.

        Raises:
            MuaError: a sequence is longer than a row or holds a token the model lacks.
        """
        packed = self._packed(sequences)
        own_rows = packed.rows[parallel_state.get_data_parallel_rank()]
        rows = [
            scoring_micro_batch([sequences[i] for i in row.sequences], self._alignment, packed.plan, row.forest)
            for row in own_rows
        ]
        scores = forward.score(self.wrapped, rows, read, packed.plan.least)
        bounds = np.concatenate([[0], np.cumsum([len(sequence) for sequence in sequences])]).astype(np.int64)
        flat = torch.zeros(int(bounds[-1]), dtype=torch.float32, device=parallel.device())
        if parallel.reports_results():
            for row, batch, values in zip(own_rows, rows, scores, strict=True):
                places = np.concatenate([np.arange(bounds[i], bounds[i + 1]) for i in row.sequences] or [bounds[:0]])
                flat[torch.from_numpy(places).to(flat.device)[batch.scored]] = values
        dist.all_reduce(flat)
        whole: Float32Array = flat.cpu().numpy()
        return [whole[start:end].copy() for start, end in itertools.pairwise(bounds)]

    def tensors(self) -> list[Tensor]:
        """Weights, as they are on the device."""
        return [parameter.data for parameter in self.parameters()]

    def _packed(self, sequences: Sequence[TrainSequence]) -> Packed:
        check_ids(sequences, self.vocab_size)
        interleaved = parallel.virtual_stages(self._config) is not None
        return pack(
            [sequence.ids for sequence in sequences],
            self._config,
            self._alignment,
            workload=self._workload,
            # Megatron's interleaved schedule passes rows on in groups of this many, and cannot announce their lengths.
            multiple=self._config.pipeline_parallel if interleaved else 1,
            equal=interleaved,
        )


def loaded(
    build: ChunkBuilder, model: ModelConfig, megatron: MegatronConfig, *, backbone: bool = False
) -> list[GPTModel]:
    """What ``build`` makes of the model's Hugging Face configuration, with the folder's weights.

    Args:
        build: gives this rank's chunks, not yet loaded.
        model: the folder and the dtype.
        megatron: the layout.
        backbone: leave the output layer as it was built.

    Raises:
        ModelError: the model folder cannot be read.
    """
    try:
        chunks = _built(build, model, megatron)
        megatron_bridge.load_hf(chunks, model.path, backbone=backbone)
    except BridgeError as error:
        raise ModelError(f"model.path: {error}") from error
    return chunks


def _built(build: ChunkBuilder, model: ModelConfig, megatron: MegatronConfig) -> list[GPTModel]:
    """The chunks, not yet loaded; what config.json says is compared with the weights before memory is taken for it."""
    config = megatron_bridge.read_hf_config(model.path)
    with SafetensorsFolder(model.path) as weights:
        check_sizes(config, weights)
    try:
        return build(config, model, megatron)
    except (MuaError, BridgeError):
        raise
    except (ValueError, TypeError, AssertionError, ZeroDivisionError) as error:
        raise BridgeError(f"config.json describes a model that cannot be built ({one_line(error)})") from error
