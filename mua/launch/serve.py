"""``mua serve``: a model behind OpenAI's chat interface, for the simulated user and the judge of other jobs.

    server answers /v1/models ──► address file appears, whole ──► a training job reads it
    server or this process ends ──► address file is removed

The address file holds ``MUA_USER_BASE_URL=http://host:port/v1``, ``MUA_USER_MODEL=name`` and ``MUA_USER_API_KEY=key``,
a line each; only its owner may read it. The key, drawn anew for every server, asks for text. What changes the server
(weights, caches, logging) wants another one, which nobody is told.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from mua.compat import sglang_cpu, sglang_keys
from mua.engine import guardian
from mua.engine.server import has_cuda
from mua.errors import EngineError, ModelError
from mua.observe.files import replace_text

POLL_SECONDS = 0.5
STOP_SECONDS = 30.0
_CONTEXT = 32_768
"""Taken for the greatest length of a model that does not say its own."""


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
    api_key: str = field(default_factory=sglang_keys.new_key, repr=False)
    """What a request must bring."""

    @property
    def base_url(self) -> str:
        return f"http://{self.host}:{self.port}/v1"

    def command(self, cuda: bool, key_file: Path) -> list[str]:
        """The server's command line; it reads its keys from ``key_file``."""
        arguments = {
            "--config": key_file,
            "--model-path": self.model,
            "--served-model-name": self.name,
            "--host": self.host,
            "--port": self.port,
            "--tp-size": self.tensor_parallel,
            "--log-level": "info",
        }
        if not cuda:
            arguments |= {"--device": "cpu", "--attention-backend": "torch_native", "--sampling-backend": "pytorch"}
            arguments |= {"--max-total-tokens": cache_tokens(self.model)}
        flat = [str(part) for pair in arguments.items() for part in pair]
        flags = [] if cuda else ["--disable-overlap-schedule", "--sleep-on-idle", "--skip-server-warmup"]
        return [sys.executable, "-m", "sglang.launch_server", *flat, *flags, *self.extra]


def serve(service: Service) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
        ModelError: the folder holds no model.
        EngineError: a further argument is a key, or the server ended or did not answer in time.
    """
    if not (service.model / "config.json").is_file():
        raise ModelError(f"{service.model}: not a model folder (no config.json)")
    if any(argument.startswith(("--api-key", "--admin-api-key", "--config")) for argument in service.extra):
        raise EngineError(
            "--extra: a key on the command line is seen by everyone; drop it, mua serve draws one", passing=False
        )
    asked: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with tempfile.TemporaryDirectory(prefix="mua-serve-") as private:
            _serve(service, Path(private) / "keys.yaml", asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve(service: Service, key_file: Path, asked: Sequence[int]) -> None:
    sglang_keys.write_key_file(key_file, service.api_key, admin_api_key=sglang_keys.new_key())
    server = _spawn(service, key_file)
    try:
        _until_it_answers(service, server, asked)
        key_file.unlink()
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


def cache_tokens(model: Path) -> int:
    """Tokens of KV cache for a server on CPU, which shares its memory with everything else on the machine.

    As many as take the memory of the model's weights, but enough for one conversation of the greatest length.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    heads = text.get("num_attention_heads", 1)
    head_dim = text.get("head_dim") or text.get("hidden_size", 0) // heads
    element = 4 if text.get("dtype", text.get("torch_dtype")) == "float32" else 2
    token = 2 * text.get("num_hidden_layers", 0) * text.get("num_key_value_heads", heads) * head_dim * element
    weights = sum(file.stat().st_size for file in model.iterdir() if file.suffix in (".safetensors", ".bin"))
    return max(int(text.get("max_position_embeddings", 0)) or _CONTEXT, weights // max(1, token) if token else 0)


def publish(service: Service) -> None:
    """Write the address file, whole or not at all."""
    told = {"BASE_URL": service.base_url, "MODEL": service.name, "API_KEY": service.api_key}
    lines = "".join(f"MUA_USER_{name}={value}\n" for name, value in told.items())
    replace_text(service.address_file, lines, mode=0o600)


def withdraw(service: Service) -> None:
    """Remove the address file if it is this server's."""
    file = service.address_file
    if file.exists() and f"={service.base_url}\n" in file.read_text(encoding="utf-8"):
        file.unlink()


def _spawn(service: Service, key_file: Path) -> subprocess.Popen[bytes]:
    cuda = has_cuda()
    environment = sglang_keys.with_plugin(os.environ)
    if not cuda:
        environment = sglang_cpu.cpu_environment(tensor_parallel=service.tensor_parallel, base=environment)
    guarded = [sys.executable, "-I", "-S", str(guardian.__file__), str(os.getpid())]
    command = service.command(cuda, key_file)
    return subprocess.Popen([*guarded, *command], stdin=subprocess.DEVNULL, env=environment, start_new_session=True)


def _until_it_answers(service: Service, server: subprocess.Popen[bytes], asked: Sequence[int]) -> None:
    deadline = time.monotonic() + service.start_seconds
    models = urllib.request.Request(
        f"{service.base_url}/models", headers={"Authorization": f"Bearer {service.api_key}"}
    )
    while not asked:
        try:
            with urllib.request.urlopen(models, timeout=5):
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
