"""What configuration and machine make of Megatron-Core's own settings: all of them, in one place.

::

    configuration + Capabilities ──► Options ──► TransformerConfig, DistributedDataParallelConfig, OptimizerConfig

The whole of the three for every recipe stands under ``tests/data/golden``; ``docs/megatron_options.md`` has what
differs between Transformer Engine's layers and Megatron's local ones.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal, Self, TypeAlias

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import InvalidVersion, Version

from mua.config.schema import MegatronConfig, ModelConfig, OptimizerConfig
from mua.megatron.packing import Alignment
from mua.megatron.parallel import virtual_stages
from mua.utils.errors import ConfigError

Implementation: TypeAlias = Literal["transformer_engine", "local"]

TRANSFORMER_ENGINE = ("2.9.0", "3")
"""Versions of Transformer Engine that go with Megatron-Core 0.19: the first or later, below the second. ``setup.py``
asks for the same; the highest that Megatron-Core asks for in what is used here is 2.7 (``is_te_min_version``)."""
HOPPER = (9, 0)
"""The first compute capability with products of float8."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a machine has."""

    cuda: bool
    """Whether there is a CUDA device."""
    compute: tuple[int, int] | None = None
    """Compute capability of the device: (9, 0) is Hopper."""
    torch: str = ""
    """Version of torch."""
    transformer_engine: str | None = None
    """Version of Transformer Engine; None: it is not installed, or its part for torch is not."""
    apex: bool = False
    """Whether NVIDIA's Apex is here with its kernel for fused gradient accumulation."""

    @classmethod
    def here(cls) -> Self:
        """Of this process; packages are looked for, not imported."""
        cuda = torch.cuda.is_available()
        engine: str | None = None
        if importlib.util.find_spec("transformer_engine") is not None:
            with suppress(metadata.PackageNotFoundError):
                metadata.version("transformer-engine-torch")  # without it there is nothing but the core library
                engine = metadata.version("transformer-engine")
        return cls(
            cuda=cuda,
            compute=torch.cuda.get_device_capability() if cuda else None,
            torch=torch.__version__,
            transformer_engine=engine,
            apex=importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        )


def implementation_of(megatron: MegatronConfig, of: Capabilities) -> Implementation:
    """Whose layers the model is built of.

    Raises:
        ConfigError: Transformer Engine is asked for and cannot be used: what is missing, and the fix.
    """
    if megatron.implementation == "local":
        return "local"
    if megatron.implementation == "auto" and (not of.cuda or of.transformer_engine is None):
        return "local"
    least, below = TRANSFORMER_ENGINE
    wanted = f"transformer-engine>={least},<{below}"
    try:
        fits = Version(least) <= Version(of.transformer_engine or "0") < Version(below)
    except InvalidVersion:
        fits = False
    if of.transformer_engine is None:
        problem = (
            "Transformer Engine is not installed; install constraints/gpu-py312-cu.txt and "
            "constraints/gpu-py312-cu-source.txt (docs/installation.md), or set it to auto or local"
        )
    elif not of.cuda:
        problem = "Transformer Engine needs a CUDA device and there is none; set it to auto or local"
    elif not fits:
        problem = (
            f"Transformer Engine is {of.transformer_engine}, and Megatron-Core 0.19 needs {wanted}; install that "
            "(constraints/gpu-py312-cu.txt has the version that is tried), or set megatron.implementation to local"
        )
    else:
        return "transformer_engine"
    raise ConfigError(f"megatron.implementation {megatron.implementation}: {problem}")


