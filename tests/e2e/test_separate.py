"""Engines on machines of their own, as real processes: they join a run, leave it, are killed, and outlive its restart.

Two trainer ranks, `mua engines` three times, each at a loopback address of its own, weights by process group, training
while episodes run. Not covered: two real machines and their network (tests/slurm), NCCL.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from e2e_support import (
    GROUPS,
    SIZE,
    Command,
    assert_nothing_left,
    ended,
    finish,
    kill_group,
    metrics_of,
    running,
    until,
)

from mua.observe.traces import read_traces

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEPARATE = (
    "placement=separate", "trainer.max_staleness=1", "algorithm.correction=truncate",
    "algorithm.old_logprobs=recompute", "engine.health_seconds=1", "engine.leave_seconds=5",
    "trainer.silence_seconds=6", "engine.start_seconds=300", "trainer.steps=400", "trainer.keep=1",
)  # fmt: skip


class Site:
    """A run's output folder, and machines that give it engines."""

    def __init__(self, recipe: Path, folder: Path, *overrides: str) -> None:
        self.folder, self.output = folder, folder / "out"
        self.command = (recipe, *SEPARATE, f"output={self.output}", *overrides)

    @contextmanager
    def trainer(self, verb: str = "train", *overrides: str) -> Iterator[Command]:
        with running(verb, *self.command, *overrides, cwd=self.place(verb)) as process:
            yield process

    @contextmanager
    def machine(self, number: int, *flags: str) -> Iterator[Command]:
        cwd = self.place(f"machine-{number}")
        with running("engines", *self.command, "--host", f"127.0.0.{number}", *flags, cwd=cwd) as process:
            yield process

    def place(self, name: str) -> Path:
        (self.folder / name).mkdir(exist_ok=True)
        return self.folder / name

    def newest(self, metric: str) -> float:
        lines = metrics_of(self.output)
        return float(lines[-1][metric]) if lines else 0.0


def test_machines_come_and_go_while_a_run_goes_on(recipe: Path, tmp_path: Path) -> None:
    site = Site(recipe, tmp_path, "megatron.data_parallel=2", "engine.nodes=2")
    with ExitStack() as stack:
        trainer = stack.enter_context(site.trainer())
        first, second = (stack.enter_context(site.machine(number)) for number in (2, 3))
        until(lambda: metrics_of(site.output), trainer, "the first step")
        address = site.output / "engines" / "address"
        assert address.stat().st_mode & 0o777 == 0o600
        third = stack.enter_context(site.machine(4, "--rejoin"))
        until(lambda: site.newest("engine/serving") == 3, trainer, "a third machine's engine in use")

        first.send_signal(signal.SIGTERM)
        assert ended(first, site.place("machine-2"), 75)[-1].startswith("mua: asked to leave by a signal")
        until(lambda: site.newest("engine/nodes_left") == 1, trainer, "a step after a machine left")
        kill_group(second)
        finish(second, site.place("machine-3"))
        until(lambda: site.newest("engine/nodes_lost") == 1, trainer, "a step after a machine was lost")
        steps = len(metrics_of(site.output))
        until(lambda: len(metrics_of(site.output)) > steps, trainer, "a step with the machine that is left")
        assert site.newest("engine/restarts") == 0

        kill_group(trainer)
        finish(trainer, site.place("train"))
        until(lambda: "waiting for the run" in (site.place("machine-4") / "stderr").read_text(), third, "its loss")
        assert address.exists()
        steps = len(metrics_of(site.output))
        last = f"trainer.steps={steps + 2}"
        with site.trainer("train", last, "engine.nodes=1") as again:
            assert ended(again, site.place("train"), 0) is not None
        assert ended(third, site.place("machine-4"), 0) is not None
    assert not address.exists()
    assert_nothing_left(tmp_path)
    _assert_nothing_lost(site.output, steps + 2)


def _assert_nothing_lost(output: Path, steps: int) -> None:
    """Every group of every step was scored in full, and no token is older than the bound."""
    lines = metrics_of(output)
    assert [line["step"] for line in lines] == list(range(steps))
    found = {}
    for path in sorted((output / "traces").glob("*")):
        for trajectory in read_traces(path):
            found[(trajectory.ordinal, trajectory.sample)] = trajectory
    assert sorted(found) == [(o, s) for o in range(steps * GROUPS) for s in range(SIZE)]


__all__ = ["json", "os"]
