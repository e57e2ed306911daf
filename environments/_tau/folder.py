"""Read a folder of official data.

tau-bench: one file a table (``users.json.gz``), ``policy.md`` and ``tasks_{train,dev,test}.jsonl``, one task a line
with ``id``, ``instruction``, ``actions`` and ``outputs``; ``dev`` is our validation split. A file may be plain or end
in ``.gz``, and missing task files are empty splits.

tau2-bench: ``db.json`` with all tables, ``tasks.json``, ``policy.md`` and, if there, ``split_tasks.json`` with task ids
by split. Telecom has a reader of its own for its database and policies
(:mod:`environments.telecom.official`).

Files are read up to :data:`MAX_BYTES`, unpacked or not, and JSON up to the depth that other files of this project have.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from gzip import BadGzipFile, GzipFile
from pathlib import Path
from typing import Any, Literal, TypeAlias

from environments.kit.overlay import Base
from mua.environment.protocol import Split, Task
from mua.types import Json
from mua.utils.errors import ConfigError
from mua.utils.strict_json import MAX_FILE_DEPTH, JsonError, open_file, printable
from mua.utils.strict_json import read_json as read_json_text

# Tasks of tau-bench as tasks of this project, and what the two benchmarks share: kind and difficulty.

_READS = ("get_", "find_", "list_", "search_", "calculate", "think", "transfer_")
"""How the names of tools begin that leave both databases alone."""


def task_of(domain: str, split: Split, entry: Json, where: str) -> Task:
    """One line of a tasks file: gold actions, and ``outputs`` as statements. ConfigError names what ``where`` lacks."""
    for key, kind in (("id", str), ("instruction", str), ("actions", list)):
        if not isinstance(entry.get(key), kind):
            raise ConfigError(f"{where}: {key!r} must be a {'list' if kind is list else 'text'}")
    actions = [{"name": action["name"], "arguments": action["arguments"]} for action in entry["actions"]]
    data: Json = {
        **graded(actions),
        "instruction": entry["instruction"],
        "actions": actions,
        "statements": [[output] for output in entry.get("outputs") or []],
    }
    return Task(entry["id"], domain, split, data)


def graded(actions: Sequence[Json]) -> Json:
    """``kind``: the tool of the gold writes, "several" or "no_write"; ``difficulty`` by how many writes there are."""
    writes = [action["name"] for action in actions if not action["name"].startswith(_READS)]
    kind = writes[0] if len(set(writes)) == 1 else "several" if writes else "no_write"
    return {"kind": kind, "difficulty": "easy" if len(writes) <= 1 else "medium" if len(writes) <= 3 else "hard"}


# Which of tau2-bench's tasks are in which split.
#
# ``split_tasks.json`` maps names to lists of task ids. ``train`` and ``test`` are splits of ours too, ``dev`` and
# ``validation`` are our validation split. The other names are sets of their own, which overlap these: ``base``, all
# that tau2-bench reports on, is the union of train and test; telecom's ``small`` and ``full`` are others. With
# ``environment.options.split: NAME`` the set of that name is the test split and the others are empty.
#
# A file that has none of our names gives its set ``base`` as the test split; where there is no such file, all tasks
# are.

OURS: dict[str, Split] = {"train": "train", "dev": "validation", "validation": "validation", "test": "test"}
Named: TypeAlias = dict[str, list[str]]
"""Task ids by the file's names."""


def listed_tasks(value: Any, path: Path) -> dict[str, Json]:
    """The entries of ``tasks.json`` by id. ConfigError where one has no id of its own."""
    entries = value.get("tasks") if isinstance(value, dict) else value
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "id" in entry for entry in entries):
        raise ConfigError(f"{path}: must be a list of objects with an id")
    found: dict[str, Json] = {}
    for number, entry in enumerate(entries):
        name = _id(entry["id"], f"{path}, task {number}: 'id'")
        if name in found:
            raise ConfigError(f"{path}, task {number}: another task has the id {printable(name)!r} too")
        found[name] = entry
    return found


