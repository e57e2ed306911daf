"""Recorded conversations from files and stores: read, checked, and turned into token streams as an episode would have
left them. Files and folders are those of :mod:`mua.trainer.dataset_files`.

A record may have any of the forms people have:

================== ===================================================================================================
form               record
================== ===================================================================================================
OpenAI             ``{"messages": [{"role": ..., "content": ...}], "tools": [...]}``; content is text or text parts
ShareGPT           ``{"conversations": [{"from": ..., "value": ...}], "system": ..., "tools": ...}``
prompt, completion ``{"prompt": ..., "completion": ...}``, each a text or messages, as TRL and OpenAI's files have them
instruction        ``{"instruction": ..., "input": ..., "output": ..., "system": ...}`` (Alpaca)
================== ===================================================================================================

Entries of ``messages`` and of ``conversations`` are read alike. Calls may stand in ``tool_calls``, in an entry of their
own (``function_call``, ``tool_call``) or, as Hermes and Qwen write them, as ``<tool_call>`` blocks in the text.
Reasoning may have any of its names, be a part of the content, or a ``<think>`` block that begins the text. All become
what the chat template of the trained policy writes.

Every key is used, refused, or counted and reported once for each file. Tables write null where a record has no such
key, so null counts as absent, and in a call's arguments it stays only where the tool's schema requires the argument. A
demonstration is held to what :func:`mua.rollout.episode.find_turn_error` says of a policy's turn.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from sqlalchemy.engine import Connection

from mua.config.schema import ExperimentConfig, StoredDemonstrations
from mua.environment.tool_arguments import fitted, validate_arguments, without_nulls
from mua.rollout.episode import find_turn_error
from mua.store.database import Store
from mua.store.stored_groups import demonstrations, recorded_run
from mua.tokens.chat_family import ChatFamily
from mua.tokens.codec import ConversationError, check_recorded_tokenizer
from mua.tokens.conversation import Conversation
from mua.tokens.parsing import THINK_OPEN, parse_turn
from mua.trainer.dataset_files import read_records
from mua.types import Json, Provenance, Segment, ToolSchema, Trajectory
from mua.utils.errors import ConfigError
from mua.utils.seeds import derived_seed
from mua.utils.strict_json import JsonError, printable, read_json

Conversations: TypeAlias = list[list[Segment]]
"""The segments of each conversation."""

LOSS_KEYS = {
    "weight": "OpenAI, Mistral, Fireworks", "loss": "ms-swift", "loss_scale": "ms-swift",
    "loss_weight": "LLaMA-Factory", "loss_mask": "verl", "step_loss_mask": "slime", "train": "axolotl",
    "training": "axolotl", "trainable": "others", "masked": "torchtune", "mask": "others", "ignore": "others",
}  # fmt: skip
"""What says whether a turn, or a whole record, carries loss: 1 or true, 0 or false; who writes it so."""
_NO_LOSS_IF_TRUE = ("masked", "mask", "ignore")
_REASONING = ("reasoning_content", "reasoning", "thinking", "reasoning_details", "thinking_blocks")
_ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "function_call": "calls", "tool_call": "calls", "tool": "tool", "observation": "tool",
    "function": "tool", "tool_response": "tool",
}  # fmt: skip
"""Of OpenAI, LLaMA-Factory, axolotl, ms-swift and, with capitals, NeMo."""
_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_PARTS = ("thinking", "reasoning", "reasoning_text", "reasoning.text")
_ANSWERS = ("completion", "response", "answer", "output")
"""What stands beside ``prompt`` as that which is to be learned."""
_UNSUPPORTED = {
    name: reason
    for names, reason in (
        ("images videos audios image video audio objects", "only text is trained"),
        ("input_ids labels attention_mask assistant_masks completion_mask token_ids", "tokens are made here"),
        ("train_detail training_detail reasoning_training_detail", "a turn carries loss as a whole or not at all"),
        ("tool_call_errors truncated", "the turn was malformed or cut; exclude it with weight 0"),
        ("refusal", "write it as content, or leave the record out"),
    )
    for name in names.split()
}
_FORMS = (
    'a record has "messages" (OpenAI form), "conversations" (ShareGPT form), "prompt" and "completion", or '
    '"instruction" and "output"; its keys are '
)

log = logging.getLogger(__name__)


def load_sets(config: ExperimentConfig, family: ChatFamily) -> tuple[Conversations, Conversations]:
    """What ``sft.data`` or ``sft.stored`` trains on, and what ``sft.validation`` holds out or names (nothing if it is
    not set)."""
    assert config.sft is not None
    if config.sft.data is not None:
        name, conversations = str(config.sft.data), load_conversations(config.sft.data, family, config)
    else:
        assert config.sft.stored is not None
        name, conversations = load_stored(config.sft.stored, family, config)
    validation = config.sft.validation
    if validation is None:
        return conversations, []
    if isinstance(validation, Path):
        return conversations, load_conversations(validation, family, config, key="sft.validation")
    training, held_out = hold_out(conversations, validation, config.seed)
    if not training or not held_out:
        raise ConfigError(
            f"sft.validation: {validation:g} of the {len(conversations)} conversations in {name} leaves "
            f"{len(training)} to train on and {len(held_out)} to validate on; choose another share"
        )
    return training, held_out


def hold_out(conversations: Conversations, share: float, seed: int) -> tuple[Conversations, Conversations]:
    """Training and validation part, in the order given; the same for the same conversations, share and seed.

    Which part a conversation falls into is drawn by what it says, so that copies of one conversation, common in
    collected data, never stand on both sides. The validation part is the first to reach ``share`` of all.
    """

    def digest(segments: Sequence[Segment]) -> bytes:
        found = hashlib.sha256(str(seed).encode())
        for segment in segments:
            found.update(segment.ids.tobytes())
            found.update(segment.provenance.tobytes())
        return found.digest()

    digests = [digest(segments) for segments in conversations]
    chosen = set(sorted(digests)[: math.ceil(share * len(conversations))])
    parts: tuple[Conversations, Conversations] = ([], [])
    for conversation, drawn in zip(conversations, digests, strict=True):
        parts[drawn in chosen].append(conversation)
    return parts


def load_conversations(
    path: Path, family: ChatFamily, config: ExperimentConfig, *, key: str = "sft.data"
) -> Conversations:
    """The segments of every conversation in a file; ``key`` is the setting that names it.

    What was left out or not read is logged with its count. Raises :class:`ConfigError` naming file and line for what
    cannot be read, and for a conversation longer than ``model.max_length`` unless ``sft.overlong`` leaves it out.
    """
    assert config.sft is not None
    train_on, reader = config.sft.train_on, RecordReader(thinking=family.thinking)

    def read() -> Iterator[tuple[str, list[Segment]]]:
        for where, record in read_records(path, key):
            try:
                if (found := reader.read(record)) is not None:
                    messages, tools, checked, last = found
                    find_error = partial(find_turn_error, tools=checked or None)
                    conversation = Conversation.from_messages(
                        family, messages, tools, train_on="last" if last else train_on, find_error=find_error
                    )
                    reader.unchecked += not tools and any("tool_calls" in message for message in messages)
                    yield where, conversation.segments()
                continue
            except ConversationError as error:
                reason = str(error)
            except KeyError as error:
                reason = f"the key {error} is missing"
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                reason = f"not in OpenAI form ({type(error).__name__}: {error})"
            raise ConfigError(f"{where}: not a conversation: {printable(reason)}")

    try:
        return _within_limit(read(), config, str(path), f"{key}: {path} holds no conversation")
    finally:
        for note in reader.notes():
            log.warning("%s: %s: %s", key, path, note)


def load_stored(
    source: StoredDemonstrations, family: ChatFamily, config: ExperimentConfig
) -> tuple[str, Conversations]:
    """The store's name for messages, and the segments of every episode of ``source``, token for token as it was
    sampled.

    Raises :class:`ConfigError` where there is none, where the policy has another tokenizer, and for an episode longer
    than ``model.max_length`` unless ``sft.overlong`` leaves it out; :class:`mua.store.faults.StoreError` where the
    store cannot be read.
    """
    assert config.sft is not None
    chosen, size = config.sft, family.codec.vocabulary_size

    def read(connection: Connection) -> Iterator[tuple[str, list[Segment]]]:
        for name, trajectory in demonstrations(connection, source):
            if segments := _imitated(trajectory, chosen.train_on):
                if (largest := max(int(segment.ids.max()) for segment in segments)) >= size:
                    raise ConfigError(
                        f"sft.stored: trajectory {name} has the token id {largest}; the policy knows {size}"
                    )
                yield f"sft.stored: trajectory {name}", segments

    with Store.open(source.store, create=False, write=False) as store, store.read() as connection:
        check_recorded_tokenizer(config.model.path, recorded_run(connection, source))
        empty = f"sft.stored: {store.name} holds no episode that this section asks for"
        conversations = _within_limit(read(connection), config, store.name, empty)
    log.info("%s: %d episodes", store.name, len(conversations))
    return store.name, conversations


def _within_limit(
    read: Iterable[tuple[str, list[Segment]]], config: ExperimentConfig, name: str, empty: str
) -> Conversations:
    """Those that fit ``model.max_length``. Raises :class:`ConfigError` for one that does not, unless ``sft.overlong``
    leaves it out, and with ``empty`` where none is left."""
    assert config.sft is not None
    limit = config.model.max_length
    conversations, skipped = [], 0
    for where, segments in read:
        if (longest := max(map(len, segments))) <= limit:
            conversations.append(segments)
        elif config.sft.overlong == "skip":
            skipped += 1
        else:
            raise ConfigError(
                f"{where}: {longest} tokens exceed model.max_length {limit}; raise it, or leave such conversations "
                "out with sft.overlong: skip"
            )
    if skipped:
        log.warning("%s: %d conversations are longer than model.max_length %d and left out", name, skipped, limit)
    if not conversations:
        raise ConfigError(empty + (f" of at most {limit} tokens" if skipped else ""))
    return conversations


def _imitated(trajectory: Trajectory, train_on: Literal["all", "last"]) -> list[Segment]:
    """The segments with sampled tokens; with ``last`` those of the last turn alone count as sampled."""
    segments = [segment for segment in trajectory.segments if segment.loss_mask.any()]
    if train_on == "all" or not segments:
        return segments
    last = max(int(segment.turn[segment.loss_mask].max()) for segment in segments)
    cut = []
    for segment in segments:
        earlier = segment.loss_mask & (segment.turn < last)
        provenance = np.where(earlier, np.uint8(Provenance.TEMPLATE), segment.provenance)
        cut.append(replace(segment, provenance=provenance))
    return [segment for segment in cut if segment.loss_mask.any()]


def batch_members(pool: Sequence[int], size: int, step: int, seed: int) -> list[int]:
    """The members of one step: positions of an endless stream of shuffled passes over ``pool``."""
    chosen: list[int] = []
    while len(chosen) < size:
        epoch, start = divmod(step * size + len(chosen), len(pool))
        order = list(pool)
        random.Random(derived_seed("sft", seed, epoch)).shuffle(order)
        chosen += order[start : start + size - len(chosen)]
    return chosen


class RecordReader:
    """Reads the records of one file, and counts what it leaves out and which keys it does not read."""

    def __init__(self, *, thinking: bool) -> None:
        self._thinking = thinking
        self._unread = Counter[str]()
        self._without_loss = 0
        self.unchecked = 0
        """Records with calls that list no tools, so that nothing can be said of names and arguments."""
        self._schemaless: dict[str, str] = {}

    def notes(self) -> Iterator[str]:
        """What a person has to know of the file, a line each."""
        if self._without_loss:
            yield f"{self._without_loss} records carry no loss, as their own keys say, and are left out"
        if self.unchecked:
            yield f"{self.unchecked} records have tool calls and list no tools: names and arguments were not checked"
        for name, reason in self._schemaless.items():
            yield f"the parameters of {printable(name)} are no JSON Schema ({reason}): its arguments were not checked"
        if self._unread:
            keys = ", ".join(f"{printable(name, 60)} ({count})" for name, count in self._unread.most_common(30))
            yield f"keys that are not read, with how often they occur: {keys}"

    def read(self, record: Any) -> tuple[list[Json], list[ToolSchema], dict[str, ToolSchema], bool] | None:
        """Messages in OpenAI form, an assistant's with ``"weight": 0`` where it carries no loss; the tools as the
        prompt has them, and by name as calls are checked by them; and whether the last turn alone is to carry loss.
        None of a record that is to be left out.

        Raises :class:`ConversationError` (or what a wrong shape raises) for a record of no such form.
        """
        if not isinstance(record, dict):
            raise ConversationError(f"a record is an object, not {type(record).__name__}")
        record = {name: value for name, value in record.items() if value is not None}
        masks = {name: record.pop(name) for name in LOSS_KEYS if isinstance(record.get(name), list)}
        verdicts = {name: record.pop(name) for name in ("label", "kto_tag") if isinstance(record.get(name), bool)}
        if str(record.get("mask", "")).lower() == "user":  # NeMo's, who is not imitated
            del record["mask"]
        if _carries_loss(record) is False or not all(verdicts.values()):
            self._without_loss += 1
            return None
        for name in ("train_on_input", "train_on_inputs", "train_on_prompt"):
            if record.pop(name, False):
                raise ConversationError(f'"{name}" is set, and only what the agent says can be trained')
        asked = record.pop("chat_template_kwargs", {})
        asked = without_nulls(_json("chat_template_kwargs", asked) if isinstance(asked, str) else asked)
        for place in (record, asked):
            if (thinking := place.pop("enable_thinking", self._thinking)) != self._thinking:
                raise ConversationError(f'"enable_thinking" is {thinking!r}, model.thinking {self._thinking}')
        self._count(asked, "chat_template_kwargs.")
        tools = [*self._tools(_objects(record, "tools" if "tools" in record else "functions"))]
        key, entries = _entries(record)
        _spread(masks, entries)
        checked = self._checked(tools)
        messages = self._messages(entries, key, checked)
        if (last := record.pop("mask_history", False)) not in (False, True):
            raise ConversationError(f"mask_history is {last!r:.50}; it must be true or false")
        self._count(record, "")
        if not any(one["role"] == "assistant" for one in messages):
            raise ConversationError("nothing in it is said by the assistant")
        if all(one.get("weight") == 0 for one in messages if one["role"] == "assistant"):
            self._without_loss += 1
            return None
        return messages, tools, checked, last

    def _checked(self, tools: Sequence[ToolSchema]) -> dict[str, ToolSchema]:
        """Tools by name; one whose parameters are no JSON Schema takes any arguments, and is noted."""
        checked = {}
        for tool in tools:
            try:
                validate_arguments(tool, {})
            except ValueError as error:
                self._schemaless.setdefault(tool.name, printable(str(error).split("\n")[0], 100))
                tool = replace(tool, parameters={})
            checked[tool.name] = tool
        return checked

    def _count(self, entry: Json, place: str) -> None:
        """What is left of ``entry`` was not read. Raises for what must not be passed over."""
        for name, value in entry.items():
            if value in (None, "", [], {}) or (value is False and name in _UNSUPPORTED):
                continue
            if name in _UNSUPPORTED:
                raise ConversationError(f'"{place}{name}" is not supported: {_UNSUPPORTED[name]}')
            self._unread[place + name] += 1

    def _tools(self, listed: list[Json]) -> Iterator[ToolSchema]:
        """Wrapped as OpenAI does or not; MUA-RL's data wraps them all at once."""
        for tool in map(without_nulls, listed):
            inner = tool.pop("function", tool)
            if tool.pop("type", "function") != "function":
                raise ConversationError('"tools" has one of another type than "function"')
            self._count(tool if inner is not tool else {}, "tools[].")
            for one in inner if isinstance(inner, list) else [inner]:
                function = dict(one)
                name, description = function.pop("name"), function.pop("description", "")
                parameters: Any = next(
                    (function.pop(key) for key in ("parameters", "input_schema", "inputSchema") if key in function), {}
                )
                if isinstance(parameters, str):  # as tables of strings keep what has no one shape
                    parameters = without_nulls(_json("parameters", parameters))
                self._count(function, "tools[].function.")
                yield ToolSchema(name, description, parameters)

    def _messages(self, entries: list[Json], key: str, tools: dict[str, ToolSchema]) -> list[Json]:
        messages: list[Json] = []
        for index, entry in enumerate(entries):
            try:
                for message in self._message(entry, tools):
                    unsaid = not message["content"] and "reasoning_content" not in message
                    last = messages[-1] if messages else {}
                    # The calls of a message without text belong to the agent's unfinished message before it.
                    if unsaid and "tool_calls" in message and last.get("role") == "assistant":
                        if last.get("weight") != message.get("weight"):
                            raise ConversationError(
                                "these calls and the text before them are one message; give both the same weight"
                            )
                        last.setdefault("tool_calls", []).extend(message["tool_calls"])
                    elif message["role"] == last.get("role") == "system" and len(messages) == 1:
                        last["content"] = "\n\n".join(filter(None, (last["content"], message["content"])))
                    else:
                        messages.append(message)
            except ConversationError as error:
                raise ConversationError(f"{key}[{index}]: {error}") from None
        for index, message in enumerate(messages):
            order = {call.get("id"): place for place, call in enumerate(message.get("tool_calls", ()))}
            results = [*takewhile(lambda one: one["role"] == "tool", messages[index + 1 :])]
            if order and None not in order and all("tool_call_id" in result for result in results):
                if strange := [one["tool_call_id"] for one in results if one["tool_call_id"] not in order]:
                    raise ConversationError(f"a result answers the call {strange[0]!r:.100}, which is not there")
                # Templates write no ids: a result is told to be a call's by its place alone.
                results.sort(key=lambda one: order[one["tool_call_id"]])
                messages[index + 1 : index + 1 + len(results)] = results
        return messages

    def _message(self, entry: Json, tools: dict[str, ToolSchema]) -> list[Json]:
        """An entry in OpenAI form; results of several calls in one text are several messages."""
        entry = {name: value for name, value in entry.items() if value is not None}
        said = entry.pop("role", None) or entry.pop("from", None)
        role = _ROLES.get(said.lower()) if isinstance(said, str) else None
        if role is None:
            raise ConversationError(f"role {said!r:.100}; roles are {', '.join(_ROLES)}")
        content, thoughts = _split_parts(entry.pop("content" if "content" in entry else "value", None))
        if role in ("assistant", "calls"):
            return [self._assistant(entry, content, thoughts, tools, calls=role == "calls")]
        if content is None or thoughts:
            raise ConversationError(f"the content of a message of {said} must be a text")
        answered = {"tool_call_id": entry.pop("tool_call_id")} if role == "tool" and "tool_call_id" in entry else {}
        for name in LOSS_KEYS:  # only the agent's turns carry loss, whatever these say
            if entry.get(name) in (0, 1) and not (name == "train" and entry[name]):
                del entry[name]
        self._count(entry, f"messages[].{role}.")
        texts = _results(content) if role == "tool" else [content]
        return [{"role": role, "content": text, **answered} for text in texts]

    def _assistant(
        self, entry: Json, content: str | None, thoughts: list[str], tools: dict[str, ToolSchema], *, calls: bool
    ) -> Json:
        carries_loss = _carries_loss(entry)
        listed = _objects(entry, "tool_calls") if "tool_calls" in entry else []
        listed += [entry.pop("function_call")] if "function_call" in entry else []
        for name in _REASONING:
            text, more = _split_parts(entry.pop(name, None))
            thoughts = [*thoughts, *([text] if text else []), *more]
        thoughts = list(dict.fromkeys(thoughts))  # some write the same under two names
        turn = parse_turn(content or "", reasoning=(content or "").lstrip().startswith(THINK_OPEN))
        if turn.errors and carries_loss is not False:
            raise ConversationError(turn.errors[0].message)
        if not turn.errors:
            content, thoughts = turn.content, [*thoughts, *([turn.reasoning] if turn.reasoning else [])]
            written = [{"name": call.name, "arguments": call.arguments} for call in turn.tool_calls]
            if listed and written:
                raise ConversationError("calls stand both in tool_calls and in the text; write them once")
            listed += written
        if calls:
            found = _json("function call", content or "")
            content, listed = "", found if isinstance(found, list) else [found]
            if not listed or not all(isinstance(call, dict) for call in listed):
                raise ConversationError('a function call is {"name": ..., "arguments": {...}}, or a list of them')
        if len(thoughts) > 1:
            raise ConversationError("reasoning stands in several places and is not the same; write it once")
        message: Json = {"role": "assistant", "content": content or ""}
        message |= {"reasoning_content": thoughts[0]} if thoughts else {}
        message |= {"tool_calls": [self._call(call, tools) for call in listed]} if listed else {}
        message |= {"weight": 0} if carries_loss is False else {}
        for name in ("tool_call_errors", "truncated") if carries_loss is False else ():
            entry.pop(name, None)
        self._count(entry, "messages[].")
        return message

    def _call(self, call: Json, tools: dict[str, ToolSchema]) -> Json:
        call = {name: value for name, value in call.items() if value is not None}
        identity, kind = call.pop("id", None), call.pop("type", "function")
        if kind != "function":
            raise ConversationError(f"a tool call is of type {kind!r:.100}; only functions can be called")
        flat = "function" not in call
        function = dict(call if flat else call.pop("function"))
        name, arguments = function.pop("name", None), function.pop("arguments", None)
        arguments = _json("arguments", arguments) if isinstance(arguments, str) else arguments
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ConversationError("a call needs a name (a string) and arguments (an object)")
        self._count({} if flat else call, "tool_calls[].")
        self._count(function, "tool_calls[].function.")
        tool = tools.get(name)
        arguments = without_nulls(arguments, tool and tool.parameters)
        written = {"name": name, "arguments": fitted(tool, arguments) if tool else arguments}
        return {**({"id": identity} if identity else {}), "type": "function", "function": written}


