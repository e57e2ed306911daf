"""Whether what a language model says as a user agrees with its task: facts, wishes, and when it ends.

::

    persona, task's facts, domain's known() ──► Vocabulary.of(task) ──► Knowledge ◄── heard(): the agent, own tools
                                                                            │
    reply ──► values that people state (ids, emails, amounts, dates, names) ├─ not known, never heard ─► invents_facts
          ──► what it asks to have done                                     ├─ of another sort ────────► changes_wish
          ──► the end                                                       └─ a wish is still open ───► ends_too_early

It is made for precision: only values of a clear form are looked at, a person may repeat whatever it was told, and small
numbers, weekdays and what can be read in two ways count for nothing. What it misses is measured in
docs/benchmarks/user_check.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from mua.environment.protocol import Domain, Informed, Split, Task
from mua.errors import UserFaultKind
from mua.users.guards import LeakCheck, misused_signal, unusable
from mua.users.protocol import STOP_SIGNAL, Refusal

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
MOST_PERSONAS = 1500
"""Tasks of a domain whose personas are read for its names."""
_NOT_THE_USERS = frozenset(
    {"world", "initial", "actions", "gold", "statements", "false_statements", "forbidden", "assertions", "facts_told"}
    | {"expected", "settled", "difficulty", "communicate_info", "nl_assertions", "initial_state", "reward_basis", "basis", "id", "kind"}
)
"""Keys of a task's data that hold what the user cannot know: the state of the world, and what is right."""
_MONTHS = {
    name: number
    for number, names in enumerate(
        [
            "january jan",
            "february feb",
            "march mar",
            "april apr",
            "may",
            "june jun",
            "july jul",
            "august aug",
            "september sep sept",
            "october oct",
            "november nov",
            "december dec",
        ],
        1,
    )
    for name in names.split()
}
_MONTH = "|".join(sorted(_MONTHS, key=len, reverse=True))
_ISO = re.compile(r"\b(\d{4})-(\d\d?)-(\d\d?)\b")
_MONTH_DAY = re.compile(rf"\b({_MONTH})\.? (\d\d?)(?:st|nd|rd|th)?\b(?:,? (\d{{4}})\b)?", re.IGNORECASE)
_DAY_MONTH = re.compile(rf"\b(\d\d?)(?:st|nd|rd|th)?(?: of)? ({_MONTH})\b(?:,? (\d{{4}})\b)?", re.IGNORECASE)
_SLASHED = re.compile(r"\b(\d\d?)/(\d\d?)(?:/(\d{4}|\d\d))?\b")
_TIME = re.compile(r"\b(\d\d?):(\d\d)\b(?:\s*([ap])\.?m)?", re.IGNORECASE)
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_CODE = re.compile(r"(?<![\w@.])#?(?=[A-Za-z_-]*\d)(?=[\d_-]*[A-Za-z])[A-Za-z0-9]+(?:[_-][A-Za-z0-9]+)*(?![\w@])")
_CAPITALS = re.compile(r"(?<![\w'])[A-Z]{3,7}(?![\w'])")
_AMOUNT = re.compile(
    r"[$€£]\s?(\d[\d,]*(?:\.\d+)?)|\b(\d[\d,]*(?:\.\d+)?)\s?(?:dollars|euros?|bucks|usd|eur|%|percent|gb)\b|\b(\d+\.\d\d)\b",
    re.IGNORECASE,
)
_DIGITS = re.compile(r"(?<![\w.,$€£#-])#?\d(?:[ -]?\d){3,}(?![\w%])")
_YEAR = re.compile(r"(?:19[5-9]|20[0-4])\d")
_QUANTITY = re.compile(
    r"\b(\d{1,2}|one|two|three|four|five|six|seven|eight|nine|ten)\s+(?:\w+\s)?"
    r"(bag|passenger|ticket|suitcase|person|people|seat|line|item|night|piece)s?\b",
    re.IGNORECASE,
)
_COUNTS = {
    w: n for n, w in enumerate(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"])
}
_UNIT = re.compile(
    r"\d+(?:st|nd|rd|th|am|pm|h|hr|hrs|min|mins|s|sec|x|k|kg|g|gb|mb|tb|cm|mm|m|km|ft|in|inch|inches|p|pcs|d|w|y|yo|v|wh"
    r"|mah|hz|ml|l|oz|lb|lbs|year|day|hour|minute|week|month)s?|[3-6]g|mp[34]|wifi\d|4k|8k|a[345]|b2b|g2g|gr8|h\d|covid19",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"[^.!?\n;]+")
_TOKEN = re.compile(r"[A-Za-z][A-Za-z'’-]*")
_NAMED = re.compile(
    r"\b(?:my (?:first |last |full |sur)?name(?: is|'s|:)|(?:name is|called|named|surname is))\s+"
    r"([A-Za-z'-]+)(?:\s+([A-Za-z'-]+))?",
    re.IGNORECASE,
)
_QUOTED = re.compile(r"\"[^\"\n]*\"")
_SHORT_ANSWER = 3
"""Words of a sentence that may be nothing but a name."""
_ACRONYMS = frozenset(
    [
        "ok",
        "usa",
        "us",
        "uk",
        "eu",
        "asap",
        "fyi",
        "sim",
        "esim",
        "apn",
        "vpn",
        "pin",
        "puk",
        "sms",
        "mms",
        "lte",
        "gps",
        "id",
        "zip",
        "am",
        "pm",
        "tv",
        "pc",
        "usb",
        "led",
        "faq",
        "btw",
        "lol",
        "omg",
        "imo",
        "ceo",
        "atm",
        "nyc",
        "ac",
        "dc",
        "hr",
        "it",
        "url",
        "pdf",
        "cvv",
        "stop",
        "yes",
        "no",
        "not",
        "app",
        "wifi",
        "html",
        "http",
        "https",
        "imei",
        "iccid",
        "sos",
        "nfc",
        "roi",
        "vat",
        "tax",
    ]
)
_NOT_NAMES = frozenset(
    [
        "monday",
        "tuesday",
        "wednesday",
        "thursday",
        "friday",
        "saturday",
        "sunday",
        "mon",
        "tue",
        "wed",
        "thu",
        "fri",
        "sat",
        "sun",
        "english",
        "german",
        "french",
        "spanish",
        "american",
        "european",
        "chinese",
        "japanese",
        "italian",
        "internet",
        "wi-fi",
        "wifi",
        "bluetooth",
        "google",
        "gmail",
        "apple",
        "iphone",
        "android",
        "samsung",
        "paypal",
        "visa",
        "mastercard",
        "amex",
        "facebook",
        "whatsapp",
        "youtube",
        "instagram",
        "netflix",
        "spotify",
        "amazon",
        "christmas",
        "easter",
        "god",
        "mr",
        "mrs",
        "ms",
        "dr",
        "madam",
        "sir",
        "hi",
        "hello",
        "hey",
        "bye",
        "goodbye",
        "ciao",
        "cheers",
        "thx",
        "pls",
        "plz",
        "ok",
        "okay",
        "yep",
        "yup",
        "nope",
        "yeah",
        "nah",
        "hmm",
        "hm",
        "um",
        "uh",
        "oh",
        "ah",
        "wow",
        "ugh",
        "phew",
        "oops",
        "sorry",
        "thanks",
        "ta",
        "gosh",
        "jeez",
        "haha",
        "hehe",
        "lol",
        "dad",
        "mom",
        "mum",
    ]
) | set(_MONTHS)
_ENDINGS = (
    "'s",
    "’s",
    "s'",
    "n't",
    "'ll",
    "'re",
    "'ve",
    "'d",
    "'m",
    "s",
    "es",
    "d",
    "ed",
    "ing",
    "ly",
    "er",
    "est",
    "n",
)

_VERBS: Mapping[str, str] = {
    "cancel": r"cancel\w*|call(?:ing)? off",
    "return": r"return(?:ing|ed)?|send(?:ing)? (?:\w+ ){0,4}back|take (?:\w+ ){0,4}back|give (?:\w+ ){0,4}back",
    "refund": r"refund\w*|money back|reimburse\w*",
    "exchange": r"exchang\w+|swap\w*|replac\w+|trade\w* in",
    "change": r"chang\w+|modif\w+|updat\w+|edit\w*|switch\w*|correct\w*|adjust\w*",
    "book": r"book(?:ing|ed)?|reserv(?:e|ing)|purchas\w+|buy(?:ing)?|fly",
    "upgrade": r"upgrad\w+|(?:business|first) class|cabin|(?:better|bigger|larger|other) plan|more data|plan",
    "downgrade": r"downgrad\w+|cheaper|(?:smaller|other) plan|economy|cabin|plan",
    "insure": r"insur\w+",
    "compensate": r"compensat\w+|voucher",
    "suspend": r"suspend\w*|paus\w+ (?:my|the) (?:line|plan|service)|terminat\w+",
    "unlock": r"unlock\w*",
    "redirect": r"redirect\w*|rerout\w+|deliver\w* to|send (?:\w+ ){0,4}to|go(?:es)? to",
    "baggage": r"baggage|bags?|luggage|suitcases?",
    "track": r"track\w*|where (?:is|'s)|where my|status",
}
_VERB = {sort: re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE) for sort, pattern in _VERBS.items()}
_NEIGHBOURS: Mapping[str, frozenset[str]] = {
    "return": frozenset({"refund"}),
    "refund": frozenset({"return", "cancel", "compensate"}),
    "exchange": frozenset({"change"}),
    "compensate": frozenset({"refund"}),
    "redirect": frozenset({"change"}),
}
"""Which wishes make it no surprise that a sort is asked for: a cancelled order is refunded."""
_ASKS = re.compile(
    r"\b(?:i (?:also |now |actually |really |just |do )*(?:want|need|wish|prefer|would like|would rather|would prefer|demand"
    r"|insist)|i'?d (?:also |actually |rather |much )*(?:like|rather|prefer|love|want)|(?:can|could|would|will) you(?: please)?"
    r"|please|instead|actually|let'?s|rather|go ahead and|i am looking to|i'm looking to|i(?:'m| am) (?:here|writing) to"
    r"|i have decided to|i've decided to|i(?:'ve| have)? decided)\b(?P<what>[^.!?;\n]*)",
    re.IGNORECASE,
)
_NOT_ASKED = re.compile(
    r"\b(?:tell|explain|confirm|check|know|whether|if|how|why|see|understand|show|say|repeat)\b", re.I
)
_RETREAT = re.compile(
    r"\b(?:(?:i(?:'ve| have)? )?changed my mind|on second thought|no longer (?:want|wish|need) (?:to|it (?:to be )?|the (?:refund"
    r"|return|exchange|cancel\w*))|(?:do not|don'?t) (?:want|wish|need) (?:to (?:cancel|return|exchange|change|book|fly|move|upgrade"
    r"|go through)\b|(?:it|that|this|the \w+) (?:cancel\w*|return\w*|exchang\w+|chang\w+|any ?more))"
    r"|forget (?:about )?(?:the|my|this|that) (?:\w+ ){0,2}(?:request|order|return|exchange|cancel\w*|refund|booking|change|whole thing|thing)"
    r"|(?:i'?ll |i will |let me |let'?s |please |just |i'?d rather |want to |(?<=[.!,] ))(?:just )?(?:keep|leave) (?:it|everything|the \w+|my \w+|them|things)"
    r"(?: (?:as (?:it is|is|they are)|then|after all|instead|the way)|$|[.!,])|(?:do not|don'?t) (?:cancel|return|exchange|change|refund) (?:it|the|my|that|anything))",
    re.IGNORECASE | re.MULTILINE,
)
_CHANGES_ITSELF = re.compile(
    r"chang\w* (?:your|of) mind|change of mind|\bat first\b|\bfirst (?:you )?(?:ask|name|say)|correct yourself"
    r"|you say: \"(?:wait|no|actually)|\bwait, i\b|\b(?:no longer|not any ?more) want",
    re.I,
)
_SETTLED = re.compile(
    r"\b(?:done|cancel+ed|returned|exchanged|changed|updated|booked|modified|added|removed|processed|completed|confirmed"
    r"|refunded|issued|sent|initiated|submitted|restored|fixed|resolved|working|works|solved|upgraded|downgraded|moved"
    r"|sorry(?! (?:to hear|about|for|you))|unfortunately|can ?not|can't|unable|not (?:able|possible|allowed|eligible|permitted|covered|on your)"
    r"|does not|doesn't|won't|will not|no longer|transfer\w*|final sale|denied|refuse[ds]?|declined|all set|taken care"
    r"|success\w*|is (?:in|on|at|pending|shipped|delivered|processed|\$?\d)|costs?|(?:price|status|total) is|certificate|voucher)\b",
    re.IGNORECASE,
)
_OPEN_QUESTION = re.compile(
    r"\b(?:what|which|who|when|where|could you|can you|may i|would you|do you|shall i|should i|please (?:tell|give|provide"
    r"|confirm|share|send|let)|are you|is (?:that|this)|have you|yes/no|confirm|proceed)\b[^.!\n]*\?|\(yes/no\)",
    re.IGNORECASE,
)
_KEEPS = re.compile(r"\b(?:keep|leave)", re.IGNORECASE)
_ASKS_NAME = re.compile(r"\b(?:name|city|town|who|where|destination|address|country|item|product|which)\b[^.!\n]*\?", re.I)
_DECIDES = re.compile(
    r"\(yes/no\)|\b(?:yes or no|do you confirm|shall i|should i|confirm|proceed|go ahead)\b[^.!?\n]*\?\s*\Z", re.IGNORECASE
)
_QUESTIONS = re.compile(r"[^.!?\n]*\?")
_ANSWERS = frozenset({"amount", "date", "time"})
_CLOSING = re.compile(r"[^.!?\n]*\b(?:anything|something|what) (?:else|more|further)\b[^.!?\n]*\?", re.IGNORECASE)
_WANTS = re.compile(
    r"\b(?:you (?:also |now |then )*(?:want|would like|wish|need|ask|prefer)|ask(?:s|ing)? (?:to|for)|then you)\b",
    re.IGNORECASE,
)


