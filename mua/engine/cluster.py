"""Machines that give engines to a running job and take them away again, as rank 0 sees them.

    mua engines (another machine, mua/engine/remote_worker.py)        rank 0
    reads <output>/engines/address                     ◄── writes it, mode 0600, removes it at the end
    POST /register  what it was configured with        ──► compares: 200 a name and numbers, or 409 and both sides
    POST /ready     where its RemoteWorker answers     ──► EnginePool.admit: its engines start, are filled, are used
    POST /alive     every second                       ──► 410: not known (any more), register again
    POST /leave     asked to leave by a signal         ──► EnginePool.drain, then its engines are out
    RemoteWorker /end                                  ◄── the run ended, or has no more use for the machine

A machine is lost when it is silent, or when an engine of it cannot be restarted; its requests are sampled anew on
other engines (those of a machine that leaves go on there), and the run goes on as long as there are some. While there
are none at all, it waits for a machine as long as an engine may take to start.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import aiohttp
from aiohttp import web

import mua
from mua.config.schema import EngineConfig, ExperimentConfig
from mua.engine.engine_handle import EngineHandle, Machine
from mua.engine.server import PATIENCE_SECONDS, RemoteServer, has_cuda, request_json, serve
from mua.utils.atomic import replace_text
from mua.utils.errors import ConfigError, ModelError, one_line
from mua.utils.ports import LOOPBACK

if TYPE_CHECKING:
    import torch.distributed as dist

_log = logging.getLogger(__name__)
ADDRESS_FILE = Path("engines") / "address"
"""In the run's output folder."""
_LOOK_SECONDS = 0.5
_END_SECONDS = 10.0
_OF_ONE_MACHINE = frozenset({"count", "nodes", "address", "start_seconds", "stop_seconds", "leave_seconds"})
"""Keys of the section ``engine`` that may differ between the run and a machine that joins."""
_PACKAGES = ("sglang", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Address:
    """What is in the address file."""

    url: str
    key: str
    run: str
    """Drawn by each start of a run."""
    host: str
    pid: int
    since: str

    def write(self, file: Path) -> None:
        replace_text(file, json.dumps(asdict(self)) + "\n", mode=0o600)

    @classmethod
    def read(cls, file: Path) -> Address | None:
        """None where there is no such file, or another's content."""
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            return cls(**found)
        except (FileNotFoundError, ValueError, TypeError):
            return None

    @property
    def writer(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


def facts_of(config: ExperimentConfig) -> dict[str, str]:
    """What must be the same for all engines of a run, by the name a person knows it by.

    Raises:
        ModelError: there is no model folder.
    """
    found = {"mua": mua.__version__, "seed": str(config.seed)}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    engine = config.engine.model_dump(mode="json")
    found |= {f"engine.{key}": json.dumps(value) for key, value in engine.items() if key not in _OF_ONE_MACHINE}
    model = {key: getattr(config.model, key) for key in ("dtype", "max_length", "fp32_lm_head")}
    found |= {f"model.{key}": json.dumps(value) for key, value in model.items()}
    # Tells models apart by config.json and by the names and sizes of the weight files; the folder may lie anywhere.
    folder = config.model.path
    try:
        digest = hashlib.sha256((folder / "config.json").read_bytes())
    except OSError as error:
        raise ModelError(f"{folder}: is not a model folder (config.json: {error.strerror}); check model.path") from None
    digest.update(repr(sorted((file.name, file.stat().st_size) for file in folder.glob("*.safetensors"))).encode())
    return found | {"model.path": f"model {digest.hexdigest()[:16]}"}


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Of the run's facts and a machine's, both sides of each that differs."""
    names = dict.fromkeys([*ours, *theirs])
    return [
        f"{name}: the run has {ours.get(name, 'none')}, this machine {theirs.get(name, 'none')}"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]


class Pool(Protocol):
    """What membership needs of :class:`mua.engine.pool.EnginePool`."""

    config: EngineConfig

    def admit(self, machine: Machine, servers: list[RemoteServer]) -> None:
        """Have one more engine for each of ``servers``, on ``machine``."""

    async def drain(self, engines: list[EngineHandle]) -> None:
        """No more requests for ``engines``; after ``engine.leave_seconds`` what they run is stopped, and
        goes on elsewhere where it was."""

    async def remove(self, engines: list[EngineHandle]) -> None:
        """Have these engines no more; what still runs on them is asked of others."""

    def give_up(self, message: str) -> None:
        """The run ends with this error."""

    def count_engines(self) -> int:
        """Up or not."""


class Cluster:
    """Rank 0's register of machines. Lives on the pool's loop between :meth:`start` and :meth:`stop`."""

    def __init__(self, pool: Pool, joining: Joining, api_key: str, first_number: int, first_index: int) -> None:
        """Machines are numbered from ``first_number`` on, their engines from ``first_index``."""
        self._pool, self._joining, self._key = pool, joining, api_key
        self._number, self._index = first_number, first_index
        self.file = joining.output / ADDRESS_FILE
        self._run = secrets.token_hex(8)
        self._machines: dict[str, Machine] = {}
        self._runner: web.AppRunner | None = None
        self._watch: asyncio.Task[None] | None = None
        self._last_engine = monotonic()
        self.counts = {"joined": 0, "left": 0, "lost": 0}

    # ---- life

    async def start(self) -> None:
        """Answer, and say where."""
        routes = web.RouteTableDef()

        def machine_of(request: web.Request) -> Machine:
            machine = self._machines.get(request.query.get("name", ""))
            if machine is None:
                raise web.HTTPGone
            machine.heard = monotonic()
            return machine

        @routes.post("/register")
        async def register(request: web.Request) -> web.Response:
            asked = await request.json()
            if differing := differences(self._joining.facts, asked["facts"]):
                _log.warning("engine node %s is refused: %s", asked["name"], "; ".join(differing))
                return web.json_response({"differences": differing, "output": str(self._joining.output)}, status=409)
            name, count = str(asked["name"]), int(asked["count"])
            if (before := self._machines.get(name)) is not None:
                await self.dismiss(before, "it registers anew")
            self._machines[name] = Machine(name, self._number, self._index, count)
            self._number, self._index = self._number + 1, self._index + count
            return web.json_response({"first": self._machines[name].first})

        @routes.post("/ready")
        async def ready(request: web.Request) -> web.Response:
            machine = machine_of(request)
            machine.url = (await request.json())["url"]
            config, folder = self._pool.config, self._joining.output / "logs"
            servers = [
                RemoteServer(
                    config, machine.url, self._key, index=machine.first + place, place=place, log_folder=folder,
                    where=f"engine node {machine.name}",
                )
                for place in range(machine.count)
            ]  # fmt: skip
            self.counts["joined"] += 1
            last = machine.first + machine.count - 1
            _log.info("engine node %s joins with engines %d to %d", machine.name, machine.first, last)
            self._pool.admit(machine, servers)
            return web.json_response({})

        @routes.post("/alive")
        async def alive(request: web.Request) -> web.Response:
            machine_of(request)
            return web.json_response({})

        @routes.post("/leave")
        async def leave(request: web.Request) -> web.Response:
            machine = machine_of(request)
            machine.leaving = True
            _log.warning("engine node %s leaves: %s", machine.name, (await request.json())["why"])
            await self._pool.drain(machine.engines)
            if self._machines.pop(machine.name, None) is not None:
                self.counts["left"] += 1
                await self._pool.remove(machine.engines)
                self._last_engine = monotonic()
            return web.json_response({})

        self._runner, url = await serve(routes, self._key, self._joining.address)
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        Address(url, self._key, self._run, socket.gethostname(), os.getpid(), since).write(self.file)
        self._watch = asyncio.create_task(self._watch_machines(), name="watch of the engine nodes")

    async def stop(self, *, finished: bool) -> None:
        """Tell every machine that the run has ended, ``finished`` or to be continued, and take the address back."""
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if (left := Address.read(self.file)) is not None and left.run == self._run:
            self.file.unlink(missing_ok=True)
        machines = [*self._machines.values()]
        self._machines.clear()
        why = "the run has ended" if finished else "the run ended before it was finished"
        await asyncio.gather(*(self._end(machine, why, finished=finished) for machine in machines))
        await runner.cleanup()

    def machines(self) -> list[Machine]:
        """Those that give engines now."""
        return [machine for machine in self._machines.values() if machine.engines and not machine.leaving]

    async def dismiss(self, machine: Machine, why: str) -> None:
        """Do without ``machine``, which is lost or of no use; it may register again."""
        if self._machines.pop(machine.name, None) is None:
            return
        self.counts["lost"] += 1
        _log.warning("engine node %s is given up: %s", machine.name, why)
        await self._pool.remove(machine.engines)
        self._last_engine = monotonic()
        await self._end(machine, f"rank 0 gave this machine up: {why}", finished=False)

    async def _end(self, machine: Machine, why: str, *, finished: bool) -> None:
        try:
            body = {"why": why, "finished": finished}
            await request_json(f"{machine.url}/end", self._key, body, seconds=_END_SECONDS)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            _log.warning("engine node %s was not told that %s: %s", machine.name, why, one_line(error))

    async def _watch_machines(self) -> None:
        """Give up machines that are silent, and the run when none has come for too long."""
        seconds = self._pool.config.start_seconds
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            now = monotonic()
            for machine in [*self._machines.values()]:
                patience = PATIENCE_SECONDS + (self._pool.config.leave_seconds if machine.leaving else 0.0)
                if now - machine.heard > patience:
                    await self.dismiss(machine, f"no sign of life for {patience:g} s")
            if self._pool.count_engines():
                self._last_engine = now
            elif now - self._last_engine > seconds:
                self._pool.give_up(
                    f"no engine is left, and no machine has brought one within engine.start_seconds = {seconds:g}: "
                    f"start mua engines with this run's configuration on an engine node (they find {self.file})"
                )
                return


@dataclass(frozen=True, slots=True)
class Joining:
    """How other machines may join a run."""

    address: str
    """Of this machine, as they see it."""
    output: Path
    facts: Mapping[str, str] = field(repr=False)
    nodes: int = 0
    """So many are waited for at the start."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """What rank 0 needs to use the engines of all machines."""

    api_key: str = field(repr=False)
    urls: tuple[str, ...] = ()
    """Of the trainer's machines 1, 2, ...: where the engines of each are looked after."""
    own: bool = True
    """Whether rank 0's machine has engines too."""
    first_gpu: int = 0
    """The first GPU there that is an engine's."""
    joining: Joining | None = None
    """How machines without a trainer join; None: they cannot."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines of a run. Machine 0 is rank 0's."""

    own: int
    """This rank's machine."""
    leaders: tuple[int, ...]
    """Of each machine, the rank that looks after its engines: the one with local rank 0."""
    ranks: tuple[tuple[int, ...], ...] = ((0,),)
    """Of each machine its ranks in order of their local rank, which is the number of their GPU."""

    @property
    def several(self) -> bool:
        return len(self.leaders) > 1


def find_nodes(group: dist.ProcessGroup | None) -> Nodes:
    """Ask all ranks of ``group`` (all of the run; None for a single process). Collective.

    Reads what torchrun sets: LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK (or the rank divided by the local size).
    Raises :class:`ConfigError` when a machine has no local rank 0.
    """
    if group is None:
        return Nodes(0, (0,))
    import torch.distributed as dist

    from mua.utils.collective import gathered

    rank = dist.get_rank()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    mine = (int(os.environ.get("GROUP_RANK", rank // local_size)), int(os.environ.get("LOCAL_RANK", rank)))
    found = gathered(mine, group)
    numbers = list(dict.fromkeys(node for node, _ in found))
    leaders = {node: rank for rank, (node, local) in enumerate(found) if local == 0}
    if missing := [node for node in numbers if node not in leaders]:
        raise ConfigError(f"machine {missing[0]} of the run has no process with LOCAL_RANK 0; check the launcher")
    local = {node: sorted((local, rank) for rank, (of, local) in enumerate(found) if of == node) for node in numbers}
    ranks = tuple(tuple(rank for _, rank in local[node]) for node in numbers)
    return Nodes(numbers.index(mine[0]), tuple(leaders[node] for node in numbers), ranks)


def local_ranks() -> int:
    """Trainer ranks of this machine, each with the GPU of its number."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def visible_gpus() -> int:
    """CUDA devices that this process sees."""
    import torch

    return torch.cuda.device_count() if has_cuda() else 0


def trains_beside_engines(config: ExperimentConfig) -> bool:
    """Whether the trainer's machines have engines too."""
    return config.placement == "colocated" or not config.engine.nodes


def first_engine_gpu(config: ExperimentConfig, ranks: int) -> int:
    """The first GPU of a trainer's machine with ``ranks`` ranks that is an engine's."""
    return 0 if config.placement == "colocated" else ranks


def check_trainer_machine(config: ExperimentConfig, ranks: int, gpus: int) -> None:
    """Raises :class:`ConfigError` when a trainer's machine with ``gpus`` CUDA devices lacks some for its engines, or
    when trainer ranks and engine ranks of one NCCL group would share a GPU. Without CUDA everything is possible."""
    if not gpus:
        return
    engine = config.engine
    if config.placement == "colocated" and engine.transport == "broadcast":
        raise ConfigError(
            "engine.transport: broadcast with placement colocated makes a trainer rank and an engine rank of one GPU "
            "members of one NCCL group, which NCCL refuses; set it to colocated, or placement to separate"
        )
    wanted = engine.count * engine.tensor_parallel
    if config.placement == "separate" and trains_beside_engines(config) and ranks + wanted > gpus:
        left = max(0, gpus - ranks)
        raise ConfigError(
            f"placement separate: {ranks} trainer ranks and engine.count {engine.count} x engine.tensor_parallel "
            f"{engine.tensor_parallel} need {ranks + wanted} GPUs, and this machine ({socket.gethostname()}) shows "
            f"{gpus}: {left} are left for engines; lower engine.count to {left // engine.tensor_parallel} or the "
            "layout's ranks, or give engines nodes of their own (engine.nodes)"
        )


def engine_problem(engine: EngineConfig, gpus: int, where: str) -> str | None:
    """Why ``gpus`` GPUs, of one machine, cannot be filled with its engines, and the fix; None if they can."""
    count, tp = engine.count, engine.tensor_parallel
    if gpus % tp:
        fits = ", ".join(str(size) for size in range(1, gpus + 1) if gpus % size == 0)
        return f"engine.tensor_parallel {tp} does not divide the {gpus} GPUs of {where}; possible: {fits}"
    if count * tp > gpus:
        needed = f"engine.count {count} x engine.tensor_parallel {tp} needs {count * tp} GPUs"
        return f"{needed}, and {where} has {gpus}; set engine.count to {gpus // tp} at most"
    return None


def check_engine_machine(config: ExperimentConfig, gpus: int) -> None:
    """Raises :class:`ConfigError` when an engine node of ``gpus`` CUDA devices cannot be filled with engines."""
    if gpus and (problem := engine_problem(config.engine, gpus, f"this machine ({socket.gethostname()})")):
        raise ConfigError(problem)


def trainer_address(engine: EngineConfig) -> str:
    """Address by which engine nodes reach the trainer's first node; see ``engine.address``."""
    if engine.address is not None:
        return engine.address
    given = os.environ.get("MASTER_ADDR", LOOPBACK)
    if engine.nodes and given in (LOOPBACK, "localhost"):
        return socket.gethostbyname(socket.gethostname())
    return given


def address_towards(host: str, port: int) -> str:
    """Address of this machine by which ``host`` sees it; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port or 1))
        return str(probe.getsockname()[0])