def named_splits(value: Any, path: Path, known: Mapping[str, Json], tasks: Path) -> Named:
    """What ``split_tasks.json`` says, checked against the tasks that there are.

    A set may name tasks that ``tasks.json`` lacks (releases differ in how many of ``full`` it holds), unless it is one
    of ours or is asked for: :func:`dealt` looks at that.
    """
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must be an object of lists of task ids")
    found: Named = {}
    for name, ids in value.items():
        if not isinstance(ids, list):
            raise ConfigError(f"{path}: split {printable(name)!r} must be a list of task ids")
        found[name] = [_id(one, f"{path}: a task id of split {printable(name)!r}") for one in ids]
        if name in OURS:
            _check_known(name, found[name], path, known, tasks)
    return found


def dealt(
    named: Named | None, wanted: str | None, path: Path, known: Mapping[str, Json], tasks: Path
) -> dict[Split, list[str]]:
    """Task ids by our splits, in the file's order; ``wanted`` is the option ``split``."""
    if named is not None and wanted is None and not OURS.keys() & named.keys():
        if "base" not in named:
            raise ConfigError(f"{path}: has none of the splits train, dev, validation, test and base")
        wanted = "base"
    if wanted is not None:
        if named is None or wanted not in named:
            have = ", ".join(map(printable, named)) if named else "none, since the folder has no split_tasks.json"
            raise ConfigError(f"environment.options.split: {path} names no split {wanted!r}; it has: {have}")
        _check_known(wanted, named[wanted], path, known, tasks)
        return {"train": [], "validation": [], "test": named[wanted]}
    if named is None:
        return {"train": [], "validation": [], "test": list(known)}
    return _by_our_names(named, path)


def _by_our_names(named: Named, path: Path) -> dict[Split, list[str]]:
    found: dict[Split, list[str]] = {"train": [], "validation": [], "test": []}
    home: dict[str, str] = {}
    for name, split in OURS.items():
        for one in named.get(name, ()):
            if one in home:
                raise ConfigError(f"{path}: task {printable(one)!r} is in the splits {home[one]!r} and {name!r}")
            home[one] = name
            found[split].append(one)
    return found


def _check_known(name: str, ids: Sequence[str], path: Path, known: Mapping[str, Json], tasks: Path) -> None:
    if lost := [one for one in ids if one not in known]:
        raise ConfigError(
            f"{path}: split {printable(name)!r} names task {printable(lost[0])!r}, which {tasks} does not have"
        )
    if len(set(ids)) < len(ids):
        raise ConfigError(f"{path}: split {printable(name)!r} names a task twice")