class ReplyCheck:
    """Everything that is looked at before a language model's words become a user's."""

    def __init__(self, leak: LeakCheck, facts: TaskCheck | None = None) -> None:
        """``facts`` is the check against the task, if there is one; it follows this conversation alone."""
        self._leak = leak
        self._facts = facts

    def heard(self, text: str) -> None:
        """What the agent said."""
        if self._facts is not None:
            self._facts.heard(text)

    def saw(self, text: str) -> None:
        """What a tool of the user's own answered."""
        if self._facts is not None:
            self._facts.saw(text)

    def said(self, text: str) -> None:
        """``text`` is what the user said in the end."""
        if self._facts is not None:
            self._facts.said(text)

    def form(self, text: str, *, first: bool) -> Refusal | None:
        """Why ``text`` can be no user's, whatever the task; ``first``: nothing has been said before."""
        if refusal := unusable(text) or misused_signal(text):
            return refusal
        if first and STOP_SIGNAL in text:
            return Refusal(UserFaultKind.ENDS_TOO_EARLY, "the user ended the conversation before it began")
        return None

    def content(self, text: str, *, acted: bool = False) -> Refusal | None:
        """What speaks against ``text`` in this task; ``acted``: the user has just used tools of its own."""
        if (quoted := self._leak.quotation(text)) is not None:
            return Refusal(UserFaultKind.LEAKS_INSTRUCTION, f"the user quotes its instructions ({quoted})")
        return self._facts.find(text, acted=acted) if self._facts is not None else None


