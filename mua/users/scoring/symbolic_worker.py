r"""A process that compares mathematics: ``python -m mua.users.scoring.symbolic_worker``, kept by
:mod:`mua.users.scoring.comparison_pool`.

sympy may compute for ever or take all memory (``9^{9^{9^9}}``). A timer of the kernel that counts this process's
processor time ends it where it stands; memory is limited too. Two texts are compared in this order, and the first that
can say decides:

1. the same text, spaces aside
2. tuples, intervals, sets and lists: bracket by bracket and item by item; sets and bare lists in any order
3. ``a = b = c`` beside a value: every part but a name on the left has to be that value
4. two written numbers: by value
5. words: by their letters, which sympy would take for a product
6. two constants: by value to 30 digits; all else by math-verify
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from mua.users.scoring.written_numbers import EXACT, WrittenNumber, near, read_number, tidy, unit_of

MEMORY = 2 << 30
DEEPEST = 40
"""Brackets inside one another."""
_MOST_ITEMS = 64
_OPENS, _CLOSES = {"(": ")", "[": "]", "\\{": "\\}", "{": "}"}, (")", "]", "\\}", "}")
_TOKEN = re.compile(r"\\(?:left|right)(?![A-Za-z])|\\.|[()\[\]{},;=<>]", re.DOTALL)
_SIZES = re.compile(r"\\(?:left|right|big|Big|bigg|Bigg)[lr]?(?![A-Za-z])\s?\.?|\\displaystyle|\\(?:quad|qquad)")
_AND = re.compile(r",?\s?(?:\\text\s?\{\s?(?:and|or)\s?\}|(?<![A-Za-z\\{])(?:and|or)(?![A-Za-z}]))\s?", re.I)
_NAME = re.compile(r"(?:\\?[A-Za-z]+|[A-Za-z])(?:_\{?\w{1,8}\}?)?'{0,3}(?:\s?\(\s?\\?[A-Za-z]{1,8}\s?\))?")
_MEMBER = re.compile(r"[A-Za-z]\s?(?:\\in(?![A-Za-z])|∈)\s?")
_TRAILING_TEXT = re.compile(
    r"(?P<rest>.*?\S)\s?\\(?:text|mathrm|mbox|textrm)\s?\{(?P<unit>[^{}]{1,80})\}\^?\d?", re.DOTALL
)
_NAMED = frozenset(
    re.findall(
        r"\w+",
        "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp gcd lcm det pi theta alpha beta gamma "
        "delta lambda mu phi omega infty cdot times pm",
    )
)
"""What LaTeX writes with a backslash and others without."""
_FUNCTIONS = _NAMED | {"min", "max", "mod", "sqrt", "frac", "binom"}
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_PLAIN_COMMAND = re.compile(rf"(?<![\\A-Za-z])(?:{'|'.join(sorted(_NAMED))})(?![A-Za-z])")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_EMPTY_SET = re.compile(r"\\(?:emptyset|varnothing)(?![A-Za-z])|\\\{\s*\\\}|∅|\\text\{empty set\}")


@dataclass(frozen=True)
class Rules:
    """What counts as equal."""

    relative: float = 1e-6
    absolute: float = 0.0


class Unreadable(Exception):
    """The reference is no mathematics."""


def equal(answer: str, reference: str, rules: Rules) -> bool:
    """Whether ``answer`` is ``reference``; raises :class:`Unreadable` where the reference cannot be read."""
    answer, reference = _clean(answer), _clean(reference)
    if _squeezed(answer) == _squeezed(reference):
        return True
    if (listed := _by_items(answer, reference, rules)) is not None:
        return listed
    if (parts := _sides(answer)) and not _sides(reference):
        return all(equal(part, reference, rules) for part in parts)
    if (known := _sides(reference)) and not parts:
        return len(known) == 1 and equal(answer, known[0], rules)
    if parts and known:
        if _squeezed(answer.partition("=")[0]) == _squeezed(reference.partition("=")[0]):
            return all(equal(part, known[-1], rules) for part in parts)
        return _same_expression(answer, reference, rules)
    ours, theirs = _number(answer), _number(reference)
    if ours is not None and theirs is not None:
        if ours.unit and theirs.unit and ours.unit != theirs.unit:
            return False
        whole = ours.whole and theirs.whole and not (ours.percent or theirs.percent)
        tops = [one.top.scaleb(-2, EXACT) if one.percent else one.top for one in (ours, theirs)]
        relative = 0.0 if whole else rules.relative
        return near(tops[0], ours.bottom, tops[1], theirs.bottom, relative, rules.absolute)
    answer, reference = _without_units(answer, reference)
    if _is_words(answer) or _is_words(reference):
        return _words(answer) == _words(reference)
    return _same_expression(answer, reference, rules)


def readable(reference: str) -> bool:
    """Whether answers can be compared with ``reference``, of which every part must mean something."""
    reference = _clean(reference)
    if (structure := _structure(reference)) is not None:
        return all(readable(item) for item in structure[1])
    if parts := _sides(reference):
        return all(readable(part) for part in parts)
    if _number(reference) is not None:
        return True
    bare, _ = _without_units(reference, "")
    return _is_words(bare) or _parsed(bare) is not None


def _clean(text: str) -> str:
    """Without ``$``, sizes of brackets, and commands that change nothing; one form of signs and spaces."""
    text = text.strip().strip("$").strip()
    text = _SIZES.sub(" ", text)
    text = _AND.sub(", ", text)
    text = text.replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}").replace("bmatrix", "pmatrix")
    text = re.sub(r"(?<![\\A-Za-z])(?:infinity|oo)(?![A-Za-z])|∞", r"\\infty ", text)
    return " ".join(text.split())


def _squeezed(text: str) -> str:
    """Without spaces, except between digits."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", re.sub(r"\\[,;!: ]", " ", text))


