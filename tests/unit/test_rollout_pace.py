"""Who answers for a turn whose time ran out: the policy that wrote on and on, or the engine that was slow.

The rule by itself, and whole episodes whose sampler is cut as a script says (tests/rollout_fixtures.py). That a real
engine tells what it had written is in test_engine_requests.py; policies behind an endpoint tell nothing, so their turns
stay unscored (test_rollout_agent.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest

from environments.help_desk.tasks import generate
from mua.algorithms.rollout_metrics import rollout_metrics
from mua.engine import TurnCut
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Task
from mua.rollout import runner as runner_module
from mua.rollout.agent import ENOUGH, REMEMBERED, Pace, TokenPolicy
from mua.rollout.runner import EpisodeRunner
from mua.types import Generation, Group, Outcome, Trajectory
from mua.utils.errors import DeadlineExceeded
from tests.rollout_fixtures import VERSION, ScriptedSampler, TestDesk, experiment, only
from tests.tokens_fixtures import chat_family

FAMILY = chat_family("qwen3", False)
TASK: Task = generate("train", 77, "cancel")
BUDGET = 100


def known(*lengths: int) -> Pace:
    pace = Pace()
    for length in lengths:
        pace.ended(length, 1.0)
    return pace


def test_near_the_budget_the_policy_answers_whatever_others_did() -> None:
    assert Pace().ran_on(90, 100)
    assert not Pace().ran_on(89, 100)
    assert not known(*[5] * (ENOUGH - 1)).ran_on(89, 100)  # a few short turns prove no pace


def test_what_is_longer_than_every_turn_that_ends_ran_on() -> None:
    pace = known(*[10] * (ENOUGH - 1), 40)
    assert pace.ran_on(41, 1000)
    assert not pace.ran_on(40, 1000)


@pytest.mark.parametrize("slower", [2, 5, 100])
def test_a_slow_engine_never_makes_it_the_policys(slower: int) -> None:
    """Turns of 50 to 150 tokens end in time at 10 tokens a second; at less, they are cut before they are that long."""
    lengths = np.random.default_rng(1).integers(50, 151, REMEMBERED).tolist()
    pace, seconds = known(*lengths), 20.0
    cut = [int(seconds * 10 / slower) for length in lengths if length > seconds * 10 / slower]
    assert not any(pace.ran_on(tokens, 1000) for tokens in cut)
    assert cut


def test_a_deadline_that_the_longest_turn_cannot_keep_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    pace = known(*[10] * ENOUGH)
    with caplog.at_level(logging.WARNING):
        pace.warn_if_too_slow(100, 11.0)
        assert not caplog.records
        for _ in range(3):
            pace.warn_if_too_slow(100, 9.0)
    (record,) = caplog.records
    assert "takes 10 s, more than rollout.generate_seconds 9" in record.getMessage()


def partial(tokens: int) -> Generation:
    ids = np.full(tokens, 40, np.int32)
    return Generation(ids, np.full(tokens, -0.5, np.float32), "abort", VERSION, np.full(tokens, VERSION, np.int32), 0)


def raising(error: Exception) -> Callable[[str, int], str]:
    def script(session: str, turn: int) -> str:
        raise error

    return script


async def played(script: Callable[[str, int], str], pace: Pace | None = None) -> tuple[Trajectory, ScriptedSampler]:
    config = experiment(rollout={"max_retries": 1, "max_turn_tokens": BUDGET})
    domain, sampler = TestDesk(), ScriptedSampler(FAMILY, script)
    policy = TokenPolicy(FAMILY, sampler, pace=pace or Pace())
    runner = EpisodeRunner(config, only(domain), None, None, Services(), policy)
    try:
        return await runner.trajectory(TASK, 4, 0, temperature=1.0), sampler
    finally:
        await runner.close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_FIRST_PAUSE_S", 0.0)


async def test_a_policy_that_runs_on_is_scored_and_trained_on_what_it_wrote() -> None:
    found, _ = await played(raising(TurnCut("exceeded its 600 s", partial(95))))
    assert (found.outcome, found.scored, found.success, found.attempts) == (Outcome.LENGTH, True, False, 1)
    assert found.sampled_tokens == 95
    (segment,) = found.segments
    assert (segment.logprobs[segment.loss_mask] == -0.5).all()
    assert found.metrics["cut_by_time"] == 1
    assert rollout_metrics([Group(4, TASK.id, [found])])["rollout/turns/cut_by_time"] == 1.0


@pytest.mark.parametrize("error", [TurnCut("exceeded its 600 s after 20 tokens", partial(20)), DeadlineExceeded("no")])
async def test_a_slow_or_dead_engine_leaves_the_episode_unscored(error: Exception) -> None:
    found, _ = await played(raising(error))
    assert (found.outcome, found.scored, found.attempts, found.error) == (Outcome.TIMEOUT, False, 2, str(error))
    assert found.passing
    assert "rollout/turns/cut_by_time" not in rollout_metrics([Group(4, TASK.id, [found])])


async def test_turns_that_end_are_remembered() -> None:
    pace = Pace()
    _, sampler = await played(lambda session, turn: "Sorry, I cannot.", pace)
    assert list(pace._lengths) == [len(request.generation.ids) for request in sampler.requests]
