"""A port that another program takes between its choice and the server's bind, seconds later, costs a start, not a run.

A real engine and a real listener on the port. Not covered: the port of its process group, which SGLang chooses itself
and of whose loss it says the same words.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from engine_fixtures import STOP_ID, make_pool

from mua.engine import SamplingParams, server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("forked_engines")]


async def test_an_engine_whose_port_is_taken_starts_on_another(
    tiny_qwen3_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        ports = [server.free_port(), taken]
        monkeypatch.setattr(server, "free_port", lambda host: ports.pop())
        async with make_pool(tmp_path) as pool:
            await pool.start(tiny_qwen3_folder)
            greedy = SamplingParams(temperature=0.0, max_new_tokens=4, stop_token_ids=(STOP_ID,))
            assert len((await pool.generate([5, 6, 7], greedy, session="s", deadline_s=120)).ids)
            assert pool.metrics()["engine/restarts"] == 0
    assert ports == []
    log = (tmp_path / "engine-0.log").read_text(errors="replace")
    assert f"--port {taken}" in log
    assert log.count("--- starting") == 2
