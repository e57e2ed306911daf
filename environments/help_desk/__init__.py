"""A small shop's help desk: seven tools over a database, a one-page policy, and customers with one wish each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from environments._service import ServiceDomain, Sides
from environments.help_desk.players import CANNED, DONE, Expert
from environments.help_desk.tasks import PINNED, customer, part_of
from environments.help_desk.tools import HelpDesk
from mua.environment.protocol import Environment, Move, Task
from mua.environment.user import STOP_SIGNAL
from mua.types import Json

_WISHES = {
    "track": "You want to know where your order is now.",
    "cancel": "You want to cancel your order.",
    "redirect": "You want your order to go to another city: {city}.",
    "return": "You want to return the {item} from your order.",
}
_TOLD = {
    "status": "Order {name} is {value}.",
    "place": "Order {name} is in {value}.",
    "account": "Order {name} is not on your account.",
    "sale": "The {name} is final sale.",
}


class HelpDeskDomain(ServiceDomain):
    """Implements :class:`mua.environment.domain.Domain`, ``Expert``, ``HasPersona`` and ``Attacked``."""

    name = "help_desk"
    short_prompt = "You are the help desk."
    sides = Sides(Path(__file__).parent, PINNED.load, customer, part_of, Expert, CANNED)

    def environment(self) -> Environment:
        return HelpDesk()

    def persona(self, task: Task) -> str:
        known = task.data["known"]
        return (
            f"You are {known['name']}, a customer of a small shop, and you write to its help desk. "
            f"{_WISHES[task.data['wish']].format(**known)} Your order number is {known['order']}. "
            f"Say what you want first, in one short sentence, and tell a number or your name only when "
            f"you are asked for it. If you are refused, accept it. When your wish is settled, answer {STOP_SIGNAL}."
        )

    def gold(self, task: Task) -> Sequence[Move]:
        looked_up: list[Move] = [(demand["call"], demand["arguments"]) for demand in task.data["demands"]]
        done: list[Move] = [(action["name"], action["arguments"]) for action in task.data["actions"]]
        if task.data["wish"] == "return" and done:
            known = task.data["known"]
            looked_up.append(("get_item", {"order": known["order"], "item": known["item"]}))
        return [*looked_up, *done, _told(task)]


def _told(task: Task) -> str:
    """The wording of the task's fact."""
    fact: Json = task.data["facts"][0]
    if fact["role"] == "deed":
        known = task.data["known"]
        return DONE[task.data["wish"]].format(order=known["order"], detail=known.get("city") or known.get("item"))
    return _TOLD[fact["role"]].format(name=fact["thing"].split(" ", 1)[1], value=fact["value"])


DOMAIN = HelpDeskDomain()
