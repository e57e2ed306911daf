"""Environment variables of engines, and those that engines and trainer must agree on because they share a NCCL group.

Read in SGLang 0.5.23, ``entrypoints/engine.py``: it sets ``CUDA_DEVICE_MAX_CONNECTIONS`` to 8 whatever it finds, and
``NCCL_CUMEM_ENABLE`` and ``NCCL_NVLS_ENABLE`` to 0 where they are not set. All of its processes start after that.
"""

from __future__ import annotations

from collections.abc import Mapping

OF_NCCL_GROUP: Mapping[str, str] = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""What a group of trainer and engine ranks needs alike on all of them, and SGLang's own choice."""
OF_TRAINER = frozenset({"CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "CUBLAS_WORKSPACE_CONFIG"})
"""Set for Megatron; SGLang has settings of its own. Its captured graphs and overlapping streams want more than the one
connection that Megatron's order of kernels rests on."""


def for_engine(environment: Mapping[str, str]) -> dict[str, str]:
    """A trainer's or launcher's variables for an engine that it starts; a person's own values of NCCL's stay."""
    return dict(OF_NCCL_GROUP) | {name: value for name, value in environment.items() if name not in OF_TRAINER}
