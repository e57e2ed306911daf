"""The agent part of ACEBench, read from a checkout of its repository that ``environment.data`` names.

Tasks and ground truth are JSON lines (``data_agent_multi_turn.json``, ``data_agent_multi_step.json``), the simulated
phone and travel services are its Python classes. Three hazards of the data are met here: ground truth that names a
class in another spelling is matched without regard to case; milestones that are no readable call are counted as never
reached; states are compared after a round trip through JSON, which makes keys texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from environments._packages import import_classes, json_lines, json_schema, read_call
from mua.environment.protocol import Task
from mua.types import Json, ToolSchema
from mua.utils.errors import ConfigError

PACKAGE = "model_inference"
CATEGORIES = ("multi_turn", "multi_step")
LANGUAGES = ("en", "zh")
SAVED = {
    "BaseApi": ("wifi", "logged_in"),
    "MessageApi": ("inbox",),
    "ReminderApi": ("reminder_list",),
    "FoodPlatform": ("users", "logged_in_users", "orders"),
    "Travel": ("users", "reservations"),
}
"""Attributes by class that the verdict compares."""
_MODULES = {
    "BaseApi": "phone_platform.base_api",
    "MessageApi": "phone_platform.message",
    "ReminderApi": "phone_platform.reminder",
    "FoodPlatform": "phone_platform.food_services",
    "Travel": "travel",
}
_FOLDERS = ("data_all/data_{}", "data/data_{}", "data/{}")
"""Where versions of the repository keep their data, by language."""


@dataclass(frozen=True, slots=True)
class Package:
    """What one checkout holds, in one language."""

    tasks: tuple[Task, ...]
    classes: dict[str, dict[str, type]]
    """Classes by category: either has copies of its own."""


@lru_cache(maxsize=4)
def load(folder: Path, language: str, categories: tuple[str, ...]) -> Package:
    """Read a checkout; raises :class:`ConfigError` that names what is missing or broken."""
    data = _data_folder(folder, language)
    tasks = tuple(task for category in categories for task in _tasks(data, category))
    classes = {}
    for category in categories:
        used = {name for task in tasks if task.data["kind"] == category for name in task.data["classes"]}
        modules = {
            name: f"{PACKAGE}.{category}.scenarios{language}.{_MODULES[name]}"
            for name in sorted(used)
            if name in _MODULES
        }
        if unknown := sorted(used - set(_MODULES)):
            raise ConfigError(f"environment.data: {folder}: unknown services {', '.join(unknown)}")
        classes[category] = import_classes(folder.resolve(), PACKAGE, modules)
    return Package(tasks, classes)


def tools_of(task: Task) -> list[ToolSchema]:
    """The task's tools."""
    return [ToolSchema(tool["name"], tool["description"], tool["parameters"]) for tool in task.data["tools"]]


def milestones(task: Task) -> list[list[tuple[str, Json] | None]]:
    """Alternative ways, each the calls that should come in this order; None where the data has no readable call."""
    return [[_call(text) for text in way] for way in task.data["milestones"]]


def _data_folder(folder: Path, language: str) -> Path:
    for name in _FOLDERS:
        if (found := folder / name.format(language)).is_dir() and (folder / PACKAGE).is_dir():
            return found
    raise ConfigError(
        f"environment.data: {folder} is no checkout of ACEBench: it needs {PACKAGE} and "
        f"{_FOLDERS[0].format(language)}; clone its repository and give that folder"
    )


def _tasks(data: Path, category: str) -> Iterator[Task]:
    name = f"data_agent_{category}.json"
    answers = {entry["id"]: entry for entry in json_lines(data / "possible_answer" / name)}
    for entry in json_lines(data / name):
        try:
            yield _task(category, entry, answers[entry["id"]])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"environment.data: {data / name}: {entry.get('id')}: {reason}") from None


def _task(category: str, entry: Json, answer: Json) -> Task:
    truth = answer["ground_truth"]
    ways = answer.get("mile_stone") or []
    data = {
        "kind": category,
        "question": entry["question"],
        "initial": entry.get("initial_config", {}),
        "classes": list(entry["involved_classes"]),
        "tools": [_tool(tool) for tool in entry["function"]],
        "truth": _truth(truth if isinstance(truth, list) else [truth], entry["involved_classes"]),
        "milestones": ways if ways and isinstance(ways[0], list) else [ways],
    }
    return Task(str(entry["id"]), "acebench", "test", data)


def _truth(parts: Sequence[Json], classes: Sequence[str]) -> Json:
    """Attributes by class, under the spelling of the task's own classes."""
    spelled = {name.lower(): name for name in classes}
    return {spelled.get(name.lower(), name): state for part in parts for name, state in part.items()}


def _tool(entry: Json) -> Json:
    parameters = {"type": "object", "properties": {}} | json_schema(entry.get("parameters") or {})
    return {
        "name": entry["name"].rsplit(".", 1)[-1],
        "description": entry.get("description") or entry["name"],
        "parameters": {**parameters, "type": "object", "additionalProperties": False},
    }


def _call(text: str) -> tuple[str, Json] | None:
    try:
        call = read_call(text.strip().removeprefix("[").removesuffix("]"))
    except (ValueError, SyntaxError):
        return None
    return None if call.positional else (call.name, json.loads(json.dumps(call.named, default=str)))
