"""Where engines are, and who may join a run: refusals that name both sides, files that are stale, GPUs that lack.

Machines that join register with a real pool over HTTP; none of them starts an engine here, which
tests/e2e/test_separate.py has them do. GPUs are numbers: none is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from mua.config.load import load_config
from mua.config.schema import ExperimentConfig
from mua.engine import cluster, remote_worker
from mua.engine.cluster import ADDRESS_FILE, Address, Hosts, Joining, facts_of
from mua.engine.pool import EnginePool
from mua.engine.server import engine_server
from mua.utils.errors import ConfigError, EngineError, Preempted
from tests.engine_fixtures import write_qwen3

SEPARATE = ["placement=separate", "algorithm.correction=truncate", "algorithm.old_logprobs=recompute"]


def config_of(tmp_path: Path, *overrides: str) -> ExperimentConfig:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"name: p\noutput: {tmp_path}/out\nmodel: {{path: {tmp_path}/model, max_length: 512}}\n"
        "rollout: {max_tokens: 256}\nenvironment: {name: help_desk}\ntrainer: {steps: 1}\n"
    )
    return load_config(file, [*SEPARATE, *overrides])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["placement=colocated", "engine.nodes=1"], "engine.nodes 1 .*placement"),
        (["engine.transport=colocated"], "placement .*engine.transport"),
        (["engine.memory_saver=true"], "engine.memory_saver .*placement"),
        (["megatron.offload=true"], "megatron.offload .*placement"),
        (["placement=apart"], "placement"),
    ],
)
def test_keys_that_do_not_go_with_a_placement(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path, *overrides)


def test_transport_follows_the_placement(tmp_path: Path) -> None:
    assert config_of(tmp_path).engine.transport == "broadcast"
    assert config_of(tmp_path, "engine.transport=null").engine.transport == "broadcast"
    assert config_of(tmp_path, "placement=colocated").engine.transport == "colocated"
    assert config_of(tmp_path, "placement=colocated", "engine.transport=broadcast").engine.transport == "broadcast"


def test_engines_take_the_gpus_behind_the_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, "engine.count=2", "engine.tensor_parallel=2")
    first = cluster.first_engine_gpu(config, 4)
    servers = [
        engine_server(
            config.engine, dtype="bfloat16", context_length=64, seed=1, index=8 + place, place=place, first_gpu=first,
            log_folder=tmp_path, cuda=True,
        )
        for place in range(2)
    ]  # fmt: skip
    assert [server.arguments["base-gpu-id"] for server in servers] == [4, 6]


@pytest.mark.parametrize(
    ("overrides", "ranks", "gpus", "named"),
    [
        ([], 4, 8, None),
        ([], 4, 0, None),
        ([], 5, 8, r"5 .* engine\.count 2 x engine\.tensor_parallel 2 .* 9 "),
        ([], 8, 8, r"8: 0 .* engine\.count to 0"),
        (["engine.nodes=1"], 8, 8, None),
        (["placement=colocated", "engine.transport=broadcast"], 8, 8, "engine.transport: broadcast"),
    ],
)
def test_a_trainers_machine_has_gpus_for_its_engines(
    tmp_path: Path, overrides: list[str], ranks: int, gpus: int, named: str | None
) -> None:
    config = config_of(tmp_path, "engine.count=2", "engine.tensor_parallel=2", *overrides)
    with contextlib.nullcontext() if named is None else pytest.raises(ConfigError, match=named):
        cluster.check_trainer_machine(config, ranks=ranks, gpus=gpus)


@pytest.mark.parametrize(
    ("count", "tp", "named"),
    [(4, 2, None), (1, 3, r"engine\.tensor_parallel 3 .* 8 "), (8, 2, r"16 GPUs.* 8; set engine\.count to 4")],
)
def test_an_engine_node_is_filled_without_a_rest(tmp_path: Path, count: int, tp: int, named: str | None) -> None:
    config = config_of(tmp_path, f"engine.count={count}", f"engine.tensor_parallel={tp}")
    with contextlib.nullcontext() if named is None else pytest.raises(ConfigError, match=named):
        cluster.check_engine_machine(config, gpus=8)


def test_a_run_is_reached_by_the_address_that_other_machines_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert cluster.trainer_address(config_of(tmp_path).engine) == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "node-7")
    assert cluster.trainer_address(config_of(tmp_path, "engine.nodes=1").engine) == "node-7"
    assert (
        cluster.trainer_address(config_of(tmp_path, "engine.nodes=1", "engine.address=10.0.0.9").engine) == "10.0.0.9"
    )


# ---- joining


@contextlib.asynccontextmanager
async def open_run(config: ExperimentConfig, nodes: int = 0, **facts: str) -> AsyncIterator[EnginePool]:
    """A run without engines of its own, which machines may join; it waits for ``nodes`` of them."""
    joins = Joining("127.0.0.1", config.output, facts_of(config) | facts, nodes)
    pool = EnginePool(
        config.engine, dtype="bfloat16", context_length=512, seed=1, log_folder=config.output / "logs",
        hosts=Hosts("the-key", own=False, joining=joins),
    )  # fmt: skip
    await pool.start(config.model.path)
    try:
        yield pool
    finally:
        await pool.stop()


async def joined(config: ExperimentConfig) -> int:
    """Number of the first engine of a machine with ``config``."""
    member = remote_worker._Membership(config, lambda: False, None)
    await member._join()
    return member._first


async def test_machines_are_numbered_and_the_address_is_private_and_taken_back(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "model", 0)
    config = config_of(tmp_path, "engine.count=2")
    file = config.output / ADDRESS_FILE
    async with open_run(config):
        assert file.stat().st_mode & 0o777 == 0o600
        assert await joined(config) == 0
        other = remote_worker._Membership(config, lambda: False, None)
        other._name = "another:1"
        await other._join()
        assert other._first == 2
    assert not file.exists()


@pytest.mark.parametrize(
    ("overrides", "both_sides"),
    [
        (["engine.tensor_parallel=2"], r"engine\.tensor_parallel: .* 1, .* 2"),
        (["model.dtype=float32"], r'model\.dtype: .* "bfloat16", .* "float32"'),
        (["engine.extra={schedule_policy: lpm}"], r"engine\.extra: .* {}, .* {\"schedule_policy"),
        (["seed=9"], r"seed: .* 1, .* 9"),
        (["model.path={}/other"], r"model\.path: .* model \w+, .* model \w+"),
        (["engine.count=4", "engine.start_seconds=5", "engine.leave_seconds=1"], None),
    ],
)
async def test_a_machine_of_another_configuration_is_refused(
    tmp_path: Path, overrides: list[str], both_sides: str | None
) -> None:
    write_qwen3(tmp_path / "model", 0)
    write_qwen3(tmp_path / "other", 0, tied=True)
    other = config_of(tmp_path, *(one.replace("{}/", f"{tmp_path}/") for one in overrides))
    async with open_run(config_of(tmp_path)):
        with contextlib.nullcontext() if both_sides is None else pytest.raises(ConfigError, match=both_sides):
            assert await joined(other) == 0


async def test_address_files_that_are_not_this_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_worker, "_KEY_SECONDS", 0.0)
    monkeypatch.setattr(remote_worker, "_LOOK_SECONDS", 0.02)
    write_qwen3(tmp_path / "model", 0)
    config = config_of(tmp_path, "engine.start_seconds=0.2")
    file = config.output / ADDRESS_FILE
    with pytest.raises(EngineError, match=r"address: .*engine.start_seconds = 0.2") as missing:
        await joined(config)
    assert missing.value.passing
    async with open_run(config, sglang="0.1"):
        with pytest.raises(ConfigError, match=r"sglang: .* 0\.1, .* \d"):
            await joined(config)
    async with open_run(config):
        found = Address.read(file)
        assert found is not None
        replace(found, key="another").write(file)
        with pytest.raises(ConfigError, match=r"address: .* key"):
            await joined(config)
    found.write(file)
    with pytest.raises(EngineError, match=r"address: .*process \d+ on"):
        await joined(config)
    file.write_text(json.dumps({"url": "x"}))
    with pytest.raises(EngineError, match="address: "):
        await joined(config)


async def test_a_machine_leaves_before_it_has_joined(tmp_path: Path) -> None:
    with pytest.raises(Preempted):
        await remote_worker._Membership(config_of(tmp_path), lambda: True, None)._join()


async def test_a_run_without_engines_waits_for_machines_and_then_ends(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "model", 0)
    config = config_of(tmp_path, "engine.start_seconds=0.3")
    with pytest.raises(EngineError, match=r"engine.nodes = 2 .* engine.start_seconds = 0.3"):
        async with open_run(config, nodes=2):
            pass
    async with open_run(config) as alone:
        while alone.failure is None:
            await asyncio.sleep(0.05)
        assert "engine.start_seconds" in str(alone.failure)
