"""Typed statements of an agent, held against the ledger: money, days, flights, routes, counts, cabins, names.

What is put into words in too many ways for phrases is recognised by its values. A sum, a day, a flight, an airport or a
name is looked for in a clause, the words around it say what it is claimed to be, and where they say nothing it must at
least be one that the customer has to do with. What cannot be decided yields nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from environments.airline.ledger import Ledger
from environments.airline.rules import FIRST_NAMES, OWN, TODAY
from environments.airline.tools import EXTRA_BAG, INSURANCE
from environments.kit.language.claims import Claim, Mood, Review, clauses, denied, money
from environments.kit.language.text import sentences
from mua.types import Json

_NUMBER = re.compile(r"(?<![\w_])(?!qlx)(?=[a-z]*\d)([a-z][a-z0-9]{5})(?![\w_])")
_FLIGHT = re.compile(r"(?<!\w)(qlx ?\d{3})(?!\w)")
_COUNTED = "no one two three four five six seven eight nine ten eleven twelve"
_WORDS = {word: number for number, word in enumerate(_COUNTED.split())} | {
    "a": 1,
    "an": 1,
    "single": 1,
    "both": 2,
    "zero": 0,
    "none": 0,
}
_COUNT = r"(\d{1,2}|no|one|two|three|four|five|six|seven|eight|nine|ten|both|single|zero|none)"
_YEAR = "january february march april may june july august september october november december"
_MONTHS = _YEAR.split()


@dataclass(frozen=True, slots=True)
class View:
    """A clause with what it may be about."""

    text: str
    sentence: str
    mood: Mood
    subject: str
    """The reservation, named or under discussion; empty where there is none."""
    own: bool
    """Whether the clause or its sentence names it."""
    ledger: Ledger
    sums: int
    """How many sums of money the message names."""

    @property
    def record(self) -> Json:
        return self.ledger.records.get(self.subject) or {}

    def has(self, pattern: str) -> bool:
        return re.search(rf"(?<!\w)(?:{pattern})(?!\w)", self.text) is not None


@dataclass(frozen=True, slots=True)
class Found:
    """One statement, and whether it is so."""

    role: str
    value: str
    so: bool
    thing: str = ""
    denied: bool = False


def review(message: str, ledger: Ledger) -> Review:
    """Every typed statement of ``message``, judged."""
    found, named, heard_of = Review(), list[str](), len(_SUMS.findall(" ".join(one.text for one in sentences(message))))
    for sentence in sentences(message):
        mentioned = _NUMBER.findall(sentence.text)
        if not sentence.question:
            if _HANDED_OVER.search(sentence.text):
                found |= Review(true=(Claim("profile", "transfer", "yes", denied=False),))
            for clause in clauses(sentence.text):
                if clause.mood in ("is", "will") and not _RULE.search(clause.text):
                    own = _NUMBER.findall(clause.text)
                    subject = _subject(own, mentioned, named, sentence.text, ledger)
                    view = View(
                        clause.text, sentence.text, clause.mood, subject, bool(own or mentioned), ledger, heard_of
                    )
                    found |= _judged(view, own)
        named += [one for one in mentioned if one in ledger.records]
    return found


_PERSON = (
    r"(?:humans?|colleagues?|agents?|person|someone|specialists?|supervisors?|team|representatives?|staff|desk|people)"
)
_HANDED_OVER = re.compile(
    rf"\b(?:hand|pass|transfer|connect|forward|put|refer|escalat|bring|rout|get)\w*(?: \w+){{0,6}} (?:to"
    rf"|with|through|over|into?)(?: \w+){{0,4}} {_PERSON}\b"
    rf"|\b{_PERSON}\b(?: \w+){{0,6}} (?:takes? (?:it )?(?:over|from)|will (?:take|help"
    r"|be|continue|assist)|is going to|continues?|can help)\b"
    r"|\byou (?:will be|are being) (?:transferred|connected|handed|put through)\b|\btransfer\w* you\b"
)
"""Announces that somebody else takes over; it is told before the call that does it, which ends the conversation."""
_RULE = re.compile(
    r"\b(?:each|every|per|any|all|only|usually|always|never) (?:\w+ )?(?:bag|bags|certificate"
    r"|flights|reservations?|bookings?|names|member)\b(?! (?:i|you|we|on|in|of|was"
    r"|is|and) )"
    r"|\bper passenger\b|\b(?:as a rule|in general|in case|whoever|suppose)\b|^(?:refunds"
    r"|certificates|names|bags|insurance|compensation|gift cards|flights|reservations"
    r"|bookings|extra (?:checked )?bags) (?:usually|can|are|is|cost|may|take|have)\b"
)
_UNITS = (
    "a|an|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|fifteen|twen"
    "ty|thirty|forty|fifty|sixty|seventy|eighty|ninety|hundred|thousand|and"
)
_SUMS = re.compile(
    rf"(?<![\w$-])(?:(?:{_UNITS})[ -])+dollars|"
    + r"\$ ?\d[\d,]*(?:\.\d\d?)?|(?<![\w.$])\d[\d,]*(?:\.\d\d?)? ?(?:dollars|usd|bucks)"
)


def _subject(own: Sequence[str], mentioned: Sequence[str], named: Sequence[str], text: str, ledger: Ledger) -> str:
    if own or mentioned:
        return (own or mentioned)[0]
    flights = [found.replace(" ", "") for found in _FLIGHT.findall(text)]
    for number in reversed(ledger.discussed):
        if any(leg["flight_number"].lower() in flights for leg in ledger.legs.get(number, ())):
            return number
    return named[-1] if named else ledger.discussed[-1] if ledger.discussed else ""


def _judged(view: View, own: Sequence[str]) -> Review:
    true: list[Claim] = []
    false: list[Claim] = []
    for check in _CHECKS:
        for found in check(view):
            thing = found.thing or (f"reservation {view.subject}" if view.subject else "profile")
            claim = Claim(thing, found.role, found.value, found.denied)
            (true if found.so else false).append(claim)
    for number in own:
        if number not in view.ledger.records and not view.ledger.past.has_heard(number) and not denied(view.text, 99):
            false.append(Claim(f"reservation {number}", "known", "yes", denied=False))
    return Review(tuple(true), tuple(false))


# Money


def _sums(view: View) -> Iterator[Found]:
    for match in _SUMS.finditer(view.text):
        if not denied(view.text, match.start()):
            yield from _sum(view, money(match[0]), match.start())


_BACK = (
    r"refund\w*|returned|returns?|money back|get \w+ back|back (?:on|to|onto|with|within)"
    r"|\d back|dollars back|credited|reimbursed|repaid|goes back|going back|travels back"
)
_METHOD = r"gift card|certificate|visa|mastercard|credit card|card"
_ONTO = re.compile(
    rf"\b(?:put|goes|go|went|gone|going|comes|moved)(?: back)?(?: (?:{_SUMS.pattern}))?(?: back)? (?:on|onto|to|into)"
    rf" (?:your|the) ({_METHOD})\b"
)
_TAKEN = (
    r"charged|charges?|deducted|debited|fees?|taken from|was taken|took|came off"
    r"|(?:correction|change|cancellation|upgrade|move|removal)(?: \w+){0,4} cost you"
)
_GIFT = r"gift cards?"
_VOUCHER = r"certificates?|vouchers?"
_SENT = r"sent|issued|added|new|given|granted|received|topped up|put"


def _sum(view: View, amount: float, at: int) -> Iterator[Found]:
    ledger, value = view.ledger, f"{amount:g}"
    near = view.text[max(0, at - 60) : at + 60]
    totals = _totals(view)
    if (legs := _prices_by_way(view, at)) is not None:
        yield Found("price", value, amount in legs)
    elif (
        re.search(r"bags? (?:\w+ )?(?:costs?|came to|are|were) \$? ?\d", near)
        and view.record
        and not re.search("each", near)
    ):
        count = view.record["nonfree_baggages"]
        added = count - view.ledger.before(view.subject)["nonfree_baggages"]
        yield Found("bag fee", value, amount in (EXTRA_BAG * count, EXTRA_BAG * added))
    elif (onto := _ONTO.search(near)) and (view.mood == "is" or ledger.moved):
        yield Found("put", f"{value} {onto[1]}", amount in _moved(view, onto[1]))
    elif re.search(rf"(?<!\w)(?:{_BACK})(?!\w)", near):
        allowed = {-sum_ for sum_ in _parts(view, back=True)} | (
            {*totals, *_differences(view)} if view.mood == "will" else set()
        )
        yield Found("refund", value, amount in allowed)
    elif re.search(rf"(?<!\w)(?:{_TAKEN})(?!\w)", near):
        allowed = _parts(view, back=False) | _history(view) | (_differences(view) if view.mood == "will" else set())
        yield Found("charge", value, amount in allowed)
        yield from _told(view, amount, totals)
    elif re.search(rf"(?<!\w)(?:{_GIFT})(?!\w)", near) and not re.search(rf"\b(?:{_VOUCHER})\b", near):
        cards = _balances(ledger, "gift_card", now=not re.search(r"\bpaid|used\b", near))
        so = amount in cards | _parts(view, back=False) | _history(view)
        yield Found("gift card", value, so)
        if amount == sum(_amounts(ledger.user, "gift_card")):
            yield Found("balance", value, True, "profile")
    elif (
        re.search(rf"(?<!\w)(?:{_VOUCHER})(?!\w)", near)
        and re.search(rf"\b(?:{_SENT})\b", near)
        and not re.search(r"\bpaid\b", near)
    ):
        sent = [float(one["amount"]) for one in ledger.certificates]
        others = _balances(ledger, "certificate") if re.search(r"\bwith|besides|too|older\b", view.text) else set()
        yield Found("certificate", value, amount in {*sent, sum(sent) or -1.0} | others)
    elif re.search(rf"(?<!\w)(?:{_VOUCHER})(?!\w)", near) and re.search(
        r"\b(?:left|still|have|has|hold|holding|got|profile)\b", view.text
    ):
        kept = _balances(ledger, "certificate") | (_balances(ledger, "gift_card") if view.has(_GIFT) else set())
        yield Found("certificate", value, amount in kept | (_history(view) if view.has("paid|used") else set()))
    else:
        yield Found("amount", value, amount in _anywhere(view, totals))
        yield from _told(view, amount, totals)


def _moved(view: View, kind: str) -> set[float]:
    """What was paid back to, or charged to, methods of a kind since the start: single sums and all of them."""
    methods, source = view.ledger.user_before["payment_methods"] | view.ledger.user["payment_methods"], _source(kind)
    sums = [
        abs(float(amount))
        for _, method, amount in view.ledger.moved
        if source in (methods.get(method, {}).get("source"), methods.get(method, {}).get("brand"), "card")
    ]
    return {*sums, sum(sums)} - {0.0}


def _source(words: str) -> str:
    """What the profile calls a kind of payment method."""
    return words.rstrip("s").replace("voucher", "certificate").replace(" ", "_")


def _prices_by_way(view: View, at: int) -> set[float] | None:
    """What the flight there, or back, cost: where a sum says which of the two it is of."""
    legs = view.record.get("flights", [])
    after = re.match(r"[$\d,.]+(?: dollars)? (there|back|out|on the way (?:out|back))\b", view.text[at:])
    if after is None or len(legs) < 2 or not re.search(r"\bthere\b|\bfares?\b", view.text):
        return None
    half = (len(legs) + 1) // 2
    return {float(sum(leg["price"] for leg in (legs[half:] if "back" in after[1] else legs[:half])))}


def _told(view: View, amount: float, totals: set[float]) -> Iterator[Found]:
    """What a sum tells that a customer may have asked for."""
    value, ledger = f"{amount:g}", view.ledger
    if amount in totals:
        yield Found("paid", value, True)
    if amount == sum(_amounts(ledger.user, "gift_card")):
        yield Found("balance", value, True, "profile")
    cabins = [found.replace(" ", "_") for found in re.findall(r"\b(basic economy|economy|business)\b", view.text)]
    for offer in ledger.offers:
        for cabin, price in offer.prices.items():
            if price == amount and (cabin in cabins or (not cabins and view.sums <= 2)):
                yield Found("fare", value, True, "flights")


def _amounts(user: Json, source: str) -> list[float]:
    return [float(one["amount"]) for one in user["payment_methods"].values() if one["source"] == source]


def _balances(ledger: Ledger, source: str, now: bool = True) -> set[float]:
    """What single methods of a sort hold, and all together."""
    found = _amounts(ledger.user, source)
    before = [] if now else _amounts(ledger.user_before, source)
    return {*found, sum(found), *before} - {0.0}


def _parts(view: View, back: bool) -> set[float]:
    """What was paid back, or charged, since the start: by reservation and method, and together."""
    moved = [amount for _, _, amount in view.ledger.moved if (amount < 0) == back]
    return {*map(float, moved), float(sum(moved))} - {0.0}


def _about(view: View) -> list[Json]:
    """The records a sum may be of: the subject's, as it is and was; those under discussion where none is named."""
    numbers = [view.subject] if view.own else view.ledger.discussed
    records = [view.ledger.records[number] for number in numbers if number in view.ledger.records]
    return records + [view.ledger.before(number) for number in numbers if number in view.ledger.records]


