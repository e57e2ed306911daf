"""A free-text instruction of tau-bench or tau2-bench, taken apart: who somebody is, what it wants, what it answers.

::

    You are Ada Abel in 19122.                        facts    name, zip
    You want to return the lamp of order #W12.        wishes   "I want to return the lamp.", and all of it when asked
    You prefer PayPal.                                asides   told when somebody asks for what they are about
    If the agent asks for confirmation, keep it.      replies  said when it comes to that
    You are shy and brief. Be polite.                 manners  left out

Published instructions are the work of many hands; what fits none of the patterns is an aside.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import yaml

from mua.utils.strict_json import read_file

# What can be told from its form in an instruction: names, numbers, addresses; and a sentence without them.

Facts: TypeAlias = Mapping[str, Sequence[str]]
"""Values by fact, in the order of the text, each once."""
_METHOD = r"(?:credit_card|gift_card|paypal|certificate)_\d+"
_MONTH = "January|February|March|April|May|June|July|August|September|October|November|December"
_FORMS: Mapping[str, str] = {
    "payment": rf"\b{_METHOD}\b",
    "user_id": rf"\b(?!{_METHOD})[a-z]+(?:_[a-z]+)+_\d{{2,6}}\b",
    "email": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)*\.[A-Za-z]+",
    "order": r"#?\bW\d{3,}\b|#\w+",
    "zip": r"(?<![\w#$.,-])\d{5}(?![\w-])",
    "item": r"\b\d{10}\b",
    "phone": r"\b\d{3}-\d{3}-\d{4}\b",
    "flight": r"\bHAT\d{3}\b",
    "birth_date": r"\b\d{4}-\d{2}-\d{2}\b",
    "date": rf"\b(?:{_MONTH}) \d{{1,2}}\b",
    "address": (
        r"\b\d{1,5} (?:[A-Z][a-z]+ )?(?:Street|St|Drive|Avenue|Ave|Road|Lane|Highway|Boulevard|Way)\b"
        r"(?:, (?:Suite \d+|[A-Z][a-z]+(?: [A-Z][a-z]+)*|[A-Z]{2}|\d{5})\b)*"
    ),
    "card": r"(?<=ending in )\d{4}\b|(?<=your )\d{4}(?= card)",
    "passengers": r"(?<=passenger )[A-Z][a-z]+\b(?: [A-Z][a-z]+\b)?",
    "name": r"(?:(?<=You are )|(?<=You're )|(?<=name is )|(?<=called ))[A-Z][a-z]+\b(?: [A-Z][a-z]+\b)?",
}
_COMPILED = {name: re.compile(form) for name, form in _FORMS.items()}
_RESERVATION = re.compile(r"\b(?=[A-Z\d]*[A-Z])[A-Z\d]{6}\b")
_NO_NAME = frozenset({"French"})


def facts_in(text: str, *, reservations: bool = False) -> Facts:
    """The values that ``text`` holds; ``reservations``: as in"
    " :func:`environments._tau.instruction.read_instruction`."""
    found = {name: pattern.findall(text) for name, pattern in _COMPILED.items()}
    if reservations:
        numbers = [number for number in _RESERVATION.findall(text) if number not in found["flight"]]
        found |= {"reservation": numbers, "order": []}
    found["name"] = [name for name in found["name"] if name not in _NO_NAME]
    return {name: tuple(dict.fromkeys(values)) for name, values in found.items() if values}


