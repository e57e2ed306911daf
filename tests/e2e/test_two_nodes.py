"""Engines on two machines, emulated by torchrun's variables on this one: two ranks, each the leader of its machine.

Rank 1 hosts an engine of its own; rank 0 samples from both, syncs both, and notices when the other one dies. Both
transports. Not covered: two real machines and their network (tests/slurm starts two nodes, still on one host).
"""

from __future__ import annotations

import asyncio
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e_support import Workshop, assert_nothing_left

from mua.config.load import load_config
from mua.engine import SamplingParams
from mua.rollout.service import RolloutService
from mua.trainer.learner import Learner
from tests.distributed import run_distributed

pytestmark = pytest.mark.timeout(900)

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, stop_token_ids=())
PROMPT = [5, 60, 70, 8]


@pytest.mark.parametrize(
    "transport",
    [pytest.param("colocated", marks=pytest.mark.slow), pytest.param("broadcast", marks=pytest.mark.grid)],
)
def test_engines_of_two_machines(workshop: Workshop, tmp_path: Path, transport: str) -> None:
    found = run_distributed(_run, 2, workshop.recipe, tmp_path, transport, seconds=700)[0]
    assert found["nodes"] == [0, 1]
    assert found["different"] == []
    assert found["answers"][0] == found["answers"][1]
    assert found["versions"] == [3, 3]
    assert found["refused"] == [401, 401]
    assert found["restarts"] == [0, 1]
    assert found["different_after_restart"] == []
    assert found["versions_after_restart"] == [3, 3]
    assert found["key_in_command_line"] is False
    report = found["report"]
    engines = 2 * report.bytes if transport == "broadcast" else 0
    # Tensor parallelism over the two machines: a root lacks what the other rank alone has. Where rank 0 alone feeds
    # that is less than one model, with two roots less than two.
    assert 0 < report.moved - engines < report.bytes * (1 if engines else 2)
    assert report.needed == report.moved
    assert_nothing_left(tmp_path)


def _run(recipe: Path, folder: Path, transport: str) -> dict[str, Any]:
    import torch.distributed as dist

    rank = str(dist.get_rank())
    os.chdir(folder)
    os.environ |= {"RANK": rank, "WORLD_SIZE": "2", "GROUP_RANK": rank, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    config = load_config(
        recipe,
        [
            f"output={folder}/out", "megatron.tensor_parallel=2", f"engine.transport={transport}",
            "engine.bucket_bytes=100000", "engine.start_seconds=500", "environment.name=help_desk",
        ],
    )  # fmt: skip
    learner = Learner(config, total_steps=1)
    if rank != "0":
        learner.worker_loop()
        return {}
    with learner, RolloutService(config, hosts=learner.engine_hosts()) as rollouts:
        return _lead(learner, rollouts)


def _lead(learner: Learner, rollouts: RolloutService) -> dict[str, Any]:
    engines = rollouts._pool._engines
    found: dict[str, Any] = {"nodes": [engine.node for engine in engines]}
    found["report"] = rollouts.update_weights(learner.weights(), version=3)
    found["different"] = rollouts.verify_weights(learner.weights())
    answers = [rollouts._call(_ask(engine)) for engine in engines]
    found["answers"] = [answer.ids.tolist() for answer in answers]
    found["versions"] = [answer.version for answer in answers]
    found["refused"] = [
        _status(engines[1].server.url + "/get_model_info"),
        _status(engines[1].server._host + "/status"),
    ]
    launcher = _launcher(engines[1].server.url)
    key = engines[1].server.api_key
    found["key_in_command_line"] = any(
        key in " ".join(process.cmdline()) for process in [launcher, *launcher.parents(), *launcher.children()]
    )
    launcher.kill()
    rollouts._attend(_until(lambda: engines[1].restarts == 1 and engines[1].state.value == "serving"))
    found["restarts"] = [engine.restarts for engine in engines]
    found["different_after_restart"] = rollouts.verify_weights(learner.weights())
    found["versions_after_restart"] = [rollouts._call(_ask(engine)).version for engine in engines]
    return found


async def _ask(engine: Any) -> Any:
    return await engine.client.generate("x" + str(engine.restarts), PROMPT, GREEDY)


async def _until(true: Any) -> None:
    async with asyncio.timeout(500):
        while not true():
            await asyncio.sleep(0.2)


def _status(url: str) -> int:
    """Status of a request that carries no key."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def _launcher(url: str) -> psutil.Process:
    """The HTTP process of the server at ``url``: of those that name its port, the one below the guardian."""
    port = url.rpartition(":")[2]
    named = [p for p in psutil.process_iter(["cmdline"]) if f"--port {port}" in " ".join(p.info["cmdline"] or ())]
    (launcher,) = [process for process in named if "guardian" not in " ".join(process.cmdline())]
    return launcher
