"""Memory of one GPU: the trainer's objects, the SGLang servers', and what lies there in each phase of a step.

Bytes of a trainer rank are exact: the objects of the training backend, built on the meta device and counted. Those of a
server follow from how SGLang's layers are sharded (version 0.5.23): attention heads, MLP columns, experts and the
vocabulary are split over the tensor-parallel GPUs; key-value heads too, but with fewer heads than GPUs each GPU holds a
copy of one; norms and routers are whole everywhere. Splitting experts by number (``engine.extra.ep_size``) instead of
by width changes which bytes a GPU holds, not how many.

In a colocated step trainer and engine share the GPU::

    rollout ─► log-probabilities ─► training ─► optimizer step ─► resharding ─► rollout …

As :mod:`mua.trainer.memory_phases` does it: with ``engine.memory_saver`` the engine has no memory while the trainer
trains, with ``megatron.offload`` the trainer none while the engine rolls out; otherwise each keeps what it has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mua.config.schema import AlgorithmConfig, ExperimentConfig, MegatronConfig, OptimizerConfig
from mua.launch.plan.activations import Activations
from mua.launch.plan.layout import engine_nodes
from mua.megatron.architecture import Architecture
from mua.megatron.model import build_chunks
from mua.megatron.optimizer import Optimizer, wrap_data_parallel
from mua.megatron.parallel import meta_rank
from mua.megatron.settings import Options

_VOCABULARY_PADDING = 64
"""SGLang pads the embedding to a multiple of this."""

ENGINE_WORKING = 10 << 30
"""What a server takes beside weights and cache, for activations and CUDA graphs: the least that SGLang 0.5.23 itself
leaves free on a GPU of more than 60 GB (``srt/arg_groups/memory_hook.py``). It takes no more than is left to it."""

USER_BUFFERS = 10
"""Buffers of a micro-batch's hidden states that Transformer Engine makes for ``tp_comm_overlap``: one for each product
that it overlaps (``initialize_ub``, version 2.20)."""

BUCKETS = 2
"""Buckets of a weight synchronization under way at once: one being filled, one being read."""


_STATE = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


@dataclass(frozen=True, slots=True)
class ObjectBytes:
    """Bytes of the tensors that live as long as the trainer does."""

    parameters: int
    """Weights and persistent buffers; padded where the distributed optimizer keeps them in one buffer."""
    gradients: int
    """Float32 buffers, padded as Megatron's data-parallel wrapper pads them."""
    main_weights: int
    """Float32 copies of bfloat16 weights; with the distributed optimizer this rank's shard."""
    moments: int
    """Adam's two; with the distributed optimizer this rank's shard. Allocated by the first optimizer step."""
    quantized: int = 0
    """Copies of linear layers' weights in float8, by rows and by columns."""
    host: int = 0
    """Pinned host memory of an optimizer that the CPU updates: main weights, moments, gradients."""

    @property
    def total(self) -> int:
        """On the device."""
        return self.parameters + self.gradients + self.main_weights + self.moments + self.quantized

    def as_configured(self, optimizer: OptimizerConfig) -> ObjectBytes:
        """With main weights and moments, measured in float32, where and in the types that they are to be."""
        size = {"float32": 4, "float16": 2, "bfloat16": 2}
        main, average, square = (size[optimizer.state_dtypes[key]] for key in _STATE)
        if optimizer.precision_aware and main == 4:
            main = 2  # the other half of a float32 main weight is the bfloat16 weight itself
        kept, away = 1 - optimizer.cpu_offload_fraction, optimizer.cpu_offload_fraction
        if away:
            main = 4
        return replace(
            self,
            main_weights=int(self.main_weights * kept * main / 4),
            moments=int(self.moments * kept * (average + square) / 8),
            host=int(away * (2 * self.main_weights + self.moments)),  # its gradients are of the main weights' size
        )


