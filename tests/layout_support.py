"""Trains a tiny model under a layout and measures how far that is from a single process.

Three runs for each layout, on packed micro-batches of unequal length with masks. The first reshards the weights onto
two ranks and compares every byte with the file, scores all tokens and takes one optimizer step, of which every gradient
is compared. The second, with the distributed optimizer and the experts' balancing losses, takes :data:`STEPS` steps,
each on its own batch, and one on a single short sequence, which leaves most ranks without any. The third trains policy
and critic on sequences that begin alike, merged into prefix trees, under an objective that looks at whole sequences;
the single process has them side by side. That these runs find faults is what ``tests/parity/test_planted_faults.py``
shows.
"""

from __future__ import annotations

import hashlib
import pickle
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_bridge.plan import plan_model
from megatron_bridge.reshard import Resharder
from mua.algorithms.losses import PolicyLoss, TokenTensors, ValueLoss
from mua.config.megatron import CriticConfig, CriticOptimizerConfig, MegatronConfig
from mua.config.schema import AlgorithmConfig
from mua.megatron import layouts
from mua.types import Float32Array, TrainBatch, TrainSequence
from tests.distributed import run_on_workers
from tests.megatron_support import (
    OPTIMIZER,
    backend,
    critic_heads,
    exported,
    gradients,
    make_batch,
    with_values,
    write_model,
)

STEPS = 2
BUCKET_BYTES = 20_000
"""Less than the embedding alone, more than most other tensors."""
TEMPERATURE = 0.8
LOSS = PolicyLoss(AlgorithmConfig(clip_high=0.3, epochs=2))
ADAM = OPTIMIZER.model_copy(update={"epsilon": 1e-8})
LENGTHS = (17, 5, 40, 2, 23, 31, 8, 12, 29, 33, 9)
"""They fill four micro-batches of 64, so that up to four data-parallel ranks have those of a single process."""
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 2000}
"""Communication of data-parallel ranks in buckets of a few matrices, many of which are under way in a step."""
SEQUENCE_LOSS = PolicyLoss(LOSS.config.model_copy(update={"loss": "gspo", "entropy_coefficient": 0.01}))
CRITIC = CriticConfig(
    optimizer=CriticOptimizerConfig(learning_rate=1e-2, weight_decay=0.1, epsilon=1e-4, clip_grad=1.0), value_clip=0.2
)
ALIKE_LENGTHS = (40, 33, 29, 40, 12, 31, 38, 9, 24, 17)
ALIKE = {1: (0, 20), 2: (0, 20), 3: (1, 28), 4: (0, 12), 6: (5, 13), 7: (6, 9), 8: (5, 24)}
"""Sequence -> (another one, how many tokens it begins with that one's)."""
KINDS: dict[str, dict[str, Any]] = {"dense": {}, "moe": {"experts": 8}}


def held_to(bound: float) -> Any:
    return field(default=0.0, metadata={"bound": bound})


@dataclass(frozen=True, slots=True)
class Differences:
    """The largest over all ranks, tensors and steps; each with the bound it is held to."""

    loss: float = held_to(1e-5)
    """Absolute, of the step of the first run."""
    gradient: float = held_to(1e-5)
    """Relative to the largest gradient, first run."""
    norm: float = held_to(1e-5)
    """Gradient norm, relative, first step of both runs."""
    weights: float = held_to(3e-3)
    """Absolute, after the step of the first run, at a learning rate of 1e-2."""
    logprobs: float = held_to(2e-5)
    """Absolute, before the first step."""
    resharding: float = held_to(0.0)
    """Tensors that the first and the last rank, as roots, get with other bytes, and bounds that it breaks."""
    distributed_loss: float = held_to(1e-5)
    """As ``loss``, over the steps of the second run: distributed optimizer and, for experts, balancing losses."""
    distributed_weights: float = held_to(3e-3)
    """As ``weights``, after the last of them."""
    alone: float = held_to(1e-4)
    """Loss of the step on a single sequence, absolute. It comes last, when weights have drifted apart."""
    load: float = held_to(1e-5)
    """Of the experts' load and balancing losses, relative, first step of the second run; 0 without experts."""
    tree_logprobs: float = held_to(2e-5)
    """As ``logprobs``, of the third run."""
    tree_gradient: float = held_to(1e-5)
    """As ``gradient``."""
    tree_metrics: float = held_to(1e-5)
    """Of the policy's loss, norm, entropy, tokens and ratios, relative where they are above 1."""
    values: float = held_to(2e-5)
    """The critic's, absolute, before its step."""
    critic: float = held_to(2e-4)
    """Of the critic's loss, norm and means, relative where they are above 0.05."""
    values_after: float = held_to(1e-3)
    """As ``values``, after its step."""

    def refused(self) -> dict[str, float]:
        """Those beyond their bound; a difference that is no number is beyond every bound."""
        found = ((one.name, getattr(self, one.name), one.metadata["bound"]) for one in fields(self))
        return {name: value for name, value, bound in found if not value <= bound}


