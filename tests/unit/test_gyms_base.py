"""The base of the gyms, on a small game: arguments, budgets, ends, rewards, options, pins, the opening user, oracles.

Models are scripted servers on this machine. Not covered: the rules of the gyms (a file each), what every domain must
keep (tests/contract/test_domain_contract.py), how well a real model judges.
"""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest

from environments.gyms._shared import Game, Gym, GymEnvironment, OpeningUser, Reply, Setting, act, dealt
from environments.gyms._shared.game import LONGEST_CONTENT, SHAPING, Role, shaped
from environments.gyms._shared.gym import PATIENCE
from environments.gyms._shared.oracles import (
    asked,
    chosen,
    is_list,
    is_yes_no,
    json_object,
    judged,
    labeled,
    one_of,
    pattern,
)
from environments.gyms.function import DOMAIN as FUNCTION
from mua.config.schema import EnvironmentConfig, LlmConfig
from mua.environment.endpoint.services import ChatClient, Services
from mua.environment.manager import EnvironmentManager
from mua.environment.protocol import Move, Split, Task, ToolResult
from mua.environment.registry import domain_names, get_domain
from mua.types import Json
from mua.utils.errors import EnvironmentFault, JudgeFault, MuaError, UserFault
from tests.chat_server import Handler, drops, fails, says, serving
from tests.gyms_support import followed, opened, played, scripts
from tests.gyms_support import judged as verdict
from tests.tables import cases_of, refused, table

cases = cases_of("gyms_base")
TABLE = table("gyms_base")


class Numbers(Game):
    """Guess a number; every question pays a little, up to a point."""

    async def action(self, content: str) -> Reply:
        if content == "break":
            raise JudgeFault("broken")
        if content == "?":
            return Reply("say a number", error=True)
        return Reply("higher" if int(content) < self.task.data["number"] else "lower", reward=0.1)

    async def answer(self, content: str) -> Reply:
        self.solved = content == str(self.task.data["number"])
        return Reply("Yes." if self.solved else "No.", reward=float(self.solved), over=self.solved)

    def details(self) -> dict:
        return {"number": self.task.data["number"]}


class NumbersGym(Gym):
    name = "gyms/numbers"
    choices: ClassVar = {"action": "a number", "answer": "the number", "finish": "stop"}
    defaults: ClassVar = {"max_actions": 3, "max_answers": 2, "note": "", "share": 0.5}
    llm_roles = ("user", "judge")
    short_prompt = "Guess."

    @classmethod
    def generate(cls, split: Split) -> Iterable[Task]:
        return [Task(f"gyms/numbers/{split}/0", cls.name, split, {"number": 7, "difficulty": "easy"})]

    def game(self, task: Task, seed: int) -> Game:
        return Numbers(self.setting, task, seed)

    def openings(self, task: Task) -> Sequence[str]:
        return ("Guess.", "Guess my number.")

    def persona(self, task: Task) -> str:
        return "You think of a number."

    def gold(self, task: Task) -> Sequence[Move]:
        return [act("answer", "7")]


GYM = NumbersGym()
TASK = next(iter(NumbersGym.generate("test")))


def configured(**settings: object) -> NumbersGym:
    return GYM.configured(EnvironmentConfig(name="gyms/numbers", **settings), Services())  # type: ignore[arg-type]


async def one(environment: GymEnvironment, choice: str, content: str = "") -> ToolResult:
    return await environment.call("interact", {"choice": choice, "content": content})


@scripts("numbers")
async def test_conversations(script: Json):
    """A task of a gym of UserRL's has a penalty as there."""
    task = Task("t", script.get("task", "gyms/numbers"), "test", TASK.data)
    await followed(opened(configured(**script.get("with", {})), task), script)


async def test_a_reset_begins_anew():
    environment = opened(GYM, TASK)
    await one(environment, "finish")
    environment.reset(TASK, 0)
    assert (await one(environment, "answer", "7")).reward == 1.0


