"""Trainer and engines share a simulated GPU through a whole run, and never touch or take what the other has.

The real loop, with Megatron, two SGLang servers and the health watch at a short interval: training, sync, evaluation,
checkpoints, engines killed while memory is released. Then the same ledger finds each fault that is planted. What it
counts, and how, stands in ``tests/memory_ledger.py``. Not covered: a GPU, where memory really is released; several
trainer ranks, each of which has a device of its own and does the same on it; requests that run when memory is released,
which a run with engines of its own never has (``tests/unit/test_engine_recovery.py`` has them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_support import Workshop, metrics_of

from mua.config.load import load_config
from mua.engine.engine_handle import EngineHandle, EngineState
from mua.engine.pool import _FAILED_PROBES, EnginePool
from mua.megatron import device_memory
from mua.trainer import rl
from mua.trainer.memory_phases import Phases
from tests.memory_ledger import Ledger, kept
from tests.unit.test_engine_faults import kill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("forked_engines")]

OVERRIDES = (
    "environment.name=help_desk", "engine.memory_saver=true", "engine.health_seconds=0.05", "trainer.save_every=1",
    "algorithm.skip_zero_advantage=false", "engine.bucket_bytes=65536",
)  # fmt: skip
ENGINE = {"weights": 0.5, "kv_cache": 1.2, "cuda_graph": 0.1}
"""An engine's memory, in what the trainer has: too much to be there beside the trainer."""


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def train(
    workshop: Workshop, output: Path, patch: pytest.MonkeyPatch, ledger: Ledger, step: Callable[[int], None], *more: str
) -> None:
    """A run; ``step`` is called in the trainer's phase of every step, with its number."""
    kept(patch, ledger)
    learn = rl.learn

    def watched(*args: Any, version: int, **named: Any) -> dict[str, float]:
        ledger.step = version
        ledger.events.append(f"step {version}")
        step(version)
        return learn(*args, version=version, **named)

    patch.setattr(rl, "learn", watched)
    rl.train(load_config(workshop.recipe, [*OVERRIDES, f"output={output}", *more]))


def test_a_whole_run_keeps_to_one_gpu(workshop: Workshop, tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(activations=1.2, engine={tag: size / 2 for tag, size in ENGINE.items()}, capacity=2.4)

    def step(version: int) -> None:
        asked = ledger.released_probes
        ledger.until(lambda: ledger.released_probes > asked + 3, "probes of released engines")
        if version:  # one of the engines, then both
            for engine in [*ledger.engines.values()][-version:]:
                kill(engine.server)
                ledger.until(lambda engine=engine: engine.state is EngineState.STOPPED, "its end")  # type: ignore[misc]

    more = ("engine.count=2", "megatron.offload=true", "trainer.steps=3")
    train(workshop, tmp_path / "out", patch, ledger, step, *more, "trainer.evaluate_every=1", "evaluation.tasks=1")
    assert not ledger.violations, "\n".join(map(str, ledger.violations))
    lines = metrics_of(tmp_path / "out")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert {
        "memory/train_end_device_allocated_gib",
        "memory/train_end_device_reserved_gib",
    } <= lines[0].keys()
    assert lines[0]["memory/train_end_device_reserved_gib"] > lines[0]["memory/train_end_device_allocated_gib"] > 0
    assert lines[0]["memory/rollout_begin_device_reserved_gib"] < lines[0]["memory/train_end_device_allocated_gib"]
    assert lines[-1]["engine/restarts"] >= 3
    for path in ("/generate", "/health_generate", "/flush_cache", "/update_weights_from_tensor"):
        assert any(ledger.answered[label, path] for label in ledger.engines), path
    first = ledger.events[ledger.events.index("step 0") :]
    order = [
        "empty cache",
        "engine 0 takes weights",
        "empty cache",
        "engine 0 takes kv_cache",
        "engine 0 gives kv_cache",
    ]
    for event in order:  # sync, rollout, checkpoint
        first = first[first.index(event) + 1 :]


async def _probe_before_it_knew_of_memory(pool: EnginePool, engine: EngineHandle) -> bool:
    seconds = pool.config.control_seconds / _FAILED_PROBES
    if not engine.control.locked():
        async with engine.control:
            if engine.up:
                return await engine.client.answers("/health_generate", seconds)
    return not engine.up or await engine.client.answers("/model_info", seconds)


def _resumes_before_it_gives_back(phases: Phases) -> None:
    phases._rollouts.resume_memory(["kv_cache"])
    phases._learner.offload()


def _syncs_before_weights_are_there(phases: Phases, version: int) -> Any:
    report = phases._rollouts.update_weights(phases._learner.weights(), version)
    phases._rollouts.resume_memory(["weights"])
    phases._roll_out()
    return report


def _no_room(phases: Phases, **_: Any) -> None:
    phases._learner.give_back()
    phases._onload()


FAULTS: list[tuple[Any, str, Any, str]] = [
    (EnginePool, "_probe", _probe_before_it_knew_of_memory, "/health_generate touches the kv_cache and weights"),
    (device_memory, "give_back", lambda: None, "over-subscribed: engine 0 resumes"),
    (Phases, "_roll_out", _resumes_before_it_gives_back, "over-subscribed: engine 0 resumes"),
    (Phases, "sync", _syncs_before_weights_are_there, "/begin_weight_update touches the weights that"),
    (Phases, "_make_room", _no_room, "over-subscribed: engine 0 starts"),
]
"""One for each step after the first: what is replaced, by what, and what the ledger finds."""


def test_the_ledger_finds_what_is_planted(workshop: Workshop, tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(activations=1.2, engine=ENGINE, capacity=2.4)
    planted = pytest.MonkeyPatch()

    def step(version: int) -> None:
        planted.undo()
        if version:
            planted.setattr(*FAULTS[version - 1][:3])
        asked = ledger.answered.total()  # one probe: an engine that is paused leaves it unanswered
        ledger.until(lambda: ledger.answered.total() > asked, "a probe")
        if version == len(FAULTS):
            kill(ledger.engines["engine 0"].server)
            ledger.until(lambda: ledger.engines["engine 0"].state is EngineState.STOPPED, "its end")

    more = ("megatron.offload=true", "engine.control_seconds=15", f"trainer.steps={len(FAULTS) + 1}")
    try:
        train(workshop, tmp_path / "out", patch, ledger, step, *more)
    finally:
        planted.undo()
    found = [[v.what for v in ledger.violations if v.step == number] for number in range(len(FAULTS) + 1)]
    assert found[0] == [], found
    for (*_, expected), violations in zip(FAULTS, found[1:], strict=True):
        assert any(what.startswith(expected) for what in violations), (expected, violations)


def test_a_trainer_that_stays_gives_back_what_it_caches(
    workshop: Workshop, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    """Without ``megatron.offload`` engines roll out beside the trainer's tensors, not beside a step's activations."""
    ledger = Ledger(activations=1.2, engine=ENGINE, capacity=3.5)
    planted = pytest.MonkeyPatch()

    def step(version: int) -> None:
        if version:
            planted.setattr(device_memory, "give_back", lambda: None)

    try:
        train(workshop, tmp_path / "out", patch, ledger, step, "trainer.steps=2")
    finally:
        planted.undo()
    found = "\n".join(map(str, ledger.violations))
    assert {violation.step for violation in ledger.violations} == {1}, found
