"""Mixture of experts: the router's losses and load, replay of the engine's choices, experts in one product.

Tokens are never dropped and the router is in float32. The losses are sums over tokens with the batch's token count
divided in, as every loss here, so that nothing depends on how many ranks share the work.

**Routing replay.** A mixture-of-experts policy is trained off its own samples where trainer and engine round
differently: a near tie at a router picks another expert, and the token's log-probability jumps. Replaying the engine's
choices (the R3 of Ma et al., 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers")
removes the jump: the experts are the engine's, their weights come from the trainer's own router, which therefore keeps
its gradient.

    engine ── experts [T, layers * top k] ──► Segment ──► TrainSequence ──► PackedMicrobatch ──► each layer's router

Megatron's router asks the object in ``router.router_replay`` for its top k; that is the one place where a choice is
replaced. Which micro-batch it routes a :class:`PackedRouter` knows, also when activations are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from mua.compat.torch_private import run_forward_pre_hooks
from mua.megatron.modules import PackedMicrobatch
from mua.megatron.parallel import device
from mua.types import TrainSequence
from mua.utils.errors import ConfigError, MuaError

_AUX, _Z = 0, 1
_ALIGNED = 16
"""Bytes that strides of the grouped product are multiples of."""


class PackedRouter(TopKRouter):
    """Megatron's router on packed micro-batches: padding neither counts as load nor enters a loss.

    Takes the place of Megatron's own balancing losses, which it weighs by a rank's count of tokens, for a division by
    the batch's that comes with its loss. Here the loss holds its denominators, and nothing is divided.

    Load-balancing loss (Fedus et al., 2022, section 2.2), of one micro-batch and layer, with T tokens, E experts, k of
    them chosen per token, f the share of choices and P the mean probability of each expert::

        E * sum_i f_i P_i        1 where the load is even

    It is averaged over the batch's micro-batches, weighted by their tokens. Z-loss (Zoph et al., 2022, equation 5): the
    batch's mean of the squared log-normalizer of the router's logits. Both are summed over layers and multiplied by
    their coefficients, ``aux_loss`` and ``z_loss``.
    """

    aux_loss = 0.0
    z_loss = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.packing: PackedMicrobatch | None = None
        self.load = torch.zeros(self.num_experts, dtype=torch.float64, device=device())
        """Choices of this rank's tokens by expert, since they were last collected."""
        self.losses = torch.zeros(2, dtype=torch.float64, device=device())
        """This rank's part of both losses, without their coefficients, since they were last collected."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Megatron's choice for ``logits`` ``[tokens, 1, experts]``, in training with losses attached and load counted.

        Returns:
            probabilities and whether an expert is chosen, both ``[tokens, experts]``
        """
        probabilities, chosen = super().routing(logits)
        # Under recomputation the first pass has no gradients, so that every micro-batch counts once.
        if self.packing is None or not torch.is_grad_enabled():
            return probabilities, chosen
        real = self._real_tokens(self.packing)
        self.load += (chosen & real[:, None]).sum(0)
        flat = logits.view(-1, self.num_experts)
        if self.aux_loss:
            probabilities = self._attached(probabilities, _AUX, self._balance(flat, real, self.packing), self.aux_loss)
        if self.z_loss:
            squares = flat.logsumexp(-1).square()[real].sum()
            probabilities = self._attached(probabilities, _Z, squares / self.packing.batch_tokens, self.z_loss)
        return probabilities, chosen

    def _real_tokens(self, packing: PackedMicrobatch) -> Tensor:
        """Which of the tokens routed here are no padding, bool ``[tokens]``: sequence parallelism divides them."""
        assert packing.real is not None
        return packing.real.chunk(self.tp_group.size())[self.tp_group.rank()]

    def _balance(self, logits: Tensor, real: Tensor, packing: PackedMicrobatch) -> Tensor:
        """This rank's part of the load-balancing loss; its choices are counted over the whole micro-batch."""
        chosen, scores = compute_routing_scores_for_aux_loss(
            logits, self.topk, self.score_function, fused=self.config.moe_router_fusion, padding_mask=~real
        )
        counts = chosen.sum(0).to(scores.dtype)
        dist.all_reduce(counts, group=self.tp_cp_group)
        choices = counts.sum().clamp(min=1.0)
        return self.num_experts * (counts / choices * scores.sum(0)).sum() / packing.batch_tokens

    def _attached(self, probabilities: Tensor, index: int, loss: Tensor, coefficient: float) -> Tensor:
        self.losses[index] += loss.detach()
        attached: Tensor = MoEAuxLossAutoScaler.apply(probabilities, coefficient * loss)
        return attached