async def test_what_is_refused_costs_and_changes_nothing():
    environment = opened(GYM, TASK)
    before = await verdict(environment)
    bad = [
        await environment.call("interact", {"choice": "action"}),
        await environment.call("interact", {"choice": "search", "content": "x"}),
        await environment.call("interact", {"choice": "action", "content": 3}),
        await environment.call("interact", {"choice": "action", "content": "3", "more": 1}),
        await environment.call("other", {"choice": "action", "content": "3"}),
        await one(environment, "action", "  "),
        await one(environment, "action", "x" * (LONGEST_CONTENT + 1)),
        await one(environment, "action", "?"),
    ]
    assert all(r.error and r.text.startswith("Error: ") and not r.terminal and not r.reward for r in bad)
    assert await verdict(environment) == before


async def test_no_budget_is_no_limit():
    environment = opened(configured(options={"max_actions": 0}), TASK)
    results = await played(environment, *[act("action", "3")] * 50)
    assert not any(r.error for r in results)


@pytest.mark.parametrize("reward", [-1.0, math.nan, math.inf, -math.inf, "1", None])
async def test_what_is_no_finite_reward_of_at_least_0_is_a_fault(reward: object):
    class Broken(Numbers):
        async def action(self, content: str) -> Reply:
            return Reply("no", reward=reward)  # type: ignore[arg-type]

    for options in ({}, {"normalize_rewards": True, "reward_scale": 0.0}):
        setting = Setting(options={**GYM.setting.options, **options})
        environment = GymEnvironment(lambda t, s: Broken(GYM.setting, t, s), setting, GYM._schema, "answer")
        environment.reset(TASK, 0)
        with pytest.raises(EnvironmentFault, match=r"Broken\.action gave the reward"):
            await one(environment, "action", "1")
        verdict_now = await verdict(environment)
        assert (verdict_now.details["reward"], verdict_now.details["used"]) == (0.0, {})


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_a_number_of_a_judge_that_is_not_finite_is_its_fault(number: str):
    async with endpoint(says(f'{{"reason": "r", "numbers": [{number}], "verdict": {number}}}')) as judge:
        with pytest.raises(JudgeFault):
            await judged(judge, "system", "text", json_object(lambda value: value["verdict"]), 1)
        with pytest.raises(JudgeFault):
            await chosen(judge, "which?", 3, {}, 1)


# Shaping: UserRL's scale, penalty and clip.


@cases
def test_the_shaped_reward(base: float, step: int, flat: bool, options: dict, paid: float):
    assert shaped(base, step, flat, options) == pytest.approx(paid)


def test_every_gym_takes_the_options_of_shaping_and_has_them_off():
    gyms = [get_domain(name) for name in domain_names() if name.startswith("gyms/")]
    assert len(gyms) >= 8
    for gym in gyms:
        assert isinstance(gym, Gym)
        assert {key: gym.setting.options[key] for key in SHAPING} == SHAPING
        options = {"reward_scale": 2, "step_penalty": 0.5, "normalize_rewards": True}
        config = EnvironmentConfig(name=gym.name, options=options)
        assert {key: gym.configured(config, Services()).setting.options[key] for key in SHAPING} == options


async def test_a_judges_fault_reaches_the_episode_as_one_and_leaves_no_trace_in_the_reward():
    manager = EnvironmentManager(GYM, EnvironmentConfig(name="gyms/numbers"))
    async with manager.instance(TASK, seed=0) as instance:
        with pytest.raises(JudgeFault):
            await instance.call("interact", {"choice": "action", "content": "break"})
        with pytest.raises(EnvironmentFault):
            await instance.call("interact", {"choice": "action", "content": "no number"})
        assert (await instance.call("interact", {"choice": "answer", "content": "7"})).reward == 1.0
    await manager.close()


def test_options_are_checked_by_name_type_and_sign():
    setting = configured(options={"max_answers": 5, "share": 1, "note": "x"}).setting
    assert setting.options == {**SHAPING, "max_actions": 3, "max_answers": 5, "note": "x", "share": 1.0}
    for options, message in TABLE["test_options_are_checked_by_name_type_and_sign"]:
        refused(message, configured, options=options)


def test_what_a_gym_can_not_do_is_an_error_that_says_so():
    for settings, message in TABLE["test_what_a_gym_can_not_do_is_an_error_that_says_so"]:
        refused(message, configured, **settings)
    refused("no llm oracle", FUNCTION.configured, EnvironmentConfig(name="gyms/function", oracle="llm"), Services())
    mixed = EnvironmentConfig(mix={"gyms/function": 1.0, "help_desk": 1.0}, oracle="llm")
    assert FUNCTION.configured(mixed, Services()).setting.oracle == "rule"


