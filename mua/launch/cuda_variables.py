"""Environment variables that Megatron-Core, Transformer Engine, cuBLAS and NCCL read when CUDA starts, in one table.

    configuration, compute capability ──► needed_variables ─┬─► set_variables: each rank, before it touches CUDA
                                                            └─► check_variables: mua doctor, and the preflight

A value that a person has set stays, and is checked. What engines get is in :mod:`mua.engine.server`. Nothing is set
for ``TORCH_NCCL_AVOID_RECORD_STREAMS``: torch 2.14 says that it is the default now and the variable deprecated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal

from mua.config.schema import ExperimentConfig
from mua.engine.server import ALLOCATOR_VARIABLES, OF_NCCL_GROUP, expandable
from mua.launch.checks import Check
from mua.launch.gpus import Capability, visible_capability

BLACKWELL: Capability = (10, 0)
"""Both names are read; torch 2.14 prefers the first."""
_ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@dataclass(frozen=True)
class Variable:
    """What one variable is to be."""

    name: str
    value: str | None
    """None: not set by us, and to be left unset by others unless ``accepts`` says otherwise."""
    why: str
    otherwise: Literal["warning", "failure"]
    """What another value is."""
    accepts: Callable[[str], bool] = lambda _: False
    """Which other values serve too."""


def needed_variables(config: ExperimentConfig, capability: Capability | None) -> list[Variable]:
    """The table for one configuration; ``capability`` is that of the GPUs, None where there are none.

    Megatron's rule for connections is that of ``megatron/training/arguments.py`` 0.19.2, its values for determinism
    those of ``megatron/training/determinism.py``.
    """
    megatron, engine = config.megatron, config.engine
    needed = []
    split = megatron.tensor_parallel > 1 or megatron.context_parallel > 1
    if split and capability is not None and capability < BLACKWELL:
        why = "tensor and context parallelism before Blackwell: kernels must start in the order they were launched in"
        needed.append(Variable("CUDA_DEVICE_MAX_CONNECTIONS", "1", why, "warning"))
    if engine.transport == "broadcast":
        why = "engines and trainer form one NCCL group"
        needed += [Variable(name, value, why, "warning", str.isdigit) for name, value in OF_NCCL_GROUP.items()]
    if config.trainer.deterministic:
        why = "trainer.deterministic"
        needed += [
            Variable(
                "NCCL_ALGO", "Ring", why, "failure", lambda value: value in ("^NVLS", "CollnetDirect", "CollnetChain")
            ),
            Variable("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", why, "failure"),
            Variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8", why, "failure", lambda value: value == ":16:8"),
        ]
    if engine.transport == "colocated" or engine.memory_saver or megatron.offload:
        why = "memory in expandable segments has no legacy CUDA IPC handle, and torch_memory_saver cannot release it"
        needed += [
            Variable(name, None, why, "failure", lambda value: not expandable(value)) for name in ALLOCATOR_VARIABLES
        ]
    if megatron.offload_activations:
        why = "megatron.offload_activations: without it Transformer Engine offloads weights along with them"
        needed.append(Variable("NVTE_CPU_OFFLOAD_V1", "1", why, "failure"))
    why = "Megatron-Core chooses the attention kernel, and refuses another choice"  # it sets all three to 1 itself
    needed += [Variable(name, None, why, "failure", lambda value: value == "1") for name in _ATTENTION]
    return needed


def set_variables(config: ExperimentConfig, environment: MutableMapping[str, str] = os.environ) -> None:
    """Give this process what it needs and has not, before CUDA reads it; nothing where there is no GPU."""
    if (capability := visible_capability()) is None:
        return
    for variable in needed_variables(config, capability):
        if variable.value is not None:
            environment.setdefault(variable.name, variable.value)


def check_variables(
    config: ExperimentConfig, capability: Capability | None, environment: Mapping[str, str] = os.environ
) -> Check:
    """What the run will have, and whether a person's own values can stay."""
    needed = needed_variables(config, capability)
    wrong = [variable for variable in needed if not _serves(variable, environment.get(variable.name))]
    shown = [f"{v.name}={environment.get(v.name, v.value)}" for v in needed if v.value is not None]
    if wrong:
        state: Literal["warning", "failure"] = "failure" if any(v.otherwise == "failure" for v in wrong) else "warning"
        text = ", ".join(f"{v.name}={environment[v.name]}" for v in wrong)
        return Check("variables", state, text, "; ".join(_fix(v) for v in wrong))
    if capability is None:
        return Check("variables", "ok", "skipped what is set for GPUs; nothing in the way")
    return Check("variables", "ok", ", ".join(shown) or "none needed")


def _serves(variable: Variable, value: str | None) -> bool:
    return value is None or value == variable.value or variable.accepts(value)


def _fix(variable: Variable) -> str:
    told = f"unset {variable.name}" + ("" if variable.value is None else f" or set it to {variable.value}")
    return f"{told} ({variable.why})"


def known_variables(environment: Mapping[str, str] = os.environ) -> Check:
    """For a machine without a configuration: which of the table's variables are set."""
    names = ("CUDA_DEVICE_MAX_CONNECTIONS", *OF_NCCL_GROUP, "NCCL_ALGO", *ALLOCATOR_VARIABLES, *_ATTENTION)
    shown = ", ".join(f"{name}={environment[name]}" for name in names if name in environment) or "none set"
    if any(expandable(environment.get(name, "")) for name in ALLOCATOR_VARIABLES):
        return Check(
            "variables", "warning", shown, "expandable segments can be neither shared with engines nor released"
        )
    return Check("variables", "ok", shown)
