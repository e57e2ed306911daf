"""The training backend on one process: precision, reference, recomputation, empty batches, skipped steps, bad input.

Parity with transformers and all layouts are in ``tests/parity/test_megatron_layouts.py``, checkpoints in
``tests/unit/test_megatron_checkpoint.py``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from mua.algorithms.losses import CrossEntropyLoss, LossTerms, TokenTensors
from mua.config.schema import OptimizerConfig
from mua.types import TrainBatch
from mua.utils.errors import ConfigError, ModelError, MuaError
from tests.megatron_support import OPTIMIZER, VOCAB, backend, exported, gradients, make_batch, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


def test_bfloat16_is_near_transformers_in_bfloat16_and_keeps_float32_weights(folder: Path) -> None:
    batch = make_batch()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with backend(folder, dtype="bfloat16") as built:
        own = built.log_probabilities(batch.sequences, 1.0)
        for _ in range(20):
            built.train_step(batch, CrossEntropyLoss())
        optimizer = built.policy.optimizer.megatron.chained_optimizers[0].optimizer
        assert {p.dtype for group in optimizer.param_groups for p in group["params"]} == {torch.float32}
        better = built.log_probabilities(batch.sequences, 1.0)
    for sequence, values in zip(batch.sequences, own, strict=True):
        ids = torch.from_numpy(sequence.ids.astype(np.int64))
        with torch.no_grad():
            reference = model(ids[None]).logits[0, :-1].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        assert np.abs(values[1:] - reference.numpy()).mean() < 0.04
    assert sum(values.sum() for values in better) > sum(values.sum() for values in own)


def test_reference_stays_where_the_policy_began(folder: Path) -> None:
    batch = make_batch()
    with backend(folder, with_reference=True) as built:
        before = built.log_probabilities(batch.sequences, 0.7)
        built.train_step(batch, CrossEntropyLoss())
        weights = exported(built)
        reference = built.log_probabilities(batch.sequences, 0.7, reference=True)
        policy = built.log_probabilities(batch.sequences, 0.7)
        for name, values in exported(built).items():
            assert np.array_equal(values, weights[name]), name
    assert all(np.array_equal(a, b) for a, b in zip(before, reference, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(policy, reference, strict=True) if len(a) > 1)


def test_log_probabilities_come_in_the_given_order_and_begin_with_zero(folder: Path) -> None:
    sequences = make_batch().sequences
    with backend(folder) as built:
        forward = built.log_probabilities(sequences, 1.0)
        backward = built.log_probabilities(sequences[::-1], 1.0)
        assert built.log_probabilities([], 1.0) == []
    for sequence, values, other in zip(sequences, forward, backward[::-1], strict=True):
        assert values.shape == sequence.ids.shape
        assert values.dtype == np.float32
        assert values[0] == 0
        np.testing.assert_allclose(values, other, atol=1e-5)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_gradient(folder: Path, recompute: str) -> None:
    results = []
    for mode in ("none", recompute):
        with backend(folder, recompute=mode, distributed_optimizer=False) as built:
            built.train_step(make_batch(), CrossEntropyLoss())
            results.append(gradients(built))
    for name, values in results[0].items():
        np.testing.assert_allclose(values, results[1][name], atol=1e-7, err_msg=name)


def test_entropy_is_the_mean_over_trained_tokens_only(folder: Path) -> None:
    batch = make_batch()
    first = dataclasses.replace(batch.sequences[0], weights=np.zeros_like(batch.sequences[0].weights))
    with backend(folder, optimizer=OPTIMIZER.model_copy(update={"learning_rate": 0.0})) as built:
        alone = built.train_step(TrainBatch(batch.sequences[1:], 1.0, {}), CrossEntropyLoss())
        beside = built.train_step(TrainBatch([first, *batch.sequences[1:]], 1.0, {}), CrossEntropyLoss())
    assert alone["train/tokens"] == beside["train/tokens"] == sum(s.trained.sum() for s in batch.sequences[1:])
    assert alone["train/entropy"] == pytest.approx(beside["train/entropy"], rel=1e-5)


@pytest.mark.parametrize("sequences", ["none", "untrained"])
def test_a_batch_without_trained_tokens_has_no_gradient(folder: Path, sequences: str) -> None:
    drawn = [] if sequences == "none" else make_batch().sequences
    untrained = [dataclasses.replace(s, weights=np.zeros_like(s.weights)) for s in drawn]
    with backend(folder) as built:
        metrics = built.train_step(TrainBatch(untrained, 1.0, {}), CrossEntropyLoss())
    assert metrics["train/grad_norm"] == metrics["train/loss"] == metrics["train/tokens"] == 0
    assert metrics["train/skipped"] == 0


def infinite_loss(logprobs: torch.Tensor, entropy: torch.Tensor, tokens: TokenTensors) -> LossTerms:
    return LossTerms(logprobs.sum() * float("inf"), {}, {})


def test_a_step_without_a_finite_gradient_changes_nothing_and_is_counted(folder: Path) -> None:
    with backend(folder) as built:
        before = exported(built)
        metrics = built.train_step(make_batch(), infinite_loss)
        for name, values in exported(built).items():
            assert np.array_equal(values, before[name]), name
        assert metrics["train/skipped"] == built.policy.skipped_steps == 1
        assert not np.isfinite(metrics["train/grad_norm"])
        assert built.train_step(make_batch(), CrossEntropyLoss())["train/skipped"] == 0
        assert np.isfinite(exported(built)["model.norm.weight"]).all()


def test_learning_rate_follows_the_schedule(folder: Path) -> None:
    schedule = OptimizerConfig(learning_rate=1.0, min_learning_rate=0.1, schedule="linear", warmup_steps=2)
    with backend(folder, optimizer=schedule, total_steps=5) as built:
        rates = [built.train_step(make_batch(), CrossEntropyLoss())["train/lr"] for _ in range(6)]
    assert rates == pytest.approx([0.5, 1.0, 0.775, 0.55, 0.325, 0.1])


def test_too_long_a_sequence_and_a_trained_first_token_are_refused(folder: Path) -> None:
    long = make_batch((65,))
    first = dataclasses.replace(long.sequences[0], ids=long.sequences[0].ids[:4], weights=np.ones(4, np.float32))
    with backend(folder) as built:
        with pytest.raises(MuaError, match=r"megatron\.max_tokens_per_microbatch 64"):
            built.train_step(long, CrossEntropyLoss())
        with pytest.raises(MuaError, match=r"trains its first token"):
            built.train_step(TrainBatch([first], 1.0, {}), CrossEntropyLoss())


def test_a_token_outside_the_vocabulary_is_refused(folder: Path) -> None:
    sequence = make_batch((4,)).sequences[0]
    foreign = dataclasses.replace(sequence, ids=np.array([1, 2, VOCAB, 3], dtype=np.int32))
    with backend(folder) as built, pytest.raises(MuaError, match=rf"token {VOCAB}, .* vocabulary of {VOCAB}"):
        built.log_probabilities([foreign], 1.0)


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.path: .*config\.json"), backend(tmp_path):
        pass


def test_more_processes_than_started_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="needs 2 processes, but 1 run"), backend(folder, data_parallel=2):
        pass