_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_OFF = (
    # Attention is this package's own and keeps no scores; there is neither bias nor dropout to fuse.
    "masked_softmax_fusion", "bias_dropout_fusion",
    "persist_layer_norm",  # of Apex's norm, which no layer here has
    # Log-probabilities and entropy come chunk by chunk from mua.megatron.logprobs, before any logits exist that
    # Megatron's fused cross entropy could read; that one has no entropy, and casts gradients to bfloat16.
    "cross_entropy_loss_fusion",
)  # fmt: skip
"""Fusions that nothing here could use."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a trainer on one machine, nothing left open."""

    implementation: Implementation
    rope_fusion: bool
    swiglu_fusion: bool
    moe_permute_fusion: bool
    moe_router_fusion: bool
    gradient_accumulation_fusion: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool

    @classmethod
    def of(cls, megatron: MegatronConfig, machine: Capabilities, *, experts: bool = False) -> Self:
        """What is None in ``megatron`` takes what ``machine`` has, for a model with or without ``experts``.

        Raises:
            ConfigError: an option that is asked for is impossible there: its key, what is missing, the fix.
        """
        implementation = implementation_of(megatron, machine)
        engine = implementation == "transformer_engine"
        of_engine = (
            "rope_fusion", "moe_permute_fusion", "moe_router_fusion", "tp_comm_overlap", "fp8", "offload_activations",
        )  # fmt: skip
        for key in of_engine:
            if getattr(megatron, key) and not engine:
                missing = "Transformer Engine" if machine.cuda else "CUDA device"
                raise ConfigError(
                    f"megatron.{key} needs Transformer Engine's layers, and there is no {missing} here; leave {key} out"
                    + (" or install it (docs/installation.md)" if machine.cuda else "")
                )
        if megatron.gradient_accumulation_fusion and not (machine.apex and machine.cuda):
            raise ConfigError(
                "megatron.gradient_accumulation_fusion needs a CUDA device, and of NVIDIA's Apex the kernel "
                "fused_weight_gradient_mlp_cuda (PyPI's package apex is another); install it from source "
                "(docs/installation.md), or set it to null"
            )
        if megatron.cuda_graphs and not machine.cuda:
            raise ConfigError("megatron.cuda_graphs needs a CUDA device and there is none; set it to false")
        if megatron.fp8 and machine.compute is not None and machine.compute < HOPPER:
            raise ConfigError(
                f"megatron.fp8 {megatron.fp8} needs a GPU of compute capability {HOPPER[0]}.{HOPPER[1]} (Hopper) or "
                f"later; this one has {machine.compute[0]}.{machine.compute[1]}. Leave it out"
            )
        replicas = megatron.data_parallel * megatron.context_parallel > 1
        overlap = _chosen(megatron.overlap_grad_reduce, machine.cuda and replicas)
        return cls(
            implementation=implementation,
            rope_fusion=_chosen(megatron.rope_fusion, engine),
            swiglu_fusion=_chosen(megatron.swiglu_fusion, machine.cuda),
            moe_permute_fusion=experts and _chosen(megatron.moe_permute_fusion, engine),
            moe_router_fusion=experts
            and _chosen(megatron.moe_router_fusion, engine and megatron.routing_replay == "off"),
            gradient_accumulation_fusion=_chosen(megatron.gradient_accumulation_fusion, machine.cuda and machine.apex),
            overlap_grad_reduce=overlap,
            overlap_param_gather=_chosen(megatron.overlap_param_gather, overlap and machine.cuda)
            and megatron.distributed_optimizer,
        )


def _chosen(asked: bool | None, otherwise: bool) -> bool:
    return otherwise if asked is None else asked


