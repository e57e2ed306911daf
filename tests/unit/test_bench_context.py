"""The expert of tools/bench/context.py: it answers under every strategy from what stands in its prompt, and its notes
are the question that is left.

Not covered: training, evaluations, tables.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from environments.qa.own import other_tasks
from mua.config.load import load_config
from mua.environment.endpoint.services import Services
from mua.environment.selection import Selection
from mua.rollout.runner import EpisodeRunner
from mua.types import Trajectory
from tests.tokens_fixtures import chat_family
from tools.bench import context as bench


def played(strategy: str, window: int) -> list[Trajectory]:
    """Eight episodes of the expert."""
    # The tokenizer of the tests has more tokens to a page than the bench's own.
    config = bench.under(load_config(Path(bench.CONFIG), ["rollout.max_turn_tokens=200"]), strategy, window)
    config = config.model_copy(update={"context": config.context.model_copy(update={"summary_tokens": 200})})
    tasks = dict(enumerate(other_tasks("train", 1, True)[:8]))
    family = chat_family("qwen3", False)

    async def run() -> list[Trajectory]:
        services = Services.from_config(config.user, config.judge)
        selection = Selection.from_config(config.environment, services)
        expert = bench.Expert(family, tasks, config.context.instruction)
        runner = EpisodeRunner(config, selection, family, expert, services)
        try:
            ended = (runner.trajectory(task, number, 0, temperature=1.0) for number, task in tasks.items())
            return list(await asyncio.gather(*ended))
        finally:
            await runner.close()
            await services.close()

    return asyncio.run(run())


@pytest.mark.parametrize("strategy", bench.STRATEGIES)
def test_the_expert_answers_under_every_strategy(strategy: str) -> None:
    window = {"off": 8192, "discard_tool_results": 1600, "digest": 1000}[strategy]
    for trajectory in played(strategy, window):
        assert trajectory.success, trajectory.details
        assert (len(trajectory.segments) > 1) == (trajectory.metrics.get("context/rewrites", 0) > 0)


def test_notes_are_the_question_that_is_left() -> None:
    family = chat_family("qwen3", False)
    noted = [t for t in played("digest", 1000) if t.metrics.get("context/rewrites", 0) > 1]
    assert noted
    for trajectory in noted:
        notes = [one["context"]["notes"] for one in trajectory.messages if one.get("context")]
        asked = [len(note) for note in notes]
        assert len(notes) > 1
        assert asked == sorted(asked, reverse=True)
        assert all(notes[-1] not in family.decode(segment.ids[:200]) for segment in trajectory.segments[:1])
