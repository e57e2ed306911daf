"""Answers to yes/no questions about a story, and scores of attempts to explain it, by keywords."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from environments.gyms._shared.questions import NEGATED, pattern, plain
from environments.gyms.turtle.stories import Criterion, Story, Truth, matches

_REACH = 3
"""Words before a keyword in which a negation takes it back."""
_WORD = re.compile(r"[\w'-]+")
_BESIDES = 5
"""Words that a question may have besides what it is about; more are a list, of which a Yes tells nothing."""
_COMMON = frozenset(
    """a an the in on of to from at by for with and but or so as it its is was were be been are am has have had do does
    did can could will would may might must that this these those which who whom what when where why how there here they
    them their he him his she her i you your one someone somebody something anyone anybody anything people person man
    woman thing things reason cause part play because if than then only really true case story important matter found
    about any some other into out up down more very also""".split()  # noqa: SIM905
)


def answer(story: Story, question: str) -> Truth:
    """Yes, No or Maybe; Maybe where the facts do not tell, and for negated questions."""
    text = plain(question)
    if NEGATED.search(text):
        return "Maybe"
    return _about_hidden(story, text) or _about_points(story, text) or _about_facts(story, text)


def asked_about(criterion: Criterion, question: str, surface: str) -> bool:
    """Whether ``question`` (answered with Yes) has found out the point of ``criterion``.

    It has to name the true value of a hidden slot and no other, or, where there is none, have a keyword of the point
    that the surface does not have; and it may not be a list of things.
    """
    text = plain(question)
    if criterion.told:
        named, others = pattern(criterion.told).search(text), pattern(criterion.rivals).search(text)
        return named is not None and others is None and not _lists(text, [criterion.told], surface)
    told = matches(criterion.groups, _affirmed(surface))
    found = any(now and not before for now, before in zip(matches(criterion.groups, text), told, strict=True))
    return found and not _lists(text, criterion.groups, surface)


def _lists(text: str, groups: Sequence[Sequence[str]], surface: str) -> bool:
    """Whether ``text`` names more than :data:`_BESIDES` things besides those of ``groups`` and of the ``surface``."""
    rest = pattern([word for group in groups for word in group]).sub(" ", text)
    known = {*_WORD.findall(plain(surface)), *_COMMON}
    return len({word for word in _WORD.findall(rest) if word not in known}) > _BESIDES


def _about_hidden(story: Story, text: str) -> Truth | None:
    """Whether the text names the true value of a hidden slot, or another one."""
    right = any(pattern(aliases).search(text) for aliases in story.found.values())
    wrong = any(pattern(aliases).search(text) for values in story.excluded.values() for aliases in values)
    if right and wrong:
        return "Yes" if re.search(r"\bor\b", text) else "Maybe"
    return "Yes" if right else "No" if wrong else None


def _about_points(story: Story, text: str) -> Truth | None:
    """Yes where the text says all of a point that has no hidden slot."""
    points = [criterion for criterion in story.criteria if not criterion.told]
    return "Yes" if any(score(point, text, story.surface) for point in points) else None


def _about_facts(story: Story, text: str) -> Truth:
    """The answer of the facts that say most about the text; Maybe where two of them disagree."""
    fitting = [fact for fact in story.facts if all(matches(fact.groups, text))]
    if not fitting:
        return "Maybe"
    most = max(len(fact.groups) for fact in fitting)
    truths = {fact.truth for fact in fitting if len(fact.groups) == most}
    return truths.pop() if len(truths) == 1 else "Maybe"


def score(criterion: Criterion, text: str, surface: str) -> float:
    """1 where every group of keywords stands in one sentence of ``text``, else 0.

    Groups that the ``surface`` has too earn nothing alone: repeating what was told explains nothing. Neither does
    naming several values of a hidden slot.
    """
    if criterion.rivals and pattern(criterion.rivals).search(_affirmed(text)):
        return 0.0
    told = matches(criterion.groups, _affirmed(surface))
    return float(any(_says(criterion, _affirmed(sentence), told) for sentence in re.split(r"[.;!?]", text)))


def _says(criterion: Criterion, sentence: str, told: Sequence[bool]) -> bool:
    found = matches(criterion.groups, sentence)
    return all(found) and not all(told)


def _affirmed(text: str) -> str:
    """``text`` without the words that a negation takes back; the negation itself stays."""
    return ". ".join(" ".join(_clause(clause)) for clause in re.split(r"[.;!?,]|\bbut\b", plain(text)))


def _clause(clause: str) -> Iterator[str]:
    left = 0
    for word in _WORD.findall(clause):
        if NEGATED.fullmatch(word) or word.endswith("n't"):
            left = _REACH
            yield word
        elif left:
            left -= 1
        else:
            yield word
