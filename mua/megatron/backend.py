"""The training backend: one optimizer step, log-probabilities, export and checkpoints of the policy."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

import megatron_bridge
from megatron_bridge import BridgeError
from mua.algorithms.loss_protocol import LossFunction
from mua.algorithms.losses import finish_metrics
from mua.config.schema import MegatronConfig, ModelConfig, OptimizerConfig
from mua.errors import ModelError
from mua.megatron import checkpoint, forward, moe, parallel
from mua.megatron.microbatch import scoring_micro_batch, training_micro_batch
from mua.megatron.model import build_chunks
from mua.megatron.modules import defer_logits
from mua.megatron.offload import Offloaded, offload
from mua.megatron.optimizer import Optimizer, wrap_data_parallel
from mua.megatron.packing import Alignment, Packed, check_first_tokens, check_ids, pack
from mua.megatron.replay import RoutingReplay
from mua.types import Float32Array, Json, TrainBatch, TrainSequence

CLOSE_SECONDS = 60.0
"""How long the end of a failed run waits for the other ranks, to finish a checkpoint with them."""

log = logging.getLogger(__name__)


class MegatronBackend:
    """The policy on this rank and its optimizer.

    Every method is collective: all ranks call it with the same arguments and get the same result.

    Args:
        model: the Hugging Face folder the weights start from, and their dtype.
        total_steps: optimizer steps of the run; a decaying schedule ends there.
        seed: of Megatron's random states.
        with_reference: keep a frozen copy of the initial weights for ``log_probabilities(reference=True)``.

    Raises:
        MuaError: the layout is not a proven one (:mod:`mua.megatron.layouts`).
        ConfigError: the model does not divide over it.
        ModelError: the model folder cannot be read.
    """

    def __init__(
        self,
        model: ModelConfig,
        megatron: MegatronConfig,
        optimizer: OptimizerConfig,
        *,
        total_steps: int,
        seed: int,
        with_reference: bool = False,
    ) -> None:
        self._pending: checkpoint.PendingSave | None = None
        self._closing: dist.ProcessGroup | None = None
        self._started = parallel.initialize(megatron, seed)
        self._config = megatron
        self._alignment = Alignment.of(megatron)
        try:
            self._build(model, optimizer, total_steps, with_reference)
        except BaseException:
            self.close()
            raise
        self.skipped_steps = 0
        """Steps left out because the gradient norm was not finite; saved and loaded with checkpoints."""

    def _build(self, model: ModelConfig, optimizer: OptimizerConfig, total_steps: int, with_reference: bool) -> None:
        distributed = self._config.distributed_optimizer
        self._chunks = _load_chunks(model, self._config)
        self._vocab_size: int = self._chunks[0].hf_config["vocab_size"]
        self._reference = [p.detach().clone() for p in self._parameters()] if with_reference else None
        for chunk in self._chunks:
            chunk.config.finalize_model_grads_func = forward.sum_gradients
        mode = self._config.routing_replay
        self._replay = None if mode == "off" else RoutingReplay(self._chunks, mode)
        self._wrapped = wrap_data_parallel(self._chunks, distributed)
        self._optimizer = Optimizer(self._wrapped, optimizer, distributed, total_steps)
        self._offloaded: Offloaded | None = None

    def train_step(self, batch: TrainBatch, loss: LossFunction) -> dict[str, float]:
        """One optimizer step on the whole batch: gradients are plain sums of the loss function's.

        A step whose gradient norm is not finite changes nothing and is counted (``skipped``, ``skipped_steps``).

        Returns:
            metrics: ``loss``, ``entropy`` (mean over trained tokens, nats), ``grad_norm``, ``learning_rate``,
            ``tokens`` (trained), ``rows``, ``padding_share``, ``merged_share`` (of tokens, that were not computed
            because another sequence begins with them), ``skipped``, ``forward_backward_seconds``,
            ``optimizer_seconds``, those of the loss function (:func:`mua.algorithms.losses.finish_metrics`), and of
            the experts' load (:func:`mua.megatron.moe.collect_metrics`), whose losses are no part of ``loss``, and
            with ``megatron.routing_replay`` the share of the engine's expert choices that this policy made too.

        Raises:
            MuaError: a sequence is longer than a row, trains its first token, holds a token the model lacks, or lacks
                the expert choices that are to be replayed.
        """
        self._poll_save()
        check_first_tokens(batch.sequences)
        if self._replay is not None:
            self._replay.check(batch.sequences)
        packed = self._packed(batch.sequences)
        plan, own_rows = packed.plan, packed.rows[parallel_state.get_data_parallel_rank()]
        start = time.perf_counter()
        rows = [
            training_micro_batch([batch.sequences[i] for i in row.sequences], self._alignment, plan, row.forest)
            for row in own_rows
        ]
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        sums, maxima = forward.train(self._wrapped, rows, loss, batch.temperature, self._vocab_size, plan.least)
        between = time.perf_counter()
        step = self._optimizer.step()
        self.skipped_steps += not step.applied
        tokens = sums.pop("_tokens")
        own = {
            "loss": sums.pop("_loss"),
            "entropy": sums.pop("_entropy") / max(tokens, 1.0),
            "grad_norm": step.grad_norm,
            "learning_rate": step.learning_rate,
            "tokens": tokens,
            "rows": float(plan.row_count),
            "padding_share": plan.padding_share,
            "merged_share": packed.merged_share,
            "skipped": float(not step.applied),
            "forward_backward_seconds": between - start,
            "optimizer_seconds": time.perf_counter() - between,
        }
        experts = moe.collect_metrics(self._chunks, self._config.moe_aux_loss, self._config.moe_z_loss)
        if self._replay is not None:
            experts |= self._replay.metrics()
        return finish_metrics(sums | {"tokens": tokens}, maxima) | experts | own

    def log_probabilities(
        self, sequences: Sequence[TrainSequence], temperature: float, *, reference: bool = False
    ) -> list[Float32Array]:
        """Log-probability of every token given those before it, under the policy or the frozen reference.

        Expert choices of the engine are replayed for the policy, as in training; the reference makes its own.

        Returns:
            per sequence, in the order given, float32 ``[T]``; entry 0 is 0.0, as nothing predicts it.

        Raises:
            MuaError: a sequence is longer than a row or holds a token the model lacks.
            ValueError: ``reference`` without ``with_reference``, or a temperature not above 0.
        """
        if reference:
            sequences = [replace(sequence, experts=None) for sequence in sequences]
        elif self._replay is not None:
            self._replay.check(sequences)
        packed = self._packed(sequences)
        plan, own_rows = packed.plan, packed.rows[parallel_state.get_data_parallel_rank()]
        rows = [
            scoring_micro_batch([sequences[i] for i in row.sequences], self._alignment, plan, row.forest)
            for row in own_rows
        ]
        with self._weights(reference):
            scores = forward.score(self._wrapped, rows, temperature, self._vocab_size, plan.least)
        bounds = np.concatenate([[0], np.cumsum([len(sequence) for sequence in sequences])]).astype(np.int64)
        flat = torch.zeros(int(bounds[-1]), dtype=torch.float32, device=parallel.device())
        if parallel.reports_results():
            for row, batch, values in zip(own_rows, rows, scores, strict=True):
                places = np.concatenate([np.arange(bounds[i], bounds[i + 1]) for i in row.sequences] or [bounds[:0]])
                flat[torch.from_numpy(places).to(flat.device)[batch.scored]] = values
        dist.all_reduce(flat)
        whole: Float32Array = flat.cpu().numpy()
        return [whole[start:end].copy() for start, end in itertools.pairwise(bounds)]

    def export_hf(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under their Hugging Face names, in a fixed order, on every rank."""
        yield from megatron_bridge.export_hf(self._chunks)

    def save_hf(self, folder: Path, *, source: Path) -> None:
        """Writes a Hugging Face folder: weights from here, every other file copied from ``source``.

        Raises:
            ModelError: it could not be written; nothing of it is left.
        """
        try:
            megatron_bridge.save_hf(self._chunks, folder, source=source)
        except BridgeError as error:
            raise ModelError(str(error)) from error

    def save(
        self, folder: Path, extra_state: Json, provenance: Json | None = None, *, background: bool = False
    ) -> None:
        """Writes a checkpoint; see :func:`mua.megatron.checkpoint.begin`.

        Args:
            provenance: JSON-able, for the manifest.
            background: return as soon as the tensors are copied. The checkpoint gets its name in a later call of this
                backend, in :meth:`finish_save` at the latest.
        """
        self.finish_save()
        if background and self._closing is None:
            self._closing = dist.new_group(backend="gloo")
        state = {"skipped_steps": self.skipped_steps, "extra": extra_state}
        self._pending = checkpoint.begin(
            folder, self._wrapped, self._optimizer, self._config, state, provenance, background=background
        )
        if not background:
            self.finish_save()

    def finish_save(self) -> None:
        """Waits for the checkpoint that is being written in the background, if there is one.

        Raises:
            ModelError: it could not be written; nothing of it is left.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.finish()

    def _poll_save(self) -> None:
        """Gives a checkpoint its name once every rank has written its part."""
        if self._pending is not None and self._pending.done():
            self.finish_save()

    def load(self, folder: Path) -> Json:
        """Restores a checkpoint of any layout and returns the ``extra_state`` it was saved with.

        Raises:
            ModelError: see :func:`mua.megatron.checkpoint.load`.
        """
        self.finish_save()
        state = checkpoint.load(folder, self._wrapped, self._optimizer, self._config)
        self.skipped_steps = state["skipped_steps"]
        extra: Json = state["extra"]
        return extra

    def close(self) -> None:
        """Ends Megatron's process groups, and torch.distributed if this backend started it.

        A checkpoint that is still being written, because an error ended the run, gets its name if all ranks come here
        within a minute; otherwise it is given up, with a line in the log.
        """
        try:
            if self._pending is not None:
                dist.monitored_barrier(self._closing, timeout=timedelta(seconds=CLOSE_SECONDS))
                self.finish_save()
        except Exception as error:
            log.error("a checkpoint that was being written is given up: %s", " ".join(str(error).split()))
        finally:
            parallel.shutdown(self._started)

    @property
    def chunks(self) -> list[GPTModel]:
        """The model chunks of this rank."""
        return self._chunks

    def offload(self) -> None:
        """Gives the device memory of weights, gradients and optimizer back; :meth:`onload` comes before any use."""
        if self._offloaded is None:
            self._offloaded = offload(self._wrapped, self._optimizer, self._reference)

    def onload(self) -> None:
        """Takes the memory that :meth:`offload` gave back; does nothing where it did not."""
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for chunk in self._chunks for parameter in chunk.parameters())

    def _packed(self, sequences: Sequence[TrainSequence]) -> Packed:
        check_ids(sequences, self._vocab_size)
        interleaved = parallel.virtual_stages(self._config) is not None
        return pack(
            [sequence.ids for sequence in sequences],
            self._config,
            self._alignment,
            # Megatron's interleaved schedule passes rows on in groups of this many, and cannot announce their lengths.
            multiple=self._config.pipeline_parallel if interleaved else 1,
            equal=interleaved,
        )

    @contextmanager
    def _weights(self, reference: bool) -> Iterator[None]:
        """Lets the parameters point at the frozen reference for a while."""
        if not reference:
            yield
            return
        if self._reference is None:
            raise ValueError("no reference is kept: build MegatronBackend(..., with_reference=True)")
        policy = [parameter.data for parameter in self._parameters()]
        _point(self._parameters(), self._reference)
        try:
            yield
        finally:
            _point(self._parameters(), policy)


def _point(parameters: Iterator[torch.nn.Parameter], tensors: Sequence[Tensor]) -> None:
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.data = tensor


def _load_chunks(model: ModelConfig, megatron: MegatronConfig) -> list[GPTModel]:
    try:
        hf_config = megatron_bridge.read_hf_config(model.path)
        architecture = megatron_bridge.transformer_config_kwargs(hf_config)
        chunks = build_chunks(architecture, megatron_bridge.gpt_model_kwargs(hf_config), model, megatron)
        megatron_bridge.load_hf(chunks, model.path)
        defer_logits(chunks)
    except BridgeError as error:
        raise ModelError(f"model.path: {error}") from error
    return chunks