def _totals(view: View) -> set[float]:
    """What was paid for the reservation in all, with and without what was moved since."""
    records = [view.ledger.records[view.subject], view.ledger.before(view.subject)] if view.record else []
    found = {float(sum(max(0, part["amount"]) for part in one["payment_history"])) for one in records}
    return (found | {float(sum(part["amount"] for part in one["payment_history"])) for one in records}) - {0.0}


def _history(view: View) -> set[float]:
    parts = {float(part["amount"]) for one in _about(view) for part in one["payment_history"]}
    return parts | _totals(view)


def _differences(view: View) -> set[float]:
    """What a change to an offered flight or cabin would cost or return, and bags."""
    found = {float(EXTRA_BAG * count) for count in range(1, 8)} | {0.0}
    for record in _about(view):
        count = len(record["passengers"])
        old = sum(leg["price"] for leg in record["flights"])
        for cabin in ("basic_economy", "economy", "business"):
            new = [_price_now(view.ledger, leg, cabin) for leg in record["flights"]]
            found |= {abs(float(sum(new) - old) * count), abs(float(sum(new) - old))} if all(new) else set()
        for offer in view.ledger.offers:
            found |= {
                abs(float(price - leg["price"])) * times
                for price in offer.prices.values()
                for leg in record["flights"]
                for times in (1, count)
            }
    return found


