"""What a text states: ids, emails, amounts, dates, names; and what somebody knows of that.

Only forms that can hardly be read in two ways: small numbers, weekdays and years count for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mua.types import Json

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
