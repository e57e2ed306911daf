"""How varied what a policy says is, in numbers: of a step's episodes, by tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mua.types import Segment, Trajectory

GRAM = 4
_PRIME = np.uint64(0x9E3779B97F4A7C15)
"""Odd, with evenly spread bits: base of a polynomial hash of four ids in 64 bits, which different ones hardly share."""


def diversity(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Shares of what is distinct, under ``rollout/diversity/``; nothing of what nobody said.

    ``distinct_4grams`` of all runs of four sampled tokens within a turn (distinct-n: Li et al. 2016, arXiv:1510.03055),
    ``unique_turns`` of all turns, ``unique_episodes`` of all episodes, each as the sampled tokens.
    """
    grams: list[npt.NDArray[np.uint64]] = []
    turns: list[bytes] = []
    episodes: list[bytes] = []
    for trajectory in trajectories:
        own = [part for segment in trajectory.segments for part in _turns(segment)]
        if own:
            turns += [part.tobytes() for part in own]
            episodes.append(b"|".join(turns[-len(own) :]))
            grams += [_grams(part) for part in own if len(part) >= GRAM]
    shares = {"unique_turns": _share(turns), "unique_episodes": _share(episodes)} if episodes else {}
    if grams:
        every = np.sort(np.concatenate(grams))  # np.unique, which hashes, takes fourteen times as long
        shares["distinct_4grams"] = (1 + int(np.count_nonzero(every[1:] != every[:-1]))) / len(every)
    return {f"rollout/diversity/{name}": share for name, share in shares.items()}


def _turns(segment: Segment) -> list[npt.NDArray[np.int32]]:
    """The sampled ids of each turn."""
    chosen = np.flatnonzero(segment.loss_mask)
    if not len(chosen):
        return []
    ids, turn = segment.ids[chosen], segment.turn[chosen]
    return np.split(ids, np.flatnonzero(np.diff(turn)) + 1)


def _grams(ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    """A hash of each run of :data:`GRAM` ids, ``[T - GRAM + 1]``."""
    wide = ids.astype(np.uint64)
    found = np.zeros(len(ids) - GRAM + 1, np.uint64)
    for place in range(GRAM):
        found = found * _PRIME + wide[place : place + len(found)]
    return found


def _share(members: Sequence[bytes]) -> float:
    return len(set(members)) / len(members)
