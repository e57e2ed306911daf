"""Offloading the trainer between steps loses nothing and leaves nothing behind; who moves memory when.

Real Megatron on gloo ranks. Not covered: that a GPU's memory becomes free, and the engines' own release there.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mua.config.schema import EngineConfig, MegatronConfig
from mua.engine.engine_handle import EngineGone
from mua.engine.server import ALLOCATOR_VARIABLES, refuse_expandable_segments
from mua.megatron import device_memory
from mua.utils.errors import ConfigError
from tests.distributed import run_on_workers
from tests.megatron_support import backend, exported, make_batch, write_model

LAYOUTS: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"dtype": "bfloat16", "data_parallel": 2},
    {"dtype": "float32", "tensor_parallel": 2},
]


@pytest.mark.parametrize("settings", LAYOUTS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_training_goes_on_as_if_nothing_had_moved(settings: dict[str, Any], tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    world = settings.get("data_parallel", 1) * settings.get("tensor_parallel", 1)
    for result in run_on_workers(world, _train, tmp_path / "model", settings):
        assert result["left_on_device"] == 0
        assert result["offloaded"] > result["weights"], "gradients and optimizer were not offloaded"
        assert result["same_metrics"]
        assert result["different"] == []


def _train(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    histories, weights = [], []
    for moving in (False, True):
        with backend(folder, with_reference=True, **settings) as built:
            history = []
            for seed in range(3):
                history.append(_step(built, seed))
                if moving:
                    found |= _offload(built)
            histories.append(history)
            weights.append(exported(built))
    found["same_metrics"] = histories[0] == histories[1]
    found["different"] = [name for name in weights[0] if not np.array_equal(weights[0][name], weights[1][name])]
    return found


def _step(built: Any, seed: int) -> tuple[float, float, float]:
    from mua.algorithms.losses import CrossEntropyLoss

    batch = make_batch(seed=seed)
    metrics = built.train_step(batch, CrossEntropyLoss())
    reference = built.log_probabilities(batch.sequences, 1.0, reference=True)
    return metrics["train/loss"], metrics["train/grad_norm"], float(sum(values.sum() for values in reference))


def _offload(built: Any) -> dict[str, Any]:
    parameters = [parameter for chunk in built.policy.chunks for parameter in chunk.parameters()]
    weights = sum(parameter.nbytes for parameter in parameters)
    built.offload()
    built.offload()  # once more changes nothing
    left = sum(parameter.untyped_storage().nbytes() for parameter in parameters)
    nbytes = built._offloaded.nbytes
    built.onload()
    built.onload()
    return {"left_on_device": left, "offloaded": nbytes, "weights": weights}


class Recorder:
    """Stands for the policy and the rollout service; remembers what was asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.tags: set[str] = set()
        self.engines_up = 1
        self.lost_in_updates = 0
        self.making_room: Any = None

    def wait_for_engines(self) -> None:
        if not self.engines_up:
            self.calls.append("wait for an engine")
            self.engines_up = 1

    @property
    def released(self) -> bool:
        return bool(self.tags)

    def release_memory(self, tags: list[str]) -> None:
        self.calls.append("release " + " ".join(tags))
        self.tags |= set(tags)

    def resume_memory(self, tags: list[str]) -> None:
        self.calls.append("resume " + " ".join(tags))
        self.tags -= set(tags)

    def update_weights(self, weights: Any, version: int) -> str:
        self.calls.append(f"update {version}")
        if self.lost_in_updates:
            self.lost_in_updates -= 1
            self.engines_up = 0
            raise EngineGone("none is left")
        return "report"

    def weights(self) -> None:
        pass

    def offload(self) -> None:
        self.calls.append("offload")

    def onload(self) -> None:
        self.calls.append("onload")

    def give_back(self) -> None:
        self.calls.append("give back")