def _price_now(ledger: Ledger, leg: Json, cabin: str) -> int:
    day = ledger.base.tables["flights"][leg["flight_number"]]["dates"][leg["date"]]
    return int(day.get("prices", {}).get(cabin, 0))


def _anywhere(view: View, totals: set[float]) -> set[float]:
    """Every sum that has to do with what is under discussion."""
    ledger, found = view.ledger, {30.0, 50.0, 100.0} | totals | _history(view) | _differences(view)
    for record in _about(view):
        count = len(record["passengers"])
        prices = [leg["price"] for leg in record["flights"]]
        bags = {float(EXTRA_BAG * record["nonfree_baggages"]), float(INSURANCE * count), 100.0 * count}
        found |= {
            float(sum(prices)),
            float(sum(prices) * count),
            *map(float, prices),
            *(float(p * count) for p in prices),
        }
        found |= bags
    for offer in ledger.offers:
        found |= {float(price * count) for price in offer.prices.values() for count in range(1, 6)}
    found |= {abs(amount) for amount in _parts(view, back=True) | _parts(view, back=False)}
    found |= _balances(ledger, "gift_card", now=False) | _balances(ledger, "certificate", now=False)
    return found - {0.0} | ({0.0} if 0.0 in totals else set())


_ENDING = re.compile(r"(?:ending(?: in| with)?|last four(?: digits)?(?: are)?|card) (\d{4})(?!\w)")


_ASIDE = re.compile(r" (?:that|which) (?:is|was|are|were) not \w+")


def _cards(view: View) -> Iterator[Found]:
    """Which card was charged or paid back to."""
    methods = view.ledger.user_before["payment_methods"] | view.ledger.user["payment_methods"]
    entries = _entries(view)
    text = _ASIDE.sub("", view.text)
    for match in _ENDING.finditer(text):
        ids = {key for key, one in methods.items() if one.get("last_four") == match[1]}
        if not ids:
            yield Found("card", match[1], False, "profile")
        elif view.has(f"{_BACK}|{_TAKEN}|paid|went|card :") and entries:
            so = bool(ids & {payment_id for payment_id, _ in entries})
            no = denied(text, match.start())
            yield Found("card", match[1], so != no, denied=no)
    yield from _kinds_of_method(view, methods, entries)
    for match in re.finditer(
        r"(gift card|visa|mastercard|credit card) (?:has been|was|is|gets|got) (not )?(?:been )?(?:refunded"
        r"|credited|charged|debited)",
        view.text,
    ):
        kind, no = match[1].replace(" ", "_"), bool(match[2])
        ids = {key for key, one in methods.items() if kind in (one["source"], one.get("brand"))}
        yield Found("method", kind, bool(ids & {payment_id for payment_id, _ in entries}) != no, denied=no)


def _kinds_of_method(view: View, methods: Json, entries: list[tuple[str, int]]) -> Iterator[Found]:
    for match in _PAID_BY.finditer(view.text):
        if not view.has(f"{_BACK}|{_TAKEN}|paid|put|topped up|used|went|going") or view.has(
            "rest|remaining|holds?|worth"
        ):
            return
        kind = match[1].replace(" ", "_").rstrip("s")
        ids = {key for key, one in methods.items() if kind in (one["source"], one.get("brand"))}
        no = denied(view.text, match.start())
        if entries or not no:
            yield Found("method", kind, bool(ids & {payment_id for payment_id, _ in entries}) != no, denied=no)


_PAID_BY = re.compile(
    r"(?:to|on|onto|from|with|by|topped up) (?:your|the|a) (?:\$ ?\d+ )?(gift card"
    r"|certificate|visa|mastercard|credit card)(?! (?:with|over|of|worth))"
)


def _used_methods(view: View) -> Iterator[Found]:
    """Whether a gift card or certificate was drawn on since the start."""
    methods = view.ledger.user_before["payment_methods"] | view.ledger.user["payment_methods"]
    for match in re.finditer(
        r"(gift cards?|certificates?|vouchers?|visa|mastercard|credit cards?) (?:was|were"
        r"|has been|have been|is)( not)?(?: been)? (?:used|touched|charged|debited)",
        view.text,
    ):
        kind = match[1].rstrip("s").replace("voucher", "certificate").replace(" ", "_")
        ids = {key for key, one in methods.items() if kind in (one["source"], one.get("brand"))}
        spent = bool(ids & {payment_id for _, payment_id, amount in view.ledger.moved if amount > 0})
        yield Found("used", kind, spent != bool(match[2]), "profile", bool(match[2]))


def _used_both(view: View) -> Iterator[Found]:
    """Which gift cards or certificates the agent says it drew on."""
    for single in re.finditer(
        r"(?:i|we) (?:have )?used (?:your|the) (?:\$ ?\d+ )?(gift card|certificate)(?!s)", view.text
    ):
        source, methods = single[1].replace(" ", "_"), view.ledger.user_before["payment_methods"]
        drawn = any(methods.get(one, {}).get("source") == source for _, one, amount in view.ledger.moved if amount > 0)
        yield Found("used", source, drawn != denied(view.text, single.start()), "profile")
    if match := re.search(r"used both (?:of )?(?:your |the )?(gift card|certificate)s", view.text):
        methods, kind = view.ledger.user_before["payment_methods"], match[1].replace(" ", "_")
        spent = {
            one for _, one, amount in view.ledger.moved if amount > 0 and methods.get(one, {}).get("source") == kind
        }
        yield Found("used", kind, (len(spent) > 1) != denied(view.text, match.start()), "profile")


def _paid_with(view: View) -> Iterator[Found]:
    """A sum and the method that it is said to have been paid with, side by side."""
    if not view.record or view.has(_BACK):
        return
    methods = view.ledger.user_before["payment_methods"] | view.ledger.user["payment_methods"]
    for match in _BESIDE.finditer(view.text):
        kind, amount = match[2].replace(" ", "_"), money(match[1])
        parts = [(p["payment_id"], p["amount"]) for one in _about(view) for p in one["payment_history"]]
        of_kind = {key for key, one in methods.items() if kind in (one["source"], one.get("brand"))}
        with_sum = {payment_id for payment_id, paid in parts if paid == amount}
        if with_sum:
            yield Found("paid with", f"{amount:g} {kind}", bool(with_sum & of_kind))


