"""``mua sample``: a process that rolls out episodes of a run, on any machine that reaches its store and its router.

store ──► a run that goes on ──► its configuration, its engines' router ──► LeasingSampler
  ▲                                                                             │ the trainer is started again,
  └──────────── wait, at most --wait seconds ◄──────────────────────────────────┘ or has ended
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import yaml
from pydantic import SecretStr

from mua.config.load import dump_config, load_config
from mua.config.schema import ExperimentConfig
from mua.config.section import Section
from mua.engine.router_client import RouterClient, RouterLost
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Task
from mua.environment.selection import Selection
from mua.rollout.leasing import LeasingSampler
from mua.rollout.runner import EpisodeRunner
from mua.rollout.sampler_code import check_code, check_contract, made_with
from mua.store.database import Store
from mua.store.faults import NoStore, StoreError, StoreUnreachable
from mua.store.starts import RunningPart, find_part, state_of_run
from mua.tokens.chat_family import load_family_of
from mua.tokens.codec import tokenizer_digest
from mua.types import Json
from mua.utils.errors import ConfigError, Preempted
from mua.utils.hooks import check_hooks
from mua.utils.masking import mask_credentials

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


def sample(
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
    with _opened(url, leave, wait_seconds) as store:
        asyncio.run(_sample(store, leave, run, config, overrides, wait_seconds))


def _opened(url: str, leave: Callable[[], bool], wait_seconds: float) -> Store:
    """The store, which the trainer may be about to make."""
    began, told = monotonic(), False
    while True:
        try:
            return Store.open(url, create=False, migrate=False)
        except (NoStore, StoreUnreachable) as error:
            if monotonic() - began > wait_seconds:
                raise
            if not told:
                log.warning("%s; waiting up to %.0f s for a run that makes it", error, wait_seconds)
                told = True
        if leave():
            raise Preempted("asked to leave by a signal before there was anything to do")
        sleep(_LOOK_SECONDS)


async def _sample(
    store: Store, leave: Callable[[], bool], run: str | None, config: Path | None, overrides: Sequence[str],
    wait_seconds: float,
) -> None:  # fmt: skip
    while (part := await _found(store, run, leave, wait_seconds)) is not None:
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


async def _found(store: Store, run: str | None, leave: Callable[[], bool], wait_seconds: float) -> RunningPart | None:
    """The start of a run to work for; None when the run is done."""
    began, told = monotonic(), False

    def look() -> tuple[RunningPart | None, str]:
        with store.read() as connection:
            return find_part(connection, run), "" if run is None else state_of_run(connection, run)

    while True:
        try:
            part, state = await asyncio.to_thread(look)
        except StoreError as error:
            if not error.passing or monotonic() - began > wait_seconds:
                raise
            part, state = None, str(error)
        if part is not None or state == "done":
            return part
        if leave():
            raise Preempted("asked to leave by a signal before there was anything to do")
        if monotonic() - began > wait_seconds:
            what = f"run {run} is {state}" if run else "no run that takes samplers goes on"
            raise StoreError(
                f"store {store.name}: {what}, and nothing has changed for {wait_seconds:g} s (--wait); start mua train "
                "with samplers.enabled: true and this store",
                passing=True,
            )
        if not told:
            log.info("waiting for a run at store %s", store.name)
            told = True
        await asyncio.sleep(_LOOK_SECONDS)


async def _serve(store: Store, config: ExperimentConfig, part: RunningPart, leave: Callable[[], bool]) -> str:
    """Sample for one start of the run; why it is over, or nothing when it was asked to leave."""
    services = Services.from_config(config.user, config.judge)
    selection = Selection.from_config(config.environment, services)
    family = load_family_of(config.model)
    silence = config.samplers.lease_seconds
    async with RouterClient(part.url, part.key, "", silence) as engines:
        runner = EpisodeRunner(config, selection, family, engines, services, pauses=engines.pauses)
        await runner.start()
        try:
            sampler = LeasingSampler(
                config,
                store,
                runner,
                tasks_of(selection),
                engines,
                run=part.run_id,
                part=part.part,
                kind="sampler",
            )
            engines.name = sampler.name
            watching = asyncio.create_task(_until_over(store, part, silence), name="watch of the run")
            try:
                return await sampler.work(partial(_over, watching, engines), leave)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
        finally:
            await runner.close()
            await services.close()


def _over(watching: asyncio.Task[str], engines: RouterClient) -> str | None:
    """Why there is nothing more to do, if so."""
    if watching.done():
        return watching.result()
    return ROUTER_GONE if engines.lost else None


async def _until_silent(store: Store, part: RunningPart, silence: float) -> None:
    """The trainer whose router is gone is silent in the store, too, before long, or answers again: it was busy. Raises
    :class:`RouterLost` where it does neither: this sampler alone does not reach it."""
    over = asyncio.create_task(_until_over(store, part, silence), name="watch of the run")
    try:
        async with RouterClient(part.url, part.key, "", silence) as engines, asyncio.timeout(_BUSY * silence):
            while not over.done() and not await engines.answers():
                await asyncio.sleep(_LOOK_SECONDS)
            if over.done():
                over.result()
    except TimeoutError:
        raise RouterLost(
            f"run {part.run_id} goes on, but its engines' router at {part.url} does not answer this machine; set "
            "samplers.address of the run to an address of the trainer's machine that this one reaches"
        ) from None
    finally:
        over.cancel()
        await asyncio.gather(over, return_exceptions=True)


async def _until_over(store: Store, part: RunningPart, silence: float) -> str:
    """Wait until that start of the run is over."""

    def look() -> RunningPart | None:
        with store.read() as connection:
            return find_part(connection, part.run_id, silence)

    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        try:
            found = await asyncio.to_thread(look)
        except StoreError as error:
            if not error.passing:
                raise
            continue  # the sampler's own requests wait for it
        if found is None or found.part != part.part:
            return f"start {part.part} of run {part.run_id} is over"


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
    sides = [dict(_flat(config, ())) for config in (of_run, ours)]
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        free = any(key == own or key.startswith(f"{own}.") for own in OF_THE_TRAINER)
        if sides[0].get(key) != sides[1].get(key) and (not free or key in OF_EPISODES):
            yield key


def _flat(value: Any, key: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _flat(item, (*key, str(name)))
    else:
        yield ".".join(key), value


def secrets_of(config: ExperimentConfig) -> list[str]:
    """Keys of the configuration that hold a secret, but for the store's URL, which samplers are given."""
    return [key for key in _secrets(config, ()) if key != "store.url"]


def _secrets(value: Any, key: tuple[str, ...]) -> Iterator[str]:
    if isinstance(value, SecretStr):
        if value.get_secret_value() not in ("", "none"):
            yield ".".join(key)
    elif isinstance(value, str):
        if mask_credentials(value) != value:
            yield ".".join(key)
    elif isinstance(value, Section):
        for name in type(value).model_fields:
            yield from _secrets(getattr(value, name), (*key, name))
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _secrets(item, (*key, str(name)))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _secrets(item, (*key, str(place)))
