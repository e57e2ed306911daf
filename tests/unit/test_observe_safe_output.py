"""What others wrote reaches a terminal without control characters, whichever way: lines, errors, tables, bars, logs.

Not here: what a terminal would make of them, and the output of programs that write to it by themselves (engines).
"""

from __future__ import annotations

import io
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.panel import Panel
from rich.table import Table
from typer.testing import CliRunner

from mua.cli import command
from mua.observe.logs import log_file, logging_to
from mua.observe.progress import Progress
from mua.observe.safe_output import SafeConsole, SafeStream
from mua.store.database import Store
from mua.store.tables import trajectories
from mua.store.writer import Update, execute
from mua.utils.errors import ConfigError
from mua.utils.strict_json import pictured
from tests.store_support import write_run

HOSTILE = "a\x1b]0;pwned\x07\x1b[2J\x9b31m\u202eb\u2066\x85\r\x08\u200b\ufeff\u2028c\ud800"
LOGGED = HOSTILE.removesuffix("\ud800")
"""pytest reports what was logged as UTF-8, which a lone surrogate has no place in."""
BAD = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def test_letters_emoji_lines_and_tabs_stay() -> None:
    text = "zażółć 🏳️‍🌈 می‌خواهم\tשלום\nका"
    assert pictured(text) == text
    assert pictured(HOSTILE).startswith("a␛]0;pwned␇␛[2J\\x9b31m\\u202eb")
    assert not BAD.search(pictured(HOSTILE))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def colorless(text: str) -> str:
    """Without what rich writes itself."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "")


def test_tables_and_bars_keep_their_own_colors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream: Any = SafeStream(Terminal())
    table = Table(HOSTILE, title=f"{HOSTILE}[/nothing]", style="red")
    table.add_row(f"[bold]{HOSTILE}[/closed]")
    console = SafeConsole(stream, 200)
    console.print(Panel(table, title=HOSTILE))
    console.print(HOSTILE)
    with Progress(stream=stream) as progress, progress.stage(HOSTILE, 2) as stage:
        stage.advance(note=f"{HOSTILE}[/x]")
    said = stream.unsafe.getvalue()
    assert "\x1b[31m" in said
    assert "[bold]a␛]0;pwned" in said
    assert not BAD.search(colorless(said).replace("\x1b[2K", ""))


def test_lines_errors_and_logs_of_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer()

    @command(app)
    def speak() -> None:
        print(HOSTILE)
        print(HOSTILE, file=sys.stderr)
        sys.stderr.writelines([HOSTILE])
        with logging_to(tmp_path, "speak"):
            logging.getLogger("mua.x").warning(LOGGED)
            logging.getLogger("someone.else").error("%s", LOGGED)
        raise ConfigError(f"the tool said {HOSTILE}")

    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert result.stdout.count("pwned") == 1
    assert result.stderr.count("pwned") == 3
    log = log_file(tmp_path, "speak").read_text()
    assert log.count("pwned") == 2
    for text in (result.stdout, result.stderr, log):
        assert not BAD.search(text)


def test_what_a_store_holds_is_shown_without_them(tmp_path: Path) -> None:
    from mua.cli import app

    with Store.open(tmp_path) as store:
        write_run(store)
        with store.begin() as connection:
            values = {"task_id": HOSTILE, "details": {HOSTILE: [HOSTILE]}, "error": HOSTILE}
            execute(connection, [Update(trajectories, {"id": "r/1/0/0/0/1"}, values)])
    for words in (
        ("show", tmp_path, "r/1/0/0/0/1"), ("store", "ls", tmp_path, "trajectories"), ("diagnose", tmp_path),
        ("show", tmp_path, HOSTILE.replace("\ud800", "")), ("store", "verify", tmp_path),
    ):  # fmt: skip
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert not BAD.search(result.output), words
