"""What the traveller says: the trip, answers that tell nothing, and the frame around wishes."""

from __future__ import annotations

import random

from environments.gyms.travel.catalog import Aspect, aspect_of, catalog
from mua.environment.protocol import Task
from mua.types import Json

_FRAMES = (
    "Hello, I am planning a trip. {needs}",
    "Hi! Could you book something for me? {needs}",
    "I need help with a journey. {needs} Can you take care of it?",
    "{needs} Please find out what suits me and book it.",
)
_BUDGETS = (
    "Of what has all that I want I take the cheapest.",
    "My budget is limited: where everything is as I like it, the cheapest will do.",
)
"""What UserRL's openings end with, as to the sense."""
IMPATIENT = "I have been asked too much that is beside the point; please book."
CHAT = ("All right.", "Good, go on.", "Thank you, that sounds fine.", "Take your time.", "I am glad that you help me.")
MISS = (
    "I have no strong feelings about that.",
    "That makes no difference to me.",
    "Whatever comes, I do not mind.",
    "You may choose that as you like.",
)
VAGUE = (
    "Hm, I would not know where to begin. Ask me about one thing.",
    "There are some things that matter to me, but that is too broad to answer.",
    "Could you be more specific? One point at a time, please.",
    "That is a lot at once. What exactly would you like to know?",
)
AGAIN = ("As I said: {hint}", "I have told you that already. {hint}", "Once more, then. {hint}")
VOLUNTEERED = ("By the way, about the {noun}: {hint}", "There is one thing about the {noun}. {hint}")
COMPLETE = "That is all that matters to me about the {noun}."
BOOKED = {
    "best": "{id} is just what I was hoping for.",
    "correct": "{id} has all I want, although I would have liked to pay less.",
    "wrong": "{id} is not what I had in mind.",
    "noise": "{id} is not even for the right place and day.",
}


def openings(task: Task) -> list[str]:
    """First utterances: the whole trip, and of the wishes what they are about."""
    if "opening" in task.data:
        return [f"{task.data['opening']} {budget}" for budget in _BUDGETS]
    rng = random.Random(f"openings/{task.id}")
    return [frame.format(needs=" ".join(_need(rng, one) for one in task.data["aspects"])) for frame in _FRAMES]


def persona(task: Task) -> str:
    """What an LLM that plays the traveller is told, wishes and all."""
    lines = [_persona_of(one) for one in task.data["aspects"]]
    return (
        "You are a traveller who writes to a booking agent.\n" + "\n".join(lines) + "\n"
        "You tell a wish only when the agent asks about that very thing, one wish at a time, and you hint at it "
        "instead of stating it. When a question asks for everything at once, you ask for a more precise one."
    )


def facts(task: Task) -> str:
    """The trip, and no wish itself."""
    return openings(task)[0]


def wish(preference: Json, aspect: Aspect) -> str:
    """What is wanted, plainly."""
    if "wish" in preference:
        return str(preference["wish"])
    values = aspect.attributes[preference["attribute"]].values
    return next(value.wish for value in values if value.name == preference["value"])


def hint(preference: Json, aspect: Aspect) -> str:
    """The sentence by which a wish becomes known."""
    if "wish" in preference:
        return str(preference["hint"])
    values = aspect.attributes[preference["attribute"]].values
    return next(value.hints[preference["hint"]] for value in values if value.name == preference["value"])


def cue(preference: Json, aspect: Aspect) -> str:
    """The sentence of the opening by which the traveller lets on that there is a wish."""
    return aspect.attributes[preference["attribute"]].cues[preference["cue"]]


def _need(rng: random.Random, one: Json) -> str:
    aspect = catalog()[one["aspect"]]
    need = rng.choice(aspect.needs).format(**one["arguments"])
    return " ".join([need, *(cue(preference, aspect) for preference in one["preferences"])])


def _persona_of(one: Json) -> str:
    aspect = aspect_of(one)
    arguments = ", ".join(f"{name} {value}" for name, value in one["arguments"].items())
    wishes = "; ".join(f"the traveller {wish(preference, aspect)}" for preference in one["preferences"])
    return f"You need a {aspect.noun} ({arguments}). Your wishes for it: {wishes}."
