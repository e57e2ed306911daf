"""One trip: what has been found, told and booked so far, and what each move earns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from environments.gyms._shared import Game, Reply, Setting
from environments.gyms._shared.oracles import asked, is_list, labeled, spoken
from environments.gyms.travel.catalog import (
    AGAIN,
    BOOKED,
    CHAT,
    COMPLETE,
    IMPATIENT,
    MISS,
    SAYINGS,
    VAGUE,
    VOLUNTEERED,
    Asked,
    Aspect,
    Kind,
    catalog,
    classify,
    facts,
    hint,
    missing,
    named,
    wish,
)
from environments.gyms.travel.scenarios import Option
from mua.environment.protocol import Task
from mua.types import Json

# The traveller played by language models: a judge says what a question is about, a user model finds the words.

_KINDS: Mapping[str, Kind] = {"chat": "chat", "miss": "miss", "vague": "vague"}
_JUDGE = SAYINGS["judge"]
_SEARCH = SAYINGS["search"]
_NO_PART = "none"
_HINT = SAYINGS["hint"]
_SMALL_TALK = SAYINGS["small_talk"]


async def classified(game: TravelGame, text: str, pending: Mapping[str, Sequence[str]]) -> Asked:
    """The judge's reading of the agent's ``text``; see :func:`environments.gyms.travel.catalog.classify`."""
    wishes = {
        f"wish {number}": (aspect, attribute)
        for number, (aspect, attribute) in enumerate(
            ((aspect, attribute) for aspect, attributes in pending.items() for attribute in attributes), 1
        )
    }
    lines = [f"- {number}: {_line(game, *one)}" for number, one in wishes.items()]
    question = _JUDGE.format(wishes="\n".join(lines) or "(none that is still untold)")
    labels = ["chat", "miss", "vague", *wishes]
    label = await labeled(game.setting.judge, question, labels, {"the agent's message": text}, game.asks_seed)
    return Asked("hit", *wishes[label]) if label in wishes else Asked(_KINDS[label])


async def searched(game: TravelGame, text: str, facts: Mapping[str, str]) -> str | None:
    """The part of the trip that the query ``text`` covers; ``facts`` are those of each part."""
    question = _SEARCH.format(parts="\n".join(f"- {name}: {told}" for name, told in facts.items()), none=_NO_PART)
    labels = [*facts, _NO_PART]
    said = await labeled(game.setting.judge, question, labels, {"the query": text}, game.asks_seed)
    return None if said == _NO_PART else said


async def hinted(game: TravelGame, preference: Json, aspect: str, text: str) -> str:
    """The wish in the traveller's own words; a reply that states it is asked for again."""

    def unstated(reply: str) -> str:
        if preference["value"].lower() in reply.lower():
            raise ValueError("the reply states the wish instead of hinting at it")
        return spoken(reply)

    said = f"The agent asked: {text}\n" if text else "Tell it unasked.\n"
    part = game.aspect(aspect)
    wanted = f"{said}Your wish: for the {part.noun}, the traveller {wish(preference, part)}."
    if "wish" in preference:
        wanted += f" A way to let it be known: {preference['hint']}"
    return await asked(game.setting.user, _HINT, wanted, unstated, game.asks_seed)


async def small_talk(game: TravelGame, text: str) -> str:
    """A reply that tells no wish: the model does not know any."""
    question = f"The trip: {facts(game.task)}\nThe agent's message:\n{text}"
    return await asked(game.setting.user, _SMALL_TALK, question, spoken, game.asks_seed)


def _line(game: TravelGame, aspect: str, attribute: str) -> str:
    preference = game.preference(aspect, attribute)
    return f"for the {game.aspect(aspect).noun}, the traveller {wish(preference, game.aspect(aspect))}"


OFF_TARGET = 3
"""Questions in a row that hit nothing before the traveller tells a wish unasked."""
OUTAGE_EVERY = 5
"""Every so many searches the service does not answer, as services sometimes do not."""
PAID: Mapping[str, float] = {"best": 1.0, "correct": 0.8, "wrong": 0.0, "noise": 0.0}
_ID = re.compile(r"\b([A-Z])\d+\b", re.IGNORECASE)


