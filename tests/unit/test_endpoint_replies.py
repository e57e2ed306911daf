"""What chat endpoints reply, read for policies, users and judges: ends, parts, reasoning, calls, refusals.

Bodies are as servers send them. Not covered: whose fault a refusal is (test_environment_blame.py), limits, retries and
failover (test_users_pool.py), damaged bodies by the thousand (tests/fuzz/replies.py).
"""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from aiohttp import web

from mua.environment.blame import Blame
from mua.environment.endpoint import services as services_module
from mua.environment.endpoint.chat import ChatRequest, Completion, RequestError
from mua.environment.endpoint.replies import CALLED, CUT, ENDED, THOUGHTS, read_completion
from mua.environment.protocol import ToolResult
from mua.environment.user import STOP_SIGNAL
from mua.rollout import runner as runner_module
from mua.types import Json, Outcome, ToolSchema
from mua.users.judge import Judge
from mua.users.llm import LlmUser
from mua.utils.errors import ConfigError, EngineError, JudgeFault, UserFault, UserFaultKind
from tests.chat_fixtures import calls, completion, in_order, says
from tests.chat_server import asked
from tests.rollout_fixtures import FixedUser
from tests.unit.test_rollout_agent import CANCELLED, DONE, ORDER, observations, play

LOOK = ToolSchema("look", "Look.", {"type": "object", "properties": {"at": {"type": "string"}}})
TOOLS = [LOOK.openai()]
CALL = {"id": "c7", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services_module, "FIRST_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(runner_module, "_FIRST_PAUSE_S", 0.0)


def read(message: Json, finish: str | None = "stop", *, verbatim: bool = True, tools: Any = TOOLS, **more: Any) -> Any:
    body = {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": finish, **more}]}
    return read_completion(json.dumps(body).encode(), ChatRequest([], 0, 1.0, 9, tools=tools, verbatim=verbatim))


@pytest.mark.parametrize("finish", [None, *sorted(ENDED), "STOP", "EOS_TOKEN", *sorted(CUT), "MAX_TOKENS"])
def test_a_reply_that_ended_by_itself_or_by_length_is_a_turn(finish: str | None) -> None:
    found = read(says("Hello"), finish)
    assert (found.text, found.truncated) == ("Hello", str(finish).lower() in CUT)
    assert read(calls(("look", {})), finish).calls


@pytest.mark.parametrize("finish", ["abort", "error", "content_filter", "SAFETY", "cancelled", "insufficient_resource"])
@pytest.mark.parametrize("verbatim", [True, False])
def test_a_reply_that_ended_otherwise_is_none(finish: str, verbatim: bool) -> None:
    found = read(says("Half a"), finish, verbatim=verbatim, error={"message": "the worker died"})
    assert isinstance(found, RequestError)
    assert (found.kind, found.retry) == ("ended", True)
    assert repr(finish.lower()) in found.reason
    assert "the worker died" in found.reason


@pytest.mark.parametrize("finish", sorted(CALLED))
def test_calls_that_a_server_has_lost_are_no_turn(finish: str) -> None:
    assert read(says("I look."), finish).kind == "ended"
    assert read({"content": None, "tool_calls": []}, finish).kind == "ended"


CONTENTS: dict[str, tuple[Any, str, str | None]] = {
    "text": ("Hi", "Hi", None),
    "parts": ([{"type": "text", "text": "H"}, {"type": "output_text", "text": "i"}], "Hi", None),
    "strings": (["H", "i"], "Hi", None),
    "no type": ([{"text": "Hi"}], "Hi", None),
    "nested": ([{"type": "text", "text": {"value": "Hi"}}], "Hi", None),
    "thinking": ([{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "Hi"}],
                 "Hi", "hm"),
    "reasoning": ([{"type": "reasoning", "summary": [{"text": "hm"}]}, {"type": "text", "text": "Hi"}], "Hi", "hm"),
    "refusal": ([{"type": "refusal", "refusal": "I will not."}], "I will not.", None),
    "empty": ([], "", None),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTENTS)
def test_content_is_text_or_parts_of_text(case: str) -> None:
    content, text, reasoning = CONTENTS[case]
    found = read({"content": content})
    assert (found.text, found.reasoning) == (text, reasoning)


@pytest.mark.parametrize("content", [7, {"text": "x"}, [{"type": "image_url", "image_url": {"url": "x"}}], [7]])
def test_what_is_no_text_is_refused_with_its_type(content: Any) -> None:
    found = read({"content": content})
    assert isinstance(found, RequestError)
    assert found.kind == "unreadable"
    assert "content" in found.reason


@pytest.mark.parametrize(("opening", "closing"), THOUGHTS)
@pytest.mark.parametrize("verbatim", [True, False])
def test_reasoning_in_the_text_is_told_to_nobody(opening: str, closing: str, verbatim: bool) -> None:
    for text in (f"{opening}\nhm\n{closing}\n\nHi", f"{opening}hm{closing}Hi", f"hm\n{closing}\n\nHi"):
        if text.startswith("hm") and opening == "<|channel|>analysis<|message|>":
            continue
        found = read(says(text), verbatim=verbatim)
        assert found.text == "Hi"
        assert found.reasoning == ("hm" if verbatim else None)
        assert found.as_text == ("reasoning",)
    cut = read(says(f"{opening}hm, it"), "length")
    assert (cut.text, cut.reasoning) == ("", "hm, it")
    assert read(says("a < b > c")).text == "a < b > c"


def test_the_final_channel_is_what_is_said() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    assert (read(says(text)).text, read(says(text)).reasoning) == ("Hi", "hm")


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", "reasoning_text"])
def test_reasoning_beside_the_text_has_many_names(key: str) -> None:
    assert read(says("Hi", **{key: "hm"})).reasoning == "hm"
    assert read(says("Hi", **{key: {"content": [{"text": "hm"}]}})).reasoning == "hm"
    assert read(says("Hi", reasoning_details=[{"type": "reasoning.text", "text": "hm"}])).reasoning == "hm"


ARGUMENTS = {"at": "x"}
GRAMMARS = {
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>',
    "hermes, open": '<tool_call>{"name": "look", "arguments": {"at": "x"}}',
    "qwen3 coder": "<tool_call>\n<function=look>\n<parameter=at>\nx\n</parameter>\n</function>\n</tool_call>",
    "llama functions": '<function=look>{"at": "x"}</function>',
    "mistral": '[TOOL_CALLS][{"name": "look", "arguments": {"at": "x"}}]',
    "mistral, newer": '[TOOL_CALLS]look[ARGS]{"at": "x"}',
    "llama": '<|python_tag|>{"name": "look", "parameters": {"at": "x"}}',
    "granite": '<|tool_call|>[{"name": "look", "arguments": {"at": "x"}}]',
    "phi": '<|tool_calls|>[{"type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}]',
    "bare": '{"name": "look", "arguments": {"at": "x"}}',
    "bare, parameters": '{"name": "look", "parameters": {"at": "x"}}',
    "fenced": '```json\n{"name": "look", "arguments": {"at": "x"}}\n```',
    "list": '[{"name": "look", "arguments": {"at": "x"}}]',
}


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("verbatim", [True, False])
def test_calls_as_text_are_calls(grammar: str, verbatim: bool) -> None:
    found = read(says(GRAMMARS[grammar]), verbatim=verbatim)
    (call,) = found.calls
    assert (found.text, call.name, json.loads(call.arguments)) == ("", "look", ARGUMENTS)
    assert found.as_text == ("calls",)
    if GRAMMARS[grammar].startswith("<tool_call>\n"):
        two = read(says(f"I look.\n{GRAMMARS[grammar]}\n{GRAMMARS[grammar]}"))
        assert (two.text, [one.id for one in two.calls]) == ("I look.", ["call_0", "call_1"])


def test_only_calls_are_calls() -> None:
    for text in ('{"name": "else", "arguments": {}}', '{"at": "x"}', "Write <b>look</b>", "{", "[1]"):
        assert (read(says(text)).text, read(says(text)).calls) == (text, ())
    broken = read(says('One moment. <tool_call>{"name": "look", </tool_call>'))
    assert [(call.name, broken.text) for call in broken.calls] == [("", "One moment.")]
    assert read(says(GRAMMARS["hermes"]), tools=()).text == GRAMMARS["hermes"], "nobody offered tools"


def test_calls_of_other_forms() -> None:
    old = read({"content": None, "function_call": {"name": "look", "arguments": '{"at": "x"}'}}, "function_call")
    part = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "x"}}
    new = read({"content": [{"type": "text", "text": "Hm."}, part]}, "tool_use")
    as_object = read({"tool_calls": [CALL | {"function": {"name": "look", "arguments": {"at": "x"}}}]})
    empty = read({"tool_calls": [CALL | {"function": {"name": "look", "arguments": None}}]})
    for found, arguments in ((old, ARGUMENTS), (new, ARGUMENTS), (as_object, ARGUMENTS), (empty, {})):
        assert [json.loads(call.arguments) for call in found.calls] == [arguments]
    assert (new.text, new.calls[0].id) == ("Hm.", "t1")


