"""Whether what a language model says as a user agrees with its task: facts, wishes, and when it ends.

::

    persona, task's facts, domain's known() ──► Vocabulary.of(task) ──► Knowledge ◄── heard(): the agent, own tools
                                                                            │
    reply ──► values that people state (ids, emails, amounts, dates, names) ├─ not known, never heard ─► invents_facts
          ──► what it asks to have done                                     ├─ of another sort ────────► changes_wish
          ──► the end                                                       └─ a wish is still open ───► ends_too_early

It is made for precision: only values of a clear form are looked at, a person may repeat whatever it was told, and small
numbers, weekdays and what can be read in two ways count for nothing. What it misses is measured in
docs/benchmarks/user_check.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mua.environment.domain import Domain, HasUserFacts
from mua.environment.protocol import Split, Task
from mua.environment.user import STOP_SIGNAL
from mua.types import Json
from mua.utils.errors import Refusal, UserFaultKind

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
MOST_PERSONAS = 1500
"""Tasks of a domain whose personas are read for its names."""
MOST_LOOKED_AT = 4000
"""Characters at the end of what the agent says that are searched for questions and results: what it takes grows with
their square."""
_NOT_THE_USERS = frozenset(
    {
        "world", "initial", "initial_state", "actions", "gold", "expected", "statements", "false_statements",
        "forbidden", "assertions", "nl_assertions", "communicate_info", "reward_basis", "basis", "settled",
        "difficulty", "id", "kind",
    }
)  # fmt: skip
"""Keys of a task's data that hold what the user cannot know: the state of the world, and what is right."""
_SENTENCE = re.compile(r"[^.!?\n;]+")
_ENDS = re.compile(r"(?<=[.!?])\s+|\n+")
_TOKEN = re.compile(r"[A-Za-z][A-Za-z'’-]*")
_OWN_NAME = re.compile(
    r"\bmy (?:first |last |full |sur)?name(?: is|'s|:)\s+([A-Za-z'-]+)(?:\s+([A-Za-z'-]+))?", re.IGNORECASE
)
_NAMED = re.compile(r"\b(?:[Nn]ame is|called|named|[Ss]urname is)\s+([A-Z][A-Za-z'-]+)(?:\s+([A-Z][A-Za-z'-]+))?")
_QUOTED = re.compile(r"\"[^\"\n]*\"")
_SHORT_ANSWER = 3
"""Words of a sentence that may be nothing but a name."""
_BEFORE = 60
"""Characters before a name that say what it is to the user."""
_ANSWERS = frozenset({"amount", "date", "time"})


class Vocabulary:
    """The names that a domain's tasks deal with: people, places, things. Read from the personas, once a domain."""

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        words: set[str] = set()
        phrases: set[str] = set()
        tasks = islice((task for split in SPLITS for task in domain.tasks(split)), MOST_PERSONAS)
        personas = (_QUOTED.sub(" ", domain.persona(task)) for task in tasks)
        for sentence in (found for persona in personas for found in _SENTENCE.findall(persona)):
            for run in re.findall(r"(?<=[^\s]\s)[A-Z][\w'-]+(?: [A-Z][\w'-]+)*", sentence):
                parts = [plain_word(part) for part in run.split()]
                if len(parts) > 1:
                    phrases.add(" ".join(parts))
                words |= {part for part in parts if part.isalpha() and len(part) > 2}
        self._words, self._phrases = frozenset(words), frozenset(phrases)

    def names(self) -> frozenset[str]:
        """All of them, lower case: single words where no name has several."""
        return self._phrases or self._words

    def of(self, task: Task) -> TaskCheck:
        """The check of one user of ``task``."""
        persona = self._domain.persona(task)
        if not isinstance(self._domain, HasUserFacts):
            return TaskCheck(persona, {"task": list(_texts(task.data))}, (), self._words, self._phrases)
        values = self._domain.known(task)
        stated = [text for texts in values.values() for text in texts]
        return TaskCheck(persona, values, self._domain.wishes(task), self._words, self._phrases, stated)


