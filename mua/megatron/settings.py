"""What the configuration and the machine make of Megatron-Core's own settings, in one place.

:class:`Capabilities` says what a machine has; it is a value, so that a CPU can ask what a GPU would get::

    configuration + capabilities ──► implementation ──► TransformerConfig
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal, Self, TypeAlias

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import InvalidVersion, Version

from mua.config.schema import MegatronConfig, ModelConfig
from mua.errors import ConfigError
from mua.megatron.parallel import virtual_stages

Implementation: TypeAlias = Literal["transformer_engine", "local"]

TRANSFORMER_ENGINE = ("2.9.0", "3")
"""Versions of Transformer Engine that go with Megatron-Core 0.19: the first or later, below the second. ``setup.py``
asks for the same; the highest that Megatron-Core asks for in what is used here is 2.7 (``is_te_min_version``)."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a machine has that decides which settings are possible."""

    cuda: bool
    """Whether there is a CUDA device."""
    compute: tuple[int, int] | None = None
    """Compute capability of the device: (9, 0) is Hopper."""
    torch: str = ""
    """Version of torch."""
    transformer_engine: str | None = None
    """Version of Transformer Engine; None: it is not installed, or its part for torch is not."""
    apex: bool = False
    """Whether NVIDIA's Apex is there with its kernel for fused gradient accumulation."""

    @classmethod
    def here(cls) -> Self:
        """Of this process; the packages are looked for, not imported."""
        cuda = torch.cuda.is_available()
        return cls(
            cuda=cuda,
            compute=torch.cuda.get_device_capability() if cuda else None,
            torch=torch.__version__,
            transformer_engine=_transformer_engine(),
            apex=importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        )


_pretended: Capabilities | None = None


def capabilities() -> Capabilities:
    """Of this process, or what :func:`pretending` says."""
    return Capabilities.here() if _pretended is None else _pretended


@contextmanager
def pretending(of: Capabilities) -> Iterator[None]:
    """Within it, models are built as on a machine with these capabilities."""
    global _pretended
    before, _pretended = _pretended, of
    try:
        yield
    finally:
        _pretended = before


def implementation_of(megatron: MegatronConfig, of: Capabilities) -> Implementation:
    """Whose layers the model is built of.

    Raises:
        ConfigError: Transformer Engine is asked for and cannot be used: what is missing, and the fix.
    """
    if megatron.implementation == "local":
        return "local"
    problem = _transformer_engine_problem(of)
    if problem is None:
        return "transformer_engine"
    if megatron.implementation == "auto" and (not of.cuda or of.transformer_engine is None):
        return "local"
    raise ConfigError(f"megatron.implementation {megatron.implementation}: {problem}")


def _transformer_engine() -> str | None:
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    for package in ("transformer-engine", "transformer-engine-torch"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def _transformer_engine_problem(of: Capabilities) -> str | None:
    """Why Transformer Engine cannot be used, with the fix; None if it can."""
    least, below = TRANSFORMER_ENGINE
    wanted = f"transformer-engine>={least},<{below}"
    if of.transformer_engine is None:
        return (
            "Transformer Engine is not installed; install constraints/gpu-py312-cu.txt and "
            "constraints/gpu-py312-cu-source.txt (docs/installation.md), or set it to auto or local"
        )
    if not of.cuda:
        return "Transformer Engine needs a CUDA device and there is none; set it to auto or local"
    try:
        found = Version(of.transformer_engine)
    except InvalidVersion:
        return f"the version {of.transformer_engine!r} of Transformer Engine cannot be read; install {wanted}"
    if not Version(least) <= found < Version(below):
        return (
            f"Transformer Engine is {of.transformer_engine}, and Megatron-Core 0.19 needs {wanted}; install that "
            "(constraints/gpu-py312-cu.txt has the version that is tried), or set megatron.implementation to local"
        )
    return None


# Fusions that need Transformer Engine, Apex or CUDA kernels; off on every device so that CPU and GPU run one model.
_FUSIONS = (
    "bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "gradient_accumulation_fusion",
    "persist_layer_norm", "apply_rope_fusion", "cross_entropy_loss_fusion",
)  # fmt: skip

_OF_TRANSFORMER_ENGINE = ("apply_rope_fusion", "moe_grouped_gemm", "moe_permute_fusion")
"""Fusions that come with its layers and keep every promise: explicit positions, padding that does not count, replay."""

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    # The fused attention keeps no scores, so the MLP is what is worth recomputing.
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def transformer_config(
    architecture: Mapping[str, Any], model: ModelConfig, megatron: MegatronConfig, of: Capabilities | None = None
) -> TransformerConfig:
    """Megatron's configuration: ``architecture`` (``megatron_bridge.transformer_config_kwargs``), layout and options.

    ``transformer_impl`` says whose layers :func:`mua.megatron.model.layer_spec` is to take.

    Args:
        architecture: fields that the model folder decides.
        model: gives the dtype.
        megatron: gives layout and options.
        of: the machine; None: :func:`capabilities`.
    """
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[model.dtype]
    implementation = implementation_of(megatron, of or capabilities())
    fusions = dict.fromkeys(_FUSIONS, False)
    if implementation == "transformer_engine":
        fusions |= dict.fromkeys(_OF_TRANSFORMER_ENGINE, True)
        # Its kernel chooses by itself and would not ask for the engine's choices.
        fusions["moe_router_fusion"] = megatron.routing_replay == "off"
    return TransformerConfig(
        **fusions,
        **_RECOMPUTE[megatron.recompute],
        transformer_impl=implementation,
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
