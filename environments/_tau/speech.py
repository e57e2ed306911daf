"""A second-person instruction as its addressee would say it: "You want the agent to cancel" is "I want you to cancel".

English only, by rules over words. A sentence comes out in one of these ways::

    You want to know your balance.            I want to know my balance.
    Ask the agent to refund you.              Please refund me.
    Insist that you are a silver member.      I am a silver member.
    Cancel order #W1 because ordered by mistake.     Please cancel order #W1 because I ordered it by mistake.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_CLERK = r"(?<!another )(?<!human )(?<!third )(?:the |an? |your )?(?:customer )?(?:service |support )?agent"
_OBJECT_AFTER = re.compile(
    r"asks?|asked|tells?|told|gives?|gave|lets?|help(?:s|ed)?|allows?|to|for|with|of|by|from|at|refunds?|compensate"
    r"|provides?|saves?|sends?|charge[sd]?|between|reach|inform|shows?|offer(?:s|ed)?|upsets|makes|made|costs?|around"
    r"|behind|transfer|upgrade|bothers|about|caused"
)
"""Verbs and prepositions after which "you" is the object."""
_OWN = re.compile(
    r"\byou (?=(?:name|zip(?: code)?|e-?mail|mind|user id|reservation|skateboard|account|profile)\b)", re.I
)
_PERSON = {"your": "my", "yours": "mine", "yourself": "myself"}
_HAVE = re.compile(r"\b(you|i)('re|'ve|'d|'ll|'m)(?=\W|$)", re.I)
_LONG = {"'re": " are", "'ve": " have", "'d": " would", "'ll": " will", "'m": " am"}
_NO_OBJECT = re.compile(r"\s+(?:can|could|will|would|do|did|don't|have|had|are|were|want|need|just|should|might|may)\b")
_ELIDED = re.compile(
    r"\b(and|but|or|though) (also )?are (?=(?:also )?(?:willing|ok|okay|fine|happy|unhappy|upset|not|looking"
    r"|contacting|"
    r"frustrated|in|very|an?|sure|unsure|disappointed|emotional|flexible|okay|now|ready|going)\b)"
)
_TYPOS = [
    (r"(?i)\byou name\b", "your name"),
    (r"\bYour received\b", "You received"),
    (r"\bchange you mind\b", "change your mind"),
    (r"\bwanna\b", "want to"),
    (r"\bwan to\b", "want to"),
    (r"\bdo't\b", "don't"),
    (r"\bwant to want to\b", "want to"),
    (r"\b(upto|up to)\b", "up to"),
    (r"\bto to\b", "to"),
    (r"You do not want the (?=\s*You )", ""),
    (r"\bwhen is (your .*?) is arriving", r"when \1 is arriving"),
    (
        r"\byou (?:are|become|would be) angry(?: and| but)(?: swear for a few times,? ?(?:and|then)?)? "
        r"(?=prefer|agree|asks?\b)",
        "you ",
    ),
    (r"\byou (?:are|become|would be) angry and ", ""),
    (r"\bYou'd say ordered by mistake if asked", "You ordered it by mistake"),
    (r"\btell that the you've\b", "you tell them that you have"),
    ("(?<=, )try to (?=exchange|return|cancel|modify)", "you would like to "),
    (r"\bAlso if the agent can help you (?=[a-z]+ )", "You also want to "),
    (r"\bYou also like to\b", "You would also like to"),
    (r"(?<=[.] )Would want\b", "You would want"),
    (r"In the middle of [^,.]*, you\b", "You"),
    (r"\bso insist (?:persistently )?on\b", "so you insist on"),
    (r"\byou asks? for (?:a )?human (\w+)(?: for help)?", r"you want to talk to a human \1"),
    (r"\btransfer to a human\b", "transfer you to a human"),
    (r",? (?:and )?be (?:insistent|persistent|adamant)(?: about it)?(?=[.,]| and|\n|$)", ""),
    (",? and don't provide more information than necessary| - do not offer to do this on your own", ""),
    (r"\bdo not say yes,? (?:because|since) ", ""),
    (r"\bbut don't remember\b", "but you don't remember"),
    ("Halfway [^,]*, abruptly mention that (.*?) by saying that ", r"\1: "),
    (rf"(?<=[a-z], )ask {_CLERK} to\b|(?<= and )ask {_CLERK} to\b", "please"),
    (rf"(?<=[a-z], )ask {_CLERK} about\b", "you would like to know about"),
    (r"\ba mistake and provide (\S+?)(?=[.,]|$)", r"a mistake, it is \1"),
    (r"\.\.\.(?=\s|$)", "."),
    (r"\s+", " "),
]
"""Slips of the authors of instructions, and what they meant."""
_MEANT = [(re.compile(slip), right) for slip, right in _TYPOS]


def tidied(text: str) -> str:
    """The instruction without slips of its authors that would be heard."""
    for pattern, right in _MEANT:
        text = pattern.sub(right, text)
    return _OWN.sub("your ", text).strip()


def first_person(text: str) -> str:
    """``text`` said by the one whom it addresses, and to the agent instead of about it."""
    text = _HAVE.sub(lambda found: found[1] + _LONG[found[2].lower()], text)
    text = _to_the_agent(text)
    text = re.sub(r"\b(are|were|have|do|did|would|can|could|should|will|had) you\b", _inverted, text, flags=re.I)
    words, said = re.split(r"(\W+)", text), []
    for at, word in enumerate(words):
        said.append(_turned(word, at, words))
    return _agreeing("".join(said)).replace(_YOU, "you").replace(_YOUR, "your")


_ALSO = re.compile(r"(\0they\0[^.,]*\b(?:or|and)) (ask|say|give|tell|charge|provide|refuse|offer)s\b")
_YOU, _YOUR = "\0they\0", "\0their\0"
"""The agent, until the user's own "you" has become "I"."""
_BASE = {"is": "are", "has": "have", "does": "do", "was": "were", "says": "say", "goes": "go", "doesn't": "don't"}


