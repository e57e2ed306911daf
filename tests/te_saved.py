"""The stand-in's kernels keep for the backward pass what Transformer Engine's keep, so that a test can count it.

Each kernel becomes one operation that saves the tensors which its module hands to ``save_for_backward`` (version
2.20.2); what lies between kernels is Megatron-Core's own. A backward pass is not possible.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

Kept = Callable[[tuple[Any, ...], Any], list[Tensor]]
"""Of a kernel's arguments and what it returned."""


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], kept: Kept, *arguments: Any) -> Any:
        found = function(*arguments)
        ctx.save_for_backward(*kept(arguments, found))
        outputs = found if isinstance(found, tuple) else (found,)
        ctx.mark_non_differentiable(*(one for one in outputs if not one.is_floating_point()))
        return found


def _per_row(tensor: Tensor) -> Tensor:
    """A float32 number for each row: a norm's root mean square, a query's log-sum-exp."""
    return torch.empty(tensor.numel() // tensor.shape[-1], dtype=torch.float32)


KERNELS: dict[str, Kept] = {
    # module/layernorm_linear.py, module/rmsnorm.py: the input and rsigma; the linear layer's own input is kept by it.
    "transformer_engine.pytorch.module.layernorm_linear.normed": lambda given, _: [given[0], _per_row(given[0])],
    "transformer_engine.pytorch.module.rmsnorm.normed": lambda given, _: [given[0], _per_row(given[0])],
    # attention/rope.py: freqs.
    "transformer_engine.pytorch.attention.rope._rotated": lambda given, _: [given[1]],
    # attention/dot_product_attention/backends.py: query, key, value, output, softmax's normalizers.
    "transformer_engine.pytorch.attention.dot_product_attention._attended": lambda given, found: [
        *given[:3], found, _per_row(given[0]),
    ],
    # permutation.py: row_id_map, of a mask; probabilities only where they merge.
    "transformer_engine.pytorch.permutation._permuted": lambda _, found: [found[2]],
    "megatron.core.transformer.moe.moe_utils.fused_unpermute": lambda given, _: [given[1]],
    # router.py: the routing map and the scores.
    "megatron.core.transformer.moe.moe_utils.fused_topk_with_score_function": lambda given, found: [
        found[1], torch.empty(found[0].shape, dtype=torch.float32),
    ],
}  # fmt: skip


@contextmanager
def kernels_save_as_transformer_engine() -> Iterator[None]:
    """Within it, models of the stand-in keep what a GPU would."""
    with ExitStack() as stack:
        for path, kept in KERNELS.items():
            owner, name = path.rsplit(".", 1)
            original = getattr(importlib.import_module(owner), name)
            stack.enter_context(mock.patch(path, _kernel(original, kept)))
        yield


def _kernel(function: Callable[..., Any], kept: Kept) -> Callable[..., Any]:
    def called(*arguments: Any, **named: Any) -> Any:
        return _Kernel.apply(lambda *given: function(*given, **named), kept, *arguments)

    return called