_OF_EXPERTS = ("moe", "moe_act", "shared_experts")
"""Modules that a dense model does not have, so that one list of them serves several models."""

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def transformer_config(
    architecture: Mapping[str, Any], model: ModelConfig, megatron: MegatronConfig, machine: Capabilities | None = None
) -> TransformerConfig:
    """Megatron's configuration: ``architecture`` (``megatron_bridge.transformer_config_kwargs``), layout and options.

    ``transformer_impl`` says whose layers :func:`mua.megatron.model.layer_spec` is to take.

    Args:
        architecture: fields that the model folder decides.
        model: gives the dtype.
        megatron: gives layout and options.
        machine: None: :meth:`Capabilities.here`.

    Raises:
        ConfigError: an option is impossible on this machine or for this model.
    """
    here, machine = machine is None, machine or Capabilities.here()
    experts = bool(architecture.get("num_moe_experts"))
    options = Options.of(megatron, machine, experts=experts)
    dtype = _DTYPES[model.dtype]
    if megatron.fp8 and dtype != torch.bfloat16:
        raise ConfigError(f"megatron.fp8 needs model.dtype bfloat16; it is {model.dtype}")
    kernels: dict[str, Any] = {
        "apply_rope_fusion": options.rope_fusion,
        "bias_activation_fusion": options.swiglu_fusion,
        "gradient_accumulation_fusion": options.gradient_accumulation_fusion,
        "tp_comm_overlap": megatron.tp_comm_overlap,
    }
    if experts:
        kernels |= {
            "moe_grouped_gemm": options.implementation == "transformer_engine",
            "moe_permute_fusion": options.moe_permute_fusion,
            "moe_router_fusion": options.moe_router_fusion,
        }
    if megatron.cuda_graphs:
        kernels |= {"cuda_graph_impl": "local", "cuda_graph_modules": ["mlp"]}
    if megatron.fp8:
        kernels |= {"fp8": megatron.fp8, "fp8_recipe": "blockwise", "fp8_param": megatron.fp8_param_gather}
    return TransformerConfig(
        **dict.fromkeys(_OFF, False),
        **kernels,
        **_memory(megatron, options, experts, here=here),
        transformer_impl=options.implementation,
        tensor_model_parallel_size=megatron.tensor_parallel,
        pipeline_model_parallel_size=megatron.pipeline_parallel,
        virtual_pipeline_model_parallel_size=virtual_stages(megatron),
        num_layers_in_first_pipeline_stage=megatron.first_stage_layers,
        num_layers_in_last_pipeline_stage=megatron.last_stage_layers,
        context_parallel_size=megatron.context_parallel,
        expert_model_parallel_size=megatron.expert_parallel,
        expert_tensor_parallel_size=megatron.expert_tensor_parallel,
        sequence_parallel=megatron.tensor_parallel > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        # Micro-batches differ in length, so stages announce their shapes. Interleaved they cannot: two stages, each the
        # other's next and previous, would mix shapes up or wait for each other for ever. There all have one length.
        variable_seq_lengths=virtual_stages(megatron) is None,
        moe_token_dispatcher_type="alltoall",  # the only one for lengths that differ, dense models included
        # A policy that corrects its routing is trained with the correction it came with.
        moe_router_bias_update_rate=0.0,
        # The loss is a sum whose weights hold the global denominators: no averaging anywhere.
        calculate_per_token_loss=True,
        # Interleaved over two stages, both transfers of a batch join the same two ranks and would be mixed up.
        batch_p2p_comm=virtual_stages(megatron) is None,
        # On gloo an overlapped send may still be under way when its tensor's memory is freed.
        overlap_p2p_comm=False,
        deallocate_pipeline_outputs=True,
        **architecture,
    )


def _memory(megatron: MegatronConfig, options: Options, experts: bool, *, here: bool) -> dict[str, Any]:
    """Fields of recomputation and of activations that wait in host memory."""
    modules = [module for module in megatron.recomputed if experts or module not in _OF_EXPERTS]
    if "moe_act" in modules and options.implementation == "local":
        raise ConfigError(
            "megatron.recompute_modules moe_act needs Transformer Engine's grouped experts; take moe, or install it "
            "(docs/installation.md)"
        )
    found = dict(_RECOMPUTE[megatron.recompute]) if modules or megatron.recompute != "selective" else {}
    if modules:
        found["recompute_modules"] = modules
    if megatron.offload_activations:
        if here and os.environ.get("NVTE_CPU_OFFLOAD_V1") != "1":
            raise ConfigError(
                "megatron.offload_activations needs the environment variable NVTE_CPU_OFFLOAD_V1=1, without which "
                "Transformer Engine 2.10 and later offloads weights along with them; set it before the launch"
            )
        found |= {"fine_grained_activation_offloading": True, "offload_modules": list(megatron.offload_activations)}
    return found


