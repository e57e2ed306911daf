"""One task of ACEBench's agent part: its services and the verdict on their final state.

A call goes to every service that has the method (the phone's switches are in all of its apps), and the last one's
answer is given. The task is solved when the saved attributes of each service equal the ground truth's, in which a
dictionary names only the entries that count, and as many services as it has are involved. Progress along the milestones
(``process`` in the details) is no reward: replaying them solves only a part of the tasks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from environments._packages import import_classes, json_lines, json_schema, read_call
from environments.kit.overlay import copied
from mua.environment.protocol import Evaluation, Task, ToolResult, Transcript
from mua.environment.tool_arguments import Checker, argument_checker
from mua.types import Json, ToolSchema
from mua.utils.errors import ConfigError

# The agent part of ACEBench, read from a checkout of its repository that ``environment.data`` names.
#
# Tasks and ground truth are JSON lines (``data_agent_multi_turn.json``, ``data_agent_multi_step.json``), the simulated
# phone and travel services are its Python classes. Three hazards of the data are met here: ground truth that names a
# class in another spelling is matched without regard to case; milestones that are no readable call are counted as never
# reached; states are compared after a round trip through JSON, which makes keys texts.

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


class AceEnvironment:
    """Implements :class:`mua.environment.protocol.Environment`."""

    def __init__(self, package: Package) -> None:
        self._package = package
        self._task: Task | None = None
        self._services: dict[str, Any] = {}
        self._tools: list[ToolSchema] = []
        self._checks: dict[str, Checker] = {}
        self._done: list[tuple[str, Json]] = []

    def reset(self, task: Task, seed: int) -> None:
        self._task = task
        self._services = {name: self._service(task, name) for name in task.data["classes"]}
        self._tools = tools_of(task)
        self._checks = {tool.name: argument_checker(tool) for tool in self._tools}
        self._done = []

    def tools(self) -> Sequence[ToolSchema]:
        return self._tools

    def call(self, name: str, arguments: Json) -> ToolResult:
        if name not in self._checks:
            return ToolResult(f"Error: there is no tool {name!r}", error=True)
        if (fault := self._checks[name](arguments)) is not None:
            return ToolResult(f"Error: {fault}", error=True)
        self._done.append((name, copied(arguments)))
        try:
            answers = [method(**copied(arguments)) for method in self._methods(name)]
        except Exception as error:
            return ToolResult(f"Error during execution: {error}", error=True)
        if not answers:
            return ToolResult(f"Error: no service of this task does {name}", error=True)
        text = answers[-1] if isinstance(answers[-1], str) else json.dumps(answers[-1], ensure_ascii=False, default=str)
        return ToolResult(text, error=isinstance(answers[-1], dict) and answers[-1].get("status") is False)

    def evaluate(self, transcript: Transcript) -> Evaluation:
        """1 where the final state is the ground truth's, else 0."""
        assert self._task is not None, "reset comes first"
        wrong = different(self.state(), self._task.data["truth"])
        process = 1.0 if not wrong else progress(self._done, milestones(self._task))
        return Evaluation(float(not wrong), not wrong, {"wrong": wrong, "process": process})

    def close(self) -> None:
        self._services = {}

    def state(self) -> dict[str, Json]:
        """Saved attributes by class, as JSON has them."""
        found = {
            name: {attribute: getattr(service, attribute) for attribute in SAVED[name]}
            for name, service in self._services.items()
        }
        state: dict[str, Json] = json.loads(json.dumps(found, default=str))
        return state

    def _service(self, task: Task, name: str) -> Any:
        service = self._package.classes[task.data["kind"]][name]()
        for part in (name, "BaseApi"):
            service._load_scenario(copied(task.data["initial"].get(part, {})), long_context=False)
        return service

    def _methods(self, name: str) -> list[Any]:
        if name.startswith("_"):
            return []
        return [getattr(service, name) for service in self._services.values() if hasattr(service, name)]


def different(state: dict[str, Json], truth: dict[str, Json]) -> list[str]:
    """Where ``state`` departs from the ground truth: ``Class.attribute`` or ``Class.attribute.entry``."""
    wrong = [] if len(state) == len(truth) else [f"{len(truth)} services should be involved, {len(state)} are"]
    for name in state.keys() & truth.keys():
        for attribute, value in state[name].items():
            wrong += _parts(f"{name}.{attribute}", value, truth[name].get(attribute, _ABSENT))
    return sorted(wrong)


def progress(done: Sequence[tuple[str, Json]], ways: Sequence[Sequence[tuple[str, Json] | None]]) -> float:
    """Share of milestones found in order among the calls made, of the way that fits best (to three decimals)."""
    return max((_along(done, way) for way in ways), default=1.0)


_ABSENT = object()


def _parts(path: str, value: Any, wanted: Any) -> list[str]:
    if not isinstance(wanted, dict) or not isinstance(value, dict):
        return [] if value == wanted else [path]
    return [f"{path}.{key}" for key, inner in wanted.items() if key not in value or value[key] != inner]


def _along(done: Sequence[tuple[str, Json]], way: Sequence[tuple[str, Json] | None]) -> float:
    if not way:
        return 1.0
    reached, place = 0, 0
    for stone in way:
        found = next((index for index in range(place, len(done)) if done[index] == stone), None)
        if found is not None:
            reached, place = reached + 1, found + 1
    return round(reached / len(way), 3)
