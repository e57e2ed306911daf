"""Run recorded tool calls through a domain's tools and see whether they agree with what was recorded.

A recording is one JSON object a line::

    {"task": "retail-dev-0", "variant": 1,
     "steps": [{"name": "get_order_details", "arguments": {...}, "answer": "{...}"}, ...],
     "database_equals_gold": true, "database_equals_untouched": false}

An answer that succeeded must be equal as JSON (types included), or as text where it is no JSON. Where the recorded tool
failed ("Error: ...", or "Unknown action ..." for a tool that does not exist) ours must fail too; its wording is ours.
Both verdicts on the final database must be the recorded ones.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, get_args, runtime_checkable

from environments.kit.overlay import same
from mua.config.schema import EnvironmentConfig
from mua.environment.domain import Configurable, Domain
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Split, Task, ToolResult
from mua.environment.registry import get_domain
from mua.types import Json
from mua.utils.errors import ConfigError
from mua.utils.strict_json import MAX_FILE_DEPTH, JsonError, printable, read_file, read_json

SHOWN = 10
"""Disagreements that a report prints."""
_FAILED = ("Error", "Unknown action")
_LONGEST = 200
_KEYS = {"task": str, "steps": list, "database_equals_gold": bool, "database_equals_untouched": bool}
_STEP_KEYS = {"name": str, "arguments": dict, "answer": str}


@runtime_checkable
class Comparable(Protocol):
    """An environment over a database that can say what became of it."""

    def equals_gold(self) -> bool:
        """Whether the database is now what the gold actions make of it."""

    def equals_untouched(self) -> bool:
        """Whether the database is now what it was at the start."""


@dataclass(slots=True)
class Agreement:
    """What a replay found."""

    recordings: int = 0
    calls: int = 0
    failures: int = 0
    """Calls that failed in the recording."""
    disagreements: list[str] = field(default_factory=list)
    """One line each: where, what was recorded, what came of it here."""

    def lines(self) -> Iterator[str]:
        """The report for a person."""
        yield from self.disagreements[:SHOWN]
        left = len(self.disagreements) - SHOWN
        if left > 0:
            yield f"... and {left} more"
        agree = "all agree" if not self.disagreements else f"{len(self.disagreements)} disagree"
        yield (
            f"{self.recordings} recordings, {self.calls} calls ({self.failures} of them failed ones), "
            f"{2 * self.recordings} verdicts: {agree}"
        )


def replay_files(name: str, data: Path, files: Sequence[Path]) -> Agreement:
    """Replay every recording of ``files`` on the domain ``name`` over the official data in the folder ``data``.

    Raises :class:`ConfigError` for a domain that loads no official data, a file that holds no recordings,
    or a recording of a task that the folder does not have.
    """
    domain = _over(name, data)
    tasks = {task.id: task for split in get_args(Split) for task in domain.tasks(split)}
    found = Agreement()
    for file in files:
        for where, recording in _recordings(file):
            task = tasks.get(recording["task"])
            if task is None:
                raise ConfigError(f"{where}: {data} has no task {recording['task']!r}")
            _replay(domain, task, recording, where, found)
    return found


def _over(name: str, data: Path) -> Domain:
    domain = get_domain(name)
    if not isinstance(domain, Configurable):
        raise ConfigError(f"domain {name!r} loads no official data, so there is nothing to replay")
    # Recordings say nothing of what was told, called or judged: only the database counts.
    config = EnvironmentConfig(name=name, data=data, options={"leave_out": "ACTION,NL_ASSERTION,ENV_ASSERTION"})
    return domain.configured(config, Services())


def _replay(domain: Domain, task: Task, recording: Json, where: str, found: Agreement) -> None:
    environment = domain.environment()
    if not isinstance(environment, Comparable):
        raise ConfigError(f"domain {domain.name!r} has no database to compare, so there is nothing to replay")
    environment.reset(task, 0)
    found.recordings += 1
    for number, step in enumerate(recording["steps"], 1):
        result = environment.call(step["name"], step["arguments"])
        assert isinstance(result, ToolResult), "tools over a database answer at once"
        failed = step["answer"].startswith(_FAILED)
        found.calls += 1
        found.failures += failed
        if not _agrees(step["answer"], failed, result):
            call = f"{step['name']}({json.dumps(step['arguments'])})"
            told = _first_difference("", _parsed(step["answer"]), _parsed(result.text))
            found.disagreements.append(f"{where}, call {number}: {_short(call)}: {told}")
    _compare_verdicts(environment, recording, where, found)
    environment.close()


def _compare_verdicts(environment: Comparable, recording: Json, where: str, found: Agreement) -> None:
    for key, now in (("gold", environment.equals_gold()), ("untouched", environment.equals_untouched())):
        if (recorded := recording[f"database_equals_{key}"]) != now:
            found.disagreements.append(f"{where}: database equals {key}: recorded {recorded}, here {now}")


def _agrees(answer: str, failed: bool, result: ToolResult) -> bool:
    if failed or result.error:
        return failed == result.error
    return answer == result.text or same(_parsed(answer), _parsed(result.text))


def _first_difference(path: str, recorded: Any, here: Any) -> str:
    """Where two answers part, and what stands there; the answers themselves if they are no objects or lists."""
    if isinstance(recorded, list) and isinstance(here, list) and len(recorded) == len(here):
        recorded, here = dict(enumerate(recorded)), dict(enumerate(here))
    if isinstance(recorded, dict) and isinstance(here, dict) and recorded.keys() == here.keys():
        key = next(key for key in recorded if not same(recorded[key], here[key]))
        return _first_difference(f"{path}/{key}", recorded[key], here[key])
    at = f"at {path} " if path else ""
    return f"{at}recorded {_short(_shown(recorded))}, here {_short(_shown(here))}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _parsed(text: str) -> Any:
    try:
        return read_json(text, strict=False, depth=MAX_FILE_DEPTH)
    except JsonError:
        return text


def _recordings(file: Path) -> Iterator[tuple[str, Json]]:
    """Each recording with where it stands."""
    try:
        data = read_file(file)
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode()
    except (gzip.BadGzipFile, zlib.error, EOFError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as recordings: {error}") from error
    # Only line feeds end a record: str.splitlines would also cut at U+2028, which JSON strings may hold as it is.
    lines = text.removesuffix("\n").split("\n") if text else []
    for number, line in enumerate(lines, 1):
        where = f"{file.name}:{number}"
        try:
            recording = read_json(line, strict=False, depth=MAX_FILE_DEPTH)
        except JsonError as error:
            raise ConfigError(f"{where}: is no JSON: {error}") from error
        if fault := _lacking(recording, _KEYS):
            raise ConfigError(f"{where}: is no recording: {fault}")
        for step_number, step in enumerate(recording["steps"], 1):
            if fault := _lacking(step, _STEP_KEYS):
                raise ConfigError(f"{where}: step {step_number}: {fault}")
        yield printable(f"{where} ({recording['task']}, variant {recording.get('variant', 0)})"), recording


def _lacking(value: Any, keys: Mapping[str, type]) -> str | None:
    """What keeps ``value`` from being an object with these keys."""
    if not isinstance(value, dict):
        return "it must be a JSON object"
    return next(
        (f"{key!r} is missing or of another type" for key, kind in keys.items() if not _has(value, key, kind)), None
    )


def _has(value: Json, key: str, kind: type) -> bool:
    return key in value and isinstance(value[key], kind)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