def layers_of(name: str) -> int:
    """As few layers as the layout ``name`` divides: two, or more where stages or virtual stages need them."""
    sizes = layouts.sizes(name)
    if sizes.get("first_stage_layers", 1) > 1:
        return 6
    stages = sizes.get("pipeline_parallel", 1) * sizes.get("virtual_pipeline", 1)
    return 4 if stages > 2 or "first_stage_layers" in sizes else 2


def model_for(folder: Path, kind: str, name: str) -> Path:
    """A model for the layout ``name`` and what a single process makes of it, in a folder of its own.

    Args:
        folder: of all models; each is written once.
        kind: one of :data:`KINDS`.
    """
    layers = layers_of(name)
    path = folder / f"{kind} {layers}"
    if not path.exists():
        write_model(path, layers=layers, **KINDS[kind])
        (result,) = run_on_workers(1, reference_of, str(path))
        (path / "reference.pickle").write_bytes(pickle.dumps(result))
    return path


def measure(folder: Path, kind: str, name: str, **settings: Any) -> Differences:
    """Runs a layout of :mod:`mua.megatron.layouts`, with more settings, on as many processes as it has ranks."""
    sizes = layouts.sizes(name)
    path = model_for(folder, kind, name)
    found = run_on_workers(world_of(name), differences, str(path), sizes | settings, seconds=200.0)
    return worst(found)


def world_of(name: str) -> int:
    """How many ranks the layout has."""
    return MegatronConfig(**layouts.sizes(name)).world_size


def worst(found: list[dict[str, float]]) -> Differences:
    """The largest of what the ranks found."""
    return Differences(**{key: float(max(rank[key] for rank in found)) for key in found[0]})


def differences(folder: str, sizes: dict[str, Any], alike: bool = True) -> dict[str, float]:
    """What one rank finds, as differences to the single process; without the third run unless ``alike``."""
    expected = pickle.loads((Path(folder) / "reference.pickle").read_bytes())
    own = trained(folder, sizes)
    return _two_runs(own, expected) | (
        _third_run(_alike(folder, sizes, merge=True), expected["alike"]) if alike else {}
    )


