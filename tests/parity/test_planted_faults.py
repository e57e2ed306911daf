"""What the comparison of a layout with a single process finds: faults of parallel training, planted on purpose.

Each fault is one that a change of this code, or of Megatron-Core, could bring: a sum over ranks left out or made twice,
the wrong share of a sequence, a layer or an expert. It is put into every rank, the layout is run as in
test_megatron_layouts.py, and the measure named must be beyond its bound. Does not cover faults of a kernel, which are
alike in a single process (test_megatron_layouts.py holds that against transformers).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mua.megatron import (
    attention,
    batch_sharder,
    layouts,
    logprobs,
    microbatch,
    model,
    modules,
    moe,
    network,
    optimizer,
    parallel,
    tiles,
)
from tests import layout_support
from tests.distributed import run_on_workers

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class Fault:
    """One planted fault, and where and by what it must be found."""

    kind: str
    layout: str
    found_by: str
    plant: Callable[[Patch], None]
    """Called in every rank before the model is built."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Beside the layout."""


def after(patch: Patch, owner: Any, name: str, change: Callable[..., None]) -> None:
    """Lets ``change`` see, and change, what a method was called on once it has returned."""
    original = getattr(owner, name)

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        change(self)
        return result

    patch.setattr(owner, name, changed)


def around(patch: Patch, owner: Any, name: str, result: Callable[..., Any]) -> None:
    """Replaces a function by ``result``, which is given the original and its arguments."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: result(original, *args, **kwargs))


def norms_not_summed(patch: Patch) -> None:
    """Norms' gradients under sequence parallelism, of which each rank has a part."""
    after(patch, modules.RMSNorm, "__init__", lambda norm: setattr(norm.weight, "sequence_parallel", False))


def routers_not_summed(patch: Patch) -> None:
    after(patch, moe.PackedRouter, "__init__", lambda router: setattr(router.weight, "sequence_parallel", False))


def tied_embeddings_not_summed(patch: Patch) -> None:
    """The first stage's and the last one's copies of one weight."""
    finishing = sys.modules[network.finalize_model_grads.__module__]  # type: ignore[attr-defined]
    patch.setattr(finishing, "_allreduce_word_embedding_grads", lambda *_, **__: None)


def output_gradient_not_summed(patch: Patch) -> None:
    """Each rank's shard of the vocabulary makes its part of the hidden states' gradient."""
    around(
        patch, modules, "gather_from_sequence_parallel_region",
        lambda gather, states, group: gather(states, tensor_parallel_output_grad=False, group=group),
    )  # fmt: skip


def keys_not_summed(patch: Patch) -> None:
    """Gradients of keys and values that other ranks' queries made."""
    around(
        patch, attention, "gather_from_sequence_parallel_region",
        lambda gather, keys, group: gather(keys, tensor_parallel_output_grad=False, group=group),
    )  # fmt: skip


def sequences_split_in_halves(patch: Patch) -> None:
    """Each rank takes one half of a sequence, where attention counts on the first and the last quarter."""

    def halves(lengths: list[int], size: int, rank: int) -> Any:
        starts = np.cumsum([0, *lengths])
        parts = [start + np.arange(n // size) + rank * (n // size) for start, n in zip(starts, lengths, strict=False)]
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts])

    patch.setattr(microbatch, "zigzag", halves)
    patch.setattr(tiles, "zigzag", halves)


def positions_counted_by_rank(patch: Patch) -> None:
    """As if a rank's part of a micro-batch were a whole one."""

    def counted(make: Any, *args: Any, **kwargs: Any) -> Any:
        batch = make(*args, **kwargs)
        packing = replace(batch.packing, positions=torch.arange(len(batch.packing.positions)))
        return replace(batch, packing=packing)

    around(patch, network, "micro_batch", counted)


def averaged_over_data_parallel_ranks(patch: Patch) -> None:
    """Gradients are divided by the number of ranks, although the weights hold the batch's denominators."""

    def averaged(wrap: Any, chunks: Any, megatron: Any) -> Any:
        chunks[0].config.calculate_per_token_loss = False
        try:
            return wrap(chunks, megatron)
        finally:
            chunks[0].config.calculate_per_token_loss = True

    around(patch, network, "wrap_data_parallel", averaged)


