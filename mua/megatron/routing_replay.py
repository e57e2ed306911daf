"""Routing replay: the trainer sends each token to the experts the engine chose, and reports how often it agrees.

A mixture-of-experts policy is trained off its own samples where trainer and engine round differently: a near tie at a
router picks another expert, and the token's log-probability jumps. Replaying the engine's choices (the R3 of Ma et
al., 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers") removes the jump: the
experts are the engine's, their weights come from the trainer's own router, which therefore keeps its gradient.

    engine ── experts [T, layers * top k] ──► Segment ──► TrainSequence ──► PackedMicrobatch ──► each layer's router

Megatron's router asks the object in ``router.router_replay`` for its top k; that is the one place where a choice is
replaced. Which micro-batch it routes a :class:`mua.megatron.moe.PackedRouter` knows, also when activations are
recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from mua.megatron.moe import PackedRouter, layers_with_experts
from mua.megatron.parallel import device
from mua.types import TrainSequence
from mua.utils.errors import ConfigError, MuaError

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
        """``moe/replay_agreement`` since the last call: share of the engine's choices the trainer made too.

        Collective over all ranks. Empty when nothing was compared.
        """
        total = torch.zeros(2, dtype=torch.float64, device=device())
        for routing in self._routings:
            total += routing.agreement
            routing.agreement.zero_()
        dist.all_reduce(total)
        same, choices = total.tolist()
        return {"moe/replay_agreement": same / choices} if choices else {}
