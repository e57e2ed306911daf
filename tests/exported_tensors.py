"""The Hugging Face tensors of a model that is spread over ranks, for comparisons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, distributed

from megatron_bridge.plan import plan_model
from megatron_bridge.reshard import Resharder


def export_hf(chunks: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """Name and values of every tensor, in whole, on every rank of the plan's group; collective over it."""
    plan = plan_model(chunks)
    resharder = Resharder(plan, distributed.get_process_group_ranks(plan.group), 1 << 26)
    for index, layout in enumerate(resharder.buckets):
        flat = resharder.assemble(index)
        assert flat is not None
        for tensor in layout.tensors:
            yield tensor.spec.name, tensor.view(flat)
