"""A rule-based user that domains fill in: wishes, facts told when asked, traits of a person, a grammar to speak with.

It understands ordinary English by :mod:`environments.kit.language.acts`. ::

    the agent                                the user
    asks for facts                           tells them, as many as its persona tells at once, rightly or not
    proposes something, wants a yes          changes its mind if the wish says so or it wavers; else agrees (also where
                                             that asks again for facts that it has told)
    has done it, refuses, tells, transfers   states the next wish, insists once if it is stubborn, or ends
    asks whether there is anything else      no, or what is still open
    greets, thanks, wants a moment           waits
    says what cannot be understood           "Sorry, what do you mean?"

Whatever brings it no further costs patience, and without patience it gives up.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from environments.kit.language.acts import Acts, Reader
from environments.kit.language.patterns import load
from environments.kit.language.voice import Grammar, Voice, load_grammar
from mua.environment.user import STOP_SIGNAL, UserReply
from mua.users.personas import PERSONAS, Persona

PLAIN_WISH = "wish"
"""The verb of the only wish of :meth:`ScriptedUser.simple`."""
PLAIN_DEEDS = (
    "do book reserve cancel order return exchange change update send refund add remove set create delete move buy sell "
    "deliver pay open close start stop complete process arrange register confirm fix repair print assign file schedule"
)
"""Verbs that carry it out."""
BRIEF = PERSONAS["brief"]


@dataclass(frozen=True, slots=True)
class Fact:
    """Something the user can be asked for."""

    value: str
    """In the user's words; empty: it knows that it does not know."""
    rule: str = ""
    """The grammar's rule that tells it, with ``{value}``; ``tell_<fact>`` if empty."""
    wrong: str = ""
    """What a careless person says at first; empty: it does not err here."""


@dataclass(frozen=True, slots=True)
class Wish:
    """One thing the user wants; several are stated one after the other."""

    verb: str
    """The kind of wish: ``want_<verb>`` opens it, and the agent's words are read against it."""
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """Facts of this wish, in addition to the user's own."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Values for the opening's slots."""
    change_of_mind: str = ""
    """Said instead of the first agreement: a rule of the grammar (with ``values``), or the words themselves;
    ``facts`` are those after it."""
    before: Mapping[str, Fact] = field(default_factory=dict)
    """Facts that the change of mind alters, as they are before it."""
    goes_on: Sequence[str] = ()
    """Acts that do not settle it (``refuses``, where another way is accepted after a refusal)."""
    gives_way: str = ""
    """The grammar's rule that accepts another way, said once after a refusal that does not settle it."""


@dataclass(frozen=True, slots=True)
class Part:
    """What the user of a task plays, whoever plays it."""

    wishes: Sequence[Wish]
    facts: Mapping[str, Fact]
    """What it knows whatever the wish is."""

    def known(self) -> dict[str, list[str]]:
        """Every value by its fact: as it is, as it is before a change of mind, as a careless person tells it first."""
        tables = [self.facts, *(table for wish in self.wishes for table in (wish.facts, wish.before, wish.values))]
        values: dict[str, dict[str, None]] = {}
        for name, told in (item for table in tables for item in table.items()):
            for value in filter(None, (told.value, told.wrong) if isinstance(told, Fact) else (told,)):
                values.setdefault(name, {})[value] = None
        return {name: list(texts) for name, texts in values.items()}

    def wanted(self) -> list[dict[str, list[str]]]:
        """A mapping for each wish: its verb in words, and the values that tell it."""
        return [{"verb": [wish.verb.replace("_", " ")], **_texts(wish)} for wish in self.wishes]


def _texts(wish: Wish) -> dict[str, list[str]]:
    """What the wish is about: mistakes are no part of it."""
    facts = [*wish.facts.items(), *wish.before.items()]
    named = [*((name, fact.value) for name, fact in facts), *wish.values.items()]
    return {name: [text for key, text in named if key == name and text] for name, text in named if text}


