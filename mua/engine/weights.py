"""What moves in a weight sync: buckets, where they come from, and what became of them; names in the engine."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from megatron_bridge.reshard import BucketLayout


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Some named tensors in one flat uint8 buffer ``[layout.nbytes]``, which may be larger than what is in it."""

    layout: BucketLayout
    flat: torch.Tensor
    """Empty on a rank that hands nothing on."""
    handles: list[list[str]] = field(default_factory=list)
    """Of each engine, for each of its tensor-parallel ranks, a handle of memory of its own machine. Empty where
    engines are reached by broadcast."""


class WeightSource(Protocol):
    """The weights of one policy version; they may be asked for again."""

    moved: int
    """Bytes between trainer ranks in the last complete pass; see :class:`SyncReport`."""
    needed: int

    def buckets(self, nodes: Sequence[int]) -> Generator[WeightBucket, None, None]:
        """All weights, for one engine on each of the machines ``nodes``. Advance and close it on one thread.

        A bucket is given up when the one after the next is asked for.
        """
        ...


@dataclass(slots=True)
class SyncReport:
    """What one weight update moved and how long it took."""

    bytes: int = 0
    """Payload of all tensors, padding excluded, once (not per engine)."""
    tensors: int = 0
    buckets: int = 0
    seconds: float = 0.0
    """From the call to the return."""
    pause_seconds: float = 0.0
    """While no engine generated: from the closed gate to the open one."""
    version: int = 0
    """Policy version that the engines have now."""
    moved: int = 0
    """Bytes that went from one process to another through a process group. Handles of shared memory move nothing."""
    needed: int = 0
    """The least that any plan has to move: of each feeder all bytes less those of its own shards and, where engines
    are reached by broadcast, all bytes once for each engine."""
    names: list[str] = field(default_factory=list, repr=False)
    assembling: list[tuple[float, float]] = field(default_factory=list, repr=False)
    """Start and end of each bucket's assembly, other ranks' messages included, in monotonic seconds."""
    loading: list[tuple[float, float]] = field(default_factory=list, repr=False)
    """Start and end of each bucket's loading: from the first request to the last engine's answer."""

    def add(self, bucket: WeightBucket) -> None:
        self.names += [slot.spec.name for slot in bucket.layout.tensors]
        self.bytes += bucket.layout.payload_bytes
        self.tensors += len(bucket.layout.tensors)
        self.buckets += 1

    @property
    def assemble_seconds(self) -> float:
        """Sum over the buckets."""
        return sum(end - start for start, end in self.assembling)

    @property
    def load_seconds(self) -> float:
        """Sum over the buckets."""
        return sum(end - start for start, end in self.loading)

    @property
    def overlap_seconds(self) -> float:
        """While one bucket was put together and another was loaded."""
        return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in self.assembling for b in self.loading)


_FUSED = (
    (re.compile(r"\.(q_proj|k_proj|v_proj)\."), ".qkv_proj."),
    (re.compile(r"\.experts\.\d+\.(gate_proj|up_proj)\.weight$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.down_proj\.weight$"), ".experts.w2_weight"),
    (re.compile(r"\.(gate_proj|up_proj)\."), ".gate_up_proj."),
)
_ONE_CALL = re.compile(r"\.(q_a_proj|kv_a_proj_with_mqa)\.")


def loaded_together(name: str) -> str:
    """A key that tensors share which SGLang fuses within one call of its loader, and would lose apart.

    Those are the two down projections of multi-head latent attention; of the others it takes one at a time.
    """
    return _ONE_CALL.sub(".fused_qkv_a_proj_with_mqa.", name)


def engine_name(name: str) -> str:
    """The engine's parameter that holds the Hugging Face tensor ``name``: SGLang fuses qkv, gate/up and experts."""
    for pattern, replacement in _FUSED:
        fused, found = pattern.subn(replacement, name)
        if found:
            return fused
    return name
