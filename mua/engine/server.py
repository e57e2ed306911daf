"""One SGLang HTTP server as a managed subprocess: started with a deadline, stopped with its whole tree.

engine_server(...): for training, by token ids ──┐
                                                 ├──► SglangServer ──► guardian ──► sglang.launch_server
mua serve: by OpenAI's chat interface ───────────┘
"""

from __future__ import annotations

import asyncio
import hmac
import importlib.util
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import aiohttp
from aiohttp import web

from mua.compat import sglang_cpu, sglang_keys
from mua.compat.sglang_shards import LOADER
from mua.config.schema import EngineConfig
from mua.utils.cores import all_cores
from mua.utils.errors import ConfigError, EngineError, one_line
from mua.utils.guarded import GUARDIAN
from mua.utils.ports import LOOPBACK, free_port

_log = logging.getLogger(__name__)
IDLE_CONNECTION_SECONDS = 600
"""After which a server closes a connection. Its own 5 s are within reach of a client that is kept from the processor: a
request written into a connection that is just being closed looks like a dead engine."""
_STARTS = 3
"""A server binds its ports seconds after they were chosen; one that finds them taken is started on others. So is one
that was killed meanwhile."""
_KILLED = re.compile(rb"(exit code:|terminated with|with code) -\d")
"""How SGLang's main process says that a scheduler of its own ended by a signal."""
_RAISED = b"Scheduler hit an exception"
"""What a scheduler says before SGLang's main process kills itself, which leaves the status of one that was killed."""
_MANAGED = frozenset(
    {
        "model_path", "host", "port", "device", "dtype", "tp_size", "tensor_parallel_size", "context_length",
        "mem_fraction_static", "max_total_tokens", "max_running_requests", "random_seed", "skip_tokenizer_init",
        "disable_radix_cache", "enable_deterministic_inference", "enable_memory_saver", "weight_version",
        "enable_return_routed_experts", "enable_fp32_lm_head", "config", "api_key", "admin_api_key",
        "custom_weight_loader",
    }
)  # fmt: skip

Arguments = Mapping[str, str | int | float | bool]
"""Native server arguments without dashes; True is a flag, False one that is left out."""


def has_cuda() -> bool:
    """Whether this host has a usable CUDA device."""
    import torch

    return torch.cuda.is_available()


def start_process(command: list[str], log: BinaryIO | None, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """``command`` in a session of its own, on all cores, writing into ``log``, or where this process writes."""
    err = None if log is None else subprocess.STDOUT
    with all_cores():
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=err, env=environment, start_new_session=True
        )