@dataclass
class Part:
    """One part of the trip."""

    aspect: Aspect
    data: Json
    pending: dict[str, Json]
    """Preferences that have not been told, by attribute."""
    found: bool = False
    """Its options have been listed."""
    booked: str = ""
    """The sort of the option that was chosen."""

    @cached_property
    def sorts(self) -> Mapping[str, str]:
        """By the option's id."""
        return {row[0]: row[1] for row in self.data["options"]}

    @cached_property
    def options(self) -> Mapping[str, Option]:
        """Built when first needed: many episodes never look."""
        return {row[0]: Option.of(self.aspect, row) for row in self.data["options"]}

    def listing(self) -> str:
        """The options as the policy reads them: what is stated once, then a row each."""
        rows = [
            f"{one.id}: {one.place}, {one.date}, {one.price} EUR; " + "; ".join(one.values.values())
            for one in self.options.values()
        ]
        return "\n".join([f"id: place, day, price; {'; '.join(self.aspect.attributes)}", *rows])


class TravelGame(Game):
    """One traveller."""

    _ORDER: ClassVar[str] = "Search for one part of the trip at a time"

    def __init__(self, setting: Setting, task: Task, seed: int) -> None:
        super().__init__(setting, task, seed)
        self._parts = {one["aspect"]: self._part(one) for one in task.data["aspects"]}
        self._off_target = 0
        self._useless = 0
        self._searches = 0
        self._turns = 0

    def _part(self, one: Json) -> Part:
        return Part(catalog()[one["aspect"]], one, {held["attribute"]: held for held in one["preferences"]})

    async def search(self, content: str) -> Reply:
        """List the options of the one part that the query covers."""
        self._searches += 1
        if self._searches % OUTAGE_EVERY == 0:
            return Reply("The booking service does not respond at the moment. Please try again.")
        found = await self._covered(content)
        return Reply(found) if isinstance(found, str) else self._listed(found)

    async def _covered(self, content: str) -> Part | str:
        """The one part that the query covers, or what is said where it covers none."""
        parts = [self._parts[aspect.name] for aspect in named(content, [p.aspect for p in self._parts.values()])]
        covered = [part for part in parts if not missing(content, part.data["arguments"])]
        return covered[0] if len(covered) == 1 else self._refined(parts, content, len(covered))

    def _listed(self, part: Part) -> Reply:
        first, part.found = not part.found, True
        text = f"Options for the {part.aspect.noun}:\n{part.listing()}"
        return Reply(text, float(self.setting.options["search_reward"]) if first else 0.0)

    async def action(self, content: str) -> Reply:
        """Answer the agent; a question about a wish that is still untold is paid while the traveller is patient."""
        self._turns += 1
        asked = await self._asked(content)
        if asked.kind == "chat":
            return Reply(await small_talk(self, content) if self._llm else self.rng.choice(CHAT))
        if asked.kind == "hit":
            told = await self._told(asked.aspect, asked.attribute, content)
            return Reply(told, 0.0 if self.impatient else float(self.setting.options["preference_reward"]))
        return Reply(await self._beside_the_point(asked))

    async def answer(self, content: str) -> Reply:
        """Book options for good: 1 for the best of a part, 0.8 for another that fits, 0 for any other."""
        ids = [match.group().upper() for match in _ID.finditer(content)]
        if (fault := self._fault(ids)) is not None:
            return Reply(fault, error=True)
        booked = [self._book(one) for one in ids]
        over = all(part.booked for part in self._parts.values())
        self.solved = all(part.booked == "best" for part in self._parts.values())
        text = " ".join(BOOKED[sort].format(id=one) for one, sort in zip(ids, booked, strict=True))
        return Reply(text, sum(PAID[sort] for sort in booked), over=over)

    @property
    def impatient(self) -> bool:
        """Whether so many questions led nowhere that none is paid any more: asking for everything is no asking."""
        most = self.setting.whole("max_useless")
        return 0 < most <= self._useless

    def details(self) -> Json:
        """What was booked, which wishes were never told, and how many questions led nowhere."""
        return {
            "booked": {name: part.booked for name, part in self._parts.items()},
            "untold": sum(len(part.pending) for part in self._parts.values()),
            "useless": self._useless,
        }

    @property
    def asks_seed(self) -> int:
        """A seed for each turn's requests."""
        return self.seed + 101 * self._turns

    @property
    def _llm(self) -> bool:
        return self.setting.oracle == "llm"

    def preference(self, aspect: str, attribute: str) -> Json:
        """A held preference; KeyError if there is none."""
        held = self._parts[aspect].data["preferences"]
        return {one["attribute"]: one for one in held}[attribute]

    def aspect(self, name: str) -> Aspect:
        """A part of the trip by name."""
        return self._parts[name].aspect

    async def _asked(self, content: str) -> Asked:
        """What the agent asks, about the parts that are not booked yet."""
        open_parts = [part for part in self._parts.values() if not part.booked]
        pending = {part.aspect.name: tuple(part.pending) for part in open_parts}
        if self._llm:
            return Asked("vague") if is_list(content) else await classified(self, content, pending)
        held = {part.aspect.name: [one["attribute"] for one in part.data["preferences"]] for part in open_parts}
        told = {name: [one for one in those if one not in pending[name]] for name, those in held.items()}
        return classify(content, pending, told)

    async def _told(self, aspect: str, attribute: str, content: str) -> str:
        """Tell a wish, so that it is no longer pending."""
        part = self._parts[aspect]
        preference = part.pending[attribute]
        told = await hinted(self, preference, aspect, content) if self._llm else hint(preference, part.aspect)
        del part.pending[attribute]
        self._off_target = 0
        if not part.pending:
            told += " " + COMPLETE.format(noun=part.aspect.noun)
        return told

    async def _beside_the_point(self, asked: Asked) -> str:
        """A question that hits nothing; after some in a row the traveller tells a wish unasked."""
        self._off_target += 1
        self._useless += 1
        text = self.rng.choice(VAGUE if asked.kind == "vague" else MISS)
        if asked.kind == "miss" and (known := self._known(asked)) is not None:
            text = self.rng.choice(AGAIN).format(hint=known)
        if self._useless == self.setting.whole("max_useless"):
            text += f" {IMPATIENT}"
        untold = [(p.aspect, one) for p in self._parts.values() if not p.booked for one in p.pending]
        if self._off_target < OFF_TARGET or not untold:
            return text
        aspect, attribute = self.rng.choice(untold)
        told = await self._told(aspect.name, attribute, "")
        return f"{text} {self.rng.choice(VOLUNTEERED).format(noun=aspect.noun, hint=told)}"

    def _known(self, asked: Asked) -> str | None:
        """The hint about a wish that has been told before."""
        try:
            return hint(self.preference(asked.aspect, asked.attribute), self._parts[asked.aspect].aspect)
        except KeyError:
            return None

    def _refined(self, parts: list[Part], content: str, covered: int) -> str:
        if covered or not parts:
            return f"{self._ORDER}: {', '.join(part.aspect.noun for part in self._parts.values())}."
        part = min(parts, key=lambda one: len(missing(content, one.data["arguments"])))
        lacking = ", ".join(missing(content, part.data["arguments"]))
        return f"Nothing fits yet. To search for a {part.aspect.noun}, say also: {lacking}."

    def _fault(self, ids: list[str]) -> str | None:
        """Why these options cannot be booked."""
        if not ids:
            return "name the ids of the options, such as F3 or H2"
        by_letter = {part.aspect.letter: part for part in self._parts.values()}
        for one in ids:
            part = by_letter.get(one[0])
            if part is None or (part.found and one not in part.sorts):
                return f"there is no option {one}"
            if not part.found:
                return f"you have not searched for the {part.aspect.noun} yet"
            if part.booked:
                return f"the {part.aspect.noun} is booked already"
        return "only one option for each part of the trip" if len({one[0] for one in ids}) < len(ids) else None

    def _book(self, chosen: str) -> str:
        part = next(part for part in self._parts.values() if part.aspect.letter == chosen[0])
        part.booked = part.sorts[chosen]
        part.pending.clear()
        return part.booked
