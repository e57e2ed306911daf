"""Layouts that a model or a cluster cannot have are refused.

Not covered: layouts that divide but are not proven, which are ``mua.megatron.layouts``' to refuse (one case here).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mua.config.load import load_config
from mua.config.schema import ExperimentConfig
from mua.launch.plan import layout
from mua.launch.plan.layout import check_possible
from mua.launch.plan.planner import make_plan
from mua.megatron.architecture import architecture_of
from mua.utils.errors import ConfigError, MuaError

CONFIGS = Path(__file__).parents[2] / "configs"
DENSE, MOE, LARGE = "qwen3-32b-4x8-h200", "qwen3-30b-a3b-2x8", "qwen3-235b-a22b-16x8"


def recipe(name: str, *overrides: str) -> ExperimentConfig:
    at = f"model.hf_config={CONFIGS / 'models' / architecture_folder(name)}"
    return load_config(CONFIGS / f"{name}.yaml", ["model.path=nowhere", at, *overrides])


def architecture_folder(name: str) -> str:
    return {DENSE: "Qwen3-32B", MOE: "Qwen3-30B-A3B", LARGE: "Qwen3-235B-A22B"}[name]


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (DENSE, ["tensor_parallel=3"], "neither a divisor nor a multiple of the model's 8 key-value heads"),
        (DENSE, ["tensor_parallel=16", "data_parallel=2"], "tensor_parallel 16 spans nodes of 8 GPUs"),
        (DENSE, ["data_parallel=3"], "24 ranks, but cluster.nodes 4 x gpus_per_node 8 are 32 GPUs"),
        (DENSE, ["expert_parallel=2"], "expert_parallel 2 needs a model with experts"),
        (LARGE, ["first_stage_layers=null", "last_stage_layers=null"],
         "pipeline_parallel 8 does not divide the model's 94 layers; possible: first_stage_layers 11, "
         "last_stage_layers 11 (and 12 in each other)"),
    ],
)  # fmt: skip
def test_impossible_layouts_are_refused(name: str, overrides: list[str], message: str) -> None:
    config = recipe(name, *(f"megatron.{override}" for override in overrides))
    architecture = architecture_of(config.model)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_possible(architecture, config)


def test_layout_without_proof_is_refused() -> None:
    sizes: dict[str, Any] = {"tensor_parallel": 1, "context_parallel": 2, "pipeline_parallel": 2, "data_parallel": 4}
    overrides = [f"megatron.{key}={value}" for key, value in sizes.items()]
    with pytest.raises(MuaError, match="no run has proven the layout"):
        make_plan(recipe(MOE, *overrides, "megatron.expert_parallel=4", "megatron.virtual_pipeline=2"))


def separate(*overrides: str) -> ExperimentConfig:
    off = ["engine.memory_saver=false", "megatron.offload=false"]
    return recipe(DENSE, *off, "placement=separate", *overrides)


def test_engines_on_gpus_of_their_own_are_counted_apart() -> None:
    nodes = separate("engine.nodes=2", "cluster.nodes=6")
    assert (layout.trainer_gpus(nodes), layout.engine_gpus(nodes), layout.gpus(nodes)) == (32, 16, 48)
    beside = separate("engine.count=1", "engine.tensor_parallel=4", "megatron.tensor_parallel=4")
    assert (layout.trainer_gpus(beside), layout.engine_gpus(beside), layout.gpus(beside)) == (16, 16, 32)
    for config in (nodes, beside):
        check_possible(architecture_of(config.model), config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine.count=2", "engine.tensor_parallel=4"], "have 8 GPUs of each node .* so that 0 are left"),
        (["engine.nodes=1"], "are 32 GPUs, of which engines on GPUs of their own have engine.nodes 1, so that 24"),
        (["engine.nodes=4"], "engine.nodes 4 of cluster.nodes 4 leave no node to the trainer"),
        (
            ["engine.nodes=1", "cluster.nodes=5", "engine.tensor_parallel=16"],
            "tensor_parallel 16 does not divide the 8 GPUs of a node",
        ),
    ],
)
def test_no_gpus_left_for_the_one_or_the_other(overrides: list[str], message: str) -> None:
    config = separate(*overrides)
    with pytest.raises(ConfigError, match=message):
        check_possible(architecture_of(config.model), config)


def test_trainer_and_engine_share_no_gpu_in_separate_placement() -> None:
    plan = make_plan(separate("engine.nodes=2", "cluster.nodes=6"))
    for phase in plan.phases:
        of_engine = {"engine weights", "KV cache", "engine working"} & phase.parts.keys()
        assert bool(of_engine) == (phase.rank < 0)
        assert ("weights" in phase.parts) == (phase.rank >= 0)
    colocated = make_plan(recipe(DENSE))
    assert plan.servers == 2 * colocated.servers // 4
    assert plan.engine.cache > colocated.engine.cache * 0.9
