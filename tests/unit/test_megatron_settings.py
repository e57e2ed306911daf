"""Megatron-Core's settings from configuration and capabilities: what a machine would get, asked on a CPU.

Not covered: that Transformer Engine's kernels compute what the settings say; no GPU is here.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_bridge.plan import transformer_config_kwargs
from mua.config.schema import ExperimentConfig, MegatronConfig, ModelConfig, OptimizerConfig
from mua.megatron import settings
from mua.megatron.architecture import Workload
from mua.megatron.packing import Alignment, pack
from mua.megatron.settings import Capabilities, Options, implementation_of
from mua.utils.errors import ConfigError
from tests.planned_support import EXPERTS, SHAPE
from tools.goldens import installed

GPU = Capabilities(cuda=True, compute=(9, 0), torch="2.14.1", transformer_engine="2.20.2")
BARE_GPU = Capabilities(cuda=True, compute=(9, 0), torch="2.14.1")
CPU = Capabilities(cuda=False, torch="2.14.1+cpu")


@pytest.mark.parametrize(
    ("implementation", "machine", "expected"),
    [
        ("auto", GPU, "transformer_engine"),
        ("auto", BARE_GPU, "local"),
        ("auto", CPU, "local"),
        ("auto", Capabilities(cuda=False, transformer_engine="2.20.2"), "local"),
        ("local", GPU, "local"),
        ("transformer_engine", GPU, "transformer_engine"),
    ],
)
def test_implementation(implementation: str, machine: Capabilities, expected: str) -> None:
    assert implementation_of(MegatronConfig.model_validate({"implementation": implementation}), machine) == expected


BARE_CPU = Capabilities(cuda=False, transformer_engine="2.20.2")
OLD, NEW, ODD = (Capabilities(cuda=True, transformer_engine=version) for version in ("1.13.0", "3.0", "main"))
AMPERE = dataclasses.replace(GPU, compute=(8, 0))
FUSED_GRADIENTS = {"gradient_accumulation_fusion": True}


@pytest.mark.parametrize(
    ("asked", "machine", "named"),
    [
        (
            {"implementation": "transformer_engine"},
            BARE_GPU,
            r"megatron\.implementation .*constraints/gpu-py312-cu\.txt",
        ),
        ({"implementation": "transformer_engine"}, BARE_CPU, "CUDA"),
        ({"implementation": "auto"}, OLD, r"1\.13\.0.*>=2\.9\.0,<3"),
        ({"implementation": "auto"}, NEW, r"3\.0.*>=2\.9\.0,<3"),
        ({"implementation": "auto"}, ODD, "main"),
        ({"rope_fusion": True}, CPU, "rope_fusion .*CUDA"),
        ({"moe_permute_fusion": True}, BARE_GPU, "moe_permute_fusion .*Transformer Engine"),
        ({"fp8": "hybrid"}, BARE_GPU, r"megatron\.fp8 .*Transformer Engine"),
        ({"fp8": "hybrid"}, AMPERE, r"9\.0 .*8\.0"),
        ({"cuda_graphs": True, "recompute": "none"}, CPU, r"megatron\.cuda_graphs"),
        (FUSED_GRADIENTS, GPU, "fused_weight_gradient_mlp_cuda"),
        (FUSED_GRADIENTS, dataclasses.replace(CPU, apex=True), "CUDA device"),
    ],
)
def test_what_the_machine_lacks_is_one_error(asked: dict[str, Any], machine: Capabilities, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Options.of(MegatronConfig(**asked), machine)


OFFLOADED_EXPERTS = {"offload_activations": ["moe_act"], "recompute": "selective", "recompute_modules": ["moe"]}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"implementation": "local", "fp8": "e4m3"}, "fp8 .*implementation"),
        ({"overlap_param_gather": True, "distributed_optimizer": False}, "distributed_optimizer"),
        ({"overlap_param_gather": True, "overlap_grad_reduce": False}, "overlap_grad_reduce"),
        ({"tp_comm_overlap": True}, "tp_comm_overlap .*tensor_parallel"),
        ({"tp_comm_overlap": True, "tensor_parallel": 2, "context_parallel": 2}, "context_parallel"),
        ({"cuda_graphs": True, "merge_prefixes": True}, "cuda_graphs .*merge_prefixes"),
        ({"cuda_graphs": True, "recompute": "full"}, "cuda_graphs .*recompute"),
        ({"cuda_graphs": True, "recompute": "selective"}, "cuda_graphs .*recompute"),
        ({"moe_router_fusion": True, "routing_replay": "check"}, "routing_replay"),
        ({"fp8_param_gather": True}, "fp8_param_gather .*fp8"),
        ({"offload_activations": ["qkv_linear"], "recompute": "full"}, "recompute"),
        ({"offload_activations": ["attn_proj"]}, "attn_proj .*core_attn"),
        (OFFLOADED_EXPERTS, "moe_act .*recompute_modules"),
    ],
)
def test_what_does_not_go_together_is_one_error(asked: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        MegatronConfig(**asked)


LOW = {"exp_avg_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("optimizer", "megatron", "dtype", "named"),
    [
        (LOW, {}, "bfloat16", "exp_avg_dtype .*precision_aware"),
        (LOW | {"precision_aware": True, "cpu_offload_fraction": 0.5}, {}, "bfloat16", "cpu_offload_fraction"),
        ({"precision_aware": True}, {"distributed_optimizer": False}, "bfloat16", "distributed_optimizer"),
        ({"cpu_offload_fraction": 1.0}, {}, "float32", r"cpu_offload_fraction .*model\.dtype"),
        ({"precision_aware": True, "main_grads_dtype": "bfloat16"}, {}, "bfloat16", "grad_reduce_in_fp32"),
        ({"precision_aware": True}, {"grad_reduce_in_fp32": False}, "bfloat16", "grad_reduce_in_fp32"),
        ({"cpu_offload_fraction": 0.5}, {"fp8": "hybrid", "fp8_param_gather": True}, "bfloat16", "fp8_param_gather"),
    ],
)
def test_optimizers_that_cannot_be_are_one_error(
    optimizer: dict[str, Any], megatron: dict[str, Any], dtype: str, named: str
) -> None:
    experiment = {
        "name": "x", "output": "x", "model": {"path": "x", "dtype": dtype}, "environment": {"name": "retail"},
        "trainer": {"steps": 1}, "optimizer": optimizer, "megatron": megatron,
    }  # fmt: skip
    with pytest.raises(ValueError, match=named):
        ExperimentConfig.model_validate(experiment)


@pytest.mark.parametrize(("machine", "on"), [(GPU, True), (BARE_GPU, False), (CPU, False)])
def test_what_is_left_open_takes_what_the_machine_has(machine: Capabilities, on: bool) -> None:
    found = Options.of(MegatronConfig(data_parallel=2), machine, experts=True)
    engine = ("rope_fusion", "moe_permute_fusion", "moe_router_fusion")
    assert {getattr(found, key) for key in engine} == {on}
    assert {found.swiglu_fusion, found.overlap_grad_reduce, found.overlap_param_gather} == {machine.cuda}
    assert not found.gradient_accumulation_fusion
    with_apex = dataclasses.replace(machine, apex=True)
    assert Options.of(MegatronConfig(), with_apex).gradient_accumulation_fusion == machine.cuda
    assert not Options.of(MegatronConfig(), machine).overlap_grad_reduce, "there is one rank"
    assert not Options.of(MegatronConfig(data_parallel=2), machine).moe_router_fusion, "there are no experts"
    replayed = MegatronConfig(routing_replay="replay")
    assert not Options.of(replayed, machine, experts=True).moe_router_fusion
    plain = MegatronConfig(data_parallel=2, distributed_optimizer=False)
    assert not Options.of(plain, machine).overlap_param_gather


def config_of(model: dict[str, Any] = SHAPE, dtype: str = "bfloat16", **megatron: Any) -> Any:
    """Megatron's configuration on a GPU with Transformer Engine."""
    with installed(GPU.transformer_engine):
        return settings.transformer_config(
            transformer_config_kwargs(model),
            ModelConfig(path=Path("x"), dtype=dtype),  # type: ignore[arg-type]
            MegatronConfig(**megatron),
            GPU,
        )


