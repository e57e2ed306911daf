"""One simulated GPU, shared by a trainer and engines, and a ledger of it that notes what could not be on a real one.

The trainer is Megatron and the engines are SGLang, both on the CPU, where neither releases anything: memory that was
given back can still be read there, and more may be taken than there is. So every step of theirs is told to a
:class:`Ledger`, which stands where mua asks ``torch.cuda`` about memory, sees every request to an engine and the begin
and end of every engine, and counts, in bytes:

* the trainer's tensors by what their storages hold; the activations of a pass; what torch keeps cached of both until it
  is emptied, and of weight buckets that an engine had open until ``ipc_collect``;
* an engine's memory by tag, from the begin of its start to its end, less what it was told to release.

A violation is a request that touches what its engine has released, an engine that takes what the trainer has or
caches, a trainer that takes what engines have, a pass over tensors whose storage was given back, a weight bucket that
is gone, or changed, while an engine loads it, or that an engine could not open.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mua.config.schema import EngineConfig
from mua.engine import pool as pool_module
from mua.engine.engine_handle import EngineClient, EngineHandle
from mua.engine.server import ALLOCATOR_VARIABLES, engine_server
from mua.engine.weight_sync import Buffers
from mua.megatron import checkpoint, device_memory
from mua.megatron.device_memory import Offloaded
from mua.megatron.network import Network
from mua.trainer.learner import Learner

TAGS = ("weights", "kv_cache", "cuda_graph")
RELEASE, RESUME, PAUSE, GO_ON = (
    "/release_memory_occupation", "/resume_memory_occupation", "/pause_generation", "/continue_generation",
)  # fmt: skip
TOUCHED = {
    "/generate": set(TAGS),
    "/health_generate": set(TAGS),
    GO_ON: set(TAGS),
    "/flush_cache": {"kv_cache"},
    PAUSE: {"kv_cache"},
    "/begin_weight_update": {"weights"},
    "/update_weights_from_tensor": {"weights"},
    "/update_weights_from_distributed": {"weights"},
    "/end_weight_update": {"weights"},
    "/weights_checker": {"weights"},
}
"""What a request touches of an engine's memory. Others are answered by its HTTP process, or take and give memory."""
_SHARED = re.compile(rb"/torch_\d+_\d+_\d+")
"""Names of shared memory in torch's handles."""


@dataclass(frozen=True, slots=True)
class Violation:
    """What could not be on a GPU, when, and from where it was asked for."""

    step: int
    what: str
    seconds: float
    stack: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.seconds:.2f} s: {self.what}\n{self.stack}"


