"""Conversations for supervised training: scripted experts, or any policy, against the simulated users.

    python -m tools.make_conversations CONFIG OUT.jsonl --count 2000 [--loose 0.3] [--keep all] [key.path=value ...]
    python -m tools.make_conversations CONFIG OUT.jsonl --agent policy --samples 4 [--minutes 60] [key.path=value ...]

Tasks are those of the training split, domain by domain by the shares of ``environment.mix``.

``--agent expert``: the domains' experts against the scripted users that ``user.personas`` names. An expert made loose
departs from the prescribed way now and then; with ``--keep successful`` (the default) only conversations that earned
success are written, with ``--keep all`` the others too: what a policy that is still to be improved learns from.

``--agent policy``: whoever ``evaluation.policy`` names (an OpenAI endpoint, or the checkpoint ``model.path``) plays
``--samples`` episodes of every task against the configuration's users. Successful, rule-abiding ones are kept, the best
``--per-task`` of each task, and written balanced (:mod:`workbench.curate`). Every episode stands in
OUT.episodes.jsonl the moment it ends, so that the same command goes on after a kill or ``--minutes``; OUT.report.json
says what was kept and why the rest was not.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from mua.cli import readable
from mua.config.load import load_config
from mua.config.schema import ExperimentConfig
from mua.environment.protocol import Task
from mua.environment.selection import Selection
from mua.observe.progress import Progress
from mua.rollout.episode import EpisodeResult
from mua.rollout.stream import TaskStream
from mua.types import Json
from tools import kit
from workbench.collect import Wanted, collect, shown_tools
from workbench.demonstrate import demonstrate


def main() -> None:
    arguments = _parser().parse_intermixed_args()
    overrides = list(arguments.overrides)
    if arguments.endpoint:
        overrides += ["evaluation.policy.kind=endpoint", f"evaluation.policy.endpoint.base_url={arguments.endpoint}"]
    if arguments.model:
        overrides.append(f"evaluation.policy.endpoint.model={arguments.model}")
    try:
        config = load_config(arguments.config, overrides)
        if arguments.agent == "policy":
            _by_policy(config, arguments)
        else:
            _by_experts(config, arguments)
    except Exception as error:
        lines = list(readable(error))
        if not lines:
            raise
        sys.exit("\n".join(f"make_conversations: {line}" for line in lines))


def _parser() -> argparse.ArgumentParser:
    parser = kit.parser(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("overrides", nargs="*", help="key.path=value")
    parser.add_argument("--agent", choices=["expert", "policy"], default="expert", help="who plays the agent")
    parser.add_argument("--count", type=int, default=1000, help="conversations to write")
    parser.add_argument("--seed", type=int, default=1, help="expert: seed of tasks and users")
    parser.add_argument("--loose", type=float, default=0.0, help="expert: how often it departs from the prescribed way")
    parser.add_argument("--keep", choices=["successful", "all"], default="successful", help="expert: what is written")
    parser.add_argument("--endpoint", help="policy: address of an OpenAI API, for evaluation.policy.endpoint.base_url")
    parser.add_argument("--model", help="policy: name of its model, for evaluation.policy.endpoint.model")
    parser.add_argument("--samples", type=int, default=4, help="policy: episodes of each task")
    parser.add_argument("--per-task", type=int, default=1, help="policy: conversations kept of one task, the best")
    parser.add_argument("--tasks", type=int, help="policy: the first so many tasks of each domain; all by default")
    parser.add_argument("--minutes", type=float, help="policy: deadline of playing; the same command goes on later")
    return parser


def _by_policy(config: ExperimentConfig, arguments: argparse.Namespace) -> None:
    seconds = None if arguments.minutes is None else 60 * arguments.minutes
    wanted = Wanted(arguments.count, arguments.samples, arguments.per_task, arguments.tasks, seconds)
    config.output.mkdir(parents=True, exist_ok=True)  # logs of engines
    print(json.dumps(collect(config, arguments.out, wanted), indent=2))


def _by_experts(config: ExperimentConfig, arguments: argparse.Namespace) -> None:
    selection = Selection.from_config(config.environment)
    personas = config.user.personas if config.user.kind == "scripted" else []
    successful = arguments.keep == "successful"
    made = records(selection, arguments.seed, arguments.loose, personas, successful=successful)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with (
        arguments.out.open("w", encoding="utf-8") as file,
        Progress(config.observe.progress) as progress,
        progress.stage("conversations", total=arguments.count) as stage,
    ):
        for record in itertools.islice(made, arguments.count):
            file.write(json.dumps(record) + "\n")
            stage.advance()


def conversations(
    selection: Selection, seed: int, loose: float, personas: Sequence[str] = (), *, successful: bool
) -> Iterator[list[Json]]:
    """An endless stream of conversations in OpenAI form, system prompt first; the same for the same arguments."""
    return (record["messages"] for record in records(selection, seed, loose, personas, successful=successful))


def records(
    selection: Selection, seed: int, loose: float, personas: Sequence[str] = (), *, successful: bool
) -> Iterator[Json]:
    """:func:`conversations` with the tools that the prompt shows."""
    stream = TaskStream(selection.shared_tasks("train"), seed)
    for ordinal in itertools.count():
        task = stream.task(ordinal)
        played = asyncio.run(demonstrate(selection.domain(task), task, ordinal, loose, personas))
        if played.evaluation.success or not successful:
            tools = [tool.openai() for tool in shown_tools(selection, task)]
            yield {"messages": _with_prompt(selection, task, played)} | ({"tools": tools} if tools else {})


def _with_prompt(selection: Selection, task: Task, played: EpisodeResult) -> list[Json]:
    return [{"role": "system", "content": selection.system_prompt(task)}, *played.messages]


if __name__ == "__main__":
    main()
