"""Tool servers that others wrote, and a training step on SGLang whose tools all come from a server.

Servers of npm need its registry, or its cache; without either their cases are skipped with npm's words. Faults are in
``tests/unit/test_mcp_servers.py``; the policy here is far too small to use a tool well.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from e2e_support import DOMAINS, ROOT, metrics_of, mua
from mcp_support import environment, play

from environments.help_desk import DOMAIN
from environments.help_desk.demonstrations import demonstrations
from environments.kit.demonstrate import write_conversations
from mua.environment.manager import EnvironmentInstance
from mua.environment.protocol import ToolResult
from mua.store.traces import read_traces

pytestmark = pytest.mark.timeout(600)
ANSWER = "get_order: noted"
NPM = ("server-filesystem", "server-memory", "server-everything")


def use(tool: str, arguments: dict[str, Any], **settings: Any) -> tuple[list[str], ToolResult]:
    """The names of a server's tools, and what one of them answers."""

    async def episode(instance: EnvironmentInstance) -> tuple[list[str], ToolResult]:
        return [schema.name for schema in instance.tools()], await instance.call(tool, arguments)

    own = {"name": "real", "prefix": "mcp_", "ready": 0, "retries": 0, "start_seconds": 120.0, "call_seconds": 60.0}
    return play(environment(own | settings), episode)


@pytest.mark.slow
def test_the_time_and_git_servers_of_pypi(tmp_path: Path) -> None:
    time = {"command": sys.executable, "args": ["-m", "mcp_server_time"]}
    names, result = use(
        "mcp_convert_time", {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}, **time
    )
    assert "mcp_get_current_time" in names
    assert "T21:00:00+09:00" in result.text
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "new.txt").write_text("x")
    git = {"command": sys.executable, "args": ["-m", "mcp_server_git", "--repository", str(tmp_path)]}
    _, result = use("mcp_git_status", {"repo_path": str(tmp_path)}, allow=["git_status"], **git)
    assert "new.txt" in result.text


@pytest.fixture(scope="module")
def npm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the servers' programs are."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("npm")
    packages = [f"@modelcontextprotocol/{name}" for name in NPM]
    line = ["npm", "install", "--prefix", str(folder), "--prefer-offline", "--no-audit", "--no-fund", *packages]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot install the servers: {done.stderr.strip().splitlines()[-1:]}")
    return folder / "node_modules" / ".bin"


@pytest.mark.slow
def test_servers_of_npm(npm: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("y" * 100)
    files = {"command": str(npm / "mcp-server-filesystem"), "args": [str(tmp_path)], "result_chars": 50}
    names, result = use("mcp_read_text_file", {"path": str(tmp_path / "a.txt")}, block=["write_file"], **files)
    assert "mcp_write_file" not in names
    assert result.text.startswith("y" * 50 + "\n[cut")
    _, result = use("mcp_read_text_file", {"path": "/etc/passwd"}, **files)
    assert result.error, "what the server refuses is told to the policy"
    memory = {"command": str(npm / "mcp-server-memory"), "env": {"MEMORY_FILE_PATH": str(tmp_path / "memory.json")}}
    assert not use("mcp_read_graph", {}, **memory)[1].error
    names, result = use("mcp_echo", {"message": "hello"}, command=str(npm / "mcp-server-everything"))
    assert "hello" in result.text


def caller(recipe: Path, folder: Path) -> Path:
    """A policy that answers whatever it is told with a call: it saw nothing else in its last steps of fine-tuning."""
    call = {"type": "function", "function": {"name": "get_order", "arguments": '{"order": "7439"}'}}
    conversations = []
    for told in demonstrations(64, 7, DOMAIN.system_prompt("short"), ["brief"]):
        said = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": ANSWER}]
        conversations.append([*told[:2], *said, {"role": "assistant", "content": "Order 7439 is noted."}])
    write_conversations(folder / "calls.jsonl", conversations)
    fast = ["optimizer.learning_rate=5.0e-3", "megatron.max_tokens_per_microbatch=4096", "megatron.threads=2"]
    mua("sft", recipe, f"sft.data={folder}/calls.jsonl", "output=tuned", "trainer.steps=16", *fast, cwd=folder)
    return folder / "tuned" / "hf"


@pytest.mark.grid
def test_a_policy_is_trained_on_a_servers_tools(recipe: Path, tmp_path: Path) -> None:
    line = f"command: {sys.executable}, args: [{DOMAINS / 'served_desk_tools.py'}], env: {{PYTHONPATH: {ROOT}}}"
    server = f"environment.mcp=[{{name: desk, {line}, reuse: true, start_seconds: 120}}]"
    settings = ["environment.name=served_desk", server, f"model.path={caller(recipe, tmp_path)}", "trainer.steps=1"]
    mua("train", recipe, *settings, cwd=tmp_path)
    (step,) = metrics_of(tmp_path / "out")
    assert step["train/grad_norm"] > 0
    traces = list(read_traces(tmp_path / "out" / "traces"))
    assert all(trace.scored for trace in traces)
    told = [message["content"] for trace in traces for message in trace.messages if message["role"] == "tool"]
    assert ANSWER in told
