"""Supervised data: what is read from a JSON-lines file, what is refused and how, and the order of batches.

Does not cover how a demonstration becomes tokens (test_tokens_conversation.py) or the training step itself.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mua.config.schema import ExperimentConfig
from mua.errors import ConfigError
from mua.tokens import ChatFamily
from mua.trainer.sft import _batch, load_conversations
from mua.types import Segment
from tests.tokens_fixtures import chat_family, runs

FAMILY = chat_family("qwen3", False)
USER = {"role": "user", "content": "hi"}
AGENT = {"role": "assistant", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Finds.", "parameters": {"type": "object"}}}


def read(path: Path, lines: Sequence[str], **changes: object) -> list[list[Segment]]:
    """The conversations of a file that holds ``lines``; ``train_on`` and ``max_length`` may be changed."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return load_conversations(path, FAMILY, config_of(path, **changes))


def config_of(path: Path, *, train_on: str = "all", max_length: int = 4096) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "name": "x",
            "output": "x",
            "model": {"path": "x", "max_length": max_length},
            "environment": {"name": "help_desk"},
            "rollout": {"max_tokens": 1},
            "trainer": {"steps": 1},
            "sft": {"data": str(path), "train_on": train_on},
        }
    )


def record(*messages: object, **more: object) -> str:
    return json.dumps({"messages": messages, **more}, ensure_ascii=False)


def trained(family: ChatFamily, segments: list[Segment]) -> list[str]:
    return [text for segment in segments for who, text in runs(family, segment) if who == "SAMPLED"]


def test_each_line_becomes_a_conversation(tmp_path: Path) -> None:
    first, second = read(tmp_path / "x.jsonl", [record(USER, AGENT), record(USER, AGENT, USER, AGENT)])
    assert trained(FAMILY, first) == ["hello<|im_end|>"]
    assert trained(FAMILY, second) == ["hello<|im_end|>", "hello<|im_end|>"]


def test_only_the_last_turn_carries_loss_if_asked(tmp_path: Path) -> None:
    (segments,) = read(tmp_path / "x.jsonl", [record(USER, AGENT, USER, {**AGENT, "content": "bye"})], train_on="last")
    assert trained(FAMILY, segments) == ["bye<|im_end|>"]


@pytest.mark.parametrize("tools", [[TOOL], [TOOL["function"]]])
def test_tools_stand_in_the_prompt_wrapped_or_not(tmp_path: Path, tools: list) -> None:
    (segments,) = read(tmp_path / "x.jsonl", [record(USER, AGENT, tools=tools)])
    assert json.dumps(TOOL) in FAMILY.decode(segments[0].ids)


def test_a_line_separator_inside_a_string_does_not_end_the_record(tmp_path: Path) -> None:
    (segments,) = read(tmp_path / "x.jsonl", [record(USER, {**AGENT, "content": "one\u2028two\x85three"})])
    assert trained(FAMILY, segments) == ["one\u2028two\x85three<|im_end|>"]


def test_windows_line_ends_and_a_missing_last_one_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(f"{record(USER, AGENT)}\r\n{record(USER, AGENT)}".encode())
    assert len(load_conversations(path, FAMILY, config_of(path))) == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "Expecting value: line 1 column 1 (char 0)"),
        ("{", "Expecting property name enclosed in double quotes"),
        ("[" * 100_000, "not in OpenAI form (RecursionError"),
        ("[1]", "not in OpenAI form (TypeError"),
        ("{}", "the key 'messages' is missing"),
        (record(), "a demonstration is an optional system message"),
        (json.dumps({"messages": "hi"}), '"messages" and "tools" must be arrays of objects'),
        (json.dumps({"messages": {"role": "user"}}), '"messages" and "tools" must be arrays of objects'),
        (record("hi"), '"messages" and "tools" must be arrays of objects'),
        (record(USER, AGENT, tools=["look_up"]), '"messages" and "tools" must be arrays of objects'),
        (record(USER, AGENT, tools={"look_up": 1}), '"messages" and "tools" must be arrays of objects'),
        (record(USER, AGENT, tools=[{"function": {}}]), "the key 'name' is missing"),
        (record(USER, {"role": "assistant", "content": 7}), "messages[1]: content must be a string, not int"),
        (record(USER, {"role": "agent", "content": "x"}), "messages[1]: role 'agent'"),
        (record(AGENT, USER), "a demonstration is an optional system message"),
        (record(USER, {**AGENT, "tool_calls": ["x"]}), "not in OpenAI form (AttributeError"),
        (record(USER, {**AGENT, "reasoning_content": "why"}), "messages[1]: an assistant message holds reasoning"),
        (record(USER, {"role": "tool", "content": "x"}, AGENT), "messages[1]: "),
        (
            record(USER, {**AGENT, "content": "<tool_call>{}</tool_call>"}),
            "messages[1]: this assistant message does not",
        ),
    ],
)
def test_a_bad_line_is_one_error_line_with_file_and_number(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "x.jsonl"
    with pytest.raises(ConfigError) as caught:
        read(path, [record(USER, AGENT), line, record(USER, AGENT)])
    message = str(caught.value)
    assert message.startswith(f"{path}:2: not a conversation: {reason}")
    assert "\n" not in message


def test_a_conversation_that_is_too_long_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    fits = len(read(path, [record(USER, AGENT)])[0][0])
    assert len(read(path, [record(USER, AGENT)], max_length=fits + 9)) == 1
    with pytest.raises(ConfigError, match=rf"x\.jsonl:1: {fits} tokens exceed model\.max_length {fits - 1}$"):
        read(path, [record(USER, AGENT)], max_length=fits - 1)


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
    stream = [i for step in range(steps) for i in _batch(pool, size, step, seed)]
    assert len(stream) == steps * size
    for epoch in range(3):
        assert Counter(stream[epoch * count : (epoch + 1) * count]) == Counter(pool)


@given(st.integers(1, 30), st.integers(1, 40), st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_a_batch_depends_on_its_step_alone(count: int, size: int, steps: list[int]) -> None:
    pool = list(range(count))
    in_order = {step: _batch(pool, size, step, 1) for step in sorted(steps)}
    assert {step: _batch(pool, size, step, 1) for step in reversed(steps)} == in_order


def test_epochs_and_seeds_shuffle_differently() -> None:
    pool = list(range(50))
    orders = [tuple(_batch(pool, 50, step, seed)) for step in range(3) for seed in range(3)]
    assert len(set(orders)) == 9
