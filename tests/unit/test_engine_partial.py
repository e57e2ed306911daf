"""Turns in pieces, and deadlines that stand still.

Does not cover a real engine's pieces: parity/test_engine_determinism.py.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mua.engine import Pauses, SamplingParams
from mua.engine.pool import join_generations, remaining_request
from mua.types import Generation


def piece(ids: list[int], version: int, rows: int, finish: str = "abort", kind: type = np.uint8) -> Generation:
    count = np.asarray(ids, np.int32)
    experts = np.arange(rows, dtype=kind)[:, None] + version
    versions = np.full(len(ids), version, np.int32)
    return Generation(count, -count.astype(np.float32), finish, version, versions, 3, experts)  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(0, 4))
def test_pieces_are_one_turn_whatever_their_lengths(lengths: list[int], routed: int) -> None:
    """Each engine is asked for the rest: of prompt, room and experts nothing is missing and nothing twice."""
    prompt = [1] * 4
    params = SamplingParams(1.0, 20, (2,), seed=9, experts_from=routed and 4 - routed)
    sent: list[int] = []
    found = None
    for version, length in enumerate([*lengths, 2]):
        asked_ids, asked = remaining_request(prompt, params, found)
        assert asked_ids == [*prompt, *sent]
        assert (asked.max_new_tokens, asked.seed) == (20 - len(sent), 9)
        start = asked.experts_from
        assert start is not None
        ids = [10 * version + place for place in range(length)]
        finish = "stop" if version == len(lengths) else "abort"
        got = piece(ids, version, max(0, len(asked_ids) - start + length - 1), finish)
        got = got if length else Generation(got.ids, got.logprobs, "abort", version, got.versions, 0)
        found = join_generations(found, got)
        sent += ids
    assert found is not None
    assert found.ids.tolist() == sent
    assert found.logprobs.tolist() == [-float(value) for value in sent]
    assert found.versions.tolist() == [version for version, n in enumerate([*lengths, 2]) for _ in range(n)]
    assert found.finish == "stop"
    assert found.experts is not None
    assert len(found.experts) == (routed or 4) + len(sent) - 1


async def test_a_deadline_stands_still_while_the_trainer_has_the_memory() -> None:
    pauses = Pauses()
    pauses.begin()
    deadline = pauses.deadline(60.0)
    async with deadline.timeout() as timeout:
        await asyncio.sleep(0.01)
        assert timeout.when() is None
        pauses.end()
        when = timeout.when()
        assert when is not None
        assert deadline.left <= 60.01
        pauses.begin()
        assert timeout.when() is None
    pauses.end()
    over = pauses.deadline(0.001)
    with pytest.raises(TimeoutError):
        async with over.timeout():
            await asyncio.Event().wait()
    assert over.left == 0