@dataclass(frozen=True, slots=True)
class RankBytes:
    """One rank of a layout."""

    rank: int
    stage: int
    """Pipeline stage, from 0."""
    layers: int
    weights: int
    """Parameters of the policy this rank holds, as a number."""
    bytes: ObjectBytes
    """Of the policy."""
    hidden: int = 0
    """The model's hidden size."""
    critic: ObjectBytes | None = None
    """Of the critic, where there is one."""


def measure(chunks: Sequence[Any], wrapped: Sequence[Any], optimizer: Optimizer) -> ObjectBytes:
    """Counts storages, each once, of model chunks, their gradient buffers and the optimizer; on any device.

    Args:
        chunks: Megatron's model chunks.
        wrapped: the same, wrapped by :func:`mua.megatron.optimizer.wrap_data_parallel`.
    """
    seen: set[StorageWeakRef] = set()

    def fresh(tensors: Iterable[Any]) -> int:
        """Bytes of the storages behind ``tensors`` that are not seen yet."""
        storages = {StorageWeakRef(s): s for s in (t.untyped_storage() for t in tensors if isinstance(t, Tensor))}
        new = storages.keys() - seen
        seen.update(new)
        return sum(storages[key].nbytes() for key in new)

    model = [*itertools.chain.from_iterable((*chunk.parameters(), *chunk.buffers()) for chunk in chunks)]
    buffers = [b.grad_data for chunk in wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    parts = optimizer.megatron.chained_optimizers
    updated = [p for part in parts for group in part.optimizer.param_groups for p in group["params"]]
    states = [state for part in parts for state in part.optimizer.state.values()]
    moments = [value for state in states for name, value in state.items() if name != "step"]
    return ObjectBytes(
        parameters=fresh(model), gradients=fresh(buffers), main_weights=fresh(updated), moments=fresh(moments)
    )


def rank_bytes(architecture: Architecture, config: ExperimentConfig, rank: int, options: Options) -> RankBytes:
    """Builds ``rank``'s model, gradient buffers and optimizer on the meta device and counts them; the critic's too.

    They are built of local layers and with a plain Adam, as any machine can; what the options make of them follows.

    Raises:
        MuaError: the layout is not a tested one.
    """
    # The same layout, gradient buffers included, without what needs Transformer Engine or a GPU.
    plain = {
        "implementation": "local", "rope_fusion": False, "swiglu_fusion": False, "moe_permute_fusion": False,
        "moe_router_fusion": False, "gradient_accumulation_fusion": False, "tp_comm_overlap": False,
        "cuda_graphs": False, "fp8": None, "fp8_param_gather": False, "offload_activations": [], "recompute": "none",
        "overlap_grad_reduce": options.overlap_grad_reduce, "overlap_param_gather": options.overlap_param_gather,
    }  # fmt: skip
    megatron, hf_config = config.megatron.model_copy(update=plain), architecture.hf_config
    with meta_rank(megatron, rank):
        chunks = build_chunks(hf_config, config.model, megatron)
        critic = None
        if config.algorithm.advantage == "gae":
            values = build_chunks(hf_config, config.model, megatron, critic=True)
            critic = _trained_bytes(values, megatron, config.critic.optimizer, config.megatron)
        return RankBytes(
            rank=rank,
            stage=rank // (megatron.world_size // megatron.pipeline_parallel),
            layers=sum(len(chunk.decoder.layers) for chunk in chunks),
            weights=sum(p.numel() for chunk in chunks for p in chunk.parameters()),
            bytes=_trained_bytes(chunks, megatron, config.optimizer, config.megatron),
            hidden=architecture.hidden,
            critic=critic,
        )


def _trained_bytes(
    chunks: list[Any], megatron: MegatronConfig, optimizer: OptimizerConfig, asked: MegatronConfig
) -> ObjectBytes:
    """Of the chunks with all that training them takes."""
    wrapped = wrap_data_parallel(chunks, megatron)
    adam = optimizer.model_copy(
        update={"precision_aware": False, "cpu_offload_fraction": 0.0}
        | dict.fromkeys(optimizer.state_dtypes, "float32")
    )
    built = Optimizer(wrapped, adam, megatron, total_steps=1 << 30)
    for part in built.megatron.chained_optimizers:
        part.init_state_fn(part.optimizer)
    linear = sum(
        parameter.numel()
        for chunk in chunks
        for name, parameter in chunk.decoder.named_parameters()
        if parameter.ndim == 2 and "router" not in name
    )
    found = measure(chunks, wrapped, built).as_configured(optimizer)
    # Weights that are float8 themselves take what bfloat16 ones do: each is kept by rows and by columns.
    return replace(found, quantized=2 * linear if asked.fp8 and not asked.fp8_param_gather else 0)


@dataclass(frozen=True, slots=True)
class EngineBytes:
    """One GPU of one server."""

    weights: int
    token: int
    """KV cache of one token."""
    cache: int
    """KV cache in all."""

    @property
    def tokens(self) -> int:
        """Tokens the cache of one server holds; the GPUs of a server hold different heads of the same tokens."""
        return self.cache // self.token


def scoring_passes(algorithm: AlgorithmConfig) -> int:
    """Forward passes besides training's own: the old policy's where it is recomputed, the reference's, the critic's."""
    return int(algorithm.recomputes) + int(algorithm.kl_coefficient > 0) + int(algorithm.advantage == "gae")


def engine_element(config: ExperimentConfig) -> int:
    """Bytes of a weight, and of an element of the KV cache."""
    return 2 if (config.engine.dtype or config.model.dtype) == "bfloat16" else 4


def engine_weights(architecture: Architecture, config: ExperimentConfig) -> int:
    """Bytes of weights on one GPU of a server."""
    a, tp = architecture, config.engine.tensor_parallel
    kv = max(a.kv_heads, tp)
    attention = a.hidden * a.head_dim * 2 * (a.heads + kv) // tp
    bias = (a.heads + 2 * kv) * a.head_dim // tp if a.qkv_bias else 0
    norms = 2 * a.hidden + (2 * a.head_dim if a.qk_norm else 0)
    vocabulary = -(-a.vocabulary // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
    total = (1 if a.tied else 2) * vocabulary * a.hidden // tp + a.hidden
    for sparse in a.sparse:
        router = a.hidden * a.experts if sparse else 0
        total += attention + bias + norms + router + (a.mlp_weights(sparse, active=False) - router) // tp
    return total * engine_element(config)


def engine_bytes(architecture: Architecture, config: ExperimentConfig, free: int) -> EngineBytes:
    """Weights and KV cache of one GPU on which ``free`` bytes are free when the server starts.

    SGLang keeps ``memory_fraction`` of what is free then for both; the rest is left for activations and CUDA graphs.
    """
    a, tp = architecture, config.engine.tensor_parallel
    weights = engine_weights(a, config)
    token = 2 * a.layers * max(1, a.kv_heads // tp) * a.head_dim * engine_element(config)
    cache = max(0, int(free * config.engine.memory_fraction) - weights)
    if config.engine.max_total_tokens is not None:
        cache = min(cache, config.engine.max_total_tokens * token)
    return EngineBytes(weights, token, cache - cache % token)


def servers(config: ExperimentConfig) -> int:
    """SGLang servers of the whole cluster."""
    return config.engine.count * engine_nodes(config)


OF_ENGINE = -1
"""What stands for the rank of a GPU that no trainer rank has."""


@dataclass(frozen=True, slots=True)
class Phase:
    """The GPU of one trainer rank at the peak of one phase; parts in bytes."""

    name: str
    rank: int
    """Or :data:`OF_ENGINE`."""
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def reference_bytes(rank: RankBytes, config: ExperimentConfig) -> int:
    """The frozen copy of the initial weights that a KL term needs."""
    element = 2 if config.model.dtype == "bfloat16" else 4
    return rank.weights * element if config.algorithm.kl_coefficient > 0 else 0


def trainer_at_start(rank: RankBytes, config: ExperimentConfig) -> int:
    """What the trainer holds when the engines of a new run start and measure what is free: all but Adam's moments, and
    with ``megatron.offload``, or on GPUs that are not the engines', nothing.

    A run that is resumed has the moments too by then, so that its KV cache is smaller without ``megatron.offload``.
    """
    if config.megatron.offload or config.placement == "separate":
        return 0
    networks = [rank.bytes, *([] if rank.critic is None else [rank.critic])]
    return sum(held.total - held.moments for held in networks) + reference_bytes(rank, config)


def phases(rank: RankBytes, kept: Activations, engine: EngineBytes, config: ExperimentConfig, free: int) -> list[Phase]:
    """Every phase of a step on the GPU of ``rank``; the critic's passes take no more than the policy's.

    With ``placement: separate`` the engines' phases are of GPUs of their own: trainer and engine share none.

    What torch caches of freed activations it gives back before the engines take their memory
    (:mod:`mua.trainer.memory_phases`); the contexts of both processes are part of what the cluster reserves.

    Args:
        free: bytes that a server found free when it started.
    """
    trainer = {
        "weights": rank.bytes.parameters + rank.bytes.quantized,
        "gradients": rank.bytes.gradients,
        "optimizer": rank.bytes.main_weights + rank.bytes.moments,
        "reference": reference_bytes(rank, config),
        "critic": 0 if rank.critic is None else rank.critic.total,
        "user buffers": 0,
    }
    if config.megatron.tp_comm_overlap:  # of products that overlap with communication
        trainer["user buffers"] = USER_BUFFERS * config.megatron.max_tokens_per_microbatch * rank.hidden * 2
    serving = {"engine weights": engine.weights, "KV cache": engine.cache}
    working = {"engine working": min(ENGINE_WORKING, max(0, free - engine.weights - engine.cache))}
    separate = config.placement == "separate"
    released = config.engine.memory_saver or separate
    idle = {} if released else serving
    loaded = {} if separate else {"engine weights": engine.weights} if released else serving
    scoring = {"activations": kept.layer, "output": kept.scoring}
    training = {"activations": kept.kept + kept.working, "output": kept.output}
    # Graphs keep the activations inside them as long as they live, in training among all others.
    graphs = {"CUDA graphs": kept.graphs}
    away = config.megatron.offload
    buckets = {"buckets": BUCKETS * config.engine.bucket_bytes}
    found = [Phase("rollout", rank.rank, (graphs if away else trainer | graphs) | serving | working)]
    if separate:
        found = [
            Phase("rollout", OF_ENGINE, serving | working),
            Phase("weights received", OF_ENGINE, serving | {"buckets": config.engine.bucket_bytes}),
        ]
    if scoring_passes(config.algorithm):
        found.append(Phase("log-probabilities", rank.rank, trainer | graphs | idle | scoring))
    return [
        *found,
        Phase("training", rank.rank, trainer | idle | training),
        Phase("optimizer step", rank.rank, trainer | graphs | idle),
        Phase("resharding", rank.rank, trainer | graphs | loaded | buckets),
    ]


def host_bytes(rank: RankBytes, kept: Activations, config: ExperimentConfig) -> int:
    """Pinned memory of one rank: an offloaded optimizer, activations that wait, and all state while engines roll out
    or a checkpoint is written in the background."""
    networks = [rank.bytes, *([] if rank.critic is None else [rank.critic])]
    state = sum(held.parameters + held.main_weights + held.moments for held in networks)
    copies = int(config.megatron.offload) + int(config.trainer.async_save)
    return sum(held.host for held in networks) + kept.host + copies * state
