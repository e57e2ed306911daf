"""``mua serve``: a model behind OpenAI's chat interface, for the simulated user and the judge of other jobs.

    server is ready               ──► address file appears, whole ──► a training job reads it
    server or this process ends   ──► address file is removed

The address file holds ``MUA_USER_BASE_URL=http://host:port/v1``, ``MUA_USER_MODEL=name`` and ``MUA_USER_API_KEY=key``,
a line each; only its owner may read it. The key, drawn anew for every server, asks for text. What changes the server
(weights, caches, logging) wants another one, which nobody is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_bridge.hf_config import context_length, weights_dtype
from mua.compat import sglang_keys
from mua.engine.server import Arguments, SglangServer, has_cuda
from mua.utils.atomic import replace_text
from mua.utils.errors import EngineError

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


def serve(service: Service) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
        EngineError: a further argument is a key, or the server ended or did not answer in time.
    """
    if any(argument.startswith(("--api-key", "--admin-api-key", "--config")) for argument in service.extra):
        raise EngineError(
            "--extra: a key on the command line is seen by everyone; drop it, mua serve draws one", passing=False
        )
    asyncio.run(_until_asked_to_leave(service))


async def _until_asked_to_leave(service: Service) -> None:
    arguments: Arguments = {"served-model-name": service.name}
    server = SglangServer(
        label="the server",
        arguments=arguments if has_cuda() else {**arguments, "max-total-tokens": cache_tokens(service.model)},
        extra=service.extra,
        host=service.host,
        fixed_port=service.port,
        tensor_parallel=service.tensor_parallel,
        start_seconds=service.start_seconds,
        stop_seconds=STOP_SECONDS,
        api_key=service.api_key,
        admin_api_key=sglang_keys.new_key(),
    )

    async def until_it_ends() -> None:
        await server.start(service.model)
        publish_address(service)
        print(f"serving {service.name} at {service.base_url}; address in {service.address_file}", flush=True)
        while server.running:
            await asyncio.sleep(POLL_SECONDS)
        raise EngineError(f"the server ended with status {server.status}; its log stands above")

    serving = asyncio.create_task(until_it_ends())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    finally:
        withdraw_address(service)
        await server.stop()


def cache_tokens(model: Path) -> int:
    """Tokens of KV cache for a server on CPU, which shares its memory with everything else on the machine.

    As many as take the memory of the model's weights, but enough for one conversation of the greatest length.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    heads = text.get("num_attention_heads", 1)
    head_dim = text.get("head_dim") or text.get("hidden_size", 0) // heads
    element = 4 if weights_dtype(text) == "float32" else 2
    token = 2 * text.get("num_hidden_layers", 0) * text.get("num_key_value_heads", heads) * head_dim * element
    weights = sum(file.stat().st_size for file in model.iterdir() if file.suffix in (".safetensors", ".bin"))
    return max(context_length(text) or _CONTEXT, weights // max(1, token) if token else 0)


def publish_address(service: Service) -> None:
    """Write the address file, whole or not at all."""
    told = {"BASE_URL": service.base_url, "MODEL": service.name, "API_KEY": service.api_key}
    lines = "".join(f"MUA_USER_{name}={value}\n" for name, value in told.items())
    replace_text(service.address_file, lines, mode=0o600)


def withdraw_address(service: Service) -> None:
    """Remove the address file if it is this server's."""
    file = service.address_file
    if file.exists() and f"={service.base_url}\n" in file.read_text(encoding="utf-8"):
        file.unlink()