_PAYS = re.compile(
    rf"(?:your|the) ({_METHOD})s? (?:(?:was|is|has been) (?:charged|debited)|paid|covered) ((?:{_SUMS.pattern}))"
)
_PAYS_FOR = re.compile(rf"(?:your|the) ({_METHOD}) (?:paid|covered|pays|covers)(?: for)? (?:the|your|it|everything)\b")
_PAYS_ALL = re.compile(
    r"\b(?:whole|full|entire) (?:amount|price|fare|sum|trip|bill)?(?: \w+){0,3} (?:was|is|were|went)"
    rf" (?:covered |paid |charged )?(?:by|with|from|to|on) (?:your|the) ({_METHOD})\b"
)


def _payers(view: View) -> Iterator[Found]:
    """What a method is said to have paid: a sum, something, or all."""
    if not view.ledger.moved:
        return
    for match in _PAYS.finditer(view.text):
        if not denied(view.text, match.start()):
            yield Found("paid with", match[0], money(match[2]) in _moved(view, match[1]))
    for match in _PAYS_FOR.finditer(view.text):
        no = denied(view.text, match.start())
        yield Found("paid with", match[1], bool(_moved(view, match[1])) != no, denied=no)
    for match in _PAYS_ALL.finditer(view.text):
        so = sum(abs(amount) for _, _, amount in view.ledger.moved) in _moved(view, match[1])
        no = denied(view.text, match.start())
        yield Found("paid with", f"all {match[1]}", so != no, denied=no)


def _number_given(view: View) -> Iterator[Found]:
    """The number of a reservation that was just made, or that is under discussion."""
    made = [number for number in view.ledger.own if "book" in view.ledger.deeds.get(number, ())]
    for match in re.finditer(
        r"(?:number|code|confirmation)(?: of \w+ \w+)? (?:is|: ?) ?(?=[a-z]*\d)([a-z][a-z0-9]{5})(?!\w)", view.text
    ):
        yield Found("number", match[1], match[1] in (made or view.ledger.discussed), "profile")


_BESIDE = re.compile(
    r"(\$ ?[\d,.]*\d|\d+ dollars)(?: (?:was|were|is|has been))?(?: (?:paid|charged"
    r"|taken|put))? (?:with|from|on|to|by) (?:your|the|a) (?:\$ ?\d+ )?(gift card|certificate"
    r"|visa|mastercard|credit card)"
)
_METHOD_ID = re.compile(r"(?<!\w)((?:certificate|gift_card|credit_card)_\d+)(?!\w)")


def _ids(view: View) -> Iterator[Found]:
    """Ids of payment methods are of the profile; what is called new was not there before."""
    now, before = view.ledger.user["payment_methods"], view.ledger.user_before["payment_methods"]
    for match in _METHOD_ID.finditer(view.text):
        known = match[1] in now and match[1] not in before if view.has("new") else match[1] in now or match[1] in before
        yield Found("method id", match[1], known, "profile")


def _entries(view: View) -> list[tuple[str, int]]:
    """Payments that a clause may speak of: what moved since the start in its direction, else the history."""
    back, taken = view.has(_BACK), view.has(_TAKEN)
    found = [
        (payment_id, amount)
        for _, payment_id, amount in view.ledger.moved
        if (amount < 0) == back or not (back or taken)
    ]
    amounts = {money(one[0]) for one in _SUMS.finditer(view.text)}
    exact = [entry for entry in found if abs(entry[1]) in amounts]
    history = [
        (p["payment_id"], p["amount"])
        for one in _about(view)
        for p in one["payment_history"]
        if (p["amount"] < 0) == back
    ]
    if view.has("originally|paid|had paid|payment history|records"):
        return [entry for entry in history if abs(entry[1]) in amounts] or exact or found or history
    return exact or found or ([] if back else history)


def _free(view: View) -> Iterator[Found]:
    """Whether something was free of charge, or nothing was charged."""
    nothing = view.has(
        r"(?:free of charge|no (?:extra )?(?:charge|fee|cost|payment)|nothing (?:was|has been"
        r"|is|had been)? ?(?:charged|paid|taken)|not (?:been )?charged|not a cent|on the house)"
    )
    if nothing and not view.has("bags? (?:for|are) free|each") and view.ledger.deeds:
        taken = bool(_parts(view, back=False))
        if view.has("all of them on the house|free of charge|charge|fee|charged|paid|taken|cent|payment"):
            yield Found("charge", "none", not taken)
    if (
        match := re.search(
            r"bags?(?: \w+)? (?:is|are|was|were)( not)?(?: all| both)? free(?! (?:of the|ones))", view.text
        )
    ) and view.record:
        added = view.record["nonfree_baggages"] - view.ledger.before(view.subject)["nonfree_baggages"]
        if "add_bags" in view.ledger.deeds.get(view.subject, ()):
            yield Found("bag fee", "none", (added <= 0) != bool(match[1]))
    if view.has(r"no (?:refund|money back)|not refund(?:ed)?(?: you)?|without (?:a )?refund"):
        back = bool(_parts(view, back=True))
        if any("cancel" in deeds for deeds in view.ledger.deeds.values()):
            yield Found("refund", "none", not back)
    elif view.has(
        r"(?:been |was |were |is |have |i |we )refunded|refund (?:is|was|has|of|will)|your refund"
    ) and not _SUMS.search(view.text):
        no = denied(view.text, re.search(r"refund", view.text).start())  # type: ignore[union-attr]
        if view.mood == "is":
            yield Found("refund", "some", bool(_parts(view, back=True)) != no, denied=no)


# Days and times

_DAY = re.compile(
    rf"(?P<iso>2025-\d\d-\d\d)|(?P<m1>{'|'.join(_MONTHS)}) (?P<d1>\d{{1,2}})(?:st|nd"
    rf"|rd|th)?(?!\d)|(?P<d2>\d{{1,2}})(?:st|nd|rd|th)?(?: of)? (?P<m2>{'|'.join(_MONTHS)})(?!\w)"
    r"|(?:the|on the) (?P<d3>\d{1,2})(?:st|nd|rd|th)(?!\w)|the (?P<w>seventeenth|eighteenth"
    r"|nineteenth|twentieth|twenty-(?:first|second|third|fourth|fifth|sixth|seventh"
    r"|eighth|ninth)|thirtieth|thirty-first)"
    r"|(?P<rel>tomorrow|yesterday|today)(?!\w)"
)
_DAYS = (
    "seventeenth eighteenth nineteenth twentieth twenty-first twenty-second twenty-third twenty-fourth twenty-fifth "
    "twenty-sixth twenty-seventh twenty-eighth twenty-ninth thirtieth thirty-first"
)
_ORDINALS = _DAYS.split()
_RELATIVE = {"tomorrow": "2025-03-17", "yesterday": "2025-03-15", "today": TODAY}
_MADE = r"made|created|booked yesterday|was booked|booking date|reserved"
_HOME = r"return\w*|back|home|inbound|comes? back|fly back"
_AWAY = r"leaves?|out|outbound|depart\w*|there|first"


