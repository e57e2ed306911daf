"""Recorded conversations from files and stores: read, checked, and turned into token streams as an episode would have
left them.

======================= ================================================== ====================
what                    how it is known                                    place
======================= ================================================== ====================
JSON lines, JSON array  neither of those below                             ``file:line``
either, gzipped         its first two bytes                                ``file:line``
Parquet                 ``PAR1`` at its beginning                          ``file, row N``
Arrow (file or stream)  ``ARROW1``, or the ending ``.arrow``               ``file, row N``
folder of a dataset     ``dataset_dict.json`` or ``state.json``, as        ``file, row N``
                        ``Dataset.save_to_disk`` of Hugging Face writes
folder of files         those of the above endings, by split if they       of each file
                        name one (``train-00000-of-00002.parquet``)
======================= ================================================== ====================

Tables write null where a record has no such key; nulls of tables are taken out.

A record may have any of the forms people have:

================== ===================================================================================================
form               record
================== ===================================================================================================
OpenAI             ``{"messages": [{"role": ..., "content": ...}], "tools": [...]}``; content is text or text parts
ShareGPT           ``{"conversations": [{"from": ..., "value": ...}], "system": ..., "tools": ...}``
prompt, completion ``{"prompt": ..., "completion": ...}``, each a text or messages, as TRL and OpenAI's files have them
instruction        ``{"instruction": ..., "input": ..., "output": ..., "system": ...}`` (Alpaca)
================== ===================================================================================================

A message of role ``developer`` is the system message; one of ``function`` with ``function_call`` is a tool's. Of a
prompt nothing carries loss.

ShareGPT records are read as LLaMA-Factory and others write them::

    {"conversations": [{"from": "human", "value": "Where is W1?"},
                       {"from": "function_call", "value": "{\\"name\\": \\"get_order\\", \\"arguments\\": {...}}"},
                       {"from": "observation", "value": "..."},
                       {"from": "gpt", "value": "It is on its way."}],
     "system": "...", "tools": "[{\\"name\\": ..., \\"parameters\\": {...}}]"}

What the agent did may stand in ``function_call`` values (one call or a list of them) or, as Hermes and Qwen write it,
as ``<tool_call>`` and ``<think>`` blocks inside ``gpt`` values; both become what the chat template of the trained
policy writes. Reading is strict: what is not well-formed is refused, never trained as plain text. An agent's entry with
``"weight": 0`` carries no loss.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import math
import random
import re
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from sqlalchemy.engine import Connection

from mua.config.schema import ExperimentConfig, StoredDemonstrations
from mua.store.database import Store
from mua.store.stored_groups import demonstrations, recorded_run
from mua.tokens.chat_family import ChatFamily
from mua.tokens.codec import ConversationError, check_recorded_tokenizer
from mua.tokens.conversation import Conversation
from mua.tokens.parsing import parse_turn
from mua.types import Json, Provenance, Segment, ToolSchema, Trajectory
from mua.utils.errors import ConfigError, one_line
from mua.utils.seeds import derived_seed
from mua.utils.strict_json import JsonError, open_file, printable, read_json, read_json_at, skip_space

if TYPE_CHECKING:
    import pyarrow

MAX_BYTES = 32 << 30
"""Of text in one file, unpacked: more is no file of conversations, but one that was made to fill memory."""
ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".ndjson", ".parquet", ".arrow")
_SPLIT = re.compile(r"(train|validation|valid|val|dev|eval|test)(?=[-_.]|$)")
_OF_VALIDATION = ("validation", "valid", "val", "dev", "eval", "test")
_BATCH = 1000
_PIECE = 16 << 20


def recorded_rows(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    """Every record of ``path`` with its place; ``key`` is the setting that names it.

    Raises :class:`ConfigError` naming file and line or row for what cannot be read.
    """
    try:
        if path.is_dir():
            for file in _files(path, key):
                yield from _of_file(file, key)
        else:
            yield from _of_file(path, key)
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror or one_line(error)}") from None


def _files(folder: Path, key: str) -> list[Path]:
    """The files of a folder that hold what ``key`` asks for: its training split, or its validation split."""
    if (folder / "dataset_dict.json").is_file():
        splits = _told(folder / "dataset_dict.json", key, "splits")
        return _files(folder / _chosen(splits, folder, key), key)
    if (folder / "state.json").is_file():
        return [folder / name for name in _told(folder / "state.json", key, "_data_files")]
    within = [place for place in (folder, folder / "data") if place.is_dir()]
    files = sorted(f for place in within for f in place.iterdir() if f.is_file() and f.name.endswith(ENDINGS))
    files = [file for file in files if file.name not in ("dataset_info.json", "dataset_infos.json")]
    if not files:
        raise ConfigError(
            f"{key}: {folder} holds no conversations: a file that ends in {', '.join(ENDINGS)}, or what "
            "Dataset.save_to_disk writes"
        )
    by_split: dict[str, list[Path]] = {}
    for file in files:
        named = _SPLIT.match(file.name)
        by_split.setdefault(named[1] if named else "", []).append(file)
    named_splits = [split for split in by_split if split]
    return by_split[_chosen(named_splits, folder, key)] if named_splits else files


def _chosen(splits: list[str], folder: Path, key: str) -> str:
    wanted = _OF_VALIDATION if key == "sft.validation" else ("train",)
    found = next((split for split in wanted if split in splits), None)
    if found is None and len(splits) == 1 and key != "sft.validation":
        found = splits[0]
    if found is None:
        named = ", ".join(map(printable, splits)) or "none"
        raise ConfigError(f"{key}: {folder} has the splits {named}; name one of them, such as {folder}/SPLIT")
    return found


def _told(path: Path, key: str, name: str) -> list[str]:
    """Names of files or folders beside ``path``, which Hugging Face's library wrote."""
    try:
        found = json.loads(path.read_bytes())[name]
        if not isinstance(found, list) or not found:
            raise ValueError(f"{name} is no list, or empty")
        names = [entry["filename"] if isinstance(entry, dict) else entry for entry in found]
        # A name within the folder: a dataset of others must not lead out of its own.
        if odd := [n for n in names if not isinstance(n, str) or n in ("", ".", "..") or Path(n).name != n]:
            raise ValueError(f"{name} has {odd[0]!r:.100}, which is no name of a file or folder in it")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{key}: {path}: not as Dataset.save_to_disk writes it ({one_line(error)})") from None
    return names


