"""The CPU shim of SGLang: still needed, pinned to the version it was written for, invisible to this process.

Not covered: serving through it, which tests/parity/test_engine_parity.py does.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from mua.compat import sglang_cpu


def run(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_the_installed_sglang_is_the_one_the_shim_was_written_for() -> None:
    assert importlib.metadata.version("sglang") == sglang_cpu.SGLANG_VERSION


@pytest.mark.grid
@pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is for hosts without CUDA")
def test_sglang_does_not_import_without_the_shim() -> None:
    """The day this fails, mua/compat/sglang_cpu can go. That it does with the shim is what every engine here shows."""
    code = "import sglang.srt.managers.scheduler"
    bare = dict(os.environ) | {"SGLANG_USE_CPU_ENGINE": "1"}
    missing = run(code, bare)
    assert missing.returncode != 0
    assert "sgl_kernel" in missing.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is None, reason="PyTorch's CPU build brings no NCCL")
def test_sglang_finds_nccl_without_the_plugin_and_none_with_it() -> None:
    """Where SGLang can load NCCL it uses it between the ranks of an engine, on a CPU too, and ends."""
    code = (
        "import inspect, mua_sglang_cpu\n"
        "from sglang.srt.distributed.device_communicators import pynccl\n"
        "pynccl.NCCLLibrary()\n"
        "assert 'with torch.cuda.device(device)' in inspect.getsource(pynccl.PyNcclCommunicator.__init__)\n"
        "mua_sglang_cpu.register()\n"
        "try:\n"
        "    pynccl.NCCLLibrary()\n"
        "except OSError:\n"
        "    print('none')\n"
    )
    done = run(code, sglang_cpu.cpu_environment())
    assert done.stdout.splitlines()[-1:] == ["none"], done.stderr[-2000:]


def test_the_plugin_is_found_only_through_the_server_environment() -> None:
    code = (
        "from importlib.metadata import entry_points;print([e.name for e in entry_points(group='sglang.srt.plugins')])"
    )
    assert "mua_cpu" in run(code, sglang_cpu.cpu_environment()).stdout
    assert "mua_cpu" not in run(code, dict(os.environ)).stdout


def test_this_process_does_not_see_the_shim() -> None:
    import mua.engine.pool
    import mua.engine.weight_sync  # noqa: F401

    assert importlib.util.find_spec("sgl_kernel") is None or torch.cuda.is_available()
    assert not any(str(sglang_cpu.SHIM.parent) in path for path in sys.path)


def test_the_callers_python_path_is_kept() -> None:
    assert sglang_cpu.cpu_environment(base={"PYTHONPATH": "/some/where"})["PYTHONPATH"].endswith(":/some/where")


@pytest.mark.slow
def test_murmur_hash_equals_the_published_algorithm() -> None:
    """Reference: MurmurHash3_x86_32 in plain integers, seed 0, over the same four words."""
    code = (
        "import torch, sgl_kernel;"
        "h=torch.ops.sgl_kernel.murmur_hash32_cpu("
        "torch.tensor([42, 2**40+7]), torch.tensor([3, 70000]), torch.arange(5));"
        "print(h.tolist())"
    )
    environment = dict(os.environ) | {"PYTHONPATH": str(sglang_cpu.SHIM)}
    printed = run(code, environment).stdout.strip()
    expected = [
        [murmur3(seed, position, column) for column in range(5)] for seed, position in ((42, 3), (2**40 + 7, 70000))
    ]
    assert printed == str(expected)


def murmur3(seed: int, position: int, column: int) -> int:
    mask, state = 0xFFFFFFFF, 0
    for word in (seed & mask, seed >> 32, position, column):
        word = word * 0xCC9E2D51 & mask
        word = (word << 15 | word >> 17) & mask
        state ^= word * 0x1B873593 & mask
        state = (state << 13 | state >> 19) & mask
        state = (state * 5 + 0xE6546B64) & mask
    state ^= 16
    state = (state ^ state >> 16) * 0x85EBCA6B & mask
    state = (state ^ state >> 13) * 0xC2B2AE35 & mask
    return state ^ state >> 16
