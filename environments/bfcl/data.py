"""The multi-turn sets of the Berkeley Function Calling Leaderboard, read from the package ``bfcl_eval``.

``environment.data`` names a folder that holds the unpacked package (``pip download --no-deps bfcl-eval``, then unzip),
or the package's own folder. Questions, gold calls and tool descriptions are its JSON lines; the simulated services are
its Python classes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from environments._packages import import_classes, json_lines, json_schema, read_call
from mua.environment.protocol import Task
from mua.environment.tool_arguments import validate_arguments
from mua.types import Json, ToolSchema
from mua.utils.errors import ConfigError

PACKAGE = "bfcl_eval"
CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
LONG_CONTEXT = "long_context"
SERVICES = {
    "GorillaFileSystem": ("gorilla_file_system", "gorilla_file_system"),
    "MathAPI": ("math_api", "math_api"),
    "MessageAPI": ("message_api", "message_api"),
    "TwitterAPI": ("posting_api", "posting_api"),
    "TicketAPI": ("ticket_api", "ticket_api"),
    "TradingBot": ("trading_bot", "trading_bot"),
    "TravelAPI": ("travel_booking", "travel_booking"),
    "VehicleControlAPI": ("vehicle_control", "vehicle_control"),
}
"""Class -> its module among the package's services, and its file of tool descriptions."""
STATELESS = frozenset({"MathAPI"})
_MODULES = f"{PACKAGE}.eval_checker.multi_turn_eval.func_source_code"
_EASY, _MEDIUM = 3, 6
"""Gold calls up to which a task counts as easy, as medium."""


@dataclass(frozen=True, slots=True)
class Package:
    """What one data folder holds."""

    tasks: tuple[Task, ...]
    tools: dict[str, tuple[ToolSchema, ...]]
    """Tools by class."""
    classes: dict[str, type]


def schemas(package: Package, task: Task) -> list[ToolSchema]:
    """All tools of the task's services, those that come later included.

    A few gold calls break their own tool's schema; that tool takes any value there, or the task could not be solved.
    """
    tools = {tool.name: tool for name in task.data["classes"] for tool in package.tools[name]}
    for text in (text for turn in task.data["gold"] for text in turn):
        name, arguments = gold_move(text, tools)
        if validate_arguments(tools[name], arguments) is not None:
            tools[name] = _loosened(tools[name], arguments)
    return list(tools.values())


def gold_move(text: str, tools: Mapping[str, ToolSchema]) -> tuple[str, Json]:
    """A gold call with all arguments by name."""
    call = read_call(text)
    order = tools[call.name].parameters["properties"]
    return call.name, {**dict(zip(order, call.positional, strict=False)), **call.named}


def _loosened(tool: ToolSchema, arguments: Json) -> ToolSchema:
    """``tool`` with no condition on those of ``arguments`` that break one."""
    parameters = tool.parameters
    bad = {
        name: {key: value for key, value in parameters["properties"].get(name, {}).items() if key == "description"}
        for name, value in arguments.items()
        if validate_arguments(replace(tool, parameters={**parameters, "required": []}), {name: value}) is not None
    }
    return replace(tool, parameters={**parameters, "properties": {**parameters["properties"], **bad}})


def withheld(task: Task) -> dict[int, list[str]]:
    """Names of tools that the policy only gets with the user's message of a turn (from 0)."""
    return {int(turn): names for turn, names in task.data["withheld"].items()}


@lru_cache(maxsize=4)
def load(folder: Path, categories: tuple[str, ...]) -> Package:
    """Read a folder; raises :class:`ConfigError` that names what is missing or broken."""
    root = _root(folder)
    tasks = tuple(task for category in categories for task in _tasks(root / PACKAGE / "data", category))
    used = sorted({name for task in tasks for name in task.data["classes"]})
    if unknown := [name for name in used if name not in SERVICES]:
        raise ConfigError(f"environment.data: {folder}: unknown services {', '.join(unknown)}")
    tools = {
        name: _tools(root / PACKAGE / "data" / "multi_turn_func_doc" / f"{SERVICES[name][1]}.json") for name in used
    }
    modules = {name: f"{_MODULES}.{SERVICES[name][0]}" for name in used}
    return Package(tasks, tools, import_classes(root, PACKAGE, modules))


def _root(folder: Path) -> Path:
    for root in (folder, folder.parent):
        if (root / PACKAGE / "data").is_dir() and (root == folder or folder.name == PACKAGE):
            return root.resolve()
    raise ConfigError(
        f"environment.data: {folder} holds no {PACKAGE}/data; give the folder that the package bfcl-eval was unpacked "
        "into (pip download --no-deps bfcl-eval, then unzip the wheel)"
    )


def _tasks(data: Path, category: str) -> Iterator[Task]:
    name = f"BFCL_v4_multi_turn_{category}.json"
    answers = {entry["id"]: entry["ground_truth"] for entry in json_lines(data / "possible_answer" / name)}
    for entry in json_lines(data / name):
        try:
            yield _task(category, entry, answers[entry["id"]])
        except (KeyError, TypeError, ValueError, SyntaxError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"environment.data: {data / name}: {entry.get('id')}: {reason}") from None


def _task(category: str, entry: Json, gold: Sequence[Sequence[str]]) -> Task:
    calls = sum(map(len, gold))
    for text in (text for turn in gold for text in turn):
        read_call(text)
    data = {
        "kind": category,
        "difficulty": "easy" if calls <= _EASY else "medium" if calls <= _MEDIUM else "hard",
        "questions": ["\n\n".join(message["content"] for message in turn) for turn in entry["question"]],
        "gold": [list(turn) for turn in gold],
        "classes": entry["involved_classes"],
        "initial": entry.get("initial_config", {}),
        "withheld": entry.get("missed_function", {}),
    }
    if len(data["questions"]) != len(data["gold"]):
        raise ValueError("questions and gold answers differ in their number of turns")
    return Task(str(entry["id"]), "bfcl", "test", data)


def _tools(path: Path) -> tuple[ToolSchema, ...]:
    return tuple(_tool(entry) for entry in json_lines(path))


def _tool(entry: Json) -> ToolSchema:
    description = entry["description"]
    if returned := entry.get("response", {}).get("properties"):
        description += f" Returns: {json.dumps(returned)}"
    return ToolSchema(entry["name"], description, json_schema(entry["parameters"]) | {"additionalProperties": False})