def _carries_loss(entry: Json) -> bool | None:
    """What :data:`LOSS_KEYS` of ``entry`` say, which are taken out of it; None where there is none."""
    told: dict[str, bool] = {}
    for name in LOSS_KEYS:
        if (value := entry.pop(name, None)) is not None:
            if value not in (0, 1):
                raise ConversationError(f"{name} is {value!r:.50}; it must be 0 (no loss) or 1")
            told[name] = bool(value) != (name in _NO_LOSS_IF_TRUE)
    if len(set(told.values())) > 1:
        raise ConversationError(f"{' and '.join(told)} say two things: whether it carries loss must be one")
    return next(iter(told.values()), None)


def _spread(masks: dict[str, list[Any]], entries: list[Json]) -> None:
    """Give each entry what a record's list says of it: one value for every entry, or for every one of the agent."""
    roles = [_ROLES.get(str(entry.get("role") or entry.get("from")).lower()) for entry in entries]
    agents = [entry for entry, role in zip(entries, roles, strict=True) if role in ("assistant", "calls")]
    for name, values in masks.items():
        chosen = entries if len(values) == len(entries) else agents
        if len(values) != len(chosen):
            raise ConversationError(
                f"{name} has {len(values)} values for {len(entries)} messages, {len(agents)} of them the agent's"
            )
        for entry, value in zip(chosen, values, strict=True):
            if value is not None and entry.setdefault(name, value) != value:
                raise ConversationError(f"{name} of the record and of a message say two things: {value!r:.50} and "
                                        f"{entry[name]!r:.50}")  # fmt: skip


