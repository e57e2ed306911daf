"""The account of time: parts add up to the whole, and a planted delay is booked where it happens.

Time is a counter that only the planted delays advance, so that every figure is exact. Whole runs, with clocks that
nobody controls, are in tests/e2e/test_loop.py; that the parts add up is asserted there too. Not covered: how long
anything takes.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.help_desk.tasks import generate
from mua.engine import SamplingParams
from mua.environment.protocol import ToolResult
from mua.environment.user import UserReply
from mua.observe import timeline as times
from mua.observe.timeline import EngineActivity, EngineClock, StateClock, Timeline, TrainerPhase
from mua.rollout import episode
from mua.types import Group, Outcome, Trajectory
from mua.utils.errors import EngineError
from tests.engine_stand_in import Source, StandInServer, stand_in_pool
from tests.rollout_fixtures import FixedUser, TestDesk, call
from tests.unit.test_rollout_episode import play

CANCEL = generate("train", 77, "cancel")


class Time:
    """Stands still until it is told to pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=20))
def test_the_states_of_a_clock_add_up_to_the_time_that_went_by(switches: list[tuple[str, int]]) -> None:
    time = Time()
    clock = StateClock("a", time)
    for state, seconds in switches:
        clock.switch(state)
        time.passes(seconds)
    taken = clock.take()
    assert sum(taken.values()) == time.now
    for name in "bc":
        assert taken.get(name, 0) == sum(seconds for state, seconds in switches if state == name)
    assert sum(clock.take().values()) == 0


def test_an_inner_phase_is_no_part_of_the_outer_one_and_an_error_ends_both() -> None:
    time = Time()
    timeline = Timeline(time)
    time.passes(1)
    with contextlib.suppress(ValueError), timeline.phase(TrainerPhase.BATCH):
        time.passes(2)
        with timeline.phase(TrainerPhase.OPTIMIZER):
            time.passes(4)
            raise ValueError
    time.passes(8)
    assert timeline.take() == {TrainerPhase.REST: 9, TrainerPhase.BATCH: 2, TrainerPhase.OPTIMIZER: 4}


def test_slots_are_counted_while_requests_run() -> None:
    time = Time()
    clocks = [EngineClock(4, time), EngineClock(4, time)]
    clocks[0].note(EngineActivity.GENERATING, 3)
    clocks[1].note(EngineActivity.IDLE, 0)
    time.passes(2)
    clocks[0].note(EngineActivity.GENERATING, 1)
    time.passes(6)
    found = times.engine_metrics(clocks)
    assert found["time/engine_slots_used"] == (3 * 2 + 1 * 6) / (2 * 4 * 8)
    assert found["time/engine_generating"] == found["time/engine_idle_trainer_works"] == 0.5
    assert found["time/engine_generating_seconds"] == 4
    assert sum(found[f"time/engine_{activity}"] for activity in EngineActivity) == 1
    assert times.engine_metrics(clocks) == {}


async def test_engines_book_what_they_do() -> None:
    time = Time()
    servers = [StandInServer(0), StandInServer(1)]
    delays = {"/generate": 5.0, "/end_weight_update": 7.0}
    servers[0].on_request = lambda path, life: time.passes(delays.get(path, 0.0))  # type: ignore[func-returns-value]
    pool = stand_in_pool(servers)
    for engine in pool._engines:
        engine.clock = EngineClock(4, time)
    async with pool:
        await pool.start(Path("unused"))
        pool.restart_clocks()
        time.passes(1)
        pool.awaited(True)
        time.passes(2)
        with contextlib.suppress(EngineError):  # the stand-in's answer is none
            await pool.generate([1], SamplingParams(1.0, 1, ()), session="s", deadline_s=60)
        pool.awaited(False)
        await pool.update_weights(Source(), 1)  # type: ignore[arg-type]
        await pool.release_memory(["kv_cache"])
        time.passes(11)
        await pool.resume_memory(["kv_cache"])
        taken = [engine.clock.take_usage() for engine in pool._engines]
    a = EngineActivity
    alike = {a.IDLE: 1, a.PAUSED: 7, a.RELEASED: 11}
    first, second = ({state: seconds for state, seconds in one.items() if seconds} for one, _, _ in taken)
    assert first == alike | {a.IDLE_AWAITED: 2, a.GENERATING: 5}
    assert second == alike | {a.IDLE_AWAITED: 2 + 5}
    assert [used for _, used, _ in taken] == [5, 0]


class SlowUser(FixedUser):
    def __init__(self, time: Time) -> None:
        super().__init__("bye")
        self._time = time

    async def open(self) -> UserReply:
        self._time.passes(3)
        return await super().open()

    async def reply(self, agent_text: str) -> UserReply:
        self._time.passes(10)
        return await super().reply(agent_text)


async def test_a_slow_tool_and_a_slow_user_move_their_own_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    time, desk = Time(), TestDesk()
    monkeypatch.setattr(episode, "perf_counter", time)

    def slow(number: int, result: ToolResult) -> ToolResult:
        time.passes(5)
        return result

    desk.on_call = slow
    found = call("get_order", order=CANCEL.data["known"]["order"])
    result, _ = await play(found, found, "Done.", domain=desk, user=SlowUser(time))
    assert (result.metrics["seconds/tools"], result.metrics["seconds/user"]) == (2 * 5, 3 + 10)
    assert result.metrics["seconds/generate"] == result.metrics["seconds/evaluate"] == 0


def group(**seconds: float) -> Group:
    metrics = {f"seconds/{name}": value for name, value in seconds.items()}
    return Group(0, "t", [Trajectory("t", 0, 0, [], [], 0.0, False, Outcome.USER_STOP, metrics=metrics)])


def test_parts_of_an_episode_add_up_and_the_wait_for_a_slot_is_no_generating() -> None:
    one = group(episode=20, start=1, generate=8, engine_slot=3, tools=2, user=4, evaluate=1, queued=50)
    found = times.episode_metrics([one, group()])  # one that was given up has no times
    parts = ("start", "generating", "engine_slot", "tools", "user", "scoring", "other")
    assert [found[f"time/episode_{part}_seconds"] for part in parts] == [1, 5, 3, 2, 4, 1, 4]
    assert found["time/episode_seconds"] == 20
    assert found["time/episode_queued_seconds"] == 50
    assert times.episode_metrics([group()]) == {}
