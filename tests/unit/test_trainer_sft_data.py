"""Supervised data: what is read in which form, what carries loss, what is refused and where, what is held out, batches.

Does not cover how a demonstration becomes tokens (test_tokens_conversation.py) or the training step itself.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mua.config.schema import ExperimentConfig
from mua.tokens.chat_family import ChatFamily
from mua.trainer.conversations import RecordReader, batch_members, hold_out, load_conversations, load_sets
from mua.types import Segment
from mua.utils.errors import ConfigError
from tests.tokens_fixtures import chat_family, runs

FAMILY = chat_family("qwen3", False)
USER = {"role": "user", "content": "hi"}
AGENT = {"role": "assistant", "content": "hello"}
BYE = {"role": "assistant", "content": "bye"}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Finds.", "parameters": {"type": "object"}}}
CALL = {"name": "look_up", "arguments": {"key": "W1", "all": True}}


def config_of(path: Path, *, max_length: int = 4096, **sft: object) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "name": "x",
            "output": "x",
            "model": {"path": "x", "max_length": max_length},
            "environment": {"name": "help_desk"},
            "rollout": {"max_tokens": 1},
            "trainer": {"steps": 1},
            "sft": {"data": str(path), **sft},
        }
    )


def loaded(path: Path, family: ChatFamily = FAMILY, key: str = "sft.data", **changes: Any) -> list[list[Segment]]:
    return load_conversations(path, family, config_of(path, **changes), key=key)


def read(path: Path, lines: Sequence[object], **changes: Any) -> list[list[Segment]]:
    """The conversations of a file that holds ``lines``; ``model.max_length`` and keys of ``sft`` may be changed."""
    texts = (line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return loaded(path, **changes)


def record(*messages: object, **more: object) -> dict[str, object]:
    return {"messages": list(messages), **more}


def shared(*pairs: tuple[str, object], **more: object) -> dict[str, object]:
    return {"conversations": [{"from": who, "value": value} for who, value in pairs], **more}


def texts(conversations: Sequence[Sequence[Segment]], family: ChatFamily = FAMILY) -> list[str]:
    return ["".join(family.decode(segment.ids) for segment in segments) for segments in conversations]


def trained(segments: Sequence[Segment], family: ChatFamily = FAMILY) -> list[str]:
    found = [text for segment in segments for who, text in runs(family, segment) if who == "SAMPLED"]
    return [text.removesuffix("<|im_end|>") for text in found]


# ---- forms


OPENAI = record(
    {"role": "system", "content": "Help."},
    USER,
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "found"},
    AGENT,
    USER,
    {"role": "assistant", "content": "again", "tool_calls": [{"function": CALL}, {"function": CALL}]},
    {"role": "tool", "content": "one"},
    {"role": "tool", "content": "two"},
    BYE,
    tools=[TOOL],
)
TAGGED = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
ALIKE = {
    "LLaMA-Factory": shared(
        ("human", "hi"), ("function_call", json.dumps(CALL)), ("observation", "found"), ("gpt", "hello"),
        ("human", "hi"), ("gpt", "again"), ("function_call", json.dumps([CALL, CALL])), ("observation", "one"),
        ("observation", "two"), ("gpt", "bye"), system="Help.", tools=json.dumps([TOOL["function"]]),
    ),
    "calls inside the text, as UserRL's and Hermes' data have them": shared(
        ("system", "Help."), ("human", "hi"), ("gpt", f"<think>\n\n</think>\n\n{TAGGED}"),
        ("tool", "<tool_response>\nfound\n</tool_response>"), ("gpt", "hello"), ("human", "hi"),
        ("gpt", f"again\n{TAGGED}\n{TAGGED}"),
        ("tool", "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"), ("gpt", "bye"),
        tools=[TOOL],
    ),
    "tables of strings, as MUA-RL's cold start": {
        "messages": json.dumps(OPENAI["messages"]), "tools": json.dumps([{"function": [TOOL["function"]]}])
    },
    "ms-swift": {
        "messages": [
            {"role": "system", "content": "Help."}, USER, {"role": "tool_call", "content": json.dumps(CALL)},
            {"role": "tool_response", "content": "found"}, AGENT, USER, {**AGENT, "content": "again"},
            {"role": "tool_call", "content": json.dumps(CALL)}, {"role": "tool_call", "content": json.dumps(CALL)},
            {"role": "tool_response", "content": "one"}, {"role": "tool_response", "content": "two"}, BYE,
        ],
        "tools": [TOOL],
    },
    "Anthropic's and MCP's names of a schema": OPENAI | {
        "tools": [{"name": "look_up", "description": "Finds.", "input_schema": {"type": "object"}}]
    },
}  # fmt: skip


@pytest.mark.parametrize("train_on", ["all", "last"])
@pytest.mark.parametrize("form", ALIKE)
def test_every_form_of_a_conversation_gives_the_same_tokens_and_mask(tmp_path: Path, form: str, train_on: str) -> None:
    plain, other = read(tmp_path / "x.jsonl", [OPENAI, ALIKE[form]], train_on=train_on)
    assert texts([plain]) == texts([other])
    said = [TAGGED, "hello", f"again\n{TAGGED}\n{TAGGED}", "bye"]
    assert trained(other) == trained(plain) == (said if train_on == "all" else said[-1:])
    assert json.dumps(TOOL) in texts([other])[0]


PARTS = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
SAME = [
    {"messages": [{"role": "user", "content": PARTS}, {**AGENT, "content": [{"type": "text", "value": "hello"}]}]},
    {"messages": [{"role": "user", "content": ["hi"]}, AGENT]},
    {"prompt": "hi", "completion": "hello"},
    {"prompt": "hi", "response": "hello", "completion": None},
    {"prompt": [USER], "completion": [AGENT]},
    {"prompt": [USER], "completion": AGENT},
    {"instruction": "hi", "input": "", "output": "hello"},
    {"conversations": [USER, AGENT]},
    shared(("User", "hi"), ("Assistant", "hello"), mask="User"),
    {"messages": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
    {"messages": [USER, {**AGENT, "content": ["hello"], "tool_calls": []}], "tools": []},
    {"messages": [{**USER, "tool_calls": None}, {**AGENT, "content": "<think>\n\n</think>\n\nhello"}], "tools": None},
]


def test_what_people_have_gives_the_tokens_of_openais_form(tmp_path: Path) -> None:
    want, *found = read(tmp_path / "a.jsonl", [record(USER, AGENT), *SAME])
    assert texts(found) == texts([want]) * len(SAME)
    assert [trained(one) for one in found] == [["hello"]] * len(SAME)


def test_a_result_may_be_empty(tmp_path: Path) -> None:
    said = {"role": "assistant", "tool_calls": [{"function": CALL}]}
    lines = [record(USER, said, {"role": "tool", "content": empty}, AGENT) for empty in ("", [])]
    lines.append(shared(("human", "hi"), ("function_call", json.dumps(CALL)), ("observation", ""), ("gpt", "hello")))
    assert len(set(texts(read(tmp_path / "x.jsonl", lines)))) == 1


def test_a_developer_is_the_system_and_joins_it(tmp_path: Path) -> None:
    kind, brief = {"role": "system", "content": "Be kind."}, {"role": "developer", "content": "Be brief."}
    one = {"role": "system", "content": "Be kind.\n\nBe brief."}
    found = texts(read(tmp_path / "a.jsonl", [record(kind, brief, USER, AGENT), record(one, USER, AGENT)]))
    assert found[0] == found[1]
    with pytest.raises(ConfigError, match=r"messages\[2\]"):
        read(tmp_path / "e.jsonl", [record(USER, AGENT, brief, USER, AGENT)])


def test_a_function_of_old_is_a_tool(tmp_path: Path) -> None:
    call = {"name": "look_up", "arguments": '{"key": 1}'}
    old = [USER, {"role": "assistant", "content": None, "function_call": call},
           {"role": "function", "content": "one"}, AGENT]  # fmt: skip
    new = [USER, {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
           {"role": "tool", "content": "one"}, AGENT]  # fmt: skip
    was, now = read(tmp_path / "a.jsonl", [record(*old, functions=[TOOL["function"]]), record(*new, tools=[TOOL])])
    assert texts([was]) == texts([now])


def test_results_follow_the_calls_that_they_name(tmp_path: Path) -> None:
    calls = [{"id": name, "type": "function", "function": CALL} for name in "ab"]
    said, first, second = {"role": "assistant", "tool_calls": calls}, *(
        {"role": "tool", "tool_call_id": name, "content": f"result {name}"} for name in "ab"
    )  # fmt: skip
    found = read(
        tmp_path / "a.jsonl", [record(USER, said, *order, AGENT) for order in ((first, second), (second, first))]
    )
    assert texts(found[:1]) == texts(found[1:])
    with pytest.raises(ConfigError, match="the call 'c'"):
        read(tmp_path / "b.jsonl", [record(USER, said, first, {**second, "tool_call_id": "c"}, AGENT)])


# ---- reasoning


REASONED = [
    *({**AGENT, name: "Why."} for name in ("reasoning_content", "reasoning", "thinking")),
    {**AGENT, "reasoning": "Why.", "reasoning_content": "Why."},
    {**AGENT, "content": "<think>\nWhy.\n</think>\n\nhello"},
    {
        **AGENT,
        "content": [{"type": "thinking", "thinking": "Why.", "signature": "x"}, {"type": "text", "text": "hello"}],
    },
    {**AGENT, "content": [{"type": "reasoning", "value": "Why."}, {"type": "text", "value": "hello"}]},
    {**AGENT, "reasoning_details": [{"type": "reasoning.text", "text": "Why."}]},
    {**AGENT, "thinking_blocks": [{"type": "thinking", "thinking": "Why."}]},
]


def test_reasoning_is_read_under_all_its_names(tmp_path: Path) -> None:
    family = chat_family("qwen3", True)
    lines = [record(USER, message) for message in REASONED]
    lines += [shared(("human", "hi"), ("gpt", "<think>\nWhy.\n</think>\n\nhello")),
              {"prompt": "hi", "completion": "hello", "reasoning": "Why."}]  # fmt: skip
    found = read(tmp_path / "x.jsonl", lines, family=family)
    assert [trained(one, family) for one in found] == [["<think>\nWhy.\n</think>\n\nhello"]] * len(lines)
    for line in lines:  # nor is it lost of a policy that does not reason
        with pytest.raises(ConfigError, match="reasoning_content"):
            read(tmp_path / "x.jsonl", [line])
    with pytest.raises(ConfigError, match="several places"):
        read(tmp_path / "x.jsonl", [record(USER, {**AGENT, "reasoning": "a", "thinking": "b"})], family=family)


# ---- what carries loss


def test_only_the_last_turn_carries_loss_if_asked(tmp_path: Path) -> None:
    (segments,) = read(tmp_path / "x.jsonl", [record(USER, AGENT, USER, BYE)], train_on="last")
    assert trained(segments) == ["bye"]
    (segments,) = read(tmp_path / "x.jsonl", [record(USER, AGENT, USER, BYE, mask_history=True)])
    assert trained(segments) == ["bye"]


EXCLUDED: list[dict[str, object]] = [
    {"weight": 0}, {"loss": 0}, {"loss": False}, {"loss_scale": 0.0}, {"loss_weight": 0.0}, {"loss_mask": 0},
    {"step_loss_mask": 0}, {"train": False}, {"training": False}, {"trainable": False}, {"masked": True},
]  # fmt: skip


@pytest.mark.parametrize("excluded", EXCLUDED, ids=lambda said: "-".join(said))
def test_a_turn_or_a_record_that_its_author_excluded_carries_no_loss(
    tmp_path: Path, excluded: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    (name,) = excluded
    kept = {name: type(excluded[name])(not excluded[name])}  # type: ignore[call-arg]
    lines = [
        record({**USER, **excluded}, {**AGENT, **excluded}, USER, {**BYE, **kept}),
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello", **excluded},
                           {"from": "human", "value": "hi"}, {"from": "gpt", "value": "bye", name: None}]},
        record(USER, AGENT, USER, BYE, **excluded),
        record(USER, AGENT, USER, BYE, **{name: [excluded[name], excluded[name], None, kept[name]]}),
        record(USER, AGENT, USER, BYE, **{name: [excluded[name], kept[name]]}),
        record(USER, {**AGENT, **excluded}),
        {"prompt": "hi", "completion": "hello", **excluded},
    ]  # fmt: skip
    for train_on in ("all", "last"):
        found = read(tmp_path / "x.jsonl", lines, train_on=train_on)
        assert [trained(one) for one in found] == [["bye"]] * 4
    assert "3 records carry no loss" in caplog.text
    for other in ("0", 0.5, 2):
        for line in (record(USER, {**AGENT, name: other}), record(USER, AGENT, **{name: other})):
            with pytest.raises(ConfigError, match=f":1: .*{name}"):
                read(tmp_path / "y.jsonl", [line])


def test_a_malformed_turn_may_stand_where_it_carries_no_loss(tmp_path: Path) -> None:
    wrong = [{**AGENT, "content": "<tool_call>{</tool_call>"}, {**AGENT, "content": ""},
             {**AGENT, "tool_calls": [{"function": {"name": "other", "arguments": {}}}]}]  # fmt: skip
    for turn in wrong:
        lines = [record(USER, {**turn, "loss": False}, USER, BYE, tools=[TOOL])]
        assert [trained(one) for one in read(tmp_path / "x.jsonl", lines)] == [["bye"]]
        with pytest.raises(ConfigError, match=r"messages\[1\]"):
            read(tmp_path / "x.jsonl", [record(USER, turn, USER, BYE, tools=[TOOL])])


def test_nothing_of_a_prompt_carries_loss(tmp_path: Path) -> None:
    earlier = [USER, {"role": "assistant", "content": "earlier"}, USER]
    (segments,) = read(tmp_path / "a.jsonl", [{"prompt": earlier, "completion": [AGENT]}])
    assert trained(segments) == ["hello"]


def test_an_agent_may_speak_first(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Help."}
    for family in (FAMILY, chat_family("qwen2.5", False), chat_family("qwen3", True)):
        for head in ([system], []):
            messages = [*head, AGENT, USER, BYE]
            (segments,) = read(tmp_path / "x.jsonl", [record(*messages)], family=family)
            said = [text.removeprefix("<think>\n\n</think>\n\n") for text in trained(segments, family)]
            assert said == ["hello", "bye"]
            empty = "<think>\n\n</think>\n\n"  # which the stream keeps, and templates leave out of earlier turns
            want = family.render(messages, [], generate=False).replace(empty, "").removesuffix("\n")
            assert texts([segments], family)[0].replace(empty, "") == want


# ---- keys


def test_keys_that_nobody_reads_are_told_once_with_their_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    call = {"index": 1, "id": "a", "type": "function", "function": {**CALL, "strict": True}}
    tool = {"type": "function", "function": {**TOOL["function"], "strict": True, "returns": {}}}
    lines = [
        record({**USER, "name": "Ann", "train": True}, {"role": "assistant", "tool_calls": [call], "annotations": []},
               {"role": "tool", "tool_call_id": "a", "name": "look_up", "content": "x"}, {**AGENT, "finish": "stop"},
               tools=[tool], id=7, label="34", chat_template_kwargs={"enable_thinking": False, "max_pixels": 3}),
        {"prompt": "hi", "completion": "hello", "id": 8, "messages_before": "x", "is_correct": False},
    ]  # fmt: skip
    assert len(read(tmp_path / "x.jsonl", lines)) == 2
    (line,) = caplog.messages
    told = dict(part.rsplit(" ", 1) for part in line.rpartition("occur: ")[2].split(", "))
    assert told == {
        "id": "(2)", "messages[].user.name": "(1)", "messages[].user.train": "(1)", "messages[].finish": "(1)",
        "messages[].tool.name": "(1)", "tool_calls[].index": "(1)", "tool_calls[].function.strict": "(1)",
        "tools[].function.strict": "(1)", "label": "(1)", "chat_template_kwargs.max_pixels": "(1)",
        "messages_before": "(1)", "is_correct": "(1)",
    }  # fmt: skip


REFUSED: list[tuple[dict[str, Any], str]] = [
    (record(USER, AGENT, USER, BYE, mask_history="false"), "mask_history"),
    (record(USER, AGENT, images=["a.png"]), "images"), (record(USER, {**AGENT, "audio": {"id": "x"}}), "audio"),
    (record(USER, AGENT, input_ids=[1, 2]), "input_ids"),
    (record(USER, AGENT, enable_thinking=True), "enable_thinking"),
    (record(USER, {**AGENT, "train_detail": [{"begin_offset": 0, "end_offset": 2, "train": False}]}), "train_detail"),
    (record(USER, AGENT, train_on_inputs=True), "train_on_inputs"), (record(USER, AGENT, loss_mask=[1]), ""),
    (record(USER, AGENT, USER, BYE, loss_mask=[1, 0, 1]), "loss_mask"),
    (record(USER, {**AGENT, "weight": 1, "loss": False}), "weight and loss"),
    (record(USER, {**AGENT, "loss": True}, loss=[0, 0]), "say two things"),
    (record(USER, {**AGENT, "content": [{"type": "text", "text": "x", "train": False}]}), "content[0]"),
    (record(USER, {**AGENT, "content": None, "refusal": "No."}), "refusal"),
    (record(USER, {**AGENT, "truncated": True}), "truncated"),
    (record(USER, {**AGENT, "tool_calls": [{"type": "custom", "custom": {}}]}), "custom"),
    (record(USER, {**AGENT, "tool_calls": [{"function": CALL}], "content": TAGGED}), "both"),
    (record(USER, AGENT, tools=[{"type": "web_search"}]), "tools"),
    # What a policy may not do, no demonstration does.
    (record(USER, {**AGENT, "content": None}), "messages[1]"),
    (record(USER, {**AGENT, "content": " \n"}), "messages[1]"),
    (record(USER, {**AGENT, "tool_calls": [{"name": "other", "arguments": {}}]}, tools=[TOOL]), "'other'"),
    (shared(("human", "hi"), ("function_call", '{"name": "look_up", "parameters": {}}'), tools=[TOOL]), "arguments"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "named"), [pair for pair in REFUSED if pair[1]], ids=lambda one: str(one)[:40])
def test_what_must_not_be_passed_over_is_refused(tmp_path: Path, line: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / "x.jsonl", [record(USER, AGENT), line])
    assert f"{tmp_path / 'x.jsonl'}:2: " in str(caught.value)
    assert named in str(caught.value)


TYPED = {"type": "function", "function": {"name": "look_up", "description": "", "parameters": {
    "type": "object", "required": ["key", "limit"],
    "properties": {"key": {"type": "string"}, "limit": {"type": ["integer", "null"]}, "where": {"type": "object"}},
}}}  # fmt: skip


def called(arguments: object) -> dict[str, object]:
    call = {"function": {"name": "look_up", "arguments": arguments}}
    said = {"role": "assistant", "tool_calls": [call]}
    return record(USER, said, {"role": "tool", "content": "x"}, AGENT, tools=[TYPED])


@pytest.mark.parametrize(
    "arguments", [{}, {"key": 1, "limit": 1}, {"key": None, "limit": 1}, {"key": "a", "limit": 0.5}]
)
def test_arguments_must_fit_the_schema(tmp_path: Path, arguments: object) -> None:
    with pytest.raises(ConfigError, match=r":1: .*messages\[1\]: .*look_up"):
        read(tmp_path / "x.jsonl", [called(arguments)])


def test_what_cannot_be_checked_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    odd = {**TOOL["function"], "parameters": {"type": "dict"}}
    said = {"role": "assistant", "tool_calls": [{"function": CALL}]}
    assert len(read(tmp_path / "x.jsonl", [record(USER, said), record(USER, said, tools=[odd])])) == 2
    assert "1 records have tool calls and list no tools" in caplog.text
    assert "the parameters of look_up are no JSON Schema" in caplog.text


# ---- one data set, several files


def test_one_data_set_gives_the_same_tokens_in_every_kind_of_file(tmp_path: Path) -> None:
    other = {"type": "function", "function": {"name": "search", "description": "Seeks.", "parameters": {
        "type": "object", "properties": {"query": {"type": "string", "default": "x"}}}}}  # fmt: skip
    search = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "search", "arguments": {"query": "a"}}}],
    }
    rows = [
        called({"key": "a", "limit": None}), called({"key": "b", "limit": 3, "where": {"day": {"from": 1}}}),
        called({"key": "c", "limit": 2, "where": {"day": {"to": 2}}}),
        record(USER, search, {"role": "tool", "content": "y"}, {**AGENT, "weight": 0}, USER, BYE, tools=[other, TYPED]),
    ]  # fmt: skip
    want = read(tmp_path / "plain.jsonl", rows)
    table = pyarrow.Table.from_pylist(rows)
    exported = table.to_pylist()
    assert exported[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["query"] is None
    read(tmp_path / "exported.jsonl", exported)
    for one in exported:  # written as OpenAI does, by somebody who had it from a table
        for message in one["messages"]:
            for call in message["tool_calls"] or ():
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    read(tmp_path / "text.jsonl", exported)
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    with pyarrow.ipc.new_file(str(tmp_path / "x.arrow"), table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(json.dumps({"version": 1, "data": rows}, indent=1).encode()))
    (tmp_path / "strings.jsonl").write_text(
        "\n\n".join(json.dumps({key: json.dumps(value) for key, value in row.items()}) for row in exported)
    )
    for name in ("exported.jsonl", "text.jsonl", "x.parquet", "x.arrow", "x.json.gz", "strings.jsonl"):
        found = loaded(tmp_path / name)
        assert texts(found) == texts(want), name
        assert [trained(one) for one in found] == [trained(one) for one in want], name
    assert '"arguments": {"key": "a", "limit": null}' in texts(want)[0]


def test_lines_arrays_and_wrapped_records_are_read_alike(tmp_path: Path) -> None:
    records = [OPENAI, ALIKE["LLaMA-Factory"], record(USER, AGENT)]
    lines, array = [json.dumps(one) for one in records], json.dumps(records, indent=2)
    want = texts(read(tmp_path / "x.jsonl", lines))
    path = tmp_path / "x.json"
    for text in (
        "\ufeff" + array, "\r\n".join(lines), "\n \n".join([*lines, "", "\t"]),
        "\n".join(json.dumps(one, indent=1) for one in records),
        f'{{"version": 2, "data": {array}}}', f'{{"train": {array}}}',
    ):  # fmt: skip
        path.write_bytes(text.encode())
        assert texts(loaded(path)) == want
        path.write_bytes(gzip.compress(text.encode()))
        assert texts(loaded(path)) == want


GOOD = json.dumps(record(USER, AGENT))


@pytest.mark.parametrize("beside", ["test", "tools", "system"])
def test_nothing_beside_wrapped_records_is_lost(tmp_path: Path, beside: str) -> None:
    more = {"test": [record(USER, BYE)], "tools": [TOOL], "system": "Help."}[beside]
    with pytest.raises(ConfigError, match=f":1: {beside} beside the records of data"):
        read(tmp_path / "x.json", [{"version": 1, "data": [record(USER, AGENT)], beside: more}])


def test_a_table_of_strings_has_messages_on_both_sides_of_a_prompt(tmp_path: Path) -> None:
    asked = {"prompt": [USER], "completion": [AGENT], "chat_template_kwargs": {"enable_thinking": None, "a": None}}
    as_text = {key: json.dumps(value) for key, value in asked.items()}
    plain = {"prompt": '[{"a": 1}]', "completion": "[1]"}
    found = read(tmp_path / "x.jsonl", [asked, as_text, plain])
    assert texts(found)[0] == texts(found)[1]
    assert [trained(one) for one in found] == [["hello"], ["hello"], ["[1]"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "holds no conversation"),
        (f"[\n{GOOD},\n\n  5\n]", r":4: not a conversation"),
        (f"[\n{GOOD}\n{GOOD}]", r":3: not a conversation"),
        (f"[\n{GOOD},\n{{]", r":3: not a conversation"),
        (f"[{GOOD}\n] \n{GOOD}", r":3: not a conversation"),
        (f"[{GOOD},", r":1: not a conversation"),
        (f"{GOOD}\n\n{GOOD} {GOOD}\n", r":3: not a conversation"),
        (f'{{"data": [\n{GOOD},\n{{"a": 1}}]}}', r":1, data\[1\]: not a conversation"),
    ],
)
def test_a_fault_in_a_file_has_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        loaded(path)


HUMAN = ("human", "hi")
WRONG: list[tuple[object, str]] = [  # and what is named beside file and line
    ("{", ""), ("[" * 100_000, "nested too deeply"), ("9" * 5000, "column 1"), ("[1]", "list"),
    ('{"messages": [], "messages": []}', "'messages'"), ('{"messages": "' + "[" * 5000 + '"}', '"messages"'),
    ('{"te\\nxt": 1}', "its keys are te\\nxt"), ('{"text": "hi"}', "its keys are text"),
    ({"chosen": [USER, AGENT], "rejected": []}, "chosen"),
    (record(), ""), (record(USER), ""),
    (record({"role": "tool", "content": "x"}, AGENT), ""), (record("hi"), '"messages"'),
    ({"messages": "hi"}, '"messages"'), ({"messages": {"role": "user"}}, '"messages"'),
    (record(USER, AGENT, tools=["look_up"]), '"tools"'), (record(USER, AGENT, tools={"look_up": 1}), '"tools"'),
    (record(USER, AGENT, tools=[{"function": {}}]), "'name'"),
    (record(USER, {"role": "x" * 5000}), "messages[1]"), (record(USER, {**AGENT, "content": 7}), "messages[1]"),
    (record(USER, {**AGENT, "tool_calls": ["x"]}), '"tool_calls"'),
    (record(USER, {**AGENT, "reasoning_content": "why"}), "messages[1]"),
    (record(USER, {"role": "tool", "content": "x"}, AGENT), "messages[1]"),
    (record(USER, {**AGENT, "content": "<tool_call>{}</tool_call>"}), "messages[1]"),
    ({"conversations": "hi"}, '"conversations"'), (shared(("bot", "hi")), "conversations[0]"),
    (shared(HUMAN, ("function_call", "{")), "conversations[1]"),
    (shared(HUMAN, ("function_call", "[]")), "conversations[1]"),
    (shared(HUMAN, ("gpt", "<tool_call>{</tool_call>")), "conversations[1]"),
    (shared(HUMAN, ("gpt", "a <think> b")), "messages[1]"), (shared(HUMAN, ("gpt", "a"), ("gpt", "b")), "messages[2]"),
    (shared(HUMAN, ("gpt", "a"), tools="look_up"), '"tools"'),
    ({"conversations": [*shared(HUMAN, ("gpt", "let me see"))["conversations"],  # type: ignore[misc]
                        {"from": "function_call", "value": json.dumps(CALL), "weight": 0}]}, "conversations[2]"),
    (record({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, AGENT), "content[0]"),
    (record({"role": "user", "content": [{"type": "text", "text": 3}]}, AGENT), "content[0]"),
    (record({"role": "user", "content": [None]}, AGENT), "content[0]"),
    ({"prompt": "hi"}, '"prompt"'), ({"prompt": 3, "completion": "x"}, '"prompt"'),
    ({"prompt": "hi", "completion": [USER]}, '"completion"'), ({"prompt": [1], "completion": [AGENT]}, '"prompt"'),
    ({"instruction": 3, "output": "x"}, '"instruction"'),
    ({"instruction": "a", "output": "b", "history": ["x"]}, '"history"'),
]  # fmt: skip


@pytest.mark.parametrize(("line", "named"), WRONG, ids=range(len(WRONG)))
def test_a_bad_line_is_one_error_line_with_file_and_number(tmp_path: Path, line: object, named: str) -> None:
    path = tmp_path / "x.jsonl"
    with pytest.raises(ConfigError) as caught:
        read(path, [record(USER, AGENT), line, record(USER, AGENT)])
    message = str(caught.value)
    assert message.startswith(f"{path}:2: not a conversation: ")
    assert named in message
    assert "\n" not in message
    assert len(message) < 1000


def test_a_conversation_that_is_too_long_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    fits = len(read(path, [record(USER, AGENT)])[0][0])
    assert len(read(path, [record(USER, AGENT)], max_length=fits + 9)) == 1
    with pytest.raises(ConfigError, match=rf"x\.jsonl:1: {fits} tokens exceed model\.max_length {fits - 1}; "):
        read(path, [record(USER, AGENT)], max_length=fits - 1)
    longer, shorter = record(USER, {**AGENT, "content": "hello " * 9}), record(USER, AGENT)
    (kept,) = read(path, [longer, shorter], max_length=fits, overlong="skip")
    assert len(kept[0]) == fits
    with pytest.raises(ConfigError, match=rf"holds no conversation of at most {fits - 1} tokens$"):
        read(path, [longer, shorter], max_length=fits - 1, overlong="skip")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"messages": "\xff"}\n', r"not UTF-8 text \(byte 15\)"), (b"", "holds no conversation"),
        (gzip.compress(GOOD.encode(), mtime=0)[:-12], "damaged gzip file"), (b"\x28\xb5\x2f\xfd\x04", "Zstandard"),
        (b"BZh91AY", "bzip2"), (b"\xfd7zXZ\0", "xz"), (b"PK\x03\x04\x14", "ZIP"), (b"SQLite format 3\0", "sft.stored"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_named_rightly(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=rf"^sft\.data: .*{message}"):
        loaded(path)


@pytest.mark.parametrize(("name", "kind"), [("a.csv", "CSV"), ("a.jsonl.zst", "Zstandard"), ("a.csv.gz", "CSV")])
def test_a_kind_of_file_that_is_not_read_is_named(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_text("messages,tools\n")
    for place in (tmp_path / name, tmp_path):
        with pytest.raises(ConfigError, match=f"{name} is .*{kind}"):
            loaded(place)


def test_what_is_no_file_is_no_data(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.jsonl")
    for name, reason in (("x.jsonl", "not a regular file"), ("none.jsonl", "cannot read .*No such file")):
        with pytest.raises(ConfigError, match=rf"sft\.data: .*{reason}"):
            loaded(tmp_path / name)


def test_blocks_that_are_never_closed_take_no_time() -> None:
    """A pattern that looks for the end of every block would take hours: the suite's time limit is the bound."""
    text = "<tool_response>" * 100_000 + " " * 100_000
    found = RecordReader(thinking=False).read(shared(HUMAN, ("gpt", "x"), ("observation", text)))
    assert found is not None
    assert found[0][-1] == {"role": "tool", "content": text}