def test_options_reach_megatron() -> None:
    plain, experts = config_of(), config_of(SHAPE | EXPERTS)
    assert (plain.transformer_impl, plain.apply_rope_fusion, plain.bias_activation_fusion) == (
        "transformer_engine", True, True,
    )  # fmt: skip
    assert not plain.cross_entropy_loss_fusion
    assert (experts.moe_grouped_gemm, experts.moe_permute_fusion, experts.moe_router_fusion) == (True, True, True)
    float8 = config_of(fp8="hybrid", fp8_param_gather=True)
    assert (float8.fp8, float8.fp8_recipe, float8.fp8_param) == ("hybrid", "blockwise", True)
    graphs = config_of(cuda_graphs=True)
    assert (graphs.cuda_graph_impl, [module.name for module in graphs.cuda_graph_modules]) == ("local", ["mlp"])
    again = config_of(SHAPE | EXPERTS, recompute="selective", recompute_modules=["moe_act", "layernorm"])
    assert (again.recompute_granularity, again.recompute_modules) == ("selective", ["moe_act", "layernorm"])
    dense = config_of(recompute="selective", recompute_modules=["moe_act", "mlp"])
    assert dense.recompute_modules == ["mlp"], "a dense model has no experts to recompute"
    assert config_of(recompute="selective", recompute_modules=["moe"]).recompute_granularity is None
    away = config_of(offload_activations=["qkv_linear", "core_attn"])
    assert (away.fine_grained_activation_offloading, away.offload_modules) == (True, ["qkv_linear", "core_attn"])
    with pytest.raises(ConfigError, match=r"fp8 needs model\.dtype bfloat16"):
        config_of(dtype="float32", fp8="e4m3")
    local = MegatronConfig(implementation="local", recompute="selective", recompute_modules=["moe_act"])
    with pytest.raises(ConfigError, match="moe_act needs Transformer Engine"):
        settings.transformer_config(transformer_config_kwargs(SHAPE | EXPERTS), ModelConfig(path=Path("x")), local, CPU)