# ---- structure


def _tokens(text: str) -> list[tuple[int, str, int]]:
    """Place, sign and depth of each sign; that of a bracket is the depth around it."""
    found, depth = [], 0
    for token in _TOKEN.finditer(text):
        sign = token.group()
        if sign in _OPENS:
            found.append((token.start(), sign, depth))
            depth += 1
        elif sign in _CLOSES:
            depth -= 1
            found.append((token.start(), sign, depth))
        else:
            found.append((token.start(), sign, depth))
        if depth > DEEPEST:
            raise RecursionError
    return found


def _structure(text: str) -> tuple[str, list[str]] | None:
    """The kind of a tuple, interval, set or bare list, and its items; None for what is none."""
    text = _MEMBER.sub("", text, count=1) if _MEMBER.match(text) else text
    tokens = _tokens(text)
    kind, inner, level = "list", text, 0
    if tokens and tokens[0][1] in ("(", "[", "\\{") and tokens[0][0] == 0 and tokens[0][2] == 0:
        closing = next((token for token in tokens[1:] if token[2] == 0 and token[1] in _CLOSES), None)
        if closing is not None and closing[0] + len(closing[1]) == len(text):
            opens, closes = tokens[0][1], closing[1]
            kind, inner, level = opens + closes, text[len(opens) : closing[0]], 1
    if not (kind == "list" or kind == "\\{\\}" or (kind[0] in "([" and kind[-1] in ")]")):
        return None
    begin = 0 if level == 0 else len(tokens[0][1])
    marks = [place - begin for place, sign, depth in tokens if sign in (",", ";") and depth == level]
    # A comma within a written number separates no items, except where a bracket says that there are several.
    if level == 0 and (not marks or read_number(text) is not None):
        return None
    items = [part.strip() for part in _between(inner, marks)]
    if not items or not all(items) or (kind in ("()", "[]") and len(items) == 1):
        return None
    return kind, items


def _between(text: str, places: Sequence[int]) -> list[str]:
    edges = [-1, *places, len(text)]
    return [text[begin + 1 : end] for begin, end in pairwise(edges)]


def _by_items(answer: str, reference: str, rules: Rules) -> bool | None:
    """None where this does not decide."""
    ours, theirs = _structure(answer), _structure(reference)
    if ours is None or theirs is None:
        return None
    loose = ("\\{\\}", "list")
    if (ours[0] in loose) != (theirs[0] in loose) or (ours[0] not in loose and ours[0] != theirs[0]):
        return False
    given, wanted = _once(ours[1], ours[0]), _once(theirs[1], theirs[0])
    if len(given) != len(wanted) or len(given) > _MOST_ITEMS:
        return False
    if theirs[0] not in loose:
        return all(equal(one, other, rules) for one, other in zip(given, wanted, strict=True))
    left = list(wanted)
    for one in given:
        partner = next((place for place, other in enumerate(left) if equal(one, other, rules)), None)
        if partner is None:
            return False
        left.pop(partner)
    return True


def _once(items: Sequence[str], kind: str) -> list[str]:
    """In a set an item that is written twice is one."""
    return list({_squeezed(item): item for item in items}.values()) if kind == "\\{\\}" else list(items)


def _sides(text: str) -> list[str]:
    """The parts of an equation that state a value: all but a name on the left; none where there is no ``=``, or an
    inequality."""
    tokens = [token for token in _tokens(text) if token[2] == 0]
    if any(sign in ("<", ">") for _, sign, _ in tokens):
        return []
    parts = [part.strip() for part in _between(text, [place for place, sign, _ in tokens if sign == "="])]
    if len(parts) < 2 or not all(parts):
        return []
    return parts[1:] if _NAME.fullmatch(parts[0]) else parts


