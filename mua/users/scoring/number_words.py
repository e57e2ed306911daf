"""Numbers in English words: ``twenty-five``, ``one hundred and five``, ``three point one four``, ``minus seven``.

A text is such a number as a whole or not at all. Words in another order than English has them are none (``five
hundred twenty thirty``), and neither are ordinals, fractions and ``a dozen``.
"""

from __future__ import annotations

import re

LONGEST = 300
"""Characters."""
_ONES = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16,
    "seventeen": 17, "eighteen": 18, "nineteen": 19,
}  # fmt: skip
_TENS = {
    "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90,
}  # fmt: skip
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_WORD = re.compile(r"[a-z]+|\d+|\S")


def digits_of_words(text: str) -> str | None:
    """``text`` in digits, a unit behind it kept; None where it does not begin with a number in words, or is none."""
    tidied = text[: LONGEST + 1].strip().removesuffix(".").casefold()
    words = _WORD.findall(tidied.replace("-", " ").replace("\u2010", " "))
    if len(text) > LONGEST or not words:
        return None
    sign = "-" if words[0] in ("minus", "negative") else ""
    words = words[1:] if sign else words
    length = next((at for at, word in enumerate(words) if not _is_of_number(word)), len(words))
    if words[length - 1 : length] == ["and"]:
        return None
    number, point, decimals = _split(words[:length])
    whole = _whole(number)
    if whole is None or (point and not decimals) or any(_ONES.get(word, 10) > 9 for word in decimals):
        return None
    found = f"{sign}{whole}" + ("." + "".join(str(_ONES[word]) for word in decimals) if point else "")
    rest = words[length:]
    return found if not rest else None if not re.fullmatch("[a-z%°$€£¥]+", rest[0]) else f"{found} {' '.join(rest)}"


def _is_of_number(word: str) -> bool:
    return word in _ONES or word in _TENS or word in _SCALES or word in ("hundred", "and", "point", "a")


def _split(words: list[str]) -> tuple[list[str], bool, list[str]]:
    if "point" not in words:
        return words, False, []
    at = words.index("point")
    return words[:at], True, words[at + 1 :]


def _whole(words: list[str]) -> int | None:
    """The value of a whole number's words; None where they are in no order that English has."""
    total, before, group = 0, 10**15, list[str]()
    for word in [*words, ""]:
        scale = _SCALES.get(word) if word else 1
        if scale is None:
            group.append(word)
            continue
        if scale == 1 and not group and total:
            break
        value = 1 if group == ["a"] and scale > 1 and not total else _below_thousand(group, first=not total)
        if value is None or scale >= before:
            return None
        total, before, group = total + value * scale, scale, []
    return total


def _below_thousand(words: list[str], *, first: bool) -> int | None:
    if not words:
        return None
    if words[0] == "and":  # one thousand and five
        words = words[1:]
        if first or "hundred" in words:
            return None
    hundreds = 0
    if "hundred" in words:
        at = words.index("hundred")
        count = 1 if words[:at] == ["a"] else _ONES.get(words[0]) if at == 1 else None
        if not count or (count > 9 and count % 10 == 0):
            return None
        hundreds, words = 100 * count, words[at + 1 :]
        if words[:1] == ["and"]:
            words = words[1:]
            if not words:
                return None
        if not words:
            return hundreds
    if len(words) == 1:
        value = _ONES.get(words[0], _TENS.get(words[0]))
        return None if value is None or (hundreds and not value) else hundreds + value
    if len(words) == 2 and words[0] in _TENS and 0 < _ONES.get(words[1], 0) < 10:
        return hundreds + _TENS[words[0]] + _ONES[words[1]]
    return None