_ID = rf"(?:#?W\d{{3,}}|#\w+|(?=[A-Z\d]*[A-Z])[A-Z\d]{{6}}|{_METHOD}|[a-z]+(?:_[a-z]+)+_\d+)(?![\w])"
_LISTED = rf"{_ID}(?:(?:,| and|, and) {_ID})*"
_VEILS: tuple[tuple[str, str], ...] = (
    (r"\b(user id) [a-z]+(?:_[a-z]+)+_\d+", r"\1"),
    (rf"\s*\((?:[^()]*?\b)?{_LISTED}[^()]*\)", ""),
    (r",? ?\(?(?:with )?(?:DOB|date of birth|born)(?: is| on)? \d{4}-\d\d-\d\d\)?", ""),
    (
        rf"\b(order|reservation|booking|flight|confirmation)s?(?: (?:number|ID|IDs|id|ids|no\.?))?(?: is| are"
        rf"|:)? {_ID},? and {_ID}",
        r"\1s",
    ),
    (rf",? {_ID} and {_ID}", ""),
    (
        rf"\b(order|orders|reservation|reservations|booking|flight)(?: (?:number|ID|IDs|id|ids|no\.?))?(?: is"
        rf"|:)? {_LISTED}",
        r"\1",
    ),
    (rf"\b(my|the|this|that|another|new) {_ID}(?= order)", r"\1"),
    (rf"\b(my|the) {_METHOD}\b", r"\1 payment method"),
    (rf"\b{_METHOD}\b", "my other payment method"),
    (rf"\s*\b(?:in|from|of|for|with|under|on|within) {_LISTED}", ""),
    (rf"\b{_LISTED}(?= order)", "my"),
    (r"\b(?:product|item) \d{10}", "one item"),
    (r"\b\d{10}\b", "another one"),
    (r"\s*\bHAT\d{3}\b", ""),
    (rf"(?<!\w){_LISTED}", "my order"),
    (r" (?:card|credit card) ending in \d{4}", " card"),
    (r"(?<=my )\d{4} (?=card)", ""),
    (_FORMS["address"], "another address"),
    (rf" on (?:{_MONTH}) \d{{1,2}}(?!\d| to\b| and\b)", ""),
    (
        r"(?<=.{20}),? (?:because|since|as|due to)\b (?:of )?(?:i|it|its|they|the|my|a|there|we|you)\b.*?(?=[.]$|[.] )",
        "",
    ),
    (r",? (?:in|at) \d{5}\b|\s*\(\d{5}\)", ""),
)
_VEIL = tuple((re.compile(pattern), instead) for pattern, instead in _VEILS)
_BARE = re.compile(
    r"\b(cancel|return|change|modify|of|in|from|for|exchange|about|within|with|under) (orders?|reservations?"
    r"|bookings?)\b",
    re.I,
)


def veiled(text: str) -> str:
    """``text`` without numbers and ids, which are told when somebody asks for them."""
    for pattern, instead in _VEIL:
        text = pattern.sub(instead, text)
    text = _BARE.sub(r"\1 my \2", text)
    text = re.sub(r"\b(?:the|my) my\b", "my", text.replace("my order order", "my order"))
    return re.sub(r"\s+([.,;?!])", r"\1", re.sub(r"\s+", " ", text)).strip()


# A second-person instruction as its addressee would say it: "You want the agent to cancel" is "I want you to cancel".
#
# English only, by rules over words. A sentence comes out in one of these ways::
#
#     You want to know your balance.            I want to know my balance.
#     Ask the agent to refund you.              Please refund me.
#     Insist that you are a silver member.      I am a silver member.
#     Cancel order #W1 because ordered by mistake.     Please cancel order #W1 because I ordered it by mistake.

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
_SLIPS = yaml.safe_load(read_file(Path(__file__).with_name("slips.yaml")))
_MEANT = [(re.compile(slip.replace("<clerk>", _CLERK)), right) for slip, right in _SLIPS]


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


# Wishes that tau-bench's made instructions list by item: exchanges, modifications, returns, addresses, payments.
#
# ::
#
#     Return #W1 via paypal_1: Tea Kettle; Desk Lamp;
#     For #W2, exchange Tea Kettle {'material': 'glass'} to {'material': 'ceramic'}; via paypal_1.
#     For #W2, change address to {'order_id': '#W2', 'address1': ...} (same as #W1). For #W2, change payment to
# paypal_2.
#     Cancel order #W3 because no longer needed.