def prepare_experts(chunks: Sequence[GPTModel], aux_loss: float, z_loss: float) -> None:
    """Marks experts, gives routers their coefficients and shows them each micro-batch; before data-parallel wrapping.

    An expert's gradients are summed over the ranks that hold the same expert, not over all data-parallel ranks.
    Megatron says so (``allreduce = False``) only under expert parallelism; with expert-tensor parallelism unlike tensor
    parallelism that is wrong, and the optimizer's state would have another form in a checkpoint. So they always are.
    """
    for layer in layers_with_experts(chunks):
        for parameter in layer.mlp.experts.parameters():
            parameter.allreduce = False
        router = layer.mlp.router
        router.aux_loss, router.z_loss = aux_loss, z_loss

        def show_packing(layer: Any, _: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            """A layer is called with its micro-batch also when its activations are recomputed."""
            layer.mlp.router.packing = keywords.get("packed_seq_params")

        layer.register_forward_pre_hook(show_packing, with_kwargs=True)
        if layer.mlp.moe_layer_recompute:
            _recompute_with_packing(layer.mlp)


def collect_metrics(chunks: Sequence[GPTModel], aux_loss: float, z_loss: float) -> dict[str, float]:
    """What routers counted since the last call; collective over all ranks. Empty without experts or tokens.

    Returns:
        ``moe/load_max_over_mean`` (the fullest expert of any layer), ``moe/load_min_over_mean`` (the emptiest),
        ``moe/load_entropy`` (mean over layers, 1 where even), ``moe/layers/NN/load_max_over_mean``, and where the
        coefficient is not 0 ``moe/aux_loss`` and ``moe/z_loss``, means over layers without the coefficient.
    """
    config = chunks[0].config
    if config.num_moe_experts is None:
        return {}
    table = torch.zeros(config.num_layers, config.num_moe_experts + 2, dtype=torch.float64, device=device())
    for layer in layers_with_experts(chunks):
        router = layer.mlp.router
        table[layer.layer_number - 1] = torch.cat([router.losses, router.load])
        router.losses.zero_()
        router.load.zero_()
    dist.all_reduce(table)
    sparse = table[:, 2:].sum(1).nonzero()[:, 0]
    if not len(sparse):
        return {}
    losses, load = table[sparse, :2].mean(0), table[sparse, 2:]
    ratio, share = load / load.mean(1, keepdim=True), load / load.sum(1, keepdim=True)
    entropy = torch.special.entr(share).sum(1) / torch.tensor(float(config.num_moe_experts)).log()
    metrics = {
        "moe/load_max_over_mean": ratio.max().item(),
        "moe/load_min_over_mean": ratio.min().item(),
        "moe/load_entropy": entropy.mean().item(),
    }
    metrics |= {
        f"moe/layers/{layer:02d}/load_max_over_mean": value
        for layer, value in zip(sparse.tolist(), ratio.amax(1).tolist(), strict=True)
    }
    if aux_loss:
        metrics["moe/aux_loss"] = losses[_AUX].item()
    if z_loss:
        metrics["moe/z_loss"] = losses[_Z].item()
    return metrics


def forget_graphs(chunks: Sequence[GPTModel]) -> None:
    """Let go of the autograd graphs of a step's last micro-batch, which Megatron's token dispatchers keep.

    Such a graph reaches the weights and, through their hooks, the dispatcher again by a way that Python's collector
    does not see: without this no network with experts, once trained, would ever be freed.
    """
    for layer in layers_with_experts(chunks):
        kept = vars(layer.mlp.token_dispatcher)
        kept |= {name: None for name, value in kept.items() if isinstance(value, Tensor) and value.grad_fn is not None}


def layers_with_experts(chunks: Sequence[GPTModel]) -> Iterator[Any]:
    """This rank's transformer layers that have a router."""
    for chunk in chunks:
        yield from (layer for layer in chunk.decoder.layers if hasattr(layer.mlp, "router"))


def _recompute_with_packing(mlp: Any) -> None:
    """Has a layer of experts recomputed with the micro-batch that it was computed with.

    Megatron recomputes ``moe`` of ``recompute_modules`` without a call of the transformer layer, and in a pipeline the
    router has seen other micro-batches since.
    """
    forward, mlp.moe_layer_recompute = mlp.forward, False  # what Megatron's forward would do is done here

    def recomputed(hidden: Tensor, *rest: Any, **named: Any) -> Any:
        packing = mlp.router.packing

        def compute(hidden: Tensor) -> Any:
            mlp.router.packing = packing
            return forward(hidden, *rest, **named)

        if not mlp.training:
            return forward(hidden, *rest, **named)
        if mlp.config.fp8:
            from megatron.core.extensions.transformer_engine import te_checkpoint

            tracker = tensor_parallel.random.get_cuda_rng_tracker
            return te_checkpoint(compute, False, tracker, mlp.tp_group, hidden)
        return tensor_parallel.checkpoint(compute, False, hidden)

    mlp.forward = recomputed


Mode = Literal["check", "replay"]


class ReplayedRouting:
    """Stands in for ``megatron.core.transformer.moe.router_replay.RouterReplay`` at one layer's router.

    Megatron's own keeps one queue of choices for all micro-batches, which must be refilled in the order of the
    pipeline's schedule; this one reads them off the micro-batch that is being routed, whatever the schedule.
    """

    def __init__(self, mode: Mode, place: int, router: PackedRouter) -> None:
        """``place`` counts from 0 over this rank's layers with experts."""
        self.mode = mode
        self.place = place
        self._router = router
        self.agreement = torch.zeros(2, dtype=torch.float64, device=device())
        """Choices of the engine that this router made too, and all of them; on the device, so that nothing waits."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Megatron's question: the top k ``scores``, ``[tokens, experts]``, as values and indices ``[tokens, k]``."""
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        packing = self._router.packing
        if packing is None or packing.experts is None:
            return values, own
        assert packing.routed is not None
        group = self._router.tp_group  # sequence parallelism divides the micro-batch
        known = packing.routed.chunk(group.size())[group.rank()]
        given = packing.experts[:, self.place * topk : (self.place + 1) * topk].long()
        same = (given[known][:, :, None] == own[known][:, None, :]).any(-1)
        self.agreement[0] += same.sum()
        self.agreement[1] += same.numel()
        if self.mode == "check":
            return values, own
        chosen = torch.where(known[:, None], given, own)
        return scores.gather(1, chosen), chosen


class RoutingReplay:
    """Replay, or a check of it, at all routers of this rank's chunks."""

    def __init__(self, chunks: Sequence[GPTModel], mode: Mode) -> None:
        """Put a :class:`ReplayedRouting` at every router; raises ConfigError for a model without experts."""
        if chunks[0].config.num_moe_experts is None:
            raise ConfigError("megatron.routing_replay: the model has no experts; leave the key out")
        self._config = chunks[0].config
        self._routings: list[ReplayedRouting] = []
        for place, layer in enumerate(layers_with_experts(chunks)):
            layer.mlp.router.router_replay = ReplayedRouting(mode, place, layer.mlp.router)
            self._routings.append(layer.mlp.router.router_replay)

    def check(self, sequences: Sequence[TrainSequence]) -> None:
        """Refuses sequences without the engine's choices, or with those of another model.

        Raises:
            MuaError: names the sequence and the key to set.
        """
        columns = self._config.num_layers * self._config.moe_router_topk
        for index, sequence in enumerate(sequences):
            if sequence.experts is None:
                raise MuaError(
                    f"megatron.routing_replay: sequence {index} of the batch comes without the engine's expert "
                    "choices; set engine.routed_experts"
                )
            if sequence.experts.shape[1] != columns or sequence.experts.max() >= self._config.num_moe_experts:
                raise MuaError(
                    f"megatron.routing_replay: sequence {index} holds {sequence.experts.shape[1]} choices a token, up "
                    f"to expert {sequence.experts.max()}; this model makes {columns} among "
                    f"{self._config.num_moe_experts} experts. Does the engine run another model?"
                )

    def metrics(self) -> dict[str, float]:
        """``train/moe/replay_agreement`` since the last call: share of the engine's choices the trainer made too.

        Collective over all ranks. Empty when nothing was compared.
        """
        total = torch.zeros(2, dtype=torch.float64, device=device())
        for routing in self._routings:
            total += routing.agreement
            routing.agreement.zero_()
        dist.all_reduce(total)
        same, choices = total.tolist()
        return {"train/moe/replay_agreement": same / choices} if choices else {}


class GroupedExperts(SequentialMLP):
    """Megatron's sequential experts with SwiGLU, computed as two grouped products, without Transformer Engine.

    Megatron-Core's local experts run one after the other, each waiting for the host to learn how many tokens it has.
    The modules, and so the names in checkpoints and bridge, are Megatron's; their weights are multiplied together. What
    torch's product does not take (:func:`takes`) goes the way of the base class, one expert after the other.
    """

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Output of every expert for its tokens, weighted by the router.

        Args:
            hidden: ``[tokens, hidden]``, in the order of experts.
            tokens_per_expert: int64 ``[experts]``, on the host or on the device.
            probs: ``[tokens]``.

        Returns:
            ``[tokens, hidden]``, and None, as there is no bias.
        """
        first = [self._weight_of(expert.linear_fc1) for expert in self.local_experts]
        second = [self._weight_of(expert.linear_fc2) for expert in self.local_experts]
        if not takes(hidden, first[0].shape[0] // 2):
            return super().forward(hidden, tokens_per_expert, probs)
        ends = tokens_per_expert.cumsum(0).to(hidden.device, torch.int32, non_blocking=True)
        gate_up = grouped_product(hidden, first, ends)
        if self.config.bias_activation_fusion:
            inner: Tensor = weighted_bias_swiglu_impl(gate_up, None, probs[:, None], False)
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            inner = (F.silu(gate) * up * probs[:, None]).to(gate_up.dtype)
        return grouped_product(inner, second, ends), None

    @staticmethod
    def _weight_of(linear: Any) -> Tensor:
        """The weight, gathered first where data-parallel ranks gather parameters while the forward pass runs."""
        run_forward_pre_hooks(linear)
        weight: Tensor = linear.weight
        return weight


def takes(hidden: Tensor, inner: int) -> bool:
    """Whether torch's grouped product takes tokens ``[tokens, hidden]`` and experts of the inner size ``inner``."""
    if any(size * hidden.element_size() % _ALIGNED for size in (hidden.shape[-1], inner)):
        return False
    if not hidden.is_cuda:
        return True
    # Before Hopper torch's product is a loop over experts.
    return hidden.dtype == torch.bfloat16 and torch.cuda.get_device_capability(hidden.device) >= (9, 0)


def grouped_product(inp: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
    """Tokens of each expert times its weight.

    Args:
        inp: ``[tokens, n]``, in the order of experts.
        weights: ``[m, n]`` each.
        ends: int32 ``[experts]``, behind the last token of each.

    Returns:
        ``[tokens, m]``
    """
    product: Tensor = _Grouped.apply(inp, ends, *weights)
    return product


class _Grouped(torch.autograd.Function):
    """Weights are put side by side for each product, and again for its gradient, rather than kept twice."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(inp, ends, *weights)
        return F.grouped_mm(inp, torch.stack(weights).transpose(-2, -1), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inp, ends, *weights = ctx.saved_tensors
        grad = grads[0].contiguous()
        by_input = F.grouped_mm(grad, torch.stack(weights), offs=ends) if ctx.needs_input_grad[0] else None
        by_weight: tuple[Tensor | None, ...] = (None,) * len(weights)
        if any(ctx.needs_input_grad[2:]):
            by_weight = F.grouped_mm(grad.T, inp, offs=ends).unbind()
        return by_input, None, *by_weight
