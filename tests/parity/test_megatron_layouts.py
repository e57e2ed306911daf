"""One batch, many layouts: a single process is transformers, and every proven layout is a single process.

Covers, for a dense and a mixture-of-experts model, every entry of ``mua.megatron.layouts`` over real gloo processes,
with and without the distributed optimizer and the balancing losses: log-probabilities, loss, gradients, gradient norm,
weights, the experts' load; prefix trees against their sequences side by side, an objective over whole sequences, the
critic's values and what it learns; that ranks which proved other layouts before find, bit for bit, what fresh ones
find; that ``docs/layouts.md`` names the same entries. Some layouts run in `make test`, all others as slow tests. That
faults are found is shown in test_planted_faults.py. Does not cover a GPU.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from mua.algorithms.losses import PolicyLoss
from mua.config.schema import AlgorithmConfig
from mua.megatron import layouts
from mua.megatron.packing import plan_microbatches
from mua.types import Float32Array, TrainBatch
from tests import layout_support
from tests.distributed import run_distributed, run_on_workers
from tests.layout_support import world_of
from tests.megatron_support import LENGTHS, OPTIMIZER, backend, exported, gradients, make_batch, write_model

STEPS = 2
TEMPERATURE = 0.8
LOSS = PolicyLoss(AlgorithmConfig(clip_high=0.3, epochs=2))
ROWS: tuple[dict[str, Any], ...] = ({"max_tokens_per_microbatch": 40, "balance": "tokens"}, {})
BATCHES: dict[str, tuple[int, ...]] = {"full": LENGTHS, "one sequence": (9,)}
MODELS = {"dense": {"layers": 4}, "moe": {"layers": 2, "experts": 8}}
ALWAYS = {
    "dense": ("DP2", "TP2 CP2", "PP2 VPP2", "TP2 PP2 DP2"),
    "moe": ("DP2 EP2", "TP2 EP2 ETP1", "PP2 CP2 EP2", "TP2 PP2 DP2 EP4 ETP1"),
}
PROVEN = {"dense": layouts.DENSE, "moe": layouts.MOE}
GRID = [
    pytest.param(kind, name, marks=[] if name in ALWAYS[kind] else pytest.mark.slow, id=f"{kind} {name}")
    for kind in PROVEN
    for name in PROVEN[kind]
]
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where :func:`layout_support.model_for` puts the models of the grid."""
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(("kind", "name"), GRID)
def test_a_layout_is_a_single_process(kind: str, name: str, models: Path) -> None:
    found = layout_support.measure(models, kind, name)
    assert not found.refused(), found


@slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [("moe", "CP2 EP2"), ("dense", "TP2 PP2"), ("moe", "TP2 PP2 VPP2 DP2 EP4 ETP1")],
)
def test_ranks_that_proved_other_layouts_find_what_fresh_ones_find(kind: str, name: str, models: Path) -> None:
    """Bit for bit: what ranks keep of earlier layouts, process groups among it, could hide a fault, or be one."""
    path, sizes, world = layout_support.model_for(models, kind, name), layouts.sizes(name), world_of(name)
    for other in ("DP2", "TP2") if world == 2 else ():
        run_on_workers(world, layout_support.digest, str(path), layouts.sizes(other))
    kept = run_on_workers(world, layout_support.digest, str(path), sizes)
    assert run_distributed(layout_support.digest, world, str(path), sizes) == kept


@pytest.mark.parametrize(
    ("kind", "name"),
    [("dense", "PP2 VPP2"), *(pytest.param("moe", name, marks=slow) for name in ("TP2 EP2 ETP1", "CP2 EP2"))],
)
def test_recomputation_changes_nothing_under_a_layout(kind: str, name: str, models: Path) -> None:
    found = layout_support.measure(models, kind, name, recompute="full")
    assert not found.refused(), found


@slow
def test_experts_are_recomputed_with_the_micro_batch_they_were_computed_with(models: Path) -> None:
    """In a pipeline their routers see other micro-batches in between."""
    selective = {"recompute": "selective", "recompute_modules": ["moe", "layernorm"]}
    found = layout_support.measure(models, "moe", "PP2", **selective)
    assert not found.refused(), found


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("dense", "DP2"),
        *(pytest.param("moe", name, marks=slow) for name in ("DP2 EP2", "TP2 PP2 DP2 EP4 ETP1")),
        *(pytest.param("dense", name, marks=slow) for name in ("PP2 VPP2 DP2", "CP2 DP2")),
    ],
)
def test_overlapped_communication_changes_nothing(kind: str, name: str, models: Path) -> None:
    """The first step learns which gradients come, the others send each bucket as soon as its gradients are there."""
    found = layout_support.measure(models, kind, name, **layout_support.OVERLAP)
    assert not found.refused(), found


def test_the_micro_batches_of_the_grid_do_not_depend_on_the_layout() -> None:
    # A balancing loss is a property of micro-batches; the grid compares it, so all layouts must cut the same ones.
    plans = [
        plan_microbatches(layout_support.LENGTHS, 64, ranks, multiple=multiple)
        for ranks, multiple in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4))
    ]
    assert len({frozenset(taken for rank in plan.microbatches for taken in rank) for plan in plans}) == 1