_START = re.compile(
    r"(?=\bReturn #\w+ via |\bFor #\w+, (?:exchange"
    r"|modify) [A-Z][\w -]* \{|\bFor #\w+, change (?:address|payment) to |\bCancel order #\w+ because )"
)
_RETURN = re.compile(r"Return (?P<order>#\w+) via (?P<via>\w+): (?P<items>(?:[A-Z][^;{]*(?:\{[^}]*\})?; ?)+)")
_SWAP = re.compile(
    r"For (?P<order>#\w+), (?P<verb>exchange|modify) "
    r"(?P<items>(?:[A-Z][\w -]* \{[^}]*\} to \{[^}]*\}(?:; ?|(?=[,.]|$)))+)(?:via (?P<via>\w+)\. ?)?"
)
_ADDRESS = re.compile(
    r"For (?P<order>#\w+), change address to (?:(?P<address>\{[^}]*\})(?: \(same as (?P<like>#\w+)\))?|same as"
    r" (?P<same>#\w+))\. ?"
)
_PAYMENT = re.compile(r"For (?P<order>#\w+), change payment to (?P<via>\w+)\. ?")
_CANCEL = re.compile(r"Cancel order (?P<order>#\w+) because (?P<reason>no longer needed|ordered by mistake)\.? ?")
_ITEM = re.compile(r"([A-Z][\w -]*?) ?(\{[^}]*\})?(?: to (\{[^}]*\}))?(?:;|$|(?=,))")
_OPTIONS = re.compile(r"\{'[^{}]*\}")
_REASONS = {"no longer needed": "It is no longer needed.", "ordered by mistake": "I ordered it by mistake."}
_METHODS = {"credit_card": "my credit card", "gift_card": "my gift card", "paypal": "my PayPal account"}


@dataclass(frozen=True, slots=True)
class Listed:
    """One entry of such a list."""

    opening: str
    text: str
    facts: Facts
    details: Mapping[str, str]


def listed_wishes(text: str) -> tuple[str, Sequence[Listed]]:
    """What remains of ``text``, and the wishes that stood in it in one of these forms."""
    rest, found = [], []
    for part in _START.split(text):
        for pattern, make in _MAKERS.items():
            if match := pattern.match(part):
                found.append(make(match))
                part = part[match.end() :]
                break
        rest.append(part)
    return _OPTIONS.sub(lambda braces: _traits(_options(braces[0])) or braces[0], " ".join(rest)), found


def _returned(found: re.Match[str]) -> Listed:
    items = [_worded(name, options) for name, options, _ in _items(found["items"])]
    names = _all([name for name, _, _ in _items(found["items"])])
    details = {
        "order": f"It is order {found['order']}.",
        "item": f"I want to return the {_all(items)}.",
        "payment": f"Please refund it to {_method(found['via'])}.",
    }
    opening = f"I want to return the {names}."
    return Listed(opening, _whole(opening, details), _facts(found), details)


def _swapped(found: re.Match[str]) -> Listed:
    verb, items = found["verb"], _items(found["items"])
    names = [f"the {name}" for name, _, _ in items]
    old = [_worded(name, old) if names.count(f"the {name}") > 1 else name for name, old, _ in items]
    swaps = [f"Instead of the {one} I would like {_instead(new)}." for one, (_, _, new) in zip(old, items, strict=True)]
    details = {
        "order": f"It is order {found['order']}.",
        "item": f"I want to {verb} {_all([f'the {_worded(name, old)}' for name, old, _ in items])}.",
        "wanted": " ".join(swaps),
    }
    if found["via"]:
        details["payment"] = f"Please use {_method(found['via'])}."
    opening = f"I want to {verb} {_all(names)}."
    return Listed(opening, _whole(opening, details), _facts(found), details)


def _addressed(found: re.Match[str]) -> Listed:
    like = found["like"] or found["same"]
    told = [_address(found["address"])] if found["address"] else []
    told += [f"the one of order {like}"] if like else []
    details = {"order": f"It is order {found['order']}.", "address": f"The new address is {', '.join(told)}."}
    opening = "I want to change the address of an order."
    return Listed(opening, _whole(opening, details), _facts(found), details)


def _paid(found: re.Match[str]) -> Listed:
    details = {"order": f"It is order {found['order']}.", "payment": f"Please change it to {_method(found['via'])}."}
    opening = "I want to change the payment method of an order."
    return Listed(opening, _whole(opening, details), _facts(found), details)


def _cancelled(found: re.Match[str]) -> Listed:
    details = {"order": f"It is order {found['order']}.", "reason": _REASONS[found["reason"]]}
    opening = "I want to cancel an order."
    return Listed(opening, _whole(opening, details), _facts(found), details)


_MAKERS: Mapping[re.Pattern[str], Callable[[re.Match[str]], Listed]] = {
    _RETURN: _returned,
    _SWAP: _swapped,
    _ADDRESS: _addressed,
    _PAYMENT: _paid,
    _CANCEL: _cancelled,
}


