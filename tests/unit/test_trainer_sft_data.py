"""Supervised data: what is read from a file in either form, what is refused and how, what is held out, batches.

Does not cover how a demonstration becomes tokens (test_tokens_conversation.py) or the training step itself.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mua.config.schema import ExperimentConfig
from mua.tokens.chat_family import ChatFamily
from mua.trainer.conversations import batch_members, hold_out, load_conversations, load_sets, openai_messages
from mua.types import Segment
from mua.utils.errors import ConfigError
from tests.tokens_fixtures import chat_family, runs

FAMILY = chat_family("qwen3", False)
USER = {"role": "user", "content": "hi"}
AGENT = {"role": "assistant", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Finds.", "parameters": {"type": "object"}}}


def read(path: Path, lines: Sequence[str], **changes: object) -> list[list[Segment]]:
    """The conversations of a file that holds ``lines``; ``model.max_length`` and keys of ``sft`` may be changed."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return load_conversations(path, FAMILY, config_of(path, **changes))


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


def record(*messages: object, **more: object) -> str:
    return json.dumps({"messages": messages, **more}, ensure_ascii=False)


def trained(family: ChatFamily, segments: list[Segment]) -> list[str]:
    return [text for segment in segments for who, text in runs(family, segment) if who == "SAMPLED"]


def test_only_the_last_turn_carries_loss_if_asked(tmp_path: Path) -> None:
    (segments,) = read(tmp_path / "x.jsonl", [record(USER, AGENT, USER, {**AGENT, "content": "bye"})], train_on="last")
    assert trained(FAMILY, segments) == ["bye<|im_end|>"]


def test_a_turn_of_weight_0_carries_no_loss(tmp_path: Path) -> None:
    first, second = {**AGENT, "weight": 0}, {**AGENT, "content": "bye", "weight": 1}
    agents = (first, second, {**AGENT, "content": "so long", "weight": None}, first)
    one = record(*itertools.chain.from_iterable((USER, agent) for agent in agents))
    turns = itertools.chain.from_iterable((USER, agent) for agent in agents)
    names = {"user": "human", "assistant": "gpt"}
    shared_form = [
        {"from": names[turn["role"]], "value": turn["content"]}
        | ({"weight": turn["weight"]} if "weight" in turn else {})
        for turn in turns
    ]
    lines = [one, json.dumps({"conversations": shared_form})]
    for segments in read(tmp_path / "x.jsonl", lines):
        assert trained(FAMILY, segments) == ["bye<|im_end|>", "so long<|im_end|>"]
    for segments in read(tmp_path / "x.jsonl", lines, train_on="last"):
        assert trained(FAMILY, segments) == ["so long<|im_end|>"]


@pytest.mark.parametrize("tools", [[TOOL], [TOOL["function"]]])
def test_tools_stand_in_the_prompt_wrapped_or_not(tmp_path: Path, tools: list) -> None:
    (segments,) = read(tmp_path / "x.jsonl", [record(USER, AGENT, tools=tools)])
    assert json.dumps(TOOL) in FAMILY.decode(segments[0].ids)


CALL = {"name": "look_up", "arguments": {"key": "W1", "all": True}}
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
    {**AGENT, "content": "bye"},
    tools=[TOOL],
)
SCHEMA = TOOL["function"]


def entries(*pairs: tuple[str, object]) -> list[dict[str, object]]:
    return [{"from": who, "value": value} for who, value in pairs]


def shared(*pairs: tuple[str, object], **more: object) -> str:
    return json.dumps({"conversations": entries(*pairs), **more})


TAGGED = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
SHAREGPT = {
    "LLaMA-Factory": shared(
        ("human", "hi"),
        ("function_call", json.dumps(CALL)),
        ("observation", "found"),
        ("gpt", "hello"),
        ("human", "hi"),
        ("gpt", "again"),
        ("function_call", json.dumps([CALL, CALL])),
        ("observation", "one"),
        ("observation", "two"),
        ("gpt", "bye"),
        system="Help.",
        tools=json.dumps([SCHEMA]),
    ),
    "calls inside the text, as UserRL's and Hermes' data have them": shared(
        ("system", "Help."),
        ("human", "hi"),
        ("gpt", f"<think>\n\n</think>\n\n{TAGGED}"),
        ("tool", "<tool_response>\nfound\n</tool_response>"),
        ("gpt", "hello"),
        ("human", "hi"),
        ("gpt", f"again\n{TAGGED}\n{TAGGED}"),
        ("tool", "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"),
        ("gpt", "bye"),
        tools=[TOOL],
    ),
    "tables of strings, as MUA-RL's cold start": json.dumps(
        {"messages": json.dumps(json.loads(OPENAI)["messages"]), "tools": json.dumps([{"function": [SCHEMA]}])}
    ),
}


