"""A domain that crashes, hangs and misbehaves on request, and the entry points that make worker processes find it."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from environments.kit.scripted import ScriptedUser
from mua.environment.protocol import Evaluation, Task, ToolResult, Transcript
from mua.types import ToolSchema
from mua.utils.errors import JudgeFault, UserFault

IN_WORKER = getattr(sys.modules["__main__"].__spec__, "name", None) == "mua.environment.worker"
CLOSED: list[int | str] = []
"""The seeds of environments that were closed; what :func:`work_until` did before stands among them."""


def _refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("something is pickled")


if IN_WORKER:
    pickle.dumps = pickle.loads = pickle.dump = pickle.load = pickle.Pickler = pickle.Unpickler = _refuse


def work_until(marker: str) -> str:
    """Keep this process busy until the file ``marker`` is there."""
    while not Path(marker).exists():
        pass
    CLOSED.append("worked")
    return "seen"


def once(marker: str, act: Any) -> None:
    """``act``, but not again once the file ``marker`` exists: a fault that a retry does not meet."""
    if not Path(marker).exists():
        Path(marker).touch()
        act()


def raised(error: BaseException) -> Any:
    raise error


ACTS: dict[str, Any] = {
    "pid": os.getpid,
    "crash": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), 9),
    "hang": lambda: time.sleep(3600),
    "hold": lambda: ctypes.PyDLL(None).sleep(3600),
    "work_until": work_until,
    "fail": lambda: raised(KeyError("x")),
    "leave": lambda: raised(SystemExit(4)),
    "user": lambda: raised(UserFault("no user")),
    "judge": lambda: raised(JudgeFault("no judge")),
    "huge": lambda: "x" * 3_000_000,
    "shout": lambda: print("this would break a protocol on standard output"),
    "child": lambda: subprocess.Popen(["sleep", "3600"]).pid,
    "variables": lambda: dict(os.environ),
    "sockets": lambda: sum(Path(f"/proc/self/fd/{fd}").is_socket() for fd in os.listdir("/proc/self/fd")),
    "closed": lambda: CLOSED,
    "crash_once": lambda marker: once(marker, lambda: os._exit(3)),
    "hang_once": lambda marker: once(marker, lambda: time.sleep(3600)),
}


class Fragile:
    """Counts, and does whatever a tool is called."""

    def reset(self, task: Task, seed: int) -> None:
        self.task, self.seed, self.count = task, seed, 0

    def tools(self) -> list[ToolSchema]:
        marker = {"marker": {"type": "string"}}
        return [ToolSchema(n, "Try it.", {"type": "object", "properties": marker}) for n in ["add", "say", *ACTS]]

    def call(self, name: str, arguments: dict) -> ToolResult:
        if name == "add":
            self.count += arguments.get("n", 1)
            return ToolResult(f"{self.task.id} {self.seed} {self.count}", reward=0.5)
        if name == "say":
            return ToolResult(self.task.data["say"] + arguments["more"])
        if name == "wrong":
            return 3  # type: ignore[return-value]
        if name == "unheard":
            return ToolResult(object())  # type: ignore[arg-type]
        return ToolResult(json.dumps(ACTS[name](**arguments)))

    def user_tools(self) -> list[ToolSchema]:
        return [ToolSchema("press", "Press.", {"type": "object", "properties": {}})]

    def user_call(self, name: str, arguments: dict) -> ToolResult:
        self.count += 10
        return ToolResult(str(self.count))

    def evaluate(self, transcript: Transcript) -> Evaluation:
        return Evaluation(float(self.count), self.count > 0, {"heard": [len(transcript.messages), {"é": None}]})

    def close(self) -> None:
        CLOSED.append(self.seed)


class Waiting(Fragile):
    async def call(self, name: str, arguments: dict) -> ToolResult:  # type: ignore[override]
        await asyncio.sleep(3600 if name == "sleep" else 0)
        return ToolResult("late")


class FragileDomain:
    name = "fragile"
    isolation = "process"
    environment: Any = Fragile

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"fragile-{n}", self.name, split, {"say": "süß \ud800"}) for n in range(8)]  # type: ignore[arg-type]

    def system_prompt(self, style: str) -> str:
        return "Try."

    def persona(self, task: Task) -> str:
        return "You wait."

    def scripted_user(self, task: Task, seed: int) -> ScriptedUser:
        return ScriptedUser.simple(f"{task.id}/{seed}", ("Go.",))

    def gold(self, task: Task) -> list[tuple[str, dict]]:
        return [("add", {})]


class WaitingDomain(FragileDomain):
    name = "waiting"
    environment = Waiting


DOMAIN = FragileDomain()


def register(folder: Path, **modules: str) -> None:
    """Write the metadata of an installed package whose domains are ``name="module"``; ``folder`` is on the path."""
    info = folder / "mua_fragile-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mua-fragile\nVersion: 1.0\n")
    points = "".join(f"{name} = {module}\n" for name, module in modules.items())
    (info / "entry_points.txt").write_text(f"[mua.environments]\n{points}")
