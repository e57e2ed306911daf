"""Every recipe in ``configs/`` fits its machines, and the plan's own arithmetic.

Not covered: that the estimates hold on a GPU. Exact bytes are ``tests/parity/test_planned_bytes.py``.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from mua.cli import app
from mua.config.load import load_config
from mua.config.schema import ExperimentConfig
from mua.launch.plan.gpu_memory import engine_bytes, engine_weights
from mua.launch.plan.planner import Plan, forward_flops, make_plan, microbatches_per_rank
from mua.megatron.architecture import Architecture, Workload, architecture_of
from mua.types import TrainSequence
from tests.planned_support import MODELS, SHAPE
from tools.gpu_checks.steps import operations_of
from workbench.plan_tables import as_text
from workbench.shrink import shrunk

ROOT = Path(__file__).parents[2]
RECIPES = ("qwen3-32b-4x8-h200", "qwen3-8b-1x8", "qwen3-30b-a3b-2x8", "qwen3-235b-a22b-16x8")
SHRUNK = "model.shrink=true"


@pytest.fixture(autouse=True)
def _at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # recipes name the models' config.json relative to the repository
    for name in ("MUA_MODELS", "MUA_USER_BASE_URL", "MUA_USER_API_KEY", "MUA_USER_MODEL"):
        monkeypatch.delenv(name, raising=False)


def recipe(name: str, *overrides: str) -> ExperimentConfig:
    return load_config(Path("configs") / f"{name}.yaml", overrides)


@cache
def planned(name: str) -> Plan:
    return make_plan(recipe(name))


def test_no_recipe_is_forgotten() -> None:
    assert {path.stem for path in Path("configs").glob("*x8*.yaml")} == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_fits(name: str) -> None:
    plan = planned(name)
    assert plan.faults() == []
    assert plan.gpus == plan.config.megatron.world_size
    assert plan.running > 1, "episodes would wait for each other"
    # All GPUs roll out, and the stages hold the whole model.
    assert plan.servers * plan.config.engine.tensor_parallel == plan.gpus
    assert sum(stage.rank.layers for stage in plan.stages) == plan.architecture.layers


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [  # as on the models' pages, which round; active parameters there count the embedding too
        ("qwen3-32b-4x8-h200", 32.8e9, 32.8e9),
        ("qwen3-8b-1x8", 8.2e9, 8.2e9),
        ("qwen3-30b-a3b-2x8", 30.5e9, 3.35e9),
        ("qwen3-235b-a22b-16x8", 235.1e9, 22.2e9),
    ],
)
def test_architectures_are_those_published(name: str, parameters: float, active: float) -> None:
    architecture = architecture_of(recipe(name).model)
    assert architecture.parameters == pytest.approx(parameters, rel=0.005)
    embedding = architecture.vocabulary * architecture.hidden
    assert architecture.active_weights + embedding == pytest.approx(active, rel=0.015)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if "b-a" in name else name for name in RECIPES],  # with experts
)
def test_page_shows_the_plan(name: str) -> None:
    assert as_text(planned(name)) in Path("docs/planning.md").read_text(), "out of date; run `make docs`"


@pytest.mark.parametrize("name", RECIPES)
def test_shrunk_recipe_keeps_its_layout(name: str) -> None:
    config, plan = recipe(name), make_plan(*shrunk(recipe(name, SHRUNK)))
    assert plan.architecture.parameters < 3e6
    assert plan.architecture.hf_config["model_type"] == planned(name).architecture.hf_config["model_type"]
    for key in ("tensor", "pipeline", "context", "expert", "expert_tensor", "data"):
        assert getattr(plan.config.megatron, f"{key}_parallel") == getattr(config.megatron, f"{key}_parallel")
    assert plan.config.megatron.virtual_pipeline == config.megatron.virtual_pipeline
    assert plan.config.user.kind == "scripted"
    assert {stage.rank.layers for stage in plan.stages} == {1}


def test_too_much_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "configs/qwen3-32b-4x8-h200.yaml", "cluster.gpu=H100", "megatron.recompute=none"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 1
    assert "too much" in result.stdout
    assert "does not work: training needs" in result.stdout
    assert CliRunner().invoke(app, ["plan", "configs/qwen3-8b-1x8.yaml"]).exit_code == 0


def test_json_holds_what_the_tables_say() -> None:
    result = CliRunner().invoke(app, ["plan", "configs/qwen3-8b-1x8.yaml", "--json", "--every-rank"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert [rank["rank"] for rank in found["ranks"]] == list(range(8))
    assert found["faults"] == []
    # Ranks of one stage hold as much as the first, which stands for them without --every-rank.
    assert len({json.dumps(rank["bytes"]) for rank in found["ranks"]}) == 1


def plan_of(*overrides: str) -> tuple[Plan, dict[str, dict[str, int]]]:
    """Qwen3-8B's plan, and the parts of its phases by name."""
    plan = make_plan(recipe("qwen3-8b-1x8", *overrides))
    return plan, {phase.name: phase.parts for phase in plan.phases}


def test_trainer_in_host_memory_leaves_more_to_the_rollout() -> None:
    (here, before), (away, after) = (plan_of(f"megatron.offload={offload}") for offload in ("false", "true"))
    assert all(before["rollout"][name] for name in ("weights", "gradients", "optimizer", "reference"))
    assert after["rollout"].keys() == {"CUDA graphs", "engine weights", "KV cache", "engine working"}
    assert away.engine.tokens > here.engine.tokens
    assert after["training"] == before["training"]
    # The server was started before Adam had moments, and wants room for its activations too.
    assert here.faults()[0].startswith("rollout needs")
    assert here.host == 0
    held = away.stages[0].rank.bytes
    assert away.host == 8 * (held.parameters + held.main_weights + held.moments)


