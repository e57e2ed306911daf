"""What Megatron-Core's optimizers get wrong: without Transformer Engine, without CUDA, and in checkpoints.

**An Adam that is fused without Transformer Engine or Apex.**
Upstream: megatron-core 0.19.2, ``megatron/core/optimizer``. Without either package it builds ``torch.optim.AdamW`` with
torch's defaults, on a CPU one tensor and operation after the other. :func:`fused_adam` is the same with torch's fused
kernel. Its state has a count of steps for each parameter, which :mod:`mua.compat.megatron_optimizer_state` restores.
Goes when: Megatron-Core passes ``fused`` on.

**Megatron-Core's optimizer that updates a share of the weights on the CPU, on a machine that has nothing but a CPU.**
Upstream: megatron-core 0.19.2, ``megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py``. It tells what is to be
offloaded from what is already on the host by ``is_cuda``, so that without CUDA everything counts as on the host and
the first step looks for copies that were never made. Here the first share of the weights is offloaded wherever they
are, so that copying to the host, both updates and copying back run as on a GPU. Applied without CUDA only.
Needed anywhere is :func:`zero_state`, as upstream fills the state it is about to load by a step with random gradients
and cannot save one that was never stepped.
Goes when: ``tests/unit/test_megatron_optimizer.py`` passes without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch


def fused_adam(params: Any, *, adam_w_mode: bool = True, fused: bool = True, **settings: Any) -> torch.optim.Adam:
    """torch's Adam, with decoupled weight decay if ``adam_w_mode``, by the name that fused optimizers have for it."""
    return (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(params, fused=fused, **settings)


def initialize_state(part: Any) -> None:
    """Gives the parameters of Megatron's optimizer ``part`` that were in no step yet the state they begin with.

    Upstream: megatron-core 0.19.2, ``megatron/core/optimizer/__init__.py``. Its ``init_state_fn`` calls
    ``initialize_state(p)`` of a precision-aware Adam; Transformer Engine's takes a second argument without default,
    whether only the bits that a bfloat16 weight lacks are kept, so that such an optimizer could not be resumed.
    Goes when: ``tests/unit/test_megatron_compat.py::test_upstream_initializes_a_precise_adam_by_one_argument`` fails.
    """
    adam = part.optimizer
    if not part.config.use_precision_aware_optimizer:
        part.init_state_fn(adam, part.config)
        for parameter, state in adam.state.items() if isinstance(adam, torch.optim.Adam) else ():
            state.setdefault("step", torch.zeros((), dtype=torch.float32, device=parameter.device))
        return
    for group in adam.param_groups:
        for parameter in group["params"]:
            if not adam.state[parameter]:
                adam.initialize_state(parameter, adam.store_param_remainders and parameter.dtype == torch.bfloat16)


def repair_optimizer(module: Any, without_cuda: bool) -> None:
    """Gives the imported ``megatron.core.optimizer`` the Adam above where it fell back to torch's."""
    if module.USING_PYTORCH_OPTIMIZER:
        module.USING_PYTORCH_OPTIMIZER, module.Adam = False, fused_adam


@contextmanager
def plain_adam() -> Iterator[None]:
    """Megatron builds its optimizers of the Adam above, whatever fused ones are installed, until the end of the block.

    Upstream: Transformer Engine 2.20.2, ``pytorch/optimizers/fused_adam.py``, puts a tensor on CUDA as it is built, and
    ``mua plan``, which needs the optimizer's tensors on the meta device alone, ended with ``No CUDA GPUs are
    available`` wherever Transformer Engine is installed.
    Goes when: Transformer Engine's FusedAdam can be built without CUDA.
    """
    from megatron.core import optimizer as optimizers  # this file repairs it while it is imported

    before = optimizers.USING_PYTORCH_OPTIMIZER, optimizers.Adam
    optimizers.USING_PYTORCH_OPTIMIZER, optimizers.Adam = False, partial(fused_adam, fused=False)
    try:
        yield
    finally:
        optimizers.USING_PYTORCH_OPTIMIZER, optimizers.Adam = before


def joined(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Float32 weights from bfloat16 ones and the int16 bits that Transformer Engine's Adam keeps of them.

    The bits are the float32 pattern's lower half as a signed number; where it is negative the bfloat16 weight is one
    bit higher, so that it is the nearest one (``AdamFunctorMasterParamRemainder`` of Transformer Engine at 0608bde).
    """
    bits = (high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
    return bits.view(torch.float32)


def split(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`joined` joins: float32 weights as bfloat16 ones and int16 bits."""
    bits = weights.contiguous().view(torch.int32)
    low = ((bits & 0xFFFF) ^ 0x8000) - 0x8000
    return ((bits - low) >> 16).to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def repair_distributed_optimizer(module: Any, without_cuda: bool) -> None:
    """Makes what the imported ``megatron.core.optimizer.distrib_optimizer`` tells of a parameter its float32 weight,
    whatever its Adam keeps of it.

    Upstream: megatron-core 0.19.2, ``megatron/core/optimizer/distrib_optimizer.py``. Its ``fully_reshardable`` form
    takes the remainders of a precision-aware Adam for the weights, saves them as float32 and on loading gives them
    as such to Transformer Engine, which asserts on int16. Whole weights are also what an optimizer of other types or of
    another implementation reads. Of a float32 parameter Transformer Engine updates the parameter, not its copy.
    Goes when: ``tests/unit/test_megatron_compat.py::test_a_precise_adam_is_saved_with_whole_weights`` fails.
    """
    optimizer, hybrid = module.DistributedOptimizer, module.HybridDeviceOptimizer
    read, write = optimizer._get_main_param_and_optimizer_states, optimizer._set_main_param_and_optimizer_states

    def own(self: Any, model_param: Any) -> tuple[Any, Any]:
        """A rank's part of a parameter, and what its Adam keeps as the main one."""
        group, place = self.model_param_group_index_map[model_param]
        parameter = self.optimizer.param_groups[group]["params"][place]
        main = None if isinstance(self.optimizer, hybrid) else self.optimizer.state[parameter].get("master_param")
        return parameter, main

    @wraps(read)
    def read_whole(self: Any, model_param: Any) -> Any:
        tensors, (parameter, main) = read(self, model_param), own(self, model_param)
        if main is not None and parameter.dtype == torch.float32:
            return tensors | {"param": parameter}
        if main is not None and main.dtype == torch.int16:
            return tensors | {"param": joined(parameter, main)}
        return tensors

    @wraps(write)
    @torch.no_grad()
    def write_whole(self: Any, model_param: Any, tensors: Any) -> None:
        parameter, main = own(self, model_param)
        if main is not None and main.dtype == torch.int16:
            # Also the weight: another optimizer's was rounded to even where it lay halfway.
            high, low = split(tensors["param"])
            parameter.copy_(high)
            tensors = tensors | {"param": low}
        write(self, model_param, tensors)

    optimizer._get_main_param_and_optimizer_states = read_whole
    optimizer._set_main_param_and_optimizer_states = write_whole


# ---- an optimizer that is partly on the CPU


def repair_offload(module: Any, without_cuda: bool) -> None:
    """Gives the imported ``hybrid_optimizer`` the division below."""
    if without_cuda:
        module.HybridDeviceOptimizer._get_sub_optimizer_param_groups = _divided


def zero_state(optimizer: Any) -> None:
    """Moments of zero, and no step made, where a ``HybridDeviceOptimizer`` has no state yet."""
    for part in optimizer.sub_optimizers:
        for group in part.param_groups:
            for parameter in group["params"]:
                state = part.state[parameter]
                if "exp_avg" not in state:
                    state.update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
                    if isinstance(part, torch.optim.Adam):  # which counts steps for each parameter
                        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    optimizer._sync_sub_optimizers_state_to_hdo()


def _divided(self: Any, offload_fraction: float) -> tuple[Any, ...]:
    """Groups updated on the host and on the device, and how their tensors belong to the model's."""
    wanted = offload_fraction * sum(p.numel() for group in self.param_groups for p in group["params"])
    host: list[dict[str, Any]] = []
    device: list[dict[str, Any]] = []
    copies, originals, in_fp32, taken = {}, {}, {}, 0
    for group in self.param_groups:
        away, here = ({**group, "params": []} for _ in range(2))
        for parameter in group["params"]:
            own, offloaded = parameter, taken < wanted
            if offloaded or (self.param_update_in_fp32 and own.dtype != torch.float32):
                own = own.detach().clone().float() if self.param_update_in_fp32 else own.detach().clone()
            if own.dtype != parameter.dtype:
                in_fp32[parameter] = own
            if offloaded:
                taken += parameter.numel()
                copies[parameter], originals[own] = own, parameter
            (away if offloaded else here)["params"].append(own)
        host += [away] if away["params"] else []
        device += [here] if here["params"] else []
    return host, device, copies, originals, in_fp32
