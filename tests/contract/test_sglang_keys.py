"""The limits of SGLang that ``mua/compat/sglang_keys`` lifts are still there, and its plugin lifts them.

In a process of its own, as a server's. What a running server tells: ``tests/unit/test_engine_keys.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mua.compat import sglang_cpu, sglang_keys

SHOWN = """
import asyncio, json, sys
import fastapi
from sglang.srt.sampling.watermarking import core
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.utils import auth

def shown():
    fields = core.redact_watermark_secrets({"api_key": "one", "admin_api_key": None, "port": 3})
    line = core.redact_watermark_command_line(["--api-key", "one", "--admin_api_key=two", "--port", "3"])
    return [fields, line, asyncio.run(first_answer_to_a_websocket())]

async def first_answer_to_a_websocket():
    app, sent = fastapi.FastAPI(), []
    @app.websocket("/talk")
    async def talk(ws: fastapi.WebSocket):
        await ws.accept()
    auth.add_api_key_middleware(app, api_key="one", admin_api_key=None)
    async def send(message):
        sent.append(message["type"])
    async def receive():
        return {"type": "websocket.connect"}
    scope = {"path": "/talk", "headers": [], "query_string": b"", "root_path": "", "subprotocols": []}
    await app({"type": "websocket"} | scope, receive, send)
    return sent[0]

alone = shown()
sys.path.insert(0, sys.argv[1])
import mua_sglang_keys
mua_sglang_keys.register()
HookRegistry.apply_hooks()
print(json.dumps([alone, shown()]))
"""


@pytest.mark.slow
def test_sglang_alone_shows_keys_and_takes_websockets_and_with_the_plugin_neither() -> None:
    """The day ``alone`` is as it is with the plugin, the plugin can go."""
    done = subprocess.run(
        [sys.executable, "-c", SHOWN, str(sglang_keys.PLUGIN)],
        env=sglang_cpu.cpu_environment(), capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    alone, with_plugin = json.loads(done.stdout.splitlines()[-1])
    assert alone == [
        {"api_key": "one", "admin_api_key": None, "port": 3},
        "--api-key one --admin_api_key=two --port 3",
        "websocket.accept",
    ]
    assert with_plugin == [
        {"api_key": "<redacted>", "admin_api_key": None, "port": 3},
        "--api-key <redacted> --admin_api_key <redacted> --port 3",
        "websocket.close",
    ]