def test_a_refusal_is_the_policys_words_and_no_users() -> None:
    refusal = {"content": None, "refusal": "I cannot help with that."}
    assert read(refusal).text == "I cannot help with that."
    found = read(refusal, verbatim=False, tools=())
    assert (found.kind, found.fault) == ("rejected", UserFaultKind.SPEAKS_AS_AGENT)


FAILED = {"message": "upstream overloaded", "code": 502}
HALF = [{"message": says("Half a"), "finish_reason": "stop"}]


@pytest.mark.parametrize(
    ("body", "status", "retry"),
    [
        ({"error": FAILED}, 502, True),
        ({"error": FAILED | {"code": "502"}, "choices": HALF}, 502, True),
        ({"error": "model requires more system memory"}, 500, True),
        ({"error": "the prompt is too long"}, 500, False),
        ({"object": "error", "message": "maximum context length is 10", "code": 40303}, 500, False),
    ],
)
def test_an_error_with_status_200_is_an_error(body: Json, status: int, retry: bool) -> None:
    found = read_completion(json.dumps(body).encode(), ChatRequest([], 0, 1.0, 9))
    assert isinstance(found, RequestError)
    assert (found.kind, found.status, found.retry) == ("server", status, retry)
    assert read_completion(json.dumps({"error": None, "choices": HALF}).encode(), ChatRequest([], 0, 1.0, 9)).text


