"""The life of ``mua serve``: its address file, its signals, and what it says when its server ends or does not answer.

The server is a small HTTP server in place of SGLang. A real one: tests/e2e/test_users_served.py.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mua.engine.server import SglangServer
from mua.launch.serve import Service, serve
from mua.utils.errors import EngineError
from mua.utils.ports import free_port

pytestmark = pytest.mark.timeout(120)
ANSWERS = """
import http.server, sys, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
threading.Timer(float(sys.argv[2]), server.shutdown).start()
server.serve_forever()
sys.exit(3)
"""


@pytest.fixture
def service(tmp_path: Path) -> Service:
    (tmp_path / "config.json").write_text("{}")
    return Service(tmp_path, tmp_path / "address", "127.0.0.1", free_port(), "tiny", start_seconds=60.0)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the server be a Python program, which gets the port and more."""

    def run(program: str, *arguments: str) -> None:
        command = lambda self, _: [sys.executable, "-c", program, str(self.port), *arguments]  # noqa: E731
        monkeypatch.setattr(SglangServer, "command", command)

    return run


@pytest.fixture
def started() -> Callable[[], list[psutil.Process]]:
    """The processes that this test has started and that live; fixtures that stay have theirs."""
    before = psutil.Process().children()
    return lambda: [child for child in psutil.Process().children() if child not in before]


def terminate_when(true: Callable[[], object]) -> threading.Thread:
    """SIGTERM for this process as soon as ``true`` is."""

    def wait() -> None:
        while not true():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_a_signal_ends_the_server_and_removes_its_address(
    service: Service, runs: Callable[..., None], started: Callable[[], list[psutil.Process]]
) -> None:
    runs(ANSWERS, "600")
    terminate_when(service.address_file.exists)
    serve(service)
    assert not service.address_file.exists()
    assert not started()


def test_a_signal_ends_a_server_that_still_starts(
    service: Service, runs: Callable[..., None], started: Callable[[], list[psutil.Process]]
) -> None:
    runs("import time; time.sleep(600)")
    terminate_when(started)
    serve(service)
    assert not service.address_file.exists()
    assert not started()


def test_a_server_that_ends_is_named_and_its_address_removed(service: Service, runs: Callable[..., None]) -> None:
    runs(ANSWERS, "5")
    with pytest.raises(EngineError, match="the server ended with status 3; its log stands above"):
        serve(service)
    assert not service.address_file.exists()


def test_the_deadline_of_the_start_is_named(
    tmp_path: Path, runs: Callable[..., None], started: Callable[[], list[psutil.Process]]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    runs("import time; time.sleep(600)")
    late = Service(tmp_path, tmp_path / "address", "127.0.0.1", free_port(), "tiny", start_seconds=1.0)
    with pytest.raises(EngineError, match="the server was not ready within 1 s; its log stands above"):
        serve(late)
    assert not started()


def test_a_key_among_the_arguments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="seen by everyone"):
        serve(Service(tmp_path, tmp_path / "address", "127.0.0.1", 1, "tiny", extra=["--api-key=x"]))
