"""What Megatron-Core takes from ``transformer_engine.pytorch``."""

from transformer_engine.pytorch import attention, cpp_extensions, distributed, fp8, module, ops, optimizers
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker, checkpoint
from transformer_engine.pytorch.module import (
    Fp8Padding,
    Fp8Unpadding,
    GroupedLinear,
    LayerNormLinear,
    Linear,
    RMSNorm,
)
from transformer_engine.pytorch.permutation import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from transformer_engine.pytorch.quantization import autocast, fp8_autocast, fp8_model_init, quantized_model_init

__all__ = [
    "CudaRNGStatesTracker", "DotProductAttention", "Fp8Padding", "Fp8Unpadding", "GroupedLinear", "LayerNormLinear",
    "Linear", "RMSNorm", "attention", "autocast", "checkpoint", "cpp_extensions", "distributed", "fp8", "fp8_autocast",
    "fp8_model_init", "module", "moe_permute", "moe_permute_and_pad_with_probs", "moe_permute_with_probs",
    "moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs", "moe_unpermute", "ops", "optimizers",
    "parallel_cross_entropy", "quantized_model_init",
]  # fmt: skip
