"""What every gym keeps on its own tasks: gold earns what a task is worth, leaving earns nothing, the expert wins.

Not covered: the rules of a gym (a file each, tests/unit/test_gym_*.py), tasks that come from records
(test_gym_official.py there), and what any domain must keep (test_domain_contract.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from environments.gyms._shared import Gym, act
from environments.gyms.intention import WORTH
from environments.kit.demonstrate import demonstrate, replay_gold
from mua.environment.protocol import Split, Task
from mua.environment.registry import domain_names, get_domain
from tests.gyms_support import all_tasks, judged, opened, played


def one(task: Task) -> float:
    return 1.0


def details(task: Task) -> float:
    return sum(WORTH[detail["importance"]] for detail in task.data["details"])


def parts(task: Task) -> float:
    return float(len(task.data["aspects"]))


def parts_and_wishes(task: Task) -> float:
    return sum(0.8 * len(part["preferences"]) + 1 for part in task.data["aspects"])


@dataclass(frozen=True)
class Promise:
    moves: int
    """Of the expert, at most."""
    worth: Callable[[Task], float] = one
    """What gold earns, and the expert at least."""
    most: Callable[[Task], float] | None = None
    """What the expert earns at most, where that is more."""
    wins: tuple[tuple[Split, float], ...] = (("test", 0.0),)
    """Splits that the expert solves whole, with its looseness."""
    every: int = 1
    """One task in so many, where they take long."""
    repeated: int = 6
    """Conversations that are held twice."""


PROMISES = {
    "gyms/function": Promise(10),  # search, six points, three answers
    "gyms/intention": Promise(10, details),
    "gyms/persuade": Promise(14, wins=(("train", 0.3), ("validation", 0.0), ("test", 0.0)), repeated=10),
    "gyms/search": Promise(7, wins=(("validation", 0.0), ("validation", 1.0), ("test", 0.0), ("test", 1.0))),
    "gyms/tau": Promise(45, every=3),
    "gyms/telepathy": Promise(20),
    "gyms/travel": Promise(30, parts, parts_and_wishes, repeated=20),  # the default of rollout.max_turns
    "gyms/turtle": Promise(20),
}


def test_every_gym_makes_a_promise():
    assert PROMISES.keys() == {name for name in domain_names() if name.startswith("gyms/")}


@pytest.fixture(params=PROMISES)
def gym(request: pytest.FixtureRequest) -> Gym:
    gym = get_domain(request.param)
    assert isinstance(gym, Gym)
    return gym


async def test_gold_earns_on_every_task_what_it_is_worth(gym: Gym):
    promise = PROMISES[gym.name]
    for task in all_tasks(gym) if promise.every == 1 else gym.tasks("test")[:: promise.every]:
        gold = await replay_gold(gym, task)
        assert (gold.evaluation.success, gold.ended) == (True, True), task.id
        assert gold.reward == pytest.approx(promise.worth(task)), task.id


async def test_leaving_at_once_earns_nothing_on_any_task(gym: Gym):
    for task in all_tasks(gym):
        environment = opened(gym, task)
        assert not (await judged(environment)).success
        (result,) = await played(environment, act("finish"))
        verdict = await judged(environment)
        assert (result.reward, result.terminal, verdict.reward, verdict.success) == (0.0, True, 0.0, False), task.id
        environment.close()


async def test_the_expert_wins_by_talking_within_its_moves(gym: Gym):
    promise = PROMISES[gym.name]
    for split, loose in promise.wins:
        for number, task in enumerate(gym.tasks(split)[:: promise.every]):
            found = await demonstrate(gym, task, number, loose)
            assert (found.evaluation.success, found.ended) == (True, True), (task.id, found.messages)
            most = (promise.most or promise.worth)(task)
            assert promise.worth(task) - 1e-6 <= found.reward <= most + 1e-6, task.id
            assert sum(message["role"] == "assistant" for message in found.messages) <= promise.moves, task.id


async def test_the_same_seed_gives_the_same_conversation(gym: Gym):
    """Loose experts too play to an end."""
    tasks, repeated = gym.tasks("test"), PROMISES[gym.name].repeated
    for task in tasks[:: len(tasks) // repeated]:
        for loose in (0.0, 0.5, 0.7):
            one_talk, other = [await demonstrate(gym, task, 3, loose) for _ in range(2)]
            assert (one_talk.messages, one_talk.evaluation) == (other.messages, other.evaluation)
            assert (one_talk.reward, one_talk.ended) == (other.reward, other.ended)
