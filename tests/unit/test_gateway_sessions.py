"""A session's streams: which requests continue them, and that no sampled token is lost, trained twice or rendered anew.

The engine is a stand-in that says what it is told; chat families and tokenizers are real. Not covered: HTTP
(test_gateway_http.py), whole episodes (test_gateway_episodes.py), what libraries send (test_gateway_libraries.py).
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import numpy as np
import pytest

from mua.config.rollout import AgentConfig
from mua.rollout.gateway.chat_calls import ChatCall, Refused, ServedTurn, chat_call
from mua.rollout.gateway.session import GatewaySession, add_cut, same_message
from mua.tokens.conversation import Conversation
from mua.tokens.parsing import AssistantTurn
from mua.types import Generation, Int32Array, Json, Outcome, Provenance, ToolSchema
from tests.rollout_fixtures import call, sampled_ids
from tests.tokens_fixtures import chat_family, generation

FAMILY = chat_family("qwen3", False)
TOOL = ToolSchema("find", "Finds.", {"type": "object", "properties": {"key": {"type": "string"}}})
SYSTEM = {"role": "system", "content": "Help."}
ASK = {"role": "user", "content": "Where is 12?"}
BEGIN = [SYSTEM, ASK]


class Desk:
    """A session whose policy says ``texts`` in turn, or numbers; remembers what the engine was given and gave."""

    def __init__(self, *texts: str, show_tools: bool = True, concurrency: int = 4, family: Any = FAMILY) -> None:
        self.texts = list(texts)
        self.family = family
        self.asked: list[tuple[Int32Array, Int32Array]] = []
        self.turns: list[AssistantTurn] = []
        self.seeds: list[tuple[int | str, ...]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        limits = AgentConfig(command=["true"], concurrency=concurrency)
        self.session = GatewaySession(family, self.ask, self, limits, show_tools=show_tools)

    async def ask(self, talk: Conversation, call: ChatCall, seed: Any, number: Any) -> tuple[AssistantTurn, Generation]:
        prompt, said = talk.prompt_ids(), self.texts.pop(0) if self.texts else f"say {len(self.asked)}"
        self.seeds.append(seed)
        place = len(self.asked)
        self.asked.append((prompt, ids := sampled_ids(self.family, said)))
        await self.gate.wait()
        turn, given = add_cut(talk, generation(ids), call.stop, number())
        self.asked[place] = prompt, given.ids
        return turn, given

    async def say(self, *messages: Json, retried: bool = False, heard: bool = True, **body: Any) -> ServedTurn:
        served = await self.session.answer(chat(*messages, **body), retried=retried)
        if heard:
            self.session.received(served)
        return served

    def may_ask(self) -> Outcome | None:
        return None

    def turned(self, turn: AssistantTurn, call: ChatCall, served: ServedTurn) -> None:
        self.turns.append(turn)

    def ended(self, outcome: Outcome) -> None:
        raise AssertionError(outcome)

    def failed(self, fault: Exception) -> None:
        raise fault

    def check(self) -> None:
        """Every turn is in exactly one segment with loss, behind exactly what the engine was given."""
        found: dict[bytes, int] = {}
        for segment in self.session.segments():
            mask = segment.loss_mask
            for turn in np.unique(segment.turn[mask]):
                at = np.flatnonzero(mask & (segment.turn == turn))
                assert (np.diff(at) == 1).all()
                seen = segment.ids[: at[0]].tobytes() + b"|" + segment.ids[at].tobytes()
                found[seen] = found.get(seen, 0) + 1
            assert (segment.version[~mask] == -1).all()
        wanted: dict[bytes, int] = {}
        for prompt, ids in self.asked:
            seen = prompt.tobytes() + b"|" + ids.tobytes()
            wanted[seen] = wanted.get(seen, 0) + 1
        assert found == wanted


def chat(*messages: Json, tools: tuple[ToolSchema, ...] = (TOOL,), **body: Any) -> ChatCall:
    sent = {"messages": messages, "tools": [tool.openai() for tool in tools] or None, **body}
    raw = json.dumps(sent).encode()
    return chat_call(json.loads(raw), raw, "override")


def copied(turn: ServedTurn, **changes: Any) -> Json:
    """The assistant's message as a library sends it back: other ids, other spelling, null for empty."""
    message = {**turn.message, "content": turn.message["content"] or None, **changes}
    message.pop("reasoning_content", None)
    if "tool_calls" in message:
        functions = [one["function"] for one in message["tool_calls"]]
        spelt = [json.dumps(json.loads(one["arguments"]), indent=1) for one in functions]
        message["tool_calls"] = [
            {"id": f"other{i}", "type": "function", "function": {"name": f["name"], "arguments": a}}
            for i, (f, a) in enumerate(zip(functions, spelt, strict=True))
        ]
    return message


