"""The policy over all trainer ranks, driven by one: the loops are written once, as if there were one process.

    rank 0                                  other ranks
    policy.train_step(batch, loss) ──────►  follow(): the same call on the same backend
    policy.feed() into engines …   ──────►  every bucket is put together by all ranks
    policy.close()                 ──────►  follow() returns

Every call is a collective of the backend, so rank 0 announces it and its arguments before making it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor

from megatron_bridge.plan import ModelPlan, plan_model
from mua.algorithms.loss_protocol import LossFunction, ValueLossFunction
from mua.config.schema import ExperimentConfig
from mua.engine.feed import Feed, TrainerFeed
from mua.engine.host import EngineHost, Host, Hosts, make_servers
from mua.engine.nodes import find_nodes, reachable_address
from mua.errors import ModelError, RankLost
from mua.megatron.backend import MegatronBackend
from mua.megatron.parallel import COLLECTIVE_SECONDS, own_group
from mua.trainer.calls import Calls, lost_rank, naming_lost_ranks
from mua.trainer.launch import end_ranks, leads
from mua.trainer.provenance import provenance
from mua.types import Float32Array, Json, TrainBatch, TrainSequence

_STOP = "stop"


class Policy:
    """What trains: the policy and, with ``critic_steps`` (its optimizer steps of the run), a critic beside it.

    On rank 0 use as a context manager; on the others call :meth:`follow`.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        *,
        total_steps: int,
        with_reference: bool = False,
        critic_steps: int | None = None,
    ) -> None:
        with naming_lost_ranks():
            self._backend = MegatronBackend(
                config.model,
                config.megatron,
                config.optimizer,
                total_steps=total_steps,
                seed=config.seed,
                with_reference=with_reference,
                critic=None if critic_steps is None else config.critic,
                critic_steps=critic_steps,
            )
            timeout = timedelta(seconds=COLLECTIVE_SECONDS)
            self._group = own_group(timeout) if config.megatron.world_size > 1 else None
            self._calls = None if self._group is None else Calls(self._group, config.trainer.silence_seconds)
            self._nodes = find_nodes(self._group)
        self._model_path = config.model.path
        self._async_save = config.trainer.async_save
        self._provenance = provenance(config) if leads() else None
        self._with_reference = with_reference
        self._away = False
        self._config = config
        self._host: EngineHost | None = None
        self._feed_of_all = TrainerFeed(
            self._model_in_place,
            config.engine,
            self._nodes,
            self._group,
            announce=lambda targets: self._announce("feed", targets),
            meet=lambda: None if self._calls is None else self._calls.meet(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lost = None if error is None else lost_rank(error)
        if self._calls is None or (lost is None and not isinstance(error, KeyboardInterrupt | RankLost)):
            # An error that all ranks met has ended the others by now; it is the one to be seen.
            with suppress(*([] if error is None else [RankLost])):
                self.close()
            return
        # The others may be in a collective that this rank has left, and deaf to announcements.
        end_ranks()
        self._calls.close()
        self._backend.close()
        if lost is not None:
            raise lost from error

    def follow(self) -> None:
        """Do what rank 0 does until it stops. For every other rank.

        Raises :class:`mua.errors.RankLost` when it ends or falls silent before.
        """
        assert self._calls is not None, "there are other ranks"
        try:
            with naming_lost_ranks():
                while (announced := self._calls.announce(None))[0] != _STOP:
                    name, arguments = announced
                    result = getattr(self, f"_{name}")(*arguments)
                    if isinstance(result, Iterator):
                        for _ in result:
                            pass
        finally:
            if self._host is not None:
                self._host.close()
        self._backend.close()

    def close(self) -> None:
        """Let the other ranks go and end the process groups."""
        try:
            if leads():
                self._announce(_STOP)
        finally:
            if self._calls is not None:
                self._calls.close()
            self._backend.close()

    def train_step(self, batch: TrainBatch, loss: LossFunction) -> dict[str, float]:
        """One optimizer step; see :meth:`mua.megatron.backend.MegatronBackend.train_step`."""
        self._announce("train_step", batch, loss)
        return self._train_step(batch, loss)

    def train_values(self, batch: TrainBatch, loss: ValueLossFunction) -> dict[str, float]:
        """One optimizer step of the critic; see :meth:`mua.megatron.backend.MegatronBackend.train_values`."""
        self._announce("train_values", batch, loss)
        return self._train_values(batch, loss)

    def with_values(self, batch: TrainBatch) -> TrainBatch:
        """``batch`` with the critic's current values; see :meth:`mua.megatron.backend.MegatronBackend.values`."""
        self._announce("values", batch.sequences)
        found = self._values(batch.sequences)
        return replace(batch, sequences=[replace(s, values=v) for s, v in zip(batch, found, strict=True)])

    def with_logprobs(self, batch: TrainBatch, *, old: bool) -> TrainBatch:
        """``batch`` with log-probabilities of the reference, if one is kept, and of the current policy as ``old``."""
        sequences = batch.sequences
        if old:
            current = self.log_probabilities(sequences, batch.temperature)
            sequences = [replace(s, old_logprobs=values) for s, values in zip(sequences, current, strict=True)]
        if self._with_reference:
            reference = self.log_probabilities(sequences, batch.temperature, reference=True)
            sequences = [replace(s, reference_logprobs=values) for s, values in zip(sequences, reference, strict=True)]
        return replace(batch, sequences=sequences)

    def log_probabilities(
        self, sequences: Sequence[TrainSequence], temperature: float, *, reference: bool = False
    ) -> list[Float32Array]:
        """See :meth:`mua.megatron.backend.MegatronBackend.log_probabilities`."""
        self._announce("log_probabilities", sequences, temperature, reference)
        return self._log_probabilities(sequences, temperature, reference)

    def export_hf(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under their Hugging Face names; the other ranks take part as the iterator advances."""
        self._announce("export_hf")
        yield from self._export_hf()

    def feed(self) -> Feed:
        """The current weights for :meth:`mua.engine.pool.EnginePool.update_weights`, resharded by all ranks."""
        return self._feed_of_all

    def offload(self) -> None:
        """Move weights and optimizer of all ranks to host memory; whatever needs them moves them back."""
        self._announce("offload")
        self._offload()

    def onload(self) -> None:
        """Move them back now."""
        self._announce("onload")
        self._onload()

    def engine_hosts(self) -> Hosts | None:
        """Have the leader of every other machine look after engines there; None when there is no other machine."""
        if not self._nodes.several:
            return None
        key = secrets.token_hex(32)
        self._announce("engine_hosts", key)
        return self._engine_hosts(key)

    def save(self, folder: Path, extra_state: Json) -> None:
        """Write a checkpoint, whole or not at all; with ``trainer.async_save`` by the side of what follows."""
        self._announce("save", folder, extra_state)
        self._save(folder, extra_state)

    def finish_save(self) -> None:
        """Wait for a checkpoint that is still being written."""
        self._announce("finish_save")
        self._finish_save()

    def load(self, folder: Path) -> Json:
        """Restore a checkpoint; the ``extra_state`` it was saved with."""
        self._announce("load", folder)
        return self._load(folder)

    def save_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder, tokenizer and configuration copied from ``model.path``."""
        self._announce("save_hf", folder)
        self._save_hf(folder)

    def _offload(self) -> None:
        self._backend.offload()
        self._away = True

    def _onload(self) -> None:
        self._backend.onload()
        self._away = False

    def _train_step(self, batch: TrainBatch, loss: LossFunction) -> dict[str, float]:
        self._onload()
        return self._backend.train_step(batch, loss)

    def _train_values(self, batch: TrainBatch, loss: ValueLossFunction) -> dict[str, float]:
        self._onload()
        return self._backend.train_values(batch, loss)

    def _values(self, sequences: Sequence[TrainSequence]) -> list[Float32Array]:
        self._onload()
        return self._backend.values(sequences)

    def _log_probabilities(
        self, sequences: Sequence[TrainSequence], temperature: float, reference: bool
    ) -> list[Float32Array]:
        self._onload()
        return self._backend.log_probabilities(sequences, temperature, reference=reference)

    def _export_hf(self) -> Iterator[tuple[str, Tensor]]:
        self._onload()
        return self._backend.export_hf()

    @contextmanager
    def _model_in_place(self) -> Iterator[ModelPlan]:
        """The plan of the model; its weights are on the device inside, and afterwards where they were."""
        away = self._away
        self._onload()
        try:
            yield plan_model(self._backend.chunks)
        finally:
            if away:
                self._offload()

    def _feed(self, targets: Sequence[int]) -> None:
        self._feed_of_all.follow(targets)

    def _engine_hosts(self, key: str) -> Hosts:
        rank = dist.get_rank()
        if rank in self._nodes.leaders[1:]:
            address = reachable_address()
            servers = make_servers(self._config, node=self._nodes.own, address=address, api_key=key)
            self._host = EngineHost(servers, address, key)
        urls: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(urls, None if self._host is None else self._host.url, group=self._group)
        others = enumerate(self._nodes.leaders[1:], start=1)
        return Hosts(key, tuple(Host(node, str(urls[leader])) for node, leader in others))

    def _save(self, folder: Path, extra_state: Json) -> None:
        self._onload()
        self._backend.save(folder, extra_state, self._provenance, background=self._async_save)

    def _finish_save(self) -> None:
        self._backend.finish_save()

    def _load(self, folder: Path) -> Json:
        if not folder.is_dir():
            raise ModelError(f"{folder}: no such checkpoint")
        self._onload()
        return self._backend.load(folder)

    def _save_hf(self, folder: Path) -> None:
        self._onload()
        self._backend.save_hf(folder, source=self._model_path)

    def _announce(self, name: str, *arguments: Any) -> None:
        if self._calls is not None:
            self._calls.announce((name, arguments))
