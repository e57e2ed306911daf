"""Questions from a folder instead of the made-up world: for the web search, or for a benchmark of one's own.

UserRL's questions are read by :mod:`environments.gyms._shared.official`.

The folder holds ``train.jsonl``, ``validation.jsonl`` and ``test.jsonl``, any of them; each line is an object with
``question``, ``answer``, and optionally ``id``, ``aliases`` (a list) and ``difficulty``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from environments.gyms.search.questions import NAME
from mua.environment.protocol import Split, Task
from mua.utils.errors import ConfigError
from mua.utils.strict_json import JsonError, read_file, read_json

_DIFFICULTIES = ("easy", "medium", "hard")


def load_questions(folder: Path) -> Mapping[Split, tuple[Task, ...]]:
    """The tasks of each split; raises :class:`ConfigError` that names the file and line of what is wrong."""
    splits: tuple[Split, ...] = get_args(Split)
    files = {split: folder / f"{split}.jsonl" for split in splits}
    if not any(file.is_file() for file in files.values()):
        raise ConfigError(f"environment.data: {folder} holds none of {', '.join(file.name for file in files.values())}")
    return {split: tuple(_tasks(split, file)) if file.is_file() else () for split, file in files.items()}


def _tasks(split: Split, file: Path) -> Iterator[Task]:
    for number, line in enumerate(_text(file).split("\n"), 1):
        if line.strip():
            yield _task(split, number, line, f"environment.data: {file}, line {number}")


def _text(file: Path) -> str:
    try:
        return read_file(file).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"environment.data: {file}: not UTF-8 text (byte {error.start})") from None


def _task(split: Split, number: int, line: str, where: str) -> Task:
    try:
        given = read_json(line)
    except JsonError as error:
        raise ConfigError(f"{where}: no JSON ({error})") from error
    if not isinstance(given, dict) or not all(_is_text(given.get(key)) for key in ("question", "answer")):
        raise ConfigError(f'{where}: give an object with the texts "question" and "answer"')
    aliases, difficulty = given.get("aliases", []), given.get("difficulty", "medium")
    if not isinstance(aliases, list) or not all(map(_is_text, aliases)):
        raise ConfigError(f'{where}: "aliases" must be a list of texts')
    if difficulty not in _DIFFICULTIES:
        raise ConfigError(f'{where}: "difficulty" must be one of {", ".join(_DIFFICULTIES)}')
    data = {"kind": "given", "difficulty": difficulty, "question": given["question"], "answer": given["answer"]}
    return Task(f"{NAME}/{split}/{given.get('id', number)}", NAME, split, {**data, "aliases": aliases})


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
