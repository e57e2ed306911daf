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


@pytest.mark.parametrize(
    ("implementation", "machine", "message"),
    [
        ("transformer_engine", BARE_GPU, r"not installed; install constraints/gpu-py312-cu\.txt .* auto or local"),
        ("transformer_engine", CPU, "not installed"),
        ("transformer_engine", Capabilities(cuda=False, transformer_engine="2.20.2"), "needs a CUDA device"),
        ("auto", Capabilities(cuda=True, transformer_engine="1.13.0"), r"is 1\.13\.0, .* needs .*>=2\.9\.0,<3"),
        ("auto", Capabilities(cuda=True, transformer_engine="3.0"), r"is 3\.0, .* needs .*>=2\.9\.0,<3"),
        ("auto", Capabilities(cuda=True, transformer_engine="main"), "'main' of Transformer Engine cannot be read"),
    ],
)
def test_unusable_transformer_engine_is_one_error(implementation: str, machine: Capabilities, message: str) -> None:
    config = MegatronConfig.model_validate({"implementation": implementation})
    with pytest.raises(ConfigError, match=rf"^megatron\.implementation {implementation}: .*{message}"):
        implementation_of(config, machine)


def test_this_machine_can_be_another_for_a_while() -> None:
    here = settings.capabilities()
    with settings.pretending(GPU):
        assert settings.capabilities() == GPU
    assert settings.capabilities() == here


@pytest.mark.parametrize(("machine", "on"), [(GPU, True), (BARE_GPU, False), (CPU, False)])
def test_what_is_left_open_takes_what_the_machine_has(machine: Capabilities, on: bool) -> None:
    found = Options.of(MegatronConfig(data_parallel=2), machine, experts=True)
    engine = ("rope_fusion", "moe_permute_fusion", "moe_router_fusion")
    assert {getattr(found, key) for key in engine} == {on}
    assert {found.swiglu_fusion, found.overlap_grad_reduce, found.overlap_param_gather} == {machine.cuda}
    assert not found.gradient_accumulation_fusion
    with_apex = dataclasses.replace(machine, apex="kernel")
    assert Options.of(MegatronConfig(), with_apex).gradient_accumulation_fusion == machine.cuda
    assert not Options.of(MegatronConfig(), machine).overlap_grad_reduce, "there is one rank"
    assert not Options.of(MegatronConfig(data_parallel=2), machine).moe_router_fusion, "there are no experts"
    replayed = MegatronConfig(routing_replay="replay")
    assert not Options.of(replayed, machine, experts=True).moe_router_fusion
    plain = MegatronConfig(data_parallel=2, distributed_optimizer=False)
    assert not Options.of(plain, machine).overlap_param_gather


