"""The simulation of a run: exact where it can be calculated by hand, and bound by what the scheduler promises.

Time is simulated, so every figure is exact and no test waits. How near the simulation comes to real runs is measured by
tools/bench/timeline.py (docs/benchmarks/timeline.md), not tested: that is time on a clock. What the plan makes of it
for the recipes is in test_plan_placements.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mua.engine.engine_handle import Slots
from mua.launch.plan.simulation import (
    Setting,
    SimulatedEpisode,
    SimulatedLoop,
    SimulatedTurn,
    mean_metrics,
    settled,
    simulate,
)
from mua.observe.timeline import EngineActivity, TrainerPhase
from mua.rollout.scheduler import StepDemand


class Speed:
    """A second for an iteration, and as much again for every ten requests; prefill takes a second per ten tokens."""

    def iteration(self, running: int, context: float) -> float:
        return 1 + running / 10

    def prefill(self, tokens: int) -> float:
        return tokens / 10


def setting(*turns: SimulatedTurn, groups: int = 1, steps: int = 3, staleness: int = 0, **changes: object) -> Setting:
    """Groups of one episode; every episode is the same."""
    made = Setting(
        StepDemand(groups, steps, staleness), 1, lambda ordinal, sample: SimulatedEpisode(turns), Speed(), 1, 16
    )
    return replace(made, **changes)  # type: ignore[arg-type]


ONE = SimulatedTurn(prompt=20, sampled=10, pause=5.0)


def steps_of(made: Setting) -> list[float]:
    return [pytest.approx(line["time/step_seconds"]) for line in simulate(made)]  # type: ignore[misc]


def test_the_simulated_loop_jumps_over_the_time_in_which_nothing_happens() -> None:
    async def wait() -> float:
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(7200))
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        assert runner.run(wait()) == pytest.approx(7200)
        with pytest.raises(RuntimeError, match="never happens"):
            runner.run(asyncio.Event().wait())


def test_an_episode_alone_takes_what_its_parts_take() -> None:
    # Prefill of 20 tokens 2 s, 10 iterations of 1.1 s, a pause of 5 s.
    assert steps_of(setting(ONE)) == [2 + 11 + 5] * 3
    # The second turn prefills only what is new to it.
    assert steps_of(setting(ONE, ONE)) == [2 * (2 + 11 + 5)] * 3


def test_requests_decode_together_after_the_prefill_of_all() -> None:
    assert steps_of(setting(ONE, groups=2)) == [2 * 2 + 10 * 1.2 + 5] * 3
    assert steps_of(setting(ONE, groups=2, slots=1)) == [2 * (2 + 11) + 5] * 3
    assert steps_of(setting(ONE, groups=2, engines=2)) == [2 + 11 + 5] * 3
    assert steps_of(setting(ONE, groups=2, engines=2, engine_devices=1)) == [2 * (2 + 11) + 5] * 3
    assert steps_of(setting(ONE, groups=1, engines=2, engine_devices=1)) == [2 + 11 + 5] * 3


def test_a_full_cache_makes_requests_wait_and_sessions_give_way() -> None:
    # A request holds 20 + 10 tokens: two do not fit.
    assert steps_of(setting(ONE, groups=2, cache_tokens=50)) == [2 * (2 + 11) + 5] * 3
    # While the second one runs, what the first one had is given up, and is prefilled again at its second turn: 50
    # tokens of prompt where 20 are new. The same holds for the second, as the first runs meanwhile.
    first = 2 + 11
    rest = (5 + 11) + (5 + 11)
    assert steps_of(setting(ONE, ONE, groups=2, cache_tokens=50)) == [2 * first + rest + 5] * 3


def test_what_all_episodes_begin_with_is_prefilled_once() -> None:
    made = setting(ONE, groups=2)
    shared = replace(made, episode=lambda ordinal, sample: SimulatedEpisode([ONE], shared=20))
    assert steps_of(shared)[0] == 2 + 0.1 + 10 * 1.2 + 5  # a token of a prompt is always new


def test_the_trainer_books_what_it_does() -> None:
    made = setting(
        ONE, score_seconds=0.1, train_seconds=0.2, step_seconds=1.0, sync_seconds=7.0, batch_seconds=3.0,
        record_seconds=4.0, switch_seconds=0.5, released=True,
    )  # fmt: skip
    lines = simulate(made)
    expected = {"wait": 18, "logprobs": 3, "optimizer": 7, "sync": 7, "batch": 3, "records": 4, "memory": 1, "rest": 0}
    for line in lines:
        found = {name: line[f"time/{name}_seconds"] for name in expected}
        assert found == {name: pytest.approx(seconds) for name, seconds in expected.items()}
        assert line["time/engine_released"] == pytest.approx((3 + 3 + 7 + 1) / 43)
        assert line["time/engine_paused"] == pytest.approx(7 / 43)


def test_trainer_and_engine_on_one_device_slow_each_other_down() -> None:
    # Alone the trainer needs 6 s. The next group, which starts with the run, is done by then or not; at half speed the
    # trainer's 6 s of work and as much of the engine's take 12 s.
    long = SimulatedTurn(20, 100, 0.0)
    apart = setting(long, steps=2, staleness=1, step_seconds=6.0)
    shared = replace(apart, together=0.5, episode=lambda ordinal, sample: SimulatedEpisode([long] * (1 + ordinal)))
    line = simulate(shared)[0]
    assert line["time/optimizer_seconds"] == pytest.approx(12)
    assert simulate(replace(shared, together=1.0))[0]["time/optimizer_seconds"] == pytest.approx(6)


def test_a_weight_update_pauses_and_prefills_anew() -> None:
    # Group 0 ends after its two turns; group 1 has sampled for the rest of the time and begins again after the sync.
    long = SimulatedTurn(20, 100, 0.0)
    made = setting(steps=2, staleness=1, sync_seconds=10.0)
    made = replace(made, episode=lambda ordinal, sample: SimulatedEpisode([ONE if ordinal == 0 else long]))
    first, second = simulate(made)
    # 4 s of prefill for both, 10 iterations at 1.2 s, the pause of 5 s in which group 1 gets 5 / 1.1 tokens.
    assert first["time/wait_seconds"] == pytest.approx(4 + 12 + 5)
    tokens = 10 + 5 / 1.1
    left = 100 - tokens
    assert second["time/wait_seconds"] == pytest.approx((20 + round(tokens)) / 10 + round(left) * 1.1)
    assert second["mismatch/version_lag/max"] == 0  # it ended under the weights of the step before its own


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 3), st.integers(1, 3), st.integers(0, 5), st.booleans(), st.integers(1, 9))
def test_parts_add_up_and_staleness_is_bound(stale: int, groups: int, train: int, oldest: bool, seed: int) -> None:
    def episode(ordinal: int, sample: int) -> SimulatedEpisode:
        count = 1 + (ordinal * seed + sample) % 3
        return SimulatedEpisode(
            [SimulatedTurn(5 + seed, 1 + (ordinal * 7 + sample) % 11, sample / 2)] * count, 0.5, 0.25
        )

    made = setting(
        groups=groups, steps=6, staleness=stale, episode=episode, group_size=2, slots=3, step_seconds=float(train),
        sync_seconds=1.0, oldest_first=oldest, engines=2,
    )  # fmt: skip
    lines = simulate(made)
    assert lines == simulate(made)
    for line in lines:
        phases = sum(line[f"time/{phase}_seconds"] for phase in TrainerPhase)
        assert phases == pytest.approx(line["time/step_seconds"])
        if line["time/step_seconds"]:
            assert sum(line[f"time/engine_{activity}"] for activity in EngineActivity) == pytest.approx(1)
        assert line["mismatch/version_lag/max"] <= stale


def test_the_groups_that_are_trained_first_get_their_slots_first_and_steps_become_shorter() -> None:
    def episode(ordinal: int, sample: int) -> SimulatedEpisode:
        count = 2 + (ordinal * 5 + sample * 3) % 7
        return SimulatedEpisode([SimulatedTurn(10, 5 + (ordinal + sample) % 9, 1.0)] * count)

    made = setting(
        groups=4, steps=24, staleness=1, episode=episode, group_size=4, slots=4, step_seconds=60.0, sync_seconds=1.0
    )
    first, came = (
        mean_metrics(settled(simulate(replace(made, oldest_first=oldest)), 1)) for oldest in (True, False)
    )  # fmt: skip
    assert first["time/step_seconds"] < came["time/step_seconds"]
    assert first["time/overlap_efficiency"] > came["time/overlap_efficiency"]


async def test_slots_go_to_the_lowest_number_and_survive_cancellation() -> None:
    slots, order = Slots(1), list[str]()

    async def hold(name: str, number: int) -> None:
        await slots.acquire(number)
        order.append(name)
        await asyncio.sleep(0)
        slots.release()

    await slots.acquire()
    waiting = {
        name: asyncio.create_task(hold(name, number)) for name, number in (("b", 2), ("a", 1), ("a2", 1), ("c", 3))
    }
    await asyncio.sleep(0)
    waiting["a2"].cancel()
    await asyncio.sleep(0)
    slots.release()
    waiting["a"].cancel()  # at the moment at which it is given the slot
    await asyncio.gather(*waiting.values(), return_exceptions=True)
    assert order == ["b", "c"]
    await asyncio.wait_for(slots.acquire(), 1)
