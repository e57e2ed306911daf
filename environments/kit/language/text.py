"""A message as normalised sentences.

Everything is lower case, contractions are spelled out ("can't" becomes "can not"), markup and emoji are gone, a list
after a colon is one sentence with its head. The way of a text::

    "I've **found** it:\\n- Lamp\\nIs that right?"
        →  [Sentence("i have found it : lamp", False), Sentence("is that right", True)]
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

LONGEST = 8_000
"""Characters of a message that are read; no customer reads more."""
MOST_SENTENCES = 100
"""Sentences of a message that are read."""
LONGEST_SENTENCE = 800
"""Characters of a sentence that are read. Some expressions take time in the square of a sentence's length."""

_PLAIN = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": ".", "\u00a0": " ", "\t": " "})
_APOSTROPHE = {
    "dont": "do not",
    "doesnt": "does not",
    "didnt": "did not",
    "isnt": "is not",
    "wont": "will not",
    "couldnt": "could not",
    "wouldnt": "would not",
    "havent": "have not",
    "hasnt": "has not",
}
_CONTRACTIONS = (
    (re.compile(r"\bcan'?t\b|\bcannot\b"), "can not"),
    (re.compile(r"\bwon't\b"), "will not"),
    (re.compile(r"\bshan't\b"), "shall not"),
    (re.compile(r"\bain't\b"), "is not"),
    (re.compile(r"\b(is|are|was|were|do|does|did|has|have|had|would|could|should|must|need)n't\b"), r"\1 not"),
    (re.compile(r"\b(dont|doesnt|didnt|isnt|wont|couldnt|wouldnt|havent|hasnt)\b"), lambda m: _APOSTROPHE[m[1]]),
    (re.compile(r"\blet's\b"), "let us"),
    (re.compile(r"'m\b"), " am"),
    (re.compile(r"'re\b"), " are"),
    (re.compile(r"'ve\b"), " have"),
    (re.compile(r"'ll\b"), " will"),
    (re.compile(r"'d\b"), " would"),
    (
        re.compile(r"\b(what|where|who|how|when|why|it|that|this|here|there|he|she|which|everything|all|order)'s\b"),
        r"\1 is",
    ),
    (re.compile(r"\b(whats|wheres|whos|thats|heres)\b"), lambda m: f"{m[1][:-1]} is"),
    (re.compile(r"\b(im|ive|youre|youve)\b"), lambda m: {"im": "i am", "ive": "i have"}.get(m[1], f"you {m[1][3:]}")),
    (re.compile(r"\b(gonna)\b"), "going to"),
    (re.compile(r"\b(wanna)\b"), "want to"),
    (re.compile(r"\b(pls|plz)\b"), "please"),
    (re.compile(r"\bok\b|\bokey\b"), "okay"),
    (re.compile(r"\b(u)\b"), "you"),
    (re.compile(r"\be-mail"), "email"),
    (re.compile(r"'s\b|s'(?=\s)"), lambda m: " 's" if m[0] == "'s" else "s 's"),
)
_MARKUP = re.compile(r"\*+|`+|~~|__|^\s*#{1,6}\s+|^\s*>\s+|</?[a-z][^<>]{0,40}>", re.MULTILINE)
_BULLET = re.compile(r"^\s*(?:[-*•·]|\(?\d{1,2}[.)]|\(?[a-e][.)])\s+", re.MULTILINE)
_LIST = re.compile(r":\s*\n+((?:\s*(?:[-*•·]|\(?\d{1,2}[.)]|\(?[a-e][.)])\s+[^\n]*\n?)+)")
_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+|\n+|(?<=[a-z]{2})[.](?=[A-Z])|;\s+")
_ABBREVIATION = re.compile(r"\b(mr|mrs|ms|dr|e\.g|i\.e|etc|no|approx|vs|st|jr)\.\s", re.IGNORECASE)
_SYMBOLS = re.compile(r"[^\w\s.,:;?!$€£%#@&'/()+<>=\-\"]+")
_SPACE = re.compile(r"\s+")
_EDGES = " .!?,;:-\"'()/"


@dataclass(frozen=True, slots=True)
class Sentence:
    """One sentence: normalised words separated by single spaces, and whether it ends as a question."""

    text: str
    question: bool


@lru_cache(maxsize=4096)
def sentences(message: str) -> tuple[Sentence, ...]:
    """The sentences of a message, in order; empty ones left out."""
    text = message[:LONGEST].translate(_PLAIN)
    text = _LIST.sub(_joined_list, text + "\n")
    text = _BULLET.sub("", _MARKUP.sub("", text))
    text = _ABBREVIATION.sub(lambda found: f"{found[1]} ", text)
    found = []
    for part in _END.split(text):
        words = normalised(part)[:LONGEST_SENTENCE]
        if words:
            found.append(Sentence(words, "?" in part.rstrip()[-3:]))
    return tuple(found[:MOST_SENTENCES])


def normalised(text: str) -> str:
    """``text`` in lower case, contractions spelled out, commas and colons as words, other marks gone at the edges."""
    text = _SYMBOLS.sub(" ", text.translate(_PLAIN).lower())
    for pattern, replacement in _CONTRACTIONS:
        text = pattern.sub(replacement, text)
    text = re.sub(r"(?<!\d),|,(?!\d{3}\b)", " , ", text)
    text = re.sub(r":(?!\d\d)|[\"()]| - |--+", " : ", text)
    return _SPACE.sub(" ", text).strip(_EDGES)


def _joined_list(found: re.Match[str]) -> str:
    items = [_BULLET.sub("", line).strip() for line in found[1].splitlines() if line.strip()]
    question = "?" if items and items[-1].endswith("?") else "."
    return f": {', '.join(item.rstrip('.;,?') for item in items)}{question}\n"
