"""The commands of documentation pages: found in their ``console`` blocks, and held against the program's own parser."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import typer

import mua.cli
from mua.config.load import load_config

ROOT = Path(__file__).parents[1]
PROGRAM = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:mua|(?:torchrun|python) .*-m mua\.cli) ")


def commands(page: Path) -> list[str]:
    """The lines after ``$`` of a page's ``console`` blocks; a backslash at the end goes on."""
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [re.sub(r" +", " ", line[2:]).split(" # ")[0].rstrip() for line in lines if line.startswith("$ ")]


def parsed(line: str) -> tuple[str, dict[str, Any]]:
    """The verb and the parameters of a line that runs ``mua``, by its own parser. Raises where it takes them not."""
    words = shlex.split(PROGRAM.sub("", line))
    command, name = typer.main.get_command(mua.cli.app), "mua"
    while hasattr(command, "commands") and words and words[0] in command.commands:
        name = f"{name} {words[0]}"
        command = command.commands[words.pop(0)]
    if hasattr(command, "commands") and not command.invoke_without_command:
        raise ValueError(f"{line}: {name} has no command {words[:1]}")
    return name, command.make_context(name, words).params


def check(line: str) -> None:
    """Parse a line that runs ``mua``, and load the configuration it names, found from the current folder."""
    _, parameters = parsed(line)
    if (config := parameters.get("config")) is not None:
        load_config(config, parameters.get("overrides") or ())
