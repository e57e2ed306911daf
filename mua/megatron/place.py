"""Where a rank stands in a parallel layout, as far as it decides what the rank reads of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

from mua.megatron.moe import layers_with_experts


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's coordinates, and what it holds of the model."""

    data: int = 0
    context: int = 0
    contexts: int = 1
    tensor: int = 0
    tensors: int = 1
    first: bool = True
    """Whether it holds the beginning of the model, which takes ids."""
    last: bool = True
    """Whether it holds the end, which predicts them."""
    layers: tuple[int, ...] = ()
    """Its layers with experts, counted from 0 over all stages, in the order of :func:`layers_with_experts`."""
    top_k: int = 0

    @classmethod
    def of(cls, chunks: Sequence[GPTModel]) -> Self:
        """This rank's, which holds ``chunks``."""
        return cls(
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
            any(chunk.pre_process for chunk in chunks),
            any(chunk.post_process for chunk in chunks),
            tuple(layer.layer_number - 1 for layer in layers_with_experts(chunks)),
            chunks[0].config.moe_router_topk,
        )

    @property
    def columns(self) -> list[tuple[int, range]]:
        """Which choices of a token are its layers', ``layers * top k`` of all stages: runs of them, each with the
        number of those before it."""
        runs: list[tuple[int, range]] = []
        for place, layer in enumerate(self.layers):
            begin, end = layer * self.top_k, (layer + 1) * self.top_k
            if runs and runs[-1][1].stop == begin:
                column, run = runs.pop()
                runs.append((column, range(run.start, end)))
            else:
                runs.append((place * self.top_k, range(begin, end)))
        return runs

    @property
    def reports(self) -> bool:
        """Whether it holds results that no other rank holds too."""
        return self.last and self.tensor == 0
