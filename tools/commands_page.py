"""Writes docs/commands.md: every command of `mua` as its own ``--help`` says it (`make docs` does this)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools import kit

PAGE = kit.ROOT / "docs/commands.md"
HEAD = """# Commands

<!-- written by tools/commands_page.py from the commands themselves -->

The same command continues a run that stopped, from its newest whole checkpoint. Layouts with several trainer processes
start their processes themselves; a world that torchrun started is accepted. A mistake in a configuration is one line
with file, line, key and the nearest valid name; `KEY=VALUE` after the file overrides any [key](configuration.md).

| status | meaning |
| --- | --- |
| 0 | done |
| 1 | a bug, with its traceback; of `plan`, `env replay`, `env servers`, `store verify`: what was checked is not so |
| 2 | somebody has to change something: the message names it |
| 3 | `mua eval` ended, and more than `evaluation.max_unscored` of the episodes could not be scored |
| 75 | a fault that may pass, or a signal to leave: the same command continues |

`MUA_TRACEBACK=1` shows the traceback of every error.
"""


def commands(group: Any, above: str = "mua") -> Iterator[tuple[str, Any]]:
    """Every command that does something by itself, with its whole name, in the order of the program."""
    for name, command in group.commands.items():
        inner = hasattr(command, "commands")
        if not inner or command.invoke_without_command:
            yield f"{above} {name}", command
        if inner:
            yield from commands(command, f"{above} {name}")


def page() -> str:
    """The page, whole."""
    import typer

    import mua.cli

    every = dict(commands(typer.main.get_command(mua.cli.app)))
    lines = [
        f"| [`{name}`](#{name.replace(' ', '-')}) | {command.get_short_help_str(200)} |"
        for name, command in every.items()
    ]
    parts = [HEAD, "\n".join(["| command | |", "| --- | --- |", *lines]) + "\n"]
    for name, command in every.items():
        context = command.make_context(name, [], resilient_parsing=True, terminal_width=110, max_content_width=110)
        shown = "\n".join(map(str.rstrip, inspect.cleandoc(context.get_help()).splitlines()))
        parts.append(f"## {name}\n\n```text\n{shown}\n```\n")
    return "\n".join(parts)


def main() -> None:
    kit.parser(__doc__).parse_args()
    Path(PAGE).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
