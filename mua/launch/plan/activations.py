"""An estimate of what a trainer rank keeps between a micro-batch's forward and backward pass.

It counts the tensors that autograd saves (after Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022, with their list of saved tensors redone for RMSNorm, gated MLPs, grouped queries, no dropout
and fused attention, which keeps no scores), by module, for two implementations:

* local layers, with or without fused SwiGLU: ``tests/unit/test_plan_activations.py`` holds the estimate against the
  tensors a real forward pass saves;
* Transformer Engine's, by what its modules hand to ``save_for_backward`` (version 2.20: a linear layer with a fused
  norm its input, the norm's output and one number per token; the fused rotary embedding its table, once for all
  layers; grouped experts their input; permutations a map of ``2 experts + 1`` numbers per token). The same tests hold
  it against a forward pass of Megatron's own layers whose kernels keep just that.

It knows nothing of allocator fragmentation or kernels' workspaces, and takes experts to be visited evenly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mua.config.schema import ExperimentConfig, MegatronConfig
from mua.megatron.architecture import Architecture
from mua.megatron.logprobs import CHUNK_ELEMENTS
from mua.megatron.settings import Options

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
    graphs: int = 0
    """Of the saved ones those inside CUDA graphs, which live as long as the graphs do."""
    host: int = 0
    """Of the saved ones those that wait in pinned host memory (megatron.offload_activations), not counted above."""

    @property
    def total(self) -> int:
        return self.kept + self.working + self.output


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """What the formulas need to know of one rank."""

    architecture: Architecture
    options: Options
    element: int
    """Bytes of an activation: 2 or 4."""
    linear: float
    """Bytes of an element that a linear layer keeps of its input: in float8 one, and a scale for every 128."""
    tokens: float
    """Of a full micro-batch on this rank: split over context-parallel ranks."""
    tp: int
    etp: int

    @classmethod
    def of(cls, architecture: Architecture, config: ExperimentConfig, options: Options) -> LayerSizes:
        layout, element = config.megatron, 2 if config.model.dtype == "bfloat16" else 4
        return cls(
            architecture,
            options,
            element=element,
            linear=1 + _FLOAT / 128 if layout.fp8 else element,
            tokens=layout.max_tokens_per_microbatch / layout.context_parallel,
            tp=layout.tensor_parallel,
            etp=layout.expert_tensor_parallel or layout.tensor_parallel,
        )

    @property
    def fused(self) -> bool:
        """Whether layers are Transformer Engine's."""
        return self.options.implementation == "transformer_engine"

    @property
    def norm(self) -> float:
        """Bytes a local norm saves for each element of its input: a float32 one (in bfloat16 a copy) and a normalized
        one."""
        return _FLOAT + self.element

    @property
    def stream(self) -> float:
        """Bytes of the hidden state, which sequence parallelism splits."""
        return self.element * self.architecture.hidden * self.tokens / self.tp

    def parts(self, sparse: bool) -> dict[str, float]:
        """Bytes that one layer saves of one micro-batch, by what saves them."""
        return self._attention() | (self._experts() if sparse else self.parts_of_mlp())

    def _norm_and_input(self) -> tuple[float, float]:
        """Of a norm and of the linear layer behind it, which keeps the norm's output."""
        output = self.linear / self.element * self.stream
        if self.fused:
            return self.stream + _FLOAT * self.tokens / self.tp, output
        return self.stream * self.norm / self.element, output

    def _attention(self) -> dict[str, float]:
        """Norm, projections, norms of queries and keys, rotary tables, attention."""
        a, e = self.architecture, self.element
        queries, keys = a.heads / self.tp, max(a.kv_heads, self.tp) / self.tp
        norm, projection = self._norm_and_input()
        # What norms of queries and keys keep for each element of a head, and rotation for each token.
        tables = 0.0 if self.options.rope_fusion else 4 * e * a.head_dim
        if self.fused:
            # Values are a view of the whole projection, which stays; a norm keeps its input, queries a copy of theirs.
            shaped = e * (queries + keys) + (e * queries if a.qk_norm else 0.0)
        else:
            shaped = self.norm * (queries + keys) if a.qk_norm else 0.0
            if a.qk_norm and e == _FLOAT:  # the key norm's input is then a view of the whole projection
                shaped += _FLOAT * (queries + keys)
        log_sums = _FLOAT * queries  # the log-sum-exp of each query
        projected = 0.0 if self.linear == e else self.linear * queries * a.head_dim  # in float8 once more
        return {
            "attn_norm": norm,
            "qkv_linear": projection,
            "queries and keys": (shaped * a.head_dim + tables) * self.tokens,
            # q, k, v and what came out of the kernel, which the projection reads.
            "core_attn": (e * (2 * queries + 2 * keys) * a.head_dim + log_sums) * self.tokens,
            "attn_proj": projected * self.tokens,
        }

    def parts_of_mlp(self) -> dict[str, float]:
        """Of a dense layer: the first product, twice as wide, and the second's input. Unfused, SwiGLU adds its linear
        half once more, as Megatron adds an offset of 0 to it, and the gate's activation."""
        norm, first = self._norm_and_input()
        width = self.architecture.ffn / self.tp * self.tokens
        inner = 2 * self.element if self.options.swiglu_fusion else 4 * self.element
        return {"mlp_norm": norm, "mlp_input": first, "act": inner * width, "fc2": self.linear * width}

    def _experts(self) -> dict[str, float]:
        """Routing, the tokens sent to this rank's experts, and their MLPs, evenly loaded. Unfused, the multiplication
        with the router's weight comes before the second product."""
        a, e = self.architecture, self.element
        here = self.tokens / self.tp
        visits = a.top_k * here * self.etp
        norm = self.stream + _FLOAT * here if self.fused else self.stream * self.norm / e
        if self.options.moe_router_fusion:
            routing = ((2 * _FLOAT + 1) * a.experts) * here  # scores, probabilities, choices
        else:
            routing = (4 * _FLOAT * a.experts + 6 * _FLOAT * a.top_k) * here
        if self.options.moe_permute_fusion:
            routing += _FLOAT * (2 * a.experts + 1) * here  # the map, int32
        # Unfused, Megatron's grouped experts add an offset of 0 to the linear half; this package's do not.
        inner = 2 * e if self.options.swiglu_fusion else (5 if self.fused else 4) * e
        width = a.expert_ffn / self.etp
        shared = a.shared_ffn / self.tp * self.tokens
        return {
            "mlp_norm": norm,
            "mlp_input": self.stream,  # the norm's output, which router and dispatcher read
            "router": routing,
            "expert_fc1": visits * self.linear * a.hidden,
            "moe_act": visits * (inner * width + (_FLOAT if self.options.swiglu_fusion else 0)),
            "expert_fc2": visits * self.linear * width,
            "shared_experts": (2 if self.options.swiglu_fusion else 4) * e * shared + self.linear * shared,
        }

    def layer(self, sparse: bool, recompute: str, modules: Iterable[str] = ("mlp",)) -> float:
        """What one layer keeps of one micro-batch; with ``recompute`` selective without what ``modules`` save."""
        if recompute == "full":
            return self.stream
        parts = self.parts(sparse)
        if recompute != "selective":
            return sum(parts.values())
        of_experts = {
            "moe": ("router", "expert_fc1", "moe_act", "expert_fc2", "shared_experts"),
            "moe_act": ("expert_fc2",),
            "shared_experts": ("shared_experts",),
        }
        for module in modules:
            if module == "mlp" and not sparse:  # with a fused norm it begins before it
                parts |= dict.fromkeys(("act", "fc2", *(("mlp_input",) if self.fused else ())), 0.0)
            elif sparse:
                parts |= dict.fromkeys(of_experts.get(module, ()), 0.0)
        if "layernorm" in modules:  # norms that are modules of their own keep their input alone; fused ones stay
            if sparse or not self.fused:
                parts |= {"mlp_norm": self.stream, "mlp_input": 0.0}
            if not self.fused:
                parts |= {"attn_norm": self.stream, "qkv_linear": 0.0}
        return sum(parts.values())

    def offloaded(self, sparse: bool, modules: Iterable[str]) -> float:
        """What of it waits in host memory."""
        parts, found = self.parts(sparse), 0.0
        of = {"qkv_linear": ("attn_norm", "qkv_linear"), "core_attn": ("core_attn",), "mlp_norm": ("mlp_norm",)}
        of |= {"expert_fc1": ("expert_fc1",), "moe_act": ("moe_act",)}
        for module in modules:
            if module != "mlp_norm" or sparse:  # in a dense layer the norm is fused and not a module of its own
                found += sum(parts.get(part, 0.0) for part in of.get(module, ()))
        return found

    def final_norm(self) -> float:
        """The norm before the output layer, a module of its own, and what it gives."""
        norm = self.stream + _FLOAT * self.tokens / self.tp if self.fused else self.stream * self.norm / self.element
        return norm + self.stream

    def scoring(self) -> float:
        """The final norm, its output, that of all tensor-parallel ranks, and a chunk of logits: in the model's type
        (unless the output layer is in float32), then twice in full precision."""
        gathered = self.element * self.architecture.hidden * self.tokens if self.tp > 1 else 0.0
        return self.final_norm() + gathered + 2 * _FLOAT * self._chunk

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
    options: Options,
) -> Activations:
    """The estimate for a rank of ``stage`` that holds ``layers`` and gets ``microbatches`` full ones per step."""
    sizes, layout = LayerSizes.of(architecture, config, options), config.megatron
    modules = layout.recompute_modules
    kinds = [architecture.sparse[layer] for layer in layers]
    under_way = microbatches_under_way(layout, stage, microbatches)
    kept = sum(sizes.layer(sparse, recompute, modules) for sparse in kinds) * under_way
    away = [sizes.offloaded(sparse, layout.offload_activations if recompute != "full" else ()) for sparse in kinds]
    host = sum(away) * under_way
    whole = [sizes.layer(sparse, "none") - sizes.layer(sparse, recompute, modules) for sparse in kinds]
    last = stage == layout.pipeline_parallel - 1
    return Activations(
        # Of what waits in host memory one layer's leaves while another's comes.
        kept=int(kept - max(0.0, host - 2 * max(away, default=0.0))),
        working=int(max(whole, default=0)),
        output=int(sizes.output()) if last else 0,
        scoring=int(sizes.scoring()) if last else 0,
        layer=int(max(sizes.layer(sparse, "none") for sparse in kinds)),
        graphs=int(kinds.count(False) * sum(sizes.parts_of_mlp().values()) * under_way) if layout.cuda_graphs else 0,
        host=int(host),
    )
