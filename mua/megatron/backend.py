"""The training backend: optimizer steps, log-probabilities and values, export and checkpoints of policy and critic."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

import megatron_bridge
from megatron_bridge import BridgeError
from megatron_bridge.family import HfConfig
from mua.algorithms.loss_protocol import LossFunction, ValueLossFunction
from mua.algorithms.losses import finish_metrics
from mua.config.schema import CriticConfig, MegatronConfig, ModelConfig, OptimizerConfig
from mua.errors import ModelError
from mua.megatron import checkpoint, forward, parallel
from mua.megatron.critic import Critic
from mua.megatron.model import build_chunks
from mua.megatron.modules import defer_logits
from mua.megatron.network import Network, loaded
from mua.megatron.offload import Offloaded, offload
from mua.megatron.replay import RoutingReplay
from mua.types import Float32Array, Json, TrainBatch, TrainSequence

CLOSE_SECONDS = 60.0
"""How long the end of a failed run waits for the other ranks, to finish a checkpoint with them."""

log = logging.getLogger(__name__)


class MegatronBackend:
    """The policy on this rank and its optimizer, and those of a critic if one is asked for.

    Every method is collective: all ranks call it with the same arguments and get the same result.

    Args:
        model: the Hugging Face folder the weights start from, and their dtype.
        total_steps: optimizer steps of the run; a decaying schedule ends there.
        seed: of Megatron's random states.
        with_reference: keep a frozen copy of the initial weights for ``log_probabilities(reference=True)``.
        critic: train one beside the policy, for :meth:`values` and :meth:`train_values`.
        critic_steps: its optimizer steps of the run; None: as many as the policy's.

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
        critic: CriticConfig | None = None,
        critic_steps: int | None = None,
    ) -> None:
        self._pending: checkpoint.PendingSave | None = None
        self._closing: dist.ProcessGroup | None = None
        self._started = parallel.initialize(megatron, seed)
        self._config = megatron
        self.critic: Critic | None = None
        self._offloaded: Offloaded | None = None
        try:
            self._build(model, optimizer, total_steps, with_reference)
            if critic is not None:
                self.critic = Critic(model, megatron, critic, critic_steps or total_steps)
        except BaseException:
            self.close()
            raise

    def _build(self, model: ModelConfig, optimizer: OptimizerConfig, total_steps: int, with_reference: bool) -> None:
        chunks = loaded(_policy_chunks, model, self._config)
        defer_logits(chunks)
        self.policy = Network(chunks, self._config, optimizer, total_steps)
        self._reference = [p.detach().clone() for p in self.policy.parameters()] if with_reference else None
        mode = self._config.routing_replay
        self._replay = None if mode == "off" else RoutingReplay(self.policy.chunks, mode)

    def train_step(self, batch: TrainBatch, loss: LossFunction) -> dict[str, float]:
        """One optimizer step on the whole batch: gradients are plain sums of the loss function's.

        A step whose gradient norm is not finite changes nothing and is counted (``skipped``, ``skipped_steps``).

        Returns:
            metrics: ``loss``, ``entropy`` (mean over trained tokens, nats), ``grad_norm``, ``learning_rate``,
            ``tokens`` (trained), ``rows``, ``padding_share``, ``merged_share`` (of tokens, that were not computed
            because another sequence begins with them), how evenly ranks and rows are loaded
            (:class:`mua.megatron.workload.Spread`), ``skipped``, ``forward_backward_seconds``,
            ``optimizer_seconds``, those of the loss function (:func:`mua.algorithms.losses.finish_metrics`), and of
            the experts' load (:func:`mua.megatron.moe.collect_metrics`), whose losses are no part of ``loss``, and
            with ``megatron.routing_replay`` the share of the engine's expert choices that this policy made too.

        Raises:
            MuaError: a sequence is longer than a row, trains its first token, holds a token the model lacks, or lacks
                the expert choices that are to be replayed.
        """
        self._poll_save()
        if self._replay is not None:
            self._replay.check(batch.sequences)
        terms = forward.policy_terms(loss, batch.temperature, self.policy.vocab_size)
        step = self.policy.train_step(batch.sequences, terms)
        tokens = step.sums.pop("_tokens")
        own = {
            "loss": step.sums.pop("_loss"),
            "entropy": step.sums.pop("_entropy") / max(tokens, 1.0),
            "tokens": tokens,
        }
        replayed = {} if self._replay is None else self._replay.metrics()
        return finish_metrics(step.sums | {"tokens": tokens}, step.maxima) | replayed | step.metrics | own

    def train_values(self, batch: TrainBatch, loss: ValueLossFunction) -> dict[str, float]:
        """One optimizer step of the critic on the whole batch; otherwise as :meth:`train_step`.

        Returns:
            metrics: ``loss/value``; ``critic/value``, ``critic/return`` and ``critic/clip_fraction``, means over
            trained tokens; ``critic/grad_norm``, ``critic/learning_rate`` and so on as of the policy.

        Raises:
            MuaError: as :meth:`train_step`.
            ValueError: there is no critic, or the batch has no values and returns.
        """
        self._poll_save()
        return self._valuer().train_step(batch, loss)

    def values(self, sequences: Sequence[TrainSequence]) -> list[Float32Array]:
        """The critic's value of what comes before each token.

        Returns:
            per sequence, in the order given, float32 ``[T]``; entry 0 is 0.0, as nothing comes before it.

        Raises:
            MuaError: a sequence is longer than a row or holds a token the model lacks.
            ValueError: there is no critic.
        """
        return self._valuer().values(sequences)

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
        with self._weights(reference):
            return self.policy.score(sequences, forward.read_logprobs(temperature, self.policy.vocab_size))

    def export_hf(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under their Hugging Face names, in a fixed order, on every rank."""
        yield from megatron_bridge.export_hf(self.policy.chunks)

    def save_hf(self, folder: Path, *, source: Path) -> None:
        """Writes a Hugging Face folder: weights from here, every other file copied from ``source``.

        Raises:
            ModelError: it could not be written; nothing of it is left.
        """
        try:
            megatron_bridge.save_hf(self.policy.chunks, folder, source=source)
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
            self._closing = parallel.own_group()
        state = {"skipped_steps": self.policy.skipped_steps, "extra": extra_state}
        if self.critic is not None:
            state["critic_skipped_steps"] = self.critic.network.skipped_steps
        self._pending = checkpoint.begin(
            folder, self._networks(), self._config, state, provenance, background=background
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
        state = checkpoint.load(folder, self._networks(), self._config)
        self.policy.skipped_steps = state["skipped_steps"]
        if self.critic is not None:
            self.critic.network.skipped_steps = state["critic_skipped_steps"]
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
        """The policy's model chunks of this rank."""
        return self.policy.chunks

    @property
    def skipped_steps(self) -> int:
        """The policy's steps left out because the gradient norm was not finite; checkpoints hold them."""
        return self.policy.skipped_steps

    def offload(self) -> None:
        """Gives the device memory of weights, gradients and optimizer back; :meth:`onload` comes before any use."""
        if self._offloaded is None:
            self._offloaded = offload(self._networks().values(), self._reference)

    def onload(self) -> None:
        """Takes the memory that :meth:`offload` gave back; does nothing where it did not."""
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None

    def _networks(self) -> dict[str, Network]:
        """All that is trained, by the names checkpoints know."""
        return {checkpoint.POLICY: self.policy} | ({} if self.critic is None else {"critic": self.critic.network})

    def _valuer(self) -> Critic:
        if self.critic is None:
            raise ValueError("no critic is trained: build MegatronBackend(..., critic=...)")
        return self.critic

    @contextmanager
    def _weights(self, reference: bool) -> Iterator[None]:
        """Lets the parameters point at the frozen reference for a while."""
        if not reference:
            yield
            return
        if self._reference is None:
            raise ValueError("no reference is kept: build MegatronBackend(..., with_reference=True)")
        policy = self.policy.tensors()
        _point(self.policy.parameters(), self._reference)
        try:
            yield
        finally:
            _point(self.policy.parameters(), policy)


def _point(parameters: Iterator[torch.nn.Parameter], tensors: Sequence[Tensor]) -> None:
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.data = tensor


def _policy_chunks(hf_config: HfConfig, model: ModelConfig, megatron: MegatronConfig) -> list[GPTModel]:
    architecture = megatron_bridge.transformer_config_kwargs(hf_config)
    return build_chunks(architecture, megatron_bridge.gpt_model_kwargs(hf_config), model, megatron)
