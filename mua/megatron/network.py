"""One network on this rank, policy or critic: model chunks, gradient buffers, optimizer, a batch's way through them.

sequences ──► packed micro-batches ──► Megatron's schedule ──► per scored token: what ``read`` finds
                                                          └──► loss ``terms`` ──► gradients ──► a step
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

from mua.algorithms.losses import finish_metrics
from mua.config.schema import MegatronConfig, OptimizerConfig
from mua.megatron import forward, moe, parallel
from mua.megatron.microbatch import MicroBatch, scoring_micro_batch, training_micro_batch
from mua.megatron.optimizer import Optimizer, wrap_data_parallel
from mua.megatron.packing import Alignment, Packed, Row, check_first_tokens, check_ids, pack
from mua.megatron.workload import Workload
from mua.types import Float32Array, TrainSequence


class Network:
    """Chunks that hold their first weights, wrapped and with an optimizer. All methods are collective.

    Args:
        chunks: this rank's, with the Hugging Face configuration attached.
        total_steps: optimizer steps in the run; a decaying schedule ends there.
        prefix: of this network's metrics and of the section that ``optimizer`` is, as messages name it.
    """

    def __init__(
        self,
        chunks: list[GPTModel],
        megatron: MegatronConfig,
        optimizer: OptimizerConfig,
        total_steps: int,
        *,
        prefix: str = "",
    ) -> None:
        self._config = megatron
        self._alignment = Alignment.of(megatron)
        self._prefix = prefix
        self.vocab_size: int = chunks[0].hf_config["vocab_size"]
        """Tokens of the true vocabulary."""
        self._workload = Workload.from_hf(chunks[0].hf_config)
        for chunk in chunks:
            chunk.config.finalize_model_grads_func = forward.sum_gradients
        self.chunks = chunks
        self.wrapped = wrap_data_parallel(chunks, megatron.distributed_optimizer)
        section = prefix.replace("/", ".") + "optimizer"
        self.optimizer = Optimizer(
            self.wrapped, optimizer, megatron.distributed_optimizer, total_steps, section=section
        )
        self.skipped_steps = 0
        """Steps left out because the gradient norm was not finite."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Of this rank's chunks, in a fixed order."""
        return (parameter for chunk in self.chunks for parameter in chunk.parameters())

    def train(self, sequences: Sequence[TrainSequence], terms: forward.Terms) -> dict[str, float]:
        """One optimizer step on the whole batch: gradients are plain sums of those of ``terms``.

        A step whose gradient norm is not finite changes nothing and is counted.

        Returns:
            metrics, the same on every rank: those of ``terms`` (:func:`mua.algorithms.losses.finish_metrics`); of a
            policy ``loss`` and ``entropy`` (mean over trained tokens, nats); and, under the prefix, ``grad_norm``,
            ``learning_rate``, ``rows``, ``padding_share``, ``merged_share`` (of tokens, that were not computed because
            another sequence begins with them), ``skipped``, ``forward_backward_seconds``, ``optimizer_seconds``, how
            evenly ranks and micro-batches are loaded (:class:`mua.megatron.workload.Spread`), and of the experts' load
            (:func:`mua.megatron.moe.collect_metrics`), whose losses are no part of ``loss``.

        Raises:
            MuaError: a sequence is longer than a row, trains its first token, or holds a token the model lacks.
        """
        check_first_tokens(sequences)
        packed = self._packed(sequences)
        start = time.perf_counter()
        batches = self._micro_batches(training_micro_batch, packed, sequences)
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums, maxima = forward.train(self.wrapped, batches, terms, packed.plan.least)
        between = time.perf_counter()
        step = self.optimizer.step()
        self.skipped_steps += not step.applied
        policy = {}
        if "_loss" in sums:
            policy = {"loss": sums.pop("_loss"), "entropy": sums.pop("_entropy") / max(sums["tokens"], 1.0)}
        own = {
            "grad_norm": step.grad_norm,
            "learning_rate": step.learning_rate,
            "rows": float(packed.plan.row_count),
            "padding_share": packed.plan.padding_share,
            "merged_share": packed.merged_share,
            "skipped": float(not step.applied),
            "forward_backward_seconds": between - start,
            "optimizer_seconds": time.perf_counter() - between,
            **packed.spread.metrics(),
            **moe.collect_metrics(self.chunks, self._config.moe_aux_loss, self._config.moe_z_loss),
        }
        own = {self._prefix + name: value for name, value in own.items()}
        return finish_metrics(sums, maxima) | policy | own

    def score(self, sequences: Sequence[TrainSequence], read: forward.Read) -> list[Float32Array]:
        """What ``read`` finds for every token but a sequence's first.

        Returns:
            per sequence, in the order given, float32 ``[T]``; entry 0 is 0.0.

        Raises:
            MuaError: a sequence is longer than a row or holds a token the model lacks.
        """
        packed = self._packed(sequences)
        batches = self._micro_batches(scoring_micro_batch, packed, sequences)
        scores = forward.score(self.wrapped, batches, read, packed.plan.least)
        bounds = np.concatenate([[0], np.cumsum([len(sequence) for sequence in sequences])]).astype(np.int64)
        flat = torch.zeros(int(bounds[-1]), dtype=torch.float32, device=parallel.device())
        if parallel.reports_results():
            for row, batch, values in zip(_own(packed), batches, scores, strict=True):
                places = np.concatenate([np.arange(bounds[i], bounds[i + 1]) for i in row.sequences] or [bounds[:0]])
                flat[torch.from_numpy(places).to(flat.device)[batch.scored]] = values
        dist.all_reduce(flat)
        whole: Float32Array = flat.cpu().numpy()
        return [whole[start:end].copy() for start, end in itertools.pairwise(bounds)]

    def _packed(self, sequences: Sequence[TrainSequence]) -> Packed:
        check_ids(sequences, self.vocab_size)
        interleaved = parallel.virtual_stages(self._config) is not None
        return pack(
            [sequence.ids for sequence in sequences],
            self._config,
            self._alignment,
            workload=self._workload,
            # Megatron's interleaved schedule passes them on in groups of this many, and cannot announce their lengths.
            multiple=self._config.pipeline_parallel if interleaved else 1,
            equal=interleaved,
        )

    def _micro_batches(
        self, make: Callable[..., MicroBatch], packed: Packed, sequences: Sequence[TrainSequence]
    ) -> list[MicroBatch]:
        """Those of this data-parallel rank, as ``make`` makes them."""
        return [
            make([sequences[i] for i in row.sequences], self._alignment, packed.plan, row.forest)
            for row in _own(packed)
        ]


def _own(packed: Packed) -> Sequence[Row]:
    return packed.rows[parallel_state.get_data_parallel_rank()]