def _third_run(own: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    assert own["merged_share"] > 0.15
    assert reference["merged_share"] == 0
    largest = max(np.abs(values).max() for values in reference["gradients"].values())
    both = [(own[kind][key], value, least) for kind, least in (("policy", 1.0), ("critic", 0.05))
            for key, value in reference[kind].items()]  # fmt: skip
    relative = [abs(found - value) / max(least, abs(value)) for found, value, least in both]
    return {
        "tree_logprobs": _apart(own["logprobs"], reference["logprobs"]),
        "tree_gradient": furthest(own["gradients"], reference["gradients"]) / float(largest),
        "tree_metrics": max(relative[: len(POLICY_KEYS)]),
        "values": _apart(own["values"], reference["values"]),
        "critic": max(relative[len(POLICY_KEYS) :]),
        "values_after": _apart(own["after"], reference["after"]),
    }


def _two_runs(own: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    (plain, reference), (second, other) = runs = [(own[run], expected[run]) for run in ("plain", "second")]
    largest = max(np.abs(values).max() for values in reference["gradients"].values())
    return {
        "loss": _apart(plain["train/loss"], reference["train/loss"]),
        "gradient": furthest(plain["gradients"], reference["gradients"]) / float(largest),
        "norm": max(abs(own["train/grad_norm"][0] / alone["train/grad_norm"][0] - 1) for own, alone in runs),
        "weights": furthest(plain["weights"], reference["weights"]),
        "logprobs": _apart(plain["logprobs"], reference["logprobs"]),
        "resharding": float(plain["resharding"]),
        "distributed_loss": _apart(second["train/loss"][:STEPS], other["train/loss"][:STEPS]),
        "distributed_weights": furthest(second["weights"], other["weights"]),
        "alone": _apart(second["train/loss"][STEPS:], other["train/loss"][STEPS:]),
        "load": max((abs(second["load"][key] / value - 1) for key, value in other["load"].items()), default=0.0),
    }


def loss_of(loss: Any, sequence: TrainSequence, logprobs: Tensor, entropy: Tensor) -> Any:
    """What ``loss`` says of the trained tokens of one sequence, given both for all of its tokens."""
    trained = torch.from_numpy(sequence.trained)
    names = ("weights", "advantages", "behavior_logprobs", "old_logprobs")
    values: list[Any] = [torch.from_numpy(getattr(sequence, name))[trained] for name in names]
    return loss(logprobs[trained], entropy[trained], TokenTensors(*values))


def digest(folder: str, sizes: dict[str, Any]) -> str:
    """Of every bit that one rank finds."""
    return hashlib.sha256(pickle.dumps(trained(folder, sizes))).hexdigest()


def trained(folder: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """What one rank finds in both runs."""
    return {"plain": _plain(folder, sizes), "second": _second(folder, sizes)}


def reference_of(folder: str) -> dict[str, Any]:
    """What a single process finds in all runs."""
    return trained(folder, {}) | {"alike": _alike(folder, {}, merge=False)}


POLICY_KEYS = (
    "train/loss", "train/grad_norm", "train/entropy", "train/tokens", "train/ratio", "train/logprob",
    "train/ratio_max",
)  # fmt: skip
CRITIC_KEYS = (
    "train/critic/vf_loss",
    "train/critic/grad_norm",
    "train/critic/vf_clipfrac",
    "train/critic/values",
    "train/critic/returns",
)


def _alike(folder: str, sizes: dict[str, Any], *, merge: bool) -> dict[str, Any]:
    """The third run. The critic's head is given weights first, because one that begins at 0 hides its backbone."""
    sizes = sizes | {"distributed_optimizer": False, "overlap_param_gather": None, "merge_prefixes": merge}
    with backend(Path(folder), optimizer=ADAM, critic=CRITIC, max_tokens_per_microbatch=120, **sizes) as built:
        give_heads_weights(built)
        given = alike_batch()
        found: dict[str, Any] = {
            "logprobs": np.concatenate(built.log_probabilities(given.sequences, TEMPERATURE)),
            "values": np.concatenate(built.values(given.sequences)),
        }
        metrics = built.train_step(given, SEQUENCE_LOSS)
        found |= {"policy": {key: metrics[key] for key in POLICY_KEYS}, "gradients": gradients(built)}
        critic = built.train_values(given, ValueLoss(0.2))
        assert critic["train/critic/vf_clipfrac"] > 0, "the bound is part of what is compared"
        found |= {"critic": {key: critic[key] for key in CRITIC_KEYS}, "merged_share": metrics["train/merged_share"]}
        return found | {"after": np.concatenate(built.values(given.sequences))}


def give_heads_weights(built: Any) -> None:
    """To the critic's output layer, on the ranks that hold it."""
    weight = torch.randn(32, generator=torch.Generator().manual_seed(0)) * 0.3
    for head in critic_heads(built):
        head.weight.data.copy_(weight[None])
        head.bias.data.fill_(0.2)
    built.critic.optimizer.megatron.reload_model_params()


def alike_batch() -> TrainBatch:
    """Random sequences of which several begin alike; shared trained tokens have other weights in each."""
    drawn = with_values(make_batch(ALIKE_LENGTHS, temperature=TEMPERATURE, seed=3))
    sequences: list[TrainSequence] = []
    for index, sequence in enumerate(drawn.sequences):
        ids = sequence.ids.copy()
        if index in ALIKE:
            other, length = ALIKE[index]
            ids[:length] = sequences[other].ids[:length]
        sequences.append(replace(sequence, ids=ids))
    return replace(drawn, sequences=sequences)


def _plain(folder: str, sizes: dict[str, Any]) -> dict[str, Any]:
    sizes = sizes | {"distributed_optimizer": False, "overlap_param_gather": None}  # there is nothing to gather
    with backend(Path(folder), optimizer=ADAM, **sizes) as built:
        found = {
            "resharding": wrongly_resharded(built.policy.chunks, load_file(Path(folder) / "model.safetensors")),
            "logprobs": np.concatenate(built.log_probabilities(batch(0).sequences, TEMPERATURE)),
        }
        metrics = [built.train_step(batch(0), LOSS)]
        return _series(metrics) | found | {"gradients": gradients(built), "weights": exported(built)}


class Allocations(TorchDispatchMode):
    """The largest buffer that torch made inside, and the largest sum of those alive at once, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.largest = self.live = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, Sequence) else [result]:
            if isinstance(tensor, Tensor) and function._schema.name == "aten::empty":
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(tensor, self.alive.pop, storage._cdata, None)
                self.largest = max(self.largest, storage.nbytes())
                self.live = max(self.live, sum(self.alive.values()))
        return result


def wrongly_resharded(chunks: Sequence[Any], expected: dict[str, Tensor]) -> int:
    """Hands whole tensors to the first and the last rank; what is wrong with any byte, place or bound of memory."""
    rank, roots = dist.get_rank(), sorted({0, dist.get_world_size() - 1})
    resharder = Resharder(plan_model(chunks), dict.fromkeys(roots, (0,)), BUCKET_BYTES, node=rank // 2)
    wrong, seen, allocations = [], set[str](), Allocations()
    for index, bucket in enumerate(resharder.buckets):
        with allocations:
            flat = resharder.assemble(index).get(0)
        wrong += [bucket.nbytes > BUCKET_BYTES and len(bucket.tensors) > 1, (flat is not None) != (rank in roots)]
        for slot in bucket.tensors:
            seen.add(slot.spec.name)
            same = flat is None or torch.equal(slot.view(flat), expected[slot.spec.name])
            wrong += [slot.start % 256 != 0, not same]
        del flat
    traffic, largest = resharder.traffic, max(bucket.nbytes for bucket in resharder.buckets)
    # One bucket, what is received for it, and one message to every other root: never the whole model.
    wrong += [allocations.largest > max(largest, BUCKET_BYTES), allocations.live > (1 + len(roots)) * largest]
    wrong += [seen != set(expected), traffic.needed > sum(tensor.nbytes for tensor in expected.values())]
    sums = torch.tensor([traffic.sent, traffic.received, traffic.needed])
    dist.all_reduce(sums)
    return sum([*wrong, len(set(sums.tolist())) > 1])


def of_second(folder: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Settings of the second run."""
    # The balancing loss is made for each micro-batch. By tokens all layouts have the same ones; by operations,
    # interleaved pipelines, where all are padded to one length, have others.
    losses = {"moe_aux_loss": 0.3, "moe_z_loss": 0.1, "balance": "tokens"}
    sizes = sizes | losses if Path(folder).name.startswith("moe") else sizes
    return {"distributed_optimizer": True, "optimizer": ADAM, **sizes}


def _second(folder: str, sizes: dict[str, Any]) -> dict[str, Any]:
    with backend(Path(folder), **of_second(folder, sizes)) as built:
        metrics = [built.train_step(batch(step), LOSS) for step in range(STEPS)]
        weights = exported(built)
        metrics.append(built.train_step(make_batch((9,), temperature=TEMPERATURE), LOSS))
    load = {key: value for key, value in metrics[0].items() if key.startswith("train/moe/")}
    return _series(metrics) | {"weights": weights, "load": load}


def _series(metrics: list[dict[str, float]]) -> dict[str, Any]:
    """Losses and gradient norms by step, which every rank must report alike."""
    series = {key: [step[key] for step in metrics] for key in ("train/loss", "train/grad_norm")}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, series)
    assert all(other == series for other in everywhere), f"ranks report different metrics: {everywhere}"
    return {key: np.array(values) for key, values in series.items()}


def batch(step: int) -> TrainBatch:
    return make_batch(LENGTHS, temperature=TEMPERATURE, seed=step)


def _apart(own: Float32Array, reference: Float32Array) -> float:
    return float(np.abs(own - reference).max())


def furthest(own: dict[str, Float32Array], reference: dict[str, Float32Array]) -> float:
    assert own.keys() == reference.keys()
    return max(_apart(own[name], reference[name]) for name in reference)
