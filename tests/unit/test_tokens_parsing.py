"""Reading assistant turns: tool calls, reasoning, and every kind of error.

Covers text in, typed turn out. Not covered: the way from ids to text (test_tokens_conversation.py).
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mua.tokens import parsing
from mua.tokens.parsing import AssistantTurn, ErrorKind, parse_turn
from mua.utils.strict_json import read_json_at

GOOD = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def calls(turn: AssistantTurn) -> list[tuple[str, dict]]:
    return [(call.name, call.arguments) for call in turn.tool_calls]


def kinds(turn: AssistantTurn) -> list[str]:
    return [str(error.kind) for error in turn.errors]


def test_text_then_several_calls_with_unique_ids() -> None:
    turn = parse_turn(f'Wait.\n{GOOD}\n<tool_call>\n{{"name": "g", "arguments": {{}}}}\n</tool_call>', turn=3)
    assert turn.content == "Wait."
    assert calls(turn) == [("f", {"a": 1}), ("g", {})]
    assert [call.id for call in turn.tool_calls] == ["call_3_0", "call_3_1"]
    assert turn.errors == []


def test_tags_inside_json_strings_are_text() -> None:
    text = "a </tool_call> <tool_call> b"
    turn = parse_turn("<tool_call>" + json.dumps({"name": "f", "arguments": {"t": text}}) + "</tool_call>")
    assert calls(turn) == [("f", {"t": text})]
    assert turn.errors == []


BAD_JSON = [
    '{"a": }',
    '{"a": NaN}',
    '{"a": 1e999}',
    '{"a": "\\ud800"}',
    '{"a": 1, "a": 2}',
    '{"a": ' + "9" * 5000 + "}",
]
BAD_ARGUMENTS = [', "arguments": "{}"', ', "arguments": null', ""]
BAD_NAMES = ['["f", {}]', '{"arguments": {}}', '{"name": 3, "arguments": {}}', '{"name": "", "arguments": {}}']
MALFORMED = [
    *((f'<tool_call>\n{{"name": "f", "arguments": {said}}}\n</tool_call>', "bad_json") for said in BAD_JSON),
    ('<tool_call>{"name": "f", "arguments": {}} extra</tool_call>', "bad_json"),
    ("<tool_call></tool_call>", "bad_json"),
    ("<tool_call>" + "[" * 100_000 + "</tool_call>", "bad_json"),
    *((f'<tool_call>{{"name": "f"{said}}}</tool_call>', "bad_arguments") for said in BAD_ARGUMENTS),
    (f"<tool_call>{BAD_NAMES[0]}</tool_call>", "not_an_object"),
    *((f"<tool_call>{said}</tool_call>", "missing_name") for said in BAD_NAMES[1:]),
    ('<tool_call>{"name": "f", "arguments": {}, "a": 1}</tool_call>', "unexpected_key"),
    ('<tool_call>\n{"name": "f", "arguments": {}}', "unclosed_call"),
    ('<tool_call>\n{"name": "f", "argu', "unclosed_call"),
    ("hello </tool_call>", "unopened_call"),
]


@pytest.mark.parametrize(("text", "kind"), MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_call_is_one_typed_error_and_its_text_stays(text: str, kind: str) -> None:
    turn = parse_turn(text)
    assert kinds(turn) == [kind]
    assert turn.errors[0].message
    assert turn.tool_calls == []
    assert turn.content == text
    assert turn.message()["tool_call_errors"][0]["kind"] == kind


def test_good_calls_around_a_bad_one_are_kept() -> None:
    turn = parse_turn(f"{GOOD}\n<tool_call>\nnope\n</tool_call>\n{GOOD}")
    assert len(turn.tool_calls) == 2
    assert kinds(turn) == ["bad_json"]
    assert turn.content == "<tool_call>\nnope\n</tool_call>"


def test_unclosed_call_ends_where_the_next_one_opens() -> None:
    turn = parse_turn(f'<tool_call>\n{{"name": "f", "arguments": {{}}}}\n{GOOD}')
    assert kinds(turn) == ["unclosed_call"]
    assert calls(turn) == [("f", {"a": 1})]


@pytest.mark.parametrize("text", [f"{GOOD}\nand then", f"{GOOD} and {GOOD}"])
def test_text_after_or_between_calls_is_an_error(text: str) -> None:
    turn = parse_turn(text)
    assert kinds(turn) == ["stray_text"]
    assert len(turn.tool_calls) == text.count("<tool_call>")
    assert turn.content.startswith("and")


def test_reasoning_is_split_off_and_calls_inside_it_do_not_count() -> None:
    turn = parse_turn(f"<think>\nmaybe {GOOD}\n</think>\n\nHello", reasoning=True)
    assert turn == AssistantTurn("Hello", reasoning=f"maybe {GOOD}")
    assert turn.message()["reasoning_content"] == f"maybe {GOOD}"


def test_empty_think_block_is_not_the_same_as_none() -> None:
    assert parse_turn("<think>\n\n</think>\n\nHi", reasoning=True).reasoning == ""
    assert parse_turn("Hi", reasoning=True).reasoning is None
    assert "reasoning_content" not in parse_turn("Hi", reasoning=True).message()


def test_block_opened_by_the_prompt() -> None:
    turn = parse_turn("because\n</think>\n\nHi", reasoning=True, opened=True)
    assert (turn.reasoning, turn.content, turn.errors) == ("because", "Hi", [])


def test_unclosed_reasoning_is_an_error_and_no_call_in_it_counts() -> None:
    turn = parse_turn(f"<think>\nlong {GOOD}", reasoning=True, truncated=True)
    assert kinds(turn) == ["unclosed_reasoning"]
    assert (turn.content, turn.tool_calls, turn.truncated) == ("", [], True)
    assert turn.reasoning == f"long {GOOD}"


@pytest.mark.parametrize("text", ["Hi </think> you", "<think>a</think>b</think>c", "Hi <think>x"])
def test_second_or_late_think_tag_is_an_error(text: str) -> None:
    assert "stray_reasoning_tag" in kinds(parse_turn(text, reasoning=True))


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        GOOD,
        '{"name": "f"',
        "{",
        "}",
        "[",
        '"',
        "\n",
        " ",
        "é🙂",
        "x",
    ]
)


@given(st.lists(FRAGMENTS, max_size=14).map("".join), st.booleans())
def test_any_text_gives_a_turn_and_loses_no_visible_character(text: str, reasoning: bool) -> None:
    turn = parse_turn(text, reasoning=reasoning)
    seen = turn.content + (turn.reasoning or "") + GOOD * len(turn.tool_calls)
    tags = ("<think>", "</think>")
    missing = sorted(drop_tags(text, tags)) != sorted(drop_tags(seen, tags))
    assert not missing
    marked = any(tag in turn.content for tag in ("<tool_call>", "</tool_call>"))
    assert not marked or turn.errors, "a malformed call went unnoticed"
    assert all(error.kind in ErrorKind and error.message for error in turn.errors)


def drop_tags(text: str, tags: tuple[str, ...]) -> str:
    for tag in tags:
        text = text.replace(tag, "")
    return "".join(text.split())


UNITS = (
    "<tool_call>", '<tool_call>{"a": ', '<tool_call>["', '<tool_call>["\\"', '<tool_call>{"a": "x\\',
    '<tool_call>["a",', "<tool_call>" + "[" * 50, '<tool_call>{"a": 1}', "</tool_call>", "<think>", GOOD, '"', "\\",
    "x", "[",
)  # fmt: skip


@given(st.lists(st.sampled_from(UNITS), min_size=1, max_size=4), st.booleans())
def test_the_work_is_linear_in_the_turn(units: list[str], reasoning: bool) -> None:
    """Counted are the characters that are handed to the JSON reader, and how often the text is searched for tags."""
    text = "".join(units) * 500
    handed: list[int] = []
    searched: list[int] = []

    def read(part: str, at: int) -> object:
        handed.append(len(part))
        return read_json_at(part, at)

    def split(part: str, turn: int) -> object:
        searched.append(len(part))
        return split_calls(part, turn)

    split_calls = parsing._split_calls
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parsing, "read_json_at", read)
        patch.setattr(parsing, "_split_calls", split)
        parse_turn(text, reasoning=reasoning)
    passes = len(searched)
    assert passes <= 2
    assert sum(handed) <= 2 * passes * len(text)


def test_arguments_may_not_be_nested_so_that_code_cannot_walk_them() -> None:
    deep = "[" * 120 + "]" * 120
    turn = parse_turn(f'<tool_call>{{"name": "f", "arguments": {{"a": {deep}}}}}</tool_call>')
    assert kinds(turn) == ["bad_json"]
    assert "too deeply" in turn.errors[0].message