def test_options_of_the_optimizer_are_counted() -> None:
    plain = planned("qwen3-8b-1x8").stages[0].rank.bytes
    low = [f"optimizer.{key}=bfloat16" for key in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype")]
    found, _ = plan_of("optimizer.precision_aware=true", "megatron.grad_reduce_in_fp32=false", *low)
    aware = found.stages[0].rank.bytes
    assert (aware.main_weights, aware.moments) == (plain.main_weights // 2, plain.moments // 2)
    assert aware.gradients == plain.gradients // 2
    found, _ = plan_of("optimizer.cpu_offload_fraction=0.5")
    half = found.stages[0].rank.bytes
    assert (half.main_weights, half.moments) == (plain.main_weights // 2, plain.moments // 2)
    assert half.host == (2 * plain.main_weights + plain.moments) // 2
    assert found.host == 8 * (half.host + half.parameters + half.main_weights + half.moments)
    found, _ = plan_of("optimizer.cpu_offload_fraction=0.5", "cluster.host_gigabytes=100")
    assert "cluster.host_gigabytes 100; lower optimizer.cpu_offload_fraction" in found.faults()[0]


def test_options_of_layers_are_counted() -> None:
    plain, before = plan_of()
    engine, local = (plan_of(f"megatron.implementation={name}")[0] for name in ("transformer_engine", "local"))
    assert plain.stages == engine.stages
    assert plain.stages[0].activations["none"].kept < 0.8 * local.stages[0].activations["none"].kept
    float8, after = plan_of("megatron.fp8=hybrid")
    assert float8.stages[0].activations["none"].kept < plain.stages[0].activations["none"].kept
    linear = (plain.architecture.matrix_weights - plain.architecture.vocabulary * plain.architecture.hidden) // 4
    assert after["training"]["weights"] - before["training"]["weights"] == 2 * linear
    overlapped, after = plan_of("megatron.tp_comm_overlap=true")
    assert after["training"]["user buffers"] == 10 * 32768 * overlapped.architecture.hidden * 2
    _, after = plan_of("megatron.cuda_graphs=true", "megatron.recompute=none")
    assert 0 < after["rollout"]["CUDA graphs"] < after["training"]["activations"]
    waiting, _ = plan_of("megatron.recompute=none", "megatron.offload_activations=[qkv_linear, core_attn]")
    kept, none = (plan.stages[0].activations["none"] for plan in (waiting, plain))
    assert none.kept - kept.host < kept.kept < none.kept
    assert waiting.host == plain.host + 8 * kept.host


def test_flops_of_a_forward_pass_are_those_of_its_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = SHAPE | {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
    fields = {key: value for key, value in shape.items() if key != "architectures"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), attn_implementation="eager")
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, 128, dtype=torch.int64))
    architecture = Architecture.from_hf(shape)
    causal = 4 * architecture.layers * architecture.heads * architecture.head_dim * 128 / 2 * 128
    # Eager attention computes the masked half as well; rotary angles and the like are a per mille.
    assert counter.get_total_flops() == pytest.approx(forward_flops(architecture, 128, 128) + causal, rel=0.005)


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_transformers(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = MODELS[name] | {"vocab_size": 1024, "mlp_only_layers": []}  # no rows of padding
    fields = {key: value for key, value in shape.items() if key != "architectures"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    architecture = Architecture.from_hf(shape)
    assert architecture.parameters == sum(p.numel() for p in model.parameters())
    one_gpu = recipe("qwen3-8b-1x8", "engine.tensor_parallel=1")
    assert engine_weights(architecture, one_gpu) == 2 * architecture.parameters


def test_key_value_heads_are_copied_where_there_are_more_gpus() -> None:
    architecture = architecture_of(recipe("qwen3-235b-a22b-16x8").model)  # four of them
    tokens = [
        engine_bytes(architecture, recipe("qwen3-235b-a22b-16x8", f"engine.tensor_parallel={tp}"), 0).token
        for tp in (1, 2, 4, 8)
    ]
    assert tokens == [2 * 94 * 128 * 2 * heads for heads in (4, 2, 1, 1)]


def test_microbatches_of_a_step() -> None:
    half = recipe("qwen3-8b-1x8", "cluster.episode_tokens=16384")
    assert microbatches_per_rank(recipe("qwen3-8b-1x8")) == 128  # one of 256 episodes each, two replicas
    assert microbatches_per_rank(half) == 64
    assert microbatches_per_rank(recipe("qwen3-8b-1x8", "algorithm.minibatches=4")) == 32


def test_operations_of_a_step_are_those_of_tokens_that_meet_the_output_layer() -> None:
    """A policy's logits are computed for trained tokens alone, in the check on a GPU of what a step reaches."""
    architecture, ids = Architecture.from_hf(SHAPE), np.zeros(9, np.int32)
    none, some = (TrainSequence(ids, *np.array([[weight] * 9, *np.zeros((3, 9))], np.float32)) for weight in (0, 1))
    some.weights[:3] = 0
    output = 2 * architecture.vocabulary * architecture.hidden
    layers = Workload.of(architecture).operations([(0, 9)]) - 9 * output
    assert operations_of(architecture, [none]) == 3 * layers
    assert operations_of(architecture, [some, none]) == 3 * (2 * layers + 6 * output)
