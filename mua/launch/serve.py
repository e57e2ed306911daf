"""``mua serve``: a model behind OpenAI's chat interface, for the simulated user and the judge of other jobs.

    server answers /v1/models ──► address file appears, whole ──► a training job reads it
    server or this process ends ──► address file is removed

The address file holds ``MUA_USER_BASE_URL=http://host:port/v1`` and ``MUA_USER_MODEL=name``, a line each.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from mua.compat import sglang_cpu
from mua.engine import guardian
from mua.engine.server import has_cuda
from mua.errors import EngineError, ModelError
from mua.observe.files import replace_text

POLL_SECONDS = 0.5
STOP_SECONDS = 30.0


@dataclass(frozen=True)
class Service:
    """What to serve and where."""

    model: Path
    """Hugging Face folder with a tokenizer and a chat template."""
    address_file: Path
    host: str
    """Address that other nodes reach this one by."""
    port: int
    name: str
    """Model name in requests."""
    tensor_parallel: int = 1
    start_seconds: float = 1800.0
    """Deadline until the server answers."""
    extra: Sequence[str] = ()
    """Further arguments of ``sglang.launch_server``."""

    @property
    def base_url(self) -> str:
        return f"http://{self.host}:{self.port}/v1"

    def command(self, cuda: bool) -> list[str]:
        """The server's command line."""
        arguments = {
            "--model-path": self.model,
            "--served-model-name": self.name,
            "--host": self.host,
            "--port": self.port,
            "--tp-size": self.tensor_parallel,
            "--log-level": "info",
        }
        if not cuda:
            arguments |= {"--device": "cpu", "--attention-backend": "torch_native", "--sampling-backend": "pytorch"}
        flat = [str(part) for pair in arguments.items() for part in pair]
        flags = [] if cuda else ["--disable-overlap-schedule", "--sleep-on-idle", "--skip-server-warmup"]
        return [sys.executable, "-m", "sglang.launch_server", *flat, *flags, *self.extra]


def serve(service: Service) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
        ModelError: the folder holds no model.
        EngineError: the server ended or did not answer in time.
    """
    if not (service.model / "config.json").is_file():
        raise ModelError(f"{service.model}: not a model folder (no config.json)")
    asked: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGINT)}
    server = _spawn(service)
    try:
        _until_it_answers(service, server, asked)
        if not asked:
            publish(service)
            print(f"serving {service.name} at {service.base_url}; address in {service.address_file}", flush=True)
        while not asked:
            if server.poll() is not None:
                raise EngineError(f"the server ended with status {server.returncode}; its log stands above")
            time.sleep(POLL_SECONDS)
    finally:
        withdraw(service)
        _stop(server)
        for number, handler in before.items():
            signal.signal(number, handler)


def publish(service: Service) -> None:
    """Write the address file, whole or not at all."""
    replace_text(service.address_file, f"MUA_USER_BASE_URL={service.base_url}\nMUA_USER_MODEL={service.name}\n")


def withdraw(service: Service) -> None:
    """Remove the address file if it is this server's."""
    file = service.address_file
    if file.exists() and f"={service.base_url}\n" in file.read_text(encoding="utf-8"):
        file.unlink()


def _spawn(service: Service) -> subprocess.Popen[bytes]:
    cuda = has_cuda()
    environment = None if cuda else sglang_cpu.cpu_environment(tensor_parallel=service.tensor_parallel)
    guarded = [sys.executable, "-I", "-S", str(guardian.__file__), str(os.getpid())]
    return subprocess.Popen(
        [*guarded, *service.command(cuda)], stdin=subprocess.DEVNULL, env=environment, start_new_session=True
    )


def _until_it_answers(service: Service, server: subprocess.Popen[bytes], asked: Sequence[int]) -> None:
    deadline = time.monotonic() + service.start_seconds
    while not asked:
        try:
            with urllib.request.urlopen(f"{service.base_url}/models", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            pass
        if server.poll() is not None:
            raise EngineError(f"the server ended with status {server.returncode} while starting; its log stands above")
        if time.monotonic() > deadline:
            raise EngineError(f"the server did not answer within {service.start_seconds:g} s; its log stands above")
        time.sleep(POLL_SECONDS)


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