@pytest.mark.parametrize("finish", ["stop", None])
def test_a_choice_with_an_error_is_no_turn(finish: str | None) -> None:
    assert read(says("Half a"), finish, error=FAILED).kind == "ended"


FILTERED = ["content_filter", "refusal", "SAFETY", "function_call_filter: MALFORMED_FUNCTION_CALL", "sensitive content"]


@pytest.mark.parametrize("finish", FILTERED)
def test_an_end_that_the_policys_own_words_brought_about_is_its_own(finish: str) -> None:
    assert (read(says("Half a"), finish).blame, read(says("Half a"), finish).retry) == (Blame.POLICY, True)
    assert read(says("Half a"), "abort").blame is Blame.PASSING


async def test_a_filter_that_ends_every_reply_is_scored() -> None:
    def filtered(_: Json) -> web.Response:
        return completion(says(""), finish="content_filter")

    result, server = await play(in_order(calls(CANCELLED), filtered(DONE), filtered(DONE)), endpoint={"max_retries": 1})
    assert (result.outcome, len(server.requests)) == (Outcome.MALFORMED, 3)


def test_a_byte_order_mark_and_a_call_without_a_name_are_read() -> None:
    body = {"choices": [{"message": {"tool_calls": [CALL | {"function": {"arguments": "{}"}}]}}]}
    found = read_completion(b"\xef\xbb\xbf" + json.dumps(body).encode(), ChatRequest([], 0, 1.0, 9, verbatim=True))
    assert isinstance(found, Completion)
    assert [call.name for call in found.calls] == [""]


# ---- over HTTP


SIGNED = CALL | {"extra_content": {"google": {"thought_signature": "s1"}}, "index": 0}
EXTRAS = {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}], "provider": {"a": [1, None]}}


async def test_a_message_goes_back_as_it_came() -> None:
    function = {"name": "get_order", "arguments": f'{{"order":   "{ORDER}"}}', "strict": True}
    first = {"role": "assistant", "content": None, "tool_calls": [SIGNED | {"function": function}], **EXTRAS}
    parts = {"role": "assistant", "content": [{"type": "text", "text": "Shall I?", "signature": "s2"}]}
    result, server = await play(in_order(first, parts, calls(CANCELLED), DONE), user=FixedUser("yes", "bye"))
    assert result.outcome is Outcome.USER_STOP
    sent = server.requests[-1]["messages"]
    assert [sent[2], sent[4]] == [first, parts]
    assert sent[3]["tool_call_id"] == SIGNED["id"]


async def test_a_policy_without_a_parser_plays_and_its_server_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    look = f'<tool_call>{{"name": "get_order", "arguments": {{"order": "{ORDER}"}}}}</tool_call>'
    cancel = f'hm</think><tool_call>{{"name": "cancel_order", "arguments": {{"order": "{ORDER}"}}}}</tool_call>'
    with caplog.at_level(logging.WARNING):
        result, server = await play(in_order(says(look), says(look), says(cancel), DONE))
    assert result.evaluation.success
    assert len(observations(result)) == 3
    assert [m["content"] for m in server.requests[-1]["messages"][2::2]][:2] == [look, look]
    told = [record.getMessage() for record in caplog.records]
    assert sum("--tool-call-parser" in one for one in told) == sum("--reasoning-parser" in one for one in told) == 1


