"""The critic of generalised advantage estimation: the policy's architecture with one number a token for an output.

It starts from the policy's Hugging Face folder, lives in the same process groups under the same layout and packs rows
as the policy does. The value of a token is read where its log-probability would be: off the position before it, so that
it is a value of everything before the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

import megatron_bridge
from megatron_bridge.family import HfConfig
from mua.algorithms.loss_protocol import LossTerms, ValueLossFunction
from mua.algorithms.losses import finish_metrics
from mua.config.schema import CriticConfig, MegatronConfig, ModelConfig
from mua.megatron.microbatch import MicroBatch
from mua.megatron.model import build_chunks
from mua.megatron.network import Network, loaded
from mua.megatron.parallel import device
from mua.types import Float32Array, TrainBatch, TrainSequence


class ValueHead(torch.nn.Module):
    """Takes the place of Megatron's output layer: a weight and a bias that every tensor-parallel rank holds in whole.

    Both begin at 0, so that a new critic says 0 of everything whatever its backbone.
    """

    def __init__(self, chunk: GPTModel) -> None:
        super().__init__()
        config = chunk.config
        self._group = chunk.pg_collection.tp
        self._sequence_parallel = config.sequence_parallel
        kind: dict[str, Any] = {"dtype": config.params_dtype, "device": device()}
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, **kind))
        self.bias = torch.nn.Parameter(torch.zeros(1, **kind))
        for parameter in (self.weight, self.bias):  # a rank sees its part of the row: gradients are to be summed
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """``[tokens / tp, 1, hidden]`` under sequence parallelism gives float32 ``[tokens, 1, 1]`` on every rank."""
        values = F.linear(hidden.float(), self.weight.float(), self.bias.float())
        if self._sequence_parallel:
            # Every rank computes the whole loss: a rank's part of its gradient is complete.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=self._group)
        return values, None


class Critic:
    """The critic on this rank and its optimizer. All methods are collective; see :class:`MegatronBackend`.

    Args:
        model: the Hugging Face folder its backbone starts from, and its dtype.
        total_steps: its optimizer steps in the run.

    Raises:
        ModelError: the model folder cannot be read.
    """

    def __init__(self, model: ModelConfig, megatron: MegatronConfig, config: CriticConfig, total_steps: int) -> None:
        chunks = loaded(value_chunks, model, megatron, backbone=True)
        self.network = Network(chunks, megatron, config.optimizer, total_steps, section="critic.optimizer")

    def values(self, sequences: Sequence[TrainSequence]) -> list[Float32Array]:
        """The value of what comes before each token; see :meth:`mua.megatron.backend.MegatronBackend.values`."""
        return self.network.score(_routed_freely(sequences), _read)

    def train_step(self, batch: TrainBatch, loss: ValueLossFunction) -> dict[str, float]:
        """One optimizer step; see :meth:`mua.megatron.backend.MegatronBackend.train_values`."""
        step = self.network.train_step(_routed_freely(batch.sequences), partial(_terms, loss))
        found = finish_metrics(step.sums, step.maxima)
        del found["tokens"]  # the policy's step counts them
        return found | {f"critic/{name}": value for name, value in step.metrics.items()}


def value_chunks(hf_config: HfConfig, model: ModelConfig, megatron: MegatronConfig) -> list[GPTModel]:
    """This rank's chunks of a critic, not yet loaded: as a policy's, but untied and with a :class:`ValueHead`."""
    architecture = megatron_bridge.transformer_config_kwargs(hf_config)
    gpt = megatron_bridge.gpt_model_kwargs(hf_config) | {"share_embeddings_and_output_weights": False}
    chunks = build_chunks(architecture, gpt, model, megatron)
    for chunk in chunks:
        if chunk.post_process:
            chunk.output_layer = ValueHead(chunk)
    return chunks


def _routed_freely(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Without the engine's expert choices, which are the policy's."""
    return [replace(sequence, experts=None) for sequence in sequences]


def _read(batch: MicroBatch, model: Any, values: Tensor) -> Tensor:
    return values[0, :, 0][batch.predictors]


def _terms(loss: ValueLossFunction, batch: MicroBatch, model: Any, values: Tensor) -> LossTerms:
    assert batch.tokens is not None
    return loss(_read(batch, model, values), batch.tokens)
