"""One task of ACEBench's agent part: its services and the verdict on their final state.

A call goes to every service that has the method (the phone's switches are in all of its apps), and the last one's
answer is given. The task is solved when the saved attributes of each service equal the ground truth's, in which a
dictionary names only the entries that count, and as many services as it has are involved. Progress along the milestones
(``process`` in the details) is no reward: replaying them solves only a part of the tasks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from environments.acebench.data import SAVED, Package, milestones, tools_of
from environments.kit.overlay import copied
from mua.environment.protocol import Evaluation, Task, ToolResult, Transcript
from mua.environment.tool_arguments import Checker, argument_checker
from mua.types import Json, ToolSchema


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
