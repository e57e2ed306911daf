"""Environment variables of engines, and those that engines and trainer must agree on because they share a NCCL group.

Read in SGLang 0.5.23, ``entrypoints/engine.py``: it sets ``CUDA_DEVICE_MAX_CONNECTIONS`` to 8 whatever it finds, and
``NCCL_CUMEM_ENABLE`` and ``NCCL_NVLS_ENABLE`` to 0 where they are not set. All of its processes start after that.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

OF_NCCL_GROUP: Mapping[str, str] = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""What a group of trainer and engine ranks needs alike on all of them, and SGLang's own choice."""
OF_TRAINER = frozenset({"CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "CUBLAS_WORKSPACE_CONFIG"})
"""Set for Megatron; SGLang has settings of its own. Its captured graphs and overlapping streams want more than the one
connection that Megatron's order of kernels rests on."""


def for_engine(environment: Mapping[str, str]) -> dict[str, str]:
    """A trainer's or launcher's variables for an engine that it starts; a person's own values of NCCL's stay."""
    return dict(OF_NCCL_GROUP) | {name: value for name, value in environment.items() if name not in OF_TRAINER}


def with_cuda_runtime(environment: Mapping[str, str]) -> dict[str, str]:
    """The same, with the folder of PyTorch's own CUDA runtime as the last place where the loader looks.

    torch_memory_saver is preloaded into SGLang's processes before torch is, and names ``libcudart.so.13``; where CUDA
    came with pip alone, no such process would start.
    """
    spec = importlib.util.find_spec("nvidia")
    places = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    found = sorted({str(file.parent) for place in places for file in place.glob("*/lib/libcudart.so.*")})
    before = environment.get("LD_LIBRARY_PATH", "")
    if not found or found[-1] in before.split(os.pathsep):
        return dict(environment)
    return dict(environment) | {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, [before, found[-1]]))}
