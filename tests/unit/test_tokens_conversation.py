"""The token stream of an episode, written out by hand for both families.

Covers what each call appends and with which provenance, new segments, truncated turns, demonstrations and misuse.
Equality with the chat templates over random conversations is in tests/parity/test_tokens_template.py. The
tokenizers are small ones trained here; the official vocabularies are not available to the tests.
"""

from dataclasses import replace

import numpy as np
import pytest

from mua.environment.protocol import Transcript
from mua.tokens.chat_family import ChatFamily
from mua.tokens.conversation import Conversation
from mua.types import Provenance, ToolSchema
from mua.utils.errors import EngineError
from tests.tokens_fixtures import chat_family, generation, plain_ids, runs

TOOL = ToolSchema("look_up", "Finds è", {"type": "object", "properties": {"key": {"type": "string"}}})
TOOLS_TEXT = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TOOL_JSON = (
    '{"type": "function", "function": {"name": "look_up", "description": "Finds è", '
    '"parameters": {"type": "object", "properties": {"key": {"type": "string"}}}}}'
)
TOOLS_END = (
    "</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n<|im_start|>user\n'
)
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"key": "v"}}\n</tool_call>'


def sampled(family: ChatFamily, text: str, *, thinking: str | None = None, call: bool = False) -> list[int]:
    """Ids of a turn as a well-behaved policy samples it."""
    message = {"role": "assistant", "content": text}
    if thinking is not None:
        message["reasoning_content"] = thinking
    if call:
        message["tool_calls"] = [{"function": {"name": "look_up", "arguments": {"key": "v"}}}]
    return family.codec.encode(family.demonstration(message))[0].tolist()