def _days(view: View) -> Iterator[Found]:
    record = view.record
    if not record:
        return
    yield from _births(view)
    for match in _DAY.finditer(view.text):
        day, no = _iso(match), denied(view.text, match.start())
        if not day or view.has("born|birth|dob"):
            continue
        if view.has(_MADE) and record["created_at"] and not view.has("leaves?|fl(?:y|ies|ight)"):
            yield Found("made", day, (record["created_at"][:10] == day) != no, denied=no)
            continue
        if match["rel"] == "today":
            continue
        so = day in _right_days(view, match)
        yield Found("day", day, so != no or no, denied=no)


_BORN = re.compile(
    rf"({'|'.join(_MONTHS)}) (\d{{1,2}})(?:st|nd|rd|th)?(?: ,)? ((?:19|20)\d\d)|((?:19|20)\d\d-\d\d-\d\d)"
)


def _births(view: View) -> Iterator[Found]:
    """Dates of birth are those of passengers, or what the customer said."""
    if not view.has("born|birth|dob"):
        return
    born = {one["dob"] for record in (view.record, view.ledger.before(view.subject)) for one in record["passengers"]}
    for match in _BORN.finditer(view.text):
        day = match[4] or f"{match[3]}-{_MONTHS.index(match[1]) + 1:02}-{int(match[2]):02}"
        yield Found("birth", day, day in born or view.ledger.past.has_heard(day))


def _iso(match: re.Match[str]) -> str:
    if match["iso"]:
        return match["iso"]
    if match["rel"]:
        return _RELATIVE[match["rel"]]
    if match["w"]:
        return f"2025-03-{17 + _ORDINALS.index(match['w'])}"
    month = match["m1"] or match["m2"] or "march"
    day = int(match["d1"] or match["d2"] or match["d3"])
    return f"2025-{_MONTHS.index(month) + 1:02}-{day:02}"


