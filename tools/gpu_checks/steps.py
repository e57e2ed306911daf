"""A training step of one rank's share of a recipe: how fast, and how much memory beside ``mua plan``.

One GPU holds what one rank of the recipe's layout holds: heads, MLP columns and vocabulary are divided by
``tensor_parallel`` in the policy's config.json, experts by ``expert_parallel``, and a token's choices of experts by
``tensor_parallel``, because a rank routes that part of the tokens. There are few layers. What this is not: no
communication between ranks, and hidden states are whole, which sequence parallelism would divide by
``tensor_parallel``, so that norms cost more time and memory here than there. The optimizer's state is whole too.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mua.algorithms.losses import PolicyLoss
from mua.config.load import load_config
from mua.config.schema import ExperimentConfig, MegatronConfig
from mua.launch.plan.gpu_memory import measure
from mua.launch.plan.planner import GPUS, StagePlan, make_plan
from mua.megatron import parallel
from mua.megatron.architecture import Architecture, Workload, architecture_of
from mua.megatron.batch_sharder import BatchSharder
from mua.megatron.model import build_chunks
from mua.megatron.modules import defer_logits
from mua.megatron.network import Network, policy_terms
from mua.megatron.settings import Capabilities, implementation_of
from mua.types import TrainSequence
from tools.gpu_checks.child import Found, Place
from tools.gpu_checks.policies import sequences, wait

ROOT = Path(__file__).resolve().parents[2]
GOAL = 0.45
"""Model FLOPs over the datasheet's peak, of dense policies."""
PLAN_RATIO = (0.85, 1.1)
"""Measured over planned memory: outside it the plan is not to be believed."""
TIMED = 3


def qwen3_8b(place: Place) -> Found:
    return _steps(place, "qwen3-8b-1x8", layers=6)


def qwen3_32b(place: Place) -> Found:
    return _steps(place, "qwen3-32b-4x8-h200", layers=6)


def qwen3_30b_a3b(place: Place) -> Found:
    return _steps(place, "qwen3-30b-a3b-2x8", layers=4)


@dataclass(frozen=True)
class Step:
    """Measurements of one step."""

    seconds: float
    operations: float
    counted: int
    """Bytes of weights, gradients and the optimizer's state."""
    peak: int
    """Bytes at most while it ran; 0 on a CPU."""


def share_of_rank(whole: Mapping[str, Any], recipe: ExperimentConfig, layers: int, place: Place) -> dict[str, Any]:
    """config.json of what one rank of ``recipe`` holds, as a policy of its own; at toy size on a CPU."""
    layout = recipe.megatron
    tp, ep = layout.tensor_parallel, layout.expert_parallel
    etp = layout.expert_tensor_parallel or tp
    divided = {"num_attention_heads": tp, "num_key_value_heads": tp, "intermediate_size": tp, "vocab_size": tp}
    divided |= {"num_experts": ep, "moe_intermediate_size": etp, "num_experts_per_tok": tp}
    share = dict(whole) | {key: max(1, math.ceil(whole[key] / by)) for key, by in divided.items() if key in whole}
    share["num_hidden_layers"] = layers
    if not place.cuda:
        toy = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "vocab_size": 512, "num_experts": 4,
               "num_hidden_layers": 2, "moe_intermediate_size": 32, "num_experts_per_tok": 2}  # fmt: skip
        share |= {key: value for key, value in toy.items() if key in share}
    return share


def alone(recipe: str, recompute: str, place: Place) -> ExperimentConfig:
    """The recipe on one GPU."""
    layout = ("tensor", "pipeline", "context", "expert", "data")
    tokens = place.pick(32768, 256)
    overrides = [f"megatron.{name}_parallel=1" for name in layout] + ["megatron.expert_tensor_parallel=null"]
    overrides += ["cluster.nodes=1", "cluster.gpus_per_node=1", "engine.count=1", "engine.tensor_parallel=1"]
    # What is planned must be what is built: a plan is of a machine with Transformer Engine unless it is told otherwise.
    overrides += [f"megatron.implementation={implementation_of(MegatronConfig(), Capabilities.here())}"]
    overrides += [f"megatron.recompute={recompute}", f"megatron.max_tokens_per_microbatch={tokens}"]
    overrides += ["algorithm.kl_coefficient=0", f"rollout.max_tokens={tokens}"]
    overrides += [f"model.dtype={place.pick('bfloat16', 'float32')}", f"model.hf_config={config_json(recipe)}"]
    return load_config(ROOT / "configs" / f"{recipe}.yaml", overrides)


def config_json(recipe: str) -> Path:
    (model,) = (name for name in ("Qwen3-8B", "Qwen3-32B", "Qwen3-30B-A3B") if recipe.startswith(name.lower()))
    return ROOT / "configs/models" / model / "config.json"


