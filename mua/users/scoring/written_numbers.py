r"""Numbers as people and models write them, and whether two are near. Imports the standard library alone.

``1,234`` and ``1 234`` are 1234 (thousands in threes), ``1.234`` is not; with a comma as decimal point both are read
the other way round. ``1/2``, ``\frac12``, ``1 1/2`` and ``½`` are fractions, ``3e8``, ``3\times10^8`` and ``3 million``
powers, ``0x2A`` is 42. A text is a number as a whole or not at all: nothing is picked out of ``42 or 43``.
"""

from __future__ import annotations

import decimal
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any

LONGEST = 2_000
"""Characters of a number: products of two such numbers are exact."""
EXACT = decimal.Context(
    prec=4 * LONGEST, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN, rounding=decimal.ROUND_HALF_EVEN, traps=[]
)
_MOST_EXPONENT = 10**15
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_VULGAR = re.compile("[¼½¾⅐-⅞]")
_DASHES = str.maketrans("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d\u2044\u2215", "-" * 8 + "//")
_TEXT = re.compile(
    r"\\(?:text(?:rm|bf|it)?|math(?:rm|bf|it)|boldsymbol|emph|mbox|operatorname|rm)\s{0,4}\{([^{}]{0,80})\}"
)
_REPLACED = (
    (re.compile(r"\\(?:left|right|displaystyle|limits)(?![A-Za-z])"), ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\[!,;: ]|~|\u00a0|\u202f|\u2009"), " "),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])|[×·⋅]"), "*"),
    (re.compile(r"\^\s?\{?\s?\\circ\s?\}?|\\degree(?![A-Za-z])"), "°"),
    (re.compile(r"\^\s?\{\s?([-+]?\d{1,18})\s?\}"), r"^\1"),
    (re.compile(r"\\([%$#&])"), r"\1"),
    (re.compile(r"\\frac\s?(\d)\s?(\d)(?!\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s?(\d)\s?\{"), r"\\frac{\1}{"),
    (re.compile(r"(\\frac\s?\{[^{}]{1,99}\})\s?(\d)(?!\d)"), r"\1{\2}"),
)
_NAMED = re.compile(r"[A-Za-z](?:_?\{?\w{1,8}\}?)?\s?=\s?(?=\S)")
_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?:[ _'’]\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_POWER = r"[eE](?P<e>[-+]?\d{1,18})|\s?\*\s?10\s?\^\s?(?P<p>[-+]?\d{1,18})"
_NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)\s?(?P<before>(?:US|A|C)?[$]|[€£¥])?\s?(?P<sign2>[-+]?)\s?
    (?:(?P<base>0[xX][0-9a-fA-F]{{1,300}}|0[bB][01]{{1,1000}}|0[oO][0-7]{{1,300}})
    |10\s?\^\s?(?P<bare>[-+]?\d{{1,18}})
    |(?:(?P<whole>{_DIGITS})\s?)?\\frac\s?\{{\s?(?P<top>-?\s?(?:{_DIGITS}))\s?\}}\s?\{{\s?(?P<bottom>{_DIGITS})\s?\}}
    |(?:(?P<whole2>\d+)\s)?(?P<top2>{_DIGITS})\s?/\s?(?P<bottom2>{_DIGITS})
    |(?P<plain>{_DIGITS})(?:{_POWER})?
    )
    (?:\s?(?P<scale>thousand|million|billion|trillion))?
    \s?(?P<percent>%|percent(?![A-Za-z])|per\scent(?![A-Za-z])|pct(?![A-Za-z]))?
    \s?(?P<unit>.*)""",
    re.VERBOSE | re.DOTALL,
)
_WORD = r"[A-Za-zµμΩ°$€£¥]{1,24}\.?(?:\^?-?\d)?"
_UNIT = re.compile(rf"{_WORD}(?:\s?[ /*-]\s?{_WORD}){{0,3}}")
_NO_UNIT = re.compile(r"\b(?:or|and|not|but|if|to|maybe|vs|is|xor)\b", re.I)
_ONE_LETTER = frozenset("mgslhdaAVWNJKCFTHΩ°$€£¥%")
"""Units of one letter; another letter is a variable."""
_UNITS: Mapping[str, str] = {
    name: symbol
    for symbol, names in {
        "m": "metre meter", "km": "kilometre kilometer", "cm": "centimetre centimeter", "mm": "millimetre millimeter",
        "g": "gram gramme", "kg": "kilogram kilogramme kilo", "mg": "milligram", "l": "litre liter L",
        "s": "second sec", "min": "minute", "h": "hour hr", "d": "day", "a": "year yr", "ft": "foot feet",
        "in": "inch inches", "mi": "mile", "lb": "pound lbs",
        "$": "dollar USD US$ usd buck", "€": "euro EUR eur", "£": "GBP gbp quid",
        "¥": "yen JPY jpy", "°": "degree deg", "¢": "cent",
    }.items()
    for name in names.split()
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class WrittenNumber:
    """What a text says: ``top / bottom``, the percent sign aside."""

    top: Decimal
    bottom: Decimal = Decimal(1)
    whole: bool = False
    """Written without point, fraction or power."""
    percent: bool = False
    unit: str = ""
    """In one form for all its names; empty where there is none."""


def tidy(text: str) -> str:
    """``text`` with one form of each digit, sign, space and command of LaTeX."""
    text = _RAISED.sub(lambda found: f"^{found.group().translate(_SUPERSCRIPTS)}", text)
    text = _VULGAR.sub(lambda found: f" {unicodedata.normalize('NFKC', found.group())}", text)
    text = unicodedata.normalize("NFKC", text).translate(_DASHES)
    text = _TEXT.sub(r" \1 ", text)
    for pattern, by in _REPLACED:
        text = pattern.sub(by, text)
    return " ".join(text.split())


def read_number(text: str, point: str = ".") -> WrittenNumber | None:
    """The number that all of ``text`` says; None where it is none. ``point`` separates decimals, ``.`` or ``,``."""
    if len(text) > LONGEST:
        return None
    text = tidy(text)
    if point == ",":
        text = text.translate(str.maketrans(",.", ".,"))
    if text.startswith((r"\approx", "≈")):
        text = text.removeprefix(r"\approx").removeprefix("≈").strip()
    text = text[named.end() :] if (named := _NAMED.match(text)) else text
    if text.startswith("(") and text.endswith(")") and "," not in text and text.count("(") == 1:
        text = text[1:-1].strip()
    found = _NUMBER.fullmatch(text.rstrip("."))
    if found is None or (found["sign"] and found["sign2"]):
        return None
    unit = unit_of(found["unit"], found["before"])
    value = None if unit is None else _value(found)
    if value is None or unit is None:
        return None
    top, bottom = value
    if "-" in (found["sign"], found["sign2"]):
        top = top.copy_negate()
    if found["scale"]:
        top = top.scaleb(_SCALES[found["scale"]], EXACT)
    if not bottom or not top.is_finite():
        return None
    whole = bool(found["base"]) or (
        found["plain"] is not None and not re.search(r"[.eE*]", found["plain"] + _power(found))
    )
    return WrittenNumber(top, bottom, whole and not found["scale"], bool(found["percent"]), unit)


def unit_of(text: str, before: str | None = None) -> str | None:
    """One form for all names of a unit, "" for none; None for what is no unit. ``before`` is a currency's sign."""
    text = text.strip()
    if text and (not _UNIT.fullmatch(text) or _NO_UNIT.search(text)):
        return None
    parts = [_one_unit(part) for part in re.split(r"\s?([ /*-])\s?", text) if part.strip()] if text else []
    named = " ".join(parts).replace("**", "^")
    if any(len(letters) == 1 and letters not in _ONE_LETTER for letters in re.findall(r"[^\W\d_]+", named)):
        return None
    if before:
        sign = before.removeprefix("US")
        return sign if named in ("", sign) else None
    return named