def test_dealing_is_disjoint_seeded_and_complete():
    sizes: dict[Split, int] = {"train": 5, "validation": 2, "test": 3}
    hands = dealt(range(10), sizes, "seed")
    assert sorted(x for hand in hands.values() for x in hand) == list(range(10))
    assert dealt(range(10), sizes, "seed") == hands
    assert dealt(range(10), sizes, "other") != hands
    with pytest.raises(MuaError, match="too few"):
        dealt(range(9), sizes, "seed")


async def test_the_opening_user_states_the_task_points_to_the_tool_and_leaves():
    user = OpeningUser("x", ("Guess.", "Go on."))
    first = await user.open()
    assert first.text in ("Guess.", "Go on.")
    nudges = [await user.reply("is it 7?") for _ in range(PATIENCE)]
    assert all("interact" in n.text and not n.stop for n in nudges)
    assert (await user.reply("hello?")).stop


async def test_games_do_not_touch_global_randomness():
    random.seed(5)
    before = random.getstate()
    environment = opened(FUNCTION, FUNCTION.tasks("test")[0])
    await played(environment, act("search", "test"), act("action", "1 2 3 4"), act("finish"))
    assert random.getstate() == before


@pytest.mark.parametrize("text", ["Is it red?", "does he know", "So is it there?", "Could it be a cat?"])
def test_yes_no_questions(text: str):
    assert is_yes_no(text)


@pytest.mark.parametrize("text", ["What is it?", "It is red.", "", "Who was it?", "island"])
def test_other_texts(text: str):
    assert not is_yes_no(text)


@cases
def test_a_question_that_goes_through_a_list(text: str, found: bool):
    assert is_list(text) == found


def test_keywords_are_whole_words_and_a_star_is_any_ending():
    assert pattern(["light"]).search("a light!")
    assert not pattern(["light"]).search("lighthouse")
    assert pattern(["light*"]).search("a Lighthouse")


@asynccontextmanager
async def endpoint(*script: Handler, role: Role = "judge") -> AsyncIterator[ChatClient]:
    """One that answers by the script."""
    async with serving(*script) as server:
        client = ChatClient(LlmConfig(base_url=server.url, model="m", max_retries=0), role)
        yield client
        await client.close()


async def ask_user(*replies: str) -> str:
    async with endpoint(*map(says, replies), role="user") as user:
        return await asked(user, "system", "question", one_of(("Yes", "No")), 1)


async def test_an_unreadable_reply_is_asked_for_again_and_then_a_fault():
    assert await ask_user("Well, perhaps", "Yes and no", "YES.") == "Yes"
    with pytest.raises(UserFault, match="no usable reply"):
        await ask_user("perhaps")


@pytest.mark.parametrize("step", [says("maybe"), says('{"reason": "r", "verdict": "perhaps"}'), fails(401), drops])
async def test_no_broken_verdict_becomes_a_label(step):
    async with endpoint(step) as judge:
        with pytest.raises(JudgeFault):
            await labeled(judge, "which?", ("Yes", "No"), {"the text": "x"}, 1)
        with pytest.raises(JudgeFault):
            await judged(judge, "system", "text", json_object(lambda value: value["there"]), 1)


async def test_verdicts_are_read_from_what_fits():
    replies = [
        '{"reason": "r", "verdict": "No"}',
        '{"reason": "r", "numbers": [3, 1]}',
        '{"reason": "", "numbers": []}',
    ]
    async with endpoint(*map(says, replies)) as judge:
        assert await labeled(judge, "which?", ("Yes", "No"), {"the text": "x"}, 1) == "No"
        assert await chosen(judge, "which?", 3, {}, 1) == [0, 2]
        assert await chosen(judge, "which?", 3, {}, 1) == []


async def test_a_number_beyond_the_list_is_no_verdict():
    async with endpoint(says('{"reason": "r", "numbers": [4]}')) as judge:
        with pytest.raises(JudgeFault):
            await chosen(judge, "which?", 3, {}, 1)
