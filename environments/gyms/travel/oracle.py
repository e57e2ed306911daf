"""The traveller played by language models: a judge says what a question is about, a user model finds the words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from environments.gyms._shared import Setting
from environments.gyms._shared.oracles import asked, labelled, spoken
from environments.gyms.travel.asking import Asked, Kind
from environments.gyms.travel.catalog import Aspect
from environments.gyms.travel.wording import facts, wish
from mua.environment.protocol import Task
from mua.types import Json

_KINDS: Mapping[str, Kind] = {"chat": "chat", "miss": "miss", "vague": "vague"}
_JUDGE = """A booking agent writes to a traveller who has some wishes in mind:
{wishes}

What is the agent's message?
- chat: it asks for nothing, or is small talk, thanks or a report.
- wish and a number: it asks a concrete question about one of the wishes above and about nothing else, so that
  answering it truly would tell that wish.
- miss: it asks a concrete question, but none of the wishes answers it, or it also asks about something else.
- vague: it asks for wishes in general, or for more than two things at once."""
_SEARCH = """A booking agent searches a list of options. The parts of the trip, and the facts that a search for
each has to state:
{parts}

Which part does the query search for? Name it when the query is about that part alone and states every one of its facts
rightly, in whatever form. Otherwise, and where a fact is missing or wrong, it is {none}."""
_NO_PART = "none"
_HINT = """You are a traveller who talks with a booking agent. Let the agent know one wish of yours without stating it:
tell in one sentence a habit, a reason or a circumstance from which it follows. Do not use the words of the wish, do not
mention any other wish, and write nothing but the sentence."""
_CHAT = """You are a traveller who talks with a booking agent. Answer the agent's message kindly in one short sentence.
Tell nothing but the facts of the trip, and no wish of any kind."""


class Traveller(Protocol):
    """What is used of a game."""

    setting: Setting
    task: Task

    @property
    def asks_seed(self) -> int: ...
    def aspect(self, name: str) -> Aspect: ...
    def preference(self, aspect: str, attribute: str) -> Json: ...


async def classified(game: Traveller, text: str, pending: Mapping[str, Sequence[str]]) -> Asked:
    """The judge's reading of the agent's ``text``; see :func:`environments.gyms.travel.asking.classify`."""
    wishes = {
        f"wish {number}": (aspect, attribute)
        for number, (aspect, attribute) in enumerate(
            ((aspect, attribute) for aspect, attributes in pending.items() for attribute in attributes), 1
        )
    }
    lines = [f"- {number}: {_line(game, *one)}" for number, one in wishes.items()]
    question = _JUDGE.format(wishes="\n".join(lines) or "(none that is still untold)")
    labels = ["chat", "miss", "vague", *wishes]
    label = await labelled(game.setting.judge, question, labels, {"the agent's message": text}, game.asks_seed)
    return Asked("hit", *wishes[label]) if label in wishes else Asked(_KINDS[label])


async def searched(game: Traveller, text: str, facts: Mapping[str, str]) -> str | None:
    """The part of the trip that the query ``text`` covers; ``facts`` are those of each part."""
    question = _SEARCH.format(parts="\n".join(f"- {name}: {told}" for name, told in facts.items()), none=_NO_PART)
    labels = [*facts, _NO_PART]
    said = await labelled(game.setting.judge, question, labels, {"the query": text}, game.asks_seed)
    return None if said == _NO_PART else said


async def hinted(game: Traveller, preference: Json, aspect: str, text: str) -> str:
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


async def small_talk(game: Traveller, text: str) -> str:
    """A reply that tells no wish: the model does not know any."""
    question = f"The trip: {facts(game.task)}\nThe agent's message:\n{text}"
    return await asked(game.setting.user, _CHAT, question, spoken, game.asks_seed)


def _line(game: Traveller, aspect: str, attribute: str) -> str:
    preference = game.preference(aspect, attribute)
    return f"for the {game.aspect(aspect).noun}, the traveller {wish(preference, game.aspect(aspect))}"