@dataclass
class Ledger:
    """The simulated GPU. Sizes are shares of what the trainer holds when nothing is offloaded.

    ``activations`` are those of one pass, ``engine`` an engine's memory by tag, ``capacity`` all there is.
    """

    activations: float
    engine: dict[str, float]
    capacity: float
    step: int = -1
    violations: list[Violation] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    engines: dict[str, EngineHandle] = field(default_factory=dict)
    held: dict[str, set[str]] = field(default_factory=dict)
    """Tags that each engine has in memory."""
    paused: set[str] = field(default_factory=set)
    answered: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Requests by engine and path."""
    released_probes: int = 0
    """Probes of engines whose memory was released."""
    _learner: Learner | None = None
    _unit: int = 0
    _reserved: int = 0
    _open: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Requests that are not answered yet."""
    _buckets: dict[StorageWeakRef, int] = field(default_factory=dict)
    """Weight buckets, with their bytes."""
    _limbo: int = 0
    """Bytes of buckets that are gone and that an engine had open."""
    _began: float = field(default_factory=time.monotonic)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    # ---- torch.cuda

    def memory_allocated(self) -> int:
        """What the trainer's tensors, and weight buckets, hold."""
        for bucket in [bucket for bucket in self._buckets if bucket.expired()]:
            self._limbo += self._buckets.pop(bucket)
        own = 0 if self._learner is None else sum(map(_nbytes, _tensors(self._learner)))
        self._unit = max(self._unit, own)  # the optimizer makes its state in its first step
        return own + sum(self._buckets.values())

    def memory_reserved(self) -> int:
        """With what is cached."""
        allocated = self.memory_allocated()
        self._reserved = max(self._reserved, allocated + self._limbo)
        return self._reserved

    def max_memory_allocated(self) -> int:
        return self.memory_reserved()

    def mem_get_info(self) -> tuple[int, int]:
        total = int(self.capacity * self._unit)
        return max(0, total - self.memory_reserved() - self._of_engines()), total

    def empty_cache(self) -> None:
        self.events.append("empty cache")
        self._reserved = 0
        self.memory_reserved()

    def ipc_collect(self) -> None:
        self._limbo = 0

    def synchronize(self) -> None:
        """Everything is done when it returns."""

    # ---- what happens

    def note(self, what: str) -> None:
        """A violation."""
        stack = "".join(traceback.format_stack(limit=14)[:-2])
        self.violations.append(Violation(self.step, what, time.monotonic() - self._began, stack))

    def until(self, look: Callable[[], object], what: str, seconds: float = 120.0) -> None:
        """Wait until there is something."""
        deadline = time.monotonic() + seconds
        while not look():
            assert time.monotonic() < deadline, f"{what}: not seen within {seconds:g} s"
            time.sleep(0.01)

    def of_trainer(self, learner: Learner) -> None:
        """The trainer is there, with all it has."""
        self._learner = learner

    def trainer_takes(self, what: str, more: float = 0.0) -> None:
        """A pass, a bucket, or what was offloaded, and ``more`` beside the tensors."""
        with self._lock:
            self._reserved = max(self.memory_reserved(), self.memory_allocated() + int(more * self._unit))
            self._check(f"the trainer takes memory for {what}")

    def trainer_reads(self, what: str) -> None:
        """Raises where storages were given back: there is nothing to read."""
        assert self._learner is not None
        gone = [tensor for tensor in _tensors(self._learner, gradients=False) if tensor.numel() and not _nbytes(tensor)]
        if gone:
            self.note(f"{what} reads {len(gone)} tensors whose storage was given back")
            raise AssertionError(str(self.violations[-1]))

    def engine_takes(self, label: str, tags: set[str], why: str) -> None:
        with self._lock:
            self.events.append(f"{label} takes {' '.join(sorted(tags))}")
            self.held[label] = self.held.get(label, set()) | tags
            self._check(f"{label} {why}")

    def engine_gives(self, label: str, tags: set[str]) -> None:
        with self._lock:
            self.events.append(f"{label} gives {' '.join(sorted(tags))}")
            self.held[label] = self.held.get(label, set()) - tags

    def _of_engines(self) -> int:
        return int(sum(self.engine[tag] for tags in self.held.values() for tag in tags) * self._unit)

    def _check(self, what: str) -> None:
        trainer, engines, total = self.memory_reserved(), self._of_engines(), int(self.capacity * self._unit)
        if self._unit and trainer + engines > total:
            cached = trainer - self.memory_allocated()
            of_trainer = f"{trainer} bytes of the trainer, {cached} of them cached"
            self.note(f"over-subscribed: {what}: {of_trainer}; {engines} of engines {self.held}; there are {total}")

    @contextlib.contextmanager
    def asked(self, label: str, path: str, body: Any) -> Iterator[None]:
        """A request to an engine, from its sending to its answer."""
        path = path.partition("?")[0]
        tags = set(body["tags"]) if path in (RELEASE, RESUME) else set()
        with self._lock:
            self.answered[label, path] += 1
            away = set(TAGS) - self.held.get(label, set())
            if missing := TOUCHED.get(path, set()) & away:
                self.note(f"{path} touches the {' and '.join(sorted(missing))} that {label} has released")
            if path in ("/health_generate", "/model_info") and away:
                self.released_probes += 1
            if path == RELEASE:
                if (running := self._open[label, "/generate"]) and label not in self.paused:
                    self.note(f"{label} releases memory while it answers {running} requests")
                if self._open[label, "/health_generate"]:
                    self.note(f"{label} releases memory while it answers a probe")
                if tags & away:
                    self.note(f"{label} releases {tags & away} once more")
            if path == RESUME:
                self.engine_takes(label, tags, "resumes")
            self._open[label, path] += 1
        names = [] if not isinstance(body, dict) else _shared_memory(body.get("serialized_named_tensors", ()))
        for name in names:
            self._opens(label, name)
        try:
            yield
            for name in names:
                self._opens(label, name)
        finally:
            self._open[label, path] -= 1
        with self._lock:
            if path == RELEASE:
                self.engine_gives(label, tags)
            self.paused |= {label} if path == PAUSE else set()
            self.paused -= {label} if path == GO_ON else set()

    def _opens(self, label: str, name: str) -> None:
        """An engine opens, or has opened, a bucket's memory by its name."""
        for variable in ALLOCATOR_VARIABLES:
            if "expandable_segments:True" in os.environ.get(variable, ""):
                self.note(f"{label} opens a bucket in expandable segments ({variable})")
        if "torch_memory_saver" in os.environ.get("LD_PRELOAD", ""):
            self.note(f"{label} opens a bucket in memory that torch_memory_saver maps")
        if not Path(f"/dev/shm{name}").exists():
            self.note(f"the weight bucket {name} is freed, and {label} loads it")

    def bucket_taken(self, bucket: torch.Tensor) -> None:
        """The trainer fills one."""
        self._buckets[StorageWeakRef(bucket.untyped_storage())] = _nbytes(bucket)
        self.trainer_takes("a weight bucket")