def result(text: str) -> Json:
    return {"role": "tool", "tool_call_id": "other0", "content": [{"type": "text", "text": text}]}


@pytest.mark.parametrize("name", ["qwen3", "qwen2.5"])
async def test_a_history_that_goes_on_is_appended_as_in_a_built_in_episode(name: str) -> None:
    family = chat_family(name, False)
    texts = [f"I look.\n{call('find', key='a', other=[1, 2.5])}", "It is here. ", "Bye."]
    desk = Desk(*texts, family=family)
    first = await desk.say(*BEGIN)
    second = await desk.say(*BEGIN, one := copied(first), result("row"))
    more = [{"role": "user", "content": "Thanks"}]
    await desk.say(*BEGIN, one, result("row"), copied(second, content=" It is here."), *more)
    built = Conversation.begin(family, system="Help.", tools=[TOOL], user="Where is 12?")
    for text, answer in zip(texts, ("row", "Thanks", None), strict=True):
        built.prompt_ids()
        built.add_sampled(generation(sampled_ids(family, text)))
        if answer == "row":
            built.add_tool_results([answer])
        elif answer:
            built.add_user(answer)
    (mine,), (theirs,) = desk.session.segments(), built.segments()
    for field in ("ids", "provenance", "turn", "logprobs", "version"):
        np.testing.assert_array_equal(getattr(mine, field), getattr(theirs, field), err_msg=field)
    assert desk.session.counts["gateway/appended"] == 2
    assert desk.seeds == [(0,), (1,), (2,)]
    desk.check()


async def test_words_of_the_clients_own_start_a_segment_and_an_earlier_point_is_forked() -> None:
    desk = Desk("one", "two")
    first = await desk.say(*BEGIN)
    second = await desk.say(*BEGIN, copied(first), more := {"role": "user", "content": "go on"})
    edited = copied(second, content="two, says the client")
    third = await desk.say(*BEGIN, copied(first), more, edited, {"role": "user", "content": "and?"})
    other = {"role": "user", "content": "or rather"}
    fourth = await desk.say(*BEGIN, copied(first), other)
    assert [turn.placed for turn in (first, second, third, fourth)] == ["started", "appended", "rewritten", "forked"]
    linear, rewritten, forked = desk.session.segments()
    assert "two, says the client" in FAMILY.decode(rewritten.ids)
    assert rewritten.loss_mask.sum() == len(desk.asked[2][1])
    start = len(desk.asked[0][0]) + len(desk.asked[0][1])
    np.testing.assert_array_equal(forked.ids[:start], linear.ids[:start])
    assert set(forked.provenance[start - len(desk.asked[0][1]) : start].tolist()) == {Provenance.TEMPLATE}
    desk.check()


