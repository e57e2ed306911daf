"""A data folder in the form of the package bfcl_eval, written by hand: two small services and four tasks."""

from __future__ import annotations

import json
from pathlib import Path

from mua.types import Json

TICKETS = '''\
"""A ticket desk."""


class TicketAPI:
    def __init__(self):
        self.tickets = []
        self._seen = 0

    def _load_scenario(self, scenario, long_context=False):
        self.tickets = scenario.get("tickets", []) + (["filler"] * 3 if long_context else [])

    def open_ticket(self, title, urgent=False):
        self.tickets.append([title, urgent])
        return {"id": len(self.tickets)}

    def count(self):
        self._seen += 1
        return len(self.tickets)

    def close_all(self):
        if not self.tickets:
            return {"error": "there is nothing to close"}
        self.tickets = []
        return "closed"

    def hidden(self):
        raise RuntimeError("no tool leads here")
'''
SUMS = """\
from bfcl_eval.eval_checker.multi_turn_eval.func_source_code.helper import added


class MathAPI:
    def add(self, a, b):
        return {"result": added(a, b)}
"""


def tool(name: str, required: list[str], **properties: Json) -> Json:
    parameters = {"type": "dict", "properties": properties, "required": required}
    response = {"type": "dict", "properties": {"id": {"type": "integer"}}}
    return {"name": name, "description": f"{name}.", "parameters": parameters, "response": response}


TOOLS = {
    "ticket_api": [
        tool("open_ticket", ["title"], title={"type": "string"}, urgent={"type": "boolean", "default": False}),
        tool("count", []),
        tool("close_all", []),
    ],
    "math_api": [tool("add", ["a", "b"], a={"type": "float"}, b={"type": "float"})],
}


def entry(number: int, category: str, turns: list[str], **more: Json) -> Json:
    return {
        "id": f"multi_turn_{category}_{number}",
        "question": [[{"role": "user", "content": text}] if text else [] for text in turns],
        "initial_config": {"TicketAPI": {"tickets": [["old", False]]}},
        "involved_classes": ["TicketAPI", "MathAPI"],
        **more,
    }


TASKS: dict[str, list[tuple[Json, list[list[str]]]]] = {
    "base": [
        (
            entry(0, "base", ["Open an urgent ticket 'leak', twice.", "How many are there?"]),
            [["open_ticket('leak', urgent=True)", "open_ticket('leak', urgent=True)"], ["count()"]],
        ),
        (entry(1, "base", ["What is 2 and 3?"]), [["add(a=2,b=3)", "add(a='x',b=3)"]]),
    ],
    "miss_func": [
        (
            entry(0, "miss_func", ["Close all.", ""], missed_function={"1": ["close_all"]}),
            [[], ["close_all()"]],
        ),
    ],
    "miss_param": [],
    "long_context": [(entry(0, "long_context", ["Count."]), [["count()"]])],
}


def write_package(folder: Path) -> Path:
    """Write the folder; gives it."""
    data = folder / "bfcl_eval" / "data"
    services = folder / "bfcl_eval" / "eval_checker" / "multi_turn_eval" / "func_source_code"
    for place in (data / "possible_answer", data / "multi_turn_func_doc", services):
        place.mkdir(parents=True)
    for package in (services, *services.parents[:3]):
        (package / "__init__.py").write_text("")
    (services / "ticket_api.py").write_text(TICKETS)
    (services / "math_api.py").write_text(SUMS)
    (services / "helper.py").write_text("def added(a, b):\n    return a + b\n")
    for name, tools in TOOLS.items():
        _write(data / "multi_turn_func_doc" / f"{name}.json", tools)
    for category, tasks in TASKS.items():
        name = f"BFCL_v4_multi_turn_{category}.json"
        _write(data / name, [task for task, _ in tasks])
        _write(data / "possible_answer" / name, [{"id": task["id"], "ground_truth": gold} for task, gold in tasks])
    return folder


def _write(path: Path, lines: list[Json]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