def _of_file(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    with open_file(path) as file:
        start = file.read(8)
    if start.startswith(b"PAR1"):
        yield from _of_table(path, key, parquet=True)
    elif start.startswith(b"ARROW1") or path.suffix == ".arrow":
        yield from _of_table(path, key, parquet=False)
    else:
        for number, record in records_of_text(path, _text(path, key, packed=start.startswith(b"\x1f\x8b"))):
            yield f"{path}:{number}", record


def _text(path: Path, key: str, *, packed: bool) -> str:
    data = bytearray()
    with open_file(path) as file:
        source = gzip.GzipFile(fileobj=file) if packed else file
        try:
            while len(data) <= MAX_BYTES and (piece := source.read(_PIECE)):
                data += piece
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ConfigError(f"{key}: {path}: damaged gzip file ({one_line(error)}); write it again") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{key}: {path} holds more than {MAX_BYTES >> 30} GiB of text; split it")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}: {path} is not UTF-8 text (byte {error.start + 1})") from None


def _of_table(path: Path, key: str, *, parquet: bool) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(f"{key}: {path}: needs pyarrow: pip install 'mua[parquet]'") from None
    number = 0
    try:
        for batch in _batches(path, parquet):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", without_nulls(row)
    except (pyarrow.ArrowException, ValueError) as error:
        kind = "Parquet" if parquet else "Arrow"
        raise ConfigError(f"{key}: {path}: cannot be read as {kind} ({printable(one_line(error), 200)})") from None