@dataclass(eq=False, kw_only=True)
class SglangServer:
    """One server on this machine. ``start`` and ``stop`` may be called again after each other.

    Whoever lacks ``api_key`` gets nothing but health probes answered, on this machine too; with ``admin_api_key`` what
    changes the server wants that one.
    """

    label: str
    arguments: Arguments
    """What it is to do, beside what every server is told; this goes before that."""
    extra: Sequence[str] = ()
    """Further arguments as they stand on a command line."""
    host: str = LOOPBACK
    """Address it listens on."""
    fixed_port: int | None = None
    """None: a free one, chosen for every start."""
    tensor_parallel: int
    cuda: bool = field(default_factory=has_cuda)
    """Whether it runs on GPUs."""
    start_seconds: float
    stop_seconds: float
    start_key: str = ""
    """How messages name ``start_seconds``."""
    api_key: str = field(default_factory=sglang_keys.new_key, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)
    log_file: Path | None = None
    """None: it writes where this process does."""
    port: int = field(default=0, init=False)
    _key_file: Path = field(default=Path(), init=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def running(self) -> bool:
        """Whether the server's process is there; it may still be loading."""
        return self._process is not None and self._process.poll() is None

    @property
    def status(self) -> int | None:
        """Exit status of a server that has ended by itself."""
        return None if self._process is None else self._process.poll()

    async def start(self, model_path: Path) -> None:
        """Start and wait until the server takes requests.

        Raises :class:`EngineError`, with the end of the server's log, when the folder holds no model, the
        server exits, or the deadline passes.
        """
        if self.running:
            raise EngineError(f"{self.label} is already running")
        if not (model_path / "config.json").is_file():
            raise EngineError(
                f"{self.label} cannot start: {model_path} is not a model folder (no config.json); "
                "set model.path to a Hugging Face folder",
                passing=False,
            )
        try:
            with tempfile.TemporaryDirectory(prefix="mua-keys-") as private:
                self._key_file = Path(private) / "keys.yaml"
                async with asyncio.timeout(self.start_seconds):
                    await self._until_ready(model_path)
        except TimeoutError:
            await self.stop()
            within = f"{self.start_key}{self.start_seconds:g}" if self.start_key else f"{self.start_seconds:g} s"
            raise EngineError(f"{self.label} was not ready within {within}; {self._evidence()}") from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Kill the server and everything it started, and wait until all of it is gone."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
        deadline = time.monotonic() + self.stop_seconds
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
            await asyncio.sleep(0.02)
        self._process = None

    async def _until_ready(self, model_path: Path) -> None:
        for left in reversed(range(1 if self.fixed_port else _STARTS)):
            self.port = self.fixed_port or free_port(self.host)
            # Keys go through a file that only its owner reads: everyone on the machine sees a command line. The log is
            # as private, should SGLang find another way to tell its arguments.
            sglang_keys.write_key_file(self._key_file, self.api_key, self.admin_api_key)
            guarded, command = [sys.executable, "-I", "-S", str(GUARDIAN), str(os.getpid())], self.command(model_path)
            if self.log_file is not None:
                self.log_file.parent.mkdir(parents=True, exist_ok=True)
                self.log_file.touch()
                self.log_file.chmod(0o600)
            log_start = 0
            with nullcontext() if self.log_file is None else self.log_file.open("ab") as log:
                if log is not None:
                    log_start = log.tell()
                    log.write(f"\n--- starting {' '.join(command)}\n".encode())
                    log.flush()
                self._process = start_process([*guarded, *command], log, self._environment())
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
                while self._process is not None and self.status is None:
                    with suppress(aiohttp.ClientError, TimeoutError):
                        async with session.get(f"{self.url}/ready") as response:
                            if response.status == 200:
                                # The shared memory that there is now must be removed, however soon it is killed.
                                self._process.send_signal(signal.SIGUSR1)
                                return
                    await asyncio.sleep(0.1)
            said = b"" if self.log_file is None else self.log_file.read_bytes()[log_start:]
            by_signal = not 0 <= (self.status or 0) <= 128
            killed = _KILLED.search(said) is not None or (by_signal and _RAISED not in said)
            lost_a_port = b"address already in use" in said.lower()  # its own or its process group's
            if not left or not (killed or lost_a_port):
                message = f"{self.label} exited while starting with status {self.status}; {self._evidence()}"
                # Where the log is not read nobody knows that it was no fault that passes.
                raise EngineError(message, passing=by_signal or killed or self.log_file is None)
            found = "was killed while starting" if killed else "found a port taken that was free before"
            _log.warning("%s %s; starting it again", self.label, found)
            await self.stop()

    def command(self, model_path: Path) -> list[str]:
        """The command line of a start; keys stand in the file that it names."""
        told: dict[str, str | int | float | bool] = {
            "config": str(self._key_file),
            "model-path": str(model_path),
            "host": self.host,
            "port": self.port,
            "device": "cuda" if self.cuda else "cpu",
            "tp-size": self.tensor_parallel,
            "log-level": "info",
        }
        if not self.cuda:
            told |= {"attention-backend": "torch_native", "sampling-backend": "pytorch", "sleep-on-idle": True}
            told |= {"disable-overlap-schedule": True, "skip-server-warmup": True}
        if importlib.util.find_spec("sglang") is None:
            raise ModuleNotFoundError("No module named 'sglang'", name="sglang")
        command = [sys.executable, "-m", "sglang.launch_server"]
        for key, value in (told | dict(self.arguments)).items():
            if value is not False:
                command += [f"--{key}"] if value is True else [f"--{key}", str(value)]
        return [*command, *self.extra]

    def _environment(self) -> dict[str, str]:
        environment = {
            "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",  # it delays a crash by 5 s
            "SGLANG_TIMEOUT_KEEP_ALIVE": str(IDLE_CONNECTION_SECONDS),
        }
        environment = sglang_keys.with_plugin(environment | for_engine(os.environ))
        if self.cuda:
            return with_cuda_runtime(environment) if self.arguments.get("enable-memory-saver") else environment
        return sglang_cpu.cpu_environment(tensor_parallel=self.tensor_parallel, base=environment)

    def _evidence(self) -> str:
        if self.log_file is None:
            return "its log stands above"
        text = self.log_file.read_bytes()[-65536:].decode(errors="replace") if self.log_file.exists() else ""
        plain = re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip()
        return "\n".join([f"the end of {self.log_file}:", *(plain.splitlines()[-15:] or ["(no log was written)"])])


def engine_server(
    config: EngineConfig,
    *,
    dtype: str,
    context_length: int,
    seed: int,
    index: int,
    log_folder: Path,
    place: int | None = None,
    first_gpu: int = 0,
    host: str = LOOPBACK,
    api_key: str | None = None,
    fp32_lm_head: bool = False,
    cuda: bool | None = None,
) -> SglangServer:
    """A server that samples for training, by token ids; not started.

    ``index`` numbers the engines of a run: it names the log file ``engine-<index>.log`` in ``log_folder`` and, added
    to ``seed``, gives the sampling seed. ``place`` numbers those of one machine, by default alike: the engine takes the
    ``tp`` GPUs from ``first_gpu + place * tp`` on. ``api_key`` is drawn anew by default. ``cuda`` says whether it runs
    on GPUs; None: if this host has any.
    """
    for key in config.extra:
        if key.replace("-", "_") in _MANAGED:
            raise EngineError(
                f"engine.extra.{key} is set by mua itself; use the engine section's own keys instead", passing=False
            )
    arguments: dict[str, str | int | float | bool] = {
        "dtype": config.dtype or dtype,
        "context-length": context_length,
        "mem-fraction-static": config.memory_fraction,
        "max-running-requests": config.max_running_requests,
        "random-seed": seed + index,
        "skip-tokenizer-init": True,
        "disable-radix-cache": not config.radix_cache,
        "enable-deterministic-inference": config.deterministic,
        "enable-memory-saver": config.memory_saver,
        "enable-return-routed-experts": config.routed_experts,
        "enable-fp32-lm-head": fp32_lm_head,
        "weight-version": "0",
        "custom-weight-loader": LOADER,
        "log-level-http": "warning",
    }
    if config.max_total_tokens is not None:
        arguments["max-total-tokens"] = config.max_total_tokens
    cuda = has_cuda() if cuda is None else cuda
    if cuda:
        arguments["base-gpu-id"] = first_gpu + (index if place is None else place) * config.tensor_parallel
    return SglangServer(
        label=f"engine {index}",
        arguments=arguments | {key.replace("_", "-"): value for key, value in config.extra.items()},
        host=host,
        tensor_parallel=config.tensor_parallel,
        cuda=cuda,
        start_seconds=config.start_seconds,
        stop_seconds=config.stop_seconds,
        start_key="engine.start_seconds = ",
        api_key=api_key or sglang_keys.new_key(),
        log_file=log_folder / f"engine-{index}.log",
    )


_STATUS_SECONDS = 1.0


PATIENCE_SECONDS = 30.0
"""How long a host may stay silent before its engines count as dead; also what is added to an engine's deadlines."""


async def serve(
    routes: web.RouteTableDef, key: str, address: str, port: int = 0, *middlewares: Any, most_bytes: int = 1 << 20
) -> tuple[web.AppRunner, str]:
    """Answer those who have ``key`` at ``address``, on a free port by default; the runner to clean up, and
    ``http://HOST:PORT``.

    A handler whose client goes away is cancelled. Raises ``OSError`` where nobody can listen there.
    """

    @web.middleware
    async def check(request: web.Request, handler: Any) -> web.StreamResponse:
        if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), f"Bearer {key}".encode()):
            raise web.HTTPUnauthorized
        answer: web.StreamResponse = await handler(request)
        return answer

    application = web.Application(client_max_size=most_bytes, middlewares=[check, *middlewares])
    application.add_routes(routes)
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, address, port).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner, f"http://{address}:{runner.addresses[0][1]}"


