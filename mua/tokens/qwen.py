"""Qwen2.5 and Qwen3: ChatML with Hermes-style tool calls.

Where Qwen3's official template rewrites history:

* Thinking: a new user query takes the reasoning out of all earlier turns. A new segment starts there.
* The *empty* think block (of ``enable_thinking=False``, or sampled by a thinking model) is left out of all but the
  last turn. The stream keeps it: a new segment each turn would cost a quadratic number of tokens to take four
  constant ones away. The shipped template renders the same with ``preserve_thinking=true``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from mua.tokens.chat_family import ChatFamily, apply_template
from mua.tokens.codec import ConversationError, TextSpan, content, fixed
from mua.tokens.parsing import CALL_CLOSE, CALL_OPEN, THINK_CLOSE, THINK_OPEN, AssistantTurn, dump_json, parse_turn
from mua.types import Json, Provenance, ToolSchema
from mua.utils.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HEADER = "<|im_start|>assistant\n"
_EMPTY_BLOCK = f"{THINK_OPEN}\n\n{THINK_CLOSE}\n\n"
_OPEN_BLOCK = f"{THINK_OPEN}\n"
_TOOLS_HEAD = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
_TOOLS_TAIL = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


class _Qwen(ChatFamily):
    """What both generations share."""

    end_of_turn = "<|im_end|>"
    end_of_text = "<|endoftext|>"
    turn_separator = "\n"

    def user(self, text: str) -> list[TextSpan]:
        return [fixed("<|im_start|>user\n"), content(text, Provenance.USER), fixed("<|im_end|>\n")]

    def instruction(self, text: str) -> list[TextSpan]:
        return [fixed("<|im_start|>system\n"), content(text, Provenance.SYSTEM), fixed("<|im_end|>\n")]

    def tool_results(self, results: Sequence[str]) -> list[TextSpan]:
        spans = [fixed("<|im_start|>user")]
        for result in results:
            spans += [fixed("\n<tool_response>\n"), content(result, Provenance.TOOL), fixed("\n</tool_response>")]
        return [*spans, fixed("<|im_end|>\n")]

    def generation_prompt(self) -> list[TextSpan]:
        return [fixed(_HEADER + self.opening)]

    def demonstration(self, message: Json) -> list[TextSpan]:
        who, thoughts = Provenance.SAMPLED, message.get("reasoning_content")
        if thoughts and not self.thinking:
            raise ConversationError(
                f"an assistant message holds reasoning_content, but the policy ({self.name}) does not think; "
                "remove it or set model.thinking: true on a model that can"
            )
        block = _think_block(thoughts or "", who, opened=self.opening == _OPEN_BLOCK) if self.thinking else []
        return [*block, *_body(message, who, after_block=self.thinking), fixed(self.end_of_turn, who)]

    def history(self, messages: Sequence[Json], tools: Sequence[ToolSchema]) -> list[TextSpan]:
        has_system = bool(messages) and messages[0]["role"] == "system"
        spans = self.system(messages[0]["content"] if has_system else None, tools)
        thinking = self._turns_with_think_block(messages)
        for index, message in enumerate(messages):
            if message["role"] == "user":
                spans += self.user(message["content"])
            elif message["role"] == "system" and index > 0:
                spans += self.instruction(message["content"])
            elif message["role"] == "assistant":
                spans.append(fixed(_HEADER))
                if index in thinking:
                    spans += _think_block(message.get("reasoning_content") or "", Provenance.TEMPLATE)
                spans += _body(message, Provenance.TEMPLATE, after_block=index in thinking)
                spans.append(fixed(self.end_of_turn + self.turn_separator))
            elif message["role"] == "tool" and (index == 0 or messages[index - 1]["role"] != "tool"):
                run = takewhile(lambda result: result["role"] == "tool", messages[index:])
                spans += self.tool_results([result["content"] for result in run])
        return spans

    def _turns_with_think_block(self, messages: Sequence[Json]) -> set[int]:
        return set()


class Qwen25(_Qwen):
    """Qwen2.5-Instruct: never thinks; a default system prompt where none is given."""

    name = "qwen2.5"
    control_tokens = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", CALL_OPEN, CALL_CLOSE)
    template = "qwen2_5.jinja"

    def system(self, system: str | None, tools: Sequence[ToolSchema]) -> list[TextSpan]:
        default = fixed("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")
        said = default if system is None else content(system, Provenance.SYSTEM)
        block = [fixed("\n\n"), *_tools(tools)] if tools else []
        return [fixed("<|im_start|>system\n"), said, *block, fixed("<|im_end|>\n")]

    def parse_text(self, text: str, *, turn: int = 0, truncated: bool = False) -> AssistantTurn:
        return parse_turn(text, turn=turn, truncated=truncated)

    @classmethod
    def opening_of(cls, tokenizer: PreTrainedTokenizerBase, *, thinking: bool, folder: Path) -> str:
        if thinking:
            raise ModelError(f"{folder}: Qwen2.5 has no thinking mode; set model.thinking: false")
        return ""


class Qwen3(_Qwen):
    """Qwen3, hybrid, instruct-only and thinking-only alike; which one is read from the generation prompt."""

    name = "qwen3"
    control_tokens = (*Qwen25.control_tokens, "<tool_response>", "</tool_response>", THINK_OPEN, THINK_CLOSE)
    template = "qwen3.jinja"

    def system(self, system: str | None, tools: Sequence[ToolSchema]) -> list[TextSpan]:
        if system is None and not tools:
            return []
        said = [] if system is None else [content(system, Provenance.SYSTEM)]
        gap = [fixed("\n\n")] if said and tools else []
        return [fixed("<|im_start|>system\n"), *said, *gap, *(_tools(tools) if tools else []), fixed("<|im_end|>\n")]

    def parse_text(self, text: str, *, turn: int = 0, truncated: bool = False) -> AssistantTurn:
        return parse_turn(text, turn=turn, truncated=truncated, reasoning=True, opened=self.opening == _OPEN_BLOCK)

    def rewrites(self, messages: Sequence[Json], since: int) -> bool:
        query = _last_query(messages)
        return self.thinking and any("reasoning_content" in message for message in messages[since : query + 1])

    def _turns_with_think_block(self, messages: Sequence[Json]) -> set[int]:
        if not self.thinking and not self.opening:  # an instruct-only model has no think blocks at all
            return set()
        query, last = _last_query(messages), len(messages) - 1
        return {
            index
            for index in range(query + 1, len(messages))
            if messages[index]["role"] == "assistant" and (index == last or messages[index].get("reasoning_content"))
        }

    @classmethod
    def opening_of(cls, tokenizer: PreTrainedTokenizerBase, *, thinking: bool, folder: Path) -> str:
        messages = [{"role": "user", "content": ""}]
        rendered = (apply_template(tokenizer, messages, [], enable_thinking=mode) for mode in (thinking, not thinking))
        opening, other = (text.rpartition(_HEADER)[2] for text in rendered)
        if thinking and (opening == _OPEN_BLOCK or (opening == "" and other == _EMPTY_BLOCK)):
            return opening
        if not thinking and opening in ("", _EMPTY_BLOCK):
            return opening
        raise ModelError(
            f"{folder}: with model.thinking: {str(thinking).lower()} its chat template opens the assistant's turn with "
            f"{opening!r}, so the model has no such mode; set model.thinking: {str(not thinking).lower()}"
        )


def _last_query(messages: Sequence[Json]) -> int:
    """Index of the last user message that is not itself dressed up as tool responses."""
    for index in range(len(messages) - 1, -1, -1):
        text = messages[index]["content"]
        wrapped = text.startswith("<tool_response>") and text.endswith("</tool_response>")
        if messages[index]["role"] == "user" and not wrapped:
            return index
    return len(messages) - 1


def _tools(tools: Sequence[ToolSchema]) -> list[TextSpan]:
    spans = [fixed(_TOOLS_HEAD)]
    for tool in tools:
        spans += [fixed("\n"), content(dump_json(tool.openai()), Provenance.SYSTEM)]
    return [*spans, fixed(_TOOLS_TAIL)]


def _think_block(thoughts: str, who: Provenance, *, opened: bool = False) -> list[TextSpan]:
    opening = [] if opened else [fixed(_OPEN_BLOCK, who)]
    return [*opening, content(thoughts.strip("\n"), who), fixed(f"\n{THINK_CLOSE}\n\n", who)]


def _body(message: Json, who: Provenance, *, after_block: bool = False) -> list[TextSpan]:
    """Text and tool calls of one assistant message."""
    said = message["content"]
    spans = [content(said.lstrip("\n") if after_block else said, who)]
    for index, call in enumerate(message.get("tool_calls") or []):
        function = call["function"]
        arguments = function["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        spans += [
            fixed(f"\n{CALL_OPEN}\n" if said or index else f"{CALL_OPEN}\n", who),
            content(f'{{"name": "{function["name"]}", "arguments": {dump_json(arguments)}}}', who),
            fixed(f"\n{CALL_CLOSE}", who),
        ]
    return spans
