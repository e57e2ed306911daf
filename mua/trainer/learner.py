"""The learner over all trainer ranks: the policy and, where they are asked for, a critic and a frozen reference.

The way of a batch is drawn at the top of :mod:`mua.algorithms.batch`.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Self

import torch.distributed as dist
from torch import Tensor

from megatron_bridge.plan import ModelPlan, plan_model
from megatron_bridge.save import save_hf
from mua.algorithms.losses import LossFunction, ValueLossFunction
from mua.config.schema import ExperimentConfig
from mua.engine.cluster import (
    Hosts,
    Joining,
    address_towards,
    facts_of,
    find_nodes,
    first_engine_gpu,
    local_ranks,
    trainer_address,
    trains_beside_engines,
)
from mua.engine.engine_handle import EnginePlace
from mua.engine.remote_worker import RemoteWorker
from mua.engine.weight_sync import TrainerSource
from mua.engine.weight_transfer import WeightSource
from mua.megatron import checkpoint, device_memory, parallel
from mua.megatron.batch_sharder import BatchSharder, GlobalBatch
from mua.megatron.device_memory import Offloaded, offload
from mua.megatron.model import load_chunks
from mua.megatron.modules import defer_logits
from mua.megatron.moe import RoutingReplay
from mua.megatron.network import Network, policy_terms, read_logprobs, read_values, value_terms
from mua.megatron.optimizer import GradientWatch, cosine
from mua.trainer.control_tokens import init_untrained
from mua.trainer.ranks import Calls, abort_workers, announced, lost_rank, naming_lost_ranks
from mua.types import Float32Array, Json, TrainBatch, TrainSequence
from mua.utils.collective import gathered
from mua.utils.errors import RankLost
from mua.utils.ports import LOOPBACK

CLOSE_SECONDS = 60.0
"""How long the end of a failed run waits for the other ranks, to finish a checkpoint with them."""

log = logging.getLogger(__name__)


class Learner:
    """What trains. On rank 0 use as a context manager; on the others call :meth:`worker_loop`.

    Args:
        total_steps: optimizer steps of the policy in the run; a decaying schedule ends there.
        with_reference: keep a frozen copy of the initial weights for ``log_probabilities(reference=True)``.
        critic_steps: optimizer steps of a critic beside the policy, for :meth:`values` and :meth:`train_values`; None:
            there is none.
        driven: by rank 0. Otherwise every rank makes every call by itself, with the same arguments.

    Raises:
        MuaError: the layout is not a proven one (:mod:`mua.megatron.layouts`).
        ConfigError: the model does not divide over it.
        ModelError: the model folder cannot be read.
    """

    def __init__(
        self, config: ExperimentConfig, *, total_steps: int, with_reference: bool = False,
        critic_steps: int | None = None, driven: bool = True,
    ) -> None:  # fmt: skip
        self._config = config
        self.calls: Calls | None = None
        self._pending: checkpoint.PendingSave | None = None
        self._closing: dist.ProcessGroup | None = None
        self._offloaded: Offloaded | None = None
        self._host: RemoteWorker | None = None
        self._kept_gradients: list[list[Tensor]] = []
        self._held_gradients: list[list[Tensor]] = []
        self.kept_logprobs: list[Float32Array] | None = None
        """On rank 0, of each sequence of the last step's batch float32 ``[T]``, 0.0 where it trains nothing; None
        unless that step was to keep them."""
        self._group: dist.ProcessGroup | None = None
        with naming_lost_ranks():
            self._started = parallel.initialize(config.megatron, config.seed)
            try:
                self._build(total_steps, with_reference, critic_steps)
            except BaseException:
                parallel.shutdown(self._started)
                raise
            if driven and config.megatron.world_size > 1:
                self._group = parallel.own_group(timedelta(seconds=parallel.COLLECTIVE_SECONDS))
                self.calls = Calls(self._group, config.trainer.silence_seconds)
            self._sharder = BatchSharder(self.policy.chunks, config.megatron, self._group)
            self._nodes = find_nodes(self._group)
        calls = self.calls
        self._source = TrainerSource(
            self._model_in_place, config.engine, self._nodes, self._group,
            announce=lambda *what: None if calls is None else calls.announce(("_follow", what, {})),
            meet=lambda: None if calls is None else calls.meet(),
        )  # fmt: skip

    @classmethod
    def for_rl(cls, config: ExperimentConfig, *, with_reference: bool | None = None) -> Self:
        """With the networks that ``algorithm`` needs."""
        total, critic = config.optimizer_steps
        reference = config.algorithm.kl_coefficient > 0 if with_reference is None else with_reference
        return cls(config, total_steps=total, with_reference=reference, critic_steps=critic)

    def _build(self, total_steps: int, with_reference: bool, critic_steps: int | None) -> None:
        config, megatron = self._config, self._config.megatron
        chunks = load_chunks(config.model, megatron)
        if config.model.init_control_tokens == "mean":
            init_untrained(chunks, config.model)
        defer_logits(chunks)
        self.policy = Network(chunks, megatron, config.optimizer, total_steps)
        self._reference = [p.detach().clone() for p in self.policy.parameters()] if with_reference else None
        self._replay = None if megatron.routing_replay == "off" else RoutingReplay(chunks, megatron.routing_replay)
        self.networks = {checkpoint.POLICY: self.policy}
        """All that is trained, by the names checkpoints know."""
        if critic_steps is not None:
            chunks = load_chunks(config.model, megatron, critic=True)
            if config.model.init_control_tokens == "mean":
                init_untrained(chunks, config.model, critic=True)
            self.networks["critic"] = Network(
                chunks, megatron, config.critic.optimizer, critic_steps, prefix="train/critic/"
            )

    @property
    def critic(self) -> Network:
        """Raises KeyError where none is trained."""
        return self.networks["critic"]

    def _check_critic(self) -> None:
        if "critic" not in self.networks:
            raise ValueError("no critic is trained: build Learner(..., critic_steps=...)")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        lost = None if error is None else lost_rank(error)
        if self.calls is None or (lost is None and not isinstance(error, KeyboardInterrupt | RankLost)):
            # An error that all ranks met has ended the others by now; it is the one to be seen.
            with suppress(*([] if error is None else [RankLost])):
                self.close()
            return
        # The others may be in a collective that this rank has left, and deaf to announcements.
        abort_workers()
        self.calls.close()
        self._close()
        if lost is not None:
            raise lost from error

    def worker_loop(self) -> None:
        """On every rank but 0: do what rank 0 does until it stops; see :meth:`mua.trainer.ranks.Calls.worker_loop`."""
        assert self.calls is not None, "there are other ranks"
        try:
            self.calls.worker_loop(self)
        finally:
            if self._host is not None:
                self._host.close()
        self._close()

    def close(self) -> None:
        """Let the other ranks go and end Megatron's process groups, and torch.distributed if it was started here.

        A checkpoint that is still being written, because an error ended the run, gets its name if all ranks come here
        within a minute; otherwise it is given up, with a line in the log.
        """
        try:
            if self.calls is not None:
                self.calls.release()
        finally:
            self._close()

    def _close(self) -> None:
        try:
            if self._pending is not None:
                dist.monitored_barrier(self._closing, timeout=timedelta(seconds=CLOSE_SECONDS))
                self._finish_save()
        except Exception as error:
            log.error("a checkpoint that was being written is given up: %s", " ".join(str(error).split()))
        finally:
            parallel.shutdown(self._started)

    @announced
    def watch_gradients(self, *, keep: bool = False) -> None:
        """From now on note a digest of every gradient of each network, and with ``keep`` a copy of the policy's on its
        rank."""
        for name, network in self.networks.items():
            network.optimizer.watch = GradientWatch(keep=keep and name == checkpoint.POLICY)
        self._kept_gradients = []

    @property
    def watches_gradients(self) -> bool:
        """Whether :meth:`watch_gradients` was called."""
        return self.policy.optimizer.watch is not None

    @announced
    def gradient_digests(self) -> dict[str, list[str]]:
        """Of the optimizer steps since the last call, over all ranks, by network that took any; none unless watched."""
        found: dict[str, list[str]] = {}
        for name, network in self.networks.items():
            if network.optimizer.watch is not None:
                found[name], kept = network.optimizer.watch.take()
                if name == checkpoint.POLICY:
                    self._kept_gradients = kept
        return {name: digests for name, digests in found.items() if digests}

    @announced
    def hold_gradients(self) -> None:
        """Hold on to the kept gradients of the last call of :meth:`gradient_digests`, for :meth:`gradient_cosines`."""
        self._held_gradients = self._kept_gradients

    @announced
    def gradient_cosines(self) -> list[float]:
        """Between the gradients held and those of the last call of :meth:`gradient_digests`, update by update."""
        pairs = zip(self._held_gradients, self._kept_gradients, strict=False)
        return [cosine(held, kept) for held, kept in pairs]

    def train_step(self, batch: TrainBatch, loss: LossFunction, *, keep: bool = False) -> dict[str, float]:
        """One optimizer step of the policy on the whole batch: gradients are plain sums of the loss function's.

        With ``keep`` the log-probabilities of the trained tokens that the loss saw are in :attr:`kept_logprobs`.

        Returns:
            metrics: see :meth:`mua.megatron.network.Network.train`; with ``megatron.routing_replay`` also the share of
            the engine's expert choices that this policy made too; where ranks are sent their shares of the batch, the
            bytes since the last step (:meth:`mua.megatron.batch_sharder.BatchSharder.metrics`).

        Raises:
            MuaError: a sequence is longer than a packed micro-batch, trains its first token, holds a token the model
                lacks, or lacks the expert choices that are to be replayed.
        """
        metrics = self._train_step(self._planned(batch.sequences, training=True), loss, batch.temperature, keep)
        return metrics | self._sharder.metrics()

    @announced
    def _train_step(
        self, batch: GlobalBatch | None, loss: LossFunction, temperature: float, keep: bool
    ) -> dict[str, float]:
        self._prepare_step()
        seen: list[Tensor] | None = [] if keep else None
        terms = policy_terms(loss, temperature, self.policy.vocab_size, self._config.model.fp32_lm_head, kept=seen)
        metrics = self.policy.train(self._sharder.shard(batch), terms)
        self.kept_logprobs = None if seen is None else self._sharder.gather_scores(batch, seen)
        return metrics | ({} if self._replay is None else self._replay.metrics())

    @announced
    def skip_steps(self, steps: Mapping[str, int]) -> None:
        """Move the schedules of networks, by name, on by steps that have nothing to learn from."""
        for name, count in steps.items():
            self.networks[name].skip(count)

    def train_values(self, batch: TrainBatch, loss: ValueLossFunction) -> dict[str, float]:
        """One optimizer step of the critic on the whole batch; otherwise as :meth:`train_step`.

        Returns:
            metrics: ``train/critic/vf_loss``; ``train/critic/values``, ``train/critic/returns`` and
            ``train/critic/vf_clipfrac``, means over
            trained tokens; ``train/critic/grad_norm``, ``train/critic/lr`` and so on as of the policy.

        Raises:
            MuaError: as :meth:`train_step`.
            ValueError: there is no critic, or the batch has no values and returns.
        """
        self._check_critic()
        return self._train_values(self._sharder.plan(batch.sequences, training=True), loss)

    @announced
    def _train_values(self, batch: GlobalBatch | None, loss: ValueLossFunction) -> dict[str, float]:
        self._prepare_step()
        metrics = self.critic.train(self._sharder.shard(batch), value_terms(loss))
        del metrics["train/tokens"]  # the policy's step counts them
        return metrics

    def values(self, sequences: Sequence[TrainSequence]) -> list[Float32Array]:
        """The critic's value of what comes before each token.

        Returns:
            per sequence, in the order given, float32 ``[T]``; entry 0 is 0.0, as nothing comes before it.

        Raises:
            MuaError: a sequence is longer than a packed micro-batch or holds a token the model lacks.
            ValueError: there is no critic.
        """
        self._check_critic()
        return self._values(self._sharder.plan(sequences, training=False))

    @announced
    def _values(self, batch: GlobalBatch | None) -> list[Float32Array]:
        self._onload()
        share = self._sharder.shard(batch)
        return self._sharder.gather_scores(batch, self.critic.score(share, read_values))

    def log_probabilities(
        self, sequences: Sequence[TrainSequence], temperature: float, *, reference: bool = False
    ) -> list[Float32Array]:
        """Log-probability of every token given those before it, under the policy or the frozen reference.

        Expert choices of the engine are replayed for the policy, as in training; the reference makes its own.

        Returns:
            per sequence, in the order given, float32 ``[T]``; entry 0 is 0.0, as nothing predicts it.

        Raises:
            MuaError: a sequence is longer than a packed micro-batch or holds a token the model lacks.
            ValueError: ``reference`` without ``with_reference``, or a temperature not above 0.
        """
        if reference and self._reference is None:
            raise ValueError("no reference is kept: build Learner(..., with_reference=True)")
        batch = self._planned(sequences, training=False, replays=not reference)
        return self._log_probabilities(batch, temperature, reference)

    @announced
    def _log_probabilities(self, batch: GlobalBatch | None, temperature: float, reference: bool) -> list[Float32Array]:
        self._onload()
        read = read_logprobs(temperature, self.policy.vocab_size, self._config.model.fp32_lm_head)
        share = self._sharder.shard(batch)
        policy = [(parameter, parameter.data) for parameter in self.policy.parameters()]
        try:
            if reference:
                assert self._reference is not None
                for (parameter, _), tensor in zip(policy, self._reference, strict=True):
                    parameter.data = tensor
            found = self.policy.score(share, read)
        finally:
            for parameter, tensor in policy:
                parameter.data = tensor
        return self._sharder.gather_scores(batch, found)

    def _planned(self, sequences: Sequence[TrainSequence], *, training: bool, replays: bool = True) -> GlobalBatch:
        """The policy's plan, with expert choices where it ``replays`` any, once they are found to be there."""
        replay = self._replay if replays else None
        if replay is not None:
            replay.check(sequences)
        return self._sharder.plan(sequences, training=training, experts=replay is not None)

    def with_values(self, batch: TrainBatch) -> TrainBatch:
        """``batch`` with the critic's current values."""
        found = self.values(batch.sequences)
        return replace(batch, sequences=[replace(s, values=v) for s, v in zip(batch, found, strict=True)])

    def with_logprobs(self, batch: TrainBatch, *, old: bool) -> TrainBatch:
        """``batch`` with log-probabilities of the reference, if one is kept, and of the current policy as ``old``."""
        sequences = batch.sequences
        if old:
            current = self.log_probabilities(sequences, batch.temperature)
            sequences = [replace(s, old_logprobs=values) for s, values in zip(sequences, current, strict=True)]
        if self._reference is not None:
            reference = self.log_probabilities(sequences, batch.temperature, reference=True)
            sequences = [replace(s, reference_logprobs=values) for s, values in zip(sequences, reference, strict=True)]
        return replace(batch, sequences=sequences)

    @announced
    def save(
        self,
        folder: Path,
        extra_state: Json,
        provenance: Json | None = None,
        *,
        background: bool = False,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        """Write a checkpoint, whole or not at all; see :class:`mua.megatron.checkpoint.PendingSave`.

        Args:
            provenance: JSON-able, for the manifest.
            texts: files by name that stand in it instead of those of ``model.path``.
            background: return as soon as the tensors are copied. The checkpoint gets its name in a later call, in
                :meth:`finish_save` at the latest.
        """
        self._onload()
        self._finish_save()
        if background and self._closing is None:
            self._closing = parallel.own_group()
        self._pending = checkpoint.PendingSave(
            folder,
            self.networks,
            self._config.megatron,
            extra_state,
            provenance,
            background=background,
            model_files=self._config.model.path,
            texts=texts,
        )
        if not background:
            self._finish_save()

    @announced
    def load(self, folder: Path) -> Json:
        """Restore a checkpoint of any layout; the ``extra_state`` it was saved with.

        Raises:
            ModelError: see :func:`mua.megatron.checkpoint.load`.
        """
        self._onload()
        self._finish_save()
        return checkpoint.load(folder, self.networks, self._config.megatron, self._config.model.path)

    @announced
    def save_hf(self, folder: Path, texts: Mapping[str, str] | None = None) -> None:
        """Write the policy as a Hugging Face folder, with the files ``texts`` by name, all others from ``model.path``.

        Raises:
            ModelError: it could not be written; nothing of it is left.
        """
        self._onload()
        save_hf(self.policy.chunks, folder, source=self._config.model.path, texts=texts)

    def weights(self) -> WeightSource:
        """The current weights for :meth:`mua.engine.pool.EnginePool.update_weights`, resharded by all ranks."""
        return self._source

    def engine_hosts(self) -> Hosts | None:
        """Have the leader of every other machine look after engines there, and say where the others are.

        None when all are on this machine's GPUs, as many as the trainer's.
        """
        config = self._config
        if config.placement == "colocated":
            return self._engine_hosts(secrets.token_hex(32)) if self._nodes.several else None
        own, key = trains_beside_engines(config), secrets.token_hex(32)
        hosts = self._engine_hosts(key) if own and self._nodes.several else Hosts(key)
        joining = Joining(trainer_address(config.engine), config.output, facts_of(config), config.engine.nodes)
        return replace(hosts, own=own, first_gpu=first_engine_gpu(config, local_ranks()), joining=joining)

    @announced
    def _engine_hosts(self, key: str) -> Hosts:
        config = self._config
        if dist.get_rank() in self._nodes.leaders[1:]:
            towards = os.environ.get("MASTER_ADDR", LOOPBACK), int(os.environ.get("MASTER_PORT", "1"))
            self._host = RemoteWorker(
                config, self._nodes.own * config.engine.count, key,
                address=address_towards(*towards), first_gpu=first_engine_gpu(config, local_ranks()),
            )  # fmt: skip
        urls = gathered(None if self._host is None else self._host.url, self._group)
        return Hosts(key, tuple(str(urls[leader]) for leader in self._nodes.leaders[1:]))

    def _follow(self, engines: Sequence[EnginePlace], groups: int) -> None:
        """Announced by the source itself."""
        self._source.follow(engines, groups)

    @contextmanager
    def _model_in_place(self) -> Iterator[ModelPlan]:
        """The plan of the policy; its weights are on the device inside, and afterwards where they were."""
        away = self._offloaded is not None
        self._onload()
        try:
            yield plan_model(self.policy.chunks)
        finally:
            if away:
                self._offload()

    def _prepare_step(self) -> None:
        """State is on the device, and a checkpoint gets its name once every rank has written its part.

        Weights may be left for the step to gather.
        """
        self._restore()
        if self._pending is not None and self._pending.done():
            self._finish_save()

    def _restore(self) -> None:
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None

    # What other collective methods do too has a private name there; called by its public one it is announced.

    def _finish_save(self) -> None:
        """Wait for the checkpoint that is being written in the background, if there is one.

        Raises:
            ModelError: it could not be written; nothing of it is left.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.finish()

    finish_save = announced(_finish_save)

    def _offload(self) -> None:
        """Give the device memory of weights, gradients and optimizer back; what needs them moves them back."""
        if self._offloaded is None:
            self._offloaded = offload(self.networks.values(), self._reference)

    offload = announced(_offload)

    @announced
    def give_back(self) -> None:
        """Leave to engines what torch caches of every rank's device."""
        device_memory.give_back()

    def _onload(self) -> None:
        """Take the memory that :meth:`offload` gave back, and make weights whole; does nothing where they are."""
        self._restore()
        for network in self.networks.values():
            network.gather_parameters()

    onload = announced(_onload)
