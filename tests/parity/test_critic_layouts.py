"""The critic under parallel layouts is the critic of a single process: values, losses, gradients, what it learns.

Real Megatron on gloo, at most four ranks. The head is given weights first, because one that begins at 0 hides its
backbone. A checkpoint of one layout goes on under another. Not covered: routing replay, which is the policy's, and what
one process does (tests/unit/test_megatron_critic.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mua.algorithms.losses import CrossEntropyLoss, ValueLoss
from mua.config.megatron import CriticConfig, CriticOptimizerConfig
from mua.megatron import layouts
from mua.megatron.checkpoint import checkpoint_folder
from tests.distributed import run_on_workers
from tests.layout_support import world_of
from tests.megatron_support import LENGTHS, backend, critic_heads, make_batch, with_values, write_model

STEPS = 3
CRITIC = CriticConfig(
    optimizer=CriticOptimizerConfig(learning_rate=1e-2, weight_decay=0.1, epsilon=1e-4, clip_grad=1.0), value_clip=0.2
)
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"layers": 4},
    "untied": {"layers": 4, "tied": False},
    "moe": {"layers": 4, "experts": 4},
}


def trained(folder: str, sizes: dict[str, Any], distributed: bool, out: str | None = None) -> dict[str, Any]:
    """Values before, metrics of some steps of policy and critic in turns, values after."""
    with backend(Path(folder), distributed_optimizer=distributed, critic=CRITIC, **sizes) as built:
        _give_heads_weights(built)
        batches = [with_values(make_batch(LENGTHS, seed=step)) for step in range(STEPS)]
        before = built.values(batches[0].sequences)
        found = _steps(built, batches[:-1])
        if out is not None:
            built.save(checkpoint_folder(Path(out), 1), {})
        found += _steps(built, batches[-1:])
        return {"before": before, "steps": found, "after": built.values(batches[0].sequences)}


def resumed(folder: str, sizes: dict[str, Any], source: str) -> dict[str, Any]:
    """The last step of :func:`trained` from its checkpoint."""
    with backend(Path(folder), critic=CRITIC, **sizes) as built:
        built.load(checkpoint_folder(Path(source), 1))
        found = _steps(built, [with_values(make_batch(LENGTHS, seed=STEPS - 1))])
        return {"steps": found, "after": built.values(make_batch(LENGTHS, seed=0).sequences)}


def _give_heads_weights(built: Any) -> None:
    weight = torch.randn(32, generator=torch.Generator().manual_seed(0)) * 0.3
    for head in critic_heads(built):
        head.weight.data.copy_(weight[None])
        head.bias.data.fill_(0.2)
    built.critic.optimizer.megatron.reload_model_params()


def _steps(built: Any, batches: Any) -> list[dict[str, float]]:
    names = ("critic/loss", "critic/grad_norm", "critic/clip_fraction", "critic/value", "critic/return")
    found = []
    for batch in batches:
        policy, critic = built.train_step(batch, CrossEntropyLoss()), built.train_values(batch, ValueLoss(0.2))
        found.append(
            {name: critic[name] for name in names}
            | {name: policy[name] for name in ("policy/loss", "policy/grad_norm")}
        )
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, shape in MODELS.items():
        write_model(root / name, **shape)
    return root


@pytest.fixture(scope="module")
def single(folder: Path) -> dict[str, Any]:
    """What one process finds for each model, when first asked."""
    return {}


def reference(folder: Path, single: dict[str, Any], model: str) -> dict[str, Any]:
    if model not in single:
        (single[model],) = run_on_workers(1, trained, str(folder / model), {}, False, str(folder / f"{model}-saved"))
    found: dict[str, Any] = single[model]
    return found


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    if "before" in found:
        for ours, theirs in zip(found["before"], expected["before"], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=0)
    for ours, theirs in zip(found["steps"][::-1], expected["steps"][::-1], strict=False):
        assert ours == pytest.approx(theirs, rel=2e-4, abs=1e-5)
    for ours, theirs in zip(found["after"], expected["after"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-3, rtol=0)


slow = pytest.mark.slow


REST = """
tied PP2 1, untied CP2 1, tied DP2 1, untied TP2 PP2 0, tied PP2 VPP2 1, moe DP2 EP2 1, untied TP2 0, untied PP2 0,
tied CP2 0, untied DP2 0, tied TP2 CP2 1, moe TP2 1
"""
"""Model, layout, whether the optimizer is distributed."""


@pytest.mark.parametrize("case", ["tied TP2 1", *(pytest.param(c.strip(), marks=slow) for c in REST.split(","))])
def test_a_layout_is_a_single_process(folder: Path, single: dict[str, Any], case: str) -> None:
    model, *sizes_by_name, distributed = case.split()
    name, expected = " ".join(sizes_by_name), reference(folder, single, model)
    assert expected["steps"][0]["critic/clip_fraction"] > 0, "the bound is part of what is compared"
    sizes = layouts.sizes(name)
    for found in run_on_workers(world_of(name), trained, str(folder / model), sizes, distributed == "1"):
        assert_alike(found, expected)


@slow
def test_a_critic_goes_on_under_another_layout(folder: Path, tmp_path: Path, single: dict[str, Any]) -> None:
    expected = reference(folder, single, "tied")
    saved = layouts.sizes("TP2 PP2")
    run_on_workers(4, trained, str(folder / "tied"), saved, True, str(tmp_path))
    for name in ("single", "DP2"):
        sizes = layouts.sizes(name)
        for found in run_on_workers(world_of(name), resumed, str(folder / "tied"), sizes, str(tmp_path)):
            assert_alike(found, expected)


@slow
def test_shared_prefixes_change_no_value(folder: Path, single: dict[str, Any]) -> None:
    """Sequences that begin alike are computed once; their values and gradients are those of each by itself."""
    (alone,) = run_on_workers(1, shared, str(folder / "tied"), False)
    (merged,) = run_on_workers(1, shared, str(folder / "tied"), True)
    assert merged["policy/merged_share"] == pytest.approx(40 / 108)
    assert alone["policy/merged_share"] == 0
    assert_alike(merged, alone)


def shared(folder: str, merge: bool) -> dict[str, Any]:
    """As :func:`trained`, on sequences of which every second continues the one before."""
    with backend(Path(folder), merge_prefixes=merge, max_tokens_per_microbatch=128, critic=CRITIC) as built:
        _give_heads_weights(built)
        batch = _with_shared_prefixes()
        before = built.values(batch.sequences)
        critic = built.train_values(batch, ValueLoss(0.2))
        found = {name: critic[name] for name in ("critic/loss", "critic/grad_norm")}
        share = critic["critic/merged_share"]
        return {
            "before": before,
            "steps": [found],
            "after": built.values(batch.sequences),
            "policy/merged_share": share,
        }


def _with_shared_prefixes() -> Any:
    batch = make_batch((30, 30, 24, 24))
    sequences = list(batch.sequences)
    for first in (0, 2):
        ids = sequences[first + 1].ids.copy()
        ids[:20] = sequences[first].ids[:20]
        sequences[first + 1] = replace(sequences[first + 1], ids=ids)
    return with_values(replace(batch, sequences=sequences))