def _id(value: Any, what: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ConfigError(f"{what} must be a text or a whole number")
    return str(value)


# Tasks of tau2-bench as tasks of this project.
#
# ``evaluation_criteria.reward_basis`` says what the reward is made of; all of it has to hold:
#
# =================  =====================================================================================
# ``DB``             final database equals gold, the user's device included
# ``COMMUNICATE``    every ``communicate_info`` was told the user: our statements
# ``ACTION``         every gold action was called, with the arguments that ``compare_args`` names (all if absent)
# ``NL_ASSERTION``   every assertion holds in the judge's eyes; without assertions nothing is asked
# ``ENV_ASSERTION``  functions over the final state give ``assert_value``; telecom has them, elsewhere it is refused
#                    unless left out by option
# =================  =====================================================================================
#
# Official evaluation compares the arguments of the *call* where ``compare_args`` is absent, so that a call without any
# matches every gold call; here those of the gold call are compared.

BASES = ("DB", "COMMUNICATE", "ACTION", "NL_ASSERTION", "ENV_ASSERTION")
_LABELS = {
    "reason_for_call": "Why you write",
    "known_info": "What you know",
    "unknown_info": "What you do not know",
    "task_instructions": "How you behave",
}


def task_of_tau2(domain: str, split: Split, entry: Json, where: str) -> Task:
    """One task. ``initialization`` keeps ``initial_state`` for the desk, which knows the tables."""
    criteria: Json = entry.get("evaluation_criteria") or {}
    basis = _basis(criteria, where)
    actions = [_action(action) for action in criteria.get("actions") or []]
    info = [[text] for text in criteria.get("communicate_info") or []]
    data: Json = {
        **graded(actions),
        "instruction": _instruction(entry.get("user_scenario") or {}),
        "actions": actions,
        "statements": info if "COMMUNICATE" in basis else [],
        "communicate_info": info,
        "basis": [name for name in basis if _asks(name, criteria)],
        "nl_assertions": list(criteria.get("nl_assertions") or []),
        "env_assertions": [_assertion(one) for one in criteria.get("env_assertions") or []],
    }
    if initial := _initial(entry.get("initial_state") or {}, where):
        data["initialization"] = initial
    if entry.get("user_tools") is not None:
        data["user_tools"] = [str(name) for name in entry["user_tools"]]
    return Task(str(entry["id"]), domain, split, data)


def _basis(criteria: Json, where: str) -> list[str]:
    if not criteria:
        raise ConfigError(f"{where}: has no evaluation_criteria, so that there is nothing to judge by")
    basis = list(criteria.get("reward_basis") or ("DB", "COMMUNICATE"))
    if unknown := [name for name in basis if name not in BASES]:
        raise ConfigError(f"{where}: reward_basis names {unknown[0]!r}; known: {', '.join(BASES)}")
    return basis


def _action(action: Json) -> Json:
    kept = {"name": action["name"], "arguments": action["arguments"]}
    if action.get("requestor") == "user":
        kept["requestor"] = "user"
    if action.get("compare_args") is not None:
        kept["compare_args"] = action["compare_args"]
    return kept


def _assertion(one: Json) -> Json:
    kept = {"env_type": one["env_type"], "func_name": one["func_name"], "arguments": one["arguments"]}
    return {**kept, "assert_value": one.get("assert_value", True)}


def _asks(name: str, criteria: Json) -> bool:
    """Whether this part of the basis asks for anything in this task.

    Official evaluation looks at the database only where gold actions or assertions are listed, be it an empty list.
    """
    if name == "DB":
        return criteria.get("actions") is not None or criteria.get("env_assertions") is not None
    lists = {"NL_ASSERTION": "nl_assertions", "ENV_ASSERTION": "env_assertions"}
    return name not in lists or bool(criteria.get(lists[name]))


def _initial(state: Json, where: str) -> Json:
    if state.get("message_history"):
        raise ConfigError(f"{where}: begins in the middle of a conversation (message_history), which is not supported")
    given: Json = state.get("initialization_data") or {}
    data, user_data = given.get("agent_data") or {}, given.get("user_data") or {}
    actions = state.get("initialization_actions") or []
    if not (data or user_data or actions):
        return {}
    return {"data": data, "actions": actions, **({"user_data": user_data} if user_data else {})}


def _instruction(scenario: Json) -> str:
    """The user's page: persona and instructions, one labeled paragraph each."""
    parts = [f"Your character: {scenario['persona']}"] if scenario.get("persona") else []
    instructions: Any = scenario.get("instructions") or ""
    if isinstance(instructions, str):
        return "\n\n".join([*parts, instructions])
    parts += [f"{label}: {instructions[key]}" for key, label in _LABELS.items() if instructions.get(key)]
    return "\n\n".join(parts)


Form = Literal["tau", "tau2"]
"""Which benchmark a folder is of."""
_FILES: dict[Split, str] = {"train": "tasks_train", "validation": "tasks_dev", "test": "tasks_test"}
MAX_BYTES = 1 << 28
"""Of one file, unpacked; the largest official one has 14 million."""


@dataclass(frozen=True, slots=True)
class OfficialData:
    """What a folder holds."""

    folder: Path
    form: Form
    base: Base
    policy: str
    tasks: dict[Split, tuple[Task, ...]]
    """In the file's order; ids are the file's."""


def load_official(domain: str, folder: Path, tables: Sequence[str], split: str | None = None) -> OfficialData:
    """Read ``folder``; raises :class:`ConfigError` that names the file and what is wrong with it.

    ``split``: the set of tau2-bench's tasks to take as test split; None for the splits that the folder has.
    """
    check_folder(domain, folder)
    policy = found(folder, "policy.md")
    form: Form = "tau2" if find(folder, "db.json") is not None else "tau"
    if form == "tau2":
        database, tasks = read_json(found(folder, "db.json")), tau2_tasks(domain, folder, split)
    else:
        if split is not None:
            raise ConfigError(f"environment.options.split: {folder} is tau-bench's, which has train, dev and test only")
        database, tasks = {name: read_json(found(folder, f"{name}.json")) for name in tables}, _tasks(domain, folder)
    for name in tables:
        if not isinstance(database, dict) or not isinstance(database.get(name), dict):
            raise ConfigError(f"{folder}: table {name!r} must be a JSON object of records by id")
    if not any(tasks.values()):
        raise ConfigError(f"{folder}: holds no tasks; expected tasks_test.jsonl (tau-bench) or tasks.json (tau2-bench)")
    return OfficialData(folder, form, Base({name: database[name] for name in tables}), read_text(policy), tasks)


def check_folder(domain: str, folder: Path) -> None:
    """ConfigError where ``environment.data`` is no folder."""
    if not folder.is_dir():
        raise ConfigError(f"environment.data: {folder} is no folder; give the one that holds {domain}'s official data")


def read_text(path: Path) -> str:
    """The text of a file, unpacked if its name ends in ``.gz``.

    ConfigError for one that cannot be read or unpacked, is no text, or is larger than :data:`MAX_BYTES`.
    """
    try:
        with open_file(path) as file:
            packed = file if path.suffix != ".gz" else io.BufferedReader(GzipFile(fileobj=file))
            data = packed.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path}: has more than {MAX_BYTES:,} bytes")
        return data.decode()
    except (BadGzipFile, zlib.error, EOFError, ValueError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}") from error


