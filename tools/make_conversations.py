"""Conversations for supervised training: scripted experts of a configuration's domains against their scripted users.

    python -m tools.make_conversations CONFIG OUT.jsonl --count 2000 [--loose 0.3] [--keep all] [key.path=value ...]

Tasks are those of the training split, domain by domain by the shares of ``environment.mix``. An expert made loose
departs from the prescribed way now and then; with ``--keep successful`` (the default) only conversations that earned
success are written, with ``--keep all`` the others too: what a policy that is still to be improved learns from.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from mua.config.load import load_config
from mua.environment.demonstrate import Demonstration, demonstrate
from mua.environment.protocol import Task
from mua.environment.selection import Selection
from mua.observe.progress import Progress
from mua.rollout.stream import TaskStream
from mua.types import Json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("overrides", nargs="*", help="key.path=value")
    parser.add_argument("--count", type=int, default=1000, help="conversations to write")
    parser.add_argument("--loose", type=float, default=0.0, help="how often the expert departs from the prescribed way")
    parser.add_argument("--keep", choices=["successful", "all"], default="successful")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_intermixed_args()
    config = load_config(arguments.config, arguments.overrides)
    selection = Selection.from_config(config.environment)
    made = conversations(selection, arguments.seed, arguments.loose, successful=arguments.keep == "successful")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with (
        arguments.out.open("w", encoding="utf-8") as file,
        Progress(config.observe.progress) as progress,
        progress.stage("conversations", total=arguments.count) as stage,
    ):
        for messages in itertools.islice(made, arguments.count):
            file.write(json.dumps({"messages": messages}) + "\n")
            stage.advance()


def conversations(selection: Selection, seed: int, loose: float, *, successful: bool) -> Iterator[list[Json]]:
    """An endless stream of conversations in OpenAI form, system prompt first; the same for the same arguments."""
    stream = TaskStream(selection.shared_tasks("train"), seed)
    ordinal = 0
    while True:
        task = stream.task(ordinal)
        played = asyncio.run(demonstrate(selection.domain(task), task, ordinal, loose))
        ordinal += 1
        if played.evaluation.success or not successful:
            yield _with_prompt(selection, task, played)


def success_of(selection: Selection, tasks: Sequence[Task], loose: float) -> float:
    """The share of ``tasks`` that an expert of this looseness solves."""
    played = [asyncio.run(demonstrate(selection.domain(task), task, 0, loose)) for task in tasks]
    return sum(p.evaluation.success for p in played) / len(played)


def _with_prompt(selection: Selection, task: Task, played: Demonstration) -> list[Json]:
    return [{"role": "system", "content": selection.system_prompt(task)}, *played.messages]


if __name__ == "__main__":
    main()
