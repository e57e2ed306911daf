"""The graded desk without a tool of its own: all it has comes from the server ``served_desk_tools.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graded_desk import GradedDesk

from environments.help_desk import HelpDeskDomain
from mua.environment.protocol import Environment, Split, Task
from mua.types import ToolSchema


class ServedDesk(GradedDesk):
    """Judges as the graded desk does."""

    def tools(self) -> Sequence[ToolSchema]:
        return []


class ServedDeskDomain(HelpDeskDomain):
    """The help desk's tasks and customers with :class:`ServedDesk`."""

    name = "served_desk"

    def tasks(self, split: Split) -> Sequence[Task]:
        return [replace(task, domain=self.name) for task in super().tasks(split)]

    def environment(self) -> Environment:
        return ServedDesk()


DOMAIN = ServedDeskDomain()
