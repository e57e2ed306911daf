"""Phrases as data: a small notation for families of wordings, and its translation into regular expressions.

::

    <cancel>            any form of the verb: cancel, cancels, cancelled, canceled, cancelling, ...
    <cancel:done>       its past and participle;  <cancel:base> its base form
    @human              one of the list ``human`` of the same file or of the general one
    ...                 up to four words in between;  (a|b), x?  as in regular expressions
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import yaml

from mua.types import Json

_IRREGULAR = {
    "send": ("sent",), "take": ("took", "taken"), "give": ("gave", "given"), "make": ("made",), "pay": ("paid",),
    "find": ("found",), "get": ("got", "gotten"), "go": ("went", "gone"), "do": ("did", "done"), "tell": ("told",),
    "see": ("saw", "seen"), "hold": ("held",), "leave": ("left",), "put": ("put",), "set": ("set",),
    "let": ("let",), "buy": ("bought",), "bring": ("brought",), "say": ("said",), "have": ("had",),
    "know": ("knew", "known"), "read": ("read",), "run": ("ran", "run"), "fly": ("flew", "flown"),
    "come": ("came", "come"), "begin": ("began", "begun"), "write": ("wrote", "written"),
    "speak": ("spoke", "spoken"), "think": ("thought",), "keep": ("kept",), "lose": ("lost",),
    "choose": ("chose", "chosen"), "cut": ("cut",), "undo": ("undid", "undone"),
    "withdraw": ("withdrew", "withdrawn"), "reset": ("reset",), "freeze": ("froze", "frozen"),
}  # fmt: skip
_DOUBLED = {
    "cancel", "stop", "swap", "ship", "drop", "transfer", "refer", "plan", "permit", "commit", "submit", "label",
    "travel", "plug", "scrap", "flip", "total",
}  # fmt: skip
_VERB = re.compile(r"<([a-z]+)(?::(done|base|ing))?((?: [a-z]+)*)>")
_LIST = re.compile(r"@([a-z_]+)")
GAP = r"(?: [^ ]+){0,4}? "


@lru_cache(maxsize=1024)
def forms(verb: str, which: str = "") -> tuple[str, ...]:
    """The forms of a verb; ``which``: ``done`` past and participle, ``base``, ``ing``, or all of them."""
    ends_e, ends_y = verb.endswith("e"), verb.endswith("y") and verb[-2:-1] not in "aeiou"
    stem = verb[:-1] if ends_e or ends_y else verb
    done = list(_IRREGULAR.get(verb, (stem + ("ied" if ends_y else "ed"),)))
    ing = [stem + ("ying" if ends_y else "ing")]
    if verb in _DOUBLED:
        ing.append(f"{verb}{verb[-1]}ing")
        if verb not in _IRREGULAR:
            done.append(f"{verb}{verb[-1]}ed")
    if which:
        return tuple({"done": done, "base": [verb], "ing": ing}[which])
    third = f"{stem}ies" if ends_y else verb + ("es" if re.search(r"(s|x|z|ch|sh|o)$", verb) else "s")
    return tuple(dict.fromkeys([verb, third, *done, *ing]))


def expression(phrases: Iterable[str], lists: Mapping[str, Sequence[str]]) -> re.Pattern[str]:
    """One expression for all phrases, over normalised text; it matches whole words."""
    parts = [translated(phrase, lists) for phrase in phrases]
    return re.compile(rf"(?<![\w#$])(?:{'|'.join(parts)})(?!\w)" if parts else r"(?!)")


def translated(phrase: str, lists: Mapping[str, Sequence[str]]) -> str:
    """The regular expression of one phrase."""
    phrase = _LIST.sub(lambda found: f"(?:{'|'.join(translated(p, lists) for p in lists[found[1]])})", phrase)
    phrase = _VERB.sub(lambda found: f"(?:{'|'.join(forms(found[1], found[2] or ''))}){found[3]}", phrase)
    return phrase.replace(" ... ", GAP)


def load(path: Path) -> Json:
    """A file of phrases."""
    with path.open(encoding="utf-8") as file:
        found: Json = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return found
