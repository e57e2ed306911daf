"""The simulation of a run: exact where it can be calculated by hand.

Time is simulated, so every figure is exact and no test waits. How near the simulation comes to real runs is told in
docs/benchmarks/timeline.md and not tested: that is time on a clock.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from mua.config.load import load_config
from mua.engine.engine_handle import Slots
from mua.launch.plan.planner import make_plan
from mua.rollout.runner import StepDemand
from tools.bench.placements import Setting, SimulatedEpisode, SimulatedTurn, Simulation, compare_placements


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


def lines_of(made: Setting) -> list[dict[str, float]]:
    return Simulation(made).run()


def steps_of(made: Setting) -> list[float]:
    return [pytest.approx(line["time/step_seconds"]) for line in lines_of(made)]  # type: ignore[misc]


def test_an_episode_alone_takes_what_its_parts_take() -> None:
    # Prefill of 20 tokens 2 s, 10 iterations of 1.1 s, a pause of 5 s.
    assert steps_of(setting(ONE)) == [2 + 11 + 5] * 3
    # The second turn prefills only what is new to it.
    assert steps_of(setting(ONE, ONE)) == [2 * (2 + 11 + 5)] * 3


def test_requests_decode_together_after_the_prefill_of_all() -> None:
    assert steps_of(setting(ONE, groups=2)) == [2 * 2 + 10 * 1.2 + 5] * 3
    assert steps_of(setting(ONE, groups=2, slots=1)) == [2 * (2 + 11) + 5] * 3
    assert steps_of(setting(ONE, groups=2, engines=2)) == [2 + 11 + 5] * 3


def test_the_trainer_books_what_it_does() -> None:
    made = setting(
        ONE, score_seconds=0.1, train_seconds=0.2, sync_seconds=7.0,
        switch_seconds=0.5, released=True,
    )  # fmt: skip
    lines = lines_of(made)
    expected = {"wait": 18, "logprobs": 3, "optimizer": 6, "sync": 7, "memory": 1, "rest": 0}
    for line in lines:
        found = {name: line[f"time/{name}_seconds"] for name in expected}
        assert found == {name: pytest.approx(seconds) for name, seconds in expected.items()}
        assert line["time/engine_released"] == pytest.approx((3 + 6 + 1) / 35)
        assert line["time/engine_paused"] == pytest.approx(7 / 35)


def test_trainer_and_engine_on_one_device_slow_each_other_down() -> None:
    # Alone the trainer needs 6 s. The next group, which starts with the run, is done by then or not; at half speed the
    # trainer's 6 s of work and as much of the engine's take 12 s.
    long = SimulatedTurn(20, 100, 0.0)
    apart = setting(long, steps=2, staleness=1, train_seconds=6 / 120)
    shared = replace(apart, together=0.5, episode=lambda ordinal, sample: SimulatedEpisode([long] * (1 + ordinal)))
    line = lines_of(shared)[0]
    assert line["time/optimizer_seconds"] == pytest.approx(12)
    assert lines_of(replace(shared, together=1.0))[0]["time/optimizer_seconds"] == pytest.approx(6)


def test_a_weight_update_pauses_and_prefills_anew() -> None:
    # Group 0 ends after its two turns; group 1 has sampled for the rest of the time and begins again after the sync.
    long = SimulatedTurn(20, 100, 0.0)
    made = setting(steps=2, staleness=1, sync_seconds=10.0)
    made = replace(made, episode=lambda ordinal, sample: SimulatedEpisode([ONE if ordinal == 0 else long]))
    first, second = lines_of(made)
    # 4 s of prefill for both, 10 iterations at 1.2 s, the pause of 5 s in which group 1 gets 5 / 1.1 tokens.
    assert first["time/wait_seconds"] == pytest.approx(4 + 12 + 5)
    tokens = 10 + 5 / 1.1
    left = 100 - tokens
    assert second["time/wait_seconds"] == pytest.approx((20 + round(tokens)) / 10 + round(left) * 1.1)
    assert second["rollout/off_policy_level/max"] == 0  # it ended under the weights of the step before its own


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


def test_every_placement_uses_all_gpus_and_no_step_is_shorter_than_what_it_consists_of() -> None:
    config = load_config(Path("configs/qwen3-8b-1x8.yaml"), ["algorithm.groups_per_step=4", "algorithm.group_size=4"])
    found = compare_placements(make_plan(config), staleness=[1])
    assert {placement.name for placement in found} == {"in turns", "at once", "separate"}
    assert [p.step_seconds for p in found] == sorted(p.step_seconds for p in found)
    for placement in found:
        together = placement.trainer_gpus + placement.engine_gpus
        assert together == (8 if placement.name == "separate" else 16)
        assert placement.training_seconds < placement.step_seconds
        assert placement.found["rollout/off_policy_level/max"] <= placement.staleness
    turns = next(placement for placement in found if placement.name == "in turns")
    assert turns.step_seconds > turns.generation_seconds + turns.training_seconds