def data_parallel_config(
    megatron: MegatronConfig, machine: Capabilities | None = None
) -> DistributedDataParallelConfig:
    """Of Megatron's data-parallel wrapper: gradients are summed, never averaged."""
    options = Options.of(megatron, machine or Capabilities.here())
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=megatron.grad_reduce_in_fp32,
        use_distributed_optimizer=megatron.distributed_optimizer,
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather,
        bucket_size=megatron.ddp_bucket_size,
        average_in_collective=False,
        fp8_param_gather=megatron.fp8_param_gather,
    )


def optimizer_config(
    optimizer: OptimizerConfig,
    params_dtype: torch.dtype,
    megatron: MegatronConfig,
    machine: Capabilities | None = None,
    *,
    section: str = "optimizer",
) -> MegatronOptimizerConfig:
    """Of Megatron's optimizer.

    Args:
        optimizer: rates, and where and in which types the state lies.
        params_dtype: of the model.
        megatron: gives the options that it shares with the data-parallel wrapper.
        machine: None: :meth:`Capabilities.here`.
        section: of the configuration that ``optimizer`` is, for messages.

    Raises:
        ConfigError: Transformer Engine's Adam is asked for and not there.
    """
    machine = machine or Capabilities.here()
    options = Options.of(megatron, machine)
    offloaded = optimizer.cpu_offload_fraction > 0
    if optimizer.precision_aware and not offloaded and options.implementation == "local":
        raise ConfigError(
            f"{section}.precision_aware needs Transformer Engine's fused Adam, which is not here (docs/installation.md)"
        )
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=optimizer.learning_rate,
        min_lr=optimizer.min_learning_rate,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_eps=optimizer.epsilon,
        clip_grad=optimizer.clip_grad,
        use_distributed_optimizer=megatron.distributed_optimizer,
        overlap_param_gather=options.overlap_param_gather,
        bf16=params_dtype == torch.bfloat16,
        params_dtype=params_dtype,
        fp8_recipe="blockwise" if megatron.fp8 else None,
        # The hybrid optimizer takes gradients the way the precision-aware one does.
        use_precision_aware_optimizer=optimizer.precision_aware or offloaded,
        **{key: _DTYPES[value] for key, value in optimizer.state_dtypes.items()},
        optimizer_cpu_offload=offloaded,
        optimizer_offload_fraction=optimizer.cpu_offload_fraction,
        overlap_cpu_optimizer_d2h_h2d=offloaded,
        pin_cpu_grads=machine.cuda,
        pin_cpu_params=machine.cuda,
    )


_user_buffers: tuple[int, int] | None = None
"""Tokens and hidden size of those that this process has; Transformer Engine makes them once."""


def start_user_buffers(config: TransformerConfig, megatron: MegatronConfig) -> None:
    """Transformer Engine's communication buffers for ``megatron.tp_comm_overlap``; does nothing without it, or again.

    They have the size of a micro-batch, which therefore all have: see :class:`mua.megatron.packing.PackingPlan`.
    """
    global _user_buffers
    wanted = (Alignment.of(megatron).whole(megatron.max_tokens_per_microbatch), config.hidden_size)
    if not config.tp_comm_overlap or _user_buffers == wanted:
        return
    base: Any = importlib.import_module("transformer_engine.pytorch.module.base")
    mode = base.UserBufferQuantizationMode
    base.initialize_ub(
        shape=list(wanted),
        tp_size=config.tensor_model_parallel_size,
        quantization_modes=[mode.FP8 if config.fp8 else mode.NONE],
        ub_cfgs={},
        bootstrap_backend="nccl",
    )
    _user_buffers = wanted