def test_options_reach_buckets_and_optimizer() -> None:
    megatron = MegatronConfig(data_parallel=2, ddp_bucket_size=1000, grad_reduce_in_fp32=False)
    found = settings.data_parallel_config(megatron, GPU)
    assert (found.overlap_grad_reduce, found.overlap_param_gather, found.bucket_size) == (True, True, 1000)
    assert not found.grad_reduce_in_fp32
    low: Any = {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "float16", "main_grads_dtype": "bfloat16"}
    with installed(GPU.transformer_engine):
        asked = OptimizerConfig(precision_aware=True, **low)
        aware = settings.optimizer_config(asked, torch.bfloat16, megatron, GPU)
    assert (aware.use_precision_aware_optimizer, aware.optimizer_cpu_offload) == (True, False)
    assert (aware.exp_avg_dtype, aware.exp_avg_sq_dtype) == (torch.bfloat16, torch.float16)
    assert aware.main_grads_dtype == torch.bfloat16
    with pytest.raises(ConfigError, match=r"critic\.optimizer\.precision_aware needs Transformer Engine's fused Adam"):
        settings.optimizer_config(asked, torch.bfloat16, megatron, BARE_GPU, section="critic.optimizer")
    half = settings.optimizer_config(OptimizerConfig(cpu_offload_fraction=0.5), torch.bfloat16, megatron, BARE_GPU)
    assert (half.optimizer_cpu_offload, half.optimizer_offload_fraction) == (True, 0.5)


def test_offloaded_activations_want_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVTE_CPU_OFFLOAD_V1", raising=False)
    megatron, model = MegatronConfig(offload_activations=["qkv_linear"]), ModelConfig(path=Path("x"))
    monkeypatch.setattr(Capabilities, "here", lambda: GPU)
    with installed(GPU.transformer_engine):
        with pytest.raises(ConfigError, match="environment variable NVTE_CPU_OFFLOAD_V1=1"):
            settings.transformer_config(transformer_config_kwargs(SHAPE), model, megatron)
        monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")
        found = settings.transformer_config(transformer_config_kwargs(SHAPE), model, megatron)
    assert found.fine_grained_activation_offloading


def test_micro_batches_fit_float8_and_buffers_of_one_size() -> None:
    for tensor, context in ((1, 1), (2, 1), (2, 2)):
        alignment = Alignment.of(MegatronConfig(tensor_parallel=tensor, context_parallel=context, fp8="hybrid"))
        (length, *rest) = alignment.padded([100])
        assert (length + sum(rest)) % (128 * tensor * context) == 0
    ids = [np.arange(length, dtype=np.int32) for length in (30, 7, 64, 3)]
    for option in ({"cuda_graphs": True}, {"tp_comm_overlap": True, "tensor_parallel": 2}):
        packed = pack(ids, MegatronConfig.model_validate({"max_tokens_per_microbatch": 65, **option}), Workload(1, 1))
        whole = {"cuda_graphs": 65, "tp_comm_overlap": 66}[next(iter(option))]
        assert packed.plan.least == whole
        assert packed.plan.padded_tokens == whole * packed.plan.count > packed.tokens


def test_communication_buffers_are_made_once_in_the_size_of_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy and its critic share them. Transformer Engine's function is replaced: it needs GPUs."""
    made: list[dict[str, Any]] = []
    base = types.ModuleType("transformer_engine.pytorch.module.base")
    mode = SimpleNamespace(FP8="float8", NONE="none")
    vars(base).update(initialize_ub=lambda **settings: made.append(settings), UserBufferQuantizationMode=mode)
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.setattr(settings, "_user_buffers", None)
    megatron = MegatronConfig(tensor_parallel=2, tp_comm_overlap=True, max_tokens_per_microbatch=65)
    config = config_of(tensor_parallel=2, tp_comm_overlap=True)
    for _ in range(2):
        settings.start_user_buffers(config, megatron)
    settings.start_user_buffers(config_of(), MegatronConfig())
    assert made == [
        {
            "shape": [66, SHAPE["hidden_size"]], "tp_size": 2, "quantization_modes": ["none"], "ub_cfgs": {},
            "bootstrap_backend": "nccl",
        }
    ]  # fmt: skip
