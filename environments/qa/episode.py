"""One episode: a question, pages to read about it, the verdict on the last thing that was said."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from environments.kit.database import read_schemas
from environments.qa.records import question_of
from environments.qa.world import SENTENCES, Pages, pages
from mua.environment.protocol import Evaluation, Task, ToolResult, Transcript
from mua.environment.tool_arguments import argument_checker
from mua.environment.user import STOP_SIGNAL, UserReply
from mua.types import Json, ToolSchema
from mua.users.scoring.scorer import Grader

TOOLS = tuple(read_schemas(Path(__file__).with_name("tools.yaml")).values())
LOOKUP, OPEN = TOOLS
_CHECKS = {tool.name: argument_checker(tool) for tool in TOOLS}
_LONGEST_QUERY = 1_000
_TEASER = 60
_THANKS = ("Thank you.", "Thanks, that is all.", "All right, thank you.")


class QuestionEnvironment:
    """Implements :class:`mua.environment.protocol.Environment`."""

    def __init__(self, grader: Grader, results: int, sentences: int = SENTENCES) -> None:
        """``results``: pages that a lookup gives; ``sentences``: those of a page besides its facts."""
        self._grader, self._results, self._sentences = grader, results, sentences
        self._task: Task | None = None
        self._seed = 0
        self._pages: Pages | None = None

    def reset(self, task: Task, seed: int) -> None:
        self._task, self._seed = task, seed
        self._pages = pages(task.data.get("world", task.split), self._sentences) if "chain" in task.data else None

    def tools(self) -> Sequence[ToolSchema]:
        """Those over the pages of the made-up world; questions from files have none of the domain's own."""
        return TOOLS if self._pages is not None else ()

    def call(self, name: str, arguments: Json) -> ToolResult:
        check = _CHECKS.get(name) if self._pages is not None else None
        if check is None or self._pages is None:
            return ToolResult(f"Error: there is no tool {name!r}", error=True)
        if (fault := check(arguments)) is not None:
            return ToolResult(f"Error: {fault}", error=True)
        return self._looked_up(arguments["query"]) if name == LOOKUP.name else self._opened(arguments["title"])

    async def evaluate(self, transcript: Transcript) -> Evaluation:
        """What the last text to the user is worth; 0 where nothing was said."""
        assert self._task is not None, "reset comes first"
        said = [text for text in transcript.told_user() if text.strip()]
        if not said:
            return Evaluation(0.0, False, {"why": "nothing was said"})
        score = await self._grader.grade(said[-1], question_of(self._task, self._seed))
        return Evaluation(score.score, score.right, {**score.details, "reference": self._task.data["reference"]})

    def close(self) -> None:
        self._pages = None

    def _looked_up(self, query: str) -> ToolResult:
        assert self._pages is not None
        found = self._pages.lookup(query[:_LONGEST_QUERY], self._results)
        if not found:
            return ToolResult("Nothing was found. Try other words.")
        lines = [
            f"{place}. {one.title}: {one.text[:_TEASER].rsplit(' ', 1)[0]} ..." for place, one in enumerate(found, 1)
        ]
        return ToolResult("\n".join(lines))

    def _opened(self, title: str) -> ToolResult:
        assert self._pages is not None
        page = self._pages.open(title[:_LONGEST_QUERY])
        if page is None:
            near = difflib.get_close_matches(title[:100], [one.title for one in self._pages.lookup(title[:100], 5)], 1)
            hint = f" Is it {near[0]!r}?" if near else ""
            return ToolResult(f"Error: there is no page of this title.{hint} Use lookup to find titles.", error=True)
        return ToolResult(page.text)


class Asker:
    """Asks the question, takes the answer, and says nothing of whether it is right; a
    :class:`mua.environment.user.User`."""

    def __init__(self, opening: str, grader: Grader, patience: int, form: str, pick: int) -> None:
        """``patience``: texts without an answer after which it leaves; ``form``: how an answer is to be given; ``pick``
        varies its wording."""
        self._opening, self._grader, self._left, self._form, self._pick = opening, grader, patience, form, pick

    async def open(self) -> UserReply:
        return UserReply(self._opening)

    async def reply(self, agent_text: str) -> UserReply:
        self._left -= 1
        if self._left <= 0 or self._grader.answers(agent_text):
            return UserReply(f"{_THANKS[self._pick % len(_THANKS)]} {STOP_SIGNAL}", stop=True)
        return UserReply(f"I cannot find an answer in that. {self._form}")

    async def close(self) -> None:
        """Holds nothing."""
