"""Questions from files: JSON lines (``.jsonl``, ``.jsonl.gz``) or Parquet, fields by configuration.

A folder has a file for each split, ``train``, ``validation`` (or ``dev``, ``valid``, ``val``) and ``test``. The rows of
a single file go to the split that their split field names; without one to shares, by a digest of the question, so that
the same question is always in the same split.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments._tau.folder import MAX_BYTES, read_text
from mua.environment.protocol import Split, Task
from mua.environment.user import STOP_SIGNAL
from mua.types import Json
from mua.users.scoring.scorer import Question
from mua.utils.errors import ConfigError
from mua.utils.strict_json import MAX_FILE_DEPTH, MAX_UTTERANCE, JsonError, broken_at, deeper, printable, read_json

NAMES: Mapping[str, Split] = {
    "train": "train", "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test",
}  # fmt: skip
"""What files and split fields call the splits."""
ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")
_DIFFICULTIES = ("easy", "medium", "hard")
_SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@dataclass(frozen=True, slots=True)
class DataOptions:
    """Options of ``environment.options`` for questions from files. A field may lie deeper:
    ``reward_model.ground_truth``."""

    question: str = "question"
    """Field of the question: a text, or chat messages that end with the user's (the system's are instructions)."""
    answer: str = "answer"
    """Field of the reference."""
    answer_after: str = ""
    """Of a reference that is a text, only what follows the last of these (GSM8K: ``####``)."""
    choices: str = ""
    """Field of a list of choices."""
    system: str = ""
    """Field of the row's own instructions, in place of the domain's."""
    id: str = ""
    """Field of a name for the task; the place in the file without it."""
    split: str = ""
    """Field of the split."""
    difficulty: str = ""
    """Field that says easy, medium or hard."""
    kind: str = ""
    """Field that evaluations make their tables by."""
    validation: float = 0.0
    """Share of a single file's rows for validation, where no field says the split."""
    test: float = 0.0
    """Share of them for test. With neither share all rows are the test split."""

    def __post_init__(self) -> None:
        if self.validation + self.test > 1:
            raise ConfigError("environment.options: the shares validation and test are more than 1 together")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file."""

    values: Json
    where: str
    """File and line, for messages."""
    split: Split | None
    """What the file's name says."""


def load(place: Path, options: DataOptions, name: str) -> dict[Split, tuple[Task, ...]]:
    """The tasks of a file or folder; :class:`ConfigError` names file, line and field of what is wrong."""
    found: dict[Split, list[Task]] = {split: [] for split in _SPLITS}
    ids: dict[str, str] = {}
    questions: dict[str, tuple[Split, str]] = {}
    for number, row in enumerate(_rows(place, options)):
        task = _task(row, options, name, number)
        where = row.where
        if (before := ids.setdefault(task.id, where)) != where:
            raise ConfigError(f"{row.where}: {options.id!r} is the same as that of {before}")
        text = digest_of_question(task.data)
        split, before = questions.setdefault(text, (task.split, where))
        if split != task.split:
            raise ConfigError(f"{row.where}: the question is in split {task.split}, and in {split} too ({before})")
        found[task.split].append(task)
    if not ids:
        raise ConfigError(f"environment.data: {place} has no rows")
    return {split: tuple(tasks) for split, tasks in found.items()}


def question_of(task: Task, seed: int = 0) -> Question:
    """What a scorer gets to see of a task."""
    data = task.data
    where = data.get("where") or task.id
    return Question(data["question"], data["reference"], tuple(data.get("choices", ())), where, seed)


def digest_of_question(data: Json) -> str:
    """Of question and choices, white space aside."""
    text = "\0".join(" ".join(str(part).split()) for part in (data["question"], *data.get("choices", ())))
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _rows(place: Path, options: DataOptions) -> Iterator[Row]:
    if not place.is_dir():
        if not place.name.endswith(ENDINGS):
            raise ConfigError(f"environment.data: {place} is no folder, and no file that ends in {', '.join(ENDINGS)}")
        yield from _rows_of(place, None)
        return
    files = {path: _stem(path) for path in sorted(place.iterdir()) if path.name.endswith(ENDINGS)}
    chosen = {path: NAMES[stem] for path, stem in files.items() if stem in NAMES}
    if not chosen:
        raise ConfigError(
            f"environment.data: {place} has no file train, validation or test that ends in {', '.join(ENDINGS)}"
        )
    if left := [path.name for path in files if path not in chosen]:
        raise ConfigError(
            f"environment.data: {place / left[0]} belongs to no split; call it after one, or take it away"
        )
    twice = [split for split in _SPLITS if list(chosen.values()).count(split) > 1]
    if twice:
        raise ConfigError(f"environment.data: {place} has several files of split {twice[0]}; leave one")
    if options.split:
        raise ConfigError("environment.options.split: the files' names say the split; leave it out, or give one file")
    for path, split in chosen.items():
        yield from _rows_of(path, split)


def _stem(path: Path) -> str:
    """The name that says the split; ``train-00000-of-00001`` is train."""
    return re.sub(r"-00000-of-00001$", "", path.name.partition(".")[0].lower())


def _rows_of(path: Path, split: Split | None) -> Iterator[Row]:
    if path.name.endswith(".parquet"):
        yield from _parquet(path, split)
        return
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = read_json(line, depth=MAX_FILE_DEPTH)
        except JsonError as error:
            raise ConfigError(f"{path}, line {number}: is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise ConfigError(f"{path}, line {number}: must be a JSON object")
        yield Row(value, f"{path}, line {number}", split)


def _parquet(path: Path, split: Split | None) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise ConfigError(f"{path}: a Parquet file needs pyarrow: pip install 'mua[parquet]'") from None
    try:
        with path.open("rb") as file:
            table = parquet.ParquetFile(file)
            if (
                table.metadata.num_rows
                and sum(table.metadata.row_group(n).total_byte_size for n in range(table.num_row_groups)) > MAX_BYTES
            ):
                raise ConfigError(f"{path}: has more than {MAX_BYTES:,} bytes unpacked")
            number = 0
            for batch in table.iter_batches(1024):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(values, f"{path}, row {number}", split)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as Parquet: {printable(str(error), 200)}") from error


def _task(row: Row, options: DataOptions, name: str, number: int) -> Task:
    question, system = _asked(row, options)
    choices = _field(row, options.choices, optional=True) if options.choices else None
    if choices is not None and not (isinstance(choices, list) and all(isinstance(one, str) for one in choices)):
        raise ConfigError(f"{row.where}: {options.choices!r} must be a list of texts")
    if options.system and (own := _field(row, options.system, optional=True)) is not None:
        system = _text(own, options.system, row)
    data: Json = {
        "kind": str(_field(row, options.kind)) if options.kind else "given",
        "difficulty": _difficulty(row, options),
        "question": question,
        "reference": _reference(row, options),
        "where": row.where.rpartition("/")[2],  # the same wherever the folder lies
    }
    if choices:
        data["choices"] = [_text(one, options.choices, row) for one in choices]
    if system:
        data["system"] = system
    split = row.split or _split(row, options, data)
    own_id = _field(row, options.id) if options.id else number
    if isinstance(own_id, bool) or not isinstance(own_id, str | int) or broken_at(str(own_id)) is not None:
        raise ConfigError(f"{row.where}: {options.id!r} must be a text or a whole number")
    return Task(f"{name}/{split}/{own_id}", name, split, data)


def _asked(row: Row, options: DataOptions) -> tuple[str, str]:
    """The question, and the instructions of a system message if there are any."""
    value = _field(row, options.question)
    if isinstance(value, str):
        return _text(value, options.question, row), ""
    roles = [one.get("role") for one in value if isinstance(one, dict)] if isinstance(value, list) else []
    if roles not in (["user"], ["system", "user"]) or len(roles) != len(value):
        raise ConfigError(f"{row.where}: {options.question!r} must be a text, or one message of a user with or without "
                          "one of the system before it")  # fmt: skip
    texts = [_text(one.get("content"), options.question, row) for one in value]
    return texts[-1], texts[0] if len(texts) == 2 else ""


def _text(value: Any, field: str, row: Row) -> str:
    """A text that can be said."""
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{row.where}: {field!r} must be a text that is not empty")
    if (at := broken_at(value)) is not None:
        raise ConfigError(f"{row.where}: {field!r} has a control character or half a surrogate at place {at}")
    if len(value) > MAX_UTTERANCE:
        raise ConfigError(f"{row.where}: {field!r} has more than {MAX_UTTERANCE} characters")
    if STOP_SIGNAL in value:
        raise ConfigError(f"{row.where}: {field!r} has {STOP_SIGNAL} in it, which ends a conversation")
    return value


def _reference(row: Row, options: DataOptions) -> Any:
    value = _field(row, options.answer)
    if value is None or deeper(value, MAX_FILE_DEPTH):
        raise ConfigError(f"{row.where}: {options.answer!r} holds no answer")
    if isinstance(value, str) and options.answer_after:
        _, found, value = value.rpartition(options.answer_after)
        if not found:
            raise ConfigError(f"{row.where}: {options.answer!r} has no {options.answer_after!r}")
        return value.strip()
    return value


def _difficulty(row: Row, options: DataOptions) -> str:
    if not options.difficulty:
        return "medium"
    value = _field(row, options.difficulty)
    if value not in _DIFFICULTIES:
        raise ConfigError(f"{row.where}: {options.difficulty!r} must be one of {', '.join(_DIFFICULTIES)}")
    return str(value)


def _split(row: Row, options: DataOptions, data: Json) -> Split:
    if options.split:
        value = _field(row, options.split)
        if value not in NAMES:
            raise ConfigError(f"{row.where}: {options.split!r} must be one of {', '.join(NAMES)}, not {value!r}")
        return NAMES[value]
    if not options.validation and not options.test:
        return "test"
    place = int(digest_of_question(data)[:13], 16) / 16**13
    return "test" if place < options.test else "validation" if place < options.test + options.validation else "train"


def _field(row: Row, field: str, *, optional: bool = False) -> Any:
    """The value of ``field``, whole or taken apart at its dots."""
    if field in row.values:
        return row.values[field]
    value: Any = row.values
    for part in field.split("."):
        if not isinstance(value, dict) or part not in value:
            if optional:
                return None
            known = ", ".join(sorted(map(str, row.values))[:20]) or "no fields"
            raise ConfigError(f"{row.where}: has no field {field!r}; it has {printable(known, 200)}")
        value = value[part]
    return value