def _steps(place: Place, recipe: str, layers: int) -> Found:
    found = Found()
    whole = load_config(ROOT / "configs" / f"{recipe}.yaml", [f"model.hf_config={config_json(recipe)}"])
    full = architecture_of(whole.model)
    share = share_of_rank(full.hf_config, whole, layers, place)
    configs = {recompute: alone(recipe, recompute, place) for recompute in ("full", "selective", "none")}
    plans = {name: make_plan(config, share).stages[0] for name, config in configs.items()}  # before there are groups
    parallel.initialize(configs["full"].megatron, seed=1)
    peak = _peak(found, place)
    for recompute, config in configs.items():
        planned = plans[recompute].rank.bytes.total + plans[recompute].activations[recompute].total
        step = _measured(found, recompute, share, config, place, planned)
        if step is None:
            continue
        _report(found, recompute, step, plans[recompute], peak, place)
        if recompute == "full":
            less = dict(share, num_hidden_layers=share["num_hidden_layers"] // 2)
            shallow = _measured(found, "fewer layers", less, config, place, planned)
            if shallow is not None:
                _extrapolate(found, step, shallow, share, full, whole, peak)
    return found


def _peak(found: Found, place: Place) -> float | None:
    """Operations per second of the datasheet, by the card's name."""
    if not place.cuda:
        return None
    name = torch.cuda.get_device_name().replace("-", " ").split()
    known = [gpu.flops for key, gpu in GPUS.items() if key.partition("-")[0] in name]
    if not known:
        found.message = f"no datasheet of {' '.join(name)} in mua/launch/plan/planner.py: operations per second, no MFU"
    return known[0] if known else None


def _measured(
    found: Found, name: str, share: Mapping[str, Any], config: ExperimentConfig, place: Place, planned: int
) -> Step | None:
    """The steps of a network built for them; None where the device's memory does not hold it."""
    try:
        return _step(share, config, place)
    except torch.OutOfMemoryError as error:
        room = torch.cuda.get_device_properties(0).total_memory
        found.add(f"{name}: planned", planned / 2**30, "GiB")
        said = f"{name}: out of memory; {planned / 2**30:.1f} GiB are planned, the device has {room / 2**30:.1f}"
        found.expect(planned > 0.9 * room, f"{said} ({' '.join(str(error).split())[:160]})")
        found.message = "; ".join(filter(None, [found.message, said]))
        return None
    finally:
        gc.collect()
        if place.cuda:
            torch.cuda.empty_cache()


def _step(share: Mapping[str, Any], config: ExperimentConfig, place: Place) -> Step:
    """One that is not counted, compiles and allocates, then the least of :data:`TIMED`: two full micro-batches."""
    chunks = build_chunks(dict(share), config.model, config.megatron)
    for chunk in chunks:  # as loading a folder does
        chunk.hf_config = dict(share)
    defer_logits(chunks)
    network = Network(chunks, config.megatron, config.optimizer, total_steps=100)
    tokens = config.megatron.max_tokens_per_microbatch
    lengths = [tokens // 4] * 8
    given = sequences(lengths, share["vocab_size"])
    terms = policy_terms(PolicyLoss(config.algorithm), 1.0, network.vocab_size)
    sharder = BatchSharder(chunks, config.megatron)
    own = sharder.shard(sharder.plan(given, training=True))
    network.train(own, terms)
    counted = measure(network.chunks, network.wrapped, network.optimizer).total
    if place.cuda:
        torch.cuda.reset_peak_memory_stats()
    taken = []
    for _ in range(place.pick(TIMED, 1)):
        wait(place)
        began = time.perf_counter()
        network.train(own, terms)
        wait(place)
        taken.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if place.cuda else 0
    return Step(min(taken), operations_of(Architecture.from_hf(share), given), counted, peak)


def operations_of(architecture: Architecture, given: Sequence[TrainSequence]) -> int:
    """Of a forward and a backward pass that trains on ``given``: only trained tokens go through the output layer."""
    whole = Workload.of(architecture).operations((0, len(sequence)) for sequence in given)
    left_out = sum(int((~sequence.trained).sum()) for sequence in given)
    return 3 * (whole - 2 * left_out * architecture.vocabulary * architecture.hidden)


def _report(found: Found, name: str, step: Step, plan: StagePlan, peak: float | None, place: Place) -> None:
    found.add(f"recompute {name}: step", step.seconds, "s")
    found.add(f"recompute {name}: model operations", step.operations / step.seconds / 1e12, "TFLOP/s")
    if peak:
        found.add(f"recompute {name}: MFU", step.operations / step.seconds / peak)
    ratio = step.counted / plan.rank.bytes.total
    found.add(f"recompute {name}: weights, gradients, optimizer over plan", ratio)
    found.expect(
        0.99 < ratio < 1.01, f"recompute {name}: what lives as long as the trainer is {ratio:.3f} of the plan's"
    )
    if place.cuda:
        planned = plan.rank.bytes.total + plan.activations[name].total
        found.add(f"recompute {name}: memory at most", step.peak / 2**30, "GiB")
        found.add(f"recompute {name}: over plan", step.peak / planned)
        low, high = PLAN_RATIO
        found.expect(
            low <= step.peak / planned <= high,
            f"recompute {name}: {step.peak / 2**30:.1f} GiB were in use, {planned / 2**30:.1f} are planned",
        )


def _extrapolate(
    found: Found, step: Step, shallow: Step, share: Mapping[str, Any], full: Architecture, recipe: ExperimentConfig,
    peak: float | None,
) -> None:  # fmt: skip
    """Of as many layers as a rank of the recipe has: the time of one layer is the difference of two depths."""
    more = share["num_hidden_layers"] - share["num_hidden_layers"] // 2
    seconds, operations = (step.seconds - shallow.seconds) / more, (step.operations - shallow.operations) / more
    layers = full.layers / recipe.megatron.pipeline_parallel - share["num_hidden_layers"]
    found.add("one layer, two micro-batches", seconds, "s")
    if peak and seconds > 0:
        found.add("MFU of the layers alone", operations / seconds / peak)
        mfu = (step.operations + layers * operations) / (step.seconds + layers * seconds) / peak
        found.add("MFU with all layers of the rank", mfu)
        if full.experts == 0 and mfu < GOAL:
            found.message = "; ".join(filter(None, [found.message, f"below the goal of {GOAL:.0%} MFU"]))