class TaskCheck:
    """Follows one conversation and says of each reply whether it fits the task."""

    def __init__(
        self,
        persona: str,
        values: Mapping[str, Sequence[str]] = {},
        wishes: Sequence[Mapping[str, Sequence[str]]] = (),
        words: frozenset[str] = frozenset(),
        phrases: frozenset[str] = frozenset(),
        stated: Sequence[str] = (),
    ) -> None:
        """``words`` and ``phrases`` are names that the domain deals with; ``stated`` are texts that the user is asked
        for, so that to copy them is no leak (:class:`mua.users.utterance_check.LeakCheck`); the others as
        :class:`HasUserFacts` gives.
        """
        self.stated = tuple(stated)
        wants = [[text for kind, texts in wish.items() if kind != "shown" for text in texts] for wish in wishes]
        listed = [text for texts in wants for text in texts]
        self._shown = [text.casefold() for wish in wishes for text in wish.get("shown", ())]
        self._knowledge = Knowledge([persona, *listed], values)
        task = " ".join([persona, *listed])
        self._sorts = allowed_by(task)
        self._wanted = allowed_by(" ".join([*listed, *_wanting(persona)]))
        self._may_keep = wording("keeps").search(task) is not None
        self._given_up = _given_up(persona, self._wanted)
        self._open = [_marks(*texts) for texts in wants]
        self._open = self._open or [_marks(sentence) for sentence in _wanting(persona)]
        self._words, self._phrases = words, phrases
        self._agent = ""
        self._settled = False
        self._seen = ""
        self._talk = ""

    def heard(self, text: str) -> None:
        """What the agent said."""
        self._knowledge.add(text)
        self._seen = ""
        self._talk += f"\n{text.casefold()}"
        text = text[-MOST_LOOKED_AT:]
        self._sorts |= allowed_by(text)
        self._wanted |= allowed_by(text)
        self._agent = text
        parts = _parted(text)
        told = " ".join(part for part in parts if not part.endswith("?"))
        states = told and told == " ".join(parts) and not wording("stalls").search(told)
        closes = any(part.endswith("?") and wording("closing").search(part) for part in parts)
        answers = any(value.kind in _ANSWERS for value in values_in(told))
        self._settled |= bool(states or closes or answers or wording("settled").search(told))

    def saw(self, text: str) -> None:
        """What a tool of the user's own answered: it may be told, and settles nothing."""
        self._knowledge.add(text)
        self._seen += f"\n{text.casefold()}"
        self._talk += f"\n{text.casefold()}"

    def find(self, text: str, *, acted: bool = False) -> Refusal | None:
        """Why ``text`` does not fit; ``acted``: the user has just used tools of its own."""
        said = text.replace(STOP_SIGNAL, " ")
        if unknown := self.invented(said):
            return Refusal(UserFaultKind.INVENTS_FACTS, f"the user invents {unknown.kind} {unknown.said!r}")
        if other := self.changed(said):
            return Refusal(UserFaultKind.CHANGES_WISH, f"the user changes its wish ({other})")
        if STOP_SIGNAL in text and (why := self.unfinished(said, acted)):
            return Refusal(UserFaultKind.ENDS_TOO_EARLY, f"the user ends the conversation though {why}")
        return None

    def said(self, text: str) -> None:
        """``text`` is what the user said in the end."""
        self._talk += f"\n{text.casefold()}"

    def invented(self, text: str) -> Value | None:
        """The first value that the user cannot know."""
        found = (value for value in values_in(text) if not self._knowledge.has(value))
        return next(found, None) or next(self._invented_names(text), None)

    def changed(self, text: str) -> str | None:
        """What the user asks for, or gives up, against its wish."""
        for retreat in (found for pattern in self._given_up for found in pattern.finditer(text)):
            if not (self._may_keep and wording("keeps").search(retreat.group())):
                return " ".join(retreat.group().split())
        asking = wording("asking")
        asked_what = re.compile(rf"(?:{asking.pattern})(?P<what>[^.!?;\n]*)", asking.flags)
        wishes = (asked["what"] for asked in asked_what.finditer(text))
        asked_for = [what for what in wishes if not wording("not_asking").search(what)]
        # Sorts of wishes that neither the task nor the agent has spoken of.
        strange = {name: sort for name, sort in sorts().items() if not sort.vague and name not in self._sorts}
        far = {name: sort for name, sort in strange.items() if not sort.near & self._wanted}
        return next((name for what in asked_for for name, sort in far.items() if sort.asks.search(what)), None)

    def unfinished(self, text: str, acted: bool) -> str | None:
        """Why nothing is settled yet."""
        if not self._agent:
            return "nobody has answered"
        if acted and (not self._shown or any(text in self._seen for text in self._shown)):
            return None
        if not self._settled:
            return "the agent has neither done nor refused anything"
        still_asks = self._asks("open_question") and not wording("settled").search(self._agent)
        if self._asks("decides", last=True) or still_asks:
            return "the agent waits for an answer"
        talk = self._talk + text.casefold()
        gone = wording("leaves").search(self._agent)
        unsaid = next((marks for marks in self._open if marks and not any(mark in talk for mark in marks)), None)
        return f"nobody has spoken of {min(unsaid)!r}" if unsaid and not gone else None

    def _asks(self, name: str, *, last: bool = False) -> bool:
        """Whether the agent's last message has a question of this wording (``last``: ends in one); closing ones do not
        count."""
        parts = _parted(self._agent)[-1:] if last else _parted(self._agent)
        pattern, closing = wording(name), wording("closing")
        return any(p.endswith("?") and pattern.search(p) and not closing.search(p) for p in parts)

    def _invented_names(self, text: str) -> Iterator[Value]:
        folded = f" {' '.join(plain_word(token) for token in _TOKEN.findall(text))} "
        said = sorted(phrase for phrase in self._phrases if f" {phrase} " in folded)
        new = (phrase for phrase in said if not all(map(self._knowledge.knows_word, phrase.split())))
        yield from (Value("name", phrase, phrase) for phrase in new)
        for sentence in _SENTENCE.findall(EMAIL.sub(" ", text)):
            found = list(_TOKEN.finditer(sentence))
            tokens = [token.group() for token in found]
            for place, token in enumerate(tokens):
                if self._knowledge.knows_word(token) or not self._is_name(token, place, tokens):
                    continue
                plain, previous = plain_word(token), tokens[place - 1] if place else ""
                before = sentence[: found[place].start()][-_BEFORE:]
                # No matter of this domain: small talk, or the region of a place that is known.
                of_place = plain in wordings()["regions"] and previous[:1].isupper()
                beside = (of_place and self._knowledge.knows_word(previous)) or wording("beside").search(before)
                if plain in self._words or not beside:
                    yield Value("name", token, plain)
        for named in (found for pattern in (_OWN_NAME, _NAMED) for found in pattern.finditer(text)):
            for word in filter(None, named.groups()):
                if not is_word(word) and not self._knowledge.knows_word(word):
                    yield Value("name", word, plain_word(word))

    def _is_name(self, token: str, place: int, tokens: Sequence[str]) -> bool:
        plain = plain_word(token)
        if is_word(token):
            # "the Lamp": a thing of this domain by its name, where the sentence is about things
            return plain in self._words and token[0].isupper() and (place > 0 or len(tokens) <= _SHORT_ANSWER)
        if plain in self._words:
            return True
        if not token[0].isupper() or len(plain) < 3:
            return False
        if token.isupper() and len(token) > 3 and all(t.isupper() for t in tokens):
            return False  # somebody shouts
        if place > 0:
            return True
        if len(tokens) > _SHORT_ANSWER:
            return False
        others = [other for other in tokens[1:] if other[0].isupper()]
        return bool(others) or self._asks("asks_name")