class Value(NamedTuple):
    """Something that a text states."""

    kind: str
    said: str
    same: Any
    """What two ways of writing it have in common."""


class Knowledge:
    """What one user knows: texts it was given, values that a domain lists, and what it has heard since."""

    def __init__(self, texts: Iterable[str] = (), values: Mapping[str, Sequence[str]] = {}) -> None:
        self._same: set[tuple[str, Any]] = set()
        self._digits: set[str] = set()
        self._words: set[str] = set()
        self._counted: set[str] = set()
        for text in texts:
            self.add(text)
        for listed in values.values():
            for value in listed:
                self.add(value)

    def add(self, text: str) -> None:
        """Whatever ``text`` states may be repeated from now on."""
        for value in values_in(text):
            self._same.add((value.kind, value.same))
            self._digits.add(re.sub(r"\D", "", value.said))
            if value.kind == "quantity":
                self._counted.add(value.same[1])
        self._words |= _words_of(text)
        self._digits |= set(re.findall(r"\d+", text))

    def has(self, value: Value) -> bool:
        """Whether ``value`` is known in some form. A count is unknown only where another count of the same is known."""
        if (value.kind, value.same) in self._same:
            return True
        if value.kind == "quantity":
            return value.same[1] not in self._counted
        digits = re.sub(r"\D", "", value.said)
        if value.kind == "amount":
            return _plain_number(value.same) in self._digits or ("number", digits) in self._same
        if value.kind in ("code", "number"):
            return digits in self._digits and len(digits) > 1
        return False

    def knows_word(self, word: str) -> bool:
        """Whether a word, or its singular, stands in something known."""
        word = _plain_word(word)
        return word in self._words or word.rstrip("s") in self._words or f"{word}s" in self._words

    def knows_words(self, phrase: str) -> bool:
        """Whether all words of a name are known."""
        return all(self.knows_word(word) for word in phrase.split())


