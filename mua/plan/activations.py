"""An estimate of what a trainer rank keeps between a micro-batch's forward and backward pass.

It counts the tensors that autograd saves in this package's own layers (after Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022, with their list of saved tensors redone for RMSNorm, gated MLPs,
grouped queries, no dropout and fused attention, which keeps no scores). ``tests/unit/test_plan_activations.py`` holds
it against the tensors a real forward pass saves. It knows nothing of allocator fragmentation or kernels' workspaces,
and takes experts to be visited evenly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mua.config.schema import ExperimentConfig, MegatronConfig
from mua.megatron.architecture import Architecture
from mua.megatron.logprobs import CHUNK_ELEMENTS

_FLOAT = 4


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of one rank for micro-batches of the full token budget."""

    kept: int
    """Saved for the backward pass, over all micro-batches under way in the pipeline."""
    working: int
    """One layer computed anew, where layers are recomputed; else 0."""
    output: int
    """The output layer and the loss of one micro-batch in its backward pass, on the last stage."""
    scoring: int
    """The same where only log-probabilities are asked for."""
    layer: int
    """What the largest layer would save by itself: about the working set of a forward pass alone."""

    @property
    def total(self) -> int:
        return self.kept + self.working + self.output


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """What the formulas need to know of one rank."""

    architecture: Architecture
    element: int
    """Bytes of an activation: 2 or 4."""
    tokens: float
    """Of a full micro-batch on this rank: split over context-parallel ranks."""
    tp: int
    etp: int

    @classmethod
    def of(cls, architecture: Architecture, config: ExperimentConfig) -> LayerSizes:
        layout = config.megatron
        return cls(
            architecture,
            element=2 if config.model.dtype == "bfloat16" else 4,
            tokens=layout.max_tokens_per_microbatch / layout.context_parallel,
            tp=layout.tensor_parallel,
            etp=layout.expert_tensor_parallel or layout.tensor_parallel,
        )

    @property
    def norm(self) -> float:
        """Bytes a norm saves for each element of its input: a float32 one (in bfloat16 a copy) and a normalised one."""
        return _FLOAT + self.element

    @property
    def stream(self) -> float:
        """Bytes of the hidden state, which sequence parallelism splits."""
        return self.element * self.architecture.hidden * self.tokens / self.tp

    def attention(self) -> float:
        """Norm, projections, norms of queries and keys, rotary tables, attention."""
        a, e = self.architecture, self.element
        queries, keys = a.heads / self.tp, max(a.kv_heads, self.tp) / self.tp
        heads = queries + 2 * keys
        norms = self.norm * (queries + keys) if a.qk_norm else 0.0
        if a.qk_norm and e == _FLOAT:  # the key norm's input is then a view of the whole projection
            norms += _FLOAT * (heads - keys)
        saved = norms + e * heads + e * queries  # q, k, v; what came out of the kernel, which the projection reads
        a_head = saved * a.head_dim + _FLOAT * queries  # and the log-sum-exp of each query
        rotary = 4 * e * a.head_dim  # cosines and sines, once for queries, once for keys
        return self._norm_and_output() + (a_head + rotary) * self.tokens

    def mlp(self) -> float:
        """The first product, twice as wide; its linear half once more, as Megatron adds an offset of 0 to it; the
        gate's activation; the second product's input."""
        return 5 * self.element * self.architecture.ffn / self.tp * self.tokens

    def experts(self) -> float:
        """Routing, the tokens sent to this rank's experts, and their MLPs, evenly loaded; before the second product
        comes the multiplication with the router's weight."""
        a, e = self.architecture, self.element
        here = self.tokens / self.tp
        routing = (4 * _FLOAT * a.experts + 6 * _FLOAT * a.top_k) * here
        visits = a.top_k * here * self.etp
        shared = 5 * e * a.shared_ffn / self.tp * self.tokens
        return routing + visits * (e * a.hidden + 6 * e * a.expert_ffn / self.etp) + shared

    def _norm_and_output(self) -> float:
        return self.stream * (self.norm / self.element + 1)

    def layer(self, sparse: bool, recompute: str) -> float:
        """What one layer keeps of one micro-batch."""
        if recompute == "full":
            return self.stream
        kept = self.attention() + self._norm_and_output()
        if sparse:  # Megatron's selective recomputation of MLPs leaves experts alone
            return kept + self.experts()
        return kept + (0.0 if recompute == "selective" else self.mlp())

    def scoring(self) -> float:
        """The final norm, its output, that of all tensor-parallel ranks, and a chunk of logits: in the model's type,
        then twice in full precision."""
        gathered = self.element * self.architecture.hidden * self.tokens if self.tp > 1 else 0.0
        return self._norm_and_output() + gathered + 2 * _FLOAT * self._chunk

    def output(self) -> float:
        """Besides, while gradients are computed: those of a chunk in the model's type, of what was gathered, and of the
        weight, added up in full precision from parts in the model's type."""
        weight = self.architecture.padded_vocabulary / self.tp * self.architecture.hidden
        low = 0 if self.element == _FLOAT else self.element
        by_hidden = self.element * self.architecture.hidden * self.tokens
        return self.scoring() + low * self._chunk + by_hidden + (_FLOAT + low) * weight

    @property
    def _chunk(self) -> float:
        """Logits that exist at once on this rank, if every token of the micro-batch is scored."""
        return min(CHUNK_ELEMENTS, self.architecture.padded_vocabulary / self.tp * self.tokens)


def microbatches_under_way(layout: MegatronConfig, stage: int, microbatches: int) -> float:
    """Micro-batches of whole stages whose activations a stage holds at once (Narayanan et al., 2021).

    1F1B: as many as stages are left, itself included. Interleaved: Megatron's warm-up of chunks, plus one, in chunks.
    """
    stages, chunks = layout.pipeline_parallel, layout.virtual_pipeline or 1
    if chunks == 1:
        return min(stages - stage, microbatches)
    warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages
    return min(warm_up + 1, microbatches * chunks) / chunks


def activations(
    architecture: Architecture,
    config: ExperimentConfig,
    stage: int,
    layers: Iterable[int],
    microbatches: int,
    recompute: str,
) -> Activations:
    """The estimate for a rank of ``stage`` that holds ``layers`` and gets ``microbatches`` full ones per step."""
    sizes, layout = LayerSizes.of(architecture, config), config.megatron
    kinds = [architecture.sparse[layer] for layer in layers]
    kept = sum(sizes.layer(sparse, recompute) for sparse in kinds) * microbatches_under_way(layout, stage, microbatches)
    whole = [sizes.layer(sparse, "none") - sizes.layer(sparse, recompute) for sparse in kinds]
    last = stage == layout.pipeline_parallel - 1
    return Activations(
        kept=int(kept),
        working=int(max(whole, default=0)),
        output=int(sizes.output()) if last else 0,
        scoring=int(sizes.scoring()) if last else 0,
        layer=int(max(sizes.layer(sparse, "none") for sparse in kinds)),
    )
