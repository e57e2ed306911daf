"""The episode runner: retries of infrastructure faults, what is given up unscored, seeds, instances, fatal errors.

Every fault is made to happen in the real environment manager and episode; the policy is scripted
(tests/rollout_fixtures.py). Does not cover the episode's own course (test_rollout_episode.py), nor the endpoint of an
LLM user (test_users_llm.py).
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from environments.help_desk.tasks import generate
from mua.environment.endpoint.services import Services
from mua.environment.protocol import ToolResult
from mua.rollout import runner as runner_module
from mua.rollout.runner import EpisodeRunner
from mua.types import Group, Json, Outcome, Trajectory
from mua.utils.errors import DeadlineExceeded, EngineError, UserFault, describe_error
from mua.utils.seeds import derived_seed
from tests.rollout_fixtures import FixedUser, Script, ScriptedSampler, TestDesk, call, experiment, lines, only
from tests.tokens_fixtures import chat_family

FAMILY = chat_family("qwen3", False)
TASK = generate("train", 77, "cancel")
SOLVED = lines(call("cancel_order", order=TASK.data["known"]["order"]), "Done.")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_FIRST_PAUSE_S", 0.0)


@pytest.fixture
def hang() -> Iterator[Callable[[], None]]:
    """Blocks its thread until the test is over."""
    release = threading.Event()
    yield lambda: release.wait(60) and None
    release.set()


class Bench:
    """A runner on a test desk, with what it was made of."""

    def __init__(self, script: Script = SOLVED, **sections: Json) -> None:
        self.domain = TestDesk()
        self.sampler = ScriptedSampler(FAMILY, script)
        self.config = experiment(**{"rollout": {"max_retries": 2}, **sections})

    async def group(self, size: int = 1, ordinal: int = 4) -> Group:
        """One group; whatever happens, every environment must have been given back."""
        runner = EpisodeRunner(self.config, only(self.domain), FAMILY, self.sampler, Services())
        try:
            return await runner.group(TASK, ordinal, size, temperature=1.0)
        finally:
            await runner.close()
            assert runner._environments["help_desk"].instances == self.domain.alive == 0

    async def trajectory(self) -> Trajectory:
        (trajectory,) = (await self.group()).trajectories
        return trajectory


def failing_first(count: int, fail: Callable[[], None]) -> Callable[[int, ToolResult], ToolResult]:
    """A hook that fails in the first ``count`` environments only."""

    def on_call(number: int, result: ToolResult) -> ToolResult:
        if number < count:
            fail()
        return result

    return on_call


def broken() -> None:
    raise OSError("the disk is gone")


async def test_a_group_without_faults() -> None:
    bench, ended = Bench(), []
    runner = EpisodeRunner(bench.config, only(bench.domain), FAMILY, bench.sampler, Services())
    group = await runner.group(TASK, 4, 3, temperature=0.7, on_episode=lambda: ended.append(1))
    await runner.close()
    assert (group.ordinal, group.task_id, len(ended), bench.domain.made) == (4, TASK.id, 3, 3)
    for sample, trajectory in enumerate(group.trajectories):
        assert (trajectory.ordinal, trajectory.sample, trajectory.task_id) == (4, sample, TASK.id)
        assert (trajectory.outcome, trajectory.success, trajectory.reward) == (Outcome.USER_STOP, True, 1.0)
        assert (trajectory.attempts, trajectory.error, trajectory.turn_rewards) == (1, None, [0.0, 1.0])
        assert trajectory.sampled_tokens > 0
    assert {request.params.temperature for request in bench.sampler.requests} == {0.7}
    assert Counter(request.session for request in bench.sampler.requests) == {f"4/{i}/0": 2 for i in range(3)}


async def test_the_reward_of_a_trajectory_is_that_of_all_its_turns() -> None:
    bench = Bench()
    bench.domain.on_call = lambda number, result: ToolResult(result.text, reward=0.25)
    trajectory = await bench.trajectory()
    assert (trajectory.turn_rewards, trajectory.reward) == ([0.25, 1.0], 1.25)


async def test_a_tool_that_raises_is_retried_in_a_fresh_environment() -> None:
    bench = Bench()
    bench.domain.on_call = failing_first(1, broken)
    trajectory = await bench.trajectory()
    assert (trajectory.attempts, trajectory.success, trajectory.error) == (2, True, None)
    assert bench.domain.made == 2  # the first one had already cancelled the order
    assert [request.session for request in bench.sampler.requests] == ["4/0/0", "4/0/1", "4/0/1"]


async def test_an_environment_that_always_raises_is_given_up_unscored() -> None:
    bench = Bench()
    bench.domain.on_call = failing_first(99, broken)
    trajectory = await bench.trajectory()
    assert (trajectory.outcome, trajectory.scored, trajectory.attempts) == (Outcome.ENVIRONMENT_ERROR, False, 3)
    assert (trajectory.segments, trajectory.reward, trajectory.success) == ([], 0.0, False)
    assert "OSError: the disk is gone" in (trajectory.error or "")
    assert bench.domain.made == 3


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [(EngineError("gone"), Outcome.ENGINE_ERROR), (DeadlineExceeded("too slow"), Outcome.TIMEOUT)],
)
async def test_faults_of_the_engine(fault: Exception, outcome: Outcome) -> None:
    def script(session: str, turn: int) -> str:
        raise fault

    trajectory = await Bench(script).trajectory()
    assert (trajectory.outcome, trajectory.attempts, trajectory.error) == (outcome, 3, str(fault))


async def test_faults_of_the_user_and_its_end() -> None:
    users: list[FixedUser] = []

    def user(task: object, seed: int) -> FixedUser:
        users.append(FixedUser(UserFault("endpoint down")))
        return users[-1]

    bench = Bench()
    bench.domain.user = user
    trajectory = await bench.trajectory()
    assert (trajectory.outcome, trajectory.attempts, trajectory.error) == (Outcome.USER_ERROR, 3, "endpoint down")
    assert [u.closed for u in users] == [1, 1, 1]


class Silent(FixedUser):
    async def reply(self, agent_text: str):
        await asyncio.Event().wait()


async def test_an_episode_past_its_deadline_is_a_timeout() -> None:
    bench = Bench(rollout={"max_retries": 1, "episode_seconds": 0.3})
    bench.domain.user = lambda task, seed: Silent()
    trajectory = await bench.trajectory()
    assert (trajectory.outcome, trajectory.attempts) == (Outcome.TIMEOUT, 2)
    assert trajectory.error == "rollout.episode_seconds: the episode took longer than 0.3 s"


async def test_no_more_episodes_at_once_than_allowed() -> None:
    bench = Bench(rollout={"concurrency": 2})
    alive: list[int] = []

    def on_call(number: int, result: ToolResult) -> ToolResult:
        alive.append(bench.domain.alive)
        return result

    bench.domain.on_call = on_call
    await bench.group(size=6)
    assert len(alive) == 6
    assert max(alive) <= 2


async def seeds_of(ordinal: int) -> tuple[list[int], dict[tuple[str, int], int | None]]:
    """Seeds of the environments, and sampling seeds by (session, turn), of a group that meets a fault."""
    bench = Bench(engine={"deterministic": True})
    bench.domain.on_call = failing_first(1, broken)
    await bench.group(size=3, ordinal=ordinal)
    turns: Counter[str] = Counter()
    sampling = {}
    for request in bench.sampler.requests:
        sampling[request.session, turns[request.session]] = request.params.seed
        turns[request.session] += 1
    return sorted(bench.domain.seeds), sampling


async def test_seeds_differ_between_episodes_and_turns_and_are_equal_between_runs() -> None:
    environments, sampling = await seeds_of(4)
    assert len(set(environments)) == 4  # three samples and one retry
    assert None not in sampling.values()
    assert len(set(sampling.values())) == len(sampling)
    again, sampling_again = await seeds_of(4)
    shared = sampling.keys() & sampling_again.keys()  # which sample meets the fault is up to the threads
    assert {f"4/{i}/0" for i in range(3)} <= {session for session, _ in shared}
    assert all(sampling[key] == sampling_again[key] for key in shared)
    assert len(set(environments) & set(again)) >= 3
    other, sampling_other = await seeds_of(5)
    assert not set(other) & set(environments)
    assert not set(sampling_other.values()) & set(sampling.values())


def test_seeds_stay_what_they_are() -> None:
    """A change here would change every run that is to be repeated."""
    assert derived_seed(1, 2, 3) == 1052989463
    assert derived_seed("1", "23") != derived_seed("12", "3")


async def test_cancellation_leaves_no_environment_and_no_user() -> None:
    users: list[Silent] = []

    def user(task: object, seed: int) -> Silent:
        users.append(Silent())
        return users[-1]

    bench = Bench(lines("What is your name?"))
    bench.domain.user = user
    running = asyncio.create_task(bench.group(size=3))
    async with asyncio.timeout(30):
        while len(bench.sampler.requests) < 3:
            await asyncio.sleep(0.005)
    assert bench.domain.alive == 3
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [u.closed for u in users] == [1, 1, 1]


async def test_a_fault_of_the_program_is_neither_retried_nor_hidden() -> None:
    def script(session: str, turn: int) -> str:
        raise ZeroDivisionError

    bench = Bench(script)
    with pytest.raises(ExceptionGroup) as caught:
        await bench.group()
    assert caught.group_contains(ZeroDivisionError)
    assert bench.domain.made == 1
    assert list(describe_error(caught.value)) == []


class Mumbling(FixedUser):
    """Says at first what no UTF-8 can carry."""

    def __init__(self, opening: str, *replies: str) -> None:
        super().__init__(*replies, opening=opening)


@pytest.mark.parametrize("user", [Mumbling("\ud800"), Mumbling("Help.", "It is \udfff.")])
async def test_an_unpaired_surrogate_is_the_users_fault_and_retried(user: FixedUser) -> None:
    bench = Bench()
    users = [user, *(FixedUser("bye") for _ in range(3))]
    bench.domain.user = lambda task, seed: users.pop(0)
    trajectory = await bench.trajectory()
    assert (trajectory.attempts, trajectory.error, trajectory.scored) == (2, None, True)


async def test_an_unpaired_surrogate_of_a_tool_is_the_environments_fault() -> None:
    bench = Bench()
    bench.domain.on_call = lambda number, result: replace(result, text="\ud800") if number == 0 else result
    assert (await bench.trajectory()).attempts == 2
    bench = Bench()
    bench.domain.on_call = lambda number, result: replace(result, text="x\ud800")
    trajectory = await bench.trajectory()
    assert (trajectory.outcome, trajectory.attempts) == (Outcome.ENVIRONMENT_ERROR, 3)
    assert "unpaired surrogate at character 1" in (trajectory.error or "")