def _one_unit(part: str) -> str:
    word = part.removesuffix(".").replace("μ", "µ")
    power = re.search(r"\^?(-?\d)$", word)
    word, raised = (word[: power.start()], f"^{power[1]}") if power else (word, "")
    for name in (word, word.lower(), word.lower().removesuffix("s")):
        if name in _UNITS:
            return _UNITS[name] + raised
    # Symbols keep their case (mW, MW); names do not have one, nor a plural.
    return (word.lower().removesuffix("s") if len(word) > 3 else word) + raised


def _power(found: re.Match[str]) -> str:
    given = found["e"] or found["p"]
    return f"e{given}" if given else ""


def _value(found: re.Match[str]) -> tuple[Decimal, Decimal] | None:
    """Numerator and denominator, without the sign before all of it."""
    if found["base"]:
        return Decimal(int(found["base"], 0)), Decimal(1)
    if found["bare"]:
        return _scaled(Decimal(1), found["bare"])
    if found["plain"]:
        return _scaled(_decimal(found["plain"]), _power(found)[1:] or "0")
    top, bottom = (found["top"], found["bottom"]) if found["top"] else (found["top2"], found["bottom2"])
    whole = found["whole"] or found["whole2"]
    under, over = _decimal(bottom), _decimal(top)
    return (EXACT.add(EXACT.multiply(_decimal(whole), under), over) if whole else over), under


