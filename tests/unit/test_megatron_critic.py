"""The critic on one process: where it starts, what a value is of, what it learns, checkpoints, offload, bad input.

Layouts are in tests/parity/test_megatron_layouts.py, the formulas of GAE and of the loss in test_algorithms_gae.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from mua.algorithms.losses import ValueLoss
from mua.config.megatron import CriticConfig, CriticOptimizerConfig
from mua.megatron.checkpoint import checkpoint_folder
from mua.types import TrainBatch
from mua.utils.errors import ModelError
from tests.megatron_support import backend, critic_heads, exported, make_batch, with_values, write_model

CRITIC = CriticConfig(optimizer=CriticOptimizerConfig(learning_rate=1e-2, weight_decay=0.0))
LOSS = ValueLoss(clip=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def either(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A model whose output layer is its embedding, and one that has its own, which a critic leaves out."""
    path = tmp_path_factory.mktemp("model")
    write_model(path, tied=request.param)
    return path


def test_a_new_critic_says_zero_and_learns_what_returns_are(folder: Path) -> None:
    batch = with_values(make_batch())
    with backend(folder, critic=CRITIC) as built:
        assert all(not values.any() for values in built.values(batch.sequences))
        policy = exported(built)
        history = [built.train_values(batch, LOSS) for _ in range(25)]
        after = built.values(batch.sequences)
        for name, weights in exported(built).items():
            assert np.array_equal(weights, policy[name]), "the critic's steps moved the policy"
    targets = np.concatenate([s.returns[s.trained] for s in batch])
    assert history[0]["train/critic/vf_loss"] == pytest.approx((targets**2).mean() / 2, rel=1e-4)
    assert history[-1]["train/critic/vf_loss"] < 0.2 * history[0]["train/critic/vf_loss"]
    found = np.concatenate([values[s.trained] for s, values in zip(batch, after, strict=True)])
    assert np.corrcoef(found, targets)[0, 1] > 0.9
    assert {
        "train/critic/values",
        "train/critic/returns",
        "train/critic/vf_clipfrac",
        "train/critic/grad_norm",
        "train/critic/lr",
    } <= set(history[0])
    assert all(name.startswith(("train/critic/", "train/critic/vf_loss")) for name in history[0])
    assert all(values[0] == 0 for values in after)


def test_a_value_is_read_off_the_position_before_the_token(either: Path) -> None:
    """Against transformers' own hidden states, with a head that is not 0."""
    batch = make_batch()
    model = transformers.AutoModelForCausalLM.from_pretrained(either)
    random = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(32, generator=random), 0.3
    with backend(either, critic=CRITIC) as built:
        for head in critic_heads(built):
            head.weight.data.copy_(weight[None])
            head.bias.data.fill_(bias)
        values = built.values(batch.sequences)
        reversed_order = built.values(batch.sequences[::-1])[::-1]
    for sequence, found, again in zip(batch, values, reversed_order, strict=True):
        ids = torch.from_numpy(sequence.ids.astype(np.int64))
        with torch.no_grad():
            hidden = model.model(ids[None]).last_hidden_state[0, :-1]
        np.testing.assert_allclose(found[1:], (hidden @ weight + bias).numpy(), atol=2e-4)
        np.testing.assert_allclose(found, again, atol=2e-5)


def test_the_first_step_moves_the_head_and_the_second_the_backbone(folder: Path) -> None:
    batch = with_values(make_batch())
    with backend(folder, critic=CRITIC) as built:
        network = built.critic
        before = {name: p.detach().clone() for name, p in network.chunks[0].named_parameters()}
        built.train_values(batch, LOSS)
        moved = {n for n, p in network.chunks[0].named_parameters() if not torch.equal(p, before[n])}
        assert moved == {"output_layer.weight", "output_layer.bias"}
        built.train_values(batch, LOSS)
        moved = {n for n, p in network.chunks[0].named_parameters() if not torch.equal(p, before[n])}
        assert moved == set(before)


def test_a_checkpoint_without_a_critic_does_not_pretend(folder: Path, tmp_path: Path) -> None:
    with backend(folder) as built:
        built.save(checkpoint_folder(tmp_path, 1), {})
    with backend(folder, critic=CRITIC) as built, pytest.raises(ModelError, match="holds no critic") as error:
        built.load(checkpoint_folder(tmp_path, 1))
    assert "\n" not in str(error.value)


def test_offloading_loses_nothing(folder: Path) -> None:
    batches, histories = [with_values(make_batch(seed=seed)) for seed in range(3)], []
    for moving in (False, True):
        with backend(folder, critic=CRITIC) as built:
            history = []
            for batch in batches:
                history.append(
                    (built.train_values(batch, LOSS)["train/critic/vf_loss"], built.values(batch.sequences)[0].sum())
                )
                if moving:
                    built.offload()
                    parameters = list(built.critic.parameters())
                    assert not sum(parameter.untyped_storage().nbytes() for parameter in parameters)
                    built.onload()
            histories.append(history)
    assert histories[0] == histories[1]


def test_one_clear_error(folder: Path) -> None:
    with backend(folder) as built:
        with pytest.raises(ValueError, match="critic_steps=") as error:
            built.values(make_batch().sequences)
        with pytest.raises(ValueError, match="critic_steps="):
            built.train_values(with_values(make_batch()), LOSS)
    assert "\n" not in str(error.value)
    with backend(folder, critic=CRITIC) as built, pytest.raises(ValueError, match="values and returns"):
        built.train_values(make_batch(), LOSS)


def test_a_batch_without_trained_tokens_leaves_the_critic_alone(folder: Path) -> None:
    untrained = [replace(s, weights=np.zeros_like(s.weights)) for s in with_values(make_batch())]
    with backend(folder, critic=CRITIC) as built:
        metrics = built.train_values(TrainBatch(untrained, 1.0, {}), LOSS)
    assert metrics["train/critic/grad_norm"] == metrics["train/critic/vf_loss"] == 0
