"""A small shop's help desk: seven tools over a database, a one-page policy, and customers with one wish each."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path

from environments.help_desk.claims import claim
from environments.help_desk.expert import Expert
from environments.help_desk.tasks import load_split
from environments.help_desk.tools import HelpDesk
from environments.help_desk.user import ScriptedCustomer
from mua.environment.protocol import Environment, Isolation, Move, PromptStyle, Split, Task
from mua.users.protocol import STOP_SIGNAL, User

_WISHES = {
    "track": "You want to know where your order is now.",
    "cancel": "You want to cancel your order.",
    "redirect": "You want your order to go to another city: {city}.",
    "return": "You want to return the {item} from your order.",
}


class HelpDeskDomain:
    """Implements :class:`mua.environment.protocol.Domain`."""

    name = "help_desk"
    isolation: Isolation = "inline"

    def tasks(self, split: Split) -> Sequence[Task]:
        return load_split(split)

    def environment(self) -> Environment:
        return HelpDesk()

    def system_prompt(self, style: PromptStyle) -> str:
        if style == "short":
            return "You are the help desk."
        return Path(__file__).with_name("policy.md").read_text()

    def persona(self, task: Task) -> str:
        known = task.data["known"]
        return (
            f"You are {known['name']}, a customer of a small shop, and you write to its help desk. "
            f"{_WISHES[task.data['wish']].format(**known)} Your order number is {known['order']}. "
            f"Say what you want first, in one short sentence, and tell a number or your name only when "
            f"you are asked for it. If you are refused, accept it. When your wish is settled, answer {STOP_SIGNAL}."
        )

    def scripted_user(self, task: Task, seed: int) -> User:
        return ScriptedCustomer(task, seed)

    def gold(self, task: Task) -> Sequence[Move]:
        calls: list[Move] = [(action["name"], action["arguments"]) for action in task.data["actions"]]
        return [*calls, *(claim(fact) for fact in task.data["facts"])]

    def expert(self, task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
        return Expert(task, seed, loose).moves()


DOMAIN = HelpDeskDomain()
