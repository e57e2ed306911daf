"""What the run's judge thinks of an agent's episode: one number on a scale, beside another reward or in its place.

::

    task, conversation ──► judge.llm ──► score ──► reward = weight · score + the environment's or the agent's own

The judge sees what the verdict of the environment rests on: what was done and told to the user through the gateway.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import Field, create_model

from mua.config.rollout import AgentJudgeConfig
from mua.config.schema import ExperimentConfig
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Evaluation
from mua.types import Json
from mua.users.judge import Judge, VerdictForm
from mua.utils.errors import ConfigError

_SHOWN = ("role", "content", "tool_calls")


class AgentJudge:
    """Asks ``judge`` the question of ``config``."""

    def __init__(self, config: AgentJudgeConfig, judge: Judge) -> None:
        self._config = config
        self._judge = judge
        scale: Any = (float, Field(ge=config.low, le=config.high, description=f"{config.low:g} to {config.high:g}."))
        self._form: type[VerdictForm] = create_model("Score", __base__=VerdictForm, score=scale)

    async def evaluation(self, messages: Sequence[Json], before: Evaluation | None, *, seed: int) -> Evaluation:
        """The verdict ``before`` with the judge's score in its reward; None: the judge's verdict is the only one.

        Raises :class:`JudgeFault` where there is no verdict that can be read.
        """
        chosen = self._config
        material = {
            "what the agent was told at the beginning": shortened(messages[0]["content"], chosen.most_characters),
            "the conversation, a message a line": shortened(
                "\n".join(_line(message) for message in messages[1:]), chosen.most_characters
            ),
        }
        question = f"{chosen.question}\n\nGive a score from {chosen.low:g} to {chosen.high:g}."
        verdict = (await self._judge.verdict(question, self._form, seed=seed, material=material)).model_dump()
        score = float(verdict["score"])
        details: Json = {"score": score, "reason": verdict["reason"], "weight": chosen.weight}
        if before is None:
            success = score >= (chosen.high if chosen.success_from is None else chosen.success_from)
            return Evaluation(chosen.weight * score, success, {"judge": details})
        details["beside"] = before.reward
        return Evaluation(before.reward + chosen.weight * score, before.success, before.details | {"judge": details})


def agent_judge(config: ExperimentConfig, services: Services) -> AgentJudge | None:
    """Who scores the episodes of the configuration's agent beside the domain; None: nobody does."""
    if config.agent is None or config.agent.judge is None:
        return None
    if services.judge is None:
        raise ConfigError("agent.judge asks the endpoint of judge.llm; add the section judge")
    return AgentJudge(config.agent.judge, Judge(services.judge))


def shortened(text: str, most: int) -> str:
    """``text``, or its beginning and end with a note of how much was left out between them."""
    if len(text) <= most:
        return text
    left_out = len(text) - most
    return f"{text[: most // 2]}[… {left_out} characters are left out here …]{text[len(text) - (most - most // 2) :]}"


def _line(message: Json) -> str:
    """A message as one line of JSON, so that no content can pass for a message of somebody else."""
    shown = {key: message[key] for key in _SHOWN if message.get(key)}
    return json.dumps(shown, ensure_ascii=False)
