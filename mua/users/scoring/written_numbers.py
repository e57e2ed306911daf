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