def hf_train(model: transformers.PreTrainedModel, batch: TrainBatch) -> dict[str, Any]:
    """The same two steps by transformers and torch alone, one sequence at a time."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(
        groups, lr=OPTIMIZER.learning_rate, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.epsilon,
        weight_decay=OPTIMIZER.weight_decay,
    )  # fmt: skip
    result: dict[str, Any] = {"train/loss": [], "train/entropy": [], "train/grad_norm": []}
    for step in range(STEPS):
        adam.zero_grad()
        losses, entropies, logprobs = zip(*(_hf_terms(model, one) for one in batch.sequences), strict=True)
        loss = torch.stack(losses).sum()
        loss.backward()
        result.setdefault("logprobs", logprobs)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
        if step == 0:
            result["gradients"] = saved(model, "grad")
        adam.step()
        result["train/loss"].append(loss.item())
        result["train/entropy"].append(float(torch.cat(entropies).mean()))
        result["train/grad_norm"].append(float(norm))
    result["weights"] = saved(model, "data")
    return result


def saved(model: transformers.PreTrainedModel, what: str) -> dict[str, Float32Array]:
    """Weights (``data``) or gradients (``grad``) as transformers names them on disk: experts one by one."""
    weights = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = getattr(parameter, what).clone()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors: dict[str, Float32Array] = load_file(Path(folder) / "model.safetensors")
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.data = weight
    return tensors


def _hf_terms(model: transformers.PreTrainedModel, sequence: Any) -> tuple[torch.Tensor, torch.Tensor, Float32Array]:
    """Loss, entropy of the trained tokens, and all log-probabilities of one sequence."""
    ids = torch.from_numpy(sequence.ids.astype(np.int64))
    log_p = (model(ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
    logprobs = torch.cat([torch.zeros(1), log_p.gather(1, ids[1:, None])[:, 0]])
    entropy = torch.cat([torch.zeros(1), -(log_p.exp() * log_p).sum(-1)])
    loss = layout_support.loss_of(LOSS, sequence, logprobs, entropy).loss
    return loss, entropy[torch.from_numpy(sequence.trained)].detach(), logprobs.detach().numpy()


def megatron_train(folder: str, layout: dict[str, Any]) -> dict[str, Any]:
    """What one rank sees of two steps on each batch."""
    result: dict[str, Any] = {}
    for name, lengths in BATCHES.items():
        batch = make_batch(lengths, temperature=TEMPERATURE)
        with backend(Path(folder), distributed_optimizer=False, **layout) as built:
            logprobs = built.log_probabilities(batch.sequences, TEMPERATURE)
            metrics = [built.train_step(batch, LOSS, keep=True)]
            for sequence, kept, scored in zip(batch, built.kept_logprobs, logprobs, strict=True):
                np.testing.assert_allclose(kept, np.where(sequence.trained, scored, 0), rtol=0, atol=1e-5)
            gradient = gradients(built)
            metrics.append(built.train_step(batch, LOSS))
            weights = exported(built)
        result[name] = {"logprobs": logprobs, "metrics": metrics, "gradients": gradient, "weights": weights}
    with backend(Path(folder), **layout) as built:
        batch = make_batch(temperature=TEMPERATURE)
        for _ in range(STEPS):
            built.train_step(batch, LOSS)
        result["distributed optimizer weights"] = exported(built)
    return result


@pytest.mark.parametrize("kind", MODELS)
def test_a_single_process_is_transformers(kind: str, tmp_path: Path) -> None:
    """With micro-batches of several sizes, and with the distributed optimizer."""
    write_model(tmp_path, **MODELS[kind])
    expected = {
        name: hf_train(
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path), make_batch(lengths, temperature=TEMPERATURE)
        )
        for name, lengths in BATCHES.items()
    }
    for settings in ROWS:
        (found,) = run_on_workers(1, megatron_train, str(tmp_path), settings)
        for name, reference in expected.items():
            own = found[name]
            for ours, theirs in zip(own["logprobs"], reference["logprobs"], strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
            for step, metrics in enumerate(own["metrics"]):
                for key in ("train/loss", "train/entropy", "train/grad_norm"):
                    tolerance = 1e-5 if step == 0 else 1e-4
                    assert metrics[key] == pytest.approx(reference[key][step], rel=tolerance, abs=1e-7), (key, step)
            assert_same(own["gradients"], reference["gradients"], 1e-6)
            assert_same(own["weights"], reference["weights"], 2e-5)
        assert_same(found["distributed optimizer weights"], expected["full"]["weights"], 2e-5)


def test_a_gradient_of_gspo_differs_from_one_of_grpo(models: Path) -> None:
    """The grid could not tell them apart if the sequence's mean were not used."""
    path = layout_support.model_for(models, "dense", "single")
    (found,) = run_on_workers(1, norms_by_objective, str(path))
    assert found["gspo"] != pytest.approx(found["grpo"], rel=1e-3)


def norms_by_objective(folder: str) -> dict[str, float]:
    found = {}
    for objective in ("grpo", "gspo"):
        with backend(Path(folder)) as built:
            loss = PolicyLoss(LOSS.config.model_copy(update={"loss": objective}))
            found[objective] = built.train_step(make_batch(), loss)["train/grad_norm"]
    return found


def test_the_page_lists_the_proven_layouts() -> None:
    page = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text()
    for kind, heading in (("dense", "Dense models"), ("moe", "Mixtures of experts")):
        section = page.split(f"## {heading}")[1].split("\n## ")[0]
        assert tuple(re.findall(r"^\| `([^`]+)`", section, re.MULTILINE)) == PROVEN[kind]


def assert_same(own: dict[str, Float32Array], reference: dict[str, Float32Array], tolerance: float) -> None:
    assert own.keys() == reference.keys()
    for name, values in own.items():
        np.testing.assert_allclose(values, reference[name], atol=tolerance, rtol=1e-4, err_msg=name)
