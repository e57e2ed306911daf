"""The checks of ``tools/gpu_check.py``. Importing this needs the standard library alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One line of the table.

    Its function takes a :class:`tools.gpu_checks.child.Place` and gives a :class:`tools.gpu_checks.child.Found`.
    """

    name: str
    proves: str
    module: str
    function: str
    estimate: float
    """Seconds it takes on one H200, imports included, as measured. With less left it is not begun."""
    deadline: float
    """Seconds after which it failed."""
    cuda_only: str = ""
    """Why there is nothing to do without CUDA; else empty."""


def _check(name: str, proves: str, where: str, estimate: float, deadline: float, cuda_only: str = "") -> Check:
    module, function = where.split(":")
    return Check(name, proves, f"tools.gpu_checks.{module}", function, estimate, deadline, cuda_only)


# In order of value: a budget cuts off the end.
CHECKS: tuple[Check, ...] = (
    _check("machine", "versions, devices, peers", "machine:machine", 10, 180),
    _check("attention", "packed attention is right on odd rows", "attention:rows", 40, 300),
    _check("parity-dense", "Megatron computes what transformers computes", "parity:dense", 45, 240),
    _check("parity-experts", "the same of a mixture of experts", "parity:experts", 40, 240),
    _check("checkpoint", "a resumed run goes on bit for bit", "memory:checkpoint", 45, 240),
    _check("offload", "the trainer's memory is really given back", "memory:offload", 75, 180),
    _check("ipc", "weights reach another process by a handle", "handles:ipc", 40, 180),
    _check("train-8b", "speed and memory of a step, Qwen3-8B", "steps:qwen3_8b", 110, 400),
    _check("engine", "SGLang's log-probabilities, release and resume under probes", "engines:engine", 150, 480),
    _check("doctor-sync", "every tensor arrives in the engine", "engines:doctor_sync", 95, 400),
    _check("rl", "two colocated steps of reinforcement learning", "engines:rl", 170, 500),
    _check("learns", "a policy learns: SFT, then RL", "learning:learns", 280, 590, "make demo shows it on a CPU"),
    _check("rl-large", "colocated steps of 1.2 billion weights", "learning:large", 270, 590, "rl does it at toy size"),
    _check("train-30b-a3b", "speed and memory of a step, Qwen3-30B-A3B", "steps:qwen3_30b_a3b", 130, 400),
    _check("train-32b", "speed and memory of a step, Qwen3-32B", "steps:qwen3_32b", 110, 400),
    _check("experts", "grouped experts equal single ones, and are faster", "experts:grouped", 40, 240),
    _check("attention-speed", "the kernel beside SDPA's flash", "attention:speed", 40, 240, "nothing to compare"),
)