def phases(*, offload: bool, memory_saver: bool) -> tuple[Any, Recorder]:
    from mua.trainer.memory_phases import Phases

    recorder = Recorder()
    config = SimpleNamespace(engine=EngineConfig(memory_saver=memory_saver), megatron=MegatronConfig(offload=offload))
    return Phases(config, recorder, recorder), recorder  # type: ignore[arg-type]


def test_engines_and_trainer_take_turns() -> None:
    moved, recorder = phases(offload=True, memory_saver=True)
    moved.sync(0)
    with moved.training():
        recorder.calls.append("train")
    assert moved.sync(1) == "report"
    with moved.saving():
        recorder.calls.append("save")
    with recorder.making_room():
        recorder.calls.append("fill a restarted engine")
    assert recorder.calls == [
        "release kv_cache", "give back", "resume weights", "onload", "update 0", "offload", "resume kv_cache",
        "release kv_cache weights", "onload", "train",
        "release kv_cache", "give back", "resume weights", "onload", "update 1", "offload", "resume kv_cache",
        "release kv_cache", "onload", "save", "offload", "resume kv_cache",
        "release kv_cache", "onload", "fill a restarted engine", "offload", "resume kv_cache",
    ]  # fmt: skip
    in_use = moved.take()
    assert all(value > 0 for value in in_use.values())
    for phase in ("rollout_end", "train_begin", "train_end", "sync_begin", "sync_end", "save_end", "rollout_begin"):
        assert f"memory/{phase}_resident_gib" in in_use or f"memory/{phase}_device_free_gib" in in_use
    assert moved.take() == {}


def test_an_engine_that_died_in_training_finds_the_trainers_memory_free() -> None:
    moved, recorder = phases(offload=True, memory_saver=True)
    with moved.training():
        recorder.engines_up = 0
    recorder.calls.clear()
    moved.sync(1)
    assert recorder.calls == [
        "release kv_cache", "offload", "resume weights", "offload", "wait for an engine", "onload", "update 1",
        "offload", "resume kv_cache",
    ]  # fmt: skip


def test_when_the_last_engine_dies_in_an_update_the_trainer_makes_room_before_one_starts() -> None:
    moved, recorder = phases(offload=True, memory_saver=True)
    with moved.training():
        recorder.lost_in_updates = 1
    recorder.calls.clear()
    moved.sync(1)
    assert recorder.calls == [
        "release kv_cache", "give back", "resume weights", "onload", "update 1",
        "release kv_cache", "offload", "resume weights", "offload", "wait for an engine", "onload", "update 1",
        "offload", "resume kv_cache",
    ]  # fmt: skip


def test_without_the_two_settings_only_what_is_cached_is_given_back() -> None:
    moved, recorder = phases(offload=False, memory_saver=False)
    moved.sync(0)
    with moved.training():
        pass
    moved.sync(1)
    with moved.saving():
        pass
    assert recorder.calls == ["give back", "update 0", "give back", "give back", "update 1", "give back", "give back"]


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_expandable_segments_are_refused_where_memory_is_released_or_handed_on(name: str) -> None:
    value = "max_split_size_mb:512, expandable_segments : True"
    with pytest.raises(ConfigError, match=rf"^{name}={value}: .*engine\.memory_saver: true and engine\.transport"):
        refuse_expandable_segments(EngineConfig(memory_saver=True), {name: value})
    apart = EngineConfig(memory_saver=False, transport="broadcast")
    refuse_expandable_segments(apart, {name: value})
    refuse_expandable_segments(EngineConfig(memory_saver=True), {name: "expandable_segments:False"})


def test_a_rank_gives_back_what_it_caches_after_what_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    names = ("synchronize", "ipc_collect", "empty_cache")
    device = SimpleNamespace(**{name: lambda name=name: calls.append(name) for name in names})
    monkeypatch.setattr(device_memory, "torch_cuda", device)
    cycle = Recorder()
    cycle.calls.append(cycle)  # type: ignore[arg-type]
    weakref.finalize(cycle, calls.append, "freed")
    del cycle
    device_memory.give_back()
    assert calls == ["freed", "synchronize", "ipc_collect", "empty_cache"]