class ScriptedUser:
    """Plays one task's user. Implements :class:`mua.environment.user.User`; never raises."""

    def __init__(
        self,
        seed: str,
        split: str,
        reader: Reader,
        grammar: Grammar,
        persona: Persona,
        wishes: Sequence[Wish],
        facts: Mapping[str, Fact],
    ) -> None:
        """``seed`` is any text, such as ``f"{task.id}/{seed}"``; ``facts`` hold during all wishes."""
        self._rng = random.Random(seed)
        self._voice = Voice(grammar, "brief" if persona.brief else split, self._rng)
        self._reader = reader
        self._persona = persona
        self._wishes = list(wishes)
        self._facts = dict(facts)
        self._patience = persona.patience
        self._told: list[str] = []
        self._put_off: set[str] = set()
        self._wrong: dict[str, Fact] = {}
        self._changed = self._wavered = self._insisted = self._gave_way = False

    @classmethod
    def simple(
        cls, seed: str, openings: Sequence[str], facts: Mapping[str, Sequence[str]] | None = None
    ) -> ScriptedUser:
        """Somebody with one wish, for a domain without words and a grammar of its own.

        ``openings``: wordings of the wish; ``facts``: wordings of each fact, which is asked for by its own name
        (``order_number``: "order number", "number"). Both in the notation of :mod:`environments.kit.language.voice`.
        """
        facts = facts or {}
        rules = {f"tell_{fact}": wordings for fact, wordings in facts.items()} | {f"want_{PLAIN_WISH}": openings}
        known = {fact: Fact("known") for fact in facts}
        return cls(seed, "train", _plain_reader(tuple(facts)), small_talk(rules), BRIEF, [Wish(PLAIN_WISH)], known)

    async def open(self) -> UserReply:
        return UserReply(self._opening(first=True))

    async def reply(self, agent_text: str) -> UserReply:
        acts, wish = self._reader.read(agent_text, self._wish.verb), self._wish
        if acts.transfers:
            return self._stop("thanks")
        asked = [fact for fact in self._known(wish) if fact in acts.asks]
        if asked and not (acts.proposes and set(asked) <= set(self._told)):
            return UserReply(self._answer(asked))
        if self._wrong:
            fact, known = self._wrong.popitem()
            mistake = self._voice.say("mistake")
            right = self._voice.say(known.rule or f"tell_{fact}", value=known.value)
            return UserReply(self._utter(mistake, right))
        if acts.proposes:
            return UserReply(self._agree(wish))
        if acts.refuses and wish.gives_way and not self._gave_way:
            self._gave_way = True
            return UserReply(self._utter(self._voice.say(wish.gives_way)))
        settled = {"done": acts.done, "refuses": acts.refuses, "informs": acts.informs}
        if any(so and act not in wish.goes_on for act, so in settled.items()):
            return self._after(acts)
        return self._no_further(acts)

    async def close(self) -> None:
        return None

    @property
    def _wish(self) -> Wish:
        return self._wishes[0]

    def _known(self, wish: Wish) -> dict[str, Fact]:
        return {**self._facts, **wish.facts, **({} if self._changed else wish.before)}

    # What it says.

    def _opening(self, *, first: bool) -> str:
        wish = self._wish
        parts = [self._voice.say("greeting")] if first and not self._persona.brief and self._rng.random() < 0.7 else []
        parts.append(self._voice.say(f"want_{wish.verb}", **wish.values))
        if first and self._persona.volunteers:
            parts += [self._tell(fact) for fact in self._known(wish) if self._known(wish)[fact].value]
        return self._utter(*parts)

    def _answer(self, asked: Sequence[str]) -> str:
        later = [fact for fact in asked if self._forgets(fact)]
        now = [fact for fact in asked if fact not in later][: self._persona.tells]
        return self._utter(*(self._voice.say("put_off") for _ in later[:1]), *map(self._tell, now))

    def _tell(self, fact: str) -> str:
        known = self._known(self._wish)[fact]
        if not known.value:
            return self._voice.say("unknown")
        value = known.value
        if known.wrong and fact not in self._told and self._rng.random() < self._persona.errs:
            self._wrong[fact] = known
            value = known.wrong
        else:
            self._wrong.pop(fact, None)
        self._told.append(fact)
        return self._voice.say(known.rule or f"tell_{fact}", value=value)

    def _agree(self, wish: Wish) -> str:
        if wish.change_of_mind and not self._changed:
            self._changed = True
            named = wish.change_of_mind in self._voice
            return self._voice.say(wish.change_of_mind, **wish.values) if named else wish.change_of_mind
        if self._persona.wavers and not self._wavered:
            self._wavered = True
            return self._utter(self._voice.say("waver"))
        return self._utter(self._voice.say("agree"))

    def _utter(self, *sentences: str) -> str:
        whole, part = divmod(self._persona.talks, 1)
        asides = [self._voice.say("aside") for _ in range(int(whole) + (self._rng.random() < part))]
        return " ".join([*sentences, *asides])

    # What becomes of a wish.

    def _forgets(self, fact: str) -> bool:
        if fact in self._put_off or fact in self._told or self._rng.random() >= self._persona.forgets:
            return False
        self._put_off.add(fact)
        return True

    def _after(self, acts: Acts) -> UserReply:
        if acts.refuses and self._persona.insists and not self._insisted:
            self._insisted = True
            return UserReply(self._utter(self._voice.say("insist")))
        if len(self._wishes) == 1:
            return self._stop("thanks")
        self._wishes.pop(0)
        self._changed = self._wavered = self._gave_way = False
        self._told, self._put_off = [], set()
        return UserReply(self._opening(first=False))

    def _no_further(self, acts: Acts) -> UserReply:
        self._patience -= 1
        if self._patience < 0:
            return self._stop("give_up")
        if acts.waits:
            return UserReply(self._voice.say("wait"))
        if acts.asks:
            return UserReply(self._voice.say("unknown"))
        if acts.offers or acts.refuses or acts.done or acts.informs:
            return UserReply(self._opening(first=False))
        return UserReply(self._voice.say("what"))

    def _stop(self, rule: str) -> UserReply:
        return UserReply(f"{self._voice.say(rule)} {STOP_SIGNAL}", stop=True)


