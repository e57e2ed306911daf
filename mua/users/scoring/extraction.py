r"""Answers in a text: every form is looked for in linear time, whatever the text.

``boxed``   what stands in ``\boxed{}`` or ``\fbox{}``, braces inside one another; ``\boxed 7`` too
``tag``     what stands between ``<answer>`` and ``</answer>``, in any case
``json``    the value of the key ``"answer"``, in any case, in an object of any kind
``line``    the rest of a line after ``Answer:``, ``Final answer:``, ``the answer is``; the next line if it is empty
``code``    the last fenced block, of those marked as Python if any is
``number``  the last number
``whole``   the whole text

Reasoning up to the last ``</think>`` is no part of the text; where it does not end, there is no text. The first form of
the configuration that occurs decides. Different answers of that form are all given (``several: every``): whoever lists
several is right only if each of them is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mua.config.environment import AnswerForm, ScorerConfig
from mua.utils.strict_json import JsonError, read_json_at, skip_space

MOST_ANSWERS = 16
"""Different answers in one text; more are none."""
CODE_LONGER = 50
"""How much longer code may be than other answers."""
_LONGEST_TEXT = 1_000_000
_BEGINS, _ENDS = "<think>", "</think>"
_TEX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])(?P<open>[ \t]{0,8}\{)?|\\.|[{}]", re.DOTALL)
_UNBRACED = re.compile(r"[ \t]{0,8}([^\s{}$\\.,;]{1,64})")
_LINE = re.compile(r"\banswer\b[*_` \t]{0,8}(?:(?:is|are)\b[*_` \t]{0,8}:?|[:=])[*_ \t]{0,8}(?P<rest>[^\n]*)", re.I)
_FENCE = re.compile(r"^[ \t]{0,3}(?:```|~~~)(?P<info>[^\n`]*)$", re.MULTILINE)
_NUMBER = re.compile(
    r"(?<![\w.])[-+\u2212]?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?:[eE][-+]?\d{1,9})?(?:/\d+)?%?(?<=[\d%])"
)
_EMPHASIS = (*((sign, sign) for sign in ("**", "__", "`", "*", "$$", "$")), (r"\(", r"\)"), (r"\[", r"\]"))


@dataclass(frozen=True, slots=True)
class Found:
    """What a text holds."""

    answers: Sequence[str] = ()
    form: AnswerForm | None = None
    why: str = "no answer in the text"


def found_answers(text: str, config: ScorerConfig) -> Found:
    """The answers of ``text`` in the first of ``config.forms`` that occurs; see the module's docstring."""
    if len(text) > _LONGEST_TEXT:
        return Found(why=f"the text is longer than {_LONGEST_TEXT} characters")
    spoken = without_reasoning(text)
    if spoken is None:
        return Found(why="the reasoning does not end")
    for form in config.forms:
        longest = config.longest * (CODE_LONGER if form == "code" else 1)
        answers = list(_distinct(_FINDERS[form](spoken, config), form))
        if not answers:
            continue
        if config.several == "last":
            answers = answers[-1:]
        if len(answers) > MOST_ANSWERS:
            return Found(form=form, why=f"more than {MOST_ANSWERS} different answers")
        if any(len(answer) > longest for answer in answers):
            return Found(form=form, why=f"an answer of more than {longest} characters")
        return Found(answers, form)
    return Found()


def without_reasoning(text: str) -> str | None:
    """What follows the last ``</think>``; None where reasoning has begun and not ended."""
    spoken = text.rpartition(_ENDS)[2]
    return None if _BEGINS in spoken else spoken


def plain(answer: str) -> str:
    """``answer`` without what dresses it up: white space, emphasis, ``$``, and a full stop at its end."""
    answer = answer.strip()
    for _ in range(8):
        before = answer
        for opens, closes in _EMPHASIS:
            inner = answer[len(opens) : -len(closes)]
            if len(answer) > len(opens) + len(closes) and answer.startswith(opens) and answer.endswith(closes):
                # `$1$ or $2$` begins and ends so too, and is not one formula.
                if opens in inner or closes in inner:
                    break
                answer = inner.strip()
        if answer.endswith(".") and not answer.endswith(("..", r"\right.")):
            answer = answer[:-1].rstrip()
        if answer == before:
            return answer
    return answer


