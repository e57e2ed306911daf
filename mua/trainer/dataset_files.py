"""The records of a data set on disk, each with its place.

======================= ================================================== ====================
what                    how it is known                                    place
======================= ================================================== ====================
JSON, one value after   none of those below; blank lines count for nothing ``file:line``
another or in one array
``{"data": [...]}``     an object of no other form with one such list      ``file:line, data[N]``
either, gzipped         its first two bytes                                as of either
Parquet                 ``PAR1`` at its beginning                          ``file, row N``
Arrow (file or stream)  ``ARROW1``, or the ending ``.arrow``               ``file, row N``
folder of a dataset     ``dataset_dict.json`` or ``state.json``, as        ``file, row N``
                        ``Dataset.save_to_disk`` of Hugging Face writes
folder of files         those of the above endings, at any depth           of each file
======================= ================================================== ====================

Which files of a folder are which split is told as the library ``datasets`` does: by the shards of ``data/``
(``data/train-00000-of-00002.parquet``), else by names of folders, else by names of files (``sft_train.jsonl``). Where
nothing names a split, all files count.
"""

from __future__ import annotations

import gzip
import json
import logging
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mua.utils.errors import ConfigError, one_line
from mua.utils.strict_json import JsonError, open_file, printable, read_json_at, skip_space

if TYPE_CHECKING:
    import pyarrow

