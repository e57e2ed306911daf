"""Weights by broadcast: process groups of one trainer rank, a root, and every tensor-parallel rank of the engines.

    root a (rank 0 of its group) ── its buckets ──► engine 0: ranks 1, 2 · engine 1: ranks 3, 4 · ...
    root b (rank 0 of its group) ── its buckets ──► the same engine ranks

The groups last while the engines do. When another set of engines is to be filled (one was restarted, has joined or
left, or only a restarted one waits for weights) they are left and formed anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from mua.config.schema import EngineConfig
from mua.engine.member import Engine, Targets
from mua.engine.placement import address_towards, trainer_address
from mua.utils.errors import EngineError

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.0005


async def all_or_first_error(work: Sequence[Awaitable[Any]]) -> None:
    """Wait for all; the first error ends the wait, because what is left may wait for the one that failed."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Connect:
    """Engines are to join these process groups, while their roots wait for them."""

    groups: Mapping[str, tuple[str, int]]
    """By name the address and port of the root."""
    size: int
    """Processes in each: the root and all engine ranks."""
    backend: str
    """gloo or nccl."""


class FeederGroup:
    """A root's side of its process group. It never raises: the engines' answers say whether an update succeeded."""

    def __init__(self, config: EngineConfig, *, cuda: bool) -> None:
        self._config = config
        self._seconds = config.control_seconds
        self.backend = "nccl" if cuda else "gloo"
        self._host = ""
        self._meeting: socket.socket | None = None
        self._group: Any = None
        self._sending: tuple[Any, Any] | None = None
        """The broadcast under way, and its buffer."""

    def listen(self) -> tuple[str, int]:
        """Leave the group there was; where engines are to look for the next one. They may come at once."""
        from mua.compat.torch_private import meeting_socket

        self._drop()
        address = trainer_address(self._config)
        if int(os.environ.get("GROUP_RANK", "0")) > 0:  # not rank 0's machine
            address = address_towards(address, int(os.environ.get("MASTER_PORT", "1")))
        self._host, self._meeting = address, meeting_socket()
        return address, self._meeting.getsockname()[1]

    def form(self, name: str, size: int) -> None:
        """Wait until all engine ranks have come, or the deadline is over."""
        from mua.compat.torch_private import outside_group

        meeting, self._meeting = self._meeting, None
        assert meeting is not None
        limit = timedelta(seconds=self._seconds)
        try:
            self._group = outside_group(self.backend, self._host, meeting, world_size=size, name=name, timeout=limit)
        except RuntimeError as error:
            _log.warning("engines did not join the process group %s of the weights: %s", name, error)

    def send(self, flat: Any) -> None:
        """Start the broadcast of a buffer, uint8 ``[bytes]``, when the one before is through."""
        import torch.distributed as dist

        self.finish()
        if self._group is not None:
            try:
                self._sending = dist.broadcast(flat, src=0, group=self._group, async_op=True), flat
            except RuntimeError as error:
                _log.warning("a broadcast of weights did not start: %s", error)

    def finish(self) -> None:
        """Wait for what is under way. Engines that answered have received it; others are given up by rank 0."""
        if self._sending is None:
            return
        (work, _), self._sending = self._sending, None
        deadline = time.monotonic() + self._seconds
        try:
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise RuntimeError("an engine did not take part in time")
                time.sleep(_POLL_SECONDS)
            work.wait()
        except RuntimeError as error:
            _log.warning("a broadcast of weights was given up: %s", error)

    def abandon(self) -> None:
        """What is under way will not be finished; the group is of no more use."""
        self._sending = None
        self._drop()

    def _drop(self) -> None:
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.close()
        group, self._group = self._group, None
        if group is not None:
            import torch.distributed as dist

            with contextlib.suppress(ValueError):  # whoever ended torch.distributed ended this group too
                dist.destroy_process_group(group)


class Members:
    """Which engines are in the groups; rank 0 asks them to come and go."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        """Of one engine, all of which receive every bucket."""
        self.number = 0
        """Of the set of engines; another set has another."""
        self._members: dict[Engine, int] = {}
        self._names: list[str] = []

    async def admit(self, targets: Targets) -> int:
        """The number of the groups of exactly these engines; if they are not there yet, a new one."""
        members = {engine: engine.stops for engine in targets.engines}
        if members != self._members:
            await self.leave()
            self.number += 1
            self._members = members
        return self.number

    async def connect(self, targets: Targets, groups: Connect) -> None:
        """Have the engines join. Raises :class:`EngineGone` when one does not come in time."""
        self._names = list(groups.groups)
        path = "/init_weights_update_group"
        for name, (address, port) in groups.groups.items():
            body = {"master_address": address, "master_port": port, "world_size": groups.size, "group_name": name}
            body |= {"backend": groups.backend}
            joining = [
                targets.take_part(engine, path, body | {"rank_offset": 1 + self.ranks * number}, targets.seconds)
                for number, engine in enumerate(targets.engines)
            ]
            await all_or_first_error(joining)

    async def leave(self) -> None:
        """Dissolve the groups with those of their engines that are still the same."""
        alive = [engine for engine, stops in self._members.items() if engine.up and engine.stops == stops]
        for engine in alive:
            for name in self._names:
                try:
                    await engine.client.control("/destroy_weights_update_group", {"group_name": name}, timeout=60.0)
                except EngineError as error:
                    _log.warning("%s did not leave a process group of the weights: %s", engine.label, error)
        self.forget()

    def forget(self) -> None:
        """Give the groups up without a word to the engines; the next update forms new ones."""
        self._members, self._names = {}, []
