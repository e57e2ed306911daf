"""Engines on machines of their own, as real processes: they join a run, leave it, are killed, and outlive its restart.

Two trainer ranks, `mua engines` three times, each at a loopback address of its own, weights by process group, training
while episodes run. Not covered: two real machines and their network (tests/slurm), NCCL.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from e2e_support import (
    DETERMINISTIC,
    GROUPS,
    SIZE,
    STEPS,
    Command,
    assert_nothing_left,
    assert_same_run,
    ended,
    finish,
    kill_group,
    metrics_of,
    running,
    until,
)

from mua.config.load import load_config
from mua.engine import SamplingParams
from mua.engine.engine_handle import EngineClient
from mua.rollout.service import RolloutService
from mua.store.traces import read_traces
from mua.trainer.learner import Learner
from tests.distributed import run_distributed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, stop_token_ids=())
KILLED_AT = 5
"""Requests to load a bucket, of two engines: in the middle of the third bucket."""
SEPARATE = (
    "placement=separate", "engine.health_seconds=1", "engine.leave_seconds=5", "engine.start_seconds=300",
    "trainer.silence_seconds=20",
)  # fmt: skip
ASYNCHRONOUS = (
    "trainer.max_staleness=1", "algorithm.correction=truncate", "algorithm.old_logprobs=recompute", "trainer.steps=400",
)  # fmt: skip


class Site:
    """A run's output folder, and machines that give it engines."""

    def __init__(self, recipe: Path, folder: Path, *overrides: str) -> None:
        self.folder, self.output = folder, folder / "out"
        self.command = (recipe, *SEPARATE, f"output={self.output}", *overrides)
        """Of all processes of the run; later overrides win."""

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
    site = Site(recipe, tmp_path, *ASYNCHRONOUS, "megatron.data_parallel=2", "engine.nodes=2")
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
        assert site.newest("engine/restarts") == 0
        kill_group(second)
        finish(second, site.place("machine-3"))
        until(lambda: site.newest("engine/nodes_lost") == 1, trainer, "a step after a machine was lost")
        steps = len(metrics_of(site.output))
        until(lambda: len(metrics_of(site.output)) > steps, trainer, "a step with the machine that is left")

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


def test_a_deterministic_run_depends_neither_on_the_placement_nor_on_a_machine_that_is_lost(
    recipe: Path, trained: Path, tmp_path: Path
) -> None:
    """The same bits as one process with one engine on its own machine (the fixture ``trained``)."""
    site = Site(recipe, tmp_path, *DETERMINISTIC, f"trainer.steps={STEPS}", "engine.nodes=2")
    with site.trainer("train", "trainer.keep=9") as trainer, site.machine(2) as first, site.machine(3) as second:
        until(lambda: metrics_of(site.output), trainer, "the first step")
        kill_group(second)
        finish(second, site.place("machine-3"))
        lines = ended(trainer, site.place("train"), 0)
        assert ended(first, site.place("machine-2"), 0) is not None
    assert any("the GPUs of one side always wait" in line for line in lines)
    assert_same_run(site.output, trained)


def _assert_nothing_lost(output: Path, steps: int) -> None:
    """Every group of every step was played to its end once, and no token is older than the bound."""
    assert [line["step"] for line in metrics_of(output)] == list(range(steps))
    ordinal = 0
    for step in range(steps):
        trajectories = list(read_traces(output / "traces" / f"step_{step:06d}.jsonl"))
        expected = [(ordinal + group, sample) for group in range(GROUPS) for sample in range(SIZE)]
        assert [(t.ordinal, t.sample) for t in trajectories] == expected
        ordinal += GROUPS
        for trajectory in trajectories:
            assert trajectory.outcome.scored, trajectory.outcome
            for segment in trajectory.segments:
                sampled = segment.version[segment.loss_mask]
                assert (sampled >= step - 1).all()
                assert (sampled <= step).all()


def test_weights_reach_every_machine_and_a_loss_on_the_way_has_them_sent_again(recipe: Path, tmp_path: Path) -> None:
    """Two tensor-parallel ranks feed two machines; during the second sync one of these is killed between buckets."""
    site = Site(
        recipe,
        tmp_path,
        "megatron.tensor_parallel=2",
        "engine.nodes=2",
        "engine.bucket_bytes=60000",
        "environment.name=help_desk",
    )
    with site.machine(2) as first, site.machine(3) as second:
        found = run_distributed(_sync_twice, 2, site.command, second.pid, seconds=500)[0]
        assert ended(first, site.place("machine-2"), 0) is not None
        finish(second, site.place("machine-3"))
    assert found["different"] == found["different_afterwards"] == []
    assert found["answers"][0] == found["answers"][1]
    assert found["versions"] == [3, 3]
    assert found["loads_before_the_kill"] == KILLED_AT
    assert found["versions_afterwards"] == [4]
    assert found["nodes"] == {"engine/nodes_joined": 2, "engine/nodes_left": 0, "engine/nodes_lost": 1}
    assert_nothing_left(tmp_path)


def _sync_twice(command: tuple[Any, ...], second: int) -> dict[str, Any]:
    import torch.distributed as dist

    rank = str(dist.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    config = load_config(command[0], command[1:])
    learner = Learner(config, total_steps=1)
    if rank != "0":
        learner.worker_loop()
        return {}
    with learner, RolloutService(config, hosts=learner.engine_hosts()) as rollouts:
        found: dict[str, Any] = {}
        rollouts.update_weights(learner.weights(), version=3)
        found["different"] = rollouts.verify_weights(learner.weights())
        answers = [rollouts._call(_ask(engine)) for engine in rollouts._pool._engines]
        found["answers"] = [answer.ids.tolist() for answer in answers]
        found["versions"] = [answer.version for answer in answers]
        loads = _kill_during_loads(second)
        rollouts.update_weights(learner.weights(), version=4)
        found["loads_before_the_kill"] = loads.index("killed")
        rollouts._call(_until(lambda: rollouts._pool.count_engines() == 1))
        found["different_afterwards"] = rollouts.verify_weights(learner.weights())
        found["versions_afterwards"] = [rollouts._call(_ask(engine)).version for engine in rollouts._pool._engines]
        metrics = rollouts.metrics()
        found["nodes"] = {name: value for name, value in metrics.items() if name.startswith("engine/nodes")}
        return found


def _kill_during_loads(process: int) -> list[str]:
    """Kill the group of ``process`` when engines were asked :data:`KILLED_AT` times to load a bucket."""
    asked, control = list[str](), EngineClient.control

    async def spied(self: EngineClient, path: str, body: Any, *, timeout: float) -> Any:
        if path == "/update_weights_from_distributed":
            if len(asked) == KILLED_AT:
                os.killpg(process, signal.SIGKILL)
                asked.append("killed")
            asked.append(path)
        return await control(self, path, body, timeout=timeout)

    EngineClient.control = spied  # type: ignore[method-assign]
    return asked


async def _ask(engine: Any) -> Any:
    return await engine.client.generate(f"x{engine.version}", [5, 60, 70, 8], GREEDY)


async def _until(true: Any) -> None:
    async with asyncio.timeout(200):
        while not true():
            await asyncio.sleep(0.1)