def _to_the_agent(text: str) -> str:
    """The agent as "you", with the verb that goes with it."""

    def agreeing(found: re.Match[str]) -> str:
        verb = found["verb"]
        if verb is None:
            return _YOU
        base = _BASE.get(verb, re.sub(r"ies$", "y", verb) if verb.endswith("ies") else re.sub(r"(?<=[^s])s$", "", verb))
        if verb in ("refuses", "chooses", "uses", "proposes", "processes"):
            base = verb.removesuffix("s") if verb != "processes" else "process"
        return f"{_YOU}{found['adverb'] or ''} {base}"

    verb = (
        r"(?P<adverb> (?:finally|explicitly|also|still|only|just|really))? (?P<verb>is|has|does|was|doesn't"
        r"|[a-z]{2,}s)\b"
    )
    text = re.sub(rf"\b{_CLERK}'s\b", _YOUR, text, flags=re.I)
    text = re.sub(rf"\b{_CLERK}(?! that\b)(?:{verb})?\b", agreeing, text, flags=re.I)
    return _ALSO.sub(r"\1 \2", text)


def _inverted(found: re.Match[str]) -> str:
    verb = found[1]
    return {"are": "am", "were": "was", "Are": "Am", "Were": "Was"}.get(verb, verb) + " I"


def _turned(word: str, at: int, words: list[str]) -> str:
    low = word.lower()
    if low in _PERSON:
        return _like(word, _PERSON[low], at == 0)
    if low != "you" or "\0" in "".join(words[max(0, at - 1) : at]):
        return word
    rest = "".join(words[at + 1 : at + 4])
    before = words[at - 2].lower() if at > 1 and words[at - 1].isspace() else ""
    if _OBJECT_AFTER.fullmatch(before) and not _NO_OBJECT.match(rest):
        return "me"
    return "I"


def _like(word: str, other: str, first: bool) -> str:
    return other.capitalize() if word[0].isupper() and first else other


def _agreeing(text: str) -> str:
    """ "I are" and "I were" put right, also where the subject stands before "and"."""
    text = re.sub(r"\bI(,? (?:also|just|now|really|still|currently|then|only))? are\b", r"I\1 am", text)
    text = re.sub(r"\bI(,? (?:also|just|now|really|still))? were\b", r"I\1 was", text)
    return _ELIDED.sub(lambda found: f"{found[1]} {found[2] or ''}am ", text) if re.search(r"\bI\b", text) else text


# Orders to say or do something, as what is said.

