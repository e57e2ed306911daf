"""Attention over packed sequences, and rotary embedding."""

from transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

__all__ = ["DotProductAttention", "apply_rotary_pos_emb"]