def _entries(record: Json) -> tuple[str, list[Json]]:
    """The messages of a record of any form, taken out of it; and the key that they stand under."""
    for key in ("messages", "conversations"):
        if key in record:
            return key, _with_system(record, _objects(record, key))
    if "prompt" in record:
        if (key := next((key for key in _ANSWERS if key in record), "")) == "":
            raise ConversationError('"prompt" without "completion": there is nothing to learn')
        prompt, answer = _said(record, "prompt", "user"), _said(record, key, "assistant")
        # What stands in the prompt was said before: it carries no loss.
        for entry in prompt:
            entry |= {"weight": 0} if entry.get("role") == "assistant" else {}
        if not any(message.get("role") == "assistant" for message in answer):
            raise ConversationError(f'"{key}" holds no message of the assistant')
        return "prompt", _with_system(record, prompt + answer)
    if "instruction" in record and "output" in record:
        turns: list[Json] = []
        for pair in record.pop("history", []):  # earlier turns, as LLaMA-Factory has them: question and answer
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
                raise ConversationError('"history" must be pairs of texts')
            turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
        asked = "\n".join(_text_of(record, key) for key in ("instruction", "input") if record.get(key))
        return "instruction", _with_system(
            record, [*turns, {"role": "user", "content": asked}, *_said(record, "output", "assistant")]
        )
    hint = ""
    if "chosen" in record:
        hint = "; of preference pairs only one side can be imitated: write it as messages"
    elif list(record) == ["text"]:
        hint = "; plain text has no turns to tell apart"
    raise ConversationError(f"{_FORMS}{', '.join(map(str, record)) or 'none'}{hint}")


