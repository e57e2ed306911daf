"""Lets the unmodified SGLang wheel from PyPI serve on a host without CUDA and without AMX.

Reason: SGLang 0.5.23 has a CPU engine (``SGLANG_USE_CPU_ENGINE=1``), but it imports names from a package
whose wheels need CUDA libraries. ``shim/`` holds a stand-in ``sgl_kernel`` (the names, and one real function)
and a plugin for SGLang's own entry-point group ``sglang.srt.plugins``. No file of SGLang is changed.

Upstream: sglang 0.5.23. Expiry: ``tests/contract/test_sglang_cpu_shim.py`` starts the import without the
shim; the day it succeeds, this package can go.

The folder reaches only the environment of a spawned CPU server; it is never on ``sys.path`` of the
process that starts it, and on a GPU host nothing here is used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mua.utils.cores import given_cores

SHIM = Path(__file__).parent / "shim"

ATTENTION_BACKEND = "mua_invariant"
"""Attention backend the plugin registers; results of a token do not depend on the batch it is computed in."""


def cpu_environment(
    threads: int = 1, tensor_parallel: int = 1, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The whole environment of a spawned CPU server.

    ``threads`` is OMP threads per rank: SGLang runs one scheduler thread beside them, so on a few cores one is
    fastest. TorchDynamo is off because it would compile C++ at run time for the seeded sampler.
    """
    environment = dict(os.environ if base is None else base)
    inherited = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    environment["PYTHONPATH"] = os.pathsep.join([str(SHIM), *inherited])
    environment["SGLANG_USE_CPU_ENGINE"] = "1"
    environment["OMP_NUM_THREADS"] = str(threads)
    environment["TORCHDYNAMO_DISABLE"] = "1"
    if tensor_parallel > 1:
        cores = sorted(given_cores())
        binding = (str(cores[rank % len(cores)]) for rank in range(tensor_parallel))
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(binding)
    return environment