def _scaled(value: Decimal, exponent: str) -> tuple[Decimal, Decimal] | None:
    if abs(int(exponent)) > _MOST_EXPONENT:
        return None
    return value.scaleb(int(exponent), EXACT), Decimal(1)


def _decimal(text: str) -> Decimal:
    return Decimal(re.sub(r"[, _'’]", "", text))


def near(
    top: Decimal, bottom: Decimal, right_top: Decimal, right_bottom: Decimal, relative: float, absolute: float
) -> bool:
    """``|a/b - c/d| <= absolute`` or ``<= relative |c/d|``, for ``top/bottom`` and the right one, without dividing."""
    ours, theirs = EXACT.multiply(top, right_bottom), EXACT.multiply(right_top, bottom)
    if ours == theirs:
        return True
    apart = EXACT.subtract(ours, theirs).copy_abs()
    under = EXACT.multiply(bottom, right_bottom).copy_abs()
    if absolute and apart <= EXACT.multiply(Decimal(repr(absolute)), under):
        return True
    return bool(relative and apart <= EXACT.multiply(Decimal(repr(relative)), theirs.copy_abs()))


# ---- units that are multiples of each other, by sympy's table, exactly: no temperatures, currencies, years and months

_PREFIXED = {
    "m": ("meter", "kcmµun"), "g": ("gram", "kmµun"), "l": ("liter", "cmdµ"), "s": ("second", "mµun"),
    "Hz": ("hertz", "kMG"), "N": ("newton", "kmM"), "J": ("joule", "kmMG"), "W": ("watt", "kmMG"),
    "Pa": ("pascal", "khMG"), "V": ("volt", "kmµM"), "A": ("ampere", "mµk"), "Ω": ("ohm", "kmM"),
    "C": ("coulomb", "mµ"), "F": ("farad", "mµunp"), "T": ("tesla", "mµ"), "mol": ("mole", "mµk"),
}  # fmt: skip
_PREFIXES = {"G": 9, "M": 6, "k": 3, "h": 2, "d": -1, "c": -2, "m": -3, "u": -6, "µ": -6, "n": -9, "p": -12}
_SI_NAMES = {
    "min": "minute", "h": "hour", "d": "day", "ft": "foot", "in": "inch", "yard": "yard", "yd": "yard",
    "mi": "mile", "lb": "pound", "bar": "bar", "tonne": "tonne", "t": "tonne",
}  # fmt: skip
_LITERS = {"mL": "ml", "cL": "cl", "dL": "dl"}


