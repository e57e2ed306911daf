"""Replayed expert choices: the trainer computes what transformers computes with the same choices forced upon it.

Choices are recorded ones: random (so that hardly any is the model's own) or the model's own. Covers log-probabilities,
gradients and the share of agreement on one process and under tensor, context, pipeline, expert and data parallelism,
recomputation, the check that changes nothing, and what is refused. Does not cover the engine that records them
(tests/parity/test_engine_experts.py), nor a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from mua.algorithms.losses import PolicyLoss
from mua.config.schema import AlgorithmConfig
from mua.megatron import layouts
from mua.types import ExpertArray, Float32Array, TrainBatch
from mua.utils.errors import ConfigError, MuaError
from tests.distributed import run_on_workers
from tests.layout_support import loss_of, world_of
from tests.megatron_support import OPTIMIZER, assert_gradients_alike, backend, gradients, make_batch, write_model

LAYERS, EXPERTS, TOP_K = 4, 8, 2
TEMPERATURE = 0.8
LOSS = PolicyLoss(AlgorithmConfig(clip_high=0.3, epochs=2))
QUICK = ("single", "TP2", "CP2", "TP2 EP2 ETP1")
SLOW = ("PP2", "PP2 VPP2", "CP2 EP2", "DP4 EP4", "TP2 CP2 EP2", "TP2 PP2 DP2 EP2")


def random_choices(length: int, seed: int) -> ExpertArray:
    """Distinct experts for each token and layer, uint8 ``[T, layers * top k]``."""
    random = np.random.default_rng(seed)
    chosen = [[random.choice(EXPERTS, TOP_K, replace=False) for _ in range(LAYERS)] for _ in range(length)]
    return np.array(chosen, dtype=np.uint8).reshape(length, -1)


def recorded_batch() -> TrainBatch:
    batch = make_batch(temperature=TEMPERATURE)
    sequences = [replace(s, experts=random_choices(len(s), i)) for i, s in enumerate(batch.sequences)]
    return replace(batch, sequences=sequences)


class ForcedRouting:
    """transformers' routers, made to choose what they are told and to note what they would have chosen."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.given: Any = None
        self.own: list[Any] = []
        for index, layer in enumerate(model.model.layers):
            layer.mlp.gate.forward = self._router(layer.mlp.gate, index)

    def _router(self, gate: Any, index: int) -> Any:
        def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
            own = logits.topk(TOP_K).indices
            self.own.append(own.numpy())
            chosen = own if self.given is None else self.given[:, index * TOP_K : (index + 1) * TOP_K]
            shares = logits.softmax(-1).gather(1, chosen)
            return logits, shares / shares.sum(-1, keepdim=True), chosen

        return forward


def expected(folder: Path, batch: TrainBatch) -> dict[str, Any]:
    """Log-probabilities, gradients and agreement by transformers under the batch's choices."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    forced = ForcedRouting(model)
    total, logprobs, same, choices = torch.zeros(()), [], 0, 0
    for sequence in batch.sequences:
        assert sequence.experts is not None
        forced.given, forced.own = torch.from_numpy(sequence.experts.astype(np.int64)), []
        ids = torch.from_numpy(sequence.ids.astype(np.int64))
        log_p = (model(ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        chosen = torch.cat([torch.zeros(1), log_p.gather(1, ids[1:, None])[:, 0]])
        entropy = torch.cat([torch.zeros(1), -(log_p.exp() * log_p).sum(-1)])
        total = total + loss_of(LOSS, sequence, chosen, entropy).loss
        logprobs.append(chosen.detach().numpy())
        given = sequence.experts[:-1].reshape(-1, LAYERS, TOP_K)
        for layer, own in enumerate(forced.own):
            same += (given[:, layer, :, None] == own[:-1, None, :]).any(-1).sum()
            choices += given[:, layer].size
    total.backward()
    return {
        "logprobs": np.concatenate(logprobs),
        "gradients": {name: p.grad.numpy().copy() for name, p in model.named_parameters()},
        "agreement": same / choices,
    }


def replayed(folder: str, sizes: dict[str, Any], mode: str) -> dict[str, Any]:
    """What one rank finds under a layout; gradients before clipping, which the test's bound on them would hide."""
    batch = recorded_batch()
    unclipped = OPTIMIZER.model_copy(update={"clip_grad": 0.0})
    settings = {**sizes, "routing_replay": mode, "distributed_optimizer": False, "optimizer": unclipped}
    with backend(Path(folder), **settings) as built:
        logprobs = np.concatenate(built.log_probabilities(batch.sequences, TEMPERATURE))
        metrics = built.train_step(batch, LOSS)
        return {"logprobs": logprobs, "gradients": gradients(built), "agreement": metrics["train/moe/replay_agreement"]}