async def request_json(
    url: str, key: str, body: Any = None, *, seconds: float, method: str = "POST", name: str = ""
) -> tuple[int, Any]:
    """Status and content (None where it is no JSON) of the answer to a request with the run's ``key``.

    ``name`` is the engine node that asks. Raises ``aiohttp.ClientError`` or ``TimeoutError``.
    """
    headers, timeout = {"Authorization": f"Bearer {key}"}, aiohttp.ClientTimeout(total=seconds)
    async with (
        aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
        session.request(method, url, json=body, params={"name": name}) as response,
    ):
        return response.status, await response.json() if response.content_type == "application/json" else None


class RemoteServer:
    """Engine ``index`` of the run, server ``place`` of the machine whose host is at ``url``.

    Implements :class:`mua.engine.engine_handle.Server` on one asyncio loop. ``where`` is the machine in messages.
    """

    def __init__(
        self, config: EngineConfig, url: str, api_key: str, *, index: int, place: int, log_folder: Path, where: str
    ) -> None:
        self.label = f"engine {index}"
        self.log_file: Path | None = log_folder / f"engine-{index}.log"
        self.url = ""
        self.running = False
        self.api_key = api_key
        self.abandoned = False
        """Whether the host is gone, or ends its servers itself."""
        self._config, self._place, self._host, self._where = config, place, url, where
        self._watch: asyncio.Task[None] | None = None

    async def start(self, model_path: Path) -> None:
        """See :meth:`mua.engine.server.SglangServer.start`; an unreachable host is an :class:`EngineError` too."""
        seconds = self._config.start_seconds + PATIENCE_SECONDS
        asked = {"model_path": str(model_path.resolve())}
        try:
            answer = await self._ask("POST", f"/start/{self._place}", seconds, asked)
        except (aiohttp.ClientError, TimeoutError) as error:
            host = f"its host {self._host} on {self._where}"
            raise EngineError(f"{self.label}: {host} did not start it: {one_line(error)}") from error
        if "error" in answer:
            raise EngineError(f"{self._where}: {answer['error']}")
        self.url, self.running = answer["url"], True

        async def observe() -> None:
            """Keep :attr:`running` true while the host says so, or has been silent for less than its patience."""
            loop = asyncio.get_running_loop()
            heard = loop.time()
            while self.running:
                await asyncio.sleep(_STATUS_SECONDS)
                with suppress(aiohttp.ClientError, TimeoutError):
                    self.running = (await self._ask("GET", "/status", PATIENCE_SECONDS / 3))["running"][self._place]
                    heard = loop.time()
                self.running = self.running and loop.time() - heard < PATIENCE_SECONDS

        self._watch = asyncio.create_task(observe(), name=f"observe {self.label}")

    async def stop(self) -> None:
        """End the server; a host that does not answer is logged, for its engines end with it."""
        self.running = False
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        if self.abandoned:
            return
        try:
            await self._ask("POST", f"/stop/{self._place}", self._config.stop_seconds + PATIENCE_SECONDS)
        except (aiohttp.ClientError, TimeoutError) as error:
            _log.warning("%s: its host %s did not stop it: %s", self.label, self._host, one_line(error))

    async def _ask(self, method: str, path: str, seconds: float, body: Any = None) -> Any:
        status, answer = await request_json(self._host + path, self.api_key, body, seconds=seconds, method=method)
        if answer is None:
            raise aiohttp.ClientError(f"{path} was answered with {status}")
        return answer