def _texts(data: Any, depth: int = 8) -> Iterator[str]:
    """Every text in a task's data that its user may know, and values as texts."""
    if isinstance(data, dict) and depth:
        for key, value in data.items():
            if key not in _NOT_THE_USERS:
                yield from _texts(value, depth - 1)
    elif isinstance(data, list) and depth:
        for value in data:
            yield from _texts(value, depth - 1)
    elif isinstance(data, str):
        yield data
    elif isinstance(data, int | float) and not isinstance(data, bool):
        yield f"{data:g}" if isinstance(data, float) else str(data)


def _parted(text: str) -> list[str]:
    """Sentences, each with the mark that ends it."""
    return [part for part in (piece.strip() for piece in _ENDS.split(text)) if part]


def _given_up(persona: str, wanted: set[str]) -> list[re.Pattern[str]]:
    """The wordings by which the user of a task would give up what it came for."""
    if wording("wavers").search(persona):
        return []
    rid = not wanted.isdisjoint(wordings()["riddance"])
    return [wording("retreat")] if rid else [wording("retreat"), wording("unwanted")]


def _wanting(persona: str) -> list[str]:
    return [sentence for sentence in re.split(r"(?<=[.!?])\s|\n", persona) if wording("wants").search(sentence)]


def _marks(*texts: str) -> frozenset[str]:
    """What shows that somebody has spoken of a wish: its ids and numbers, and beside them its names. Empty without ids:
    names alone are too little to miss."""
    stated = (value for text in texts for value in values_in(text))
    codes = {value.said.lstrip("#").casefold() for value in stated if value.kind in ("code", "number")}
    names = {token.casefold() for text in texts for token in _TOKEN.findall(text) if token[0].isupper()}
    return frozenset(codes | {name for name in names if not is_word(name)}) if codes else frozenset()