def _batches(path: Path, parquet: bool) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow.ipc
    import pyarrow.parquet

    if parquet:
        with pyarrow.parquet.ParquetFile(path) as table:
            yield from table.iter_batches(batch_size=_BATCH)
        return
    with pyarrow.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            source.seek(0)
            reader = pyarrow.ipc.open_file(source)
            batches = (reader.get_batch(place) for place in range(reader.num_record_batches))
        else:
            source.seek(0)
            batches = iter(pyarrow.ipc.open_stream(source))
        for batch in batches:
            yield from (batch.slice(start, _BATCH) for start in range(0, batch.num_rows, _BATCH))


def without_nulls(value: Any) -> Any:
    """A row of a table without the keys that are null in it, at every depth."""
    if isinstance(value, dict):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def records_of_text(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Every record with the line it begins on; the elements of an array one by one, so that a fault has its line."""

    def fault(line: int, reason: str) -> ConfigError:
        return ConfigError(f"{path}:{line}: not a conversation: {reason}")

    if not text.strip():
        return
    if not text.lstrip().startswith("["):
        # Only line feeds end a record: str.splitlines would also cut at U+2028, which JSON strings may hold as it is.
        for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
            try:
                yield number, read_json(line)
            except JsonError as error:
                raise fault(number, f"{error}; write one JSON object a line, or one array of them") from None
        return
    feeds = [found.start() for found in re.finditer("\n", text)]
    at = skip_space(text, text.index("[") + 1)
    while text[at : at + 1] != "]":
        number = bisect_left(feeds, at) + 1
        try:
            value, end = read_json_at(text, at)
        except JsonError as error:
            raise fault(error.line, f"{error.reason} (column {error.column}) in the file's array") from None
        yield number, value
        at = skip_space(text, end)
        if text[at : at + 1] == ",":
            at = skip_space(text, at + 1)
        elif text[at : at + 1] != "]":
            raise fault(bisect_left(feeds, at) + 1, 'the file\'s array wants "," or "]" here')
    if text[at + 1 :].strip():
        raise fault(bisect_left(feeds, at) + 1, "text follows the end of the file's array; put all records into it")


Conversations: TypeAlias = list[list[Segment]]
"""The segments of each conversation."""

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

    Raises :class:`ConfigError` naming file and line for what cannot be read, and for a conversation longer than
    ``model.max_length`` unless ``sft.overlong`` leaves it out.
    """

    def read(train_on: Literal["all", "last"]) -> Iterator[tuple[str, list[Segment]]]:
        for where, record in recorded_rows(path, key):
            try:
                messages, tools = messages_and_tools(record)
                yield where, Conversation.from_messages(family, messages, tools, train_on=train_on).segments()
                continue
            except ConversationError as error:
                reason = str(error)
            except KeyError as error:
                reason = f"the key {error} is missing"
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                reason = f"not in OpenAI form ({type(error).__name__}: {error})"
            raise ConfigError(f"{where}: not a conversation: {printable(reason)}")

    assert config.sft is not None
    return _within_limit(read(config.sft.train_on), config, str(path), f"{key}: {path} holds no conversation")


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


_OPEN, _CLOSE = "<tool_response>", "</tool_response>"


def openai_messages(record: Json) -> list[Json]:
    """The ``messages`` of a record with ``conversations`` and, perhaps, ``system``.

    An agent's text and the calls that follow it are one message, and so are calls in a row. Raises
    :class:`ConversationError` naming the entry for whatever is not of this form.
    """
    entries = record["conversations"]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConversationError('"conversations" must be an array of objects')
    messages: list[Json] = []
    if system := record.get("system"):
        messages.append({"role": "system", "content": system})
    for index, entry in enumerate(entries):
        try:
            who, value = entry.get("from"), entry.get("value")
            reader = _READERS.get(who) if isinstance(who, str) else None
            if reader is None:
                raise ConversationError(f'"from" is {who!r}; it must be one of {", ".join(_READERS)}')
            if not isinstance(value, str):
                raise ConversationError(f'"value" must be a string, not {type(value).__name__}')
            weight = {"weight": entry["weight"]} if "weight" in entry else {}
            for message in reader(value):
                calls_only = "tool_calls" in message and not message["content"] and "reasoning_content" not in message
                # The calls of a message without text belong to the agent's unfinished message before it.
                if not (calls_only and messages and messages[-1]["role"] == "assistant"):
                    messages.append(message | weight)
                elif messages[-1].get("weight") != weight.get("weight"):
                    raise ConversationError(
                        "these calls and the text before them are one message; give both the same weight"
                    )
                else:
                    messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        except ConversationError as error:
            raise ConversationError(f"conversations[{index}]: {error}") from None
    return messages


def _spoken(role: str) -> Callable[[str], list[Json]]:
    return lambda value: [{"role": role, "content": value}]


def _agent(value: str) -> list[Json]:
    """Text, with the ``<think>`` block and the calls it may hold."""
    turn = parse_turn(value, reasoning=True)
    if turn.errors:
        raise ConversationError(turn.errors[0].message)
    message: Json = {"role": "assistant", "content": turn.content}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        message["tool_calls"] = [_call(call.name, call.arguments) for call in turn.tool_calls]
    return [message]


def _calls(value: str) -> list[Json]:
    """One call or a list of them as JSON, behind a ``<think>`` block perhaps."""
    (message,) = _agent(value)
    try:
        found = read_json(message["content"])
    except JsonError as error:
        raise ConversationError(f"the function call is not valid JSON ({error})") from None
    listed = found if isinstance(found, list) else [found]
    if not listed or not all(isinstance(call, dict) and "name" in call for call in listed):
        raise ConversationError('a function call is an object {"name": ..., "arguments": {...}}, or a list of them')
    return [message | {"content": "", "tool_calls": [_call(c["name"], c.get("arguments", {})) for c in listed]}]


def _call(name: str, arguments: Any) -> Json:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _results(value: str) -> list[Json]:
    """One result, or those that stand in ``<tool_response>`` blocks: the template puts them into blocks again."""
    *blocks, rest = [part.strip() if part.isspace() else part.lstrip() for part in value.split(_CLOSE)]
    whole = blocks and not rest and all(block.startswith(_OPEN) for block in blocks)
    texts = [block.removeprefix(_OPEN).removeprefix("\n").removesuffix("\n") for block in blocks] if whole else [value]
    return [{"role": "tool", "content": text} for text in texts]


_READERS: dict[str, Callable[[str], list[Json]]] = {
    "system": _spoken("system"),
    "human": _spoken("user"),
    "user": _spoken("user"),
    "gpt": _agent,
    "assistant": _agent,
    "function_call": _calls,
    "observation": _results,
    "tool": _results,
}


_ANSWERS = ("completion", "response", "answer", "output")
"""What stands beside ``prompt`` as that which is to be learned."""
_TEXT_PARTS = ("text", "input_text", "output_text")
_FORMS = (
    'a record has "messages" (OpenAI form), "conversations" (ShareGPT form), "prompt" and "completion", or '
    '"instruction" and "output"; its keys are '
)


def messages_and_tools(record: Any) -> tuple[list[Json], list[ToolSchema]]:
    """Raises :class:`ConversationError` (or what a wrong shape raises) for a record of no such form."""
    if not isinstance(record, dict):
        raise ConversationError(f"a record is an object, not {type(record).__name__}")
    return _plain([dict(message) for message in _messages(record)]), _tools(record)


def _tools(record: Json) -> list[ToolSchema]:
    """Wrapped as OpenAI does or not; MUA-RL's data wraps them all at once."""
    tools = []
    for tool in _listed(record, "tools" if "tools" in record else "functions"):
        inner = tool.get("function", tool)
        for f in inner if isinstance(inner, list) else [inner]:
            parameters = f.get("parameters", {})
            if isinstance(parameters, str):  # as tables of strings keep what has no one shape
                parameters = _json("parameters", parameters)
            tools.append(ToolSchema(f["name"], f.get("description", ""), parameters))
    return tools


def _messages(record: Json) -> list[Json]:
    for key in ("messages", "conversations"):
        if key in record:
            entries = _listed(record, key)
            roles, speakers = (any(name in entry for entry in entries) for name in ("role", "from"))
            if not roles and (speakers or key == "conversations"):
                return openai_messages(record | {"conversations": entries})
            return _with_system(record, entries)
    if "prompt" in record:
        if (key := next((key for key in _ANSWERS if record.get(key) is not None), "")) == "":
            raise ConversationError('"prompt" without "completion": there is nothing to learn')
        prompt, answer = _said(record, "prompt", "user"), _said(record, key, "assistant")
        # What stands in the prompt was said before: it carries no loss.
        prompt = [{**one, "weight": 0} if one.get("role") == "assistant" else one for one in prompt]
        if not any(message.get("role") == "assistant" for message in answer):
            raise ConversationError(f'"{key}" holds no message of the assistant')
        return _with_system(record, prompt + answer)
    if "instruction" in record and "output" in record:
        turns: list[Json] = []
        for pair in record.get("history") or []:  # earlier turns, as LLaMA-Factory has them: question and answer
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
                raise ConversationError('"history" must be pairs of texts')
            turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
        asked = "\n".join(_text_of(record, key) for key in ("instruction", "input") if record.get(key))
        told = [{"role": "user", "content": asked}, {"role": "assistant", "content": _text_of(record, "output")}]
        return _with_system(record, turns + told)
    hint = ""
    if "chosen" in record:
        hint = "; of preference pairs only one side can be imitated: write it as messages"
    elif list(record) == ["text"]:
        hint = "; plain text has no turns to tell apart"
    raise ConversationError(f"{_FORMS}{', '.join(map(str, record)) or 'none'}{hint}")


def _said(record: Json, key: str, role: str) -> list[Json]:
    """A text as one message of ``role``; messages as they are."""
    value = record[key]
    if isinstance(value, dict):
        return [value]
    if isinstance(value, list):
        return _listed(record, key)
    return [{"role": role, "content": _text_of(record, key)}]


def _with_system(record: Json, messages: list[Json]) -> list[Json]:
    if record.get("system") and messages and messages[0].get("role") not in ("system", "developer"):
        return [{"role": "system", "content": _text_of(record, "system")}, *messages]
    return messages


def _text_of(record: Json, key: str) -> str:
    if not isinstance(record[key], str):
        raise ConversationError(f'"{key}" must be a text, not {type(record[key]).__name__}')
    return str(record[key])


def _plain(messages: list[Json]) -> list[Json]:
    """Roles and contents as a chat template takes them."""
    for index, message in enumerate(messages):
        role = message.get("role")
        if isinstance(message.get("content"), list):
            message["content"] = _joined(message["content"], index)
        if role == "developer":
            message["role"] = "system"
        elif role == "function":
            message["role"] = "tool"
        if role == "assistant" and message.get("function_call") and not message.get("tool_calls"):
            message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
    while len(messages) > 1 and messages[0].get("role") == messages[1].get("role") == "system":
        texts = [str(message.get("content") or "") for message in messages[:2]]
        messages[:2] = [{"role": "system", "content": "\n\n".join(filter(None, texts))}]
    return messages


def _joined(parts: list[Any], index: int) -> str:
    """The texts of OpenAI's content parts, one after the other."""
    texts = []
    for place, part in enumerate(parts):
        kind = part.get("type", "text") if isinstance(part, dict) else "text" if isinstance(part, str) else None
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise ConversationError(
                f"messages[{index}].content[{place}] is a part of type {kind!r}; only text is trained: leave out such "
                "parts, or the record"
            )
        texts.append(text)
    return "".join(texts)


def _listed(record: Json, key: str) -> list[Json]:
    """An array of objects; tables of strings (Parquet, CSV) keep it as JSON text."""
    value = record.get(key) or []
    if isinstance(value, str):
        value = _json(key, value)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ConversationError(f'"{key}" must be an array of objects')
    return value


def _json(key: str, text: str) -> Any:
    try:
        return read_json(text)
    except JsonError as error:
        raise ConversationError(f'"{key}" is text that is not valid JSON ({error})') from None