def weights_read_before_they_are_gathered(patch: Patch) -> None:
    """Each rank sees the last step in its own shard only."""
    patch.setattr(network.Network, "gather_parameters", lambda self: None)


def gradients_sent_before_the_last_micro_batch(patch: Patch) -> None:
    """What the later micro-batches add to a bucket that is summed already stays this rank's own."""

    def wrapped(wrap: Any, chunks: Any, megatron: Any) -> Any:
        found = wrap(chunks, megatron)
        chunks[0].config.no_sync_func = None
        for chunk in found:
            for group in chunk.bucket_groups:
                group.register_grad_ready = _sent_at_first(group)
        return found

    around(patch, network, "wrap_data_parallel", wrapped)


def _sent_at_first(group: Any) -> Callable[..., None]:
    """In place of a bucket group's ``register_grad_ready``: it sums when all gradients have come once."""

    def register(parameter: Any, force_all_reduce: bool = False) -> None:
        counts = group.per_param_grad_ready_counts
        counts[parameter] = counts.get(parameter, 0) + 1
        if not group.is_first_batch and len(counts) == len(group.params) and sum(counts.values()) == len(group.params):
            group.start_grad_sync(force_all_reduce=force_all_reduce)

    return register


def every_rank_has_the_first_micro_batches(patch: Patch) -> None:
    def repeated(pack: Any, *args: Any) -> Any:
        packed = pack(*args)
        return replace(packed, microbatches=packed.microbatches[:1] * len(packed.microbatches))

    around(patch, batch_sharder, "pack", repeated)