def routed_freely(folder: str, mode: str) -> dict[str, Any]:
    """Log-probabilities and gradient norm where the engine's choices are only looked at, or not at all."""
    batch = recorded_batch()
    with backend(Path(folder), routing_replay=mode) as built:
        logprobs = np.concatenate(built.log_probabilities(batch.sequences, TEMPERATURE))
        return {"logprobs": logprobs, "norm": built.train_step(batch, LOSS)["train/grad_norm"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe")
    write_model(path, layers=LAYERS, experts=EXPERTS)
    return path


@pytest.fixture(scope="module")
def truth(folder: Path) -> dict[str, Any]:
    return expected(folder, recorded_batch())


def assert_as_forced(found: list[dict[str, Any]], truth: dict[str, Any]) -> None:
    assert 0.1 < truth["agreement"] < 0.5
    for rank in found:
        np.testing.assert_allclose(rank["logprobs"], truth["logprobs"], atol=2e-5, rtol=0)
        assert_gradients_alike(rank["gradients"], checkpoint_names(truth["gradients"]))
        assert rank["agreement"] == pytest.approx(truth["agreement"], abs=1e-9)


def checkpoint_names(tensors: dict[str, Float32Array]) -> dict[str, Float32Array]:
    """transformers holds all experts of a layer in one parameter; a checkpoint holds them apart."""
    apart: dict[str, Float32Array] = {}
    for name, values in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(np.split(block, 2) for block in values):
                apart[name.replace("gate_up_proj", f"{expert}.gate_proj.weight")] = gate
                apart[name.replace("gate_up_proj", f"{expert}.up_proj.weight")] = up
        elif name.endswith("experts.down_proj"):
            for expert, block in enumerate(values):
                apart[name.replace("down_proj", f"{expert}.down_proj.weight")] = block
        else:
            apart[name] = values
    return apart


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_the_trainer_follows_the_engines_choices(name: str, folder: Path, truth: dict[str, Any]) -> None:
    sizes = layouts.sizes(name)
    assert_as_forced(run_on_workers(world_of(name), replayed, str(folder), sizes, "replay"), truth)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_activations_are_routed_alike(recompute: str, folder: Path, truth: dict[str, Any]) -> None:
    sizes = {"recompute": recompute, "max_tokens_per_microbatch": 40}
    assert_as_forced(run_on_workers(1, replayed, str(folder), sizes, "replay"), truth)


def test_a_check_changes_nothing(folder: Path, truth: dict[str, Any]) -> None:
    (off,) = run_on_workers(1, routed_freely, str(folder), "off")
    (checked,) = run_on_workers(1, routed_freely, str(folder), "check")
    assert np.array_equal(off["logprobs"], checked["logprobs"])
    assert off["norm"] == checked["norm"]
    assert np.abs(off["logprobs"] - truth["logprobs"]).max() > 0.1  # the choices would have made a difference


def refusals(folder: str, dense: str) -> list[str]:
    """The messages of three misuses."""
    plain, messages = make_batch(), []
    wrong = replace(plain, sequences=[replace(s, experts=np.full((len(s), 8), 8, np.uint8)) for s in plain.sequences])
    with backend(Path(folder), routing_replay="replay") as built:
        for batch in (plain, wrong):
            with pytest.raises(MuaError) as refused:
                built.train_step(batch, LOSS)
            messages.append(str(refused.value))
    with pytest.raises(ConfigError) as refused, backend(Path(dense), routing_replay="replay"):
        pass
    return [*messages, str(refused.value)]


def test_what_cannot_be_replayed_is_refused(folder: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "dense")
    (messages,) = run_on_workers(1, refusals, str(folder), str(tmp_path / "dense"))
    for message, named in zip(messages, ("engine.routed_experts", "expert 8", "no experts"), strict=True):
        assert "megatron.routing_replay" in message
        assert named in message
