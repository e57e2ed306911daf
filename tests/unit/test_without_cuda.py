"""What Megatron builds on the meta device, where Python sees CUDA: plans and conversions as without it.

CUDA is only said to be there, and the Adam that wants it is not Transformer Engine's; ``tools/gpu_check.py`` plans on
a GPU before it trains (docs/benchmarks/gpu.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mua.compat.without_cuda import without_cuda
from mua.config.load import load_config
from mua.launch.plan.planner import make_plan
from mua.megatron.offline import convert_to_hf, verify
from mua.megatron.parallel import meta_rank
from mua.utils.errors import ConfigError, MuaError
from tests.megatron_support import write_model
from tests.torch_dist import write_torch_dist
from tests.unit.test_plan_meta import LAYOUT

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def ends() -> None:
    raise SystemExit(3)


@pytest.mark.usefixtures("cuda")
def test_errors_are_raised_here_and_no_answer_is_one() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        without_cuda(load_config, Path("nowhere.yaml"))
    with pytest.raises(MuaError, match="ends in a process without CUDA ended with status 3 and no result"):
        without_cuda(ends)


@pytest.mark.usefixtures("cuda")
def test_a_rank_on_the_meta_device_is_refused_beside_cuda() -> None:
    with pytest.raises(MuaError, match="sees no CUDA"), meta_rank(LAYOUT, 0):
        pass


@pytest.mark.slow
def test_a_plan_is_the_one_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(ROOT / "configs/qwen3-30b-a3b-2x8.yaml")
    expected = make_plan(config).as_json()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert make_plan(config).as_json() == expected


@pytest.mark.slow
def test_an_import_is_made_beside_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "model")
    write_torch_dist(str(tmp_path / "model"), str(tmp_path / "checkpoint"), {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    convert_to_hf(tmp_path / "checkpoint", tmp_path / "hf", tmp_path / "model")
    verify(tmp_path / "hf")


def test_a_plan_needs_no_fused_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine's, which Megatron takes where it is installed, is built on CUDA alone."""
    from megatron.core import optimizer as optimizers

    def fused(*_: Any, **__: Any) -> None:
        raise RuntimeError("No CUDA GPUs are available")

    config = load_config(ROOT / "configs/qwen3-8b-1x8.yaml")
    expected = make_plan(config).as_json()
    monkeypatch.setattr(optimizers, "Adam", fused)
    assert make_plan(config).as_json() == expected
    assert optimizers.Adam is fused