class Vocabulary:
    """The names that a domain's tasks deal with: people, places, things. Read from the personas, once a domain."""

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self._words, self._phrases = _names_of(self._personas())

    def _personas(self) -> Iterator[str]:
        tasks = (task for split in SPLITS for task in self._domain.tasks(split))
        return (self._domain.persona(task) for task in islice(tasks, MOST_PERSONAS))

    def names(self) -> frozenset[str]:
        """All of them, lower case."""
        return self._phrases or self._words

    def of(self, task: Task) -> TaskCheck:
        """The check of one user of ``task``."""
        persona = self._domain.persona(task)
        if isinstance(self._domain, Informed):
            values, wishes = self._domain.known(task), self._domain.wishes(task)
        else:
            values, wishes = {"task": list(_texts(task.data))}, ()
        return TaskCheck(persona, values, wishes, self._words, self._phrases)


class TaskCheck:
    """Follows one conversation and says of each reply whether it fits the task."""

    def __init__(
        self,
        persona: str,
        values: Mapping[str, Sequence[str]] = {},
        wishes: Sequence[Mapping[str, Sequence[str]]] = (),
        words: frozenset[str] = frozenset(),
        phrases: frozenset[str] = frozenset(),
    ) -> None:
        """``words`` and ``phrases`` are names that the domain deals with; the others as :class:`Informed` gives them."""
        listed = [text for wish in wishes for texts in wish.values() for text in texts]
        self._knowledge = Knowledge([persona, *listed], values)
        self._sorts = _sorts(" ".join([persona, *listed]))
        self._keeps = _KEEPS.search(f"{persona} {' '.join(listed)}") is not None
        self._may_retreat = _CHANGES_ITSELF.search(persona) is not None
        self._open = [_marks(" ".join(text for texts in wish.values() for text in texts)) for wish in wishes]
        self._open = self._open or [_marks(sentence) for sentence in _wanting(persona)]
        self._words, self._phrases = words, phrases
        self._agent = ""
        self._settled = False
        self._talk = ""

    def heard(self, text: str) -> None:
        """What the agent said."""
        self._knowledge.add(text)
        self._sorts |= _sorts(text)
        self._agent = text
        told = _QUESTIONS.sub("", _CLOSING.sub("", text))
        self._settled |= _SETTLED.search(told) is not None or any(v.kind in _ANSWERS for v in values_in(told))
        self._talk += f"\n{text.casefold()}"

    def saw(self, text: str) -> None:
        """What a tool of the user's own answered: it may be told, and settles nothing."""
        self._knowledge.add(text)
        self._talk += f"\n{text.casefold()}"

    def find(self, text: str, *, acted: bool = False) -> Refusal | None:
        """Why ``text`` does not fit; ``acted``: the user has just used tools of its own."""
        words = text.replace(STOP_SIGNAL, " ")
        if unknown := self.invented(words):
            return Refusal(UserFaultKind.INVENTS_FACTS, f"the user invents {unknown.kind} {unknown.said!r}")
        if other := self.changed(words):
            return Refusal(UserFaultKind.CHANGES_WISH, f"the user changes its wish ({other})")
        if STOP_SIGNAL in text and (why := self.unfinished(words, acted)):
            return Refusal(UserFaultKind.ENDS_TOO_EARLY, f"the user ends the conversation though {why}")
        return None

    def said(self, text: str) -> None:
        """``text`` is what the user said in the end."""
        self._talk += f"\n{text.casefold()}"

    def invented(self, text: str) -> Value | None:
        """The first value that the user cannot know."""
        found = (value for value in values_in(text) if not self._knowledge.has(value))
        return next(found, None) or next(self._invented_names(text), None)

    def changed(self, text: str) -> str | None:
        """What the user asks for, or gives up, against its wish."""
        for retreat in () if self._may_retreat else _RETREAT.finditer(text):
            if not (self._keeps and _KEEPS.search(retreat.group())):
                return " ".join(retreat.group().split())
        for asked in _ASKS.finditer(text):
            what = asked["what"]
            if _NOT_ASKED.search(what):
                continue
            for sort in _sorts(what) & _CLEAR:
                if sort not in self._sorts and not self._sorts & _NEIGHBOURS.get(sort, frozenset()):
                    return sort
        return None

    def unfinished(self, text: str, acted: bool) -> str | None:
        """Why nothing is settled yet."""
        if not self._agent:
            return "nobody has answered"
        asked = _CLOSING.sub("", self._agent)
        if acted:
            return None
        if not self._settled:
            return "the agent has neither done nor refused anything"
        if _DECIDES.search(asked) or (_OPEN_QUESTION.search(asked) and not _SETTLED.search(asked)):
            return "the agent waits for an answer"
        talk = self._talk + text.casefold()
        gone = re.search(r"\btransfer\w*|\bhuman agent\b", self._agent, re.IGNORECASE)
        unsaid = next((marks for marks in self._open if marks and not any(mark in talk for mark in marks)), None)
        return f"nobody has spoken of {min(unsaid)!r}" if unsaid and not gone else None

    def _invented_names(self, text: str) -> Iterator[Value]:
        folded = f" {' '.join(_plain_word(token) for token in _TOKEN.findall(text))} "
        for phrase in self._phrases:
            if f" {phrase} " in folded and not self._knowledge.knows_words(phrase):
                yield Value("name", phrase, phrase)
        for sentence in _SENTENCE.findall(_EMAIL.sub(" ", text)):
            tokens = _TOKEN.findall(sentence)
            for place, token in enumerate(tokens):
                if not self._knowledge.knows_word(token) and self._is_name(token, place, tokens):
                    yield Value("name", token, _plain_word(token))
        for named in _NAMED.finditer(text):
            for word in filter(None, named.groups()):
                if not is_word(word) and not self._knowledge.knows_word(word):
                    yield Value("name", word, _plain_word(word))

    def _is_name(self, token: str, place: int, tokens: Sequence[str]) -> bool:
        plain = _plain_word(token)
        if is_word(token):
            # "the Lamp": a thing of this domain by its name, where the sentence is about things
            return plain in self._words and token[0].isupper() and (place > 0 or len(tokens) <= _SHORT_ANSWER)
        if plain in self._words:
            return True
        if not token[0].isupper() or len(plain) < 3:
            return False
        if token.isupper() and len(token) > 3 and all(t.isupper() for t in tokens):
            return False  # somebody shouts
        if place > 0:
            return True
        if len(tokens) > _SHORT_ANSWER:
            return False
        others = [other for other in tokens[1:] if other[0].isupper()]
        return bool(others) or _ASKS_NAME.search(self._agent) is not None