def ratio(unit: str, other: str) -> tuple[Decimal, Decimal] | None:
    """Numerator and denominator of how many ``other`` one ``unit`` is; None where neither is a multiple of the other.

    Units as :func:`unit_of` gives them, with a power (``m^2``), or divided (``km / h``).
    """
    ours, theirs = _size(unit), _size(other)
    if ours is None or theirs is None or ours[1] != theirs[1]:
        return None
    found = ours[0] / theirs[0]
    return Decimal(int(found.p)), Decimal(int(found.q))


@cache
def _size(unit: str) -> tuple[Any, Any] | None:
    """The unit in units of SI, a rational number, and its dimensions."""
    import sympy

    size, dimensions, sign = sympy.Integer(1), dict[Any, int](), 1
    for part in unit.split(" "):
        if part in ("*", "/"):
            sign = -1 if part == "/" else 1
            continue
        name, _, power = part.partition("^")
        found = _one(name)
        if found is None or len(power) > 2:
            return None
        times = sign * int(power or 1)
        size *= found[0] ** times
        for dimension, count in found[1].items():
            dimensions[dimension] = dimensions.get(dimension, 0) + times * count
        sign = 1
    kept = frozenset((dimension, count) for dimension, count in dimensions.items() if count)
    return (size, kept) if isinstance(size, sympy.Rational) and kept else None


def _one(name: str) -> tuple[Any, dict[Any, int]] | None:
    from sympy import Rational
    from sympy.physics import units
    from sympy.physics.units.systems.si import SI, dimsys_SI

    name, exponent = _LITERS.get(name, name), 0
    quantity = _SI_NAMES.get(name)
    if quantity is None:
        symbol = next((s for s in (name, name[1:]) if s in _PREFIXED and (s == name or name[0] in _PREFIXED[s][1])), "")
        if not symbol:
            return None
        quantity = _PREFIXED[symbol][0]
        exponent = _PREFIXES[name[0]] if symbol != name else 0
    unit = getattr(units, quantity)
    dimension = dimsys_SI.get_dimensional_dependencies(SI.get_quantity_dimension(unit))
    size = SI.get_quantity_scale_factor(unit) * Rational(10) ** exponent
    return size, {one: int(count) for one, count in dimension.items()}


# ---- numbers in English words: as a whole, in the order that English has, or none

LONGEST_WORDS = 300
"""Characters."""
_ONES = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16,
    "seventeen": 17, "eighteen": 18, "nineteen": 19,
}  # fmt: skip
_TENS = {
    "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90,
}  # fmt: skip
_SCALE_WORDS = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_TOKEN = re.compile(r"[a-z]+|\d+|\S")


def digits_of_words(text: str) -> str | None:
    """``text`` in digits, a unit behind it kept; None where it does not begin with a number in words, or is none."""
    tidied = text[: LONGEST_WORDS + 1].strip().removesuffix(".").casefold()
    words = _TOKEN.findall(tidied.replace("-", " ").replace("\u2010", " "))
    if len(text) > LONGEST_WORDS or not words:
        return None
    sign = "-" if words[0] in ("minus", "negative") else ""
    words = words[1:] if sign else words
    known = {*_ONES, *_TENS, *_SCALE_WORDS, "hundred", "and", "point", "a"}
    length = next((at for at, word in enumerate(words) if word not in known), len(words))
    if words[length - 1 : length] == ["and"]:
        return None
    point = "point" in words[:length]
    at = words.index("point") if point else length
    number, decimals = words[:at], words[at + 1 : length]
    whole = _whole(number)
    if whole is None or (point and not decimals) or any(_ONES.get(word, 10) > 9 for word in decimals):
        return None
    found = f"{sign}{whole}" + ("." + "".join(str(_ONES[word]) for word in decimals) if point else "")
    rest = words[length:]
    return found if not rest else None if not re.fullmatch("[a-z%°$€£¥]+", rest[0]) else f"{found} {' '.join(rest)}"


def _whole(words: list[str]) -> int | None:
    """The value of a whole number's words; None where they are in no order that English has."""
    total, before, group = 0, 10**15, list[str]()
    for word in [*words, ""]:
        scale = _SCALE_WORDS.get(word) if word else 1
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