# ---- splits


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        ("sft_train.jsonl", "sft_test.jsonl"),
        ("train-00000-of-00002.jsonl", "validation-00000-of-00001.jsonl"),
        ("data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"),
        ("data/train_sft-00000-of-00001.jsonl", "data/test_sft-00000-of-00001.jsonl"),
        ("train/a.jsonl", "test/a.jsonl"),
        ("en/training/a.jsonl", "en/dev/a.jsonl"),
        ("my.train.jsonl", "my.valid.jsonl"),
        ("train.jsonl", "val.jsonl"),
        ("train2.jsonl", "evaluation-2.jsonl"),
        ("training_set.jsonl", "testing_set.jsonl"),
        ("Train.JSONL", "TEST.jsonl"),
    ],
)
def test_splits_are_told_by_names_as_the_library_datasets_does(tmp_path: Path, train: str, held_out: str) -> None:
    for name, said in (
        (train, "hello"),
        (held_out, "bye"),
        ("retrain.jsonl", "never"),
        (".cache/train.jsonl", "never"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(record(USER, {**AGENT, "content": said})))
    assert [trained(one) for one in loaded(tmp_path)] == [["hello"]]
    assert [trained(one) for one in loaded(tmp_path, key="sft.validation")] == [["bye"]]


def test_splits_that_cannot_be_told_are_an_error(tmp_path: Path) -> None:
    for number, names in enumerate((["train_and_test.jsonl"], ["test.jsonl"], ["data/a-00000-of-00001.jsonl",
                                    "data/b-00000-of-00001.jsonl"], ["train/test/a.jsonl"])):  # fmt: skip
        for name in names:
            (tmp_path / str(number) / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / str(number) / name).write_text(GOOD)
        with pytest.raises(ConfigError, match=r"^sft\.data: .*name (one|it)"):
            loaded(tmp_path / str(number))
    (tmp_path / "1/data.jsonl").write_text(GOOD)
    for number, named in ((1, "data.jsonl"), (2, "data/a-00000-of-00001.jsonl")):  # what it says to name can be named
        with pytest.raises(ConfigError, match=f"such as {tmp_path / str(number) / named}, "):
            loaded(tmp_path / str(number))
    (tmp_path / "whole/deep").mkdir(parents=True)
    for name in ("contest.jsonl", "deep/b.jsonl", "dataset_info.json"):
        (tmp_path / "whole" / name).write_text(GOOD)
    assert len(loaded(tmp_path / "whole")) == 2, "where no name tells a split, all files count"


def save_to_disk(table: pyarrow.Table, folder: Path) -> Path:
    """As ``datasets.Dataset.save_to_disk`` writes it: a stream of Arrow, and which files there are."""
    folder.mkdir(parents=True)
    with pyarrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_data_sets_on_disk_are_read(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([record(USER, AGENT, tools=None)] * 2)
    for split in ("train", "test"):
        save_to_disk(table, tmp_path / "both" / split)
    (tmp_path / "both/dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    for place in ("both", "both/test"):
        assert [trained(one) for one in loaded(tmp_path / place)] == [["hello"]] * 2
    assert len(loaded(tmp_path / "both", key="sft.validation")) == 2


def write_table(rows: dict[str, list[object]]) -> Callable[[Path], object]:
    return lambda folder: pyarrow.parquet.write_table(pyarrow.table(rows), folder / "x.parquet")


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda f: (f / "x.parquet").write_bytes(b"PAR1 and no more"), "x.parquet: cannot be read as Parquet"),
        (lambda f: (f / "x.arrow").write_bytes(b"ARROW1 and no more"), "x.arrow: cannot be read as Arrow"),
        (lambda f: (f / "x.arrow").write_bytes(b""), "x.arrow"),
        (lambda f: (f / "README.md").write_text("nothing"), "holds no conversations: a file that ends in"),
        (lambda f: (f / "dataset_dict.json").write_text('{"splits": ["a", "b"]}'), "has the splits a, b; name one"),
        (lambda f: (f / "dataset_dict.json").write_text('{"splits": 3}'), "not as Dataset.save_to_disk writes it"),
        (lambda f: (f / "state.json").write_text("{"), "not as Dataset.save_to_disk writes it"),
        (lambda f: (f / "state.json").write_text('{"_data_files": [{"filename": "gone.arrow"}]}'), "cannot read"),
        (lambda f: (f / "state.json").write_text('{"_data_files": [{"filename": "../x.arrow"}]}'), "is no name of"),
        (lambda f: (f / "state.json").write_text('{"_data_files": [7]}'), "is no name of"),
        (lambda f: (f / "dataset_dict.json").write_text('{"splits": ["."]}'), "is no name of"),
        (write_table({"messages": ["[]", "x"]}), "x.parquet, row 1: not a conversation"),
        (write_table({"a": [1]}), "its keys are a$"),
    ],
)
def test_tables_that_are_none_say_so(tmp_path: Path, made: Callable[[Path], object], reason: str) -> None:
    made(tmp_path)
    with pytest.raises(ConfigError, match=reason) as caught:
        loaded(tmp_path)
    assert "\n" not in str(caught.value)


