"""Megatron-Core's settings from configuration and capabilities: what a machine would get, asked on a CPU.

Not covered: that Transformer Engine's kernels compute what the settings say; no GPU is here.
"""

from __future__ import annotations

import pytest

from mua.config.schema import MegatronConfig
from mua.errors import ConfigError
from mua.megatron import settings
from mua.megatron.capabilities import Capabilities, implementation_of

GPU = Capabilities(cuda=True, compute=(9, 0), torch="2.14.1", transformer_engine="2.20.2")
BARE_GPU = Capabilities(cuda=True, compute=(9, 0), torch="2.14.1")
CPU = Capabilities(cuda=False, torch="2.14.1+cpu")


@pytest.mark.parametrize(
    ("implementation", "machine", "expected"),
    [
        ("auto", GPU, "transformer_engine"),
        ("auto", BARE_GPU, "local"),
        ("auto", CPU, "local"),
        ("auto", Capabilities(cuda=False, transformer_engine="2.20.2"), "local"),
        ("local", GPU, "local"),
        ("transformer_engine", GPU, "transformer_engine"),
    ],
)
def test_implementation(implementation: str, machine: Capabilities, expected: str) -> None:
    assert implementation_of(MegatronConfig.model_validate({"implementation": implementation}), machine) == expected


@pytest.mark.parametrize(
    ("implementation", "machine", "message"),
    [
        ("transformer_engine", BARE_GPU, r"not installed; install constraints/gpu-py312-cu\.txt .* auto or local"),
        ("transformer_engine", CPU, "not installed"),
        ("transformer_engine", Capabilities(cuda=False, transformer_engine="2.20.2"), "needs a CUDA device"),
        ("auto", Capabilities(cuda=True, transformer_engine="1.13.0"), r"is 1\.13\.0, .* needs .*>=2\.9\.0,<3"),
        ("auto", Capabilities(cuda=True, transformer_engine="3.0"), r"is 3\.0, .* needs .*>=2\.9\.0,<3"),
        ("auto", Capabilities(cuda=True, transformer_engine="main"), "'main' of Transformer Engine cannot be read"),
    ],
)
def test_unusable_transformer_engine_is_one_error(implementation: str, machine: Capabilities, message: str) -> None:
    config = MegatronConfig.model_validate({"implementation": implementation})
    with pytest.raises(ConfigError, match=rf"^megatron\.implementation {implementation}: .*{message}"):
        implementation_of(config, machine)


def test_this_machine_can_be_another_for_a_while() -> None:
    here = settings.capabilities()
    with settings.pretending(GPU):
        assert settings.capabilities() == GPU
    assert settings.capabilities() == here