@pytest.mark.parametrize(
    ("asked", "machine", "message"),
    [
        ({"rope_fusion": True}, CPU, "rope_fusion needs Transformer Engine's layers, and there is no CUDA device here"),
        ({"moe_permute_fusion": True}, BARE_GPU, "there is no Transformer Engine here; leave .* or install it"),
        ({"fp8": "hybrid"}, BARE_GPU, "megatron.fp8 needs Transformer Engine"),
        (
            {"fp8": "hybrid"},
            dataclasses.replace(GPU, compute=(8, 0)),
            r"needs a GPU of compute capability 9\.0 \(Hopper\) or later; this one has 8\.0",
        ),
        ({"cuda_graphs": True, "recompute": "none"}, CPU, "megatron.cuda_graphs needs a CUDA device"),
        (
            {"gradient_accumulation_fusion": True},
            GPU,
            r"Apex is not installed \(PyPI's package of that name is",
        ),
        (
            {"gradient_accumulation_fusion": True},
            dataclasses.replace(GPU, apex="other package"),
            "apex that is installed is PyPI's, not NVIDIA's; uninstall it",
        ),
        (
            {"gradient_accumulation_fusion": True},
            dataclasses.replace(GPU, apex="without kernel"),
            "without its kernel fused_weight_gradient_mlp_cuda; install",
        ),
    ],
)
def test_what_the_machine_lacks_is_one_error(asked: dict[str, Any], machine: Capabilities, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Options.of(MegatronConfig(**asked), machine)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"implementation": "local", "fp8": "e4m3"}, "fp8 needs Transformer Engine: set implementation to auto"),
        ({"overlap_param_gather": True, "distributed_optimizer": False}, "needs distributed_optimizer: true"),
        ({"overlap_param_gather": True, "overlap_grad_reduce": False}, "needs overlap_grad_reduce"),
        ({"tp_comm_overlap": True}, "tp_comm_overlap needs tensor_parallel above 1"),
        ({"tp_comm_overlap": True, "tensor_parallel": 2, "context_parallel": 2}, "needs context_parallel 1"),
        ({"cuda_graphs": True, "merge_prefixes": True}, "cuda_graphs does not go with merge_prefixes"),
        ({"cuda_graphs": True, "recompute": "full"}, "cuda_graphs replays MLPs; recompute them no more"),
        ({"cuda_graphs": True, "recompute": "selective"}, "cuda_graphs replays MLPs; recompute them no more"),
        ({"moe_router_fusion": True, "routing_replay": "check"}, "does not go with routing_replay"),
        ({"fp8_param_gather": True}, "fp8_param_gather needs fp8"),
        ({"offload_activations": ["qkv_linear"], "recompute": "full"}, "does not go with recompute: full"),
        ({"offload_activations": ["attn_proj"]}, "attn_proj needs core_attn too"),
        (
            {"offload_activations": ["moe_act"], "recompute": "selective", "recompute_modules": ["moe"]},
            "moe_act lies inside recompute_modules moe",
        ),
    ],
)
def test_what_does_not_go_together_is_one_error(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MegatronConfig(**asked)


@pytest.mark.parametrize(
    ("optimizer", "megatron", "dtype", "message"),
    [
        ({"exp_avg_dtype": "bfloat16"}, {}, "bfloat16", "exp_avg_dtype bfloat16 needs precision_aware: true"),
        (
            {"exp_avg_dtype": "bfloat16", "precision_aware": True, "cpu_offload_fraction": 0.5},
            {},
            "bfloat16",
            "must be float32 with cpu_offload_fraction",
        ),
        ({"precision_aware": True}, {"distributed_optimizer": False}, "bfloat16", "distributed_optimizer: true"),
        ({"cpu_offload_fraction": 1.0}, {}, "float32", "cpu_offload_fraction needs model.dtype bfloat16"),
        ({"precision_aware": True, "main_grads_dtype": "bfloat16"}, {}, "bfloat16", "grad_reduce_in_fp32 false"),
        ({"precision_aware": True}, {"grad_reduce_in_fp32": False}, "bfloat16", "grad_reduce_in_fp32 true"),
        (
            {"cpu_offload_fraction": 0.5},
            {"fp8": "hybrid", "fp8_param_gather": True},
            "bfloat16",
            "does not go with megatron.fp8_param_gather",
        ),
    ],
)
def test_optimizers_that_cannot_be_are_one_error(
    optimizer: dict[str, Any], megatron: dict[str, Any], dtype: str, message: str
) -> None:
    experiment = {
        "name": "x", "output": "x", "model": {"path": "x", "dtype": dtype}, "environment": {"name": "retail"},
        "trainer": {"steps": 1}, "optimizer": optimizer, "megatron": megatron,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        ExperimentConfig.model_validate(experiment)


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


def test_recomputing_the_experts_activation_alone_wants_grouped_experts() -> None:
    megatron = MegatronConfig(implementation="local", recompute="selective", recompute_modules=["moe_act"])
    with pytest.raises(ConfigError, match="moe_act needs Transformer Engine's grouped experts; take moe"):
        settings.transformer_config(
            transformer_config_kwargs(SHAPE | EXPERTS), ModelConfig(path=Path("x")), megatron, CPU
        )


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
    with settings.pretending(GPU), installed(GPU.transformer_engine):
        with pytest.raises(ConfigError, match="environment variable NVTE_CPU_OFFLOAD_V1=1"):
            settings.transformer_config(transformer_config_kwargs(SHAPE), model, megatron)
        monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")
        found = settings.transformer_config(transformer_config_kwargs(SHAPE), model, megatron)
    assert found.fine_grained_activation_offloading


@pytest.mark.parametrize("module", ["fused_weight_gradient_mlp_cuda", "apex with its kernels", "apex of PyPI", None])
def test_apex_is_told_from_its_namesake(module: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what lies in its folder: PyPI's apex is a toolkit for web applications."""
    if module == "fused_weight_gradient_mlp_cuda":
        (tmp_path / f"{module}.py").write_text("")
    elif module is not None:
        (tmp_path / "apex").mkdir()
        (tmp_path / "apex" / "__init__.py").write_text("raise ImportError('not to be imported')")
        if "PyPI" not in module:
            (tmp_path / "apex" / "multi_tensor_apply").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    expected = {"fused_weight_gradient_mlp_cuda": "kernel", "apex with its kernels": "without kernel",
                "apex of PyPI": "other package", None: "absent"}  # fmt: skip
    assert Capabilities.here().apex == expected[module]


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
