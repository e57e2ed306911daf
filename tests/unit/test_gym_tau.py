"""The tau gym: retail and airline through the one tool, its conversation, its reward, LLM customers, official data.

The LLM is a scripted server on this machine, reached over HTTP. Official data is read from MUA_TAU_BENCH and its tests
are skipped where it is absent. Not covered: the inner domains' own rules (tests of retail, airline and help_desk).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import pytest

from environments.gyms._shared import act
from environments.gyms.tau import DOMAIN, TauGym
from environments.gyms.tau.game import tool_call
from environments.kit.demonstrate import demonstrate, replay_gold
from mua.config.schema import EnvironmentConfig, LlmConfig
from mua.environment.endpoint.services import ChatClient, Services
from mua.environment.protocol import Move, Task, UserMove
from mua.environment.registry import get_domain
from mua.environment.selection import Selection
from mua.environment.user import STOP_SIGNAL
from mua.types import Json
from mua.utils.errors import UserFault
from tests.gyms_support import judged, modeled, opened, played, say
from tests.tables import cases_of, refused
from tests.tau_support import official

cases = cases_of("gym_tau")

DESK = TauGym(inner={"help_desk": get_domain("help_desk")})


def desk_task(kind: str) -> Task:
    return next(task for task in DESK.tasks("test") if task.data["kind"] == f"help_desk/{kind}")


def inner_of(task: Task) -> Task:
    tasks = get_domain(task.data["domain"]).tasks(task.split)
    return next(inner for inner in tasks if inner.id == task.data["task"])


def inner_gold(task: Task) -> Sequence[Move | UserMove]:
    return get_domain(task.data["domain"]).gold(inner_of(task))


@pytest.mark.slow
@pytest.mark.parametrize(("inner", "every"), [("help_desk", 3), ("telecom", 4)])
async def test_expert_and_gold_solve_other_domains_too_where_the_customer_may_have_tools(inner: str, every: int):
    gym = TauGym(inner={inner: get_domain(inner)})
    for task in gym.tasks("test")[::every]:
        for found in (await demonstrate(gym, task, 1), await replay_gold(gym, task)):
            assert (found.reward, found.evaluation.success, found.ended) == (1.0, True, True), task.id


async def test_what_is_done_before_a_word_is_said_is_done_unasked():
    """The customer inside has spoken by then, so that a change needs its yes."""
    gym = TauGym(inner={"retail": get_domain("retail")})
    task = next(task for task in gym.tasks("test") if task.data["kind"] == "retail/cancel")
    calls = [act("answer", tool_call(*move)) for move in inner_gold(task) if isinstance(move, tuple)]
    environment = opened(gym, task)
    *_, last = await played(environment, *calls, act("action", "It is done."), act("finish"))
    verdict = await judged(environment)
    assert last.reward == 0.0
    assert any("before a yes" in line for line in verdict.details["inner"]["unmet"])


async def test_the_first_words_outside_are_those_of_the_customer_inside():
    for task in DOMAIN.tasks("test")[::20]:
        for seed in range(4):
            outside = await DOMAIN.scripted_user(task, seed).open()
            domain = get_domain(task.data["domain"])
            assert outside == await domain.scripted_user(inner_of(task), seed).open()
    task = desk_task("cancel")
    assert len({(await DESK.scripted_user(task, seed).open()).text for seed in range(20)}) > 1


def test_the_policy_of_the_inner_domain_stands_in_the_prompt():
    for name in ("retail", "airline"):
        task = next(task for task in DOMAIN.tasks("test") if task.data["domain"] == name)
        prompt = DOMAIN.prompt_for(task, "full")
        assert get_domain(name).system_prompt("full") in prompt
        assert DOMAIN.system_prompt("full") in prompt
        assert len(DOMAIN.prompt_for(task, "short")) < 300


async def test_the_tools_are_listed_whole_and_once():
    task = desk_task("cancel")
    listed, again, other = await played(
        opened(DESK, task), act("search", "Tools."), act("search", "help"), act("search", "x")
    )
    environment = get_domain("help_desk").environment()
    environment.reset(inner_of(task), 0)
    assert [json.loads(line) for line in listed.text.splitlines()] == [
        schema.openai()["function"] for schema in environment.tools()
    ]
    assert (listed.error, again.error, other.error) == (False, True, True)
    environment.close()


@cases
async def test_an_answer_that_is_no_call_is_refused(content: str, said: str):
    (result,) = await played(opened(DESK, desk_task("cancel")), act("answer", content))
    assert result.error
    assert said in result.text
    assert not result.terminal


def before_the_end(task: Task) -> list[Move]:
    """The gold moves without the last text and what follows it."""
    moves = list(DESK.gold(task))
    last = max(index for index, move in enumerate(moves) if move[1]["choice"] == "action")  # type: ignore[index]
    return moves[:last]


def last_text(task: Task) -> str:
    return [move[1]["content"] for move in DESK.gold(task) if move[1]["choice"] == "action"][-1]  # type: ignore[index]


async def test_the_reward_is_paid_once_at_the_end():
    task = desk_task("cancel")
    environment = opened(DESK, task)
    moves = [*before_the_end(task), act("action", last_text(task)), act("finish")]
    *before, last, late = await played(environment, *moves)
    assert [result.reward for result in before] == [0.0] * len(before)
    assert (last.reward, last.terminal) == (1.0, True)
    assert STOP_SIGNAL not in last.text
    assert "has left" in last.text
    assert (late.reward, late.error) == (0.0, True)
    verdict = await judged(environment)
    assert (verdict.reward, verdict.success) == (0.0, True)
    assert verdict.details["inner"]["reward"] == 1.0


async def test_an_episode_that_nobody_ends_pays_nothing():
    task = desk_task("cancel")
    environment = opened(DESK, task)
    await played(environment, *before_the_end(task))
    verdict = await judged(environment)
    assert (verdict.reward, verdict.success) == (0.0, False)


async def test_a_terminal_tool_ends_the_conversation():
    task = desk_task("cancel")
    (handed,) = await played(opened(DESK, task), act("answer", tool_call("transfer_to_human", {"reason": "I give up"})))
    assert (handed.reward, handed.terminal) == (0.0, True)


async def test_only_what_is_said_to_the_customer_counts_as_told():
    task = desk_task("track")
    text = last_text(task)
    untold = act("answer", tool_call("get_item", {"order": text, "item": text}))
    for told, expected in ((act("action", text), 1.0), (untold, 0.0)):
        results = await played(opened(DESK, task), *before_the_end(task), told, act("finish"))
        assert sum(result.reward for result in results) == expected


# Configuration.


def configured(**more: Json | str) -> TauGym:
    return DOMAIN.configured(EnvironmentConfig(name="gyms/tau", **more), Services())


async def test_the_domains_their_reward_and_their_options_are_configured():
    gym = configured(options={"domains": "retail", "compact": True}, reward="partial", show_reward=True)
    tasks = gym.tasks("test")
    assert {task.data["domain"] for task in tasks} == {"retail"}
    rewards = Counter()
    for task in tasks:
        moves = list(gym.gold(task))
        said = [index for index, move in enumerate(moves) if move[1]["choice"] == "action"]  # type: ignore[index]
        *_, last = await played(opened(gym, task), *moves[: said[-1]], act("finish"))
        assert "\nReward: " in last.text
        rewards[0 < last.reward < 1] += 1
    assert rewards[True]


def test_what_can_not_be_configured_is_named():
    refused("unknown environment 'nosuch'", configured, options={"domains": "nosuch"})
    refused("name the domains", configured, options={"domains": ""})
    refused("name the domains", configured, options={"domains": "gyms/tau"})
    refused(r"user\.llm", configured, oracle="llm")
    refused(r"environment\.data", configured, data="/no/such/folder")


def test_in_a_mix_the_options_carry_the_gyms_name():
    config = EnvironmentConfig(mix={"help_desk": 1.0, "gyms/tau": 1.0}, options={"tau.domains": "airline"})
    gym = DOMAIN.configured(config, Services())
    assert {task.data["domain"] for task in gym.tasks("test")} == {"airline"}
    task = gym.tasks("test")[0]
    selection = Selection({"gyms/tau": gym}, config)
    assert get_domain("airline").system_prompt("full") in selection.system_prompt(task)


# A customer played by a model.


async def test_a_model_plays_the_customer_inside():
    words, asked = iter(("My lamp is broken.", "Order 7.", f"Bye {STOP_SIGNAL}")), list[Json]()

    def customer(body: Json) -> str:
        asked.append(body)
        return next(words)

    async with modeled(DOMAIN, customer, options={"domains": "retail"}) as gym:
        task = gym.tasks("test")[0]
        first = (await gym.scripted_user(task, 3).open()).text
        assert first in gym.openings(task)
        results = await say(opened(gym, task, 3), "Hello!", "Which one?", "Bye.")
    assert [result.text for result in results] == ["My lamp is broken.", "Order 7.", "Bye (The customer has left.)"]
    assert [result.terminal for result in results] == [False, False, True]
    assert gym.persona(task) in asked[0]["messages"][0]["content"]
    assert asked[-1]["messages"][-1]["content"] == "Bye."


async def test_a_model_that_is_not_there_is_the_users_fault():
    endpoint = ChatClient(LlmConfig(base_url="http://127.0.0.1:9/v1", model="m", max_retries=0))
    config = EnvironmentConfig(name="gyms/tau", oracle="llm", options={"domains": "retail"})
    gym = DOMAIN.configured(config, Services(user=endpoint))
    with pytest.raises(UserFault):
        await say(opened(gym, gym.tasks("test")[0]), "Hello!")
    await endpoint.close()


# Official data.


@pytest.mark.slow
async def test_official_data_is_served_with_its_policy():
    folder = official("retail").parent
    official("airline")
    gym = configured(data=str(folder))
    assert Counter(task.data["domain"] for task in gym.tasks("train")) == {"retail": 500}
    assert Counter(task.data["domain"] for task in gym.tasks("test")) == {"retail": 115, "airline": 50}
    for task in gym.tasks("test")[::3]:
        assert (await replay_gold(gym, task)).reward == 1.0, task.id
        policy = (folder / task.data["domain"] / "policy.md").read_text(encoding="utf-8")
        assert policy.strip() in gym.prompt_for(task, "full")
    kept = configured(data=str(folder), options={"skip_noop": True}).tasks("test")
    assert 0 < len(kept) < 165
    for task in kept:
        (result,) = await played(opened(gym, task), act("finish"))
        assert result.reward == 0.0