# ---- words and units


def _number(text: str) -> WrittenNumber | None:
    """A written number, with a unit that cannot be a product of variables: in ``\\text{}``, or apart and longer."""
    number = read_number(text)
    if number is None or not re.search("[A-Za-z]", number.unit) or _TRAILING_TEXT.fullmatch(text):
        return number
    if number.unit in ("km", "cm", "mm", "kg", "mg", "ml", "min", "mph"):
        return number
    return number if re.search(r"(?:\d|million|billion)\s[A-Za-z]{2}", text) else None


def _without_units(answer: str, reference: str) -> tuple[str, str]:
    """Both without a unit in ``\\text{}`` at the end, unless the units differ."""
    ours, theirs = _TRAILING_TEXT.fullmatch(answer), _TRAILING_TEXT.fullmatch(reference)
    if ours and theirs and unit_of(ours["unit"]) != unit_of(theirs["unit"]):
        return answer, reference
    return (ours["rest"] if ours else answer), (theirs["rest"] if theirs else reference)


def _is_words(text: str) -> bool:
    r"""Whether the text holds a word that is no function: ``\text{east}``, ``Paris``, but not ``\sqrt`` and ``sin``."""
    if re.search(r"\\(?:text|mathrm|mbox|textbf)\s?\{[^{}]*[A-Za-z]{2}", text):
        return True
    bare = _COMMAND.sub(" ", _PLAIN_COMMAND.sub(" ", text))
    return any(word.lower() not in _FUNCTIONS and len(word) > 3 for word in _WORD.findall(bare))


def _words(text: str) -> str:
    text = re.sub(r"\\(?:text|mathrm|mbox|textbf|textit)\s?\{([^{}]*)\}", r" \1 ", text)
    return " ".join(re.sub(r"[.\"'`]", "", tidy(text)).casefold().split())


# ---- mathematics


def _same_expression(answer: str, reference: str, rules: Rules) -> bool:
    import sympy
    from math_verify import verify

    theirs = _parsed(reference)
    if theirs is None:
        raise Unreadable
    ours = _parsed(answer)
    if ours is None:
        return False
    if all(isinstance(one, sympy.Expr) and one.is_number and one.is_finite for one in (ours, theirs)):
        if all(one.is_integer and not one.has(sympy.Float) for one in (ours, theirs)):
            return bool((ours - theirs).doit() == 0)
        right = sympy.N(theirs, 30)
        apart = abs(sympy.N(ours, 30) - right)
        if (abs(right) > 1e-20 or abs(apart) > 1e-20) and apart.is_number:
            return bool(apart <= rules.relative * abs(right) or apart <= rules.absolute)
    return bool(verify(theirs, ours, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True))


@lru_cache(maxsize=512)
def _parsed(text: str) -> Any:
    """What sympy makes of ``text``; None where it makes nothing of it. An interval without points is no empty set."""
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, normalize_latex
    from math_verify.parser import parse_latex_cached
    from sympy import S

    form = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    text = _PLAIN_COMMAND.sub(lambda found: "\\" + found.group(), text)
    try:
        value = parse_latex_cached(normalize_latex(text, config=form))
    except (MemoryError, RecursionError):
        raise
    except Exception:  # antlr's and sympy's are of all kinds
        return None
    return None if value is S.EmptySet and not _EMPTY_SET.search(text) else value


def answered(request: Any) -> Any:
    """The answer to one request, ``{"equal": bool}``, ``{"unreadable": True}`` or ``{"why": ...}``; without an answer
    the reference alone is looked at."""
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])
    try:
        if request["answer"] is None:
            return {"equal": False} if readable(request["reference"]) else {"unreadable": True}
        return {"equal": equal(request["answer"], request["reference"], Rules(**request["rules"]))}
    except Unreadable:
        return {"unreadable": True}
    except MemoryError:
        return {"why": "the comparison takes too much memory"}
    except RecursionError:
        return {"why": "nested too deeply"}
    except Exception as error:  # of sympy, at what a policy wrote
        return {"why": f"cannot be compared: {type(error).__name__}"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Answer requests, one line of JSON each, until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import logging

    import math_verify  # noqa: F401 - what takes long, before the first request
    import sympy

    sympy.sqrt(sympy.pi).evalf(5)
    logging.disable(logging.CRITICAL)
    sys.setrecursionlimit(5000)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(100_000)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's to handle
    answers.write('"ready"\n')
    answers.flush()
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    for line in sys.stdin:
        answers.write(json.dumps(answered(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