_CLEAR = frozenset(_VERBS) - {"change", "track", "book", "baggage", "refund"}
"""Sorts of wishes that ordinary talk names only when it means them."""


def values_in(text: str) -> Iterator[Value]:
    """The values of clear form that ``text`` states. Linear in it; overlapping forms are read once."""
    for match in _EMAIL.finditer(text):
        yield Value("email", match.group(), match.group().casefold().rstrip("."))
    text = _EMAIL.sub(" ", text)
    for pattern, month, day in ((_ISO, 2, 3), (_MONTH_DAY, 1, 2), (_DAY_MONTH, 2, 1), (_SLASHED, 1, 2)):
        for match in pattern.finditer(text):
            named = match[month].casefold()
            number = _MONTHS[named] if named in _MONTHS else int(named)
            if 1 <= number <= 12 and 1 <= int(match[day]) <= 31 and match.group() not in ("24/7",):
                yield Value("date", match.group(), (number, int(match[day])))
        text = pattern.sub(" ", text)
    for match in _TIME.finditer(text):
        yield Value("time", match.group(), (int(match[1]) % 12, int(match[2])))
    text = _TIME.sub(" ", text)
    for match in _CODE.finditer(text):
        if not _UNIT.fullmatch(match.group()):
            yield Value("code", match.group(), match.group().lstrip("#").casefold())
    text = _CODE.sub(" ", text)
    for match in _AMOUNT.finditer(text):
        yield Value("amount", match.group(), float((match[1] or match[2] or match[3]).replace(",", "")))
    text = _AMOUNT.sub(" ", text)
    for match in _DIGITS.finditer(text):
        if _YEAR.fullmatch(match.group()):
            continue
        yield Value("number", match.group(), re.sub(r"\D", "", match.group()))
    text = _DIGITS.sub(" ", text)
    for match in _QUANTITY.finditer(text):
        count = match[1].casefold()
        yield Value(
            "quantity", match.group(), (_COUNTS.get(count) if count in _COUNTS else int(count), match[2].casefold())
        )
    shouting = text.isupper()
    for match in _CAPITALS.finditer(text):
        if not shouting and not is_word(match.group()) and match.group().casefold() not in _ACRONYMS:
            yield Value("code", match.group(), match.group().casefold())


