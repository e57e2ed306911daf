"""Megatron-Core's optimizer that updates a share of the weights on the CPU, on a machine that has nothing but a CPU.

Upstream: megatron-core 0.19.2, ``megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py``. It tells what is to be
offloaded from what is already on the host by ``is_cuda``, so that without CUDA everything counts as on the host and
the first step looks for copies that were never made. Here the first share of the weights is offloaded wherever they
are, so that copying to the host, both updates and copying back run as on a GPU. Applied without CUDA only.
Needed anywhere are :func:`zero_state`, as upstream fills the state it is about to load by a step with random gradients
and cannot save one that was never stepped, and :func:`settle_steps`.
Goes when: ``tests/unit/test_megatron_optimizer.py`` passes without it.
"""

from __future__ import annotations

from typing import Any

import torch

OF_HYBRID = (
    "offload_fraction", "cpu_optimizer_cls", "gpu_optimizer_cls", "param_update_in_fp32", "pin_cpu_grads",
    "pin_cpu_params", "overlap_cpu_optimizer_d2h_h2d", "fused",
)  # fmt: skip
"""What upstream keeps in parameter groups, classes among it, that no checkpoint needs to hold."""


def repair(module: Any, without_cuda: bool) -> None:
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
                    if part in optimizer.cpu_optimizers:  # torch's own counts steps for each parameter
                        state["step"] = torch.zeros((), dtype=torch.float32)
    optimizer._sync_sub_optimizers_state_to_hdo()


def settle_steps(optimizer: Any) -> None:
    """Gives the count of steps that was loaded to the part on the device, which counts them on.

    Upstream leaves it in the whole's parameter groups and copies it from there before every step, so that the
    correction of the moments' bias would stay as it was at the first step after a checkpoint.
    """
    counts = [group.pop("step") for group in optimizer.param_groups if "step" in group]
    if optimizer.gpu_optimizer is not None and counts:
        for group in optimizer.gpu_optimizer.param_groups:
            group["step"] = counts[0]


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
