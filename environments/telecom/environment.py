"""One episode at Vela Mobile: the carrier's database and one phone, and the verdict over both.

The carrier's records must equal gold's. The phone and the subscriber register are judged by what they amount to
instead (``assertions`` of a task: functions of :mod:`environments.telecom.signals` by name), because several ways lead
to a phone that works and harmless steps, such as a speed test or one more restart, must cost nothing.

Where all there is to do is to refuse, reasons that do not hold (``false_statements``) may not be told: naming every
reason there is does not pay.
"""

from __future__ import annotations

from collections.abc import Sequence

from environments.telecom import carrier_tools, phone_tools
from environments.telecom.signals import ASSERTIONS, View
from environments.telecom.world import PHONE, base
from mua.environment.database import DatabaseEnvironment, RewardForm, ServiceDesk, verdict
from mua.environment.overlay import Changes, Difference, Overlay, difference, digest_of
from mua.environment.protocol import Evaluation, Task, Transcript
from mua.environment.statements import Statement, unsaid
from mua.types import Json

JUDGED_BY_ASSERTIONS = (PHONE, "network")
"""Tables that are not compared with gold."""


def desk(reward: RewardForm, *, compact: bool) -> ServiceDesk:
    """What all episodes share."""
    return ServiceDesk(base(), carrier_tools.tools(compact=compact), phone_tools.TOOLS, reward=reward)


class TelecomEnvironment(DatabaseEnvironment):
    """A :class:`DatabaseEnvironment` whose verdict also looks at what works in the end."""

    def evaluate(self, transcript: Transcript) -> Evaluation:
        """Reward as :func:`~mua.environment.database.verdict` gives it, with every assertion one more change due.

        An assertion that held from the start earns nothing and costs as a wrong change when it is broken, so that
        partial credit is only for what was mended.
        """
        assert self._task is not None, "reset comes first"
        data = self._task.data
        gold = self._desk.gold(self._task)
        rows = difference(self._base, _compared(self.state.changes()), _compared(gold.changes))
        said = transcript.told_user()
        rows = _with(rows, self._assertions(self._task), _told(data["false_statements"], said))
        missing = unsaid(data["statements"], said)
        broken = [call for call in self._done if _is_forbidden(call[0], data["forbidden"])]
        return verdict(self._desk.reward, rows, missing, len(data["statements"]), broken)

    def equals_gold(self) -> bool:
        """Whether the carrier's records are now what the gold actions make of them."""
        assert self._task is not None, "reset comes first"
        return digest_of(_compared(self.state.changes())) == digest_of(_compared(self._desk.gold(self._task).changes))

    def _assertions(self, task: Task) -> dict[str, tuple[bool, bool]]:
        """Of each assertion: whether it held at the start, and whether it holds now."""
        start, now = View.of(Overlay(self._base)), View.of(self.state)
        return {name: (ASSERTIONS[name](start), ASSERTIONS[name](now)) for name in task.data["assertions"]}


def _compared(changes: Changes) -> Changes:
    return {table: records for table, records in changes.items() if table not in JUDGED_BY_ASSERTIONS}


def _told(statements: Sequence[Statement], said: Sequence[str]) -> list[Statement]:
    """Those of the statements that were made."""
    return [statement for statement in statements if not unsaid([statement], said)]


def _with(rows: Difference, assertions: dict[str, tuple[bool, bool]], lies: Sequence[Statement]) -> Difference:
    wrong, missing, right = dict(rows.wrong), dict(rows.missing), rows.right
    for name, (held, holds) in assertions.items():
        report: Json = {"is": False, "should_be": True}
        if not holds:
            (wrong if held else missing)[f"assertion/{name}"] = report
        right += holds and not held
    extra = {**rows.extra, **{f"statement/{lie[0]}": {"is": "told"} for lie in lies}}
    return Difference(wrong, missing, extra, right)


def _is_forbidden(name: str, patterns: Sequence[Json]) -> bool:
    return any(pattern["name"] == name for pattern in patterns)