# ---- validation and batches


def test_a_share_is_held_out_by_content(tmp_path: Path) -> None:
    lines = [record(USER, {**AGENT, "content": f"answer {i % 70}"}) for i in range(100)]  # 30 stand there twice
    everything = read(tmp_path / "x.jsonl", lines)
    sets = {seed: hold_out(everything, 0.2, seed) for seed in (1, 2)}
    for training, held_out in sets.values():
        assert Counter(texts(training) + texts(held_out)) == Counter(texts(everything))
        assert not set(texts(training)) & set(texts(held_out))
        assert 20 <= len(held_out) <= 21  # a copy of the last may come on top
    assert texts(sets[1][1]) != texts(sets[2][1])
    shuffled = hold_out(everything[::-1], 0.2, 1)
    assert set(texts(shuffled[1])) == set(texts(sets[1][1]))


def test_validation_is_a_file_or_a_share_that_leaves_something_on_both_sides(tmp_path: Path) -> None:
    path, other = tmp_path / "x.jsonl", tmp_path / "held.jsonl"
    read(path, [record(USER, AGENT)] * 3)
    read(other, [record(USER, BYE)])
    assert load_sets(config_of(path), FAMILY)[1] == []
    assert [len(part) for part in load_sets(config_of(path, validation=str(other)), FAMILY)] == [3, 1]
    with pytest.raises(ConfigError, match=r"sft\.validation: 0\.5 .* leaves 0 to train on and 3"):
        load_sets(config_of(path, validation=0.5), FAMILY)
    with pytest.raises(ConfigError, match=r"^sft\.validation: cannot read .*none\.jsonl"):
        load_sets(config_of(path, validation=str(tmp_path / "none.jsonl")), FAMILY)


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 3))
def test_batches_walk_through_every_conversation_once_an_epoch(count: int, size: int, seed: int) -> None:
    pool = list(range(100, 100 + count))
    steps = -(-3 * count // size)
    stream = [i for step in range(steps) for i in batch_members(pool, size, step, seed)]
    assert len(stream) == steps * size
    for epoch in range(3):
        assert Counter(stream[epoch * count : (epoch + 1) * count]) == Counter(pool)