def losses_by_own_tokens(patch: Patch) -> None:
    """Balancing losses are divided by a rank's share of the batch's tokens."""
    around(
        patch, network, "micro_batch",
        lambda make, sequences, alignment, plan, planned, **scoring: make(
            sequences, alignment, replace(plan, tokens=plan.tokens // len(plan.microbatches)), planned, **scoring
        ),
    )  # fmt: skip


def shards_not_gathered(patch: Patch) -> None:
    """Each rank of the distributed optimizer updates a part of the weights; the others keep theirs."""
    patch.setattr(optimizer.DistributedDataParallel, "_start_bucket_group_param_sync", lambda *_, **__: None)  # type: ignore[attr-defined]


def norm_counts_copies(patch: Patch) -> None:
    """Weights that every tensor-parallel rank has are counted once for each."""
    patch.setattr("megatron.core.tensor_parallel.param_is_not_tensor_parallel_duplicate", lambda *_, **__: True)


def padding_in_the_vocabulary(patch: Patch) -> None:
    """Rows that pad the embedding take part in the softmax."""
    original = logprobs.log_probabilities
    patch.setattr(network, "log_probabilities", lambda *args, **kwargs: original(*args, **kwargs | {"vocab_size": 128}))


def experts_summed_over_all_ranks(patch: Patch) -> None:
    """Different experts of data-parallel ranks are added up like copies of one weight."""

    def wrong(prepare: Any, chunks: Any, *losses: float) -> None:
        prepare(chunks, *losses)
        for layer in moe.layers_with_experts(chunks):
            for parameter in layer.mlp.experts.parameters():
                parameter.allreduce = True

    around(patch, model, "prepare_experts", wrong)


def experts_averaged(patch: Patch) -> None:
    """Experts' gradients are divided by the ranks that hold other experts."""

    def halve(wrapped: Any) -> None:
        for group in wrapped.expert_parallel_bucket_groups:
            for bucket in group.buckets:
                bucket.gradient_scaling_factor = 0.5

    after(patch, optimizer.DistributedDataParallel, "__init__", halve)  # type: ignore[attr-defined]


def load_counted_on_own_part(patch: Patch) -> None:
    """The balancing loss of a micro-batch takes choices of a part of it."""

    def own(balance: Any, router: Any, *args: Any) -> Any:
        whole, router.tp_cp_group = router.tp_cp_group, parallel.parallel_state.get_pipeline_model_parallel_group()  # type: ignore[attr-defined]
        try:
            return balance(router, *args)
        finally:
            router.tp_cp_group = whole

    around(patch, moe.PackedRouter, "_balance", own)


def padding_routed(patch: Patch) -> None:
    """Padding counts as load and enters the balancing losses."""
    patch.setattr(moe.PackedRouter, "_real_tokens", lambda _, packing: torch.ones_like(packing.real))


def _layers_from(patch: Patch, first: dict[tuple[int, int | None], int]) -> None:
    """Gives the model chunk (stage, virtual stage) the layers from ``first`` on."""

    def offset(_: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
        rank = parallel.parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank  # type: ignore[attr-defined]
        return first[rank, vp_stage]

    patch.setattr("megatron.core.transformer.transformer_layer.get_transformer_layer_offset", offset)


def virtual_stages_swapped(patch: Patch) -> None:
    """A rank's second chunk holds the layers of its first."""
    _layers_from(patch, {(0, 0): 2, (1, 0): 3, (0, 1): 0, (1, 1): 1})


def uneven_stages_swapped(patch: Patch) -> None:
    """The first of four layers is counted as the last one's neighbor: stages of 1 and 3 layers hold 4 and 1 to 3."""
    _layers_from(patch, {(0, None): 3, (1, None): 0})


FAULTS = {
    fault.plant.__name__: fault
    for fault in (
        Fault("dense", "TP2", "gradient", norms_not_summed),
        Fault(
            "dense",
            "DP2",
            "distributed_weights",
            weights_read_before_they_are_gathered,
            settings=layout_support.OVERLAP,
        ),
        Fault(
            "dense",
            "DP2",
            "distributed_weights",
            gradients_sent_before_the_last_micro_batch,
            settings=layout_support.OVERLAP,
        ),
        Fault("dense", "TP2", "gradient", output_gradient_not_summed),
        Fault("dense", "TP2", "norm", norm_counts_copies),
        Fault("dense", "TP2", "logprobs", padding_in_the_vocabulary),
        Fault("dense", "PP2", "gradient", tied_embeddings_not_summed),
        Fault("dense", "PP2 VPP2", "logprobs", virtual_stages_swapped),
        Fault("dense", "PP2 FIRST1", "logprobs", uneven_stages_swapped),
        Fault("dense", "CP2", "gradient", keys_not_summed),
        Fault("dense", "CP2", "logprobs", sequences_split_in_halves),
        Fault("dense", "CP2", "logprobs", positions_counted_by_rank),
        Fault("dense", "DP2", "norm", averaged_over_data_parallel_ranks),
        Fault("dense", "DP2", "loss", every_rank_has_the_first_micro_batches),
        Fault("dense", "DP2", "distributed_weights", shards_not_gathered),
        Fault("moe", "TP2 ETP1", "gradient", routers_not_summed),
        Fault("moe", "DP2 EP2", "gradient", experts_summed_over_all_ranks),
        Fault("moe", "DP2 EP2", "gradient", experts_averaged),
        Fault("moe", "DP2", "load", losses_by_own_tokens),
        Fault("moe", "CP2", "load", load_counted_on_own_part),
        Fault("moe", "CP2", "load", padding_routed),
    )
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def faulty(folder: str, sizes: dict[str, Any], name: str) -> dict[str, float]:
    """What one rank finds with the fault."""
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[name].plant(patch)
        return layout_support.differences(folder, sizes, alike=False)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, models: Path) -> None:
    fault = FAULTS[name]
    path = layout_support.model_for(models, fault.kind, fault.layout)
    sizes, world = layouts.sizes(fault.layout) | fault.settings, layout_support.world_of(fault.layout)
    ranks = run_on_workers(world, faulty, str(path), sizes, name)
    assert fault.found_by in layout_support.worst(ranks).refused()


def test_ranks_are_as_before_once_a_fault_is_gone(models: Path) -> None:
    for kind, name in sorted({(fault.kind, fault.layout) for fault in FAULTS.values()}):
        assert not layout_support.measure(models, kind, name).refused()