def _said(record: Json, key: str, role: str) -> list[Json]:
    """A text as one message of ``role``, with its reasoning if that stands beside it; messages as they are."""
    with suppress(JsonError):  # tables of strings keep messages as JSON text
        found = read_json(record[key]) if isinstance(record[key], str) else None
        if isinstance(found, list) and found and all(isinstance(one, dict) and "role" in one for one in found):
            record[key] = found
    if isinstance(record[key], dict):
        return [record.pop(key)]
    if isinstance(record[key], list):
        return _objects(record, key)
    beside = {name: record.pop(name) for name in _REASONING if role == "assistant" and name in record}
    return [{"role": role, "content": _text_of(record, key), **beside}]


def _with_system(record: Json, entries: list[Json]) -> list[Json]:
    first = (entries[0].get("role") or entries[0].get("from")) if entries else None
    if record.get("system") and first not in ("system", "developer"):
        return [{"role": "system", "content": _text_of(record, "system")}, *entries]
    return entries


def _text_of(record: Json, key: str) -> str:
    if not isinstance(text := record.pop(key), str):
        raise ConversationError(f'"{key}" must be a text, not {type(text).__name__}')
    return text


def _split_parts(value: Any) -> tuple[str | None, list[str]]:
    """The text of content, and the reasoning among its parts, of OpenAI's, Anthropic's and LLaMA-Factory's kinds."""
    if value is None or isinstance(value, str):
        return value, []
    if not isinstance(value, list):
        raise ConversationError(f"content must be a text or a list of parts, not {type(value).__name__}")
    texts, thoughts = list[str](), list[str]()
    for place, part in enumerate(value):
        part = {"text": part} if isinstance(part, str) else part
        kind = part.get("type") or "text" if isinstance(part, dict) else None
        names = ("text", "value", "content", "thinking", "reasoning")  # LLaMA-Factory's, axolotl's, Anthropic's
        text = next((part[name] for name in names if isinstance(part.get(name), str)), None) if kind else None
        if text is None or kind not in (*_TEXT_PARTS, *_REASONING_PARTS) or _carries_loss(dict(part)) is False:
            raise ConversationError(
                f"content[{place}] is a part of type {kind!r:.100}; only whole texts and reasoning are trained: leave "
                "out such parts, or the record"
            )
        (texts if kind in _TEXT_PARTS else thoughts).append(text)
    return None if thoughts and not texts else "".join(texts), ["\n\n".join(thoughts)] if thoughts else []


def _results(value: str) -> list[str]:
    """One result, or those that stand in ``<tool_response>`` blocks: the template puts them into blocks again."""
    *blocks, rest = [part.strip() if part.isspace() else part.lstrip() for part in value.split("</tool_response>")]
    if not blocks or rest or not all(block.startswith("<tool_response>") for block in blocks):
        return [value]
    return [block.removeprefix("<tool_response>").removeprefix("\n").removesuffix("\n") for block in blocks]


def _objects(record: Json, key: str) -> list[Json]:
    """An array of objects, taken out of ``record``; tables of strings (Parquet, CSV) keep it as JSON text."""
    value = record.pop(key, None) or []
    if isinstance(value, str):
        value = _json(key, value)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ConversationError(f'"{key}" must be an array of objects')
    return [dict(item) for item in value]


def _json(key: str, text: str) -> Any:
    try:
        return read_json(text)
    except JsonError as error:
        raise ConversationError(f'"{key}" is text that is not valid JSON ({error})') from None
