"""Sessions of the gateway that a person opens, to try an agent: ``mua gateway``.

========================= =============================================================================================
``POST /sessions``        ``{"task": ID}``, or ``{"split": …}`` for the next of its tasks: opens an episode; answers
                          ``key``, ``base_url``, ``episode_url``, ``api_key`` and the task as agents get it
``POST /sessions/KEY/end``  ends it; answers outcome, reward, success, messages and the sizes of its segments
========================= =============================================================================================

Both want the administrator's key, which stands in ``gateway.json`` in the output folder (mode 0600). An episode that is
not ended is closed after ``rollout.episode_seconds``. It is an episode like any other: the agent is a person's.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import secrets
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path
from typing import Any, get_args

from aiohttp import web

from mua.config.schema import ExperimentConfig
from mua.environment.protocol import Split
from mua.environment.selection import Selection
from mua.rollout.external import AgentTask
from mua.rollout.gateway.chat_calls import Refused, read_object
from mua.rollout.runner import EpisodeRunner
from mua.types import Json, Trajectory

log = logging.getLogger(__name__)
ADDRESS_FILE = "gateway.json"
_FIRST_ORDINAL = 1 << 42
"""Away from those of training and evaluation, whose seeds and sessions are theirs."""


@dataclass
class _Visit:
    told: asyncio.Future[AgentTask]
    done: asyncio.Event = field(default_factory=asyncio.Event)
    episode: asyncio.Task[Trajectory] | None = None


_visit: ContextVar[_Visit] = ContextVar("visit")


async def wait_for_person(task: AgentTask) -> None:
    """The ``agent.function`` of such episodes: the agent is somewhere else, until it is said to have ended."""
    visit = _visit.get()
    visit.told.set_result(task)
    await visit.done.wait()


def interactive_config(config: ExperimentConfig) -> ExperimentConfig:
    """``config`` with episodes that wait for a person's agent."""
    agent: Json = {} if config.agent is None else config.agent.model_dump()
    agent |= {"command": None, "function": f"{__name__}:{wait_for_person.__name__}"}
    rollout = config.rollout.model_dump() | {"max_retries": 0}
    return ExperimentConfig.model_validate(config.model_dump() | {"agent": agent, "rollout": rollout})


class SessionDesk:
    """Opens and ends episodes at a person's wish. Belongs to the runner's event loop."""

    def __init__(self, config: ExperimentConfig, selection: Selection, runner: EpisodeRunner) -> None:
        self._config = config
        self._runner = runner
        self._admin = secrets.token_urlsafe(32)
        self._visits: dict[str, _Visit] = {}
        self._ordinals = count(_FIRST_ORDINAL)
        splits: tuple[Split, ...] = get_args(Split)
        tasks = {split: [t for domain in selection.domains.values() for t in domain.tasks(split)] for split in splits}
        self._tasks = {task.id: task for one in tasks.values() for task in one}
        self._next = {split: cycle(one) for split, one in tasks.items() if one}

    async def open(self) -> Path:
        """Start the gateway; gives the file that tells where it is and the administrator's key."""
        gateway = self._runner.gateway
        assert gateway is not None, "interactive_config made the configuration"
        gateway.add_route("POST", "/sessions", self._begin)
        gateway.add_route("POST", "/sessions/{key}/end", self._end)
        await gateway.start()
        path = self._config.output / ADDRESS_FILE
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"url": gateway.url, "admin_key": self._admin}, file)
        return path

    async def close(self) -> None:
        for visit in self._visits.values():
            if visit.episode is not None:
                visit.episode.cancel()
        await asyncio.gather(*(v.episode for v in self._visits.values() if v.episode), return_exceptions=True)

    def _authorized(self, request: web.Request) -> None:
        told = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(told.encode(), self._admin.encode()):
            raise Refused(401, f"the administrator's key stands in {ADDRESS_FILE}", "invalid_api_key")

    async def _begin(self, request: web.Request) -> web.Response:
        self._authorized(request)
        asked = read_object(await request.read() or b"{}")
        name, split = asked.get("task"), asked.get("split", "train")
        if name is not None and name not in self._tasks:
            raise Refused(404, f"there is no task {str(name)[:80]!r}", param="task")
        if name is None and split not in self._next:
            raise Refused(404, f"split {str(split)[:40]!r} has no tasks", param="split")
        task = next(self._next[split]) if name is None else self._tasks[name]
        visit = _Visit(asyncio.get_running_loop().create_future())
        _visit.set(visit)
        visit.episode = asyncio.create_task(
            self._runner.trajectory(task, next(self._ordinals), 0, temperature=self._config.rollout.temperature)
        )
        either: set[asyncio.Future[Any]] = {visit.told, visit.episode}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not visit.told.done():
            raise Refused(503, f"the episode did not begin: {visit.episode.result().error}", "episode_fault")
        told = visit.told.result()
        key = secrets.token_urlsafe(16)
        self._visits[key] = visit
        about = {"base_url": told.base_url, "episode_url": told.episode_url, "api_key": told.api_key}
        return web.json_response({"key": key, **about, "task": told.task})

    async def _end(self, request: web.Request) -> web.Response:
        self._authorized(request)
        visit = self._visits.pop(request.match_info["key"], None)
        if visit is None or visit.episode is None:
            raise Refused(404, "there is no such session")
        visit.done.set()
        trajectory = await visit.episode
        sizes = [{"tokens": len(s), "sampled": int(s.loss_mask.sum())} for s in trajectory.segments]
        return web.json_response(
            {
                "outcome": trajectory.outcome.value,
                "reward": trajectory.reward,
                "success": trajectory.success,
                "error": trajectory.error,
                "turn_rewards": trajectory.turn_rewards,
                "segments": sizes,
                "messages": trajectory.messages,
                "metrics": trajectory.metrics,
            }
        )
