"""Travel gym: book two to four parts of a trip for somebody who lets on what matters and tells it only when asked.

``search`` lists the options of one part, ``action`` asks the traveller, ``answer`` chooses an option for good. Which
wish a question is about is decided by rules over the catalog of attributes or, with ``environment.oracle: llm``, by a
judge, while another model finds the traveller's words. Queries and choices are decided by rules always.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import ClassVar

from environments.gyms._shared import Choice, Game, Gym, act
from environments.gyms._shared.game import Role
from environments.gyms.travel.catalog import catalog, openings, persona
from environments.gyms.travel.game import TravelGame
from environments.gyms.travel.players import PLAYERS, moves, query
from environments.gyms.travel.records import RecordGame, data_of, record_gold, record_moves
from environments.gyms.travel.scenarios import NAME, generate_tasks
from environments.kit.options import Option as Setup
from mua.environment.protocol import Move, Task


class TravelGym(Gym):
    """Implements :class:`mua.environment.domain.Domain`."""

    name = NAME
    choices: ClassVar[Mapping[Choice, str]] = {
        "action": "a message to the traveller, such as a question about one thing",
        "search": "what to look for: one part of the trip with its place, dates and number of guests",
        "answer": "ids of the options you book, separated by commas; at most one for each part of the trip",
        "finish": "stop here",
    }
    defaults: ClassVar[Mapping[str, Setup]] = {"search_reward": 0.0, "preference_reward": 0.8, "max_useless": 2}
    llm_roles: ClassVar[tuple[Role, ...]] = ("user", "judge")
    short_prompt = (
        "Book the trip with interact: ask about what is let on, search options, answer with the cheapest that fits."
    )

    lacking: ClassVar[str] = "attributes by which a question is about a wish"

    players = PLAYERS
    generate = staticmethod(generate_tasks)

    from_record = staticmethod(data_of)

    def game(self, task: Task, seed: int) -> Game:
        return (RecordGame if "opening" in task.data else TravelGame)(self.setting, task, seed)

    def openings(self, task: Task) -> Sequence[str]:
        return openings(task)

    def persona(self, task: Task) -> str:
        return persona(task)

    def gold(self, task: Task) -> Sequence[Move]:
        if "opening" in task.data:
            return record_gold(task)
        searches = [act("search", query(catalog()[one["aspect"]], one["arguments"])) for one in task.data["aspects"]]
        best = [row[0] for one in task.data["aspects"] for row in one["options"] if row[1] == "best"]
        return [*searches, act("answer", ", ".join(best))]

    def expert(self, task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
        """A record's wishes and best options it knows: they follow from nothing that a rule could read."""
        return record_moves(task, seed, loose) if "opening" in task.data else moves(task, seed, loose)


DOMAIN = TravelGym()