def is_word(token: str) -> bool:
    """Whether ``token`` is a word of everyday English, inflected or not, or a name that everybody knows."""
    plain = token.casefold().replace("’", "'")
    words = english()
    if plain in words or plain in _NOT_NAMES or plain in _ACRONYMS or len(plain) < 2:
        return True
    if "-" in plain:
        return all(is_word(part) for part in plain.split("-"))
    return any(plain.endswith(end) and _stem(plain[: -len(end)], words) for end in _ENDINGS)


@lru_cache(maxsize=1)
def english() -> frozenset[str]:
    """Everyday words, lower case."""
    return frozenset(Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split())


def _stem(stem: str, words: frozenset[str]) -> bool:
    if len(stem) < 2:
        return False
    doubled = stem[:-1] if len(stem) > 2 and stem[-1] == stem[-2] else stem
    return not {stem, f"{stem}e", doubled, f"{stem[:-1]}y" if stem.endswith("i") else stem}.isdisjoint(words)


def _plain_word(word: str) -> str:
    return word.casefold().replace("’", "'").removesuffix("'s").strip("'-")


def _plain_number(value: float) -> str:
    return f"{value:g}"


def _words_of(text: str) -> set[str]:
    tokens = re.findall(r"[^\W\d_]+(?:['’-][^\W\d_]+)*", text)
    return {part for token in tokens for part in (_plain_word(token), *_plain_word(token).split("-"))}


