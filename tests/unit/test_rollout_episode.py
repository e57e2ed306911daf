"""The state machine of one episode: every way it goes on, and every way it ends.

The policy is a script (tests/rollout_fixtures.py): a double of its choices, whose texts become ids through the real
chat family. Environment, manager, user and token stream are the real ones. The real engine is covered by the tests
under tests/e2e, retries of faults by test_rollout_runner.py.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from environments.help_desk.tasks import generate
from mua.algorithms.batch import malformed_turns, repeated_turns
from mua.config.schema import EnvironmentConfig, RolloutConfig
from mua.environment.manager import EnvironmentManager
from mua.environment.protocol import Evaluation, Task, ToolResult
from mua.environment.user import User
from mua.rollout.agent import EpisodeSetting, TokenPolicy
from mua.rollout.episode import Episode, EpisodeResult
from mua.tokens.chat_family import ChatFamily
from mua.types import Json, Outcome
from mua.utils.errors import DeadlineExceeded
from tests.rollout_fixtures import VERSION, FixedUser, ScriptedSampler, TestDesk, call, lines, sampled_ids
from tests.tokens_fixtures import chat_family

QWEN = chat_family("qwen3", False)
CANCEL = generate("train", 77, "cancel")
ORDER: str = CANCEL.data["known"]["order"]
NAME: str = CANCEL.data["known"]["name"]
CANCELLED = call("cancel_order", order=ORDER)
BROKEN = '<tool_call>\n{"name": "get_order"\n</tool_call>'


async def play(
    *texts: str,
    task: Task = CANCEL,
    family: ChatFamily = QWEN,
    domain: TestDesk | None = None,
    user: User | None = None,
    setting: Json | None = None,
    **budgets: float,
) -> tuple[EpisodeResult, ScriptedSampler]:
    """One episode in which the policy says ``texts``, with what the sampler was asked."""
    domain = domain or TestDesk()
    sampler = ScriptedSampler(family, lines(*texts))
    shared = EpisodeSetting(
        budgets=RolloutConfig.model_validate(budgets),
        temperature=1.0,
        system_prompt=lambda task: domain.system_prompt("short"),
        show_tools=False,
        deterministic=False,
    )
    manager = EnvironmentManager(domain, EnvironmentConfig(name="help_desk"))
    try:
        async with manager.instance(task, 0) as environment:
            user = user or domain.scripted_user(task, 0)
            changed = replace(shared, **(setting or {}))
            agent = TokenPolicy(family, sampler).agent(changed, session="s", seed=7)
            result = await Episode(changed, environment, user, agent).run()
    finally:
        await manager.close()
        assert manager.instances == domain.alive == 0
    return result, sampler


def observations(result: EpisodeResult) -> list[str]:
    return [message["content"] for message in result.messages if message["role"] == "tool"]


def roles(result: EpisodeResult) -> list[str]:
    return [message["role"] for message in result.messages]


async def test_a_whole_episode_ends_when_the_user_stops() -> None:
    result, sampler = await play(
        "What is the order number?",
        call("get_order", order=ORDER),
        "What is your name?",
        call("check_owner", order=ORDER, name=NAME),
        CANCELLED,
        f"Done, order {ORDER} cancelled.",
    )
    assert (result.outcome, result.evaluation.success) == (Outcome.USER_STOP, True)
    assert result.turn_rewards == [0.0] * 5 + [1.0]
    assert roles(result) == [
        "system", "user", "assistant", "user", "assistant", "tool",
        "assistant", "user", "assistant", "tool", "assistant", "tool", "assistant", "user",
    ]  # fmt: skip
    assert "###STOP###" in result.messages[-1]["content"]
    assert [request.session for request in sampler.requests] == ["s"] * 6


def half_reward(task: Task, messages: list[Json], evaluation: Evaluation) -> float:
    return evaluation.reward / 2


async def test_a_hook_gives_the_reward_in_place_of_the_environment() -> None:
    texts = (call("check_owner", order=ORDER, name=NAME), CANCELLED, "It is cancelled.")
    (own, _), (mine, _) = await play(*texts), await play(*texts, setting={"reward": f"{__name__}:half_reward"})
    assert own.reward == 1.0
    assert (mine.reward, mine.evaluation.success) == (0.5, own.evaluation.success)
    assert mine.evaluation.details["environment_reward"] == 1.0


async def test_several_calls_of_one_turn_are_answered_in_order() -> None:
    calls = "\n".join([call("check_owner", order=ORDER, name=NAME), CANCELLED, call("get_order", order=ORDER)])
    result, _ = await play(calls, "Done.")
    owner, cancelled, order = map(json.loads, observations(result))
    assert (owner, cancelled, order["status"]) == ({"owner": True}, {"ok": True}, "cancelled")
    turn = result.messages[2]
    answered = [message["tool_call_id"] for message in result.messages if message["role"] == "tool"]
    assert answered == [request["id"] for request in turn["tool_calls"]]


@pytest.mark.parametrize(
    ("text", "observation"),
    [
        (BROKEN, "error: the tool call is not valid JSON: "),
        ('<tool_call>\n["get_order"]\n</tool_call>', "error: a tool call is an object"),
        (call("get_orders", order=ORDER), "error: there is no tool 'get_orders'"),
        (call("get_order", number=ORDER), "error: invalid arguments for get_order: "),
        (call("get_order", order=7), "error: invalid arguments for get_order: order: 7 is not of type 'string'"),
    ],
)
async def test_a_bad_call_is_an_error_observation_and_the_episode_goes_on(text: str, observation: str) -> None:
    result, _ = await play(text, CANCELLED, "Done.")
    first, second = observations(result)
    assert first.startswith(observation)
    assert second == '{"ok": true}'
    assert (result.outcome, result.evaluation.success) == (Outcome.USER_STOP, True)
    assert (result.metrics["malformed"], result.metrics["tool_calls"]) == (1.0, 1.0)


async def test_a_good_call_beside_a_broken_one_is_run_and_answered_first() -> None:
    result, _ = await play(f"{BROKEN}\n{CANCELLED}", "Done.")
    good, bad = observations(result)
    assert good == '{"ok": true}'
    assert bad.startswith("error: ")
    assert result.evaluation.success


@pytest.mark.parametrize("bad", [BROKEN, call("no_such_tool"), call("get_order")])
async def test_too_many_malformed_calls_end_the_episode(bad: str) -> None:
    result, sampler = await play(bad, bad, bad, max_malformed=2)
    assert result.outcome is Outcome.MALFORMED
    assert len(sampler.requests) == len(observations(result)) == result.metrics["malformed"] == 3
    assert malformed_turns(result.messages) == [True] * 3
    assert repeated_turns(result.messages) == [False, True, True]


async def test_the_last_action_within_max_turns_is_executed() -> None:
    result, sampler = await play(CANCELLED, max_turns=1)
    assert (result.outcome, result.evaluation.success) == (Outcome.MAX_TURNS, True)
    assert len(sampler.requests) == 1
    assert observations(result) == ['{"ok": true}']
    assert result.turn_rewards == [1.0]


async def test_the_last_action_within_max_tool_calls_is_executed() -> None:
    look = call("get_order", order=ORDER)
    result, sampler = await play(look, f"{look}\n{CANCELLED}", max_tool_calls=2)
    assert (result.outcome, result.evaluation.success) == (Outcome.MAX_TURNS, True)
    assert (result.metrics["tool_calls"], len(sampler.requests)) == (3.0, 2)


async def test_a_turn_cut_by_its_token_cap_is_not_told_to_the_user() -> None:
    user = FixedUser("bye")
    result, _ = await play("What is the order number?", user=user, max_turn_tokens=4)
    assert (result.outcome, user.told) == (Outcome.LENGTH, [])
    assert result.messages[-1]["content"]  # what it had begun to say
    assert result.segments[0].loss_mask.sum() == 4


async def test_a_full_segment_ends_the_episode_as_length() -> None:
    _, sampler = await play(CANCELLED, "Done.")
    second = len(sampler.requests[1].prompt)
    done = len(sampled_ids(QWEN, "Done."))
    no_room, requests = await play(CANCELLED, "Done.", max_tokens=second)
    assert (no_room.outcome, len(requests.requests)) == (Outcome.LENGTH, 1)
    assert no_room.evaluation.success  # the call was executed
    little_room, requests = await play(CANCELLED, "Done.", max_tokens=second + 1)
    assert (little_room.outcome, requests.requests[1].params.max_new_tokens) == (Outcome.LENGTH, 1)
    enough, _ = await play(CANCELLED, "Done.", max_tokens=second + done)
    assert enough.outcome is Outcome.USER_STOP


async def test_calls_behind_a_terminal_one_are_not_run() -> None:
    result, _ = await play(f"{call('transfer_to_human', reason='asked')}\n{CANCELLED}")
    assert result.outcome is Outcome.TERMINAL_TOOL
    assert observations(result) == ['{"ok": true}', "error: not called, the conversation has ended"]
    assert not result.evaluation.success
    assert result.metrics["tool_calls"] == 1.0


@pytest.mark.parametrize("text", ["", " \n"])
async def test_an_empty_reply_is_malformed(text: str) -> None:
    user = FixedUser()
    result, _ = await play(text, user=user)
    assert (result.outcome, user.told) == (Outcome.MALFORMED, [])


async def test_text_beside_a_tool_call_is_not_told_to_the_user() -> None:
    user = FixedUser("bye")
    result, _ = await play(f"One moment.\n{CANCELLED}", "Done.", user=user)
    assert user.told == ["Done."]
    assert result.messages[2]["content"] == "One moment."


async def test_rewards_of_calls_go_to_their_turns_and_the_verdict_to_the_last() -> None:
    domain = TestDesk()
    rewards = iter((0.5, 0.25, -1.0))
    domain.on_call = lambda number, result: ToolResult(result.text, reward=next(rewards))
    look = call("get_order", order=ORDER)
    result, _ = await play(f"{look}\n{look}", "What is your name?", CANCELLED, "Done.", domain=domain)
    assert result.turn_rewards == [0.75, 0.0, -1.0, 1.0]
    rewards = iter((0.5,))
    last, _ = await play(CANCELLED, domain=domain, max_turns=1)
    assert last.turn_rewards == [1.5]  # the tool's and the verdict's


async def test_the_loss_mask_is_exactly_what_was_sampled() -> None:
    texts = ("What is the order number?", BROKEN, CANCELLED, "Done.")
    result, sampler = await play(*texts)
    (segment,) = result.segments
    generations = [request.generation for request in sampler.requests]
    mask = segment.loss_mask
    np.testing.assert_array_equal(segment.ids[mask], np.concatenate([g.ids for g in generations]))
    np.testing.assert_array_equal(segment.logprobs[mask], np.concatenate([g.logprobs for g in generations]))
    assert set(segment.version[mask]) == {VERSION}
    assert set(segment.version[~mask]) == {-1}
    for turn, request in enumerate(sampler.requests):
        seen = [*request.prompt, *request.generation.ids]
        assert segment.ids[: len(seen)].tolist() == seen  # what the engine saw is a prefix of what is trained
        assert mask[len(request.prompt) : len(seen)].all()
        assert set(segment.turn[len(request.prompt) : len(seen)]) == {turn}


async def test_metrics_count_calls_errors_and_tokens() -> None:
    look, wrong = call("get_order", order=ORDER), call("get_order", order="Z99")
    result, sampler = await play(f"{look}\n{wrong}", CANCELLED, "Done.")
    counts = {name: value for name, value in result.metrics.items() if not name.startswith("seconds/")}
    prompts = [len(request.prompt) for request in sampler.requests]
    assert counts == {
        "tool_calls": 3.0,
        "tool_calls/get_order": 2.0,
        "tool_errors/get_order": 1.0,
        "tool_calls/cancel_order": 1.0,
        "tool_errors/cancel_order": 0.0,
        "malformed": 0.0,
        "prompt_tokens": sum(prompts),
        "cached_tokens": sum(n // 2 for n in prompts),
    }
    stages = {name for name in result.metrics if name.startswith("seconds/")}
    assert stages == {
        "seconds/user", "seconds/generate", "seconds/engine_slot", "seconds/tools", "seconds/evaluate"
    }  # fmt: skip


async def test_what_the_sampler_is_asked() -> None:
    budgets = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "generate_seconds": 12.5, "max_turn_tokens": 100}
    budgets |= {"presence_penalty": 0.5, "frequency_penalty": -0.25}
    _, sampler = await play("Done.", **budgets, setting={"temperature": 0.5})
    (request,) = sampler.requests
    assert (request.params.temperature, request.params.top_p, request.params.top_k) == (0.5, 0.9, 5)
    assert request.params.min_p == 0.1
    assert (request.params.presence_penalty, request.params.frequency_penalty) == (0.5, -0.25)
    assert (request.params.max_new_tokens, request.deadline_s, request.params.seed) == (100, 12.5, None)
    assert request.params.stop_token_ids == QWEN.stop_token_ids
    _, sampler = await play("Done.", **budgets, setting={"temperature": 0.0})
    greedy = sampler.requests[0].params
    assert (greedy.top_p, greedy.top_k, greedy.min_p) == (1.0, -1, 0.0)  # greedy is greedy
    assert greedy.presence_penalty == 0.5  # which changes what is likeliest


async def test_deterministic_sampling_seeds_differ_by_turn_and_repeat() -> None:
    texts, setting = ("What is your name?", CANCELLED, "Done."), {"deterministic": True}
    runs = [(await play(*texts, setting=setting))[1].requests for _ in range(2)]
    seeds = [[request.params.seed for request in requests] for requests in runs]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3
    assert None not in seeds[0]


async def test_a_user_that_does_not_answer_is_a_named_deadline() -> None:
    class Silent(FixedUser):
        async def reply(self, agent_text: str):
            await asyncio.Event().wait()

    with pytest.raises(DeadlineExceeded, match=r"^rollout\.user_seconds: the user took longer than 0\.05 s$"):
        await play("What is your name?", user=Silent(), user_seconds=0.05)


@pytest.mark.parametrize("budget", [{"max_turns": 2}, {"max_tool_calls": 2}])
async def test_a_policy_whose_turns_are_over_may_answer_once_more(budget: Json) -> None:
    look = call("get_order", order=ORDER)
    user = FixedUser("bye")
    result, sampler = await play(look, CANCELLED, "It is cancelled.", user=user, final_turn=True, **budget)
    assert (result.outcome, result.evaluation.success, user.told) == (Outcome.USER_STOP, True, ["It is cancelled."])
    assert [m["content"] for m in result.messages if m.get("forced")] == [RolloutConfig().final_request]
    assert RolloutConfig().final_request in QWEN.decode(sampler.requests[2].prompt)
    assert result.metrics["final_turns"] == 1.0
    without, _ = await play(look, CANCELLED, user=FixedUser("bye"), **budget)
    assert without.outcome is Outcome.MAX_TURNS


async def test_the_last_turn_calls_no_tools_and_there_is_no_other() -> None:
    result, _ = await play(call("get_order", order=ORDER), CANCELLED, final_turn=True, max_turns=1)
    assert (result.outcome, result.evaluation.success) == (Outcome.MAX_TURNS, False)
    assert len(observations(result)) == 1  # the call of the last turn was not executed
    user = FixedUser("and then?", "bye")
    result, sampler = await play("One moment.", "Done.", user=user, final_turn=True, max_turns=1)
    assert (result.outcome, user.told, len(sampler.requests)) == (Outcome.USER_STOP, ["One moment.", "Done."], 2)
    user = FixedUser("and then?", "and now?", "bye")
    result, sampler = await play("One moment.", "Done.", user=user, final_turn=True, max_turns=1)
    assert (result.outcome, len(sampler.requests)) == (Outcome.MAX_TURNS, 2)