def test_qwen3_without_thinking() -> None:
    family = chat_family("qwen3", False)
    talk = Conversation.begin(family, system="Be kind.", tools=[TOOL], user="hi")
    talk.prompt_ids()
    turn = talk.add_sampled(generation(sampled(family, "Wait.", call=True)))
    assert [call.name for call in turn.tool_calls] == ["look_up"]
    talk.add_tool_results(["one", "two\n"])
    talk.prompt_ids()
    talk.add_sampled(generation(sampled(family, "Done.")))
    talk.add_user("bye")
    (segment,) = talk.segments()
    assert runs(family, segment) == [
        ("TEMPLATE", "<|im_start|>system\n"),
        ("SYSTEM", "Be kind."),
        ("TEMPLATE", "\n\n" + TOOLS_TEXT),
        ("SYSTEM", TOOL_JSON + "\n"),  # one token holds the last braces and the line end
        ("TEMPLATE", TOOLS_END),
        ("USER", "hi"),
        ("TEMPLATE", "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("SAMPLED", f"Wait.\n{CALL}<|im_end|>"),
        ("TEMPLATE", "\n<|im_start|>user\n<tool_response>\n"),
        ("TOOL", "one"),
        ("TEMPLATE", "\n</tool_response>\n<tool_response>\n"),
        ("TOOL", "two\n\n"),
        ("TEMPLATE", "</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("SAMPLED", "Done.<|im_end|>"),
        ("TEMPLATE", "\n<|im_start|>user\n"),
        ("USER", "bye"),
        ("TEMPLATE", "<|im_end|>\n"),
    ]
    assert talk.turns == 2
    assert talk.length == len(segment)
    assert [message["role"] for message in talk.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "user",
    ]
    assert [message.get("tool_call_id") for message in talk.messages if message["role"] == "tool"] == ["call_0_0", None]


def test_turn_logprobs_and_versions_stand_at_the_sampled_tokens() -> None:
    family = chat_family("qwen3", False)
    talk = Conversation.begin(family, system=None, tools=[], user="hi")
    first, second = generation(sampled(family, "one, two, three"), version=4), generation(sampled(family, "four"))
    # The weights changed while the engine sampled the first turn.
    first = replace(first, versions=np.array([3] * 2 + [4] * (len(first.ids) - 2), np.int32))
    prompt = talk.prompt_ids()
    talk.add_sampled(first)
    talk.add_user("more " * 400)  # a stream outgrows the room that it began with
    longer = talk.prompt_ids()
    talk.add_sampled(second)
    (segment,) = talk.segments()
    mask = segment.loss_mask
    assert segment.ids[mask].tolist() == [*first.ids, *second.ids]
    assert segment.logprobs[mask].tolist() == [*first.logprobs, *second.logprobs]
    assert segment.version[mask].tolist() == [*first.versions, *second.versions]
    assert segment.ids[: len(longer)].tolist() == longer.tolist()
    assert segment.ids[: len(prompt)].tolist() == prompt.tolist()
    assert not segment.logprobs[~mask].any()
    assert set(segment.version[~mask]) == {-1}
    assert segment.turn.tolist() == [0] * (len(prompt) + len(first.ids)) + [1] * (
        len(segment) - len(prompt) - len(first.ids)
    )
    assert longer[: len(prompt) + len(first.ids)].tolist() == [*prompt, *first.ids]
    assert segment.ids.dtype == segment.version.dtype == segment.turn.dtype == np.int32
    assert (segment.provenance.dtype, segment.logprobs.dtype) == (np.uint8, np.float32)


def test_experts_of_each_turn_continue_those_before() -> None:
    family = chat_family("qwen3", False)
    talk = Conversation.begin(family, system=None, tools=[], user="hi")
    random = np.random.default_rng(0)
    rows = []
    for text, kind in (("one", np.uint8), ("two", np.uint16)):
        ids = sampled(family, text)
        missing = len(talk.prompt_ids()) + len(ids) - 1 - talk.routed
        rows.append(random.integers(0, 200, (missing, 4)).astype(kind))
        talk.add_sampled(replace(generation(ids), experts=rows[-1]))
        assert talk.routed == talk.length - 1
        talk.add_user("more")
    (segment,) = talk.segments()
    assert segment.experts is not None
    assert segment.experts.shape == (len(segment), 4)
    assert segment.experts.dtype == np.uint16
    known = np.concatenate(rows)
    assert np.array_equal(segment.experts[: len(known)], known)
    assert not segment.experts[len(known) :].any()


def test_turn_cut_by_length_gets_its_end_from_the_template() -> None:
    family = chat_family("qwen3", False)
    talk = Conversation.begin(family, system=None, tools=[], user="hi")
    talk.prompt_ids()
    turn = talk.add_sampled(generation(sampled(family, "half a")[:-1], "length"))
    assert turn.truncated
    assert Transcript(talk.messages).told_user() == []
    assert runs(family, talk.segments()[0])[-1] == ("SAMPLED", "half a")
    talk.add_user("go on")
    assert runs(family, talk.segments()[0])[-3:-1] == [
        ("TEMPLATE", "<|im_end|>\n<|im_start|>user\n"),
        ("USER", "go on"),
    ]


def test_thinking_starts_a_new_segment_where_a_query_drops_the_reasoning() -> None:
    family = chat_family("qwen3", True)
    talk = Conversation.begin(family, system=None, tools=[], user="hi")
    talk.prompt_ids()
    talk.add_sampled(generation(sampled(family, "", thinking="hm", call=True)))
    talk.add_tool_results(["one"])
    talk.prompt_ids()
    talk.add_sampled(generation(sampled(family, "It is one.", thinking="so")))
    talk.add_user("and?")
    talk.prompt_ids()
    talk.add_sampled(generation(sampled(family, "No more.", thinking="well")))
    talk.add_user("unanswered")
    first, second = talk.segments()
    assert runs(family, first) == [
        ("TEMPLATE", "<|im_start|>user\n"),
        ("USER", "hi"),
        ("TEMPLATE", "<|im_end|>\n<|im_start|>assistant\n"),
        ("SAMPLED", f"<think>\nhm\n</think>\n\n{CALL}<|im_end|>"),
        ("TEMPLATE", "\n<|im_start|>user\n<tool_response>\n"),
        ("TOOL", "one"),
        ("TEMPLATE", "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
        ("SAMPLED", "<think>\nso\n</think>\n\nIt is one.<|im_end|>"),
    ]
    assert runs(family, second) == [
        ("TEMPLATE", "<|im_start|>user\n"),
        ("USER", "hi"),
        ("TEMPLATE", f"<|im_end|>\n<|im_start|>assistant\n{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n"),
        ("TOOL", "one"),
        ("TEMPLATE", "\n</tool_response><|im_end|>\n<|im_start|>assistant\nIt is one.<|im_end|>\n<|im_start|>user\n"),
        ("USER", "and?"),
        ("TEMPLATE", "<|im_end|>\n<|im_start|>assistant\n"),
        ("SAMPLED", "<think>\nwell\n</think>\n\nNo more.<|im_end|>"),
    ]
    assert talk.messages[1]["reasoning_content"] == "hm"
    # Turns are counted over the trajectory, so that their rewards and credits find them.
    assert [sorted(set(segment.turn[segment.loss_mask])) for segment in (first, second)] == [[0, 1], [2]]


def test_a_new_segment_owes_nothing_to_the_turn_before_it() -> None:
    family = chat_family("qwen3", True)
    talk = Conversation.begin(family, system=None, tools=[], user="hi")
    talk.prompt_ids()
    cut = sampled(family, "It is", thinking="so")[:-1]  # the template owes the end of the turn
    talk.add_sampled(generation(cut, "length"))
    talk.add_user("and?")
    talk.add_user("well?")
    talk.prompt_ids()
    talk.add_sampled(generation(sampled(family, "No.", thinking="hm")))
    _, second = talk.segments()
    assert runs(family, second)[2:6] == [
        ("TEMPLATE", "<|im_end|>\n<|im_start|>assistant\nIt is<|im_end|>\n<|im_start|>user\n"),
        ("USER", "and?"),
        ("TEMPLATE", "<|im_end|>\n<|im_start|>user\n"),
        ("USER", "well?"),
    ]


@pytest.mark.parametrize("bad", [generation([5], "abort"), generation([5], "stop"), generation([], "stop")])
def test_unusable_generation_is_the_engines_fault(bad: object) -> None:
    talk = Conversation.begin(chat_family("qwen3", False), system=None, tools=[], user="hi")
    talk.prompt_ids()
    with pytest.raises(EngineError):
        talk.add_sampled(bad)


def test_only_whole_plain_turns_count_as_told_to_the_user() -> None:
    family = chat_family("qwen3", False)
    talk = Conversation.begin(family, system=None, tools=[], user="hi")
    for text in ("The code is 7. <tool_call>{", "Fine."):
        talk.prompt_ids()
        talk.add_sampled(generation([*plain_ids(family, text), family.stop_token_ids[0]]))
        talk.add_tool_results(["error"])
    assert Transcript(talk.messages).told_user() == ["Fine."]


def test_ids_beyond_the_vocabulary_are_kept_though_they_have_no_text() -> None:
    family = chat_family("qwen3", False)
    talk = Conversation.begin(family, system=None, tools=[], user="hi")
    talk.prompt_ids()
    ids = [*plain_ids(family, "a"), family.codec.vocabulary_size + 7, family.stop_token_ids[0]]
    assert talk.add_sampled(generation(ids)).content == "a"
    (segment,) = talk.segments()
    assert segment.ids[segment.provenance == Provenance.SAMPLED].tolist() == ids
