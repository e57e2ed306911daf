"""A help desk whose episodes are judged by a language model, for the tests of judges."""

from __future__ import annotations

from environments.help_desk.tools import HelpDesk
from mua.environment.protocol import Environment, Evaluation, Transcript
from mua.users.judge import Judge
from tests.rollout_fixtures import TestDesk

SURE = {"type": "object", "properties": {"cancelled": {"type": "boolean"}}}


class _Judged(HelpDesk):
    def __init__(self, judge: Judge) -> None:
        super().__init__()
        self._judge = judge

    async def evaluate(self, transcript: Transcript) -> Evaluation:  # type: ignore[override]
        material = {"what the agent said": "\n".join(transcript.told_user())}
        verdict = await self._judge.verdict("Is the order cancelled?", SURE, seed=1, material=material)
        return Evaluation(float(verdict["cancelled"]), verdict["cancelled"])


class JudgedDesk(TestDesk):
    """Its environments ask ``judge`` for the verdict."""

    def __init__(self, judge: Judge) -> None:
        super().__init__()
        self._judge = judge

    def environment(self) -> Environment:
        self.made += 1
        return _Judged(self._judge)
