r"""Numbers as people and models write them, and whether two are near. Imports the standard library alone.

``1,234`` and ``1 234`` are 1234 (thousands in threes), ``1.234`` is not; with a comma as decimal point both are read
the other way round. ``1/2``, ``\frac12``, ``1 1/2`` and ``½`` are fractions, ``3e8``, ``3\times10^8`` and ``3 million``
powers, ``0x2A`` is 42. A text is a number as a whole or not at all: nothing is picked out of ``42 or 43``.
"""

from __future__ import annotations

import decimal
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any, TypeAlias

LONGEST = 2_000
"""Characters of a number: products of two such numbers are exact."""
EXACT = decimal.Context(
    prec=4 * LONGEST, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN, rounding=decimal.ROUND_HALF_EVEN, traps=[]
)
_MOST_EXPONENT = 10**15
Ratio: TypeAlias = tuple[Decimal, Decimal]
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

    def as_fraction(self) -> Ratio:
        """Numerator and denominator, a percent sign taken for hundredths."""
        return (self.top.scaleb(-2, EXACT) if self.percent else self.top), self.bottom


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
    text = text.removeprefix(r"\approx").removeprefix("≈").strip()
    text = text[named.end() :] if (named := _NAMED.match(text)) else text
    if text.startswith("(") and text.endswith(")") and "," not in text and text.count("(") == 1:
        text = text[1:-1].strip()
    found = _NUMBER.fullmatch(text.rstrip("."))
    if found is None or (found["sign"] and found["sign2"]):
        return None
    unit = unit_of(found["unit"], found["before"])
    exponent = int(found["e"] or found["p"] or found["bare"] or 0)
    if unit is None or abs(exponent) > _MOST_EXPONENT:
        return None
    bottom = Decimal(1)
    if found["base"]:
        top = Decimal(int(found["base"], 0))
    elif found["bare"] or found["plain"]:
        top = _decimal(found["plain"] or "1").scaleb(exponent, EXACT)
    else:
        top, bottom = _decimal(found["top"] or found["top2"]), _decimal(found["bottom"] or found["bottom2"])
        if before := found["whole"] or found["whole2"]:
            top = EXACT.add(EXACT.multiply(_decimal(before), bottom), top)
    if "-" in (found["sign"], found["sign2"]):
        top = top.copy_negate()
    top = top.scaleb(_SCALES.get(found["scale"], 0), EXACT)
    if not bottom or not top.is_finite():
        return None
    plain = found["base"] or (found["plain"] and "." not in found["plain"] and not (found["e"] or found["p"]))
    return WrittenNumber(top, bottom, bool(plain) and not found["scale"], bool(found["percent"]), unit)


def _decimal(text: str) -> Decimal:
    return Decimal(re.sub(r"[, _'’]", "", text))


def unit_of(text: str, before: str | None = None) -> str | None:
    """One form for all names of a unit, "" for none; None for what is no unit. ``before`` is a currency's sign."""
    text = text.strip()
    if text and (not _UNIT.fullmatch(text) or _NO_UNIT.search(text)):
        return None
    parts = []
    for part in re.split(r"\s?([ /*-])\s?", text):
        word, power = re.fullmatch(r"(.*?)\^?(-?\d)?", part.removesuffix(".").replace("μ", "µ")).groups()  # type: ignore[union-attr]
        names = (word, word.lower(), word.lower().removesuffix("s"))
        # Symbols keep their case (mW, MW); names do not have one, nor a plural.
        other = names[-1] if len(word) > 3 else word
        parts.append(next((_UNITS[name] for name in names if name in _UNITS), other) + (f"^{power}" if power else ""))
    named = " ".join(part for part in parts if part.strip())
    if any(len(letters) == 1 and letters not in _ONE_LETTER for letters in re.findall(r"[^\W\d_]+", named)):
        return None
    if before:
        sign = before.removeprefix("US")
        return sign if named in ("", sign) else None
    return named


def near(ours: Ratio, theirs: Ratio, relative: float, absolute: float) -> bool:
    """``|a/b - c/d| <= absolute`` or ``<= relative |c/d|`` for ``ours`` a/b and ``theirs`` c/d, without dividing."""
    given, right = EXACT.multiply(ours[0], theirs[1]), EXACT.multiply(theirs[0], ours[1])
    apart, under = EXACT.subtract(given, right).copy_abs(), EXACT.multiply(ours[1], theirs[1])
    largest = EXACT.multiply(Decimal(repr(relative)), right.copy_abs())
    return given == right or bool(apart <= max(largest, EXACT.multiply(Decimal(repr(absolute)), under.copy_abs())))


# ---- units that are multiples of each other, by sympy's table, exactly: no temperatures, currencies, years and months

_PREFIXES = frozenset("GMkhdcmµunp")
_PREFIXED = {
    **{name: name for name in ("m", "g", "l", "s", "Hz", "N", "J", "W", "Pa", "V", "A", "C", "F", "T", "mol")},
    "L": "l", "Ω": "ohm",
}  # fmt: skip
_QUANTITIES = _PREFIXED | {
    "h": "hour", "min": "minute", "d": "day", "foot": "foot", "ft": "foot", "in": "inch", "yard": "yard", "yd": "yard",
    "mi": "mile", "lb": "pound", "bar": "bar", "tonne": "tonne", "t": "tonne",
}  # fmt: skip
"""Names that sympy has for units; those of ``_PREFIXED`` may have a prefix."""


def ratio(unit: str, other: str) -> Ratio | None:
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
    from sympy import Integer, Rational
    from sympy.physics import units
    from sympy.physics.units.prefixes import PREFIXES
    from sympy.physics.units.systems.si import SI, dimsys_SI

    size, dimensions, sign = Integer(1), Counter[Any](), 1
    for part in unit.split(" "):
        if part in ("*", "/"):
            sign = -1 if part == "/" else 1
            continue
        name, _, power = part.partition("^")
        quantity, prefix = _QUANTITIES.get(name), Integer(1)
        if quantity is None and name[:1] in _PREFIXES and (quantity := _PREFIXED.get(name[1:])):
            prefix = PREFIXES["mu" if name[0] in "µu" else name[0]].scale_factor
        if quantity is None or len(power) > 2:
            return None
        times, found = sign * int(power or 1), getattr(units, quantity)
        size *= (SI.get_quantity_scale_factor(found) * prefix) ** times
        for dimension, count in dimsys_SI.get_dimensional_dependencies(SI.get_quantity_dimension(found)).items():
            dimensions[dimension] += times * int(count)
        sign = 1
    kept = frozenset((dimension, count) for dimension, count in dimensions.items() if count)
    return (size, kept) if isinstance(size, Rational) and kept else None
