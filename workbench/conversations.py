"""Conversations for supervised training: scripted experts, or any policy, against the simulated users.

Tasks are those of the training split, domain by domain by the shares of ``environment.mix``.

*Experts*: the domains' own against the scripted users that ``user.personas`` names. An expert made loose departs from
the prescribed way now and then; without ``keep_failures`` only conversations that earned success are written, with it
the others too: what a policy that is still to be improved learns from.

*A policy*: whoever ``evaluation.policy`` names (an OpenAI endpoint, or the checkpoint ``model.path``) plays several
episodes of every task against the configuration's users. Successful, rule-abiding ones are kept, the best of each task,
and written balanced (:mod:`workbench.curate`). Every episode stands in ``<name>.episodes.jsonl`` the moment it ends, so
that the same command goes on after a kill or a deadline; ``<name>.report.json`` says what was kept and why the rest was
not.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from environments.kit.demonstrate import demonstrate
from mua.config.schema import ExperimentConfig
from mua.environment.protocol import Task
from mua.environment.selection import Selection
from mua.observe.progress import Progress
from mua.rollout.curriculum import TaskStream
from mua.rollout.episode import EpisodeResult
from mua.types import Json
from mua.utils.errors import ConfigError, MuaError
from workbench.collect import Wanted, collect, shown_tools

MOST_FAILURES = 200
"""Conversations in a row without success, after which none is expected."""


def by_policy(config: ExperimentConfig, out: Path, wanted: Wanted) -> Json:
    """Have the policy play and write what is kept to ``out``; the report."""
    config.output.mkdir(parents=True, exist_ok=True)  # logs of engines
    return collect(config, out, wanted)


def by_experts(
    config: ExperimentConfig, out: Path, count: int, *, seed: int = 1, loose: float = 0.0, keep_failures: bool = False
) -> Json:
    """Write ``count`` conversations of the experts to ``out``; how many of what.

    Args:
        seed: of tasks and users.
        loose: how often an expert departs from the prescribed way, from 0 to 1.
    """
    if count < 1 or not 0 <= loose <= 1:
        raise ConfigError(f"--count {count} --loose {loose:g}: at least one conversation, and a share from 0 to 1")
    selection = Selection.from_config(config.environment)
    personas = config.user.personas if config.user.kind == "scripted" else []
    made = records(selection, seed, loose, personas, successful=not keep_failures)
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        out.open("w", encoding="utf-8") as file,
        Progress(config.observe.progress) as progress,
        progress.stage("conversations", total=count) as stage,
    ):
        for record in itertools.islice(made, count):
            file.write(json.dumps(record) + "\n")
            stage.advance()
    return {"written": count, "to": str(out)}


def conversations(
    selection: Selection, seed: int, loose: float, personas: Sequence[str] = (), *, successful: bool
) -> Iterator[list[Json]]:
    """An endless stream of conversations in OpenAI form, system prompt first; the same for the same arguments."""
    return (record["messages"] for record in records(selection, seed, loose, personas, successful=successful))


def records(
    selection: Selection, seed: int, loose: float, personas: Sequence[str] = (), *, successful: bool
) -> Iterator[Json]:
    """:func:`conversations` with the tools that the prompt shows; raises :class:`MuaError` where too many in
    a row earn no success."""
    stream, failures = TaskStream(selection.shared_tasks("train"), seed), 0
    for ordinal in itertools.count():
        task = stream.task(ordinal)
        played = asyncio.run(demonstrate(selection.domain(task), task, ordinal, loose, personas))
        failures = 0 if played.evaluation.success else failures + 1
        if successful and failures == MOST_FAILURES:
            raise MuaError(
                f"{task.domain}: {failures} conversations of its expert in a row earned no success, the last one about "
                f"task {task.id}; see what the expert does (mua env replay), or write failures too (--keep all)"
            )
        if played.evaluation.success or not successful:
            tools = [tool.openai() for tool in shown_tools(selection, task)]
            yield {"messages": _with_prompt(selection, task, played)} | ({"tools": tools} if tools else {})


def _with_prompt(selection: Selection, task: Task, played: EpisodeResult) -> list[Json]:
    return [{"role": "system", "content": selection.system_prompt(task)}, *played.messages]
