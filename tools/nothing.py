"""Conversations about nothing, which a tiny policy reads before it learns a domain: what a language model brings along.

Made-up values, tools of no shop: somebody wants something, is asked for this and that, a tool is called with what was
said, and what it answered is told. No policy, no tool of a domain is in them. They teach what every pretrained model
can do: keep to the form of a conversation, copy a word or number from where it was said to where it is needed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from mua.types import Json

_ONSETS = tuple("b c d f g h j k l m n p r s t v w y z br cl dr fl gr pl sh st th tr".split())  # noqa: SIM905
_VOWELS = tuple("a e i o u ai ea ia ie io oo ou".split())  # noqa: SIM905
_CODAS = ("", "", "", "n", "l", "s", "t", "m", "r", "ck", "nd", "st", "rd", "ll", "p")
_VERBS = ("paint", "wash", "lift", "fold", "stack", "plant", "carve", "sort")
_NOUNS = ("stone", "color", "shape", "river", "tower", "garden", "engine", "mirror", "planet", "window")
_FRAMES = ("It is {0}.", "The {1} is {0}.", "{0}.", "To {0}.", "The {0}.", "I am {0}.")
_ASKS = ("What is the {0}?", "Which {0} is it?", "What is your {0}?")
_TOLD = ("The {0} {1} is in {2}.", "Done, {0} {1} is {2}.", "Sorry, {0} {1} is {2}.", "Done, {0} {1} goes to {2}.")
_WISHES = ("I want to {0} my {1}.", "Please {0} a {1} for me.", "Where is my {1}? I want to {0} it.")


def conversations(count: int, seed: int) -> Iterator[list[Json]]:
    """``count`` conversations in OpenAI form; the same for the same arguments."""
    rng = random.Random(f"nothing/{seed}")
    for _ in range(count):
        yield _conversation(rng)


def _word(rng: random.Random) -> str:
    return rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)


def _value(rng: random.Random) -> str:
    if rng.random() < 0.4:
        return str(rng.randint(1000, 9999))
    return (_word(rng) + (_word(rng) if rng.random() < 0.7 else "")).capitalize()


def _conversation(rng: random.Random) -> list[Json]:
    """One to three facts are asked for, tools are called with what is known by then, the last answer is told."""
    verb, nouns = rng.choice(_VERBS), rng.sample(_NOUNS, 3)
    messages: list[Json] = [{"role": "system", "content": "You are a desk."}]
    messages.append({"role": "user", "content": rng.choice(_WISHES).format(verb, nouns[0])})
    known: dict[str, str] = {}
    for noun in nouns[: rng.randint(1, 3)]:
        known[noun] = _value(rng)
        messages.append({"role": "assistant", "content": rng.choice(_ASKS).format(noun)})
        messages.append({"role": "user", "content": rng.choice(_FRAMES).format(known[noun], noun)})
    for _ in range(rng.choice((1, 1, 2))):
        answer: Json = {nouns[-1]: rng.choice((True, False, _value(rng), _value(rng)))}
        answer |= {nouns[0]: [_value(rng) for _ in range(rng.randint(1, 3))]} if rng.random() < 0.3 else {}
        messages += _call(rng, verb, nouns[0], known, answer)
    value = answer[nouns[-1]] if isinstance(answer[nouns[-1]], str) else known[noun]
    messages.append({"role": "assistant", "content": rng.choice(_TOLD).format(nouns[0], known[nouns[0]], value)})
    return [*messages, {"role": "user", "content": rng.choice(("Thanks, bye.", "Okay, bye.", "All right."))}]


def _call(rng: random.Random, verb: str, noun: str, known: Json, answer: Json) -> list[Json]:
    """A tool call with some of what is known; the last argument may stand in a list or an object, as tools have it."""
    chosen = sorted(rng.sample(list(known), rng.randint(1, min(2, len(known)))), key=list(known).index)
    arguments = {key: known[key] for key in chosen}
    if rng.random() < 0.3:
        arguments[chosen[-1]] = [known[chosen[-1]]] if rng.random() < 0.5 else {noun: known[chosen[-1]]}
    function = {"name": f"{verb}_{noun}", "arguments": json.dumps(arguments)}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": json.dumps(answer)},
    ]
