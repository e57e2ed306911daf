"""Segments for tests that care about some of their columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from mua.types import Provenance, Segment


def segment_of(
    sampled: Any, *, ids: Any = None, logprobs: Any = -1.0, version: int = 0, turn: Any = 0,
    others: Provenance = Provenance.USER, **more: Any,
) -> Segment:  # fmt: skip
    """Of tokens that were ``sampled`` or not; ids count up, what is one number is so for all sampled tokens."""
    mask = np.asarray(sampled, dtype=bool)
    return Segment(
        ids=np.arange(len(mask), dtype=np.int32) if ids is None else np.asarray(ids, np.int32),
        provenance=np.where(mask, Provenance.SAMPLED, others).astype(np.uint8),
        logprobs=np.where(mask, logprobs, 0.0).astype(np.float32),
        version=np.where(mask, version, -1).astype(np.int32),
        turn=np.broadcast_to(np.asarray(turn, np.int32), len(mask)).copy(),
        **more,
    )
