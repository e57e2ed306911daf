"""What an agent said and did on the way, judged step by step: was it true, and was it allowed at that moment?

The verdict on an end state cannot see that a refund was invented or a name never asked for. So a conversation is gone
through once more on a fresh copy of the state: each call is made again, and each text to the user is held against what
is so at that moment (:mod:`environments.kit.language.claims`). A domain says what has to come before what
(:class:`Rules`)::

    writes:                          # tool -> what must have happened before it
      cancel_order:
        - call: check_owner          # a successful call of this tool,
          same: [order]              #   with the same values of these arguments,
          heard: [name]              #   and values of these that the user had said by then
        - call: get_order
          same: [order]
        - any: [{...}, {...}]        # one of these
        - yes: [order]               # the user's last words agree, to a message that names these arguments
          says: "cancel|call off"    #   and says this

and a task what must have been looked up before the last word is spoken (``demands``, the same form with ``arguments``
instead of ``same``), so that a refusal without looking earns nothing. Where nobody speaks (gold moves, replayed),
whatever is given counts as heard and as agreed to.

A domain that wants something else besides brings its own :class:`Rules`: demands of other forms (with a ``name`` to
report them by), and what has to come before something is told. The tools of a user have rules too, where it gives any.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from environments.kit.language.claims import Claim, ClaimReader, Moment, Review
from environments.kit.language.text import sentences
from mua.environment.protocol import ToolResult, Transcript
from mua.types import Json

Statement: TypeAlias = Sequence[str | Sequence[str]]
"""A fact that a user has to be told, as groups of alternatives: all groups must occur in one and the same message, of
each group any alternative. ``["327.50"]`` is a statement of one group; ``["#W123", ["cannot", "unable"]]`` asks for the
order and a refusal together. Comparison is tau-bench's: lower case, commas removed, substrings."""

_YES = re.compile(
    r"\b(?:yes|yeah|yep|yup|sure|okay|correct"
    r"|right(?! (?:after|before|at|now|away|here|there|in|on)\b)|absolutely|definitely|certainly|of course"
    r"|please do|please proceed"
    r"|go ahead|go on|carry on|do (?:it|that)|proceed|(?:sounds|looks) (?:good|great|fine|right)|that works"
    r"|that is (?:right|fine|correct|good|okay|what i want)|(?:i )?(?:agree|confirm|accept|approve)"
    r"|(?:i am )?(?:fine|happy|okay) with (?:that|it)|by all means|perfect|exactly|fine|great|affirmative|indeed"
    r"|works for me|make it so)\b"
)
_BUT = re.compile(
    r"\b(?:no|nope|not|never|wait|stop|hold on|instead|rather than|but|hang on|unless|before (?:that|you)|correction)\b"
)
_TAKEN_BACK = re.compile(
    r"\b(?:wait|stop|hold on|hang on|slow down|changed my mind|cancel that|scratch that|not yet|not so fast"
    r"|do not (?:do|go|proceed)"
    r"|(?:that|it|this) (?:is|was) (?:wrong|not right)|i (?:am not sure|hesitate)|one more thing first)\b"
    r"|^(?:oh |well |sorry |,|\s)*(?:no|nope)\b"
)
_FINE = re.compile(
    r"\b(?:no (?:problem|worries|objections?|need|thanks|hurry|rush)|do not worry|why not|if not|not at all|actually)\b"
)


@dataclass(frozen=True, slots=True)
class Said:
    """The agent's words to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Heard:
    """The user's words."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A tool call, by the agent or by the user."""

    name: str
    arguments: Any
    by_user: bool = False


Event: TypeAlias = Said | Heard | Called


def events(transcript: Transcript) -> Iterator[Event]:
    """What happened, in order. Calls that could not be read are left out; those that were refused are refused again."""
    for message in transcript.messages:
        for action in message.get("actions") or ():
            yield Called(action["name"], action["arguments"], by_user=True)
        if message["role"] == "user" and message["content"]:
            yield Heard(message["content"])
        elif message["role"] == "assistant":
            for call in message.get("tool_calls") or ():
                name, given = call["function"]["name"], call["function"]["arguments"]
                yield Called(name, json.loads(given) if isinstance(given, str) else given)
            if not any(message.get(key) for key in ("tool_calls", "tool_call_errors", "truncated")):
                yield Said(message["content"] or "")


class Replay(Protocol):
    """A fresh copy of an episode's state on which it is gone through again."""

    def call(self, called: Called) -> ToolResult:
        """Make a call once more."""

    def moment(self, past: Past) -> Moment:
        """What is so now."""


@dataclass(slots=True)
class Past:
    """What has happened so far."""

    calls: list[Called] = field(default_factory=list)
    """Those that succeeded."""
    answers: list[str] = field(default_factory=list)
    """What each of them answered."""
    heard: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def has_heard(self, value: object) -> bool:
        """Whether the user has said this value, as a whole word and in any case; where nobody speaks, yes."""
        return not self.heard or _holds(" ".join(self.heard), value)

    def agreed(self, named: Sequence[object], says: str = "") -> bool:
        """Whether the user's last words agree to a message that names these values; where nobody speaks, yes."""
        if not self.heard:
            return True
        if not self.said or not agrees(self.heard[-1]):
            return False
        proposed = self.said[-1]
        return all(_holds(proposed, value) for value in named) and re.search(says, proposed, re.IGNORECASE) is not None