def _distinct(answers: Iterable[str], form: AnswerForm) -> Iterator[str]:
    """Each answer once, at the place where it stood last, white space aside; empty ones are none."""
    found: dict[str, str] = {}
    for answer in answers:
        given = answer.strip("\n") if form == "code" else plain(answer)
        if not (key := " ".join(given.split())):
            continue
        found.pop(key, None)
        found[key] = given
    yield from found.values()


def _boxed(text: str, config: ScorerConfig) -> Iterator[str]:
    """One pass: a stack of braces, of which those of a box remember where it begins."""
    opened: list[int | None] = []
    spans: list[tuple[int, int]] = []
    for token in _TEX.finditer(text):
        sign = token.group()
        if sign.startswith(("\\boxed", "\\fbox")):
            if token["open"]:
                opened.append(token.end())
            elif value := _UNBRACED.match(text, token.end()):
                spans.append(value.span(1))
        elif sign == "{":
            opened.append(None)
        elif sign == "}" and opened and (begun := opened.pop()) is not None:
            while spans and spans[-1][0] >= begun:  # a box in a box is part of it
                spans.pop()
            spans.append((begun, token.start()))
    for begun, end in spans:
        yield re.sub(r"\\(?:boxed|fbox)(?![A-Za-z])", "", text[begun:end])


def _tagged(text: str, config: ScorerConfig) -> Iterator[str]:
    """From an end tag back to the nearest begin tag."""
    begun: int | None = None
    for tag in re.finditer(rf"<(/?){re.escape(config.tag)}[ \t\n]{{0,8}}>", text, re.I):
        if not tag[1]:
            begun = tag.end()
        elif begun is not None:
            yield text[begun : tag.start()]
            begun = None


def _keyed(text: str, config: ScorerConfig) -> Iterator[str]:
    """The last values only: each is read for itself, so that what stands around it need not be JSON."""
    places = [found.end() for found in re.finditer(rf'"{re.escape(config.key)}"[ \t\r\n]{{0,8}}:', text, re.I)]
    for place in places[-MOST_ANSWERS - 1 :]:
        try:
            value, _ = read_json_at(text[place : place + 4 * config.longest], skip_space(text[place : place + 99], 0))
        except JsonError:
            continue
        if value is not None:
            yield value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _lines(text: str, config: ScorerConfig) -> Iterator[str]:
    for found in _LINE.finditer(text):
        if rest := found["rest"].strip():
            yield rest if rest[0] in "*_`" else rest.rstrip("*_`")  # what opens before the colon closes behind
        else:
            following = text[found.end() : found.end() + 2 * config.longest].strip()
            yield following.partition("\n")[0]


def _fenced(text: str, config: ScorerConfig) -> Iterator[str]:
    """One block alone: those before it are drafts and examples. One that is not closed ends with the text."""
    marks = list(_FENCE.finditer(text))
    ends = [mark.start() for mark in marks[1::2]] + [len(text)] * (len(marks) % 2)
    blocks = list(zip(marks[::2], ends, strict=True))
    python = [block for block in blocks if block[0]["info"].strip().lower() in ("python", "python3", "py")]
    for opens, end in (python or blocks)[-1:]:
        yield text[opens.end() : end]


def _last_number(text: str, config: ScorerConfig) -> Iterator[str]:
    """The last alone: a text that derives a number holds many."""
    last = None
    for last in _NUMBER.finditer(text):  # noqa: B007
        pass
    if last is not None:
        yield last.group()


_FINDERS: Mapping[AnswerForm, Callable[[str, ScorerConfig], Iterator[str]]] = {
    "boxed": _boxed,
    "tag": _tagged,
    "json": _keyed,
    "line": _lines,
    "code": _fenced,
    "number": _last_number,
    "whole": lambda text, _: iter([text]),
}
