"""Recorded conversations from files and stores: read, checked, and turned into token streams as an episode would have
left them. :mod:`mua.trainer.record_forms` reads each record.

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
from collections.abc import Iterable, Iterator, Sequence
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
from mua.trainer.record_forms import messages_and_tools
from mua.types import Provenance, Segment, Trajectory
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