MAX_BYTES = 32 << 30
"""Of text in one file, unpacked: more is no file of conversations, but one that was made to fill memory."""
ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".ndjson", ".parquet", ".arrow")
_UNREAD_ENDINGS = {
    ".csv": "a CSV table", ".csv.gz": "a CSV table", ".tsv": "a TSV table", ".xlsx": "a spreadsheet",
    ".zst": "compressed with Zstandard", ".bz2": "compressed with bzip2", ".xz": "compressed with xz",
    ".zip": "a ZIP archive", ".tar": "a tar archive", ".tgz": "a tar archive", ".tar.gz": "a tar archive",
    ".pkl": "a pickle", ".sqlite": "an SQLite database",
}  # fmt: skip
_UNREAD_STARTS = {
    b"\x28\xb5\x2f\xfd": "compressed with Zstandard", b"BZh": "compressed with bzip2", b"PK\x03\x04": "a ZIP archive",
    b"\xfd7zXZ": "compressed with xz", b"SQLite f": "an SQLite database (a store is named by sft.stored)",
    b"version ": "a pointer of Git LFS, whose file comes with git lfs pull",
}  # fmt: skip
_IGNORED = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
_SPLITS = {
    "train": "train", "training": "train", "validation": "validation", "valid": "validation", "dev": "validation",
    "val": "validation", "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
"""The words of ``datasets`` for splits."""
_SPLIT_WORD = re.compile(rf"(?:^|[-._ 0-9])({'|'.join(_SPLITS)})(?=[-._ 0-9]|$)")
_SHARD = re.compile(r"data/([^/]+)-\d{5}-of-\d{5}[^/]*")
_FORM_KEYS = {"messages", "conversations", "prompt", "instruction"}
_BATCH = 1000
_PIECE = 16 << 20

log = logging.getLogger(__name__)


def read_records(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    """Every record of ``path`` with its place; ``key`` is the setting that names it.

    Raises :class:`ConfigError` naming file and line or row for what cannot be read.
    """
    try:
        for file in _files(path, key) if path.is_dir() else [path]:
            with open_file(file) as opened:
                start = opened.read(8)
            unread = (kind for known, kind in _UNREAD_STARTS.items() if start.startswith(known))
            if kind := next(unread, None) or _unread_kind(file):
                raise ConfigError(f"{key}: {file} is {kind}; give JSON lines, gzipped or not, or Parquet")
            if start.startswith((b"PAR1", b"ARROW1")) or file.suffix == ".arrow":
                yield from _rows(file, key, parquet=start.startswith(b"PAR1"))
            else:
                yield from records_of_text(file, _text(file, key, packed=start.startswith(b"\x1f\x8b")))
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror or one_line(error)}") from None


def _unread_kind(file: Path) -> str | None:
    return next((kind for ending, kind in _UNREAD_ENDINGS.items() if file.name.lower().endswith(ending)), None)


def _splits_named(name: str) -> set[str]:
    return {_SPLITS[word] for word in _SPLIT_WORD.findall(name.lower())}


def _files(folder: Path, key: str) -> list[Path]:
    """The files of a folder that hold what ``key`` asks for: its training split, or its validation split."""
    if (folder / "dataset_dict.json").is_file():
        splits = _names_in(folder / "dataset_dict.json", key, "splits")
        return _files(folder / _choose_split({split: folder / split for split in splits}, folder, key), key)
    if (folder / "state.json").is_file():
        return [folder / name for name in _names_in(folder / "state.json", key, "_data_files")]
    places = {
        file: file.relative_to(folder)
        for file in sorted(folder.rglob("*"))
        if (file.name.lower().endswith(ENDINGS) or _unread_kind(file)) and file.name not in _IGNORED and file.is_file()
    }
    places = {file: place for file, place in places.items() if not any(p.startswith((".", "__")) for p in place.parts)}
    if not places:
        raise ConfigError(
            f"{key}: {folder} holds no conversations: a file that ends in {', '.join(ENDINGS)}, or what "
            "Dataset.save_to_disk writes"
        )

    def splits_of(place: Path, rule: str) -> set[str]:
        if rule == "shards":
            return {shard[1]} if (shard := _SHARD.fullmatch(place.as_posix())) else set()
        names = place.parts[:-1] if rule == "folders" else (place.name,)
        return {split for name in names for split in _splits_named(name)}

    for rule in ("shards", "folders", "names"):
        found = {file: named for file, place in places.items() if (named := splits_of(place, rule))}
        if twice := next((file for file, named in found.items() if len(named) > 1), None):
            raise ConfigError(
                f"{key}: {twice} is named after {' and '.join(sorted(found[twice]))}; rename it, or name one file"
            )
        if found:
            by_split = {split: file for file, named in sorted(found.items(), reverse=True) for split in named}
            unnamed = {str(place): file for file, place in places.items() if file not in found}
            chosen = _choose_split(dict(sorted(by_split.items())), folder, key, unnamed)
            if unnamed:
                log.warning("%s: %s: %d files name no split and are left out: %s", key, folder, len(unnamed),
                            printable(", ".join(unnamed), 200))  # fmt: skip
            return [file for file, named in found.items() if chosen in named]
    return list(places)


def _choose_split(splits: Mapping[str, Path], folder: Path, key: str, unnamed: Mapping[str, Path] | None = None) -> str:
    """Of the splits, each with a path of it, and of files that name none."""
    for wanted in ("validation", "test") if key == "sft.validation" else ("train",):
        named = [split for split in splits if _splits_named(split) == {wanted}]
        if wanted in splits or len(named) == 1:
            return wanted if wanted in splits else named[0]
    if len(splits) == 1 and key != "sft.validation" and not any(map(_splits_named, splits)):
        return next(iter(splits))
    every, paths = ", ".join(map(printable, splits)), [*(unnamed or {}).values(), *splits.values()]
    others = f", and files of none: {printable(', '.join(unnamed), 200)}" if unnamed else ""
    raise ConfigError(
        f"{key}: {folder} has the splits {every}{others}; name one of them, such as {paths[0]}, or a folder with the "
        "files of one alone"
    )


def _names_in(path: Path, key: str, name: str) -> list[str]:
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


def records_of_text(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Every record with the line it begins on: JSON values, each on lines of its own, or the elements of an array."""

    def fault(at: int, reason: str) -> ConfigError:
        return ConfigError(f"{path}:{1 + text.count(chr(10), 0, at)}: not a conversation: {reason}")

    at, line, counted = skip_space(text, 0), 1, 0
    if in_array := text.startswith("[", at):
        at = skip_space(text, at + 1)
    while at < len(text) and not (in_array and text[at] == "]"):
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, end = read_json_at(text, at)
        except JsonError as error:
            wanted = "in the file's array" if in_array else "write one JSON object a line, or one array of them"
            raise fault(at, f"{error}; {wanted}") from None
        yield from _wrapped(f"{path}:{line}", value)
        at = skip_space(text, end)
        if in_array and text.startswith(",", at):
            at = skip_space(text, at + 1)
        elif in_array and not text.startswith("]", at):
            raise fault(at, 'the file\'s array wants "," or "]" here')
        elif not in_array and at < len(text) and "\n" not in text[end:at]:
            raise fault(at, "text follows the record in its line")
    if in_array and (after := skip_space(text, at + 1)) < len(text):
        raise fault(after, "text follows the end of the file's array; put all records into it")
    if in_array and at == len(text):
        raise fault(at - 1, "the file's array is not closed")


def _wrapped(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A record, or those in the one list of what is no record itself, such as ``{"version": 1, "data": [...]}``."""
    if isinstance(value, dict) and not value.keys() & _FORM_KEYS:
        inner = {key: items for key, items in value.items() if isinstance(items, list)}
        lists = [key for key in inner if any(isinstance(one, dict) and one.keys() & _FORM_KEYS for one in inner[key])]
        if beside := [*lists[1:], *(key for key in ("system", "tools", "functions") if lists and value.get(key))]:
            raise ConfigError(
                f"{place}: {printable(', '.join(beside), 200)} beside the records of {printable(lists[0])} would be "
                "lost; give other records a file of their own, and write what belongs to a record into it"
            )
        if lists:
            yield from ((f"{place}, {printable(lists[0])}[{n}]", item) for n, item in enumerate(inner[lists[0]]))
            return
    yield place, value


def _rows(path: Path, key: str, *, parquet: bool) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(f"{key}: {path}: needs pyarrow: pip install 'mua[parquet]'") from None
    number = 0
    try:
        for batch in _batches(path, parquet):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
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
