"""One episode: a database of its own, the two tools of AgentBench, the verdict when an answer is committed."""

from __future__ import annotations

from collections.abc import Sequence

from environments.agentbench_db.sandbox import Sandbox, SqlError
from environments.agentbench_db.scoring import agrees, cleaned, joined, table_digest
from mua.environment.protocol import Evaluation, Task, ToolResult, Transcript
from mua.environment.tool_arguments import argument_checker
from mua.types import Json, ToolSchema

LONGEST_ANSWER = 800
"""Characters of a result that the agent is shown."""
EXECUTE = ToolSchema(
    "execute_sql",
    "Run one SQL statement on the database and see what it gives.",
    {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "The statement."}},
        "required": ["query"],
        "additionalProperties": False,
    },
)
COMMIT = ToolSchema(
    "commit_final_answer",
    "Hand in the answer, once everything is done. Ends the task. Where the tables were to be changed, the values do "
    "not matter.",
    {
        "type": "object",
        "properties": {
            "answers": {"type": "array", "items": {"type": "string"}, "description": "The values of the answer."}
        },
        "required": ["answers"],
        "additionalProperties": False,
    },
)
TOOLS = (EXECUTE, COMMIT)
_CHECKS = {tool.name: argument_checker(tool) for tool in TOOLS}


class DatabaseTaskEnvironment:
    """Implements :class:`mua.environment.protocol.Environment`."""

    def __init__(self) -> None:
        self._task: Task | None = None
        self._sandbox: Sandbox | None = None
        self._committed: list[str] | None = None

    def reset(self, task: Task, seed: int) -> None:
        """Tables as the record has them. SqlError where they cannot be made, which is no fault of the policy."""
        self.close()
        self._task, self._committed = task, None
        self._sandbox = filled(task, f"{task.id}/{seed}")

    def tools(self) -> Sequence[ToolSchema]:
        return TOOLS

    def call(self, name: str, arguments: Json) -> ToolResult:
        check = _CHECKS.get(name)
        if check is None:
            return ToolResult(f"Error: there is no tool {name!r}", error=True)
        if (fault := check(arguments)) is not None:
            return ToolResult(f"Error: {fault}", error=True)
        if self._committed is not None:
            return ToolResult("Error: the answer has been handed in", error=True)
        if name == COMMIT.name:
            self._committed = list(arguments["answers"])
            return ToolResult("The answer was handed in.", terminal=True)
        return self._executed(arguments["query"])

    def evaluate(self, transcript: Transcript) -> Evaluation:
        """1 where an answer was committed that is the label, or over the tables that the gold statement makes."""
        assert self._task is not None, "reset comes first"
        if self._committed is None:
            return Evaluation(0.0, False, {"why": "no answer was committed"})
        data = self._task.data
        if "label" in data:
            right = agrees(self._committed, data["label"])
            return Evaluation(float(right), right, {"answer": self._committed, "label": data["label"]})
        assert self._sandbox is not None
        right = tables_digest(self._sandbox, self._task) == wanted_digest(self._task)
        return Evaluation(float(right), right, {"tables": "as they should be" if right else "differ"})

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()
        self._sandbox = None

    def _executed(self, query: str) -> ToolResult:
        assert self._sandbox is not None, "reset comes first"
        try:
            text = str(self._sandbox.execute(query))
        except SqlError as error:
            return ToolResult(f"Error: {error}", error=True)
        return ToolResult(text if len(text) <= LONGEST_ANSWER else f"{text[:LONGEST_ANSWER]}[TRUNCATED]")


def filled(task: Task, seed: str) -> Sandbox:
    """A database with the task's tables; the caller closes it."""
    sandbox = Sandbox(seed)
    for table in task.data["tables"]:
        sandbox.create(table["name"], table["columns"], table["rows"])
    return sandbox


def tables_digest(sandbox: Sandbox, task: Task) -> str:
    """Of the task's tables as they are now; one that is gone has a digest that no other has."""
    digests = []
    for table in task.data["tables"]:
        try:
            digests.append(table_digest(sandbox.texts(table["name"], table["columns"])))
        except SqlError:
            digests.append("gone")
    return joined(digests)


def wanted_digest(task: Task) -> str:
    """What the record says, or what its statement makes of the tables."""
    return cleaned(task.data["digest"])[0] if task.data["digest"] else made_digest(task)


def untouched_digest(task: Task) -> str:
    """Of the tables as the record has them."""
    sandbox = filled(task, task.id)
    try:
        return tables_digest(sandbox, task)
    finally:
        sandbox.close()


def made_digest(task: Task) -> str:
    """Of the tables after the record's statement; SqlError where that cannot be run."""
    sandbox = filled(task, task.id)
    try:
        sandbox.execute(task.data["gold"])
        return tables_digest(sandbox, task)
    finally:
        sandbox.close()
