"""Elastic rollout workers: they lease episodes from the store as the engines have room, play them, write the results.

    room at the engines ──► claim ──► EpisodeRunner.trajectory ──► result, if the lease is still held
                              ▲             │ every heartbeat
                              └─ others  ◄──┴── renewed, or lost: the episode is given up

The trainer's process and ``mua sample`` run the same :class:`RolloutWorker`; they differ in how they reach the engines.
``mua sample`` finds a run of the store, serves it until it is over, and waits for its next start::

    store ──► a run that goes on ──► its configuration, its engines' router ──► RolloutWorker
      ▲                                                                             │ the trainer is started again,
      └──────────── wait, at most --wait seconds ◄──────────────────────────────────┘ or has ended

The trainer writes :func:`made_with` beside its router's address at each start; a worker compares it with its own before
it leases anything. The package's version and ``CONTRACT`` of the router must agree. What a commit, a changed
file or another library may change of an episode is refused or only logged, as ``samplers.other_code`` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import entry_points
from pathlib import Path
from time import monotonic
from typing import Any, Literal, TypeVar
from uuid import uuid4

import yaml
from sqlalchemy.engine import Connection

import mua
from mua.config.load import dump_config, load_config
from mua.config.schema import ExperimentConfig
from mua.engine.router_client import CONTRACT, OwnRoom, RouterClient, RouterLost
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Task
from mua.environment.registry import ENTRY_POINT_GROUP
from mua.environment.selection import Selection
from mua.rollout.runner import EpisodeRunner
from mua.store.database import Store
from mua.store.faults import NoStore, StoreError
from mua.store.leases import EpisodeLease, LeasedRecorder, claim, give_back, renew, tell_sampler
from mua.store.starts import RunningPart, find_part, state_of_run
from mua.store.writer import Writer
from mua.tokens.chat_family import load_family_of
from mua.tokens.codec import tokenizer_digest
from mua.types import Json
from mua.utils.errors import ConfigError, MuaError, Preempted
from mua.utils.hooks import check_hooks, hook_sources
from mua.utils.masking import flatten, hidden_texts, masked_tree
from mua.utils.source_state import ROOT, code_digest, git_state, installed_version

Found = TypeVar("Found")
log = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0
_BUSY = 4.0
"""For so many ``samplers.lease_seconds`` a router may be silent whose trainer gives signs of life in the store."""
ROUTER_GONE = "the engines' router is gone"
OF_THE_TRAINER = (
    "name", "output", "placement", "store", "samplers", "engine", "megatron", "optimizer", "critic", "cluster",
    "trainer", "sft", "evaluation", "observe", "slurm", "algorithm", "offline", "model.path", "rollout.concurrency",
    "environment.workers", "environment.isolation", "environment.max_instances", "environment.data",
)  # fmt: skip
"""Keys that a sampler may have otherwise than the run: they change nothing of an episode."""
OF_EPISODES = ("trainer.deterministic", "engine.deterministic", "engine.routed_experts")
"""Those below them that do."""


async def sample(
    url: str,
    leave: Callable[[], bool],
    *,
    run: str | None = None,
    config: Path | None = None,
    overrides: Sequence[str] = (),
    wait_seconds: float = 1800.0,
) -> None:
    """Roll out episodes of ``run`` (None: the newest that goes on) of the store at ``url`` until it has ended.

    Args:
        url: a store as :meth:`mua.store.database.Store.open` takes it.
        leave: whether the process was asked to leave.
        run: its id.
        config: the run's configuration, where it has secrets, which no store keeps; None: as the store has it.
        overrides: of keys that may differ, such as ``model.path`` and ``rollout.concurrency``.
        wait_seconds: how long to wait for a run, and for one whose trainer is gone to be started again.

    Raises:
        ConfigError: the configuration is not the run's, or lacks its secrets.
        StoreError: there is no store, or nothing goes on there.
        Preempted: ``leave`` was true; what was under way has ended or is others'.
    """

    async def wait_for(look: Callable[[], Found]) -> Found:
        """What ``look`` gives; faults that may pass by themselves are waited out."""
        began, told = monotonic(), False
        while True:
            try:
                return await asyncio.to_thread(look)
            except StoreError as error:
                if not (error.passing or isinstance(error, NoStore)) or monotonic() - began > wait_seconds:
                    raise
                if not told:
                    log.warning("%s; waiting up to %.0f s", error, wait_seconds)
                told = True
            if leave():
                raise Preempted("asked to leave by a signal before there was anything to do")
            await asyncio.sleep(_LOOK_SECONDS)

    def find() -> RunningPart | None:
        """The start of a run to work for; None when the run is done."""
        with store.read() as connection:
            part, state = find_part(connection, run), "" if run is None else state_of_run(connection, run)
        if part is None and state != "done":
            raise StoreError(
                f"store {store.name}: {f'run {run} is {state}' if run else 'no run that takes samplers goes on'}; "
                "start mua train with samplers.enabled: true and this store",
                passing=True,
            )
        return part

    with await wait_for(lambda: Store.open(url, create=False, migrate=False)) as store:
        while (part := await wait_for(find)) is not None:
            run = part.run_id
            loaded = configuration_of(part, config, overrides)
            log.info("sampling for run %s, start %d, through %s", part.run_id, part.part, part.url)
            why = await _serve(store, loaded, part, leave)
            if not why:
                raise Preempted("asked to leave by a signal; its episodes have ended or are others' now")
            log.info("%s", why)
            if why == ROUTER_GONE:
                await _until_silent(store, part, loaded.samplers.lease_seconds)
        log.info("run %s has ended", run)


async def _serve(store: Store, config: ExperimentConfig, part: RunningPart, leave: Callable[[], bool]) -> str:
    """Sample for one start of the run; why it is over, or nothing when it was asked to leave."""
    services = Services.from_config(config.user, config.judge)
    selection = Selection.from_config(config.environment, services)
    silence = config.samplers.lease_seconds
    async with RouterClient(part.url, part.key, "", silence) as engines, watch_run(store, part, silence) as over:
        runner = EpisodeRunner(
            config, selection, load_family_of(config.model), engines, services, pauses=engines.pauses
        )
        await runner.start()
        try:
            sampler = RolloutWorker(
                config, store, runner, tasks_of(selection), engines, run=part.run_id, part=part.part, kind="sampler"
            )
            engines.name = sampler.name
            return await sampler.work(
                lambda: over.result() if over.done() else ROUTER_GONE if engines.lost else None, leave
            )
        finally:
            await runner.close()
            await services.close()


async def _until_silent(store: Store, part: RunningPart, silence: float) -> None:
    """The trainer whose router is gone is silent in the store, too, before long, or answers again: it was busy. Raises
    :class:`RouterLost` where it does neither: this sampler alone does not reach it."""
    try:
        async with (
            watch_run(store, part, silence) as over,
            RouterClient(part.url, part.key, "", silence) as engines,
            asyncio.timeout(_BUSY * silence),
        ):
            while not over.done() and not await engines.answers():
                await asyncio.sleep(_LOOK_SECONDS)
            if over.done():
                over.result()
    except TimeoutError:
        raise RouterLost(
            f"run {part.run_id} goes on, but its engines' router at {part.url} does not answer this machine; set "
            "samplers.address of the run to an address of the trainer's machine that this one reaches"
        ) from None


@asynccontextmanager
async def watch_run(store: Store, part: RunningPart, silence: float) -> AsyncIterator[asyncio.Task[str]]:
    """A block with a task that ends when this start of the run is over, and says so."""

    def goes_on() -> bool:
        try:
            with store.read() as connection:
                found = find_part(connection, part.run_id, silence)
        except StoreError as error:
            if not error.passing:
                raise
            return True  # the sampler's own requests wait for it
        return found is not None and found.part == part.part

    async def watch() -> str:
        while await asyncio.to_thread(goes_on):
            await asyncio.sleep(_LOOK_SECONDS)
        return f"start {part.part} of run {part.run_id} is over"

    watching = asyncio.create_task(watch(), name="watch of the run")
    try:
        yield watching
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def tasks_of(selection: Selection) -> dict[tuple[str, str], Task]:
    """The tasks that training draws from, by domain and id."""
    return {(task.domain, task.id): task for _, tasks in selection.shared_tasks("train") for task in tasks}


# ---- the configuration


def configuration_of(part: RunningPart, file: Path | None, overrides: Sequence[str]) -> ExperimentConfig:
    """The run's configuration: that of the store, or of ``file``, which must agree with it. Raises
    :class:`ConfigError`, also where the trainer's code and ours do not go together."""
    check_contract(part.run_id, part.made)  # another version may have written keys that this one cannot read
    if file is None and part.secrets:
        raise ConfigError(
            f"run {part.run_id} has secrets that no store keeps ({', '.join(part.secrets[:4])}); give its "
            "configuration: mua sample URL --config CONFIG.yaml"
        )
    with tempfile.TemporaryDirectory(prefix="mua-sample-") as folder:
        stored = Path(folder) / "run.yaml"
        stored.write_text(yaml.safe_dump(part.config, sort_keys=False, allow_unicode=True), encoding="utf-8")
        of_run = load_config(stored)
        loaded = load_config(file or stored, overrides)
    sides = [yaml.safe_load(dump_config(config)) for config in (of_run, loaded)]
    different = list(episode_differences(*sides))
    if different:
        raise ConfigError(
            f"{file or 'the command line'}: {different[0]}: the run has another value; samplers roll out what the "
            f"run does{'' if len(different) == 1 else ' (also: ' + ', '.join(different[1:5]) + ')'}"
        )
    check_hooks(loaded, of_episodes=True)
    check_code(part.run_id, part.made, made_with(loaded), loaded.samplers.other_code)
    ours, theirs = tokenizer_digest(loaded.model.path), part.provenance.get("tokenizer")
    if theirs is not None and ours != theirs:
        raise ConfigError(
            f"model.path {loaded.model.path}: its tokenizer or chat template is not the run's; name a copy of the "
            f"run's model folder, {of_run.model.path}"
        )
    return loaded


