"""One task of BFCL's multi-turn sets: its services, the calls made, and the verdict turn by turn.

A turn ends where the agent says something without calling a tool. The verdict plays the calls again on fresh services
beside the gold calls, and asks after every turn that has gold calls for what the leaderboard asks for:

* something was called in the turn, in not too many answers;
* every public attribute of every service equals gold's;
* every gold result of the turn is among all results so far, as often as gold has it.

Turns without gold calls (a tool or a detail is missing on purpose) are not judged, as in the leaderboard.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from environments._packages import import_classes, json_lines, json_schema, read_call
from environments.kit.overlay import copied
from mua.environment.protocol import Evaluation, Task, ToolResult, Transcript
from mua.environment.tool_arguments import argument_checker, validate_arguments
from mua.types import Json, ToolSchema
from mua.utils.errors import ConfigError

# The multi-turn sets of the Berkeley Function Calling Leaderboard, read from the package ``bfcl_eval``.
#
# ``environment.data`` names a folder that holds the unpacked package (``pip download --no-deps bfcl-eval``, then
# unzip), or the package's own folder. Questions, gold calls and tool descriptions are its JSON lines; the simulated
# services are its Python classes.

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


STEPS = 20
"""Answers with calls in one turn, or as many as gold has calls; more fail the task."""


class Services:
    """The simulated services of one task, each an instance of its own."""

    def __init__(self, package: Package, task: Task) -> None:
        self.instances: dict[str, Any] = {}
        self._methods: dict[str, Any] = {}
        for name in task.data["classes"]:
            instance = self.instances[name] = package.classes[name]()
            if name not in STATELESS:
                initial = copied(task.data["initial"].get(name, {}))
                instance._load_scenario(initial, long_context=task.data["kind"] == LONG_CONTEXT)
            for tool in package.tools[name]:
                self._methods[tool.name] = getattr(instance, tool.name)

    def call(self, name: str, positional: Sequence[Any], named: Json) -> tuple[str, bool]:
        """What a call answers, as the leaderboard writes it, and whether it failed."""
        try:
            value = self._methods[name](*copied(list(positional)), **copied(named))
        except Exception as error:
            return f"Error during execution: {error}", True
        if isinstance(value, str):
            return value, False
        failed = isinstance(value, dict) and "error" in value
        try:
            return (json.dumps(value) if isinstance(value, dict) else str(value)), failed
        except (TypeError, ValueError):
            return str(value), failed

    def state(self) -> dict[str, Json]:
        """Public attributes by service."""
        return {
            name: {key: value for key, value in vars(instance).items() if not key.startswith("_")}
            for name, instance in self.instances.items()
        }


class BfclEnvironment:
    """Implements :class:`mua.environment.protocol.Environment`."""

    def __init__(self, package: Package) -> None:
        self._package = package
        self._task: Task | None = None
        self._services: Services | None = None
        self._done: list[Done] = []

    def reset(self, task: Task, seed: int) -> None:
        self._task = task
        self._services = Services(self._package, task)
        self._done = []
        self._all = {tool.name: tool for tool in schemas(self._package, task)}
        self._checks = {name: argument_checker(tool) for name, tool in self._all.items()}

    def tools(self) -> Sequence[ToolSchema]:
        """Those of the first turn; the user brings the others."""
        assert self._task is not None, "reset comes first"
        later = {name for names in withheld(self._task).values() for name in names}
        return [tool for name, tool in self._all.items() if name not in later]

    def call(self, name: str, arguments: Json) -> ToolResult:
        assert self._services is not None, "reset comes first"
        if name not in self._all:
            return ToolResult(f"Error: there is no tool {name!r}", error=True)
        if (fault := self._checks[name](arguments)) is not None:
            return ToolResult(f"Error: {fault}", error=True)
        text, failed = self._services.call(name, (), arguments)
        self._done.append(Done(name, copied(arguments), text))
        return ToolResult(text, error=failed)

    def evaluate(self, transcript: Transcript) -> Evaluation:
        """1 where every turn is right, else 0; ``details`` names the first wrong turn and why."""
        assert self._task is not None, "reset comes first"
        turns = executed_by_turn(transcript.messages, self._done)
        found = first_fault(self._package, self._task, turns)
        return Evaluation(float(found is None), found is None, found or {})

    def close(self) -> None:
        self._services = None


class Done(NamedTuple):
    """A call that reached a service."""

    name: str
    arguments: Json
    answer: str


class Turn(list[tuple[str, Json]]):
    """The calls of one turn that reached a service."""

    steps = 0
    """Answers with calls."""


def executed_by_turn(messages: Sequence[Json], done: Sequence[Done]) -> list[Turn]:
    """``done``, in order, dealt to the turns of the conversation that they were made in.

    Calls that were refused before they reached a service stand in ``messages`` alone, with another answer.
    """
    turns, left = [Turn()], list(done)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        wanted = [call["function"] for call in message.get("tool_calls", ())]
        if not wanted and not message.get("tool_call_errors"):
            turns.append(Turn())
            continue
        turns[-1].steps += 1
        for function, answer in zip(wanted, messages[index + 1 :], strict=False):
            made = Done(function["name"], json.loads(function["arguments"]), answer["content"])
            if left and left[0] == made:
                turns[-1].append(left.pop(0)[:2])
    turns[-1].extend(call[:2] for call in left)
    return turns


def first_fault(package: Package, task: Task, turns: Sequence[Turn]) -> Json | None:
    """Where the conversation departs from gold first; None where it does not."""
    ours, gold = Services(package, task), Services(package, task)
    results: Counter[str] = Counter()
    for number, wanted in enumerate(task.data["gold"]):
        turn = turns[number] if number < len(turns) else Turn()
        results.update(ours.call(name, (), arguments)[0] for name, arguments in turn)
        expected = Counter(gold.call(*read_call(text))[0] for text in wanted)
        if not wanted:
            continue
        if not turn:
            return {"turn": number, "why": "nothing was called"}
        if turn.steps > max(STEPS, len(wanted)):
            return {"turn": number, "why": f"{turn.steps} answers with calls"}
        if different := _different(ours.state(), gold.state()):
            return {"turn": number, "why": "state", "attributes": different}
        if missing := expected - results:
            return {"turn": number, "why": "results", "missing": sorted(missing.elements())}
    return None


def _different(ours: dict[str, Json], gold: dict[str, Json]) -> list[str]:
    return [
        f"{service}.{name}"
        for service, attributes in gold.items()
        for name, value in attributes.items()
        if ours[service].get(name) != value
    ]
