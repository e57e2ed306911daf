"""Linear layers, norms and the padding that fp8 wants."""

from transformer_engine.pytorch.module import base
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule, get_dummy_wgrad
from transformer_engine.pytorch.module.fp8_padding import Fp8Padding, Fp8Unpadding
from transformer_engine.pytorch.module.grouped_linear import GroupedLinear
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.module.rmsnorm import RMSNorm

__all__ = [
    "Fp8Padding", "Fp8Unpadding", "GroupedLinear", "LayerNormLinear", "Linear", "RMSNorm",
    "TransformerEngineBaseModule", "base", "get_dummy_wgrad",
]  # fmt: skip