async def test_the_same_request_is_sampled_again_unless_it_is_a_retry() -> None:
    desk = Desk("one", "two", "three")
    first = await desk.say(*BEGIN)
    again = await desk.say(*BEGIN)
    assert (first.message["content"], again.message["content"]) == ("one", "two")
    desk.gate.clear()
    waiting = asyncio.create_task(desk.say(*BEGIN, copied(again), ASK))
    await asyncio.sleep(0)
    retry = asyncio.create_task(desk.say(*BEGIN, copied(again), ASK, retried=True))
    await asyncio.sleep(0)
    waiting.cancel()  # the client hung up
    desk.gate.set()
    third = await retry
    assert third is await desk.say(*BEGIN, copied(again), ASK, retried=True)
    assert len(desk.asked) == 3
    assert len({*desk.seeds}) == 3
    assert desk.session.counts["gateway/retried"] == 2
    desk.check()


async def test_other_tools_start_a_segment_where_the_template_shows_them() -> None:
    for show, placed in ((True, "rewritten"), (False, "appended")):
        desk = Desk("one", show_tools=show)
        first = await desk.say(*BEGIN)
        handed = await desk.say(*BEGIN, copied(first), ASK, tools=(TOOL, ToolSchema("more", "", {})))
        assert handed.placed == placed
        desk.check()


async def test_instructions_in_the_middle_and_calls_as_text() -> None:
    desk = Desk(call("find", key="it's"), "two", call("find", key="b"))
    await desk.say(*BEGIN)
    text = "Calling tools:\n[{'id': '7', 'function': {'name': 'find', 'arguments': {'key': \"it's\"}}}]"
    told = [{"role": "assistant", "content": text}, {"role": "user", "content": "Observation:\nrow"}]
    second = await desk.say(*BEGIN, *told)
    late = {"role": "developer", "content": "Be brief."}
    third = await desk.say(*BEGIN, *told, copied(second), late, ASK)
    wrong = {"role": "assistant", "content": "Calling tools: find a"}
    fourth = await desk.say(*BEGIN, *told, copied(second), late, ASK, wrong, ASK)
    assert [turn.placed for turn in (second, third, fourth)] == ["appended", "appended", "rewritten"]
    linear = FAMILY.decode(desk.session.segments()[0].ids)
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhere is 12?" in linear
    desk.check()


async def test_parallel_requests_have_streams_of_their_own() -> None:
    desk = Desk(concurrency=2)
    first = await desk.say(*BEGIN)
    desk.gate.clear()
    tasks = [asyncio.create_task(desk.say(*BEGIN, copied(first), {"role": "user", "content": w})) for w in "abc"]
    await asyncio.sleep(0.01)
    assert len(desk.asked) == 3, "more than agent.concurrency are sampled at once"
    desk.gate.set()
    placed = [(await task).placed for task in tasks]
    assert placed == ["appended", "forked", "forked"]
    assert sorted(t.turn[t.loss_mask].max() for t in desk.session.segments()) == [1, 2, 3]
    desk.check()


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("seed", range(3))
async def test_whatever_clients_continue_every_turn_is_trained_once_behind_what_the_engine_saw(
    seed: int, thinking: bool
) -> None:
    draw = random.Random(seed)
    family = chat_family("qwen3", thinking)
    desk = Desk(family=family)
    histories: list[list[Json]] = [[*BEGIN]]
    for step in range(40):
        history = draw.choice(histories[-4:])
        kind = draw.random()
        thoughts = "<think>\nhm\n</think>\n\n" if thinking else ""
        desk.texts = [thoughts + (call("find", key=f"k{step}") if kind < 0.5 else f"words {step}")]
        turn = await desk.say(*history)
        mine = copied(turn, **({"content": f"edited {step}"} if draw.random() < 0.1 else {}))
        after = [result(f"r{step}")] if "tool_calls" in mine and draw.random() < 0.8 else []
        after += [{"role": "user", "content": f"u{step}"}] if not after or draw.random() < 0.3 else []
        after += [{"role": "system", "content": "now"}] if draw.random() < 0.1 else []
        histories.append([*history, mine, *after])
    assert desk.session.counts["gateway/forked"]
    assert desk.session.counts["gateway/appended"]
    assert desk.session.turns == 40
    desk.check()