_ADVERB = r"(?:explicitly |persistently |also |then |finally |initially |first |briefly |politely |just )*"
_SAYING = re.compile(
    rf"^{_ADVERB}(?:(?:say|mention|insist|emphasi[sz]e|complain|state|claim|explain|admit|argue|add|be insistent"
    rf"|be adamant)"
    rf"(?: to {_CLERK})?|(?:tell|remind|inform) (?:{_CLERK}|them))(?: to {_CLERK})? (?:that )?(?!to |on |upon "
    rf"|persistently on )(?=\S)",
    re.I,
)
_ASKING = re.compile(rf"^{_ADVERB}(?:ask|request|get|tell) {_CLERK} {_ADVERB}to ", re.I)
_ASKING_ABOUT = re.compile(rf"^{_ADVERB}(?:ask|inquire)(?: {_CLERK})? (?=about|if|whether|wh|how)", re.I)
_ASKING_FOR = re.compile(rf"^{_ADVERB}(?:ask|request)(?: {_CLERK})? {_ADVERB}for ", re.I)
_TRYING = re.compile(rf"^{_ADVERB}(?:try|ask|attempt)(?: your best)? to ", re.I)
_GIVING = re.compile(r"^(?:provide|give|say(?: that)?(?: it is)?|mention) (\S*\d\S*)(?: first)?\b", re.I)
_QUOTED = re.compile(r"^(?:respond|reply|answer|say)(?: exactly)?(?: with)? ['\"](.+?)['\"]", re.I)
_SAID_BY_YOU = re.compile(
    r"^you(?: will|'d|'ll| would| should)? (?=(?:first |then )?(?:say|mention|tell|insist that|inquire|ask"
    r"|provide|admit)\b)",
    re.I,
)
_BECAUSE = (
    (re.compile(r"\bbecause ordered by mistake\b"), "because you ordered it by mistake"),
    (re.compile(r"\bbecause no longer needed\b"), "because it is no longer needed"),
    (re.compile(r"^(?:express|voice) \w+[^.]*? and that ", re.I), ""),
)
_DEEDS = (
    "cancel|return|exchange|modify|change|use|book|add|remove|upgrade|downgrade|refund|check|find|switch|update|pay"
    "|proceed|send|keep|give|buy|drop|choose|select|pick|look|make|transfer|see|do|go|ensure"
)
_DEED = re.compile(rf"^(?:(?:{_ADVERB}|only )(?:{_DEEDS})\b|do not |don't |never )", re.I)
_BUT = re.compile(r"^(?:but|well|and|so),? (?!if\b)", re.I)
_FIRST = re.compile(r"^(?:(?:first|then|also|finally|lastly|and|so|but|next|at the end)\b,? ?)+", re.I)


def spoken(sentence: str) -> str:
    """What its addressee says when following one sentence of an instruction."""
    sentence = _reasoned(sentence.strip().rstrip(" .;,"))
    sentence = _BUT.sub("", sentence)
    lead = _FIRST.match(sentence)
    head, rest = (lead[0], sentence[lead.end() :]) if lead and len(lead[0]) < len(sentence) else ("", sentence)
    said = _said(rest)
    if head and said.startswith("Please "):
        said = "please " + said.removeprefix("Please ")
    elif head and not re.match(r"(I|I'[a-z]+)\b|[A-Z]{2,}|#", said):
        said = said[0].lower() + said[1:] if said[:1].isupper() and not _proper(said) else said
    said = f"{head}{said}".strip()
    return f"{said[:1].upper()}{said[1:]}{'' if said.endswith(('?', '!', '.')) else '.'}"


def _proper(text: str) -> bool:
    return re.match(r"[A-Z][a-z]+ [A-Z]|PayPal|Visa|May\b", text) is not None


def _reasoned(sentence: str) -> str:
    for pattern, right in _BECAUSE:
        sentence = pattern.sub(right, sentence)
    return sentence


_WAYS: tuple[tuple[re.Pattern[str], Callable[[str], str]], ...] = (
    (_ASKING_ABOUT, lambda rest: f"I would like to know {rest}"),
    (_ASKING, lambda rest: f"Please {rest}"),
    (_ASKING_FOR, lambda rest: f"I would like {re.sub(r'^getting', 'to get', rest)}"),
    (_SAYING, lambda rest: rest.replace(" and that I ", " and I ").replace(" and that my ", " and my ")),
    (_TRYING, lambda rest: f"I would like to {rest}"),
)


def _said(sentence: str) -> str:
    if quoted := _QUOTED.match(sentence):
        return quoted[1]
    sentence = _SAID_BY_YOU.sub("", sentence)
    if given := _GIVING.match(sentence):
        return f"It is {given[1].rstrip('.,')}"
    for pattern, way in _WAYS:
        if (found := pattern.match(sentence)) and not re.match(r"(?:on|upon)\b", sentence[found.end() :]):
            return way(first_person(sentence[found.end() :]))
    said = first_person(sentence)
    if re.match(r"insist (?:\w+ )?(?:on|upon|to) ", said, re.I):
        return f"I {said[0].lower()}{said[1:]}"
    if _DEED.match(said):
        return f"Please {said[0].lower()}{said[1:]}"
    return said
