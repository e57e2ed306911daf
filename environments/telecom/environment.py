"""One episode at Vela Mobile: the carrier's database and one phone, and the verdict over both.

The carrier's records must equal gold's. The phone and the subscriber register are judged by what they amount to
instead (``assertions`` of a task: functions of :mod:`environments.telecom.world` by name), because several ways lead
to a phone that works and looking costs nothing. How it came about counts too: what was said has to be true
(:mod:`environments.telecom.sheets`) and the policy's order kept (:mod:`environments.telecom.rules`).
"""

from __future__ import annotations

from pathlib import Path

from environments.kit.database import Code, DatabaseEnvironment, RewardForm, ServiceDesk
from environments.kit.language.claims import claim_reader
from environments.kit.overlay import Changes, Difference, Overlay, difference, digest_of
from environments.telecom import carrier_tools, phone_tools
from environments.telecom.rules import RULES
from environments.telecom.sheets import moment
from environments.telecom.world import ASSERTIONS, PHONE, View, base
from mua.environment.protocol import Task
from mua.types import Json

JUDGED_BY_ASSERTIONS = (PHONE, "network")
"""Tables that are not compared with gold."""


def desk(reward: RewardForm, *, compact: bool) -> ServiceDesk:
    """What all episodes share."""
    code = Code(claim_reader(Path(__file__).parent), RULES, moment)
    return ServiceDesk(base(), carrier_tools.tools(compact=compact), phone_tools.TOOLS, reward=reward, code=code)


class TelecomEnvironment(DatabaseEnvironment):
    """A :class:`DatabaseEnvironment` whose verdict also looks at what works in the end."""

    def _difference(self) -> Difference:
        """The carrier's records against gold's, with every assertion one more change due.

        An assertion that held from the start earns nothing and costs as a wrong change when it is broken, so that
        partial credit is only for what was mended.
        """
        gold = self.desk.gold(self._the_task)
        rows = difference(self._base, _compared(self.state.changes()), _compared(gold.changes))
        return _with(rows, self._assertions(self._the_task))

    def equals_gold(self) -> bool:
        """Whether the carrier's records are now what the gold actions make of them."""
        gold = self.desk.gold(self._the_task)
        return digest_of(_compared(self.state.changes())) == digest_of(_compared(gold.changes))

    def _assertions(self, task: Task) -> dict[str, tuple[bool, bool]]:
        """Of each assertion: whether it held at the start, and whether it holds now."""
        start, now = View.of(Overlay(self._base)), View.of(self.state)
        return {name: (ASSERTIONS[name](start), ASSERTIONS[name](now)) for name in task.data["assertions"]}


def _compared(changes: Changes) -> Changes:
    return {table: records for table, records in changes.items() if table not in JUDGED_BY_ASSERTIONS}


def _with(rows: Difference, assertions: dict[str, tuple[bool, bool]]) -> Difference:
    wrong, missing, right = dict(rows.wrong), dict(rows.missing), rows.right
    for name, (held, holds) in assertions.items():
        report: Json = {"is": False, "should_be": True}
        if not holds:
            (wrong if held else missing)[f"assertion/{name}"] = report
        right += holds and not held
    return Difference(wrong, missing, rows.extra, right)
