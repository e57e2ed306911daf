"""Each of several ranks gets its share of a batch, and computes what all do with the whole batch, bit for bit.

Real Megatron on gloo ranks, driven by rank 0 as in a run. Bytes are counted where torch is asked to send and receive
them. Not covered: NCCL, several machines.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from mua.algorithms.losses import PolicyLoss
from mua.config.schema import AlgorithmConfig, MegatronConfig, ModelConfig, TrainerConfig
from mua.megatron import layouts
from mua.megatron.packing import Alignment
from mua.types import TrainBatch
from tests.distributed import run_on_workers, share_a_device
from tests.megatron_support import OPTIMIZER, backend, learner_config, make_batch, write_model

LAYERS, EXPERTS, TOP_K = 4, 8, 2
SEEDS = (0, 1)
LENGTHS = (85, 25, 200, 10, 115, 155, 40, 60, 145)
PER_CALL, PER_SEQUENCE = 1500, 200
"""Bytes of a header: of the plan, and of a sequence and its place in a tree."""
LOSS = PolicyLoss(AlgorithmConfig(clip_high=0.3, kl_coefficient=0.1, epochs=2))


def recorded_batch(seed: int) -> TrainBatch:
    """With the engine's expert choices, ``uint8 [T, layers * top k]``."""
    random = np.random.default_rng(seed)
    batch = make_batch(LENGTHS, seed=seed)
    batch.sequences[2].ids[:50] = batch.sequences[0].ids[:50]
    choices = [np.argsort(random.random((len(s), LAYERS, EXPERTS)), -1)[..., :TOP_K].reshape(len(s), -1) for s in batch]
    return replace(
        batch, sequences=[replace(s, experts=e.astype(np.uint8)) for s, e in zip(batch, choices, strict=True)]
    )


def steps(built: Any) -> list[dict[str, Any]]:
    """Two batches, the first of which is trained on twice."""
    found = []
    for seed in SEEDS:
        batch = built.with_logprobs(recorded_batch(seed), old=True)
        found += [built.train_step(batch, LOSS, keep=seed > 0) for _ in range(2 - seed)]
        found[-1]["kept"] = np.concatenate(built.kept_logprobs or [np.zeros(0)])
        found[-1]["scores"] = np.concatenate([a for s in batch for a in (s.old_logprobs, s.reference_logprobs)])
    return found