def _tensors(learner: Learner, *, gradients: bool = True) -> list[torch.Tensor]:
    """Everything a learner keeps on its device, each storage once."""
    found = list(learner._reference or [])
    for network in learner.networks.values():
        found += [parameter.data for parameter in network.parameters()]
        for part in network.optimizer.megatron.chained_optimizers:
            found += [v for of in part.optimizer.state.values() for v in of.values() if torch.is_tensor(v) and v.ndim]
            found += [p.data for group in part.optimizer.param_groups for p in group["params"]]
        if gradients:
            found += [buffer.grad_data for chunk in network.wrapped for buffer in chunk.buffers]
    return [*{tensor.untyped_storage()._cdata: tensor for tensor in found}.values()]


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _shared_memory(handles: Any) -> list[str]:
    return sorted({name.decode() for text in handles for name in _SHARED.findall(base64.b64decode(text))})


def before(patch: pytest.MonkeyPatch, owner: Any, name: str, look: Callable[..., None]) -> None:
    """Calls ``look`` with the arguments of a method before it."""
    original = getattr(owner, name)

    @wraps(original)
    def watched(*args: Any, **named: Any) -> Any:
        look(*args, **named)
        return original(*args, **named)

    patch.setattr(owner, name, watched)


def after(patch: pytest.MonkeyPatch, owner: Any, name: str, look: Callable[..., None]) -> None:
    """Calls ``look`` with the result of a method, and its arguments, after it."""
    original = getattr(owner, name)

    @wraps(original)
    def watched(*args: Any, **named: Any) -> Any:
        result = original(*args, **named)
        look(result, *args, **named)
        return result

    patch.setattr(owner, name, watched)


def kept(patch: pytest.MonkeyPatch, ledger: Ledger) -> None:
    """From now on everything that this process's trainer and engines do is told to ``ledger``."""
    patch.setattr(device_memory, "torch_cuda", ledger)
    after(patch, Learner, "__init__", lambda _, learner, *args, **named: ledger.of_trainer(learner))
    for name, what in (("train", "training"), ("score", "scoring")):
        before(patch, Network, name, lambda *_, what=what: ledger.trainer_reads(what))
        before(patch, Network, name, lambda *_, what=what: ledger.trainer_takes(what, ledger.activations))
    before(patch, checkpoint, "begin", lambda *_, **__: ledger.trainer_reads("a checkpoint"))
    after(patch, Offloaded, "restore", lambda *_: ledger.trainer_takes("what was offloaded"))
    before(patch, Buffers, "take", lambda *_: ledger.trainer_reads("a weight bucket"))

    after(patch, Buffers, "take", lambda bucket, *_: ledger.bucket_taken(bucket))
    _engines_told(patch, ledger)


def _engines_told(patch: pytest.MonkeyPatch, ledger: Ledger) -> None:
    call, answers, start, stop = EngineClient.call, EngineClient.answers, EngineHandle.start, EngineHandle.stop

    async def told_call(client: EngineClient, path: str, body: Any = None, **named: Any) -> Any:
        with ledger.asked(client.label, path, body):
            return await call(client, path, body, **named)

    async def told_answers(client: EngineClient, path: str, timeout: float) -> bool:
        with ledger.asked(client.label, path, None):
            return await answers(client, path, timeout)

    async def told_start(engine: EngineHandle, model_path: Path) -> None:
        ledger.engines[engine.label] = engine
        ledger.engine_takes(engine.label, set(TAGS), "starts")
        await start(engine, model_path)

    async def told_stop(engine: EngineHandle) -> None:
        await stop(engine)
        ledger.engine_gives(engine.label, set(TAGS))
        ledger.paused.discard(engine.label)

    patch.setattr(EngineClient, "call", told_call)
    patch.setattr(EngineClient, "answers", told_answers)
    patch.setattr(EngineHandle, "start", told_start)
    patch.setattr(EngineHandle, "stop", told_stop)

    def without_saver(config: EngineConfig, **named: Any) -> Any:
        # torch_memory_saver needs CUDA. Without it SGLang answers the same requests and keeps everything.
        return engine_server(config.model_copy(update={"memory_saver": False}), **named)

    patch.setattr(pool_module, "engine_server", without_saver)