OF_NCCL_GROUP: Mapping[str, str] = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""What a group of trainer and engine ranks needs alike on all of them, and SGLang's own choice."""
_OF_TRAINER = re.compile(
    r"((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    "|CUDA_DEVICE_MAX_CONNECTIONS|NVTE_ALLOW_NONDETERMINISTIC_ALGO|CUBLAS_WORKSPACE_CONFIG"
)
"""Variables by which torchrun speaks to a trainer rank, and those that are set for Megatron.

A server that inherits the first takes itself for a rank: with TORCHELASTIC_USE_AGENT_STORE its own process group waits
for torchrun's store until the deadline. For the second SGLang has settings of its own: its captured graphs and
overlapping streams want more than the one connection that Megatron's order of kernels rests on."""


def for_engine(environment: Mapping[str, str]) -> dict[str, str]:
    """A trainer's or launcher's variables for an engine that it starts; a person's own values of NCCL's stay."""
    return dict(OF_NCCL_GROUP) | {name: value for name, value in environment.items() if not _OF_TRAINER.fullmatch(name)}


def with_cuda_runtime(environment: Mapping[str, str]) -> dict[str, str]:
    """The same, with the folder of PyTorch's own CUDA runtime as the last place where the loader looks.

    torch_memory_saver is preloaded into SGLang's processes before torch is, and names ``libcudart.so.13``; where CUDA
    came with pip alone, no such process would start.
    """
    spec = importlib.util.find_spec("nvidia")
    places = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    found = sorted({str(file.parent) for place in places for file in place.glob("*/lib/libcudart.so.*")})
    before = environment.get("LD_LIBRARY_PATH", "")
    if not found or found[-1] in before.split(os.pathsep):
        return dict(environment)
    return dict(environment) | {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, [before, found[-1]]))}


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""By which torch's allocator is configured; the second and third are older names that it still reads."""


def expandable(value: str) -> bool:
    """Whether a setting of torch's allocator asks for expandable segments."""
    pairs = (part.partition(":") for part in value.split(","))
    return any(key.strip() == "expandable_segments" and on.strip().lower() in ("true", "1") for key, _, on in pairs)


def refuse_expandable_segments(config: EngineConfig, environment: Mapping[str, str] | None = None) -> None:
    """Refuse ``expandable_segments`` for ranks and engines whose memory is released or handed on.

    torch then maps its segments itself: torch_memory_saver, which maps an engine's memory in order to release it, does
    not work beside that, and CUDA IPC hands such memory to another process only where that may copy file descriptors of
    this one (``pidfd_getfd``), which containers rarely allow.

    Args:
        environment: of ranks and engines; None: this process's.

    Raises:
        ConfigError: names the variable, the keys that need it off, and the fix.
    """
    keys = ["engine.memory_saver: true"] * config.memory_saver
    keys += ["engine.transport: colocated"] * (config.transport != "broadcast")
    if not keys:
        return
    environment = os.environ if environment is None else environment
    for name in ALLOCATOR_VARIABLES:
        if expandable(value := environment.get(name, "")):
            raise ConfigError(
                f"{name}={value}: expandable segments can be neither released nor handed to an engine on the same GPU, "
                f"which {' and '.join(keys)} needs; take expandable_segments out of the variable"
            )