# ---- the English that is looked for: wordings.yaml


@dataclass(frozen=True, slots=True)
class Sort:
    """One sort of thing that somebody may ask to have done."""

    asks: re.Pattern[str]
    allows: re.Pattern[str]
    """What makes it no surprise in a task: ``asks`` and more."""
    near: frozenset[str]
    """Sorts that make it no surprise."""
    vague: bool
    """Ordinary talk names it without wanting it."""


@cache
def sorts() -> dict[str, Sort]:
    """All of them by name."""
    return {
        name: Sort(
            any_of(entry["asks"]),
            any_of([*entry["asks"], *entry.get("allows", ())]),
            frozenset(entry.get("near", ())),
            entry.get("vague", False),
        )
        for name, entry in wordings()["sorts"].items()
    }


def allowed_by(text: str) -> set[str]:
    """The sorts that a task, or an agent, of these words makes no surprise."""
    return {name for name, sort in sorts().items() if sort.allows.search(text)}


# ---- what a text states: only forms that can hardly be read in two ways


_MONTH_NAMES = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
    "december",
)  # fmt: skip
_MONTHS = {form: n for n, name in enumerate(_MONTH_NAMES, 1) for form in (name, name[:3])} | {"sept": 9}
_MONTH = "|".join(sorted(_MONTHS, key=len, reverse=True))
_ISO = re.compile(r"\b(\d{4})-(\d\d?)-(\d\d?)\b")
_MONTH_DAY = re.compile(rf"\b({_MONTH})\.? (\d\d?)(?:st|nd|rd|th)?\b(?:,? (\d{{4}})\b)?", re.IGNORECASE)
_DAY_MONTH = re.compile(rf"\b(\d\d?)(?:st|nd|rd|th)?(?: of)? ({_MONTH})\b(?:,? (\d{{4}})\b)?", re.IGNORECASE)
_SLASHED = re.compile(r"\b(\d\d?)/(\d\d?)(?:/(\d{4}|\d\d))?\b")
_DOTTED = re.compile(r"\b(\d\d?)\. ?(\d\d?)\. ?(\d{4})\b")
_DATES = ((_ISO, 2, 3), (_MONTH_DAY, 1, 2), (_DAY_MONTH, 2, 1), (_SLASHED, 1, 2), (_DOTTED, 2, 1))
"""How a date is written, and which groups are its month and its day."""
_TIME = re.compile(r"\b(\d\d?):(\d\d)\b(?:\s*([ap])\.?m)?", re.IGNORECASE)
EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64})+")
_CODE = re.compile(
    r"(?<![\w@.])#?(?=[A-Za-z_-]{0,40}\d)(?=[\d_-]{0,40}[A-Za-z])[A-Za-z0-9]+(?:[_-][A-Za-z0-9]+)*(?![\w@])"
)
_CAPITALS = re.compile(r"(?<![\w'])[A-Z]{3,7}(?![\w'])")
_AMOUNT = re.compile(
    r"[$€£]\s?(\d[\d,]*(?:\.\d+)?)|\b(\d[\d,]*(?:\.\d+)?)\s?(?:dollars|euros?|bucks|usd|eur|%|percent|gb)\b"
    r"|\b(\d+\.\d\d)\b",
    re.IGNORECASE,
)
_DIGITS = re.compile(r"(?<![\w.,$€£#-])#?\d(?:[ -]?\d){3,}(?![\w%])")
_MONEY = re.compile(r"[$€£]|dollar|euro|buck|usd|eur", re.IGNORECASE)
MOST_TIMES = 12
"""What people reckon in their heads: an amount so many times."""
_YEAR = re.compile(r"(?:19[5-9]|20[0-4])\d")
_QUANTITY = re.compile(
    r"\b(\d{1,2}|one|two|three|four|five|six|seven|eight|nine|ten)\s+(?:\w+\s)?"
    r"(bag|passenger|ticket|suitcase|person|people|seat|line|item|night|piece)s?\b",
    re.IGNORECASE,
)
_UNIT = re.compile(
    r"\d+(?:st|nd|rd|th|am|pm|h|hr|hrs|min|mins|s|sec|x|k|kg|g|gb|mb|tb|cm|mm|m|km|ft|in|inch|inches|p|pcs|d|w|y"
    r"|yo|v|wh"
    r"|mah|hz|ml|l|oz|lb|lbs|year|day|hour|minute|week|month)s?|[3-6]g|mp[34]|wifi\d|4k|8k|a[345]|b2b|g2g|gr8|h\d"
    r"|covid19",
    re.IGNORECASE,
)
_COUNTED = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_ENDINGS = (
    "'s", "’s", "s'", "n't", "'ll", "'re", "'ve", "'d", "'m", "s", "es", "d", "ed", "ing", "ly", "er", "est", "n",
)  # fmt: skip