def read_json(path: Path) -> Any:
    """The JSON in a file; ConfigError for a text that is none."""
    try:
        return read_json_text(read_text(path), depth=MAX_FILE_DEPTH)
    except JsonError as error:
        raise ConfigError(f"{path}: is no JSON: {error}") from error


def read_lines(path: Path) -> list[Json]:
    """One JSON object a line; ConfigError that names the line that is none."""
    found = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = read_json_text(line, depth=MAX_FILE_DEPTH)
        except JsonError as error:
            raise ConfigError(f"{path}, line {number}: is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise ConfigError(f"{path}, line {number}: must be a JSON object")
        found.append(value)
    return found


def find(folder: Path, name: str) -> Path | None:
    """The file of that name, plain or packed, or None."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.exists()), None)


def found(folder: Path, name: str) -> Path:
    """The file of that name, plain or packed; ConfigError where there is neither."""
    path = find(folder, name)
    if path is None:
        raise ConfigError(f"{folder}: has no {name} (or {name}.gz), which official data needs")
    return path


def tau2_tasks(
    domain: str, folder: Path, split: str | None, task_of: Callable[..., Task] = task_of_tau2
) -> dict[Split, tuple[Task, ...]]:
    """The tasks of tau2-bench's ``tasks.json`` by our splits, each made by ``task_of``."""
    path, splits = found(folder, "tasks.json"), find(folder, "split_tasks.json")
    entries = listed_tasks(read_json(path), path)
    where = splits or folder
    named = named_splits(read_json(splits), splits, entries, path) if splits is not None else None
    return {
        ours: tuple(_made(task_of, domain, ours, entries[one], f"{path}, task {one}") for one in ids)
        for ours, ids in dealt(named, split, where, entries, path).items()
    }


def _tasks(domain: str, folder: Path) -> dict[Split, tuple[Task, ...]]:
    tasks: dict[Split, tuple[Task, ...]] = {}
    for split, name in _FILES.items():
        path = find(folder, f"{name}.jsonl")
        lines = read_lines(path) if path is not None else []
        tasks[split] = tuple(_made(task_of, domain, split, line, f"{path}, task {n}") for n, line in enumerate(lines))
    return tasks


def _made(make: Callable[..., Task], domain: str, split: Split, entry: Json, where: str) -> Task:
    try:
        return make(domain, split, entry, where)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: is not of the form of a task: {type(error).__name__}: {error}") from error
