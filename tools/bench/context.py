"""Searches longer than the window: what rewriting contexts does for success, before and after training.

    python -m tools.bench.context [--seeds 1 2 3] [--strategies off discard_tool_results digest] [--split test]

One tiny policy learns from an expert of the domain ``qa`` whose episodes ran under every strategy, so that it has read
conversations as each of them leaves them; each strategy then trains it by rewards, once for each seed. Both are judged
on the test split under the strategy they were trained with. What is done is not done again: a killed bench goes on
where it was. Leaves everything under ``runs/context`` and prints the tables of docs/benchmarks/context.md.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from environments.qa.own import other_tasks, question
from environments.qa.pages import page_of, read
from environments.qa.world import world, world_key
from mua.config.load import load_config
from mua.config.schema import ExperimentConfig
from mua.endpoint.services import Services
from mua.engine.sampler import SamplingParams
from mua.environment.protocol import Task
from mua.environment.selection import Selection
from mua.errors import MuaError
from mua.evaluation.recording import recording
from mua.rollout.runner import EpisodeRunner
from mua.seeds import derived_seed
from mua.tokens.chat_family import ChatFamily
from mua.tokens.family_loading import load_family
from mua.types import Generation, Json, Trajectory
from tools import kit
from tools.tiny import build_policy, mua, say

ROOT = Path("runs/context")
CONFIG = "configs/tiny-context.yaml"
STRATEGIES = ("off", "discard_tool_results", "digest")
PRACTICE = 40
"""Worlds that the expert searches; none is that of a split."""
VOCABULARY = 1024
WIDE = 2048
"""Tokens of a window in which nothing overflows."""


# ---- the expert


@dataclass
class _Search:
    """How far one episode is."""

    known: list[str]
    """Names on the chain so far."""
    opened: int = 0
    """Of them, those whose page was opened."""


class Expert:
    """Opens page after page along a question's chain, and knows of the pages what stands in the prompt; in the place of
    an engine (:class:`mua.engine.sampler.Sampler`).

    Its notes are the question that is left: what was found out stands in the place of what asked for it.
    """

    def __init__(self, family: ChatFamily, tasks: Mapping[int, Task], instruction: str) -> None:
        """``tasks``: by the ordinal of the episodes."""
        self._family, self._tasks, self._instruction = family, tasks, instruction
        self._searches: dict[str, _Search] = {}

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str, deadline_s: float
    ) -> Generation:
        """The next turn, or notes."""
        data = self._tasks[int(session.split("/")[0])].data
        search = self._searches.setdefault(session, _Search([data["start"]]))
        text, chain = self._family.decode(prompt_ids), data["chain"]
        if search.opened == len(search.known):
            value = read(text.rpartition("<tool_response>")[2].strip(), chain[search.opened - 1])
            if value is None:
                raise MuaError(f"{data['question']}: the page of {search.known[-1]} is not in the prompt")
            search.known.append(value)
        found = search.known[-1]
        message: Json = {"role": "assistant", "content": ""}
        if text.rpartition("<|im_start|>user")[2].strip().startswith(self._instruction):
            left = chain[len(search.known) - 1 :]
            message["content"] = question(found, left, data["world"]) if left else f"It is {found}."
        elif len(search.known) > len(chain):
            message["content"] = f"<answer>{found}</answer>"
        else:
            search.opened += 1
            call = {"name": "open_page", "arguments": json.dumps({"title": found})}
            message["tool_calls"] = [{"id": f"call_{search.opened}", "type": "function", "function": call}]
        ids, _ = self._family.codec.encode(self._family.demonstration(message))
        cut = len(ids) > params.max_new_tokens
        ids, count = ids[: params.max_new_tokens], min(len(ids), params.max_new_tokens)
        nothing = np.zeros(count, np.float32)
        return Generation(ids, nothing, "length" if cut else "stop", 0, np.zeros(count, np.int32), 0)


async def _demonstrate(config: ExperimentConfig, strategies: Sequence[str], folder: Path) -> Json:
    """The expert's episodes under every strategy in turn, in the store of ``folder``; what they are like."""
    tasks = other_tasks("train", PRACTICE, plain=True)
    shuffled = random.Random("context bench").sample(range(len(tasks)), len(tasks))
    found: dict[str, list[Trajectory]] = {}
    with recording(config) as recorder:
        for place, strategy in enumerate(strategies):
            setting = _under(config, strategy, WIDE if strategy == "off" else config.rollout.max_tokens)
            services = Services.from_config(setting.user, setting.judge)
            selection = Selection.from_config(setting.environment, services)
            family = load_family(setting.model.path, thinking=setting.model.thinking)
            chosen = {place + len(strategies) * n: tasks[i] for n, i in enumerate(shuffled)}
            expert = Expert(family, chosen, setting.context.instruction)
            runner = EpisodeRunner(setting, selection, family, expert, services, recorder=recorder)
            try:
                ended = [runner.trajectory(task, ordinal, 0, temperature=1.0) for ordinal, task in chosen.items()]
                found[strategy] = await asyncio.gather(*ended)
            finally:
                await runner.close()
                await services.close()
    return {strategy: _shape(trajectories) for strategy, trajectories in found.items()}


def _under(config: ExperimentConfig, strategy: str, window: int) -> ExperimentConfig:
    context = config.context.model_copy(update={"strategy": strategy})
    rollout = config.rollout.model_copy(update={"max_tokens": window})
    return config.model_copy(update={"context": context, "rollout": rollout})


def _shape(trajectories: Sequence[Trajectory]) -> Json:
    lengths = [len(segment) for t in trajectories for segment in t.segments]
    return {
        "episodes": len(trajectories),
        "success": float(np.mean([t.success for t in trajectories])),
        "segments": float(np.mean([len(t.segments) for t in trajectories])),
        "tokens of a segment": [int(q) for q in np.quantile(lengths, [0, 0.5, 0.95, 1])],
        "outcomes": {str(o): sum(t.outcome == o for t in trajectories) for o in {t.outcome for t in trajectories}},
    }
