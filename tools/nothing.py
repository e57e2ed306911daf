"""Conversations about nothing, which a tiny policy reads before it learns a domain: what a language model brings along.

Desks that exist nowhere, each wish with a procedure of its own, drawn once and kept: what is asked for, which tools
are called in which order and with what, on which answers it goes on or says sorry, what is told at the end. So
whoever reads them has to do what every pretrained model can: keep to the form of a conversation, copy a word or
number from where it was said to where it is needed, remember what was wanted in the beginning, and respect what a tool
answered. They speak of no shop: no rule, tool or sentence of a domain is in them. Their values are words that any
language model knows (names, cities, things) and numbers; among what is wanted and how things stand are words that a
shop uses too (to cancel, to return, pending, delivered), with procedures drawn at random like all others.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from environments.help_desk.database import CITIES, NAMES, PRODUCTS
from mua.types import Json

_WORDS = (*NAMES, *CITIES, *PRODUCTS)
_VERBS = (
    *("paint", "wash", "lift", "fold", "stack", "plant", "carve", "sort", "bake", "comb", "dig", "fry", "glue"),
    *("hang", "iron", "knit", "lend", "mend", "nail", "oil", "peel", "rinse", "sand", "tie", "weld", "wind"),
    *("cancel", "return", "find", "move", "change", "pay", "ship", "give"),
)
_NOUNS = ("stone", "color", "shape", "river", "tower", "garden", "engine", "mirror", "planet", "window")
STATES = (
    *("ready", "busy", "empty", "broken", "open", "heavy", "full", "new"),
    *("pending", "shipped", "delivered", "paid", "lost"),
)
_FLAGS = ("fragile", "rusty", "wet", "old")
_WISHES = (
    "I want to {0} my {1}.",
    "Please {0} a {1} for me.",
    "Can you {0} the {1}?",
    "I have a {1} that I want to {0}.",
)
_PHRASES = {
    "where": ("Where is my {1}?", "I want to know where my {1} is."),
    "when": ("When is my {1} here?", "I want to know when my {1} is here."),
    "back": ("Please take a {1} back.", "I want to have my {1} back."),
    "go": ("I want my {1} to go to another {2}.", "My {1} is to go to a new {2}."),
    "send": ("Please send my {1} to another {2}.", "I want you to send a {1}."),
    "order": ("I want to order a {1}.", "Please order my {1}."),
}
"""What can be wanted besides what one verb says, with words for it."""
_ASKS = ("What is the {0}?", "Which {0} is it?", "What is your {0}?")
_BOTH = ("What are your {0} and your {1}?", "Which {0} and {1}?")
_SAID = ("It is {0}.", "The {1} is {0}.", "{0}.", "To {0}.", "The {0}.", "{1} {0}.")
_GOES = ("Done, {0} {1} is in {2}.", "Done, {0} {1} goes to {2}.", "The {0} {1} is in {2}.", "Done, the {2}.")
_BYES = ("Thanks, bye.", "Okay, bye.", "All right.")


@dataclass(frozen=True, slots=True)
class _Procedure:
    """How one wish is served: places of facts (0 to 2), and what is done with them."""

    steps: tuple[str, ...]
    """``ask 0``, ``ask 0 1``, ``look``, ``match``, ``try``, ``act`` in their order."""
    good: frozenset[str]
    """States with which it goes on."""
    arguments: tuple[int, ...]
    shape: str
    """How the last argument of the act stands: ``plain``, ``list`` or ``object``."""
    end: str
    tells: bool
    """Whether it ends in what a tool answered."""


@cache
def _procedure(verb: str) -> _Procedure:
    rng = random.Random(f"nothing 3/{verb}")
    first = rng.choice(("ask 0", "ask 0 1", "ask 0 1"))
    inner = rng.sample(("look", "match"), rng.randint(1, 2))
    late = "ask 2" if rng.random() < 0.4 else ""
    inner.insert(rng.randint(0, len(inner)), late)
    if late and rng.random() < 0.5:
        inner.insert(inner.index(late) + 1, "try")
    tells = rng.random() < 0.4 and "look" in inner
    steps = (first, *(step for step in inner if step), *(() if tells else ("act",)))
    known = (0, *((1,) if first.endswith("1") else ()), *((2,) if late else ()))
    arguments = tuple(sorted({0, rng.choice(known[1:] or known)}))
    good = frozenset(rng.sample(STATES, 6))
    return _Procedure(
        steps, good, arguments, rng.choice(("plain", "plain", "list", "object")), rng.choice(_GOES), tells
    )


def conversations(count: int, seed: int) -> Iterator[list[Json]]:
    """``count`` conversations in OpenAI form; the same for the same arguments."""
    rng = random.Random(f"nothing/{seed}")
    for _ in range(count):
        yield _Talk(rng).messages()


class _Talk:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._verb = rng.choice((*_VERBS, *_PHRASES))
        self._nouns = rng.sample(_NOUNS, 3)
        self._values = [_value(rng) for _ in range(3)]
        self._spot = rng.choice(_WORDS)
        self._known: Json = {}
        self._messages: list[Json] = [{"role": "system", "content": "You are a desk."}]

    def messages(self) -> list[Json]:
        how, rng = _procedure(self._verb), self._rng
        wish = rng.choice(_PHRASES.get(self._verb, _WISHES)).format(self._verb, *self._nouns[:2])
        self._user(wish[0].upper() + wish[1:])
        for step in how.steps:
            if (refusal := self._step(step, how)) is not None:
                self._agent(refusal)
                break
        else:
            last = self._spot if how.tells else self._values[how.arguments[-1]]
            self._agent(how.end.format(self._nouns[0], self._values[0], last))
        self._user(rng.choice(_BYES))
        return self._messages

    def _step(self, step: str, how: _Procedure) -> str | None:
        """Plays a step; returns what the agent says where it cannot go on."""
        kind, *facts = step.split()
        if kind == "match":
            return self._match()
        if kind == "look":
            return self._look(how.good)
        if kind == "try":
            return self._try()
        if kind == "ask":
            self._ask([int(fact) for fact in facts])
        else:
            self._act(how)
        return None

    def _ask(self, facts: list[int]) -> None:
        rng, nouns = self._rng, [self._nouns[fact] for fact in facts]
        self._known |= {self._nouns[fact]: self._values[fact] for fact in facts}
        self._agent(rng.choice(_ASKS if len(facts) == 1 else _BOTH).format(*nouns))
        said = [rng.choice(_SAID).format(self._values[fact], self._nouns[fact]) for fact in facts]
        self._user(" ".join(text[0].upper() + text[1:] for text in said))

    def _match(self) -> str | None:
        so = self._rng.random() < 0.8
        self._call(f"match_{self._nouns[0]}", self._known, {"match": so})
        return None if so else f"Sorry, {self._nouns[0]} {self._values[0]} is no match."

    def _look(self, good: frozenset[str]) -> str | None:
        rng = self._rng
        bad = sorted(set(STATES) - good)
        state = rng.choice(sorted(good) if rng.random() < 0.7 else bad)
        found: Json = {"state": state, "spot": self._spot}
        found |= {"parts": [rng.choice(_WORDS) for _ in range(rng.randint(1, 3))]} if rng.random() < 0.5 else {}
        self._call(f"see_{self._nouns[0]}", {self._nouns[0]: self._values[0]}, found)
        return None if state in good else f"Sorry, {self._nouns[0]} {self._values[0]} is {state}."

    def _try(self) -> str | None:
        flag, so = self._rng.choice(_FLAGS), self._rng.random() < 0.3
        arguments = {self._nouns[0]: self._values[0], self._nouns[2]: self._values[2]}
        self._call(f"try_{self._nouns[2]}", arguments, {"weight": self._rng.randint(10, 99), flag: so})
        return f"Sorry, the {self._values[2]} is {flag}." if so else None

    def _act(self, how: _Procedure) -> None:
        arguments: Json = {self._nouns[fact]: self._values[fact] for fact in how.arguments}
        last = self._nouns[how.arguments[-1]]
        if len(arguments) > 1 and how.shape == "list":
            arguments[last] = [arguments[last]]
        elif len(arguments) > 1 and how.shape == "object":
            arguments[last] = {"at": arguments[last]}
        self._call(f"{self._verb}_{self._nouns[0]}", arguments, {"done": True})

    def _call(self, name: str, arguments: Json, answer: Json) -> None:
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"type": "function", "function": function}
        self._messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        self._messages.append({"role": "tool", "content": json.dumps(answer)})

    def _agent(self, text: str) -> None:
        self._messages.append({"role": "assistant", "content": text})

    def _user(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})


def _value(rng: random.Random) -> str:
    return str(rng.randint(1000, 9999)) if rng.random() < 0.4 else rng.choice(_WORDS)