class Value(NamedTuple):
    """Something that a text states."""

    kind: str
    said: str
    same: Any
    """What two ways of writing it have in common."""


class Knowledge:
    """What one user knows: texts it was given, values that a domain lists, and what it has heard since."""

    def __init__(self, texts: Iterable[str] = (), values: Mapping[str, Sequence[str]] = {}) -> None:
        self._same: set[tuple[str, Any]] = set()
        self._digits: set[str] = set()
        self._words: set[str] = set()
        self._counted: set[str] = set()
        for text in chain(texts, *values.values()):
            self.add(text)

    def add(self, text: str) -> None:
        """Whatever ``text`` states may be repeated from now on."""
        for value in values_in(text):
            self._same.add((value.kind, value.same))
            self._digits.add(re.sub(r"\D", "", value.said))
            if value.kind == "quantity":
                self._counted.add(value.same[1])
        words = map(plain_word, re.findall(r"[^\W\d_]+(?:['’-][^\W\d_]+)*", text))
        self._words |= {part for word in words for part in (word, *word.split("-"))}
        self._digits |= set(re.findall(r"\d+", text))

    def has(self, value: Value) -> bool:
        """Whether ``value`` is known in some form. A count is unknown only where another count of the same is known."""
        if (value.kind, value.same) in self._same:
            return True
        if value.kind == "quantity":
            return value.same[1] not in self._counted
        digits = re.sub(r"\D", "", value.said)
        if value.kind == "amount":
            known = f"{value.same:g}" in self._digits or ("number", digits) in self._same
            return known or (_MONEY.search(value.said) is not None and self._reckons(value.same))
        if value.kind == "number":
            return digits in self._digits and len(digits) > 1
        return value.kind == "code" and self._has_code(value.same, digits)

    def _reckons(self, amount: float) -> bool:
        """Whether an amount of money is the sum or difference of two known ones, or a known multiple of one."""
        known = {same for kind, same in self._same if kind == "amount"}
        counts = [count for count in range(2, MOST_TIMES + 1) if str(count) in self._digits]
        sums = (other for one in known for other in (amount - one, amount + one))
        return any(round(other, 2) in known for other in sums) or any(amount / count in known for count in counts)

    def _has_code(self, code: str, digits: str) -> bool:
        """Whether a code is a known one in other words ("visa-7615", "W4471" for 4471), or an end of one."""
        parts = [part for part in re.split(r"[^a-z]+", code) if len(part) > 1]
        if len(digits) > 1 and digits in self._digits:
            return all(self.knows_word(part) or is_word(part) for part in parts)
        known = (same for kind, same in self._same if kind == "code") if len(code) > 2 else ()
        return any(same.startswith(code) or same.endswith(code) for same in known)

    def knows_word(self, word: str) -> bool:
        """Whether a word, or its singular, stands in something known."""
        word = plain_word(word)
        return word in self._words or word.rstrip("s") in self._words or f"{word}s" in self._words


