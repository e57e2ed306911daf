"""Collectives with their gradients, recomputation, random states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor

_ATTRIBUTES = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}
_all_states: dict[str, Tensor] = {}


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    for attribute in _ATTRIBUTES:
        if hasattr(tensor, attribute):
            raise RuntimeError(
                f"Tensor already has attribute '{attribute}' set. Cannot set tensor model parallel attributes on a "
                "tensor that already has them."
            )
    tensor.tensor_model_parallel = is_parallel  # type: ignore[attr-defined]
    tensor.partition_dim = dim  # type: ignore[attr-defined]
    tensor.partition_stride = stride  # type: ignore[attr-defined]


def gather_along_first_dim(inp: Tensor, process_group: Any, async_op: bool = False) -> tuple[Tensor, None]:
    assert not async_op
    out = inp.new_empty(inp.shape[0] * process_group.size(), *inp.shape[1:])
    dist.all_gather_into_tensor(out, inp.contiguous(), group=process_group)
    return out, None


def reduce_scatter_along_first_dim(inp: Tensor, tp_group: Any, async_op: bool = False) -> tuple[Tensor, None]:
    assert not async_op
    size = tp_group.size()
    assert inp.shape[0] % size == 0, "First dimension of the tensor should be divisible by tensor parallel size"
    out = inp.new_empty(inp.shape[0] // size, *inp.shape[1:])
    dist.reduce_scatter_tensor(out, inp.contiguous(), group=tp_group)
    return out, None


class Gather(torch.autograd.Function):
    """Input of a column-parallel product under sequence parallelism."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gather_along_first_dim(inp, group)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_along_first_dim(grads[0], ctx.group)[0], None


class ReduceScatter(torch.autograd.Function):
    """Output of a row-parallel product under sequence parallelism."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return reduce_scatter_along_first_dim(inp, group)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gather_along_first_dim(grads[0], ctx.group)[0], None


class SumOfGradients(torch.autograd.Function):
    """Input of a column-parallel product without sequence parallelism."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return inp.view_as(inp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        summed = grads[0].contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class Sum(torch.autograd.Function):
    """Output of a row-parallel product without sequence parallelism."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, group: Any) -> Tensor:
        summed = inp.contiguous().clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class CudaRNGStatesTracker:
    """Random states by name."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states_ = states
        _publish(states)

    def add(self, name: str, seed: int) -> None:
        if seed in self.seeds_:
            raise RuntimeError(f"seed {seed} already exists")
        if name in self.states_:
            raise RuntimeError(f"cuda rng state {name} already exists")
        self.seeds_.add(seed)
        before = torch.get_rng_state()
        torch.manual_seed(seed)
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(before)
        _publish(self.states_)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        if name not in self.states_:
            raise KeyError(f"cuda rng state {name} is not added")
        before = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(before)


def get_all_rng_states() -> dict[str, Tensor]:
    return _all_states


def _publish(states: dict[str, Tensor]) -> None:
    global _all_states
    _all_states = states


class activation_recompute_forward(AbstractContextManager[None], ContextDecorator):
    """Only fp8 with delayed scaling needs to know of recomputation."""

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False) -> None:
        self.activation_recompute, self.recompute_phase = activation_recompute, recompute_phase

    def __exit__(self, *exc_details: Any) -> None:
        return None


def is_fp8_activation_recompute_enabled() -> bool:
    return False


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Recomputes ``function`` in the backward pass, under the random states of the forward pass."""
    reentrant = kwargs.pop("use_reentrant", True)
    if kwargs.pop("distribute_saved_activations", False):
        raise NotImplementedError("the stand-in keeps activations whole")
    kwargs.pop("tp_group", None)
    tracker = kwargs.pop("get_rng_state_tracker", None)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    states, first = (tracker().get_states() if tracker is not None else None), True

    def again(*inputs: Any) -> Any:
        nonlocal first
        if first or states is None:
            first = False
            return function(*inputs, **kwargs)
        now = tracker().get_states()
        tracker().set_states(dict(states))
        try:
            return function(*inputs, **kwargs)
        finally:
            tracker().set_states(now)

    return torch.utils.checkpoint.checkpoint(again, *args, use_reentrant=reentrant)