@pytest.mark.parametrize("train_on", ["all", "last"])
@pytest.mark.parametrize("form", SHAREGPT)
def test_every_form_of_a_conversation_gives_the_same_tokens_and_mask(tmp_path: Path, form: str, train_on: str) -> None:
    plain, other = read(tmp_path / "x.jsonl", [OPENAI, SHAREGPT[form]], train_on=train_on)
    for left, right in zip(plain, other, strict=True):
        assert FAMILY.decode(left.ids) == FAMILY.decode(right.ids)
        assert (left.ids == right.ids).all()
        assert (left.loss_mask == right.loss_mask).all()
    said = [TAGGED, "hello", f"again\n{TAGGED}\n{TAGGED}", "bye"]
    assert trained(FAMILY, other) == [f"{text}<|im_end|>" for text in (said if train_on == "all" else said[-1:])]


def test_an_array_is_read_like_lines(tmp_path: Path) -> None:
    path, records = tmp_path / "x.json", [OPENAI, SHAREGPT["LLaMA-Factory"], record(USER, AGENT)]
    path.write_text("\ufeff" + json.dumps([json.loads(line) for line in records], indent=2))
    found, lines = load_conversations(path, FAMILY, config_of(path)), read(tmp_path / "x.jsonl", records)
    assert [FAMILY.decode(s.ids) for c in found for s in c] == [FAMILY.decode(s.ids) for c in lines for s in c]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "holds no conversation"),
        (f"[\n{record(USER, AGENT)},\n\n  5\n]", r":4: not a conversation: a record is an object, not int$"),
        (
            f"[\n{record(USER, AGENT)}\n{record(USER, AGENT)}]",
            r':3: not a conversation: the file\'s array wants "," or',
        ),
        (f"[\n{record(USER, AGENT)},\n{{]", r":3: not a conversation: Expecting property name .*in the file's array$"),
        (f"[{record(USER, AGENT)}\n] \n{record(USER, AGENT)}", r":2: not a conversation: text follows the end"),
        (f"[{record(USER, AGENT)},", r":1: not a conversation: Expecting value"),
    ],
)
def test_a_fault_in_an_array_has_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_conversations(path, FAMILY, config_of(path))


def texts(conversations: Sequence[Sequence[Segment]]) -> list[str]:
    return [FAMILY.decode(segments[0].ids) for segments in conversations]