def values_in(text: str) -> Iterator[Value]:
    """The values of clear form that ``text`` states. Linear in it; overlapping forms are read once."""
    for match in EMAIL.finditer(text):
        yield Value("email", match.group(), match.group().casefold().rstrip("."))
    text = EMAIL.sub(" ", text)
    for pattern, month, day in _DATES:
        for match in pattern.finditer(text):
            named = match[month].casefold()
            number = _MONTHS[named] if named in _MONTHS else int(named)
            if 1 <= number <= 12 and 1 <= int(match[day]) <= 31 and match.group() not in ("24/7",):
                yield Value("date", match.group(), (number, int(match[day])))
        text = pattern.sub(" ", text)
    for match in _TIME.finditer(text):
        yield Value("time", match.group(), (int(match[1]) % 12, int(match[2])))
    text = _TIME.sub(" ", text)
    for match in _CODE.finditer(text):
        if not _UNIT.fullmatch(match.group()):
            yield Value("code", match.group(), re.sub(r"[\W_]", "", match.group()).casefold())
    text = _CODE.sub(" ", text)
    for match in _AMOUNT.finditer(text):
        yield Value("amount", match.group(), float((match[1] or match[2] or match[3]).replace(",", "")))
    text = _AMOUNT.sub(" ", text)
    for match in _DIGITS.finditer(text):
        if not _YEAR.fullmatch(match.group()):
            yield Value("number", match.group(), re.sub(r"\D", "", match.group()))
    text = _DIGITS.sub(" ", text)
    for match in _QUANTITY.finditer(text):
        count = match[1].casefold()
        number = _COUNTED.index(count) if count in _COUNTED else int(count)
        yield Value("quantity", match.group(), (number, match[2].casefold()))
    shouting = text.isupper()
    for match in _CAPITALS.finditer(text):
        if not shouting and not is_word(match.group()):
            yield Value("code", match.group(), match.group().casefold())


def is_word(token: str) -> bool:
    """Whether ``token`` is a word of everyday English, inflected or not, or a name that everybody knows."""
    plain = token.casefold().replace("’", "'")
    words = english()
    if plain in words or len(plain) < 2:
        return True
    if "-" in plain:
        return all(is_word(part) for part in plain.split("-"))
    for stem in (plain.removesuffix(end) for end in _ENDINGS if plain.endswith(end)):
        doubled = stem[:-1] if len(stem) > 2 and stem[-1] == stem[-2] else stem
        forms = {stem, f"{stem}e", doubled, f"{stem[:-1]}y" if stem.endswith("i") else stem}
        if len(stem) > 1 and not forms.isdisjoint(words):
            return True
    return False


def plain_word(word: str) -> str:
    return word.casefold().replace("’", "'").removesuffix("'s").strip("'-")


@cache
def english() -> frozenset[str]:
    """Everyday words, lower case."""
    return frozenset(Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split())


@cache
def wordings() -> Json:
    """The English that is looked for, by name: ``wordings.yaml``."""
    read: Json = yaml.safe_load(Path(__file__).with_name("wordings.yaml").read_text(encoding="utf-8"))
    return read


@cache
def wording(name: str) -> re.Pattern[str]:
    """The alternatives of one entry, as one pattern."""
    return any_of(wordings()[name])


def any_of(alternatives: Iterable[str]) -> re.Pattern[str]:
    """One pattern of several, whatever the case."""
    return re.compile("|".join(f"(?:{one})" for one in alternatives), re.IGNORECASE | re.MULTILINE)