def _right_days(view: View, match: re.Match[str]) -> set[str]:
    """The days that may stand there."""
    ledger, legs = view.ledger, view.record["flights"]
    cue = _last_cue(view.text[: match.start()])
    flights = {found.replace(" ", "") for found in _FLIGHT.findall(view.text)}
    own = {leg["date"] for leg in legs if leg["flight_number"].lower() in flights}
    offered = {offer.date for offer in ledger.offers if offer.number in flights}
    if flights and (own or offered):
        if len(flights) == 1:
            return own | offered if not view.has("return|moved|booked|your") else own or offered
    elif cue == "back" and len(legs) > 1:
        return {leg["date"] for leg in legs[(len(legs) + 1) // 2 :]}
    elif cue == "out":
        return {leg["date"] for leg in legs[: (len(legs) + 1) // 2]}
    every = {leg["date"] for leg in legs} | {date for _, _, date in ledger.searches}
    if not view.own:
        every |= {leg["date"] for number in ledger.discussed[-2:] for leg in ledger.legs.get(number, ())}
    every |= (
        {day for text in ledger.past.heard for day in _spoken(text)}
        if not view.has("your flight|you fly|leaves|booked for")
        else set()
    )
    return every


def _spoken(text: str) -> Iterator[str]:
    for sentence in sentences(text):
        for match in _DAY.finditer(sentence.text):
            yield _iso(match)


def _last_cue(before: str) -> str:
    cues = [(m.end(), "back") for m in re.finditer(rf"\b(?:{_HOME})\b", before)]
    cues += [(m.end(), "out") for m in re.finditer(rf"\b(?:{_AWAY})\b", before)]
    return max(cues)[1] if cues else ""


_CLOCK = re.compile(r"(?<![\d:-])(\d{1,2}:\d\d)(?: ?(am|pm))?(?![\d:])")


def _times(view: View) -> Iterator[Found]:
    """Clock times are those of a flight that the sentence names, else of one under discussion."""
    table = view.ledger.base.tables["flights"]
    named = [found.replace(" ", "").upper() for found in _FLIGHT.findall(view.text)]
    legs = [leg["flight_number"] for leg in view.record.get("flights", ())]
    flights = [table[one] for one in named if one in table] or [table[one] for one in legs]
    around = [found.replace(" ", "").upper() for found in _FLIGHT.findall(view.sentence)]
    flights += [] if named else [table[one.number.upper()] for one in view.ledger.offers]
    flights += [] if named else [table[one] for one in around if one in table]
    if legs and not named and not around and view.has("your|you") and not view.has(_OTHER):
        flights = [table[one] for one in legs]
    for match in _CLOCK.finditer(view.text):
        clock = match[1].zfill(5)
        if match[2] == "pm" and clock < "12:00":
            clock = f"{int(clock[:2]) + 12}{clock[2:]}"
        before = view.text[max(0, match.start() - 24) : match.start()]
        cue, half = _last_cue(view.text[: match.start()]), (len(legs) + 1) // 2
        if not named and cue and len(legs) > 1 and len(flights) == len(legs):
            flights = [table[one] for one in (legs[half:] if cue == "back" else legs[:half])]
        which = (
            ("arrival",) if re.search(r"\b(?:lands?|arriv\w+|landing|until|-)\b", before) else ("departure", "arrival")
        )
        times = {one[f"scheduled_{end}_time_est"][:5] for one in flights for end in which}
        if times:
            yield Found("time", clock, clock in times, "flights")


# Flights and routes

_GONE = (
    r"cancell?ed(?: by)?|called off|scrapped|axed|grounded|not operat\w+|not (?:fly"
    r"|flying)|no longer (?:among|fl\w+|listed|operat\w+)"
)
_STANDS = (
    r"(?:still )?operat(?:es|ing)|on schedule|as (?:planned|scheduled)|takes off|goes ahead"
    r"|(?:not|n't) (?:been )?(?:cancell?ed|called off)|running"
)
_BOOKED = r"you(?:r|'re| are)?|booked|moved|rebooked|reservation|put|switched|return flight|flying|fly"
_OTHER = (
    r"another|other|alternative|available|there (?:is|are|were)|seats?|left|options?"
    r"|found|instead|not among|no longer|cheapest|earliest|latest|since|rather|besides"
)


def _flights(view: View) -> Iterator[Found]:
    own = {leg["flight_number"].lower(): leg for leg in view.record.get("flights", ())}
    before = {leg["flight_number"].lower() for leg in view.ledger.before(view.subject)["flights"]} if own else set()
    known = {offer.number for offer in view.ledger.offers}
    known |= {leg["flight_number"].lower() for legs in view.ledger.legs.values() for leg in legs}
    seated = re.search(
        r"\b(?:you (?:now )?have|now have|given you|got you|have) (?:a |an |your )?seats? on qlx", view.text
    )
    for match in _FLIGHT.finditer(view.text):
        number = match[1].replace(" ", "")
        no = (
            denied(view.text, match.start())
            or re.match(r"(?: is| are)? ?(?:not|no longer|any longer)\b", view.text[match.end() :]) is not None
        )
        yield from _fate(view, number, own, view.text[max(0, match.start() - 45) : match.end() + 60])
        if own and (seated or (not view.has(_OTHER) and view.has(_BOOKED))):
            yield Found(
                "flight", number, (number in own) != no or (no and number in before and number not in own), denied=no
            )
        elif not no:
            yield Found("flight", number, number in own or number in known or number in before)
        if not no:
            yield from _place_of_flight(view, number, match)
    named = [found.replace(" ", "") for found in _FLIGHT.findall(view.sentence)]
    if named and not _FLIGHT.search(view.text) and view.has("it|that one|the flight|this"):
        yield from _fate(view, named[-1], own, view.text)


def _fate(view: View, number: str, own: dict[str, Json], around: str) -> Iterator[Found]:
    """Whether the airline has cancelled it."""
    leg = own.get(number) or next(
        (o for legs in view.ledger.legs.values() for o in legs if o["flight_number"].lower() == number), None
    )
    if view.record.get("status") == "cancelled" or any("cancel" in d for d in view.ledger.deeds.values()):
        return
    stands = re.search(rf"\b(?:{_STANDS})\b", around)
    gone = re.search(rf"\b(?:{_GONE})\b", around)
    if not stands and not gone:
        return
    lost = leg is not None and view.ledger.lost(leg)
    yield Found("lost", number, lost == (stands is None))
    if (
        leg is not None
        and not view.ledger.checked(leg)
        and re.search(r"\bi (?:have )?(?:checked|looked|searched)\b", view.sentence)
    ):
        yield Found("checked", number, False)


_PLACES = (("first", 0), ("second", 1), ("third", 2))


def _place_of_flight(view: View, number: str, match: re.Match[str]) -> Iterator[Found]:
    legs = [leg["flight_number"].lower() for leg in view.record.get("flights", ())]
    before = view.text[max(0, match.start() - 40) : match.start()]
    cues = [
        (m.end(), word)
        for word in ("first", "second", "return", "back", "out", "outbound")
        for m in re.finditer(rf"\b{word}\b", before)
    ]
    if not cues or not legs or (number not in legs and view.has(_OTHER)):
        return
    word = max(cues)[1]
    half = (len(legs) + 1) // 2
    if word in ("first", "second"):
        place = 0 if word == "first" else 1
        yield Found("order", number, place < len(legs) and legs[place] == number)
    elif len(legs) > 1:
        yield Found("order", number, number in (legs[half:] if word in ("return", "back") else legs[:half]))


_CODES = {code.lower(): code for code in OWN.airports} | {
    city.lower().replace(".", ""): code for code, city in OWN.airports.items()
}
_PLACE = "|".join(sorted((re.escape(one) for one in _CODES), key=len, reverse=True))
_FROM_TO = re.compile(
    rf"(?<!\w)(?P<between>between )?({_PLACE})(?: \(?({_PLACE})\)?)?(?: airport)?(?: (?:to"
    rf"|and|towards|-|=|>|->|into|:|,))* ?(?<!\w)({_PLACE})(?!\w)"
)
_START = re.compile(
    rf"(?<!\w)({_PLACE})(?!\w)(?=[^,]{{0,20}}\b(?:where (?:the journey begins|you start"
    r"|it starts)|is the (?:start|origin)))|(?:start\w*|begin\w*|origin(?: is| :)?"
    rf"|depart\w* from|leav\w+ from) (?:in |at |from )?(?<!\w)({_PLACE})(?!\w)"
)
_END = re.compile(
    rf"(?<!\w)({_PLACE})(?!\w)(?=[^,]{{0,24}}\b(?:you will land|you are heading|is the destination"
    r"|where you(?: will)? (?:land|arrive)))|(?:heading (?:to|for)|land\w* in|arriv\w+ (?:in"
    rf"|at)|destination(?: is| :)?|off to|going to|fl(?:y|ying|ies|ight) to|trip to) (?<!\w)({_PLACE})(?!\w)"
)
_STOP = re.compile(rf"(?:stop\w*|connection|connecting|via|change planes)[^.]{{0,20}}?(?<!\w)({_PLACE})(?!\w)")


def _routes(view: View) -> Iterator[Found]:
    record = view.record
    if not record:
        return
    no = view.has("no trip|not")
    pairs = _pairs(view)
    for match in _FROM_TO.finditer(view.text):
        one, other = _CODES[match[2]], _CODES[match[4]]
        if one == other or denied(view.text, match.start()):
            continue
        so = (one, other) in pairs or (bool(match["between"]) and (other, one) in pairs)
        yield Found("route", f"{one}-{other}", so)
    for pattern, allowed in ((_START, {o for o, _ in pairs}), (_END, {d for _, d in pairs})):
        for match in pattern.finditer(view.text):
            place = _CODES[match[1] or match[2]]
            if not denied(view.text, match.start()) and not no:
                yield Found("place", place, place in allowed)
    if stop := _STOP.search(view.text):
        stops = {leg["destination"] for leg in record["flights"]} - {record["destination"], record["origin"]}
        yield Found("stop", _CODES[stop[1]], _CODES[stop[1]] in stops)
    if off := re.search(rf"no trip to ({_PLACE})(?!\w)", view.text):
        gone = {one["destination"] for one in view.ledger.records.values() if one.get("status") == "cancelled"}
        yield Found("gone", _CODES[off[1]], _CODES[off[1]] in gone)


def _pairs(view: View) -> set[tuple[str, str]]:
    """The routes that a clause may name: a flight's own, the trip's, its legs', those of searches."""
    record, table = view.record, view.ledger.base.tables["flights"]
    flights = [found.replace(" ", "").upper() for found in _FLIGHT.findall(view.text)]
    exact = {(table[one]["origin"], table[one]["destination"]) for one in flights if one in table}
    trip = {(record["origin"], record["destination"])}
    if exact and len(flights) == 1:
        return exact | ({*trip} if view.has("trip|reservation|route") else set())
    legs = {(leg["origin"], leg["destination"]) for leg in record["flights"]}
    days = {_iso(match) for match in _DAY.finditer(view.text)}
    that_day = [leg for leg in record["flights"] if leg["date"] in days]
    if len(days) == 1 and that_day and not flights:
        first = {*trip} if record["flights"][0]["date"] in days else set()
        return first | {(leg["origin"], leg["destination"]) for leg in that_day}
    if view.has("via|stop|connect\\w*"):
        return trip | legs
    if view.has("and back|round trip|goes from|trip goes|takes you from"):
        return trip
    found = trip | legs | exact | {(one, other) for one, other, _ in view.ledger.searches}
    if not view.own:
        for number in view.ledger.discussed:
            one = view.ledger.records.get(number)
            found |= {(one["origin"], one["destination"])} if one else set()
    return found


# Counts, cabins, names

_BAGS = re.compile(
    rf"(?<![\w$]){_COUNT}(?: of (?:the|your|these))?(?: more| extra| additional| other)?(?: checked"
    rf"| check-in)? (?:bags?|suitcases|pieces|bag)(?!\w)|bags? : {_COUNT}(?!\w)|bags (?:to"
    rf"|of) {_COUNT}"
)
_PAID_BAGS = re.compile(
    rf"{_COUNT}(?: of which| of them| of these| extra)?(?: (?:is|are|were|was|had to be"
    rf"|you|one))*(?: bags?)? (?:paid|had to be paid)(?! (?:in|with))|{_COUNT} paid"
)


def _bags(view: View) -> Iterator[Found]:
    record = view.record
    if not record or view.has("ask\\w*|free for|get .* for free|each|allow\\w*|beyond|per passenger"):
        return
    before, total, paid = view.ledger.before(view.subject), record["total_baggages"], record["nonfree_baggages"]
    added = total - before["total_baggages"]
    if match := re.search(r"bags? (?:have|has|was|were|is|are) (?:been )?(?:removed|taken off)", view.text):
        no = denied(view.text, match.start())
        yield Found("bags", "fewer", (added < 0) != no, denied=no)
    for match in _BAGS.finditer(view.text):
        if _repeats(view, match[0]):
            continue
        count, near = (
            _number(next(filter(None, match.groups()))),
            view.text[max(0, match.start() - 30) : match.end() + 30],
        )
        if denied(view.text, match.start()):
            continue
        if re.search(r"\b(?:extra|paid)\b", match[0]) or re.search(
            rf"{re.escape(match[0])} (?:you )?(?:paid|had to be paid|that (?:is|was|are|were) not free)", near
        ):
            yield Found("paid bags", str(count), count in (paid, added))
        elif re.search(r"\b(?:added|adding|more|additional|put on)\b", near):
            yield Found("added bags", str(count), count == added or (count == total and "now" in near))
        elif re.search(r"\b(?:before|had|were|was|previously|up from|used to)\b", near):
            yield Found("bags", str(count), count in (total, before["total_baggages"]))
        elif not re.search(r"\bof the\b", match[0]) and not re.search(
            r"\bfree\b", view.text[match.end() : match.end() + 12]
        ):
            yield Found(
                "bags",
                str(count),
                count == total or ("bag" in match[0] and view.has("cost") and count in (paid, added)),
            )
    for match in _PAID_BAGS.finditer(view.text):
        if view.has("bags?|suitcases?|luggage|baggage") or "bags" in view.sentence:
            count = _number(next(filter(None, match.groups())))
            yield Found("paid bags", str(count), count == paid)
    raised = re.search(rf"from {_COUNT} to {_COUNT}(?! \w*(?:day|march))", view.text)
    if raised and view.has("bags?|luggage|baggage"):
        so = (_number(raised[1]), _number(raised[2])) == (before["total_baggages"], total)
        yield Found("bags", raised[0], so)


_SAYING = r"i|we|you|your|it|is|are|was|were|has|have|had|there|now|as|added|paid|free|includes?|costs?|:"


def _repeats(view: View, words: str) -> bool:
    """Whether a clause without a verb only says again what the customer has said."""
    if view.has(_SAYING):
        return False
    count = next((word for word in re.split(r"\W+", words) if word.isdigit() or word in _WORDS), "")
    spoken = {count, *(word for word, number in _WORDS.items() if count and number == _number(count))}
    digits = {str(_number(count))} if count else set[str]()
    return any(view.ledger.past.has_heard(word) for word in (spoken | digits) - {""})


def _number(word: str) -> int:
    return int(word) if word.isdigit() else _WORDS[word]


_PEOPLE = re.compile(
    rf"(?<![\w$]){_COUNT} (?:passengers?|travell?ers?|people|persons?)(?!\w)|(?:for"
    rf"|of) {_COUNT}(?: of you)?(?= passengers?)|passengers? : {_COUNT}(?!\w)|travell?ers is (?:still )?{_COUNT}(?!\w)"
    r"|only (passenger)(?!\w)"
)


def _people(view: View) -> Iterator[Found]:
    record = view.record
    if not record or view.has("at most|up to|maximum"):
        return
    if match := re.search(
        r"added .*\bas (?:a|an|the) (?:second|third|fourth|fifth|new|extra|additional|another) passenger", view.text
    ):
        yield Found("passengers", "more", denied(view.text, match.start()), denied=denied(view.text, match.start()))
    for match in _PEOPLE.finditer(view.text):
        word = next(filter(None, match.groups()))
        count = 1 if word == "passenger" else _number(word)
        if not denied(view.text, match.start()):
            yield Found("passengers", str(count), count == len(record["passengers"]))


_OWNED = re.compile(rf"(?<![\w$]){_COUNT}(?: other)? reservations")


def _holdings(view: View) -> Iterator[Found]:
    for match in _OWNED.finditer(view.text):
        count, own = _number(match[1]), len(view.ledger.own)
        standing = sum(view.ledger.records[one].get("status") != "cancelled" for one in view.ledger.own)
        allowed = (
            {own - 1, standing - 1, standing}
            if "other" in match[0]
            else {own, standing, len(view.ledger.user_before["reservations"])}
        )
        if view.has("profile|you have|you had|your|account") and not view.has("cancell?ed"):
            yield Found("reservations", str(count), count in allowed, "profile")


_OFFERED = (
    r"seats? (?:left|available|free)|seats left|cheapest|fares?|costs? \$|price|starts? at"
    r"|left|for \$|at \$|is \$|moved|from|was|used to|had been|originally|since|instead"
    r"|include"
)


def _in_cabin(view: View) -> Iterator[Found]:
    record = view.record
    if not record or (view.ledger.offers and not view.own and view.has("cheapest|fares?|costs?|starts? at|price|seat")):
        return
    before = view.ledger.before(view.subject)["cabin"]
    for match in re.finditer(
        r"from (basic economy|economy|business)(?: class)? to (basic economy|economy|business)\b", view.text
    ):
        moved = [found.replace(" ", "_") for found in match.groups()]
        yield Found("cabin", " to ".join(moved), moved == [before, record["cabin"]])
    for match in re.finditer(r"\b(basic economy|economy|business)\b", view.text):
        cabin, no = match[1].replace(" ", "_"), denied(view.text, match.start())
        past = re.search(r"\b(?:used to|was|were|had been|from|originally)\b[^,]{0,40}$", view.text[: match.start()])
        if no:
            yield Found("cabin", cabin, cabin != record["cabin"], denied=True)
        elif view.has(r"seats? (?:left|available|free)|seats left|just one|for example"):
            continue
        else:
            yield Found("cabin", cabin, cabin == record["cabin"] or (bool(past) and cabin == before))


_FULL = re.compile(
    rf"(?<!\w)({'|'.join(name.lower() for name in FIRST_NAMES)}) (?!and\b|or\b|is\b"
    r"|was\b|has\b|to\b|in\b|your\b|stays\b|on\b|from\b|you\b|of\b|with\b|the\b|for\b"
    r"|fly\b|flies\b|travel\w*\b|have\b|had\b|go\b|goes\b|can\b|both\b|leave\b|sit\b|also\b|too\b|plus\b"
    r"|will\b|are\b|i\b|now\b|at\b|as\b|who\b)([a-z]+)(?!\w)"
)
_SEEN = (
    r"for you and|there is no|not on|no longer on|off|removed|passengers?|listed|names?|called"
    r"|travell?ers?|fly\w*|flying|on (?:the|your) (?:ticket|reservation|booking)|corrected"
    r"|changed|reads|says|now|renamed|seats"
)


_TURNED = "changed|corrected|renamed|updated|from"


def _names(view: View) -> Iterator[Found]:
    record = view.record
    if not record or not view.has(f"{_SEEN}|birth|dob"):
        return
    given = {one["first_name"].lower() for one in record["passengers"]}
    for match in re.finditer(
        r"(\w+)(?: 's)?(?: (?:is|was|has been))? (?:(?:not|no longer) on (?:the|your)|removed from|taken off)",
        view.text,
    ):
        if match[1] in given or match[1] in FIRST_NAMES:
            yield Found("gone", match[1], match[1] not in given)
    if removed := re.search(r"removed (\w+) from", view.text):
        yield Found("gone", removed[1], removed[1] not in given)
    now, before = (_passengers(one) for one in (record, view.ledger.before(view.subject)))
    own = f"{view.ledger.user['name']['first_name']} {view.ledger.user['name']['last_name']}".lower()
    for match in re.finditer(
        r"(\w+) 's (?:last |family |sur)?name (?:has been|was|is|now reads|reads)( not)?(?: been)?(?: now)? ?(?:changed"
        r"|corrected|updated|fixed)?(?: to)? (\w+)",
        view.text,
    ):
        if match[1] in given and match[3] not in ("right", "now", "wrong", "correct", "on"):
            yield Found("name", f"{match[1]} {match[3]}", (f"{match[1]} {match[3]}" in now) != bool(match[2]))
    for match in re.finditer(rf"(?:{_TURNED}) ([a-z]+ [a-z]+) (?:in)?to ([a-z]+ [a-z]+)(?!\w)", view.text):
        if match[1] in before and not denied(view.text, match.start()):
            yield Found("name", match[2], match[2] in now)
    if view.has(
        r"date of birth(?: \w+)* (?:changed|corrected|updated)|(?:changed|corrected|updated)"
        r"(?: \w+){0,3} (?:date of birth|birth date|dob)"
    ):
        born = [
            [one["dob"] for one in record["passengers"]] for record in (view.record, view.ledger.before(view.subject))
        ]
        yield Found("birth", "changed", (born[0] != born[1]) != view.has("not|never"), denied=view.has("not|never"))
    for match in _FULL.finditer(view.text):
        name = f"{match[1]} {match[2]}"
        no = denied(view.text, match.start()) or view.has(f"no {name}")
        past = re.search(
            r"\b(?:was|used to|from|instead of|before)\b[^,]{0,20}$", view.text[: match.start()]
        ) or re.match(r" (?:is|was|has been|should|to|into|now|became|:|->)", view.text[match.end() :])
        if match[1] not in {one.split()[0] for one in now | before} and not no and not view.has("passengers?|add\\w*"):
            continue
        so = name in now or name == own or (bool(past) and name in before)
        yield Found("name", name, so != no, denied=no)


def _passengers(record: Json) -> set[str]:
    return {f"{one['first_name']} {one['last_name']}".lower() for one in record["passengers"]}


_METHODS = re.compile(rf"(?<![\w$]){_COUNT} (gift card|certificate|credit card|voucher)s?(?!\w)")


def _counted_methods(view: View) -> Iterator[Found]:
    for match in _METHODS.finditer(view.text):
        count, kind = _number(match[1]), match[2].replace("voucher", "certificate").replace(" ", "_")
        if re.search(rf"\b(?:{_SENT})\b", view.text[: match.start()]) and kind == "certificate":
            yield Found("certificates", str(count), count == len(view.ledger.certificates), "profile")
        elif view.has("profile|you have|you had|you still have|there are|account|you hold") and match[1] != "both":
            held = {
                sum(one["source"] == kind for one in user["payment_methods"].values())
                for user in (view.ledger.user, view.ledger.user_before)
            }
            yield Found("methods", f"{count} {kind}", count in held, "profile")


_EXTRAS = (
    r"limousine|limo|hotel|taxi|cab ride|shuttle|first class|lounge|miles|bonus points"
    r"|window seat|aisle seat|seat assignment|wi-?fi|rental car|refreshments|priority boarding"
)
_DID = (
    r"booked|arranged|ordered|reserved|added|put|given|gave|upgraded|sent|credited"
    r"|organi[sz]ed|got you|assigned|included|thrown in"
)


def _extras(view: View) -> Iterator[Found]:
    """What no tool of the airline gives."""
    if view.mood == "is" and (
        match := re.search(rf"\b(?:{_DID})\b(?:[^,]|,(?=\d)){{0,40}}\b(?:{_EXTRAS})\b", view.text)
    ):
        no = denied(view.text, match.start())
        yield Found("extra", match[0], no, "agent", no)


_DEED = r"cancel\w*|corrected|changed|updated|moved|added|issued|sent|upgraded"


def _everywhere(view: View) -> Iterator[Found]:
    """What is said to have been done to all reservations."""
    if view.has(
        rf"all (?:(?:of )?your|{_COUNT} of your|{_COUNT})(?: other)? (?:reservations|bookings|trips)"
    ) and view.has(_DEED):
        touched = [number for number in view.ledger.own if view.ledger.deeds.get(number)]
        yield Found("everywhere", "yes", len(touched) == len(view.ledger.own), "profile")


Check = Callable[[View], Iterator[Found]]
_CHECKS: tuple[Check, ...] = (
    _sums,
    _cards,
    _used_methods,
    _used_both,
    _paid_with,
    _payers,
    _ids,
    _number_given,
    _free,
    _everywhere,
    _days,
    _times,
    _flights,
    _routes,
    _bags,
    _people,
    _holdings,
    _counted_methods,
    _extras,
    _in_cabin,
    _names,
)