async def test_a_half_reply_is_requested_again_and_then_a_fault_that_breaks_no_endpoint() -> None:
    half = completion(says("Done, ord"), finish="abort")
    result, server = await play(in_order(calls(CANCELLED), half, DONE), endpoint={"max_retries": 1})
    assert (result.evaluation.success, len(server.requests)) == (True, 3)
    with pytest.raises(EngineError, match="finish_reason 'abort'") as met:
        await play(lambda body: completion(says("Done, ord"), finish="abort"), endpoint={"breaker_faults": 1})
    assert met.value.passing

    async def broken(_: web.Request) -> web.StreamResponse:
        return completion(says("I wo"), finish="error")

    async with asked(broken, max_retries=1) as (server, client):
        for number in (1, 2):
            with pytest.raises(UserFault, match="finish_reason 'error'"):
                await LlmUser(client, "You are Ada.", number).open()
        assert len(server.received) == 4, "no breaker has opened"
    async with asked(broken, role="judge", max_retries=0) as (_, client):
        with pytest.raises(JudgeFault):
            await Judge(client).holds("It is so.", seed=1)


async def test_a_status_is_about_its_request_and_not_about_the_configuration() -> None:
    def refused() -> web.Response:
        return web.json_response({"error": {"message": "blocked by the firewall"}}, status=403)

    with pytest.raises(EngineError, match="firewall"):
        await play(in_order(calls(CANCELLED), refused()))
    with pytest.raises(ConfigError):
        await play(in_order(refused()))


async def test_a_prompt_that_a_filter_refuses_is_the_policys_doing() -> None:
    filtered = web.json_response({"error": {"message": "filtered", "code": "content_filter"}}, status=400)
    result, server = await play(in_order(calls(CANCELLED), filtered), endpoint={"max_retries": 3})
    assert (result.outcome, len(server.requests)) == (Outcome.MALFORMED, 2)


@pytest.mark.parametrize("said", [{"code": "content_filter", "message": "x"}, {"message": "the prompt is too long"}])
async def test_what_users_and_judges_cannot_be_asked_because_of_the_policy_is_its_doing(said: Json) -> None:
    async def refuses(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": said}, status=400)

    async def is_down(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "x"}}, status=503)

    for handler, by_policy in ((refuses, True), (is_down, False)):
        async with asked(handler, max_retries=0) as (_, client):
            with pytest.raises(UserFault) as user:
                await LlmUser(client, "You are Ada.", 1).open()
        async with asked(handler, role="judge", max_retries=0) as (_, client):
            with pytest.raises(JudgeFault) as judge:
                await Judge(client).holds("It is so.", seed=1)
        assert (user.value.by_policy, judge.value.by_policy) == (by_policy, by_policy)


class Phone:
    """A tool of the user's."""

    def __init__(self) -> None:
        self.called: list[Json] = []

    def schemas(self) -> list[ToolSchema]:
        return [LOOK]

    async def call(self, name: str, arguments: Json) -> ToolResult:
        self.called.append(arguments)
        return ToolResult("4 bars")


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ("It shows four bars.", "Let me see.\nIt shows four bars."),
        ("", "Let me see."),
        (STOP_SIGNAL, f"Let me see.\n{STOP_SIGNAL}"),
    ],
)
async def test_what_a_user_says_beside_its_own_call_reaches_the_agent(after: str, told: str) -> None:
    script = [
        lambda request: completion(says("Hello, my phone is slow.")),
        lambda request: completion({"content": "Let me see.", "tool_calls": [SIGNED]}),
        lambda request: completion(says(after)),
        lambda request: completion(says("Thanks.")),
    ]

    def step(index: int) -> Any:
        async def handler(request: web.Request) -> web.StreamResponse:
            return script[index](request)

        return handler

    async with asked(*map(step, range(4)), max_retries=0) as (server, client):
        user, phone = LlmUser(client, "You are Ada.", 1), Phone()
        user.take_tools(phone)
        await user.open()
        reply = await user.reply("What does it show?")
        assert (reply.text, reply.stop) == (told, STOP_SIGNAL in told)
        assert phone.called == [ARGUMENTS]
        await user.reply("Good.")
        sent = server.received[-1]["messages"]
        (acted,) = [message for message in sent if message.get("tool_calls")]
        assert acted == {"role": "assistant", "content": "Let me see.", "tool_calls": [SIGNED]}


async def test_a_judge_reads_parts_and_skips_reasoning() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        text = 'I {think}</think>{"reason": "r", "holds": true}'
        return completion({"content": [{"type": "text", "text": text}]})

    async with asked(handler, role="judge", max_retries=0) as (_, client):
        assert await Judge(client).holds("It is so.", seed=1)


def test_a_completion_survives_the_cache() -> None:
    from dataclasses import asdict

    found = read({"content": "x", "tool_calls": [SIGNED], **EXTRAS})
    assert Completion.of(json.loads(json.dumps(asdict(found)))) == found
