"""What the agents under tests/agents share: the episode's routes, with the standard library alone."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

TASK: dict[str, Any] = json.loads(Path(os.environ["MUA_TASK_FILE"]).read_text(encoding="utf-8"))


def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{os.environ['MUA_EPISODE_URL']}/{path}",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return dict(json.load(response))


def call_tool(name: str, arguments: dict[str, Any]) -> str:
    return str(post(f"tools/{name}", {"arguments": arguments})["text"])


def tell_user(text: str) -> str | None:
    """What the user answers; None when the conversation is over."""
    reply = post("user", {"text": text})
    return None if reply["stop"] else str(reply["text"])
