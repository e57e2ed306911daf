"""The help desk, whose episodes the run's judge judges: a language model of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graded_desk import vowels

from environments.help_desk import HelpDeskDomain
from environments.help_desk.tools import HelpDesk
from mua.config.schema import EnvironmentConfig
from mua.environment.domain import Domain
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Environment, Evaluation, Split, Task, Transcript
from mua.users.judge import Judge

FORM = {"type": "object", "properties": {"helped": {"type": "boolean"}}}


class JudgedHelp(HelpDesk):
    """The verdict is the judge's; the share of vowels in what the agent wrote tells equal verdicts apart."""

    def __init__(self, judge: Judge) -> None:
        super().__init__()
        self._judge = judge

    async def evaluate(self, transcript: Transcript) -> Evaluation:  # type: ignore[override]
        text = "\n".join(m["content"] or "" for m in transcript.messages if m["role"] == "assistant")
        verdict = await self._judge.verdict(
            "Was the customer helped?", FORM, seed=len(text), material={"the agent": text}
        )
        reward = float(verdict["helped"]) + vowels(transcript)
        return Evaluation(reward, bool(verdict["helped"]), {"judged": verdict["helped"]})


class JudgedHelpDomain(HelpDeskDomain):
    """The help desk's tasks; needs the section ``judge``."""

    name = "judged_help"

    def __init__(self, judge: Judge | None = None) -> None:
        self._judge = judge

    def tasks(self, split: Split) -> Sequence[Task]:
        return [replace(task, domain=self.name) for task in super().tasks(split)]

    def environment(self) -> Environment:
        assert self._judge is not None, "the section judge is needed"
        return JudgedHelp(self._judge)

    def configured(self, config: EnvironmentConfig, services: Services) -> Domain:
        return JudgedHelpDomain(Judge(services.judge) if services.judge is not None else None)


DOMAIN = JudgedHelpDomain()