async def test_sampling_stays_the_runs_and_what_would_change_it_is_refused() -> None:
    desk = Desk("Observation: no", f"I call.\n{call('find', key='a')}")
    cut = await desk.say(*BEGIN, stop=["Observation:"], temperature=0.1, max_completion_tokens=5)
    assert (cut.message["content"], cut.finish) == ("", "stop")
    assert desk.session.counts["gateway/overridden"] == 1
    none = await desk.say(*BEGIN, copied(cut), ASK, tool_choice="none")
    assert "<tool_call>" in none.message["content"]
    assert (await desk.say(*BEGIN, copied(cut), ASK, copied(none), ASK)).placed == "appended"
    for wrong in (
        {"n": 2}, {"logit_bias": {"5": 1}}, {"response_format": {"type": "json_object"}}, {"max_tokens": 0},
        {"stop": [""]}, {"tool_choice": "often"}, {"messages": []}, {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [*BEGIN, {"role": "assistant", "content": "I"}]}, {"functions": [{"name": "f"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
    ):  # fmt: skip
        with pytest.raises(Refused) as refused:
            chat(*BEGIN, **wrong)
        assert refused.value.status == 400
    with pytest.raises(Refused, match=r"agent\.sampling"):
        chat_call({"messages": BEGIN, "temperature": 0.5}, b"", "refuse")
    desk.check()


@pytest.mark.parametrize(
    ("said", "stop", "told"),
    [
        ("One.</code> And so on, for long.", "</code>", "One."),
        ("Observation: no", "Observation:", ""),
        ("Grüße 🙂STOP🙂 behind", "STOP", "Grüße 🙂"),
        (f"I call. STOP\n{call('find', key='a')}", "STOP", "I call. "),
    ],
)
async def test_what_stands_behind_a_stop_string_was_never_said(said: str, stop: str, told: str) -> None:
    desk = Desk(said, "two")
    first = await desk.say(*BEGIN, stop=["never", stop])
    assert (first.message, first.finish) == ({"role": "assistant", "content": told}, "stop")
    assert (await desk.say(*BEGIN, copied(first), ASK)).placed == "appended"
    (segment,) = desk.session.segments()
    text = FAMILY.decode(segment.ids).partition("Where is 12?")[2]
    assert text.count(said[: said.index(stop) + len(stop)]) == 1
    assert said[-5:] not in text
    desk.check()


async def test_a_stop_string_in_a_call_or_in_reasoning_stops_nothing() -> None:
    family = chat_family("qwen3", True)
    desk = Desk(f"<think>\nSTOP\n</think>\n\nI look.\n{call('find', key='STOP')}", family=family)
    turn = await desk.say(*BEGIN, stop="STOP")
    assert (turn.message["content"], turn.finish) == ("I look.", "tool_calls")
    desk.check()


async def test_a_turn_that_nobody_received_is_not_trained_and_is_counted() -> None:
    desk = Desk("one", "two", "three")
    await desk.say(*BEGIN, heard=False)
    second = await desk.say(*BEGIN)
    third = await desk.say(*BEGIN, copied(second), ASK, heard=False)
    trained = [np.unique(s.turn[s.loss_mask]).tolist() for s in desk.session.segments()]
    assert trained == [[1]]
    assert all((s.version[~s.loss_mask] == -1).all() for s in desk.session.segments())
    # Whoever goes on from a turn has got it, however.
    await desk.say(*BEGIN, copied(second), ASK, copied(third), ASK)
    assert [np.unique(s.turn[s.loss_mask]).tolist() for s in desk.session.segments()] == [[1, 2, 3]]
    await desk.session.close()
    assert desk.session.counts["gateway/unheard"] == 1


def code_agent(turn: ServedTurn, observed: str, closing: str = "</code>") -> list[Json]:
    """What smolagents' CodeAgent makes of a turn: the tag that the stop string took, the code as a call, the result."""
    code = turn.message["content"].rpartition("<code>")[2].strip()
    calls = [{"id": "call_1", "type": "function", "function": {"name": "python_interpreter", "arguments": code}}]
    told = f"{turn.message['content'].strip()}{closing}\nCalling tools:\n{calls}"
    return [{"role": "assistant", "content": told}, {"role": "user", "content": f"Observation:\n{observed}"}]


async def test_a_code_agent_extends_its_context() -> None:
    texts = [f"Thought: number {n}.\n<code>\nx = look({n}, 'it\\'s')\nprint(x)\n</code>" for n in range(4)]
    desk, history = Desk(*texts), [*BEGIN]
    for number in range(4):
        turn = await desk.say(*history, stop=["Observation:", "Calling tools:", "</code>"])
        assert turn.placed == ("appended" if number else "started")
        history += code_agent(turn, f"row {number}", closing="</code>" if number % 2 else "\n</code>")
    (segment,) = desk.session.segments()
    assert sum(len(ids) for _, ids in desk.asked) == segment.loss_mask.sum()
    assert "Calling tools" not in FAMILY.decode(segment.ids)
    desk.check()
    forged = code_agent(turn, "row")
    forged[0]["content"] = "other(x)".join(forged[0]["content"].rsplit("print(x)", 1))
    assert (await desk.say(*history[:-2], *forged)).placed == "rewritten", "words of its own"


async def test_an_id_is_used_once() -> None:
    desk, done = Desk(), list[str]()

    async def work(name: str) -> Json:
        done.append(name)
        await asyncio.sleep(0)
        return {"did": name}

    once = desk.session.do_once
    both = await asyncio.gather(once(("a", 1), {}, lambda: work("x")), once(("a", 1), {}, lambda: work("x")))
    assert both == [{"did": "x"}] * 2
    assert await once(("a", 1), {}, lambda: work("x")) == {"did": "x"}
    with pytest.raises(Refused, match="was used for another call"):
        await once(("a", 1), {"n": 1}, lambda: work("y"))
    await once(("b", 1), {}, lambda: work("z"))
    desk.session.forget("a")
    await once(("a", 1), {"n": 1}, lambda: work("y"))
    assert done == ["x", "z", "y"]


ODD_WISHES = {
    "temperature": 0.1, "top_p": 0.5, "seed": 7, "parallel_tool_calls": False, "stop": ["x"], "reasoning_effort": "low",
    "tool_choice": "required", "repetition_penalty": 1.1, "service_tier": "flex",
}  # fmt: skip


@pytest.mark.parametrize("key", ODD_WISHES)
def test_a_wish_that_is_not_granted_is_told(key: str) -> None:
    assert chat(*BEGIN, **{key: ODD_WISHES[key]}).overridden == (key,)


def test_wishes_that_are_granted_are_none() -> None:
    granted = {"parallel_tool_calls": True, "tool_choice": "none", "max_tokens": 5, "user": "me", "stop": [], "n": 1}
    assert chat(*BEGIN, stream=True, stream_options={"include_usage": True}, metadata={}, **granted).overridden == ()


def test_forms_are_looked_through_and_words_are_not() -> None:
    held = {"role": "assistant", "content": "x", "tool_calls": [_function("f", '{"a": 1, "b": "é"}')]}
    same = [
        {
            "role": "assistant",
            "content": "<think>\n\nhm</think>\n x ",
            "tool_calls": [_function("f", '{"b":"\\u00e9","a":1}')],
        },
        {"role": "assistant", "content": "x\nCalling tools: f {'a': 1, 'b': 'é'}"},
    ]
    other = [
        {"role": "assistant", "content": "x", "tool_calls": [_function("f", '{"a": 2, "b": "é"}')]},
        {"role": "assistant", "content": "x", "tool_calls": [_function("g", '{"a": 1, "b": "é"}')]},
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": "y", "tool_calls": held["tool_calls"]},
        {"role": "user", "content": "x"},
    ]
    assert all(same_message(held, sent) for sent in same)
    assert not any(same_message(held, sent) for sent in other)


def _function(name: str, arguments: str) -> Json:
    return {"id": "", "type": "function", "function": {"name": name, "arguments": arguments}}
