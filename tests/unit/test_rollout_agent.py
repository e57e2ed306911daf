"""The chat agent: native tool calls over real HTTP, through the same episode that training runs.

The endpoint is a scripted server (tests/chat_fixtures.py); manager, environment and user are the real ones. The token
agent is covered by test_rollout_episode.py. Not covered: what particular vendors' endpoints refuse.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from environments.help_desk.tasks import generate
from mua.config.rollout import ContextConfig
from mua.config.schema import EnvironmentConfig, PolicyEndpointConfig, RolloutConfig
from mua.environment.endpoint.services import ChatClient
from mua.environment.manager import EnvironmentManager
from mua.environment.user import User
from mua.rollout.agent import ChatPolicy, EpisodeSetting
from mua.rollout.episode import Episode, EpisodeResult
from mua.types import Json, Outcome
from mua.utils.errors import ConfigError, DeadlineExceeded, EngineError, MuaError
from tests.chat_fixtures import ChatServer, Reply, calls, chat_server, completion, in_order, says
from tests.rollout_fixtures import FixedUser, TestDesk

CANCEL = generate("train", 77, "cancel")
ORDER: str = CANCEL.data["known"]["order"]
NAME: str = CANCEL.data["known"]["name"]
CANCELLED = ("cancel_order", {"order": ORDER})
DONE = says(f"Done, order {ORDER} cancelled.")
KEY = "sk-this-must-not-appear"


async def play(
    reply: Reply,
    *,
    user: User | None = None,
    endpoint: Json | None = None,
    temperature: float = 0.5,
    context: ContextConfig = ContextConfig(),
    **budgets: Any,
) -> tuple[EpisodeResult, ChatServer]:
    """One episode with the policy behind an endpoint."""
    domain = TestDesk()
    manager = EnvironmentManager(domain, EnvironmentConfig(name="help_desk"))
    async with chat_server(reply) as server:
        told = {"base_url": server.base_url, "model": "m", "api_key": KEY, "max_retries": 0, **(endpoint or {})}
        config = PolicyEndpointConfig.model_validate(told)
        client = ChatClient(config, "policy")
        setting = EpisodeSetting(
            budgets=RolloutConfig.model_validate(budgets),
            temperature=temperature,
            system_prompt=lambda task: domain.system_prompt("short"),
            show_tools=False,
            deterministic=False,
            context=context,
        )
        try:
            async with manager.instance(CANCEL, 0) as environment:
                user = user or domain.scripted_user(CANCEL, 0)
                agent = ChatPolicy(client, config.send_reasoning).agent(setting, session="s", seed=7)
                result = await Episode(setting, environment, user, agent).run()
        finally:
            await client.close()
            await manager.close()
    return result, server


def observations(result: EpisodeResult) -> list[str]:
    return [message["content"] for message in result.messages if message["role"] == "tool"]


async def test_a_whole_episode_with_native_tool_calls() -> None:
    parallel = calls(("check_owner", {"order": ORDER, "name": NAME}), ("get_order", {"order": ORDER}))
    result, server = await play(in_order(says("Which order?"), parallel, calls(CANCELLED), DONE))
    assert (result.outcome, result.evaluation.success) == (Outcome.USER_STOP, True)
    assert result.turn_rewards == [0.0, 0.0, 0.0, 1.0]
    assert result.segments == []
    owner, order, _ = map(json.loads, observations(result))
    assert (owner, order["status"]) == ({"owner": True}, "pending")
    assert result.metrics["tool_calls"] == 3.0
    assert (result.metrics["prompt_tokens"], result.metrics["completion_tokens"]) == (40.0, 20.0)
    assert server.keys == [f"Bearer {KEY}"] * 4
    first, last = server.requests[0], server.requests[-1]
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert "cancel_order" in {tool["function"]["name"] for tool in first["tools"]}
    assert (first["tool_choice"], first["temperature"], first["max_tokens"]) == ("auto", 0.5, 1024)
    assert len({request["seed"] for request in server.requests}) == 4
    answered = {m["tool_call_id"]: m["content"] for m in last["messages"] if m["role"] == "tool"}
    asked = [call["id"] for m in last["messages"] for call in m.get("tool_calls", ())]
    assert list(answered) == asked  # each call has its own answer, in order


BAD = (("get_order", '{"order": '), CANCELLED, ("get_order", '["K7"]'), ("", {}))


async def test_bad_arguments_are_answered_and_go_back_readable() -> None:
    result, server = await play(in_order(calls(*BAD), DONE), max_malformed=3)
    assert result.evaluation.success
    assert result.metrics["malformed"] == 3.0
    good, *errors = observations(result)
    assert json.loads(good) == {"ok": True}
    assert [error.split(":")[0] for error in errors] == ["error"] * 3
    assert [e["kind"] for e in result.messages[2]["tool_call_errors"]] == ["bad_json", "bad_arguments", "missing_name"]
    wire = server.requests[1]["messages"]
    sent = {call["id"]: call["function"] for call in wire[2]["tool_calls"]}
    assert all(isinstance(json.loads(function["arguments"]), dict) for function in sent.values())
    assert [m["tool_call_id"] for m in wire if m["role"] == "tool"] == list(sent)
    assert [function["name"] for function in sent.values()] == [n or "unknown" for n, _ in BAD]


async def test_call_ids_that_repeat_are_replaced() -> None:
    look = calls(("get_order", {"order": ORDER}))
    nameless = calls(("get_order", {"order": ORDER}))
    nameless["tool_calls"][0]["id"] = ""
    _, server = await play(in_order(look, look, nameless, calls(CANCELLED), DONE))
    ids = [m["tool_call_id"] for m in server.requests[-1]["messages"] if m["role"] == "tool"]
    assert len(set(ids)) == len(ids) == 4
    assert all(ids)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_reasoning_is_kept_and_sent_back_but_never_told_to_the_user(field: str) -> None:
    user = FixedUser("go on", "bye")
    thinking = calls(CANCELLED, **{field: "the user wants out"})
    inline = says("<think>\nalmost done\n</think>\n\nOne moment.")
    result, server = await play(in_order(thinking, inline, DONE), user=user)
    assert user.told == ["One moment.", DONE["content"]]
    kept = [message.get("reasoning_content") for message in result.messages if message["role"] == "assistant"]
    assert kept == ["the user wants out", "almost done", None]
    sent = server.requests[-1]["messages"]
    assert sent[2] == {"role": "assistant", **thinking}
    assert sent[4]["content"] == inline["content"], "as it came: a template knows what to do with it"


async def test_reasoning_stays_here_where_the_endpoint_refuses_unknown_fields() -> None:
    reply = in_order(calls(CANCELLED, reasoning_content="hm"), DONE)
    result, server = await play(reply, endpoint={"send_reasoning": False, "send_seed": False})
    assert result.messages[2]["reasoning_content"] == "hm"
    assert "reasoning_content" not in json.dumps(server.requests)
    assert "seed" not in server.requests[0]


async def test_a_reply_cut_by_its_budget_is_length() -> None:
    result, server = await play(lambda body: completion(calls(CANCELLED), finish="length"), max_turn_tokens=9)
    assert (result.outcome, observations(result)) == (Outcome.LENGTH, [])
    assert server.requests[0]["max_tokens"] == 9
    assert result.messages[-1]["truncated"]


async def test_the_context_budget_counts_what_the_endpoint_counted() -> None:
    usage = {"prompt_tokens": 60, "completion_tokens": 30, "total_tokens": 90}
    look = completion(calls(("get_order", {"order": ORDER})), usage=usage)
    result, server = await play(in_order(look), max_tokens=90)
    assert (result.outcome, len(server.requests)) == (Outcome.LENGTH, 1)
    again = in_order(completion(calls(("get_order", {"order": ORDER})), usage=usage), DONE)
    _, server = await play(again, max_tokens=97)
    assert server.requests[1]["max_tokens"] == 7


async def test_a_conversation_too_long_for_the_model_is_the_policys_doing() -> None:
    text = "This model's maximum context length is 100 tokens."
    refusal = web.json_response({"error": {"message": text, "code": "context_length_exceeded"}}, status=400)
    result, _ = await play(in_order(calls(CANCELLED), refusal))
    assert (result.outcome, result.turn_rewards) == (Outcome.LENGTH, [1.0])  # the call before was executed


async def test_other_settings_reach_the_request_and_prices_make_a_cost() -> None:
    endpoint = {
        "extra": {"chat_template_kwargs": {"enable_thinking": False}},
        "tokens_parameter": "max_completion_tokens",
        "price_per_million_in": 2.0,
        "price_per_million_out": 8.0,
    }
    result, server = await play(
        in_order(calls(CANCELLED), DONE), endpoint=endpoint, top_p=0.9, top_k=7, frequency_penalty=0.5
    )
    request = server.requests[0]
    assert request["chat_template_kwargs"] == {"enable_thinking": False}
    assert ("max_tokens" in request, request["max_completion_tokens"]) == (False, 1024)
    assert (request["top_p"], request["top_k"], request["frequency_penalty"]) == (0.9, 7, 0.5)
    assert not {"min_p", "presence_penalty"} & request.keys()  # what is off is not sent: not every endpoint knows it
    assert result.metrics["policy_cost"] == pytest.approx(20 * 2e-6 + 10 * 8e-6)
    _, greedy = await play(in_order(calls(CANCELLED), DONE), temperature=0.0, top_p=0.9)
    assert not {"top_p", "top_k"} & greedy.requests[0].keys()


def refusal(status: int, text: str = f"bad key {KEY}") -> Callable[[Json], web.Response]:
    return lambda body: web.json_response({"error": {"message": text}}, status=status)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (refusal(401), ConfigError),
        (refusal(404), ConfigError),
        (refusal(400, "no such field"), EngineError),
        (refusal(503), EngineError),
        (lambda body: web.json_response({"choices": []}), EngineError),
        (lambda body: completion(says("Hello \ud800")), EngineError),
        (lambda body: completion(calls(("get_\udfff", {}))), EngineError),
        (lambda body: web.Response(text='{"a":' * 100_000, content_type="application/json"), EngineError),
        (lambda body: web.Response(text="<html>"), EngineError),
    ],
    ids=range(9),
)
async def test_faults_of_the_endpoint_are_no_outcome_of_the_policy(reply: Reply, kind: type[MuaError]) -> None:
    with pytest.raises(kind, match="policy") as raised:
        await play(reply)
    assert KEY not in str(raised.value)
    assert raised.value.__cause__ is None


async def test_a_silent_endpoint_is_a_named_deadline() -> None:
    with pytest.raises(DeadlineExceeded, match=r"^rollout\.generate_seconds: policy endpoint .* within 0\.1 s$"):
        await play(lambda body: asyncio.sleep(5, DONE), generate_seconds=0.1)
