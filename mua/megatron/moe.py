"""Mixture of experts: the router's losses and load, and how experts' gradients are summed.

Tokens are never dropped and the router is in float32. The losses are sums over tokens with the batch's token count
divided in, as every loss here, so that nothing depends on how many ranks share the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from mua.megatron.modules import PackedMicrobatch
from mua.megatron.parallel import device

_AUX, _Z = 0, 1


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
        layer.register_forward_pre_hook(_show_packing, with_kwargs=True)
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


def _show_packing(layer: Any, _arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """A layer is called with its micro-batch also when its activations are recomputed."""
    layer.mlp.router.packing = keywords.get("packed_seq_params")


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