def _facts(found: re.Match[str]) -> Facts:
    groups = found.groupdict()
    return {"order": (found["order"],), **({"payment": (groups["via"],)} if groups.get("via") else {})}


def _whole(opening: str, details: Mapping[str, str]) -> str:
    told = [text for name, text in details.items() if name != "order"]
    return " ".join(told if "item" in details else [opening, *told])


def _items(text: str) -> list[tuple[str, Mapping[str, str], Mapping[str, str]]]:
    found = (match.groups() for match in _ITEM.finditer(text) if match[1].strip())
    return [(name.strip(), _options(old), _options(new)) for name, old, new in found]


def _options(text: str | None) -> Mapping[str, str]:
    try:
        value = ast.literal_eval(text or "{}")
    except (ValueError, SyntaxError):
        return {}
    return {str(key): str(one) for key, one in value.items()} if isinstance(value, dict) else {}


def _worded(name: str, options: Mapping[str, str]) -> str:
    return f"{name} ({_traits(options)})" if options else name


def _instead(options: Mapping[str, str]) -> str:
    return f"one with {_traits(options)}" if options else "another one just like it"


def _traits(options: Mapping[str, str]) -> str:
    return _all([f"{key} {value}" for key, value in options.items()])


def _all(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _address(text: str) -> str:
    keys = ("address1", "address2", "city", "state", "zip", "country")
    options = _options(text)
    return ", ".join(options[key] for key in keys if options.get(key))


def _method(name: str) -> str:
    kind = next((words for key, words in _METHODS.items() if name.startswith(key)), "my account")
    return f"{kind}, {name}"


Trigger = Literal["confirm", "refusal", "asked", "other"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """One thing that is wanted."""

    text: str
    """All of it, in the first person."""
    facts: Facts
    inquiry: bool = False
    """Whether it is to be told something."""
    opening: str = ""
    """It without particulars; empty: ``text`` without ids, cut to a length."""
    details: Mapping[str, str] = field(default_factory=dict)
    """Sentences by the fact they answer."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What is said when it comes to something."""

    trigger: Trigger
    about: str
    """The words of the condition."""
    text: str
    then: str = ""
    """The instruction's words for it."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """Everything that the user may say."""

    facts: Facts
    wishes: Sequence[Wanted]
    asides: Sequence[str]
    replies: Sequence[Reply]


def read_instruction(text: str, *, reservations: bool = False) -> Instruction:
    """``text`` taken apart; ``reservations``: six capitals and digits are the number of one."""
    facts = dict(facts_in(text, reservations=reservations))
    if "name" not in facts and "user_id" in facts:
        facts["name"] = (" ".join(part.capitalize() for part in facts["user_id"][0].split("_")[:2]),)
    plain, listed = listed_wishes(tidied(_unlabelled(text)))
    taken = _Taken(reservations)
    for sentence in _sentences(plain):
        taken.take(sentence)
    for reply in taken.replies:
        facts |= dict(_given(reply, facts)) if reply.trigger == "asked" else {}
    wishes = [Wanted(one.text, one.facts, opening=one.opening, details=one.details) for one in listed]
    if not (taken.wishes or wishes) and taken.asides:
        taken.wish(taken.asides.pop(0), inquiry=False)
    return Instruction(facts, taken.wishes + wishes, taken.asides, taken.replies)


class _Taken:
    """Sentences sorted into wishes, asides and replies, in order."""

    def __init__(self, reservations: bool) -> None:
        self.wishes: list[Wanted] = []
        self.asides: list[str] = []
        self.replies: list[Reply] = []
        self._reservations = reservations
        self._last = ""

    def take(self, sentence: str) -> None:
        """Put one sentence where it belongs; manners belong nowhere."""
        if reply := _reply(sentence):
            self._reply(reply)
        elif _is_manner(sentence):
            return
        elif _is_wish(sentence):
            self.wish(spoken(sentence), inquiry=_INQUIRY.search(sentence) is not None)
        else:
            self.asides.append(spoken(sentence))
            self._last = "aside"

    def _reply(self, reply: Reply) -> None:
        if reply.about == "so" and self.replies:
            before = self.replies.pop()
            reply = Reply(before.trigger, before.about, f"{before.text} {reply.text}", before.then)
        self.replies.append(reply)
        self._last = "reply"

    def wish(self, said: str, *, inquiry: bool) -> None:
        """A wish of its own, or more about the one before; what "it" stands for comes with it."""
        before = self.wishes[-1] if self.wishes else None
        refers = _REFERS.search(said) is not None
        if refers and self._last == "aside":
            said = f"{self.asides.pop()} {said}"
        elif before and self._last == "wish" and ((refers and not inquiry) or _repeats(before.text, said)):
            self.wishes.pop()
            said, inquiry = f"{before.text} {said}", before.inquiry and inquiry
        self.wishes.append(Wanted(said, facts_in(said, reservations=self._reservations), inquiry))
        self._last = "wish"


_REFERS = re.compile(
    r"^I (?:also |would )?(?:want|wish|need|like) to \w+ (?:it|them|the (?:\w+ ){0,2}one)\b|\bavailable for it\b"
    r"|\bthe (?:more|less) \w+ one\b"
)


def _repeats(before: str, said: str) -> bool:
    """Whether a wish says most of the one before again, with more to it."""
    words = [frozenset(re.findall(r"[a-z]{4,}", text.lower())) - _COMMON for text in (before, said)]
    return bool(words[0]) and len(words[0] & words[1]) >= 0.6 * len(words[0])


_COMMON = frozenset(("want", "also", "know", "with", "that", "this", "would", "like", "from"))


_LABEL = re.compile(
    r"^(Your character|Why you write|What you know|What you do not know|How you behave): ", re.MULTILINE
)
"""Of :mod:`environments._tau.folder`."""


def _unlabelled(text: str) -> str:
    """Paragraphs without their labels, without the character, one after the other."""
    parts = [part for part in text.split("\n\n") if not part.startswith("Your character: ")]
    return "\n".join(_LABEL.sub("", part) for part in parts)


_END = re.compile(r"(?<=[.!?;])(?<!i\.e\.)(?<!e\.g\.)(?<!a\.m\.)(?<!p\.m\.)[\"')]*\s+(?=[A-Z\"'(#])|\n+")
_ASIDE_IF = re.compile(r",? (?:but|and),? if\b(?=[^,.]*(?:asks|not|cannot|impossible|n't)[^,.]*, )")
_HIDES = re.compile(
    r"(?:which )?(?:but )?(?:and )?(?:you )?(?:do not|don't|won't|will not|prefer not to|would not)"
    r"(?: want to| like to)? (?:reveal|mention"
    r"|share)(?: it)?(?: in chat)?(?: for private reasons)?,? ?(?:but )?(?=it is\b|it's\b|is\b|should be)"
)
_SECRET = re.compile(
    r"\s*\((?:insist|say|mention) [^()]*\)|\s*\((?:[^()]*?,? ?but )?(?:you )?(?:do not|don't|won't|will not"
    r"|only) (?:want to )?(?:reveal|mention|provide|say|speak)[^()]*\)"
    r"|\s*\([^()]*\b(?:do not|don't) (?:want to )?(?:reveal|mention)[^()]*\)"
    r"|,? (?:and|but) you (?:do not|don't|would not) (?:want|like) to (?:reveal|mention|speak|share)[^.,;]*"
)
_WHO = re.compile(
    r"^(?:you are|you're|your name is|your user id is|your user id is|your id is|your email is|your zip code is"
    r"|you live in)\s+"
    r"(?:(?:an? [a-z ]+ (?:called|named) |user )?['\"]?(?:[A-Z][a-z]+\b|[a-z]+(?:_[a-z]+)+_\d+|[\w.]+@[\w.]+\w"
    r"|\d{5}\b)|in \d{5})",
    re.I,
)
_AFTER_WHO = re.compile(
    r"(?:,\s*(?:and\s+)?|\s+and\s+|;\s*)(?=you\s+(?!live|currently (?:live|reside)|reside|are (?:in|from)\b"
    r"|have (?:two|multiple|several) e-?mail|go by)"
    r"|(?:want|wish|need)\s+(?:to|the)\b|your\s+(?!name|zip|e-?mail|user id|phone|birth|date))",
    re.I,
)


def _sentences(text: str) -> Iterator[str]:
    """Sentences without who somebody is and what is to be kept secret."""
    text = _SECRET.sub("", _HIDES.sub(lambda found: "" if text[found.end() :].startswith("it") else "it ", text))
    for sentence in (
        part.strip(" ;\"'().") if part.startswith("(") else part.strip(" ;\"'")
        for part in _END.split(_ASIDE_IF.sub(". If", text))
    ):
        rest = _without_identity(sentence)
        if len(re.findall(r"\w+", rest)) > 1:
            yield rest


def _without_identity(sentence: str) -> str:
    named = _WHO.match(sentence)
    if not named or (sentence.lower().startswith(("you are", "you're")) and not _named(sentence)):
        return sentence
    rest = _AFTER_WHO.search(sentence, named.end())
    if rest is None:
        return ""
    found = sentence[rest.end() :]
    return found if re.match(r"you", found, re.I) else f"you {found}"


def _named(sentence: str) -> bool:
    """Whether "You are" is followed by a name, an id or an address, not by how somebody is."""
    after = re.sub(r"^(?:You are|You're|you are|you're) (?:an? [a-z ]+ (?:called|named) |user )?['\"]?", "", sentence)
    return re.match(r"[A-Z][a-z]+\b(?! by)|[a-z]+(?:_[a-z]+)+_\d|[\w.]+@", after) is not None and not after.startswith(
        "French"
    )


# Conditions.

_IF = re.compile(r"^(?:and |but |so |however,? |even )?(?:if|when|once|in case)\b(?: and only if)?\s+", re.I)
_THEN = re.compile(
    r",\s*(?=(?:and |then |just |please |only |also )*(?:you(?:r|'[a-z]+)?|only|do|don't|no|ask|say|mention"
    r"|provide|insist|"
    r"be|cancel|return|exchange|modify|change|respond|keep|drop|it is|it's|downgrade|try|agree|refund|just|go"
    r"|choose|the|"
    r"PayPal|otherwise|see|add|pay)\b)"
)
_CONFIRMING = re.compile(r"confirm", re.I)
_BEING_ASKED = re.compile(r"\bask(?:s|ed)?\b", re.I)
_REFUSING = re.compile(
    r"\b(?:not|n't|cannot|unable|impossible|no\b|refuses?|fails?|isn't|any issues|unavailable|unsuccessful)|^not\b",
    re.I,
)
_SAYS = re.compile(r"(?:then )?(?:you )?(?:say|mention|respond|insist|tell|provide)\b", re.I)
_HALVES = re.compile(r"\b(?:the |customer |service )*agent\b|^asked\b", re.I)


def _reply(sentence: str) -> Reply | None:
    opened = _IF.match(sentence)
    if not opened:
        return None
    parts = _THEN.split(sentence[opened.end() :], maxsplit=1)
    if len(parts) == 1:
        parts = sentence[opened.end() :].split(", ", 1)
    if len(parts) == 1:
        return None
    about, then = parts
    said = spoken(re.sub(r"^then ", "", then.strip()))
    even = opened[0].lower().startswith("even")
    alone = even or _HALVES.search(about) or _SAYS.match(then)
    whole = said if alone else f"If {first_person(about)}, {_lowered(said)}"
    return Reply("refusal" if even else _trigger(about), about, whole, then)


def _trigger(about: str) -> Trigger:
    if _CONFIRMING.search(about):
        return "confirm"
    if _BEING_ASKED.search(about) and not re.search(r"\bpay\b.*fee", about):
        return "asked"
    return "refusal" if _REFUSING.search(about) else "other"


def _lowered(text: str) -> str:
    keep = re.match(r"I\b|I'|PayPal|[A-Z]{2,}", text)
    return text if keep else text[:1].lower() + text[1:]


def _given(reply: Reply, facts: Facts) -> Iterator[tuple[str, Sequence[str]]]:
    """Facts that a reply gives in an order of its own ("say 98178 first"), which come before others."""
    number = re.findall(r"#?\bW?\d{5,}\b", reply.then)
    if not number:
        return
    name = "zip" if "zip" in reply.about else "order" if "order" in reply.about else ""
    if name:
        yield name, tuple(dict.fromkeys([*number, *facts.get(name, ())]))


# Manners and wishes.

_HOW = (
    r"(?:very |a bit |an? |extremely |quite |also |now |so |rather |usually |always |really )*"
    r"(?:[a-z-]+(?:ed|ive|ent|ant|ous|ful|ible|able|ic|al|ing|less|ish|ry|sy|py|dy|ty|ly)|calm|brief|terse|polite|rude|sad|"
    r"shy|rigid|direct|busy|insecure|happy|private|mysterious|persistent|private person|yound|funny|chill|lonely"
    r"|interesting|"
    r"organized|firm|detail-oriented|loyal|in debt|in a rush|not (?:good|familiar)|french|secure|person|urgent|late)"
)
_STATE = (
    r"(?!(?:willing|contacting|looking|also looking|ok|okay|fine|happy (?:to|with)|unhappy (?:with|about|that)"
    r"|angry about|a bit absent|flying|unsure|frustrated with|very upset that|initially unsure)\b)"
)
_MANNER = re.compile(
    rf"^(?:you are|you're|you will be|be|you were) {_STATE}{_HOW}\b|^you are an? [a-z, -]*\b(?:person|guy|man"
    rf"|woman|student)\b"
    r"|^(?:your (?:approach|goal|tone|name|email|zip|user id)\b|it is urgent|as you are interacting"
    r"|you are (?:now )?(?:emotional|reactive|patient)|"
    r"you (?:like|speak|talk|randomly|recently the|use french|tend)\b|make (?:sure|everything)\b"
    r"|(?:also )?try to (?:paraphrase|make the conversation)|"
    r"be \w+|use both|do not take|don't accept|do not mention|do not reveal|never\b|you (?:do not|don't"
    r"|would not) want to (?:reveal|mention|speak|share)|"
    r"please be|you're very|you will then use|you are into|mention the two|answer in|speak|keep your|remain|stay)",
    re.I,
)
_STYLE = re.compile(
    r"^(?:please )?(?:make sure (?:you|to) (?:\w+ )?mention|mention (?:the two|both)|under no circumstances"
    r"|do not mention|provide all|say things|"
    r"otherwise, just thank|after \d+ assertions|this is incorrect|mention all|try to paraphrase)",
    re.I,
)
_DOING = re.compile(r"\bwant to (?:cancel|return|exchange|modify|change|undo|know|book|upgrade|remove|buy|check)\b")
_WANTING = re.compile(
    r"\b(?:want|wants|wanted|wish|would like|would also like|'d like|'d want|wonder|intend|considering"
    r"|looking for|first inquire|like to (?:modify|change|exchange|cancel|return))\b|^(?:first,? )?try to (?:book"
    r"|see|get|figure|unsubscribe|exchange)|needs to be|^you (?:also )?need (?:to|the|your)\b|no longer need"
    r"|^you (?:then |first |will first )?(?:ask|inquire) ",
    re.I,
)
_ORDERING = re.compile(
    r"^(?:first,? |then |and |also,? |finally,? |lastly,? )*(?:please|confirm|cancel|return|exchange|modify"
    r"|change|book|add|remove|upgrade|downgrade|get|find|"
    r"ask|check|inquire|tell|mention that you(?:'re| booked)|update|figure|complain|express|how|what|which|when"
    r"|where|is|are|can|could|for (?:your|the|order|#))\b",
    re.I,
)
_PREFERRING = re.compile(
    r"^you(?:'d| would)? (?:also )?(?:do not|don't|prefer|never)\b|"
    r"^you(?: would)? (?:also )?want (?:the |to (?:use|pay|fly in|minimi[sz]e|first use|proceed|be )|in )|"
    r"^\S+(?: \w+)? is prefer|^price is|^you know\b|^for payment|^you(?:'re| are) (?:ok|okay|fine|willing|happy"
    r"|not sure|unsure)\b",
    re.I,
)
_INQUIRY = re.compile(
    r"\b(?:want|like|need|wish) to (?:know|check|ask|figure|verify|see|confirm)|\bwonder|inquire|^(?:how|what"
    r"|which|when|where|is|are)\b|^you (?:then |first |will first )?(?:ask|inquire) (?!for|to)|"
    r"^(?:please |also )*(?:check|figure)|ask (?:about|the agent (?:about|if|whether|wh|how))|\bhow m(?:any|uch)\b",
    re.I,
)


def _is_manner(sentence: str) -> bool:
    return _STYLE.match(sentence) is not None or (_MANNER.match(sentence) is not None and not _DOING.search(sentence))


def _is_wish(sentence: str) -> bool:
    if _PREFERRING.search(sentence) and not _INQUIRY.search(sentence):
        return False
    return _WANTING.search(sentence) is not None or _ORDERING.match(sentence) is not None
