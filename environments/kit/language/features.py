"""What of a message a judgement rests on: names of features, for each sentence and for each fact.

Features are texts such as ``"b could you"`` (two words in a row), ``"m request?"`` (a mood of the general English in a
question), ``"w refuse"`` (the rules read a refusal). :mod:`environments.kit.language.model` holds their weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from environments.kit.language.lexicon import Lexicon, Mention, valueless
from environments.kit.language.rules import Rules
from environments.kit.language.text import Sentence

_ENDINGS = re.compile(r"(?<=[a-z]{3})(?:ings?|ed|es|s|e|ly|ation|ations)$")
_WINDOW = 3


@dataclass(frozen=True, slots=True)
class Place:
    """A sentence among the others of its message."""

    sentences: Sequence[Sentence]
    at: int

    @property
    def sentence(self) -> Sentence:
        return self.sentences[self.at]

    def neighbours(self) -> Iterator[tuple[str, Sentence]]:
        """The sentences ``before`` and ``after`` it, where there are any."""
        for where, name in ((self.at - 1, "before"), (self.at + 1, "after")):
            if 0 <= where < len(self.sentences):
                yield name, self.sentences[where]

    def marks(self) -> Iterator[str]:
        """Where the sentence stands and what surrounds it."""
        last = len(self.sentences) - 1
        yield f"p {'only' if last == 0 else {0: 'first', last: 'last'}.get(self.at, 'mid')}"
        for name, other in self.neighbours():
            yield f"{name} {'?' if other.question else '.'}"


def stem(word: str) -> str:
    """A word without its most frequent endings."""
    return _ENDINGS.sub("", word) if word.islower() else word


def grams(words: Sequence[str], mark: str, longest: int = 3) -> Iterator[str]:
    """Runs of up to ``longest`` words, the sentence's edges included in those of two and more."""
    yield from (f"{mark}1 {word}" for word in words)
    edged = ["^", *words, "$"]
    for size in range(2, longest + 1):
        yield from (f"{mark}{size} {' '.join(edged[i : i + size])}" for i in range(len(edged) - size + 1))


@dataclass(frozen=True, slots=True)
class Read:
    """A sentence with what the words and rules say of it."""

    place: Place
    mentions: Sequence[Mention]
    marks: frozenset[str]
    """What the rules make of it."""
    company: frozenset[str]
    """What the rules make of the other sentences of the message."""
    moods: Sequence[str]
    plain: Sequence[str]
    masked: Sequence[str]
    """Its words without values, and with facts and deeds masked too."""
    stemmed: Sequence[str]
    """Runs of up to two stems of the plain words."""
    elsewhere: frozenset[str]
    """Features of the sentence for facts that it does not name."""

    @property
    def ask(self) -> str:
        return "?" if self.place.sentence.question else "."


def read(lexicon: Lexicon, rules: Rules, sentences: Sequence[Sentence], wish: str) -> list[Read]:
    """All sentences of a message."""
    marks = [rules.marks(sentence, wish) for sentence in sentences]
    found = []
    for at, sentence in enumerate(sentences):
        company = frozenset(mark.split(":")[0] for i, other in enumerate(marks) if i != at for mark in other)
        text, mentions = sentence.text, lexicon.mentions(sentence.text)
        plain, masked = valueless(text).split(), lexicon.masked(text, wish, mentions).split()
        stemmed = tuple(grams([stem(word) for word in plain], "s", 2))
        moods = tuple(lexicon.moods_of(text))
        elsewhere = frozenset(_moody(masked, moods, "N", "?" if sentence.question else ".", 2))
        place = Place(sentences, at)
        found.append(Read(place, mentions, marks[at], company, moods, plain, masked, stemmed, elsewhere))
    return found


def act_features(lexicon: Lexicon, one: Read, wish: str) -> set[str]:
    """Features of one sentence for what it does."""
    ask, masked = one.ask, one.masked
    found = {"bias", f"q{ask}", *one.place.marks()}
    found.update(grams(one.plain, "w"))
    found.update(grams(masked, "m"))
    stems = [stem(word) for word in masked]
    found.update(grams(stems, "s", 2))
    found.update(f"k1 {first} {third}" for first, third in zip(stems, stems[2:], strict=False))
    found.update(f"q{ask} {word}" for word in {*masked[:2], *(w for w in masked if w.isupper())})
    found.update(f"g {mood}{ask}" for mood in one.moods)
    found.update(f"r {'ask' if mark.startswith('ask:') else mark}" for mark in one.marks or ("none",))
    found.update(f"x {mark}" for mark in one.company)
    found.update(wish_marks(lexicon, one, wish))
    found.update(f"v {wish} {stem(word)}" for word in one.plain)
    size = len(one.plain)
    found.add(f"n {min(size, 4) if size < 5 else 'mid' if size < 12 else 'long'}")
    return found


def wish_marks(lexicon: Lexicon, one: Read, wish: str) -> Iterator[str]:
    """What a sentence says of the wish: that it is answered, stands against something, has been done."""
    for name, table in (("answers", lexicon.answers), ("against", lexicon.against), ("done", lexicon.done)):
        if lexicon.of_wish(table, one.place.sentence.text, wish):
            yield f"h {name}{one.ask}"
    yield f"h {'tells' if wish in lexicon.answers else 'acts'}"


