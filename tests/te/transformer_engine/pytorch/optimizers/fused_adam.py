"""Adam with one step count per group, moments and main weights in precisions of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_MOMENTS = ("exp_avg", "exp_avg_sq")


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        kinds = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": master_weight_dtype}
        if capturable or any(kind not in (torch.float32, torch.bfloat16) for kind in kinds.values()):
            raise NotImplementedError("the stand-in keeps states in float32 or bfloat16, outside of graphs")
        if master_weights and master_weight_dtype not in (torch.float32, torch.float16):
            raise RuntimeError("FusedAdam only supports fp32/fp16 master weights.")
        group = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, group)
        self.adam_w_mode, self.master_weights, self.capturable = int(adam_w_mode), master_weights, capturable
        self.use_decoupled_grad, self.name_to_dtype_map = use_decoupled_grad, kinds
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype == torch.float32

    def _has_remainder(self, param: Tensor, name: str = "master_param") -> bool:
        return self.store_param_remainders and name == "master_param" and param.dtype == torch.bfloat16

    def _has_main_weight(self, param: Tensor) -> bool:
        """A float32 parameter is itself updated; its ``master_param`` stays as it was made."""
        return self.master_weights and param.dtype != torch.float32

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        for name in _MOMENTS:
            self.state[param][name] = torch.zeros_like(param, dtype=self.name_to_dtype_map[name])
        if self.master_weights and store_param_remainders:
            self.state[param]["master_param"] = torch.zeros_like(param, dtype=torch.int16)
        elif self.master_weights:
            self.state[param]["master_param"] = param.detach().clone().float()

    def get_unscaled_state(self, param: Tensor, state_name: str, skip_unscale: bool = False) -> Tensor:
        state: Tensor = self.state[param][state_name]
        return state if skip_unscale or self._has_remainder(param, state_name) else state.float()

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        remainder = self._has_remainder(param, state_name)
        assert unscaled_state.dtype == (torch.int16 if remainder else torch.float32)
        kind = torch.int16 if remainder else self.name_to_dtype_map[state_name]
        if state_name not in self.state[param]:
            self.state[param][state_name] = torch.empty_like(param, dtype=kind)
        self.state[param][state_name].copy_(unscaled_state)

    def _ordered(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        params = self._ordered()
        for index, values in state["state"].items():
            state["state"][index] = {name: self.get_unscaled_state(params[index], name) for name in values}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # torch has cast what is there to the parameters' dtype, main weights too.
        params = self._ordered()
        for index, values in state_dict["state"].items():
            self.state[params[index]] = {}
            for name, value in values.items():
                whole = value if self._has_remainder(params[index], name) else value.float()
                self.set_scaled_state(params[index], name, whole)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:  # type: ignore[override]
        assert grad_scaler is None
        loss = None if closure is None else closure()
        for group in self.param_groups:
            # Counted also where a rank's share of the group is empty, so that ranks agree.
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, self._has_remainder(param))
                name = "decoupled_grad" if self.use_decoupled_grad else "grad"
                if (gradient := getattr(param, name, None)) is not None:
                    self._update(param, gradient.float(), group)
        return loss

    def _update(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[param], group["betas"]
        weight = self._main_weight(param)
        if not self.adam_w_mode:
            gradient = gradient + group["weight_decay"] * weight
        first = beta1 * state["exp_avg"].float() + (1 - beta1) * gradient
        second = beta2 * state["exp_avg_sq"].float() + (1 - beta2) * gradient * gradient
        state["exp_avg"].copy_(first)
        state["exp_avg_sq"].copy_(second)
        steps = group["step"] if group["bias_correction"] else torch.inf
        update = first / (1 - beta1**steps) / ((second / (1 - beta2**steps)).sqrt() + group["eps"])
        if self.adam_w_mode:
            update = update + group["weight_decay"] * weight
        self._set_weight(param, weight - group["lr"] * update)

    def _main_weight(self, param: Tensor) -> Tensor:
        if self._has_remainder(param):
            high = param.view(torch.int16).to(torch.int32) << 16
            return (high + self.state[param]["master_param"].to(torch.int32)).view(torch.float32)
        return self.state[param]["master_param"] if self._has_main_weight(param) else param.float()

    def _set_weight(self, param: Tensor, weight: Tensor) -> None:
        if self._has_remainder(param):
            # The remainder is what lies between the float32 weight and the parameter, rounded half up.
            bits = weight.view(torch.int32)
            remainder = ((bits & 0xFFFF) ^ 0x8000) - 0x8000
            self.state[param]["master_param"].copy_(remainder)
            param.view(torch.int16).copy_((bits - remainder) >> 16)
            return
        if self._has_main_weight(param):
            self.state[param]["master_param"].copy_(weight)
        param.copy_(weight)
