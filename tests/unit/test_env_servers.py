"""``mua env servers``: what it prints of servers that open, are missing, crash, or have one name; as text and as JSON.

The servers are real processes over standard input and output. Servers behind a URL: ``test_mcp_http.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from mcp_support import listing, server
from typer.testing import CliRunner, Result

from mua.cli import app

GOOD = server(*listing("look", "move"), name="good", prefix="g_", safe=["look"])
CRASHING = server("--exit", "no key was given", name="crashing", env={"KEY": "secret-word"})
MISSING = {"name": "missing", "command": "no-such-program-here", "ready": 0, "retries": 0}


def servers(folder: Path, given: list[Any], *options: str) -> Result:
    file = folder / "config.yaml"
    environment = {"name": "help_desk", "mcp": given}
    file.write_text(yaml.safe_dump({
        "name": "n", "output": "out", "model": {"path": "m"}, "environment": environment, "trainer": {"steps": 1},
    }))  # fmt: skip
    return CliRunner().invoke(app, ["env", "servers", str(file), *options])


def test_good_servers_show_their_tools_as_the_policy_gets_them(tmp_path: Path) -> None:
    found = servers(tmp_path, [GOOD])
    assert found.exit_code == 0, found.output
    assert "2 tools, open after" in found.stdout
    assert [line.split()[:2] for line in found.stdout.splitlines()[2:]] == [["g_look", "safe"], ["g_move"]]
    (one,) = json.loads(servers(tmp_path, [GOOD], "--json").stdout)
    assert (one["name"], one["isolation"], one["fault"]) == ("good", "session", None)
    assert [(tool["name"], tool["own_name"], tool["safe"]) for tool in one["tools"]] == [
        ("g_look", "look", True), ("g_move", "move", False),
    ]  # fmt: skip
    assert servers(tmp_path, []).stdout == "environment.mcp names no server\n"
    assert json.loads(servers(tmp_path, [], "--json").stdout) == []


def test_each_server_that_fails_says_why_beside_those_that_do_not(tmp_path: Path) -> None:
    found = servers(tmp_path, [MISSING, GOOD, CRASHING])
    assert found.exit_code == 1
    assert "no-such-program-here" in found.stdout
    assert "no key was given" in found.stdout
    assert "g_look" in found.stdout
    assert "secret-word" not in found.output
    told = {one["name"]: one for one in json.loads(servers(tmp_path, [MISSING, GOOD, CRASHING], "--json").stdout)}
    assert list(told) == ["missing", "good", "crashing"]
    assert "no-such-program-here" in told["missing"]["fault"]
    assert "status 3" in told["crashing"]["fault"]
    assert told["crashing"]["tools"] == []
    assert told["good"]["fault"] is None


@pytest.mark.parametrize(("second", "told"), [
    (GOOD, "two servers are called 'good'"),
    (GOOD | {"name": "twin"}, "g_look"),
])  # fmt: skip
def test_one_name_twice_is_an_error(tmp_path: Path, second: dict[str, Any], told: str) -> None:
    """Of servers: before any is started. Of tools: once all are known."""
    found = servers(tmp_path, [GOOD, second])
    assert found.exit_code in (1, 2)
    assert told in found.output
    assert "Traceback" not in found.output
