"""What a machine has that decides which of Megatron-Core's settings are possible; a value, so that a CPU can ask what a
GPU would get."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal, Self, TypeAlias

import torch
from packaging.version import InvalidVersion, Version

from mua.config.schema import MegatronConfig
from mua.utils.errors import ConfigError

Implementation: TypeAlias = Literal["transformer_engine", "local"]
Apex: TypeAlias = Literal["kernel", "without kernel", "other package", "absent"]

TRANSFORMER_ENGINE = ("2.9.0", "3")
"""Versions of Transformer Engine that go with Megatron-Core 0.19: the first or later, below the second. ``setup.py``
asks for the same; the highest that Megatron-Core asks for in what is used here is 2.7 (``is_te_min_version``)."""
HOPPER = (9, 0)
"""The first compute capability with products of float8."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a machine has."""

    cuda: bool
    """Whether there is a CUDA device."""
    compute: tuple[int, int] | None = None
    """Compute capability of the device: (9, 0) is Hopper."""
    torch: str = ""
    """Version of torch."""
    transformer_engine: str | None = None
    """Version of Transformer Engine; None: it is not installed, or its part for torch is not."""
    apex: Apex = "absent"
    """NVIDIA's Apex: with its kernel for fused gradient accumulation, or without; or PyPI's package of that name, which
    is another; or neither."""

    @classmethod
    def here(cls) -> Self:
        """Of this process; packages are looked for, not imported."""
        cuda = torch.cuda.is_available()
        engine: str | None = None
        if importlib.util.find_spec("transformer_engine") is not None:
            with suppress(metadata.PackageNotFoundError):
                metadata.version("transformer-engine-torch")  # without it there is nothing but the core library
                engine = metadata.version("transformer-engine")
        apex: Apex = "absent"
        if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None:
            apex = "kernel"
        elif found := importlib.util.find_spec("apex"):
            folders = found.submodule_search_locations or []
            ours = any((Path(folder) / "multi_tensor_apply").is_dir() for folder in folders)
            apex = "without kernel" if ours else "other package"
        return cls(
            cuda=cuda,
            compute=torch.cuda.get_device_capability() if cuda else None,
            torch=torch.__version__,
            transformer_engine=engine,
            apex=apex,
        )


_pretended: Capabilities | None = None


def capabilities() -> Capabilities:
    """Of this process, or what :func:`pretending` says."""
    return Capabilities.here() if _pretended is None else _pretended


@contextmanager
def pretending(of: Capabilities) -> Iterator[None]:
    """Within it, models are built as on a machine with these capabilities."""
    global _pretended
    before, _pretended = _pretended, of
    try:
        yield
    finally:
        _pretended = before


def implementation_of(megatron: MegatronConfig, of: Capabilities) -> Implementation:
    """Whose layers the model is built of.

    Raises:
        ConfigError: Transformer Engine is asked for and cannot be used: what is missing, and the fix.
    """
    if megatron.implementation == "local":
        return "local"
    problem = _transformer_engine_problem(of)
    if problem is None:
        return "transformer_engine"
    if megatron.implementation == "auto" and (not of.cuda or of.transformer_engine is None):
        return "local"
    raise ConfigError(f"megatron.implementation {megatron.implementation}: {problem}")


def apex_problem(of: Capabilities) -> str | None:
    """Why gradients cannot be accumulated inside their products, with the fix; None if they can."""
    install = (
        "install NVIDIA's from source (pip install -v --no-build-isolation --config-settings "
        '"--build-option=--cpp_ext --cuda_ext" git+https://github.com/NVIDIA/apex)'
    )
    if of.apex == "kernel":
        return None if of.cuda else "its kernel needs a CUDA device"
    return {
        "without kernel": f"NVIDIA's Apex is installed without its kernel fused_weight_gradient_mlp_cuda; {install}",
        "other package": f"the package apex that is installed is PyPI's, not NVIDIA's; uninstall it and {install}",
        "absent": f"NVIDIA's Apex is not installed (PyPI's package of that name is another); {install}",
    }[of.apex]


def _transformer_engine_problem(of: Capabilities) -> str | None:
    """Why Transformer Engine cannot be used, with the fix; None if it can."""
    least, below = TRANSFORMER_ENGINE
    wanted = f"transformer-engine>={least},<{below}"
    if of.transformer_engine is None:
        return (
            "Transformer Engine is not installed; install constraints/gpu-py312-cu.txt and "
            "constraints/gpu-py312-cu-source.txt (docs/installation.md), or set it to auto or local"
        )
    if not of.cuda:
        return "Transformer Engine needs a CUDA device and there is none; set it to auto or local"
    try:
        found = Version(of.transformer_engine)
    except InvalidVersion:
        return f"the version {of.transformer_engine!r} of Transformer Engine cannot be read; install {wanted}"
    if not Version(least) <= found < Version(below):
        return (
            f"Transformer Engine is {of.transformer_engine}, and Megatron-Core 0.19 needs {wanted}; install that "
            "(constraints/gpu-py312-cu.txt has the version that is tried), or set megatron.implementation to local"
        )
    return None
