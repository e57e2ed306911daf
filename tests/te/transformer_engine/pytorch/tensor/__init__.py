"""Classes of quantised tensors, of which the stand-in makes none: Megatron-Core asks what a parameter is."""

from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor, QuantizedTensor

__all__ = ["Float8Tensor", "QuantizedTensor"]
