"""Several SGLang servers behind one sampler: affinity, back-pressure, health, restarts and weight updates.

Who waits for whom (everything lives on one asyncio loop):

    generate ──► gate ──► an engine in rotation ──► a slot of it ──► HTTP /generate
                  ▲             ▲                                        │ died? -> EngineError, probe now
      update ─────┘             │                                        ▼
      (closes it)      watch (one per engine): probe, kill, restart ──► awaiting weights ──► update ──► rotation
         │                                                ▲
         └── an engine failed it: killed ─────────────────┘   none is left? wait for a restart, update again

Engines of engine nodes come and go (mua/engine/cluster.py): :meth:`EnginePool.admit` starts one as if it were
restarted, :meth:`EnginePool.drain` and :meth:`EnginePool.remove` take it out. A request whose engine leaves goes on on
another from what it had; one whose engine died is asked of another, or of the restarted one.

A restarted engine holds the weights of the model folder. Unless no update was ever made, it stays out of
rotation until :meth:`EnginePool.update_weights` has reached it; ``awaiting_weights`` is set meanwhile.

While memory is released the trainer uses it. Engines are asked for nothing that touches it, requests that were running
stay paused, and one that died is restarted only when the memory was resumed, or when somebody who has made room waits
for it (:meth:`EnginePool.until_up`). One that was starting when memory is to be released is awaited, for it takes all.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import uuid
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from mua.config.schema import EngineConfig
from mua.engine import Deadline, Pauses, SamplingParams, TurnCut
from mua.engine.cluster import Cluster, Hosts
from mua.engine.engine_handle import EngineGone, EngineHandle, EngineLoad, EngineState, Machine, Server, Targets
from mua.engine.server import RemoteServer, engine_server
from mua.engine.weight_transfer import SyncReport, WeightGroups, WeightTransfer, all_or_first_error, find_differences
from mua.observe.timeline import EngineActivity, engine_metrics
from mua.types import Generation, Json
from mua.utils.errors import DeadlineExceeded, EngineError

if TYPE_CHECKING:
    from mua.engine.weight_transfer import WeightSource

_log = logging.getLogger(__name__)
_MAX_SESSIONS = 65536
_FAILED_PROBES = 3
_RELEASE, _RESUME = "/release_memory_occupation", "/resume_memory_occupation"
_SUSPICIOUS_SECONDS = 1.0
"""Between a probe that failed and the next."""
_ENGINES_PER_REQUEST = 4
"""Engines that one request may see die where they come and go; what kills more is the request."""
_OWN_ENGINES_PER_REQUEST = 2
"""The same where engines are restarted: of the second the episode learns, which counts its attempts."""
_DRAIN_SECONDS = 0.1
_CUT_SECONDS = 5.0
"""How long an engine has to say what it had sampled of a request that was aborted at its deadline, or when the engine
leaves."""
_START_MARGIN_SECONDS = 60.0
"""What a start may take beyond its own deadlines: the watch, and the host of another machine."""


def remaining_request(
    prompt_ids: Sequence[int], params: SamplingParams, sampled: Generation | None
) -> tuple[list[int], SamplingParams]:
    """What an engine is asked for the rest of a turn of which ``sampled`` is there: prompt and parameters.

    SGLang draws a token from (``sampling_seed``, position in the sequence), its ``multinomial_with_seed``, so that with
    a seed the rest is the one that the first engine would have sampled.
    """
    if sampled is None or not len(sampled.ids):
        return list(prompt_ids), params
    prompt = [*prompt_ids, *sampled.ids.tolist()]
    # Experts from the last sampled token on: it was not routed yet.
    known = None if params.experts_from is None else len(prompt) - 1
    return prompt, replace(params, max_new_tokens=params.max_new_tokens - len(sampled.ids), experts_from=known)


def join_generations(before: Generation | None, piece: Generation) -> Generation:
    """One turn of two pieces, each with its log-probabilities and the versions that sampled it."""
    if before is None or not len(before.ids):  # a piece without a token has no experts to go on from
        return piece
    waited = before.waited + piece.waited
    if not len(piece.ids):
        return replace(before, finish=piece.finish, waited=waited)
    experts = None
    if before.experts is not None and piece.experts is not None:
        experts = np.concatenate([before.experts, piece.experts])  # of two types the wider holds both
    return Generation(
        ids=np.concatenate([before.ids, piece.ids]),
        logprobs=np.concatenate([before.logprobs, piece.logprobs]),
        finish=piece.finish,
        version=piece.version,
        versions=np.concatenate([before.versions, piece.versions]),
        cached_tokens=before.cached_tokens,
        experts=experts,
        waited=waited,
        engine=before.engine if piece.engine in before.engine.split(", ") else f"{before.engine}, {piece.engine}",
    )


class EnginePool:
    """``config.count`` servers on every machine; implements :class:`mua.engine.Sampler`.

    ``dtype`` is used where ``config.dtype`` is None. Logs go to ``log_folder/engine-<i>.log``. ``hosts`` tells where
    engines are; by default all are here, from the first GPU on. Every method must be called on the loop that ran
    :meth:`start`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        dtype: str,
        context_length: int,
        seed: int,
        log_folder: Path,
        hosts: Hosts | None = None,
        fp32_lm_head: bool = False,
    ) -> None:
        self.config = config
        self.awaiting_weights = threading.Event()
        """Set while at least one restarted engine waits for :meth:`update_weights`."""
        make = partial(
            engine_server, config, dtype=dtype, context_length=context_length, seed=seed, log_folder=log_folder,
            api_key=None if hosts is None else hosts.api_key, fp32_lm_head=fp32_lm_head,
        )  # fmt: skip
        hosts = hosts or Hosts("")
        own = range(config.count if hosts.own else 0)
        servers: list[tuple[Server, int]] = [(make(index=place, first_gpu=hosts.first_gpu), 0) for place in own]
        for (node, url), place in itertools.product(enumerate(hosts.urls, start=1), range(config.count)):
            remote = RemoteServer(
                config, url, hosts.api_key, index=node * config.count + place, place=place, log_folder=log_folder,
                where=f"machine {node}",
            )  # fmt: skip
            servers.append((remote, node))
        self._engines = [
            EngineHandle(server, config.max_running_requests, node, place=number % config.count)
            for number, (server, node) in enumerate(servers)
        ]
        self._weight_groups = WeightGroups(config.tensor_parallel) if config.transport == "broadcast" else None
        self._model_path = Path()
        self.version = 0
        """Policy version of the last complete update; 0 is the model folder."""
        self._sessions: OrderedDict[str, EngineHandle] = OrderedDict()
        self._updating = False
        self._released: set[str] = set()
        """Tags of the memory that engines were told to give back."""
        self._admit_again = asyncio.Event()
        self._update_lock = asyncio.Lock()
        self.failure: EngineError | None = None
        """Why the pool has given up for good: an engine used up its restarts."""
        self._failure: EngineError | None = EngineError("the engine pool was not started")
        self.pauses = Pauses()
        """Time that counts to no deadline of an episode or a request: the trainer has the engines' memory."""
        self._awaited = False
        """Whether the trainer waits for episodes."""
        self._wanted = 0
        """Updates that wait for an engine to come up."""
        self._watches: dict[EngineHandle, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._counters = Counter[str]()
        self._cluster: Cluster | None = None
        if hosts.joining is not None:
            self._cluster = Cluster(self, hosts.joining, hosts.api_key, len(hosts.urls) + 1, len(servers))
        self._nodes = 0 if hosts.joining is None else hosts.joining.nodes

    # ---- life

    async def start(self, model_path: Path) -> None:
        """Start all servers on the weights of ``model_path`` (policy version 0). Raises :class:`EngineError`.

        Engine nodes may join from now on; so many as the run wants are awaited.
        """
        self._model_path = Path(model_path)
        self._failure = None
        own = list(self._engines)
        try:
            if self._cluster is not None:
                await self._cluster.start()
            if own:
                await all_or_first_error([engine.start(self._model_path) for engine in own])
            for engine in own:
                engine.state = EngineState.SERVING
                self._look_after(engine)
            self._changed()
            if self._cluster is not None and self._nodes:
                await self._until_joined(self._cluster)
        except BaseException:
            await self.stop()
            raise

    async def stop(self, *, finished: bool = False) -> None:
        """End every server and everything it started; waiting requests get an :class:`EngineError`.

        Engine nodes are told whether the run has ``finished``, or is to be continued.
        """
        self._failure = EngineError("the engine pool was stopped")
        tasks = [*self._watches.values(), *self._background]
        self._watches.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._cluster is not None:
            await self._cluster.stop(finished=finished)
        await asyncio.gather(*(engine.part() if engine.machine else engine.stop() for engine in self._engines))
        if self._weight_groups is not None:
            self._weight_groups.forget()
        self._changed()

    async def __aenter__(self) -> EnginePool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _look_after(self, engine: EngineHandle) -> None:
        self._watches[engine] = asyncio.create_task(self._watch(engine), name=f"watch {engine.label}")

    # ---- engines that come and go

    async def _wait_until(self, true: Callable[[], bool], seconds: float) -> bool:
        """Wait for what engines' states decide; whether it is so. Raises what the pool has failed with."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not true():
                    self._check()
                    await self._admit_again.wait()
        return true()

    async def _until_joined(self, cluster: Cluster) -> None:
        """Wait for the engine nodes of the run, at most ``engine.start_seconds``, and until their engines are up.

        Raises :class:`EngineError` when none came; when only some did, the run begins with those.
        """
        seconds = self.config.start_seconds
        if not await self._wait_until(lambda: len(cluster.machines()) >= self._nodes, seconds):
            found = len(cluster.machines())
            told = (
                f"{found} of engine.nodes = {self._nodes} machines are there after engine.start_seconds = {seconds:g}"
            )
            if not found:
                raise EngineError(
                    f"{told}; start mua engines with this run's configuration on the engine nodes, which look for "
                    f"{cluster.file}"
                )
            _log.warning("%s; the run begins with them, and others may join", told)
        await self._wait_until(lambda: all(e.up for e in self._engines), seconds + _START_MARGIN_SECONDS)
        await self.until_up()

    def admit(self, machine: Machine, servers: Sequence[Server]) -> None:
        """Start ``servers`` of ``machine`` and use them as soon as they have the weights."""
        for server in servers:
            engine = EngineHandle(server, self.config.max_running_requests, machine.number, machine)
            engine.spared = True  # its first start is no restart
            machine.engines.append(engine)
            self._engines.append(engine)
            self._look_after(engine)
        self._changed()

    async def drain(self, engines: Sequence[EngineHandle]) -> None:
        """No more requests for ``engines``; wait until they run none.

        What still runs after ``engine.leave_seconds`` is stopped, and goes on elsewhere where it is.
        """
        for engine in engines:
            engine.leaving = True
            if engine.up:
                engine.state = EngineState.LEAVING
        self._changed()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.leave_seconds):
                while any(engine.in_flight for engine in engines):
                    await asyncio.sleep(_DRAIN_SECONDS)
                async with self._update_lock:  # an update that is under way may need them
                    pass
        await asyncio.gather(*(engine.abort() for engine in engines if engine.in_flight))
        patience = monotonic() + _CUT_SECONDS
        while any(engine.in_flight for engine in engines) and monotonic() < patience:
            await asyncio.sleep(_DRAIN_SECONDS)

    async def remove(self, engines: Sequence[EngineHandle]) -> None:
        """Do without ``engines`` from now on. Requests that run on them are asked of others."""
        for engine in engines:
            engine.leaving = True
            if engine in self._engines:
                self._engines.remove(engine)
            watch = self._watches.pop(engine, None)
            if watch is not None and watch is not asyncio.current_task():
                watch.cancel()
        await asyncio.gather(*(engine.part() for engine in engines))
        self._changed()

    def count_engines(self) -> int:
        """Engines there are, up or not."""
        return len(self._engines)

    def give_up(self, message: str) -> None:
        """The pool's work ends with this error, which waiting requests get."""
        self._failure = self.failure = EngineError(message)
        _log.error("%s", message)
        self._changed()

    # ---- what there is

    def engines_up(self) -> int:
        """Engines that can take weights."""
        return len(self._up())

    def load(self) -> EngineLoad:
        """What the engines in rotation do now."""
        serving = [engine for engine in self._engines if engine.state is EngineState.SERVING]
        return EngineLoad(
            capacity=self.config.max_running_requests * len(serving),
            running=sum(engine.in_flight for engine in serving),
            waiting=sum(engine.queued for engine in serving),
            paused=self._gate_closed or not serving,
        )

    def rows(self) -> list[Json]:
        """Every engine as a row of the store's table ``engines``, without its run and time."""
        return [
            {
                "label": engine.label, "url": engine.server.url, "state": engine.state.value,
                "version": engine.version, "capacity": self.config.max_running_requests,
                "running": engine.in_flight, "waiting": engine.queued, "details": None,
            }
            for engine in self._engines
        ]  # fmt: skip

    def describe(self) -> str:
        """Every engine's state and load, in one line for a person."""
        return "; ".join(f"{e.label} {e.state.value}, {e.in_flight} running, {e.queued} queued" for e in self._engines)

    def metrics(self) -> dict[str, float]:
        """Requests, tokens and prefix-cache hit rate since the last call, and what is in flight now."""
        counted, self._counters = self._counters, Counter()
        names = ["requests", "failures", "prompt_tokens", "cached_tokens", "sampled_tokens", "retries"]
        nodes = {}
        if self._cluster is not None:
            nodes = {f"engine/nodes_{name}": float(count) for name, count in self._cluster.counts.items()}
        return {f"engine/{name}": counted[name] for name in names} | nodes | {
            "engine/partial/continued": counted["continued"],
            "engine/partial/kept_tokens": counted["kept_tokens"],
            "engine/prefix_cache_hit_rate": counted["cached_tokens"] / max(1, counted["prompt_tokens"]),
            "engine/running": sum(engine.in_flight for engine in self._engines),
            "engine/queued": sum(engine.queued for engine in self._engines),
            "engine/serving": sum(engine.state is EngineState.SERVING for engine in self._engines),
            "engine/restarts": sum(engine.restarts for engine in self._engines),
        } | engine_metrics([engine.clock for engine in self._engines])  # fmt: skip

    def restart_clocks(self) -> None:
        """The account of the engines' time begins now."""
        engine_metrics([engine.clock for engine in self._engines])

    def awaited(self, awaited: bool) -> None:
        """Whether the trainer waits for episodes from now on; the account of engines without a request tells."""
        self._awaited = awaited
        self._account(*self._engines)

    def _account(self, *engines: EngineHandle) -> None:
        """What ``engines`` do has changed, or may have."""
        for engine in engines:
            activity = EngineActivity.IDLE_AWAITED if self._awaited else EngineActivity.IDLE
            if not engine.up or (engine.state is EngineState.AWAITING and not self._updating):
                activity = EngineActivity.DOWN
            elif self._updating:
                activity = EngineActivity.PAUSED
            elif self.released:
                activity = EngineActivity.RELEASED
            elif engine.in_flight:
                activity = EngineActivity.GENERATING
            engine.clock.note(activity, engine.in_flight)

    # ---- sampling

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str, deadline_s: float
    ) -> Generation:
        """Sample a continuation; see :meth:`mua.engine.Sampler.generate`.

        The deadline covers waiting for an engine and for a slot of it. With ``temperature`` 0 SGLang decodes
        greedily and reports log-probabilities at temperature 1.
        """
        if self.config.deterministic and params.seed is None:
            raise EngineError("a deterministic engine needs SamplingParams.seed for every request")
        deadline = self.pauses.deadline(deadline_s)
        late = f"engine request of session {session!r} exceeded its {deadline_s:g} s"
        sampled: Generation | None = None
        died: dict[EngineHandle, int] = {}
        try:
            # An engine that leaves tells what it had sampled, and another goes on from there; what one had sampled
            # that died is sampled again.
            for left in reversed(range(_OWN_ENGINES_PER_REQUEST if self._cluster is None else _ENGINES_PER_REQUEST)):
                try:
                    asked = remaining_request(prompt_ids, params, sampled)
                    piece = await self._generate(*asked, session, deadline, died)
                except EngineGone as error:
                    if not left:
                        raise
                    _log.info("a request of session %s is asked of another engine: %s", session, error)
                    self._counters["retries"] += 1
                    continue
                sampled = join_generations(sampled, piece)
                if len(sampled.ids) >= params.max_new_tokens and piece.finish == "abort":
                    sampled = replace(sampled, finish="length")
                if sampled.finish != "abort":
                    break
                self._counters.update(continued=len(piece.ids) > 0, kept_tokens=len(piece.ids))
            else:
                raise EngineGone(
                    f"the request of session {session!r} was given up by every engine that it was asked of"
                )
        except TurnCut as cut:
            self._counters["failures"] += 1
            found = join_generations(sampled, cut.partial)
            raise TurnCut(f"{late} after {len(found.ids)} tokens", found) from None
        except TimeoutError:
            self._counters["failures"] += 1
            raise DeadlineExceeded(late) from None
        except EngineError:
            self._counters["failures"] += 1
            raise
        assert sampled is not None
        self._counters.update(
            requests=1,
            prompt_tokens=len(prompt_ids),
            cached_tokens=sampled.cached_tokens,
            sampled_tokens=len(sampled.ids),
        )
        return sampled

    async def _generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, session: str, deadline: Deadline,
        died: dict[EngineHandle, int],
    ) -> Generation:  # fmt: skip
        """Raises ``TimeoutError`` or :class:`TurnCut` when ``deadline`` is over.

        ``finish`` is "abort" where the engine was told to give up what it runs. Engines in ``died`` that were not
        restarted since are not asked if there are others; one that dies is added.
        """
        began = monotonic()
        async with deadline.timeout():
            engine = await self._admit(session, params.order, died)
        stops = engine.stops
        waited = monotonic() - began
        rid = uuid.uuid4().hex
        request = asyncio.create_task(engine.client.generate(rid, prompt_ids, params))
        try:
            with contextlib.suppress(TimeoutError):
                async with deadline.timeout():
                    await asyncio.wait({request})
            if request.done():
                return replace(request.result(), waited=waited, engine=engine.label)
            self._abort(engine, rid)
            await asyncio.wait({request}, timeout=_CUT_SECONDS)
            if not request.done() or request.exception() is not None:
                raise TimeoutError  # the engine hangs, or the request still waited in its queue
            if (found := replace(request.result(), waited=waited, engine=engine.label)).finish == "abort":
                if not len(found.ids):
                    raise TimeoutError
                raise TurnCut("", found)
            return found  # it ended meanwhile
        except EngineGone:
            engine.suspect.set()
            died[engine] = stops
            raise
        except asyncio.CancelledError:
            self._abort(engine, rid)
            raise
        finally:
            request.cancel()
            engine.in_flight -= 1
            self._account(engine)
            engine.slots.release()

    async def _admit(self, session: str, order: int, died: dict[EngineHandle, int]) -> EngineHandle:
        """Wait for the gate, an engine in rotation and a slot of it; the caller gives the slot back.

        It is the session's engine while that serves, else the least loaded one.
        """
        while True:
            self._check()
            serving = [engine for engine in self._engines if engine.state is EngineState.SERVING]
            if self._gate_closed or not serving:
                await self._admit_again.wait()
                continue
            alive = [engine for engine in serving if died.get(engine) != engine.stops]
            if not alive:  # the watch will see whether they are dead, or have only said so
                died.clear()
                await asyncio.sleep(_SUSPICIOUS_SECONDS)
                continue
            serving = alive
            engine = self._sessions.get(session)
            if engine is None or engine not in serving:
                engine = min(serving, key=lambda one: one.in_flight + one.queued)
            self._sessions[session] = engine
            self._sessions.move_to_end(session)
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
            engine.queued += 1
            try:
                await engine.slots.acquire(order)
            finally:
                engine.queued -= 1
            if not self._gate_closed and engine.state is EngineState.SERVING and self._failure is None:
                engine.in_flight += 1
                self._account(engine)
                return engine
            engine.slots.release()

    @property
    def _gate_closed(self) -> bool:
        return self._updating or self.released

    def _check(self) -> None:
        if self._failure is not None:
            raise EngineError(str(self._failure)) from self._failure

    def _abort(self, engine: EngineHandle, rid: str) -> None:
        task = asyncio.create_task(engine.abort(rid))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _changed(self) -> None:
        """Tell everyone who waits for admission that the gate or an engine's state changed."""
        if any(engine.state is EngineState.AWAITING for engine in self._engines):
            self.awaiting_weights.set()
        else:
            self.awaiting_weights.clear()
        self._account(*self._engines)
        self._admit_again.set()
        self._admit_again.clear()

    # ---- health

    async def _watch(self, engine: EngineHandle) -> None:
        """Probe one engine for ever; restart it when it is dead or failed three probes in a row."""
        failed = 0
        while self._failure is None and not engine.leaving:
            try:
                until = monotonic() + (_SUSPICIOUS_SECONDS if failed else self.config.health_seconds)
                # Sooner when the process ends or a request found the engine gone.
                while engine.server.running and (left := until - monotonic()) > 0:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(min(left, 0.5)):
                            await engine.suspect.wait()
                        engine.suspect.clear()
                        break
                failed = 0 if engine.server.running and await self._probe(engine) else failed + 1
                if engine.leaving:
                    return
                if not engine.server.running or failed >= _FAILED_PROBES:
                    if engine.stops or engine.state is not EngineState.STOPPED:
                        _log.warning("%s is dead or stuck; restarting it", engine.label)
                    await self._restart(engine)
                    failed = 0
            except Exception as error:
                _log.exception("the watch of %s failed", engine.label)
                self.give_up(f"{engine.label} is not watched any more: {error!r}; the log has the traceback")

    async def _probe(self, engine: EngineHandle) -> bool:
        """Whether the engine answers.

        During a control operation, or when its memory is released, its scheduler cannot generate: only its HTTP
        process is asked then. A scheduler that is stuck fails the operation, or the one that takes the memory back.
        """
        seconds = self.config.control_seconds / _FAILED_PROBES
        if not engine.control.locked():
            async with engine.probing:
                if engine.up and not engine.released:
                    return await engine.client.answers("/health_generate", seconds)
        return not engine.up or await engine.client.answers("/model_info", seconds)

    async def _restart(self, engine: EngineHandle) -> None:
        reason = "its process ended or did not answer"
        while not engine.leaving:
            await engine.stop()
            self._changed()
            spared, engine.spared = engine.spared, False
            if not spared and engine.restarts >= self.config.max_restarts:
                message = (
                    f"{engine.label} failed again after engine.max_restarts = {engine.restarts} restarts ({reason}); "
                    f"see {engine.server.log_file}, fix what it says or raise engine.max_restarts"
                )
                if engine.machine is None or self._cluster is None:
                    self.give_up(message)
                else:
                    await self._cluster.dismiss(engine.machine, message)
                return
            engine.restarts += not spared
            while self.released and not self._wanted and self._failure is None:
                await self._admit_again.wait()  # the trainer uses the memory, and no update waits for an engine
            if self._failure is not None:
                return
            try:
                await engine.start(self._model_path)
                while engine.released != self._released:  # give back what the others have given back
                    if tags := self._released - engine.released:
                        await self._move_memory(engine, _RELEASE, tags)
                    if tags := engine.released - self._released:
                        await self._move_memory(engine, _RESUME, tags)
                break
            except EngineError as error:
                reason = str(error)
                _log.error("%s did not restart: %s", engine.label, error)
        if engine.leaving:
            return
        engine.suspect.clear()
        engine.state = EngineState.SERVING if engine.version == self.version else EngineState.AWAITING
        self._changed()

    # ---- weights

    async def update_weights(self, source: WeightSource, version: int, *, only_awaiting: bool = False) -> SyncReport:
        """Load the weights of ``source`` into the engines and call the result policy ``version``; all change together.

        They are taken on a thread of their own, one bucket at a time. New requests wait at the gate meanwhile; running
        ones are retracted and go on under the new weights, their ``versions`` telling which token came from which.
        With ``only_awaiting`` just the restarted engines are filled, with the version the others already have, and the
        others keep serving.

        An engine that dies or falls silent on the way is restarted and waits for the next update; the others go on.
        When none is left, ``source`` is asked again as soon as an engine is up.

        Raises:
            EngineGone: none is left, and memory is released: make room, wait :meth:`until_up`, and update again.
            EngineError: an engine refused, ``engine.max_restarts`` is used up, or no engine came up in the time that
                all its restarts may take. The engines concerned are restarted and wait for the next update.
        """
        started = monotonic()
        async with self._update_lock:
            if only_awaiting and version != self.version:
                raise EngineError(f"engines serve version {self.version}; cannot fill a restarted one with {version}")
            while True:
                awaiting = [engine for engine in self._engines if engine.state is EngineState.AWAITING]
                engines = awaiting if only_awaiting else self._up() if self.released else await self.until_up()
                targets = Targets(engines, self.config.control_seconds)
                try:
                    if not engines and not only_awaiting:
                        raise EngineGone("no engine is up")
                    report = await self._ship(targets, source, version, gate=not only_awaiting)
                    break
                except EngineGone as error:
                    if self.released and not only_awaiting:
                        raise  # an engine that starts needs the memory that the trainer has
                    _log.warning("the weights of version %d reached no engine: %s; sending them again", version, error)
            self.version = version
            for engine in targets.engines:
                engine.version = version
            for engine in self._engines:
                if engine.up:
                    engine.state = EngineState.SERVING if engine.version == version else EngineState.AWAITING
            self._changed()
        report.seconds = monotonic() - started
        return report

    def _up(self) -> list[EngineHandle]:
        return [engine for engine in self._engines if engine.up]

    async def until_up(self) -> list[EngineHandle]:
        """Wait for an engine that can take weights, and with memory released for all that are starting too; those that
        can. See :meth:`update_weights` for what is raised."""
        seconds = self._start_seconds * (self.config.max_restarts + 1)
        self._wanted += 1
        self._changed()
        try:
            up = await self._wait_until(lambda: bool(self._up()), seconds)
            self._check()
        finally:
            self._wanted -= 1
        if not up:
            raise EngineError(
                f"no engine came up to take the weights within {seconds:g} s, which is engine.start_seconds and "
                f"engine.stop_seconds for each of its restarts: {self.describe()}"
            )
        if self.released:
            await self._until_started()
        return self._up()

    @property
    def _start_seconds(self) -> float:
        """The longest that one start takes, its failure included."""
        return self.config.start_seconds + self.config.stop_seconds + _START_MARGIN_SECONDS

    async def _until_started(self) -> None:
        """Wait until no engine is starting: it takes its memory, and has it until it is up and has released it."""
        if not await self._wait_until(
            lambda: all(engine.state is not EngineState.STARTING for engine in self._engines), self._start_seconds
        ):
            raise EngineError(
                f"an engine neither started nor failed to within {self._start_seconds:g} s, which is "
                f"engine.start_seconds and engine.stop_seconds, and memory is to be released: {self.describe()}"
            )

    async def _ship(self, targets: Targets, source: WeightSource, version: int, *, gate: bool) -> SyncReport:
        """Load ``source`` into the targets. What can be done while they still generate is done before they pause."""
        if not targets.engines:
            return SyncReport(version=version)
        engines = list(targets.engines)
        try:
            async with (
                WeightTransfer(targets, source, version, self._weight_groups) as transfer,
                contextlib.AsyncExitStack() as stack,
            ):
                report = transfer.report
                for engine in targets.engines:
                    await stack.enter_async_context(engine.control)
                began = monotonic()
                async with self._quiet(targets, gate=gate, report=report):
                    if self.config.transport == "broadcast" and (lost := list(targets.lost.values())):
                        raise lost[0]  # it is in the groups, and the others would wait for it until their deadline
                    await transfer.deliver()
                report.pause_seconds = monotonic() - began
        except BaseException:
            await self._give_up(targets, engines)
            raise
        return report

    async def _give_up(self, targets: Targets, engines: list[EngineHandle]) -> None:
        """Kill engines of which nobody knows what they hold; where one was lost, that is no fault of the others."""
        for engine in targets.same(targets.engines) if targets.lost else []:
            engine.spared = True
        await self._kill(targets.same(engines))

    @contextlib.asynccontextmanager
    async def _quiet(self, targets: Targets, *, gate: bool, report: SyncReport | None = None) -> AsyncIterator[None]:
        """The targets are paused inside: what ran on them is retracted, and goes on afterwards.

        An engine whose memory is released stays paused: requests that were running go on once all of it is there. Those
        lost inside are killed. When the block fails the weights of all are unknown: all are killed. The watch restarts
        what was killed. The caller holds their ``control`` locks.
        """
        engines, timed = list(targets.engines), report or SyncReport()
        self._updating = gate
        self._account(*self._engines)

        async def pause(engine: EngineHandle) -> None:
            engine.paused = True
            await engine.client.call("/pause_generation", {"mode": "retract"}, timeout=targets.seconds)

        async def go_on(engine: EngineHandle) -> None:
            await engine.client.call("/continue_generation", {}, timeout=targets.seconds)
            engine.paused = False

        try:
            with timed.pausing("stop"):
                await targets.each(pause, [e for e in engines if not e.paused and not e.released])
            yield
            with timed.pausing("resume"):
                await targets.each(go_on, [e for e in targets.engines if e.paused and not e.released])
        except BaseException:
            await self._give_up(targets, engines)
            raise
        else:
            await self._kill(targets.same(targets.lost))
        finally:
            self._updating = False
            self._changed()

    @contextlib.asynccontextmanager
    async def _idle(self, engines: list[EngineHandle]) -> AsyncIterator[Targets]:
        """Paused as by :meth:`_quiet`, behind a closed gate; no probe is in the engines, and their caches are empty."""
        targets = Targets(engines, self.config.control_seconds)

        async def flush(engine: EngineHandle) -> None:
            try:
                await engine.client.flush(0, timeout=targets.seconds)
            except EngineError as error:
                raise EngineGone(f"{engine.label} does not become idle: {error}") from error

        async with contextlib.AsyncExitStack() as stack:
            for engine in engines:
                await stack.enter_async_context(engine.control)
                await stack.enter_async_context(engine.probing)
            async with self._quiet(targets, gate=True):
                await targets.each(flush, [engine for engine in engines if "kv_cache" not in engine.released])
                yield targets

    async def _kill(self, engines: Iterable[EngineHandle]) -> None:
        """Stop engines of no more use, even while this task is being cancelled; the watch restarts them."""
        await asyncio.gather(*(engine.stop() for engine in engines), return_exceptions=True)
        self._changed()

    async def verify_weights(self, source: WeightSource) -> list[str]:
        """Names of tensors of ``source`` that the engines do not hold bit for bit; empty means equal.

        See :func:`mua.engine.weight_transfer.find_differences`. Afterwards the engines hold the weights of
        ``source``; if a parameter was left as noise they are restarted instead.
        """
        async with self._update_lock:
            serving = [engine for engine in self._engines if engine.state is EngineState.SERVING]
            if not serving:
                raise EngineError("no engine serves; nothing to verify")
            targets = Targets(serving, self.config.control_seconds)

            async def load() -> SyncReport:
                async with WeightTransfer(targets, source, self.version, self._weight_groups) as transfer:
                    return await transfer.deliver()

            async with contextlib.AsyncExitStack() as stack:
                for engine in serving:
                    await stack.enter_async_context(engine.control)
                async with self._quiet(targets, gate=True):
                    names, complete = await find_differences(targets, load)
            if not complete:
                await self._kill(targets.same(serving))
        return names

    # ---- memory

    @property
    def released(self) -> bool:
        """Whether engines were told to give memory back, and requests wait for it."""
        return bool(self._released)

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Give back GPU memory: ``tags`` out of ``weights``, ``kv_cache``, ``cuda_graph``. Requests wait meanwhile.

        An engine that fails to is killed, which frees its memory too. One that is starting is awaited.
        """
        if not self.config.memory_saver:
            raise EngineError("set engine.memory_saver: true to release engine memory between rollouts", passing=False)
        self._released = self._released | set(tags)
        self.pauses.begin()
        await self._until_started()
        await self._memory(_RELEASE, lambda engine: set(tags) - engine.released)

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Take the memory back; its weights are undefined until :meth:`update_weights`, its KV cache is empty.

        An engine that fails to is killed, and restarted like those that died meanwhile.
        """
        await self._memory(_RESUME, lambda engine: set(tags) & engine.released)
        self._released = self._released - set(tags)
        if not self._released:
            self.pauses.end()
        self._changed()

    async def _memory(self, path: str, tags: Callable[[EngineHandle], set[str]]) -> None:
        """Have every engine that is up change its ``tags``."""
        async with self._update_lock:
            engines = [engine for engine in self._engines if engine.up and tags(engine)]
            try:
                async with self._idle(engines) as targets:
                    await targets.each(lambda engine: self._move_memory(engine, path, tags(engine)))
            except EngineGone as error:
                _log.warning("no engine is left after %s: %s", path, error)

    async def _move_memory(self, engine: EngineHandle, path: str, tags: set[str]) -> None:
        await engine.client.call(path, {"tags": sorted(tags)}, timeout=self.config.control_seconds)
        engine.released = engine.released ^ tags
