"""What all modules share, and the product with its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_engine.pytorch import quantization
from transformer_engine.pytorch.distributed import (
    Gather,
    ReduceScatter,
    Sum,
    SumOfGradients,
    set_tensor_model_parallel_attributes,
)

PARALLEL_MODES = ("row", "column", None)


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """What stands for a weight's gradient that is in ``main_grad`` already."""
    return torch.zeros(shape, dtype=dtype) if zero else torch.full(shape, torch.nan, dtype=dtype)


class TransformerEngineBaseModule(torch.nn.Module):
    """Parameters with their way of initialisation, and the state of fp8, of which there is none to save."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "recipe": quantization.Float8BlockScaling()}
        self.tp_group: Any = None
        self.tp_size = 1
        self._inits: dict[str, tuple[Callable[[Tensor], Any] | None, Any]] = {}

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        self.tp_group = tp_group

    def take_group(self, tp_group: Any, tp_size: int) -> None:
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        if tp_group is not None or tp_size == 1:
            self.set_tensor_parallel_group(tp_group)

    def parameter(
        self, name: str, shape: tuple[int, ...], kind: dict[str, Any], init: Callable[[Tensor], Any] | None, rng: Any
    ) -> None:
        self.register_parameter(name, torch.nn.Parameter(torch.empty(shape, **kind)))
        self._inits[name] = (init or default_init, rng)

    def reset_parameters(self, defer_init: bool = False) -> None:
        if defer_init:
            return
        for name, parameter in list(self.named_parameters(recurse=False)):
            init, rng = self._inits[name]
            with torch.no_grad():
                if rng is None:
                    init(parameter)  # type: ignore[misc]
                else:
                    where = getattr(self, "rng_tracker_name", None)
                    with rng().fork(where) if where else rng().fork():
                        init(parameter)  # type: ignore[misc]
            setattr(self, name, torch.nn.Parameter(parameter.detach()))

    def mark_weights(self, names: list[str], biases: list[str], parallel_mode: str | None, sequence: bool) -> None:
        dim = 1 if parallel_mode == "row" else 0
        for name in names:
            set_tensor_model_parallel_attributes(getattr(self, name), True, dim, 1)
        for name in biases:
            if parallel_mode == "row":
                getattr(self, name).sequence_parallel = sequence
            elif parallel_mode == "column":
                set_tensor_model_parallel_attributes(getattr(self, name), True, 0, 1)

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        self.fp8 = quantization.FP8GlobalStateManager.is_fp8_enabled()

    def get_extra_state(self) -> Tensor:
        """Block scaling has no state."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        if state is not None and state.numel():
            raise RuntimeError(f"{type(self).__name__}: the stand-in reads no fp8 state")

    def checked(self, inp: Tensor) -> Tensor:
        """Refuses activations of a dtype that parameters do not have, outside of autocast."""
        for name, parameter in self.named_parameters(recurse=False):
            if parameter.dtype != inp.dtype:
                raise TypeError(
                    f"Data types for parameters must match when outside of autocasted region. Found input dtype: "
                    f"{inp.dtype} and {name!r} dtype: {parameter.dtype}"
                )
        return inp

    def backward_dw(self) -> None:
        raise NotImplementedError("the stand-in computes weight gradients at once")


def default_init(weight: Tensor) -> None:
    torch.nn.init.normal_(weight, mean=0.0, std=0.023)


def refuse_overlap(ub_name: str | None, **wanted: bool) -> None:
    """Overlapped communication needs ``initialize_ub``, which nothing here can call."""
    assert not any(wanted.values()), "initialize_ub() must be called before layer construction."


def refuse_delay(delay_wgrad_compute: bool) -> None:
    if delay_wgrad_compute:
        raise NotImplementedError("the stand-in computes weight gradients at once")


class Product(torch.autograd.Function):
    """``inp @ weight.T``; the weight's gradient goes into its ``main_grad`` where ``fuse``."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, weight: Tensor, fuse: bool) -> Tensor:
        ctx.fp8 = quantization.FP8GlobalStateManager.is_fp8_enabled()
        ctx.save_for_backward(inp, weight)
        ctx.fuse, ctx.parameter = fuse, weight
        if ctx.fp8:
            quantization.check_sizes(inp, weight)
            inp, weight = quantization.operands(inp, weight, weight=True)
        return F.linear(inp, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inp, weight = ctx.saved_tensors
        grad = grads[0]
        by_input = by_weight = None
        if ctx.needs_input_grad[0]:
            left, right = quantization.operands(grad, weight, weight=True) if ctx.fp8 else (grad, weight)
            by_input = left.matmul(right)
        if ctx.needs_input_grad[1]:
            left, right = grad.reshape(-1, grad.shape[-1]), inp.reshape(-1, inp.shape[-1])
            if ctx.fp8:
                columns = quantization.operands(left.T.contiguous(), right.T.contiguous(), weight=False)
                left, right = (part.T for part in columns)
            by_weight = accumulated(ctx.parameter, left, right) if ctx.fuse else left.T.matmul(right)
        return by_input, by_weight, None


def accumulated(weight: Any, left: Tensor, right: Tensor) -> Tensor | None:
    """Adds the gradient to ``weight.main_grad`` in its precision, and answers what autograd gets in its place."""
    gradient = left.T.to(weight.main_grad.dtype).matmul(right.to(weight.main_grad.dtype))
    if getattr(weight, "overwrite_main_grad", False):
        weight.main_grad.copy_(gradient)
    else:
        weight.main_grad.add_(gradient)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return get_dummy_wgrad(list(weight.shape), right.dtype, zero=getattr(weight, "zero_out_wgrad", False))


def parallel_product(module: Any, inp: Tensor, weight: Tensor) -> Tensor:
    """The product with the collectives of the module's parallel mode, both passes."""
    column, row = module.parallel_mode == "column", module.parallel_mode == "row"
    if column and module.tp_size > 1:
        inp = (Gather if module.sequence_parallel else SumOfGradients).apply(inp, module.tp_group)
    out: Tensor = Product.apply(inp, weight, module.fuse_wgrad_accumulation)
    if row and module.tp_size > 1:
        out = (ReduceScatter if module.sequence_parallel else Sum).apply(out, module.tp_group)
    return out


def normed(inp: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """Root-mean-square norm, weight included, in float32; cast once at the end."""
    gamma = weight.float() + 1.0 if zero_centered else weight.float()
    return F.rms_norm(inp.float(), (inp.shape[-1],), gamma, eps).to(inp.dtype)