def _texts(data: Any, depth: int = 8) -> Iterator[str]:
    """Every text in a task's data that its user may know, and values as texts."""
    if isinstance(data, dict) and depth:
        for key, value in data.items():
            if key not in _NOT_THE_USERS:
                yield from _texts(value, depth - 1)
    elif isinstance(data, list) and depth:
        for value in data:
            yield from _texts(value, depth - 1)
    elif isinstance(data, str):
        yield data
    elif isinstance(data, int | float) and not isinstance(data, bool):
        yield f"{data:g}" if isinstance(data, float) else str(data)


def _names_of(personas: Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Names in the personas: single words, and phrases of several, lower case."""
    words: set[str] = set()
    phrases: set[str] = set()
    for persona in personas:
        for sentence in _SENTENCE.findall(_QUOTED.sub(" ", persona)):
            for run in re.findall(r"(?<=[^\s]\s)[A-Z][\w'-]+(?: [A-Z][\w'-]+)*", sentence):
                parts = [_plain_word(part) for part in run.split()]
                if len(parts) > 1:
                    phrases.add(" ".join(parts))
                words |= {part for part in parts if part.isalpha() and len(part) > 2 and part not in _NOT_NAMES}
    return frozenset(words), frozenset(phrases)


def _sorts(text: str) -> set[str]:
    return {sort for sort, pattern in _VERB.items() if pattern.search(text)}


def _wanting(persona: str) -> list[str]:
    return [sentence for sentence in re.split(r"(?<=[.!?])\s|\n", persona) if _WANTS.search(sentence)]


def _marks(text: str) -> frozenset[str]:
    """What shows that somebody has spoken of a wish: its ids and numbers, else its names."""
    codes = {value.said.lstrip("#").casefold() for value in values_in(text) if value.kind in ("code", "number")}
    return frozenset(codes)