def test_a_share_is_held_out_by_content(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    lines = [record(USER, {**AGENT, "content": f"answer {i % 70}"}) for i in range(100)]  # 30 stand there twice
    everything = read(path, lines)
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
    read(other, [record(USER, {**AGENT, "content": "bye"})])
    assert load_sets(config_of(path), FAMILY)[1] == []
    assert [len(part) for part in load_sets(config_of(path, validation=str(other)), FAMILY)] == [3, 1]
    with pytest.raises(
        ConfigError, match=r"sft\.validation: 0\.5 of the 3 conversations .* leaves 0 to train on and 3"
    ):
        load_sets(config_of(path, validation=0.5), FAMILY)
    with pytest.raises(ConfigError, match=r"^sft\.validation: cannot read .*none\.jsonl"):
        load_sets(config_of(path, validation=str(tmp_path / "none.jsonl")), FAMILY)


def test_windows_line_ends_and_a_missing_last_one_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(f"{record(USER, AGENT)}\r\n{record(USER, AGENT)}".encode())
    assert len(load_conversations(path, FAMILY, config_of(path))) == 2


def chatted(content: object) -> str:
    return record({"role": "user", "content": content}, AGENT)


def weighted(*weights: object) -> str:
    return record(*itertools.chain.from_iterable((USER, {**AGENT, "weight": weight}) for weight in weights))


HUMAN = ("human", "hi")
WRONG = [  # and what is named beside file and line
    ("", "column 1"), ("{", ""), ("[" * 100_000, "nested too deeply"), ("9" * 5000, "column 1"), ("[1]", "list"),
    ('{"messages": [], "messages": []}', "'messages'"), ('{"messages": "' + "[" * 5000 + '"}', '"messages"'),
    ('{"te\\nxt": 1}', "its keys are te\\nxt"), ('{"text": "hi"}', "its keys are text"),
    (json.dumps({"chosen": [USER, AGENT], "rejected": []}), "chosen"),
    (record(), ""), (record(AGENT, USER), ""), (record("hi"), '"messages"'),
    (json.dumps({"messages": "hi"}), '"messages"'), (json.dumps({"messages": {"role": "user"}}), '"messages"'),
    (record(USER, AGENT, tools=["look_up"]), '"tools"'), (record(USER, AGENT, tools={"look_up": 1}), '"tools"'),
    (record(USER, AGENT, tools=[{"function": {}}]), "'name'"),
    (record(USER, {"role": "x" * 5000}), "messages[1]"), (record(USER, {**AGENT, "content": 7}), "messages[1]"),
    (record(USER, {**AGENT, "tool_calls": ["x"]}), "AttributeError"),
    (record(USER, {**AGENT, "reasoning_content": "why"}), "messages[1]"),
    (record(USER, {"role": "tool", "content": "x"}, AGENT), "messages[1]"),
    (record(USER, {**AGENT, "content": "<tool_call>{}</tool_call>"}), "messages[1]"),
    (weighted(0), "weight 0"), (weighted(0.5), "messages[1]: weight is 0.5"), (weighted(1, True), "messages[3]"),
    (json.dumps({"conversations": "hi"}), '"conversations"'), (shared(("bot", "hi")), "conversations[0]"),
    (shared(HUMAN, ("gpt", None)), "conversations[1]"), (shared(HUMAN, ("function_call", "{")), "conversations[1]"),
    (shared(HUMAN, ("function_call", "[]")), "conversations[1]"),
    (shared(HUMAN, ("gpt", "<tool_call>{</tool_call>")), "conversations[1]"),
    (shared(HUMAN, ("gpt", "a <think> b")), "conversations[1]"),
    (shared(HUMAN, ("gpt", "a"), ("gpt", "b")), "messages[2]"),
    (shared(HUMAN, ("gpt", "a"), tools="look_up"), '"tools"'),
    (json.dumps({"conversations": [*entries(HUMAN, ("gpt", "let me see")),
                                   {"from": "function_call", "value": json.dumps(CALL), "weight": 0}]}),
     "conversations[2]"),
    (chatted([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0]"),
    (chatted([{"type": "text", "text": 3}]), "messages[0].content[0]"), (chatted([None]), "messages[0].content[0]"),
    ('{"prompt": "hi"}', '"prompt"'), ('{"prompt": 3, "completion": "x"}', '"prompt"'),
    (json.dumps({"prompt": "hi", "completion": [USER]}), '"completion"'),
    (json.dumps({"prompt": [1], "completion": [AGENT]}), '"prompt"'),
    ('{"instruction": 3, "output": "x"}', '"instruction"'),
    ('{"instruction": "a", "output": "b", "history": ["x"]}', '"history"'),
]  # fmt: skip


@pytest.mark.parametrize(("line", "named"), WRONG, ids=range(len(WRONG)))
def test_a_bad_line_is_one_error_line_with_file_and_number(tmp_path: Path, line: str, named: str) -> None:
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


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with pytest.raises(ConfigError, match=r"^sft\.data: cannot read .*x\.jsonl: No such file or directory$"):
        load_conversations(path, FAMILY, config_of(path))
    path.write_bytes(b'{"messages": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"^sft\.data: .*x\.jsonl is not UTF-8 text \(byte 15\)$"):
        load_conversations(path, FAMILY, config_of(path))
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"^sft\.data: .*x\.jsonl holds no conversation$"):
        load_conversations(path, FAMILY, config_of(path))


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 3))
def test_batches_walk_through_every_conversation_once_an_epoch(count: int, size: int, seed: int) -> None:
    pool = list(range(100, 100 + count))
    steps = -(-3 * count // size)
    stream = [i for step in range(steps) for i in batch_members(pool, size, step, seed)]
    assert len(stream) == steps * size
    for epoch in range(3):
        assert Counter(stream[epoch * count : (epoch + 1) * count]) == Counter(pool)


def test_a_fifo_is_no_data(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.jsonl")
    with pytest.raises(ConfigError, match="not a regular file"):
        load_conversations(tmp_path / "x.jsonl", FAMILY, config_of(tmp_path / "x.jsonl"))


def test_blocks_that_are_never_closed_take_no_time() -> None:
    """A pattern that looks for the end of every block would take hours: the suite's time limit is the bound."""
    text = "<tool_response>" * 100_000 + " " * 100_000
    record = {"conversations": [{"from": "observation", "value": text}]}
    assert openai_messages(record) == [{"role": "tool", "content": text}]


PARTS = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
SAME = [
    {"messages": [{"role": "user", "content": PARTS}, {**AGENT, "content": [{"type": "text", "text": "hello"}]}]},
    {"messages": [{"role": "user", "content": ["hi"]}, AGENT]},
    {"prompt": "hi", "completion": "hello"},
    {"prompt": "hi", "response": "hello"},
    {"prompt": [USER], "completion": [AGENT]},
    {"prompt": json.dumps([USER]) and [USER], "completion": AGENT},
    {"instruction": "hi", "input": "", "output": "hello"},
    {"conversations": [USER, AGENT]},
    {"messages": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
]  # fmt: skip


@pytest.mark.parametrize("form", SAME, ids=range(len(SAME)))
def test_what_people_have_gives_the_tokens_of_openais_form(tmp_path: Path, form: object) -> None:
    (want,) = read(tmp_path / "a.jsonl", [record(USER, AGENT)])
    (found,) = read(tmp_path / "b.jsonl", [json.dumps(form), ""][:1])
    assert [segment.ids.tolist() for segment in found] == [segment.ids.tolist() for segment in want]
    assert trained(FAMILY, found) == trained(FAMILY, want)


def test_a_developer_is_the_system_and_joins_it(tmp_path: Path) -> None:
    told = [{"role": "system", "content": "Be kind."}, {"role": "developer", "content": "Be brief."}]
    (both,) = read(tmp_path / "a.jsonl", [record(*told, USER, AGENT)])
    (one,) = read(tmp_path / "b.jsonl", [record({"role": "system", "content": "Be kind.\n\nBe brief."}, USER, AGENT)])
    (alone,) = read(tmp_path / "c.jsonl", [record({**told[1], "role": "developer"}, USER, AGENT)])
    (system,) = read(tmp_path / "d.jsonl", [record({**told[1], "role": "system"}, USER, AGENT)])
    assert both[0].ids.tolist() == one[0].ids.tolist()
    assert alone[0].ids.tolist() == system[0].ids.tolist()
    with pytest.raises(ConfigError, match=r"messages\[2\]: role 'system'; roles are system \(first only\)"):
        read(tmp_path / "e.jsonl", [record(USER, AGENT, told[1], USER, AGENT)])


def test_nothing_of_a_prompt_carries_loss(tmp_path: Path) -> None:
    earlier = [USER, {"role": "assistant", "content": "earlier"}, USER]
    (segments,) = read(tmp_path / "a.jsonl", [json.dumps({"prompt": earlier, "completion": [AGENT]})])
    assert ["hello" in text or "earlier" not in text for text in trained(FAMILY, segments)] == [True]


def test_a_function_of_old_is_a_tool(tmp_path: Path) -> None:
    call = {"name": "look_up", "arguments": '{"key": 1}'}
    old = [USER, {"role": "assistant", "content": None, "function_call": call},
           {"role": "function", "name": "look_up", "content": "one"}, AGENT]  # fmt: skip
    new = [USER, {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]},
           {"role": "tool", "content": "one"}, AGENT]  # fmt: skip
    (was,) = read(tmp_path / "a.jsonl", [json.dumps({"messages": old, "functions": [TOOL["function"]]})])
    (now,) = read(tmp_path / "b.jsonl", [record(*new, tools=[TOOL])])
    assert was[0].ids.tolist() == now[0].ids.tolist()


def test_a_gzipped_file_is_read_whatever_it_is_called(tmp_path: Path) -> None:
    for name in ("x.jsonl.gz", "x.jsonl"):
        path = tmp_path / name
        path.write_bytes(gzip.compress(f"\ufeff{record(USER, AGENT)}\r\n{record(USER, AGENT)}\r\n".encode()))
        assert len(load_conversations(path, FAMILY, config_of(path))) == 2
    path.write_bytes(gzip.compress(f"{record(USER, AGENT)}\n{{".encode()))
    with pytest.raises(ConfigError, match=r"x\.jsonl:2: not a conversation"):
        load_conversations(path, FAMILY, config_of(path))
    path.write_bytes(gzip.compress(record(USER, AGENT).encode())[:-12])
    with pytest.raises(ConfigError, match="damaged gzip file"):
        load_conversations(path, FAMILY, config_of(path))


ROWS = [
    {"messages": [USER, {**AGENT, "tool_calls": None, "weight": None}], "tools": None},
    {"messages": [{**USER, "tool_calls": None}, AGENT], "tools": None},
]


@pytest.fixture
def table() -> pyarrow.Table:
    return pyarrow.Table.from_pylist(ROWS)


def loaded(path: Path) -> list[list[Segment]]:
    return load_conversations(path, FAMILY, config_of(path))


def save_to_disk(table: pyarrow.Table, folder: Path) -> Path:
    """As ``datasets.Dataset.save_to_disk`` writes it: a stream of Arrow, and which files there are."""
    folder.mkdir(parents=True)
    with pyarrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_tables_and_datasets_on_disk_are_read(tmp_path: Path, table: pyarrow.Table) -> None:
    want = [segment.ids.tolist() for (segment,) in read(tmp_path / "a.jsonl", [record(USER, AGENT)] * 2)]
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    with pyarrow.ipc.new_file(str(tmp_path / "x.arrow"), table.schema) as writer:
        writer.write_table(table)
    both = tmp_path / "both"
    for split in ("train", "test"):
        save_to_disk(table, both / split)
    (both / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    hub = tmp_path / "hub" / "data"
    hub.mkdir(parents=True)
    (tmp_path / "hub/README.md").write_text("# a card")
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        pyarrow.parquet.write_table(table.slice(0, 1), hub / f"{name}.parquet")
    for place in ("x.parquet", "x.arrow", "both", "both/test", "hub"):
        assert [segment.ids.tolist() for (segment,) in loaded(tmp_path / place)] == want, place
    held_out = load_conversations(hub.parent, FAMILY, config_of(hub), key="sft.validation")
    assert len(held_out) == 1, "the split test"


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda f, t: (f / "x.parquet").write_bytes(b"PAR1 and no more"), "x.parquet: cannot be read as Parquet"),
        (lambda f, t: (f / "x.arrow").write_bytes(b"ARROW1 and no more"), "x.arrow: cannot be read as Arrow"),
        (lambda f, t: (f / "x.arrow").write_bytes(b""), "x.arrow"),
        (lambda f, t: (f / "README.md").write_text("nothing"), "holds no conversations: a file that ends in"),
        (lambda f, t: (f / "dataset_dict.json").write_text('{"splits": ["a", "b"]}'), "has the splits a, b; name one"),
        (lambda f, t: (f / "dataset_dict.json").write_text('{"splits": 3}'), "not as Dataset.save_to_disk writes it"),
        (lambda f, t: (f / "state.json").write_text("{"), "not as Dataset.save_to_disk writes it"),
        (lambda f, t: (f / "state.json").write_text('{"_data_files": [{"filename": "gone.arrow"}]}'), "cannot read"),
        (lambda f, t: (f / "state.json").write_text('{"_data_files": [{"filename": "../x.arrow"}]}'), "is no name of"),
        (lambda f, t: (f / "state.json").write_text('{"_data_files": [{"file": "x.arrow"}]}'), "not as Dataset"),
        (lambda f, t: (f / "state.json").write_text('{"_data_files": [7]}'), "is no name of"),
        (lambda f, t: (f / "dataset_dict.json").write_text('{"splits": ["."]}'), "is no name of"),
        (lambda f, t: pyarrow.parquet.write_table(pyarrow.table({"messages": ["[]", "x"]}), f / "x.parquet"),
         r"x.parquet, row 1: not a conversation"),
        (lambda f, t: pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), f / "x.parquet"), "its keys are a$"),
    ],
)  # fmt: skip
def test_tables_that_are_none_say_so(
    tmp_path: Path, table: pyarrow.Table, made: Callable[[Path, pyarrow.Table], object], reason: str
) -> None:
    made(tmp_path, table)
    with pytest.raises(ConfigError, match=reason) as caught:
        loaded(tmp_path)
    assert "\n" not in str(caught.value)
