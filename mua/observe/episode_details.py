"""What a step's episodes leave beside scalars: histograms, and two of them as texts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from mua.observe.metric_sinks import Values
from mua.types import Json, Trajectory

LONGEST_TEXT = 8000
"""Characters of an episode's text; the middle of a longer one is left out."""
_LONGEST_MESSAGE = 2000


def histograms_of(trajectories: Iterable[Trajectory]) -> dict[str, Values]:
    """Samples of the scored ones, by name; none where there are none."""
    scored = [t for t in trajectories if t.scored]
    if not scored:
        return {}
    return {
        "reward/of_episodes": np.array([t.reward for t in scored], np.float64),
        "rollout/sampled_tokens_of_episodes": np.array([t.sampled_tokens for t in scored], np.float64),
        "rollout/turns_of_episodes": np.array([len(t.turn_rewards) for t in scored], np.float64),
    }


def texts_of(trajectories: Sequence[Trajectory]) -> dict[str, str]:
    """The first scored episode that succeeded, and the first that did not."""
    found: dict[str, str] = {}
    for trajectory in trajectories:
        name = f"rollout/episodes/{'solved' if trajectory.success else 'failed'}"
        if trajectory.scored and name not in found:
            found[name] = text_of_episode(trajectory)
    return found


def due(step: int, steps: int, texts: int) -> bool:
    """Whether the texts of ``step``, of so many ``steps``, are among the ``texts`` that a run leaves."""
    return texts > 0 and step % math.ceil(steps / texts) == 0


def text_of_episode(trajectory: Trajectory) -> str:
    """Verdict and conversation in plain text, within :data:`LONGEST_TEXT` characters."""
    verdict = "success" if trajectory.success else "no success"
    where = f" in {trajectory.domain}" if trajectory.domain else ""
    head = f"task {trajectory.task_id}{where}: {trajectory.outcome.value}, {verdict}, reward {trajectory.reward:g}"
    text = "\n\n".join([head, *(line for message in trajectory.messages for line in _lines(message))])
    return _cut(text, LONGEST_TEXT)


def _lines(message: Json) -> Iterator[str]:
    who = str(message.get("role", "?"))
    if who != "system":  # the same in every episode of a domain
        content = message.get("content")
        yield f"{who}: {_cut(content if isinstance(content, str) else str(content or ''), _LONGEST_MESSAGE)}"
        for call in message.get("tool_calls") or ():
            yield f"{who} calls: {_cut(str(call.get('function', call)), _LONGEST_MESSAGE)}"


def _cut(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    half = longest // 2 - 20
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