@dataclass(frozen=True, slots=True)
class Rules:
    """What has to come before what."""

    writes: Mapping[str, Sequence[Json]]
    """Tool, of the agent or the user, that changes something -> what must have happened before."""

    def unmet(self, called: Called, past: Past) -> list[str]:
        """What should have come before a call and did not."""
        return [
            f"{called.name} before {_named(demand)}"
            for demand in self.writes.get(called.name, ())
            if not self.met(demand, past, called.arguments)
        ]

    def met(self, demand: Json, past: Past, arguments: Json) -> bool:
        """Whether what ``demand`` wants has happened; ``arguments`` are those of the call that it comes before."""
        if "any" in demand:
            return any(self.met(one, past, arguments) for one in demand["any"])
        if "yes" in demand:
            return past.agreed([arguments.get(key) for key in demand["yes"]], demand.get("says", ""))
        wanted = {**{key: arguments.get(key) for key in demand.get("same", ())}, **demand.get("arguments", {})}
        return any(
            call.name == demand["call"]
            and all(call.arguments.get(key) == value for key, value in wanted.items())
            and all(past.has_heard(call.arguments.get(key)) for key in demand.get("heard", ()))
            for call in past.calls
        )

    def unfounded(self, review: Review, past: Past) -> list[str]:
        """What was told before it might be, of the claims of one message; nothing unless a domain says so."""
        return []


@dataclass(frozen=True, slots=True)
class Conduct:
    """How an agent got where it got."""

    claims: Review = field(default_factory=Review)
    unmet: tuple[str, ...] = ()
    """What was done or said before what had to come first."""

    @property
    def sound(self) -> bool:
        """Whether nothing untrue was said and everything came in its order."""
        return not self.claims.false and not self.unmet

    def details(self) -> Json:
        """For the verdict's details."""
        return {
            "untrue": [str(claim) for claim in self.claims.false],
            "unmet": list(self.unmet),
            "claims_true": len(self.claims.true),
            "claims_unread": len(self.claims.unread),
        }


def conduct(
    transcript: Transcript, replay: Replay, claims: ClaimReader, rules: Rules, demands: Sequence[Json] = ()
) -> Conduct:
    """Go through a conversation again; ``demands`` are the task's."""
    past, reviews, unmet = Past(), Review(), list[str]()
    last_met = [f"nothing was said after {_named(demand)}" for demand in demands]
    for event in events(transcript):
        if isinstance(event, Heard):
            past.heard.append(event.text)
        elif isinstance(event, Said):
            review = claims.review(event.text, replay.moment(past))
            unmet += rules.unfounded(review, past)
            reviews |= review
            past.said.append(event.text)
            last_met = [f"an answer before {_named(demand)}" for demand in demands if not rules.met(demand, past, {})]
        elif not (answer := replay.call(event)).error:
            unmet += rules.unmet(event, past)
            past.calls.append(event)
            past.answers.append(answer.text)
    return Conduct(reviews, tuple(unmet + last_met))


def untold(facts: Sequence[Json], told: Sequence[Claim]) -> list[str]:
    """The required facts that no true statement told.

    A fact has ``thing`` (or one of ``things`` too), ``role`` and ``value`` (or one of ``or`` too); one with ``denied``
    is told by denying the value; ``any`` holds facts of which one is enough.
    """
    said = {(claim.thing, claim.role, claim.value, claim.denied) for claim in told}
    return [_fact_line(fact) for fact in facts if not _told(fact, said)]


def _told(fact: Json, said: Set[tuple[str, str, str, bool]]) -> bool:
    if "any" in fact:
        return any(_told(one, said) for one in fact["any"])
    things, values = [fact["thing"], *fact.get("things", ())], [fact["value"], *fact.get("or", ())]
    denied = fact.get("denied", False)
    return any((thing, fact["role"], value, denied) in said for thing in things for value in values)


def _fact_line(fact: Json) -> str:
    if "any" in fact:
        return " or ".join(map(_fact_line, fact["any"]))
    return f"{fact['thing']}: {fact['role']} {'not ' if fact.get('denied') else ''}{fact['value']}"


def _named(demand: Json) -> str:
    if "name" in demand:
        return str(demand["name"])
    if "any" in demand:
        return " or ".join(map(_named, demand["any"]))
    if "yes" in demand:
        return f"a yes to a message that names {', '.join(demand['yes']) or 'it'}"
    arguments = ", ".join(f"{key}={value}" for key, value in demand.get("arguments", {}).items())
    return f"{demand['call']}({arguments})"


def _holds(text: str, value: object) -> bool:
    wanted = re.escape(str(value).lower().lstrip("#"))
    return re.search(rf"(?<!\w){wanted}(?!\w)", text.lower()) is not None


def agrees(text: str) -> bool:
    """Whether somebody agrees: "Yes, please." does, "Yes, but wait" and "Not yet" do not.

    A sentence of ``text`` says yes and takes nothing of it back, and no other one does."""
    said = [_FINE.sub(" ", sentence.text) for sentence in sentences(text)]
    if any(_TAKEN_BACK.search(sentence) for sentence in said):
        return False
    return any(_YES.search(sentence) and not _BUT.search(sentence) for sentence in said)


def unsaid(statements: Sequence[Statement], told: Sequence[str]) -> list[Statement]:
    """The statements that occur in no message of ``told``."""

    def plain(text: str) -> str:
        return text.lower().replace(",", "").replace("’", "'")

    def says(message: str, statement: Statement) -> bool:
        groups = ([group] if isinstance(group, str) else group for group in statement)
        return all(any(plain(alternative) in message for alternative in group) for group in groups)

    messages = [plain(text) for text in told]
    return [statement for statement in statements if not any(says(message, statement) for message in messages)]