def episode_differences(of_run: Json, ours: Json) -> Iterator[str]:
    """Keys that decide what an episode is and are not the same in two configurations as ``dump_config`` writes them."""
    sides = [dict(flatten(config)) for config in (of_run, ours)]
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        free = any(key == own or key.startswith(f"{own}.") for own in OF_THE_TRAINER)
        if sides[0].get(key) != sides[1].get(key) and (not free or key in OF_EPISODES):
            yield key


def secrets_of(config: ExperimentConfig) -> list[str]:
    """Keys of the configuration that hold a secret, but for the store's URL, which samplers are given."""
    hidden = hidden_texts(masked_tree(config.model_dump(mode="json")), config.model_dump())
    return [key for key, _ in hidden if key != "store.url"]


LATELY_SECONDS = 5.0
"""How long who has found something looks for more of it the more often."""
_WRITE_SECONDS = 0.02
"""Results are gathered so long: the trainer may wait for the last of a group."""


class RolloutWorker:
    """One sampler at one start of a run. Belongs to one event loop."""

    def __init__(
        self,
        config: ExperimentConfig,
        store: Store,
        runner: EpisodeRunner,
        tasks: Mapping[tuple[str, str], Task],
        engines: RouterClient | OwnRoom,
        *,
        run: str,
        part: int,
        kind: str,
    ) -> None:
        """``tasks`` are training's by domain and id; ``engines`` say how many episodes they can take over all samplers,
        and how many of these this one may start now."""
        self._config, self._store, self._runner, self._tasks, self._engines = config, store, runner, tasks, engines
        self._run_id, self._part = run, part
        self.name = f"{kind}-{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"
        self._began = time.time()
        self._playing: dict[asyncio.Task[None], EpisodeLease] = {}
        self._failure: BaseException | None = None
        chosen = config.store.model_copy(update={"write_seconds": _WRITE_SECONDS})
        writer = Writer.of(store, chosen, self.name)
        self.recorder = LeasedRecorder(writer, run, part, self.name)

    async def work(self, ended: Callable[[], str | None], leaving: Callable[[], bool] = lambda: False) -> str:
        """Lease episodes and play them until ``ended`` says why there is nothing more to do; it is given back.

        When ``leaving`` is true nothing more is leased, and the reason is an empty text once what is under way has
        ended, or ``samplers.leave_seconds`` are over; the rest is given back to others. Raises
        :class:`MuaError` when the store stays away.
        """
        beat = asyncio.create_task(self._heartbeats(), name=f"heartbeats of {self.name}")
        chosen, leave_by, found_at = self._config.samplers, None, monotonic()
        try:
            while (why := ended()) is None:
                if beat.done():
                    beat.result()
                if self._failure is not None:
                    raise self._failure
                if leaving():
                    leave_by = leave_by or monotonic() + chosen.leave_seconds
                    if not self._playing or monotonic() > leave_by:
                        return ""
                elif (free := self._config.rollout.concurrency - len(self._playing)) > 0:
                    wanted = min(free, await self._engines.room())
                    if wanted > 0 and (started := await self._start(wanted)):
                        found_at = monotonic()
                        await self._engines.started(started)
                pause = chosen.poll_seconds / (4 if monotonic() - found_at < LATELY_SECONDS else 1)
                if self._playing:
                    await asyncio.wait(self._playing, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.sleep(pause)
            return why
        finally:
            beat.cancel()
            await asyncio.gather(beat, return_exceptions=True)
            await self._give_up(list(self._playing))
            with contextlib.suppress(MuaError):  # leases run out by themselves
                await asyncio.to_thread(self._leave)

    async def _start(self, count: int) -> int:
        """Lease up to ``count`` episodes and begin to play them; how many there were."""
        tries, seconds = self._config.rollout.max_retries + 1, self._config.samplers.lease_seconds
        found: list[EpisodeLease] = await self._patiently(
            lambda connection: claim(connection, self._run_id, self._part, self.name, count, seconds, tries)
        )
        self.recorder.took(found)
        for lease in found:
            task = asyncio.create_task(self._play(lease), name=f"episode {lease.ordinal}/{lease.sample}")
            self._playing[task] = lease
            task.add_done_callback(self._ended)
        return len(found)

    async def _play(self, lease: EpisodeLease) -> None:
        task = self._tasks.get((lease.domain, lease.task_id))
        if task is None:
            raise MuaError(
                f"the run has a task {lease.task_id!r} of {lease.domain}, which this sampler does not know: its "
                "section environment, or the data it names, is another one; give the run's own"
            )
        temperature = self._config.rollout.temperature
        await self._runner.trajectory(
            task, lease.ordinal, lease.sample, temperature=temperature, recorder=self.recorder
        )

    def _ended(self, task: asyncio.Task[None]) -> None:
        lease = self._playing.pop(task)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            self.recorder.lost(lease)
        self._failure = self._failure or error

    async def _heartbeats(self) -> None:
        """Renew the leases; give up the episodes of those that are lost."""

        def renewed(connection: Connection) -> set[str]:
            tell_sampler(connection, self._row("running"))
            return renew(connection, held, self._config.samplers.lease_seconds)

        while True:
            held = self.recorder.held()
            lost = {lease.token for lease in held} - await self._patiently(renewed)
            gone = [task for task, lease in self._playing.items() if lease.token in lost]
            if gone:
                log.info("%d episodes are no longer ours: their groups were cancelled, or others have them", len(gone))
            await self._give_up(gone)
            for lease in held:
                if lease.token in lost:
                    self.recorder.lost(lease)
            await asyncio.sleep(self._config.samplers.heartbeat_seconds)

    def _row(self, state: str) -> Json:
        return {
            "id": self.name, "run_id": self._run_id, "host": socket.gethostname(), "pid": os.getpid(), "state": state,
            "running": len(self._playing), "started_at": self._began,
            "details": {"part": self._part, "delivered": self.recorder.delivered, "refused": self.recorder.refused},
        }  # fmt: skip

    async def _give_up(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _leave(self) -> None:
        """In a thread: everything is written, and what was not ended is others' at once."""

        def free(connection: Connection) -> None:
            give_back(connection, self.recorder.held())
            tell_sampler(connection, self._row("left"))

        self.recorder.writer.close()
        self._store.patiently(free, self._config.store.flush_seconds)

    async def _patiently(self, function: Callable[[Connection], Any]) -> Any:
        return await asyncio.to_thread(self._store.patiently, function, self._config.store.outage_seconds)


_PACKAGES = ("transformers", "tokenizers", "jinja2", "jsonschema-rs", "rapidfuzz", "sympy", "math-verify", "bm25s")
"""Packages whose other versions may give other tokens, observations or scores."""


def made_with(config: ExperimentConfig) -> Json:
    """What this process would roll out episodes of ``config`` with: ``mua``, ``contract``, ``code`` (a digest),
    ``commit`` (for people; None outside a repository), versions of ``packages``, and digests of ``hooks`` by path."""
    git, domains = git_state(ROOT), set(config.environment.shares)
    # Other projects' packages that bring these domains.
    bring = [point.dist for point in entry_points(group=ENTRY_POINT_GROUP) if point.name in domains]
    packages = {name: installed_version(name) for name in _PACKAGES}
    packages |= {dist.name: dist.version for dist in bring if dist is not None}
    return {
        "mua": mua.__version__,
        "contract": CONTRACT,
        "code": code_digest(),
        "commit": git and git["commit"][:12] + (" with changed files" if git["dirty"] else ""),
        "packages": packages,
        "hooks": {path: hook["sha256"] for path, hook in hook_sources(config, of_episodes=True).items()},
    }


def check_contract(run: str, theirs: Json) -> None:
    """Raise :class:`ConfigError` where the trainer, which said ``theirs``, is of another version or contract."""
    ours = {"mua": mua.__version__, "contract": CONTRACT}
    if any(theirs.get(key) != ours[key] for key in ours):
        sides = [f"mua {side.get('mua')} (sampler contract {side.get('contract')})" for side in (theirs, ours)]
        raise ConfigError(
            f"run {run}: its trainer is {sides[0]}, this sampler {sides[1]}; install the trainer's mua here, or start "
            "the trainer again with this one"
        )


def check_code(run: str, theirs: Json, ours: Json, other_code: Literal["refuse", "warn"]) -> None:
    """Compare the code of both sides. Raises :class:`ConfigError` where it differs and ``other_code`` is refuse."""
    different = []
    if theirs.get("code") != ours["code"]:
        sides = [f"{side.get('code')} (commit {side.get('commit')})" for side in (theirs, ours)]
        different.append(f"sources of mua and its environments: the trainer's {sides[0]}, here {sides[1]}")
    things: tuple[dict[str, Any], dict[str, Any]] = (
        (theirs.get("packages") or {}) | (theirs.get("hooks") or {}),
        ours["packages"] | ours["hooks"],
    )
    for name in dict.fromkeys([*things[0], *things[1]]):
        if things[0].get(name) != things[1].get(name):
            different.append(f"{name}: the trainer's {things[0].get(name)}, here {things[1].get(name)}")
    if not different:
        return
    told = f"run {run}: this sampler would roll out with other code than its trainer: {'; '.join(different)}"
    if other_code == "refuse":
        raise ConfigError(
            f"{told}; bring both to the same, or set samplers.other_code=warn where that changes nothing of episodes"
        )
    log.warning("%s (samplers.other_code: warn)", told)
