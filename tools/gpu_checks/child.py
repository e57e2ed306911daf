"""The process of one check: where it writes, what it may not take with it, and what it says at its end."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "MUA_GPU_CHECK"
"""The variable by which processes are found that a check started."""
ENGINE = "MUA_GPU_CHECK_ENGINE"
"""The variable with what the command line says of engines, ``KEY=VALUE`` with a blank between them."""
RESULT, OUTPUT = "result.json", "output.txt"
_TRACE_MARGIN = 2.0
"""Seconds before its deadline at which a check that hangs shows where it is."""
_OURS = ("mua", "megatron_bridge", "environments", "workbench", "tools", "tests")


@dataclass(frozen=True)
class Task:
    """What the process is told."""

    module: str
    function: str
    work: str
    mark: str
    seconds: float
    device: str
    root: str
    variables: dict[str, str]
    """The environment; a process that is forked from another one has that one's."""


@dataclass(frozen=True)
class Place:
    """Where a check runs."""

    device: str
    """``cuda`` or ``cpu``."""
    work: Path
    """An empty folder, gone afterwards."""

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def pick(self, full: Any, toy: Any) -> Any:
        """``full`` on a GPU, ``toy`` on a CPU."""
        return full if self.cuda else toy


@dataclass
class Found:
    """What a check measured, and a sentence on it."""

    message: str = ""
    figures: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """What is not as it must be; the check failed if there is any."""
    machine: dict[str, Any] | None = None

    def add(self, name: str, value: Any, unit: str = "") -> None:
        shown = float(f"{value:.5g}") if isinstance(value, float) else value
        self.figures.append({"name": name, "value": shown, "unit": unit})

    def expect(self, holds: bool, fault: str) -> None:
        if not holds:
            self.faults.append(fault)


class Skip(Exception):
    """Why a check does not apply here."""


def enter(task: Task) -> None:
    """Run a check in this fresh process, which leads a session of its own; never returns."""
    os.setsid()
    work = Path(task.work)
    os.chdir(work)
    output = os.open(work / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ |= task.variables
    os.environ |= {MARK: task.mark, "PYTHONPATH": _python_path(task.root), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    if task.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with suppress(OSError):  # the kernel, out of memory, takes this process before the one that watches it
        Path("/proc/self/oom_score_adj").write_text("1000")
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(task.seconds - _TRACE_MARGIN, task.seconds / 2))
    result = _result(task, work)
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    staged = work / f"{RESULT}.new"
    staged.write_text(json.dumps(result), encoding="utf-8")
    staged.rename(work / RESULT)
    os._exit(0)  # no teardown: what a library does there is no part of the check


def _python_path(root: str) -> str:
    """For processes that a check starts; the checkout comes first."""
    return os.pathsep.join(dict.fromkeys([root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))


def _result(task: Task, work: Path) -> dict[str, Any]:
    try:
        check: Callable[[Place], Found] = getattr(importlib.import_module(task.module), task.function)
        found = check(Place(_device(task), work))
    except Skip as reason:
        return {"state": "skipped", "figures": [], "message": str(reason)}
    except ModuleNotFoundError as error:
        top = (error.name or "").partition(".")[0]
        if top and top not in _OURS and absent(top):
            return {"state": "skipped", "figures": [], "message": f"{top} is not installed"}
        traceback.print_exc()
        return {"state": "failed", "figures": [], "message": _line(error)}
    except BaseException as error:
        traceback.print_exc()
        return {"state": "failed", "figures": [], "message": _line(error)}
    state = "failed" if found.faults else "ok"
    message = "; ".join([*found.faults, *filter(None, [found.message])])
    return {"state": state, "figures": found.figures, "message": message, "machine": found.machine}


def _device(task: Task) -> str:
    if task.device == "cpu":
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def absent(package: str) -> bool:
    """Whether Python finds no such package."""
    try:
        return importlib.util.find_spec(package) is None
    except (ImportError, ValueError):
        return True


def _line(error: BaseException) -> str:
    """The type and what it says, in one line of bounded length."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:600]}" if said else type(error).__name__