def fact_features(lexicon: Lexicon, one: Read, wish: str, name: str) -> set[str]:
    """Features of one sentence for whether it asks for the fact ``name``, or to use the tool of that name."""
    words = lexicon.facts.get(name) or lexicon.tools[name]
    text, ask = one.place.sentence.text, one.ask
    mentions = [mention for mention in one.mentions if mention.name == name]
    found = {"bias", f"q{ask}", f"named {bool(mentions)}{ask}", f"f {name}", f"y {wish} {name}", *one.place.marks()}
    found.add(f"r {f'ask:{name}' in one.marks} {any(mark.startswith('ask:') for mark in one.marks)}")
    found.update(f"r {mark}" for mark in one.marks if not mark.startswith("ask:"))
    if lexicon.which(words, text):
        found.add(f"which{ask}")
    if any(not lexicon.value.match(text[mention.end :].lstrip(" :#")) for mention in mentions):
        found.add(f"open{ask}")
    if mentions:
        masked = lexicon.masked(text, wish, one.mentions, name).split()
        found.update(_moody(masked, one.moods, "T", ask, 3))
        for at in (at for at, word in enumerate(masked) if word == "THIS"):
            before, after = masked[max(0, at - _WINDOW) : at], masked[at + 1 : at + 1 + _WINDOW]
            found.update(f"a-{len(before) - i} {w}" for i, w in enumerate(before))
            found.update(f"a+{i} {w}" for i, w in enumerate(after))
            found.update(f"A- {w}" for w in masked[:at])
            found.update(f"A+ {w}" for w in masked[at + 1 :])
    else:
        found |= one.elsewhere
    found.update(f"l {name} {gram}" for gram in one.stemmed)
    found.update(f"c {name}" for name, other in one.place.neighbours() if words.named.search(other.text))
    found.update(f"x {mark}" for mark in one.company)
    if name not in lexicon.tools:
        return found
    sort = name.split("_")[0]
    return {f"{sort} {mark}" for mark in found} | {f"tool {mark}" for mark in found if mark[:2] != "l "}


def _moody(masked: Sequence[str], moods: Sequence[str], tag: str, ask: str, longest: int) -> Iterator[str]:
    """Runs of words and moods, marked with whether the fact is named."""
    yield from (f"{tag}{gram}" for gram in grams(masked, "m", longest))
    yield from (f"{tag}g {mood}{ask}" for mood in moods)


def in_question(lexicon: Lexicon, found: Sequence[Read]) -> list[str]:
    """Names that a message may ask for: all facts, and the tools whose thing it mentions."""
    mentioned = {mention.name for one in found for mention in one.mentions}
    return [*lexicon.facts, *(name for name in lexicon.tools if name in mentioned)]


# A message as the network reads it: words with what the domain's words and the rules say of them.
#
# ::
#
#     "I've cancelled order K7. Anything else?"
#         →  i have cancelled order [value] [.] anything else [?]
#                   DEEDED    FACT  VALUE   "r done" …         "r offer" "g offer?" …
#
# A sentence's last token stands for the whole of it and bears its marks. Names of facts are not masked: the network
# knows the words, and which of them name a fact is told for each fact apart.

_WORD = re.compile(r"\S+")
LONGEST = 300
"""Words of a message from which on no further sentence is read; no customer reads more."""
VALUE, MONEY, END, QUESTION = "[value]", "[money]", "[.]", "[?]"


@dataclass(frozen=True, slots=True)
class Tokens:
    """The words of one message, sentence after sentence."""

    words: Sequence[str]
    marks: Sequence[Sequence[str]]
    """Of each word."""
    mentions: Mapping[str, Sequence[int]]
    """For each fact or tool that is named, where: indices of words, and of the ends of sentences that ask for it."""


def tokens(lexicon: Lexicon, found: Sequence[Read], wish: str) -> Tokens:
    """All words of a message that has been read."""
    words: list[str] = []
    marks: list[list[str]] = []
    mentions: dict[str, set[int]] = {}
    for one in found:
        if len(words) > LONGEST:
            break
        spans = [(hit.start(), hit.end(), hit[0]) for hit in _WORD.finditer(one.place.sentence.text)]
        start = len(words)
        words += [_value_in(word) or word for _, _, word in spans] + [QUESTION if one.ask == "?" else END]
        said = {f"r {mark.split(':')[0]}" for mark in one.marks}
        whole = {f"g {mood}{one.ask}" for mood in one.moods} | said | set(wish_marks(lexicon, one, wish))
        marks += [*_marked(lexicon, one, wish, spans), sorted(whole)]
        for mention in one.mentions:
            places = {start + at for at, (a, b, _) in enumerate(spans) if mention.start < b and mention.end > a}
            mentions.setdefault(mention.name, set()).update(places)
        for mark in one.marks:
            if mark.startswith("ask:"):
                mentions.setdefault(mark[4:], set()).add(len(words) - 1)
    return Tokens(words, marks, {name: sorted(places) for name, places in mentions.items()})


def _value_in(word: str) -> str:
    """The token that stands for a word that is a value; empty for another."""
    plain = valueless(word)
    return "" if plain == word else MONEY if "MONEY" in plain else VALUE


def _marked(lexicon: Lexicon, one: Read, wish: str, spans: Sequence[tuple[int, int, str]]) -> Iterator[list[str]]:
    """For each word the marks of what it is part of."""
    text = one.place.sentence.text
    patterns = {
        "DEED": lexicon.deeds.get(wish),
        "DEEDED": lexicon.done.get(wish),
        "OTHER": lexicon.any_deed,
        "OTHERED": lexicon.any_done,
    }
    parts = [
        (m.start(), m.end(), mark) for mark, pattern in patterns.items() if pattern for m in pattern.finditer(text)
    ]
    parts += [(m.start, m.end, "TOPIC" if m.name in lexicon.tools else "FACT") for m in one.mentions]
    for start, end, word in spans:
        own = {_value_in(word).strip("[]").upper()} - {""}
        yield sorted(own | {mark for a, b, mark in parts if a < end and b > start})
