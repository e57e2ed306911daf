"""An optimizer of which a share lies on the host, by Megatron's own ``HybridDeviceOptimizer``: it trains as one on the
device, alone and over data-parallel ranks, and checkpoints carry over between the two.

Here host and device are the same memory, so that copies are made between two parts of it. Not covered: pinned memory,
streams, and that memory of a GPU is freed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from mua.algorithms.losses import CrossEntropyLoss
from mua.trainer.learner import Learner
from tests.distributed import run_on_workers
from tests.megatron_support import OPTIMIZER, backend, exported, make_batch, write_model

LOSS = CrossEntropyLoss()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


def built(folder: str | Path, share: float, **settings: Any) -> Any:
    optimizer = OPTIMIZER.model_copy(update={"cpu_offload_fraction": share})
    return backend(Path(folder), dtype="bfloat16", optimizer=optimizer, **settings)


def stepped(learner: Learner, *seeds: int) -> list[float]:
    """Loss and gradient norm of a step on each of these batches, and a digest of the weights after them."""
    found = []
    for seed in seeds:
        metrics = learner.train_step(make_batch(seed=seed), LOSS)
        found += [metrics["train/loss"], metrics["train/grad_norm"]]
    weights = b"".join(values.tobytes() for _, values in sorted(exported(learner).items()))
    return [*found, float(int(hashlib.sha256(weights).hexdigest()[:12], 16))]


def trained(folder: str, share: float, settings: dict[str, Any]) -> list[float]:
    with built(folder, share, **settings) as learner:
        found = stepped(learner, 0, 1, 2)
        part = learner.policy.optimizer.megatron.chained_optimizers[0].optimizer
        if share:
            parts = {name: bool(getattr(part, name)) for name in ("cpu_optimizers", "gpu_optimizer")}
            assert parts == {"cpu_optimizers": True, "gpu_optimizer": share < 1}
        return found


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_a_share_on_the_host_trains_as_on_the_device(folder: Path, share: float) -> None:
    assert trained(str(folder), share, {}) == trained(str(folder), 0.0, {})


@pytest.mark.slow
def test_a_share_on_the_host_trains_alike_over_ranks(folder: Path) -> None:
    for settings in ({"data_parallel": 2}, {"tensor_parallel": 2}):
        on_host, on_device = (run_on_workers(2, trained, str(folder), share, settings) for share in (0.4, 0.0))
        assert on_host == on_device


@pytest.mark.parametrize(("saved", "loaded"), [(0.4, 0.4), pytest.param(0.4, 0.0, marks=pytest.mark.slow), (0.0, 1.0)])
def test_checkpoints_carry_over(folder: Path, tmp_path: Path, saved: float, loaded: float) -> None:
    with built(folder, saved) as learner:
        learner.save(tmp_path / "at first", {})  # before there is any state
        first = stepped(learner, 0, 1)
        learner.save(tmp_path / "later", {})
        later = stepped(learner, 2, 3)
    for name, seeds, expected in (("at first", (0, 1), first), ("later", (2, 3), later)):
        with built(folder, loaded) as learner:
            learner.load(tmp_path / name)
            assert stepped(learner, *seeds) == expected


def test_it_comes_back_from_host_memory_with_the_trainer(folder: Path) -> None:
    """``megatron.offload`` moves both parts of the state."""
    with built(folder, 0.4) as learner:
        found = []
        for seed in range(3):
            learner.offload()
            learner.onload()
            found += stepped(learner, seed)[:2]
    with built(folder, 0.4) as learner:
        assert found == stepped(learner, 0, 1, 2)[:-1]
