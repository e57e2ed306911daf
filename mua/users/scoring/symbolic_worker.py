r"""A process that compares mathematics: ``python -m mua.users.scoring.symbolic_worker FD``, kept by
:mod:`mua.users.scoring.symbolic_answers`, with which it speaks over the socket ``FD``.

sympy may compute for ever or take all memory (``9^{9^{9^9}}``). A timer of the kernel that counts this process's
processor time ends it where it stands; memory is limited too. Two texts are compared in this order, and the first that
can say decides:

1. the same text, spaces aside
2. ``a = b = c`` beside a value: every part but a name on the left has to be that value
3. two written numbers: by value
4. words: by their letters, which sympy would take for a product
5. two constants: by value to 30 digits; all else by math-verify
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import sys
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from mua.users.scoring.written_numbers import WrittenNumber, near, read_number, tidy, unit_of

MEMORY = 2 << 30
_SIZES = re.compile(r"\\(?:left|right|big|Big|bigg|Bigg)[lr]?(?![A-Za-z])\s?\.?|\\displaystyle|\\(?:quad|qquad)")
_AND = re.compile(r",?\s?(?:\\text\s?\{\s?(?:and|or)\s?\}|(?<![A-Za-z\\{])(?:and|or)(?![A-Za-z}]))\s?", re.I)
_NAME = re.compile(r"(?:\\?[A-Za-z]+|[A-Za-z])(?:_\{?\w{1,8}\}?)?'{0,3}(?:\s?\(\s?\\?[A-Za-z]{1,8}\s?\))?")
_MEMBER = re.compile(r"^[A-Za-z]\s?(?:\\in(?![A-Za-z])|∈)\s?")
_LISTED = re.compile(r"[,;](?![^()\[\]{}]*[)\]}])")
"""A list without brackets."""
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
_EMPTY_SET = re.compile(r"\\(?:emptyset|varnothing)(?![A-Za-z])|\\\{\s*\\\}|∅|\\text\{empty set\}")


class Unreadable(Exception):
    """The reference is no mathematics."""


def equal(answer: str, reference: str, relative: float = 1e-6, absolute: float = 0.0) -> bool:
    """Whether ``answer`` is ``reference``; raises :class:`Unreadable` where the reference cannot be read."""
    answer, reference = _clean(answer), _clean(reference)
    if _squeezed(answer) == _squeezed(reference):
        return True
    parts, known = _sides(answer), _sides(reference)
    if parts and known and _squeezed(answer.partition("=")[0]) == _squeezed(reference.partition("=")[0]):
        return all(equal(part, known[-1], relative, absolute) for part in parts)
    if parts and not known:
        return all(equal(part, reference, relative, absolute) for part in parts)
    if known and not parts:
        return len(known) == 1 and equal(answer, known[0], relative, absolute)
    ours, theirs = (None, None) if parts else (_number(answer), _number(reference))
    if ours is not None and theirs is not None:
        if ours.unit and theirs.unit and ours.unit != theirs.unit:
            return False
        whole = ours.whole and theirs.whole and not (ours.percent or theirs.percent)
        return near(ours.as_fraction(), theirs.as_fraction(), 0.0 if whole else relative, absolute)
    # A unit in \text{} at the end does not count, unless the units differ.
    tails = _TRAILING_TEXT.fullmatch(answer), _TRAILING_TEXT.fullmatch(reference)
    if not (tails[0] and tails[1] and unit_of(tails[0]["unit"]) != unit_of(tails[1]["unit"])):
        answer = tails[0]["rest"] if tails[0] else answer
        reference = tails[1]["rest"] if tails[1] else reference
    if _is_words(answer) or _is_words(reference):
        return _words(answer) == _words(reference)
    return _same_expression(answer, reference, relative, absolute)


def readable(reference: str) -> bool:
    """Whether answers can be compared with ``reference``."""
    reference = _clean(reference)
    if (tail := _TRAILING_TEXT.fullmatch(reference)) is not None:
        reference = tail["rest"]
    return _number(reference) is not None or _is_words(reference) or _parsed(reference) is not None


def _clean(text: str) -> str:
    """Without ``$``, sizes of brackets, and commands that change nothing; one form of signs and spaces."""
    text = _SIZES.sub(" ", text.strip().strip("$").strip())
    text = _AND.sub(", ", text)
    text = text.replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}").replace("bmatrix", "pmatrix")
    text = re.sub(r"(?<![\\A-Za-z])(?:infinity|oo)(?![A-Za-z])|∞", r"\\infty ", text)
    return _MEMBER.sub("", " ".join(text.split()))


def _squeezed(text: str) -> str:
    """Without spaces, except between digits."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", re.sub(r"\\[,;!: ]", " ", text))