class Wire:
    """Stands for ``torch.distributed`` in a module, and counts the bytes that it asks torch to move."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        import torch.distributed as dist

        call = getattr(dist, name)
        if name not in ("isend", "send", "recv", "broadcast_object_list"):
            return call

        def counted(what: Any, *args: Any, **named: Any) -> Any:
            self.log.append((name, len(pickle.dumps(what)) if isinstance(what, list) else what.nbytes))
            return call(what, *args, **named)

        return counted

    def bytes_of(self, *names: str) -> list[int]:
        """Of every call of these functions."""
        return [nbytes for name, nbytes in self.log if name in names]


def driven(folder: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """What a rank finds, once with the whole batch on every rank and once driven by rank 0."""
    import torch.distributed as dist

    from mua.megatron import batch_sharder, device_memory
    from mua.trainer import ranks
    from mua.trainer.learner import Learner

    share_a_device()
    settings = {"threads": 1, "max_tokens_per_microbatch": 320, **sizes}
    with backend(Path(folder), with_reference=True, **settings) as built:
        expected = steps(built)
        weights = [parameter.detach().clone() for parameter in built.policy.parameters()]
    model, megatron = ModelConfig(path=Path(folder), dtype="float32", max_length=512), MegatronConfig(**settings)
    config = learner_config(model, megatron, OPTIMIZER).model_copy(update={"trainer": TrainerConfig(steps=1)})
    found: list[dict[str, Any]] = []
    wire, device = Wire(), mock.Mock()
    with (
        mock.patch.object(batch_sharder, "dist", wire),
        mock.patch.object(ranks, "dist", wire),
        mock.patch.object(device_memory, "torch_cuda", device),
    ):
        built = Learner(config, total_steps=10, with_reference=True)
        if dist.get_rank() == 0:
            with built:
                found = steps(built)
                built.give_back()
        else:
            built.worker_loop()
    return {
        "metrics": found,
        "different": [name for pair in zip(found, expected, strict=False) for name in differing(*pair)],
        "same_weights": all(map(_equal, weights, built.policy.parameters())),
        "sent": wire.bytes_of("isend", "send"),
        "received": wire.bytes_of("recv"),
        "told": wire.bytes_of("broadcast_object_list"),
        "counted": (built._sharder.sent, built._sharder.received),
        "held": sum(array.nbytes for array in built._sharder._held.values()),
        "needed": [needed(built, seed, megatron) for seed in SEEDS],
        "place": built._sharder.place,
        "emptied": device.empty_cache.call_count,
    }


def needed(built: Any, seed: int, megatron: MegatronConfig) -> dict[str, int]:
    """What this rank reads of a batch, in bytes, by the plan: the choices it replays, ids, what the loss reads."""
    place, batch = built._sharder.place, recorded_batch(seed)
    own = built._sharder.plan(batch.sequences, training=True).packed.microbatches[place.data]
    tokens = sum(len(batch.sequences[i]) for one in own for i in one.sequences)
    least = built._sharder.plan(batch.sequences, training=True).packed.plan.least
    alignment = Alignment.of(megatron)
    positions = sum(sum(alignment.padded([length for _, length in one.spans], least)) for one in own)
    replayed = len(place.layers) * TOP_K if megatron.routing_replay == "replay" else 0
    return {
        "experts": positions // (place.contexts * place.tensors) * replayed,
        "ids": 4 * tokens if place.first or place.last else 0,
        "loss": 5 * 4 * tokens if place.last else 0,
        "sequences": sum(len(one.sequences) for one in own),
    }


def _equal(one: Any, other: Any) -> bool:
    return bool((one == other).all())


def differing(own: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Results that are not the same to the bit; seconds aside."""
    names = {name for name in own.keys() | expected.keys() if not name.startswith("train/batch/")}
    return [name for name in names if not name.endswith("_seconds") and not np.array_equal(own[name], expected[name])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shares")
    write_model(path / "moe", layers=LAYERS, experts=EXPERTS)
    write_model(path / "dense", layers=LAYERS)
    return path


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("dense", "PP2 DP2"),
        pytest.param("moe", "PP2 VPP2 DP2 EP2", marks=pytest.mark.slow),
        pytest.param("moe", "TP2 CP2 EP2", marks=pytest.mark.slow),
        pytest.param("dense", "PP4", marks=pytest.mark.slow),
    ],
)
def test_a_rank_gets_what_it_reads_once_and_computes_the_same(kind: str, layout: str, folder: Path) -> None:
    more: dict[str, Any] = {"routing_replay": "replay"} if kind == "moe" else {}
    if "VPP" not in layout:
        more["merge_prefixes"] = True
    sizes = {**layouts.sizes(layout), **more}
    ranks = run_on_workers(MegatronConfig(**sizes).world_size, driven, str(folder / kind), sizes)
    leader, *others = ranks
    assert len(leader["metrics"]) == 3
    assert leader["different"] == []
    assert all(rank["same_weights"] for rank in ranks)
    assert [rank["emptied"] for rank in ranks] == [1] * len(ranks), "only some ranks give back what they cache"
    assert max(leader["told"]) < 1000, "a batch is told to everybody"
    for rank in others:
        lengths, messages = rank["received"][::2], rank["received"][1::2]
        assert set(lengths) == {8}
        first, second = rank["needed"]
        # Of each batch: scored by the policy and by the reference, then trained on, the first one twice.
        least = [first["experts"] + first["ids"], 0, first["loss"], 0]
        least += [second["experts"] + second["ids"], 0, second["loss"]]
        header = PER_CALL + PER_SEQUENCE * first["sequences"]
        assert all(0 <= found - bytes_ <= header for found, bytes_ in zip(messages, least, strict=True)), messages
        assert rank["counted"] == (sum(rank["sent"]), sum(rank["received"]))
        # What belongs to the first batch alone is given up when the second one comes.
        assert rank["held"] <= second["experts"] + second["ids"] + second["loss"]
        assert bool(rank["sent"]) == (rank["place"].last and rank["place"].tensor == 0)
    assert leader["counted"] == (sum(leader["sent"]), sum(leader["received"]))
    shown = leader["metrics"]
    assert sum(step["train/batch/bytes_sent"] for step in shown) == sum(leader["sent"])
    assert sum(step["train/batch/bytes_received_max"] for step in shown) >= max(
        sum(rank["received"]) for rank in others
    )
    assert sum(step["train/batch/bytes_returned"] for step in shown) == sum(leader["received"])
    assert shown[1]["train/batch/bytes_returned"] == 0
