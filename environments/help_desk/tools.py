"""The help desk's environment: seven tools over one :class:`Database`, and the verdict on an episode.

Tools check that what they are asked for exists; they do not check the policy. Cancelling a shipped order works,
and is wrong: keeping to the policy is what the agent is judged on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from environments.help_desk.database import CITIES, Database, Snapshot, World
from environments.help_desk.verdict import judged
from environments.kit.database import read_schemas
from mua.environment.protocol import Evaluation, Task, ToolResult, Transcript
from mua.environment.tool_arguments import validate_arguments
from mua.types import Json, ToolSchema

SCHEMAS = read_schemas(Path(__file__).with_suffix(".yaml"), CITIES=CITIES)


class HelpDesk:
    """One episode's shop. Implements :class:`mua.environment.protocol.Environment`."""

    def __init__(self) -> None:
        self._database: Database | None = None
        self._task: Task | None = None
        self._handlers: dict[str, Callable[..., Json]] = {
            "get_order": self._get_order,
            "check_owner": self._check_owner,
            "get_item": self._get_item,
            "cancel_order": self._cancel_order,
            "return_items": self._return_items,
            "change_destination": self._change_destination,
            "transfer_to_human": lambda reason: {"ok": True},
        }

    def reset(self, task: Task, seed: int) -> None:
        self.close()
        self._task = task
        self._database = Database(World(**task.data["world"]))

    def tools(self) -> Sequence[ToolSchema]:
        return tuple(SCHEMAS.values())

    def call(self, name: str, arguments: Json) -> ToolResult:
        schema = SCHEMAS.get(name)
        if schema is None:
            return ToolResult(f"error: there is no tool {name!r}", error=True)
        fault = validate_arguments(schema, arguments)
        if fault is not None:
            return ToolResult(f"error: {fault}", error=True)
        answer = self._handlers[name](**arguments)
        return ToolResult(json.dumps(answer), error="error" in answer, terminal=name == "transfer_to_human")

    def evaluate(self, transcript: Transcript) -> Evaluation:
        """Reward 1 exactly when the customer was helped truthfully: :mod:`environments.help_desk.verdict`."""
        assert self._task is not None
        fresh = HelpDesk()
        fresh.reset(self._task, seed=0)
        try:
            return judged(self._task, transcript, fresh, self.database.snapshot(), gold_snapshot(self._task))
        finally:
            fresh.close()

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    @property
    def database(self) -> Database:
        """The shop as it is now."""
        assert self._database is not None, "reset comes first"
        return self._database

    def _check_owner(self, order: str, name: str) -> Json:
        found = self.database.rows(
            "SELECT name FROM customers JOIN orders ON orders.customer = customers.id WHERE orders.id = ?", order
        )
        return {"owner": found[0]["name"].lower() == name.lower()} if found else {"error": "no such order"}

    def _get_order(self, order: str) -> Json:
        found = self.database.rows("SELECT status, place FROM orders WHERE id = ?", order)
        if not found:
            return {"error": "no such order"}
        items = self.database.rows("SELECT product FROM items WHERE order_id = ? ORDER BY id", order)
        return {**found[0], "items": [row["product"] for row in items]}

    def _get_item(self, order: str, item: str) -> Json:
        found = self.database.rows(
            "SELECT price, final_sale FROM items WHERE order_id = ? AND product = ?", order, item
        )
        return {**found[0], "final_sale": bool(found[0]["final_sale"])} if found else {"error": "no such item"}

    def _cancel_order(self, order: str) -> Json:
        return _written(self.database.write("UPDATE orders SET status = 'cancelled' WHERE id = ?", order), "order")

    def _return_items(self, order: str, items: list[str]) -> Json:
        known = {row["product"] for row in self.database.rows("SELECT product FROM items WHERE order_id = ?", order)}
        if not set(items) <= known:
            return {"error": "no such item in this order"}
        for item in items:
            self.database.write("UPDATE items SET returned = 1 WHERE order_id = ? AND product = ?", order, item)
        return {"ok": True}

    def _change_destination(self, order: str, address: dict[str, Any]) -> Json:
        changed = self.database.write("UPDATE orders SET destination = ? WHERE id = ?", address["city"], order)
        return _written(changed, "order")


def gold_snapshot(task: Task) -> Snapshot:
    """The database after the task's gold actions, run through the same tools."""
    desk = HelpDesk()
    desk.reset(task, seed=0)
    for action in task.data["actions"]:
        result = desk.call(action["name"], action["arguments"])
        assert not result.error, f"gold action of {task.id} fails: {result.text}"
    snapshot = desk.database.snapshot()
    desk.close()
    return snapshot


def _written(rows: int, what: str) -> Json:
    return {"ok": True} if rows else {"error": f"no such {what}"}
