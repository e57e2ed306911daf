"""Search gym: a question that takes several searches, over a made-up world that nobody has learned by heart.

``search`` gives the best documents for a query, at most ``max_searches`` times; ``answer`` is compared with the one
right answer (and, with ``environment.oracle: llm``, shown to a judge when it does not match). There is one answer,
because documents tell several things of the same sort, and the right one could otherwise be found by trying.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from environments.gyms._shared import Choice, Game, Gym, Reply, Setting, act
from environments.gyms._shared.game import Role
from environments.gyms._shared.official import has_records
from environments.gyms._shared.oracles import labeled
from environments.gyms._shared.records import SearchRecord
from environments.gyms.search.players import PLAYERS, given_moves, moves
from environments.gyms.search.web import OPTIONS, WebSearch
from environments.gyms.search.world import NAME, generate_tasks, load_questions, matches, ready_index
from environments.kit.options import Option
from environments.kit.ranking import Document
from mua.environment.protocol import Move, Split, Task
from mua.types import Json
from mua.utils.errors import ConfigError

_OPENINGS = (
    "I have a question for you: {question}",
    "Can you find this out for me? {question}",
    "{question} Please look it up.",
    "Here is something I would like to know. {question}",
)
_JUDGE = (
    "Does the answer mean the same thing as the reference answer to the question, whatever its wording? Yes if it "
    "does; No if it is something else, is missing, or names several candidates."
)


class SearchGame(Game):
    """One question."""

    def __init__(self, setting: Setting, task: Task, seed: int, web: WebSearch | None) -> None:
        super().__init__(setting, task, seed)
        self._web = web

    async def search(self, content: str) -> Reply:
        """The best documents for a query."""
        count = self.setting.whole("results")
        found = await self._web.search(content, count) if self._web else (await ready_index()).best(content, count)
        return Reply(shown(found) if found else "Nothing was found. Try other words.")

    async def answer(self, content: str) -> Reply:
        """1 for the right answer, 0 for any other."""
        self.solved = matches(content, [self.task.data["answer"], *self.task.data["aliases"]])
        if not self.solved and self.setting.oracle == "llm":
            self.solved = await self._judged(content)
        return Reply("Yes, that is it. Thank you!", 1.0, over=True) if self.solved else Reply("No, that is not it.")

    async def _judged(self, content: str) -> bool:
        data = self.task.data
        material = {"question": data["question"], "reference answer": data["answer"], "answer": content}
        return await labeled(self.setting.judge, _JUDGE, ("Yes", "No"), material, self.seed) == "Yes"


def shown(documents: Sequence[Document]) -> str:
    """Results as the policy reads them."""
    return "\n".join(f"[{place}] {one.title}: {one.text}" for place, one in enumerate(documents, 1))


class SearchGym(Gym):
    """Implements :class:`mua.environment.domain.Domain`."""

    name = NAME
    held_out = True
    choices: ClassVar[Mapping[Choice, str]] = {
        "search": "words to look for; the best documents come back",
        "answer": "the answer alone: a name or a year",
        "finish": "give up",
    }
    defaults: ClassVar[Mapping[str, Option]] = {"max_searches": 5, "max_answers": 1, "results": 5, **OPTIONS}
    llm_roles: ClassVar[tuple[Role, ...]] = ("judge",)
    short_prompt = "Answer the question. Use interact: search for documents, then answer."

    def __init__(self, setting: Setting | None = None, given: Mapping[Split, Sequence[Task]] | None = None) -> None:
        """``given`` are questions to ask instead of those about the made-up world."""
        super().__init__(setting, given)
        self._web = WebSearch(self.setting.options) if self.setting.options["search_url"] else None

    @classmethod
    def given_tasks(cls, path: Path, setting: Setting) -> Mapping[Split, Sequence[Task]]:
        """UserRL's questions, or a folder of one's own; both need a web search to be answered."""
        if not setting.options["search_url"]:
            raise ConfigError(
                "environment.data: gyms/search needs options.search_url for questions that are not its own"
            )
        return super().given_tasks(path, setting) if has_records("search", path) else load_questions(path)

    @staticmethod
    def from_record(record: SearchRecord) -> Json:
        told = {"question": record.question, "answer": record.answer, "aliases": []}
        return {"kind": "given", "difficulty": "medium", **told}

    players = PLAYERS
    generate = staticmethod(generate_tasks)

    def game(self, task: Task, seed: int) -> Game:
        return SearchGame(self.setting, task, seed, self._web)

    def openings(self, task: Task) -> Sequence[str]:
        return [opening.format(question=task.data["question"]) for opening in _OPENINGS]

    def persona(self, task: Task) -> str:
        return f"You want to know the answer to one question, and know nothing about it: {task.data['question']}"

    def gold(self, task: Task) -> Sequence[Move]:
        return [act("answer", task.data["answer"])]

    def expert(self, task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
        """Follows the chain of a question about the made-up world; of others it knows the answer when it finds it."""
        return moves(task, seed, loose) if "chain" in task.data else given_moves(task)


DOMAIN = SearchGym()