def _sides(text: str) -> list[str]:
    """The parts of an equation that state a value: all but a name on the left; none where there is no equation."""
    parts = [part.strip() for part in text.split("=")]
    inside = any(part.count(opens) != part.count(closes) for part in parts for opens, closes in ("()", "[]", "{}"))
    if len(parts) < 2 or not all(parts) or inside or re.search("[<>]", text) or (parts[2:] and _LISTED.search(text)):
        return []
    return parts[1:] if _NAME.fullmatch(parts[0]) else parts


def _number(text: str) -> WrittenNumber | None:
    """A written number, with a unit that cannot be a product of variables: in ``\\text{}``, or apart and longer."""
    number = read_number(text)
    if number is None or not re.search("[A-Za-z]", number.unit) or _TRAILING_TEXT.fullmatch(text):
        return number
    if number.unit in ("km", "cm", "mm", "kg", "mg", "ml", "min", "mph"):
        return number
    return number if re.search(r"(?:\d|million|billion)\s[A-Za-z]{2}", text) else None


def _is_words(text: str) -> bool:
    r"""Whether the text holds a word that is no function: ``\text{east}``, ``Paris``, but not ``\sqrt`` and ``sin``."""
    if re.search(r"\\(?:text|mathrm|mbox|textbf)\s?\{[^{}]*[A-Za-z]{2}", text):
        return True
    bare = re.sub(r"\\[A-Za-z]+", " ", _PLAIN_COMMAND.sub(" ", text))
    return any(word.lower() not in _FUNCTIONS and len(word) > 3 for word in _WORD.findall(bare))


def _words(text: str) -> str:
    text = re.sub(r"\\(?:text|mathrm|mbox|textbf|textit)\s?\{([^{}]*)\}", r" \1 ", text)
    return " ".join(re.sub(r"[.\"'`]", "", tidy(text)).casefold().split())


def _same_expression(answer: str, reference: str, relative: float, absolute: float) -> bool:
    ours, theirs = _parsed(answer), _parsed(reference)
    if theirs is None:
        raise Unreadable
    return ours is not None and _same_values(ours, theirs, relative, absolute)


def _same_values(ours: Any, theirs: Any, relative: float, absolute: float) -> bool:
    import sympy
    from math_verify import verify

    if type(ours) is type(theirs) and isinstance(ours, sympy.Tuple | sympy.Interval):
        pairs = list(zip(ours.args, theirs.args, strict=False))
        same = all(one == other or _same_values(one, other, relative, absolute) for one, other in pairs)
        return same and len(ours.args) == len(theirs.args)
    if isinstance(ours, sympy.FiniteSet) != isinstance(theirs, sympy.FiniteSet) and (
        isinstance(ours, sympy.Tuple | sympy.Interval) or isinstance(theirs, sympy.Tuple | sympy.Interval)
    ):
        return False  # math-verify takes a set for the tuple of its items
    if all(isinstance(one, sympy.Expr) and one.is_number and one.is_finite for one in (ours, theirs)):
        if all(one.is_integer and not one.has(sympy.Float) for one in (ours, theirs)):
            return bool((ours - theirs).doit() == 0)
        right = sympy.N(theirs, 30)
        apart = abs(sympy.N(ours, 30) - right)
        if (abs(right) > 1e-20 or abs(apart) > 1e-20) and apart.is_number:
            return bool(apart <= relative * abs(right) or apart <= absolute)
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
        return {"equal": equal(request["answer"], request["reference"], **request["rules"])}
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
    """Answer requests, one message of JSON each, until the socket ends."""
    import math_verify  # noqa: F401 - what takes long, before the first request
    import sympy

    sympy.sqrt(sympy.pi).evalf(5)
    logging.disable(logging.CRITICAL)
    sys.setrecursionlimit(5000)
    sys.set_int_max_str_digits(100_000)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's to handle
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    line = Connection(int(sys.argv[1]))
    line.send_bytes(b'"ready"')
    while True:
        try:
            request = line.recv_bytes()
        except (EOFError, OSError):
            return
        line.send_bytes(json.dumps(answered(json.loads(request))).encode())


if __name__ == "__main__":
    main()
