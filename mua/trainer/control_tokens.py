"""Control tokens that a model has never trained: found at load, started otherwise if asked, watched while training.

A pretrained model may have a control token of its chat family as one of thousands of unused rows that are all alike.
Their logits are then equal in every place, so that a policy which has learned to write the token samples any other of
them in its stead, and no tool is ever called.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from megatron_bridge.safetensors_io import SafetensorsFolder
from mua.config.schema import ModelConfig
from mua.tokens.chat_family import ChatFamily, load_family_of
from mua.tokens.codec import content
from mua.types import BoolArray, Float32Array, Int32Array, Provenance
from mua.utils.collective import gathered
from mua.utils.errors import ModelError

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

EMBEDDINGS, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
FAR_BELOW = 0.2
"""Of the median norm: rows that gradients have reached are not so short."""
NEARLY = 0.1
"""Of a row's norm: rows that are no further apart count as equal, as after a few steps of a fine-tuning."""
_BAND = 8192

Rows: TypeAlias = dict[str, dict[int, Tensor]]
"""By matrix and token, float32 ``[hidden]``."""

log = logging.getLogger(__name__)


@torch.no_grad()
def find_untrained(folder: Path, family: ChatFamily) -> tuple[list[str], Rows]:
    """What is wrong with rows of the family's control tokens, in words, and the rows that they can start from.

    Such a start is the mean of the ordinary tokens that spell the control token, at the median norm of all rows.
    Raises :class:`ModelError` where the model has no row for a token.
    """
    tokens = {family.codec.control[token]: token for token in family.control_tokens}
    notes, starts = list[str](), Rows()
    with SafetensorsFolder(folder) as weights:

        def read(name: str, row: int, count: int = 1) -> Tensor:
            target = torch.empty(count, weights.entry(name).shape[1])
            weights.read(name, row, 0, target)
            return target

        for name in (name for name in (EMBEDDINGS, OUTPUT) if name in weights.names):
            count = weights.entry(name).shape[0]
            if beyond := [token for number, token in tokens.items() if number >= count]:
                raise ModelError(f"{folder}: {name} has {count} rows, none of them for {', '.join(beyond)}")
            own, norms = torch.cat([read(name, number) for number in tokens]), list[Tensor]()
            alike = torch.zeros(len(tokens), dtype=torch.int64)
            for first in range(0, count, _BAND):
                band = read(name, first, min(_BAND, count - first))
                norms.append(band.norm(dim=1))
                apart = norms[-1].square()[:, None] + own.square().sum(dim=1) - 2 * band @ own.T
                alike += (apart <= (NEARLY * own.norm(dim=1)).square()).sum(dim=0)
            median = torch.cat(norms).median()
            for number, row, copies in zip(tokens, own, alike.tolist(), strict=True):
                if copies > 1 or row.norm() < FAR_BELOW * median:
                    why = f"equals {copies - 1} other rows"
                    short = f"has norm {float(row.norm()):.3g}, the median of all rows is {float(median):.3g}"
                    told = why if copies > 1 else short
                    notes.append(f"{tokens[number]} was never trained: its row of {name} {told}")
                    spelt = family.codec.encode([content(tokens[number], Provenance.USER)])[0]
                    mean = torch.cat([read(name, int(token)) for token in spelt]).mean(dim=0)
                    starts.setdefault(name, {})[number] = mean * (median / mean.norm().clamp(min=1e-12))
    return notes, starts


def report_untrained(model: ModelConfig, family: ChatFamily) -> None:
    """Log what :func:`find_untrained` finds in the folder of the policy, and what to do."""
    done = "it starts from the mean of the tokens that spell it (model.init_control_tokens)"
    advice = "set model.init_control_tokens: mean and fine-tune first, or take an instruction-tuned checkpoint"
    # Missing weights are told by the start checks; a stand-in for engines needs none.
    notes = find_untrained(model.path, family)[0] if any(model.path.glob("*.safetensors")) else ()
    for note in notes:
        log.warning("%s: %s; %s", model.path, note, done if model.init_control_tokens == "mean" else advice)


@torch.no_grad()
def init_untrained(chunks: Sequence[GPTModel], model: ModelConfig, *, critic: bool = False) -> None:
    """Start what :func:`find_untrained` finds from the rows that it gives; collective over all ranks. Optimizers copy
    parameters when they are made, so it comes before."""
    from megatron.core import parallel_state

    leads = torch.distributed.get_rank() == 0
    starts = gathered(find_untrained(model.path, load_family_of(model))[1] if leads else Rows())[0]
    for chunk in chunks:
        shards = [(EMBEDDINGS, chunk.embedding.word_embeddings.weight)] if chunk.pre_process else []
        if chunk.post_process and not critic and chunk.output_layer.weight is not None:
            tied = chunk.share_embeddings_and_output_weights
            shards.append((EMBEDDINGS if tied else OUTPUT, chunk.output_layer.weight))
        for name, shard in shards:
            first = parallel_state.get_tensor_model_parallel_rank() * len(shard)
            for number, row in starts.get(name, {}).items():
                if first <= number < first + len(shard):
                    shard[number - first].copy_(row)


def control_token_metrics(
    group: str, family: ChatFamily, streams: Iterable[tuple[Int32Array, Float32Array, BoolArray]]
) -> dict[str, float]:
    """Mean probability of each control token where it was to be written.

    ``streams`` are token ids, log-probabilities and which of them count, each ``[T]``.
    """
    chosen = [(ids[mask], logprobs[mask]) for ids, logprobs, mask in streams]
    if not chosen:
        return {}
    ids, logprobs = (np.concatenate(column) for column in zip(*chosen, strict=True))
    found = {}
    for token in family.control_tokens:
        if (here := ids == family.codec.control[token]).any():
            name = re.sub("[^a-z0-9]+", "_", token.lower()).strip("_") + ("_end" if token.startswith("</") else "")
            found[f"{group}/control_token_prob/{name}"] = float(np.exp(logprobs[here], dtype=np.float64).mean())
    return found