_WHO = ("who (are you|you are|am i|i am|is this|is it)",)


@lru_cache(maxsize=64)
def _plain_reader(facts: tuple[str, ...]) -> Reader:
    """Reads questions for facts by their names, and whether one of :data:`PLAIN_DEEDS` is done."""
    words = {fact: [fact.replace("_", " "), fact.rpartition("_")[2]] for fact in facts}
    named = {
        fact: {
            "named": [f"{re.escape(one)}s?" for one in ones],
            "kind": ones,
            "idioms": _WHO if ones[-1] == "name" else (),
        }
        for fact, ones in words.items()
    }
    return Reader({"facts": named, "deeds": {PLAIN_WISH: [f"<{verb}>" for verb in PLAIN_DEEDS.split()]}})


@lru_cache(maxsize=16)
def reader_of(folder: Path) -> Reader:
    """What the users of the domain in ``folder`` understand with, its ``words.yaml``; read once."""
    return Reader(load(folder / "words.yaml"))


@lru_cache(maxsize=16)
def grammar_of(folder: Path) -> Grammar:
    """What they speak with, its ``voice.yaml``: its rules come before those of the same name in the small talk."""
    own, shared = load_grammar(folder / "voice.yaml"), _talk()
    return {part: {**shared.get(part, {}), **(own.get(part) or {})} for part in ("always", "brief", "train", "test")}


def small_talk(rules: Mapping[str, Sequence[str]]) -> Grammar:
    """The small talk of people who are brief, and ``rules``."""
    return {"always": rules, "brief": _talk()["brief"]}


@lru_cache(maxsize=1)
def _talk() -> Grammar:
    return load_grammar(Path(__file__).with_name("talk.yaml"))
