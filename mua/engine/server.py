"""One SGLang HTTP server as a managed subprocess: started with a deadline, stopped with its whole tree."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import aiohttp

from mua.compat import sglang_cpu, sglang_keys
from mua.config.schema import EngineConfig
from mua.errors import EngineError
from mua.ports import LOOPBACK, free_port

_log = logging.getLogger(__name__)
_GUARDIAN = Path(__file__).with_name("guardian.py")
IDLE_CONNECTION_SECONDS = 600
"""After which a server closes a connection. Its own 5 s are within reach of a client that is kept from the processor: a
request written into a connection that is just being closed looks like a dead engine."""
_STARTS = 3
"""A server binds its ports seconds after they were chosen; one that finds them taken is started on others. So is one
that was killed meanwhile."""
_KILLED = re.compile(rb"(exit code:|terminated with|with code) -\d")
"""How SGLang's main process says that a scheduler of its own ended by a signal."""
_MANAGED = frozenset(
    {
        "model_path", "host", "port", "device", "dtype", "tp_size", "tensor_parallel_size", "context_length",
        "mem_fraction_static", "max_total_tokens", "max_running_requests", "random_seed", "skip_tokenizer_init",
        "disable_radix_cache", "enable_deterministic_inference", "enable_memory_saver", "weight_version",
        "enable_return_routed_experts", "config", "api_key", "admin_api_key",
    }
)  # fmt: skip

_OF_TRAINER = re.compile(r"((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")
"""Variables by which torchrun speaks to a trainer rank. A server that inherits them takes itself for one: with
TORCHELASTIC_USE_AGENT_STORE its own process group waits for torchrun's store until the deadline."""


def has_cuda() -> bool:
    """Whether this host has a usable CUDA device."""
    import torch

    return torch.cuda.is_available()


def log_tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log, terminal colours removed."""
    if not path.exists():
        return "(no log was written)"
    text = path.read_bytes()[-65536:].decode("utf-8", errors="replace")
    return "\n".join(re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip().splitlines()[-lines:])


def start_process(command: list[str], log: BinaryIO, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """``command`` in a session of its own, writing into ``log``."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )


class EngineServer:
    """One server on this machine. ``start`` and ``stop`` may be called again after each other.

    ``index`` numbers the engines of a run: it names the log file ``engine-<index>.log`` in ``log_folder`` and, added
    to ``seed``, gives the sampling seed. ``place`` numbers those of one machine, by default alike: the engine takes the
    GPUs ``[place * tp, (place + 1) * tp)``. ``host`` is the address it listens on. Whoever lacks ``api_key``, which by
    default is drawn anew, gets nothing but health probes answered, on this machine too.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        dtype: str,
        context_length: int,
        seed: int,
        index: int,
        log_folder: Path,
        place: int | None = None,
        host: str = LOOPBACK,
        api_key: str | None = None,
    ) -> None:
        self.config = config
        self.index = index
        self.host = host
        self._place = index if place is None else place
        self.api_key = api_key or sglang_keys.new_key()
        self.log_file = log_folder / f"engine-{index}.log"
        self.cuda = has_cuda()
        self.port = 0
        self._dtype = config.dtype or dtype
        self._context_length = context_length
        self._seed = seed
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._check_extra()

    def _check_extra(self) -> None:
        for key in self.config.extra:
            if key.replace("-", "_") in _MANAGED:
                raise EngineError(
                    f"engine.extra.{key} is set by mua itself; use the engine section's own keys instead", passing=False
                )

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def running(self) -> bool:
        """Whether the server's process is there; it may still be loading."""
        return self._process is not None and self._process.poll() is None

    def arguments(self, model_path: Path) -> dict[str, str | int | float | bool]:
        """Native server arguments, ``engine.extra`` last."""
        config = self.config
        arguments: dict[str, str | int | float | bool] = {
            "model-path": str(model_path),
            "host": self.host,
            "port": self.port,
            "device": "cuda" if self.cuda else "cpu",
            "dtype": self._dtype,
            "tp-size": config.tensor_parallel,
            "context-length": self._context_length,
            "mem-fraction-static": config.memory_fraction,
            "max-running-requests": config.max_running_requests,
            "random-seed": self._seed + self.index,
            "skip-tokenizer-init": True,
            "skip-server-warmup": not self.cuda,
            "disable-radix-cache": not config.radix_cache,
            "enable-deterministic-inference": config.deterministic,
            "enable-memory-saver": config.memory_saver,
            "enable-return-routed-experts": config.routed_experts,
            "weight-version": "0",
            "log-level": "info",
            "log-level-http": "warning",
        }
        if config.max_total_tokens is not None:
            arguments["max-total-tokens"] = config.max_total_tokens
        arguments |= self._gpu_arguments() if self.cuda else self._cpu_arguments()
        return arguments | {key.replace("_", "-"): value for key, value in config.extra.items()}

    def _gpu_arguments(self) -> dict[str, str | int | float | bool]:
        return {"base-gpu-id": self._place * self.config.tensor_parallel}

    def _cpu_arguments(self) -> dict[str, str | int | float | bool]:
        return {
            "attention-backend": "torch_native",
            "sampling-backend": "pytorch",
            "sleep-on-idle": True,
            "disable-overlap-schedule": True,
        }

    def _command(self, model_path: Path) -> list[str]:
        command = [sys.executable, "-m", "sglang.launch_server", "--config", str(self._key_file)]
        for key, value in self.arguments(model_path).items():
            if value is True:
                command.append(f"--{key}")
            elif value is not False:
                command += [f"--{key}", str(value)]
        return command

    @property
    def _key_file(self) -> Path:
        return self.log_file.with_suffix(".key.yaml")

    def _write_key(self) -> None:
        """The API key goes through a file that only its owner reads: everyone on the machine sees a command line.

        The log is as private, should SGLang find another way to tell its arguments.
        """
        self.log_file.touch()
        self.log_file.chmod(0o600)
        sglang_keys.write_key_file(self._key_file, self.api_key)

    def _environment(self) -> dict[str, str]:
        environment = {
            "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",  # it delays a crash by 5 s
            "SGLANG_TIMEOUT_KEEP_ALIVE": str(IDLE_CONNECTION_SECONDS),
        }
        environment |= {name: value for name, value in os.environ.items() if not _OF_TRAINER.fullmatch(name)}
        environment = sglang_keys.with_plugin(environment)
        if self.cuda:
            return environment
        return sglang_cpu.cpu_environment(tensor_parallel=self.config.tensor_parallel, base=environment)

    def _spawn(self, model_path: Path) -> None:
        self.port = free_port(self.host)
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self._write_key()
        guarded, command = [sys.executable, "-I", "-S", str(_GUARDIAN), str(os.getpid())], self._command(model_path)
        with self.log_file.open("ab") as log:
            self._log_start = log.tell()
            log.write(f"\n--- starting {' '.join(command)}\n".encode())
            log.flush()
            self._process = start_process([*guarded, *command], log, self._environment())

    async def start(self, model_path: Path) -> None:
        """Start and wait until the server takes requests.

        Raises :class:`EngineError`, with the end of the server's log, when the folder holds no model, the
        server exits, or ``engine.start_seconds`` pass.
        """
        if self.running:
            raise EngineError(f"engine {self.index} is already running")
        if not (model_path / "config.json").is_file():
            raise EngineError(
                f"engine {self.index} cannot start: {model_path} is not a model folder (no config.json); "
                "set model.path to a Hugging Face folder",
                passing=False,
            )
        try:
            async with asyncio.timeout(self.config.start_seconds):
                await self._until_ready(model_path)
            self._key_file.unlink(missing_ok=True)
            self._tell_guardian()
        except TimeoutError:
            await self.stop()
            raise EngineError(
                f"engine {self.index} was not ready within engine.start_seconds = {self.config.start_seconds:g}; "
                + self._evidence()
            ) from None
        except BaseException:
            await self.stop()
            raise

    async def _until_ready(self, model_path: Path) -> None:
        for left in reversed(range(_STARTS)):
            self._spawn(model_path)
            if await self._becomes_ready():
                return
            killed = self._was_killed()
            if not left or not (killed or self._lost_a_port()):
                raise EngineError(f"engine {self.index} exited while starting; {self._evidence()}", passing=killed)
            found = "was killed while starting" if killed else "found a port taken that was free before"
            _log.warning("engine %d %s; starting it again", self.index, found)
            await self.stop()

    async def _becomes_ready(self) -> bool:
        """Whether the server answers in the end; it may exit instead."""
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while self.running:
                try:
                    async with session.get(f"{self.url}/ready") as response:
                        if response.status == 200:
                            return True
                except (aiohttp.ClientError, TimeoutError):
                    pass
                await asyncio.sleep(0.1)
        return False

    def _lost_a_port(self) -> bool:
        """Whether the server said, since it was started last, that a port is taken: its own or its process group's."""
        return b"address already in use" in self._said().lower()

    def _was_killed(self) -> bool:
        """Whether the server that has just ended, or a process of its own without which it cannot start, was killed."""
        status = None if self._process is None else self._process.poll()
        return (status is not None and not 0 <= status <= 128) or _KILLED.search(self._said()) is not None

    def _said(self) -> bytes:
        """What the log holds since the server was started last."""
        with self.log_file.open("rb") as log:
            log.seek(self._log_start)
            return log.read()

    def _tell_guardian(self) -> None:
        """The shared memory that there is from now on must be removed, however soon the server is killed."""
        if self._process is not None:
            self._process.send_signal(signal.SIGUSR1)

    def _evidence(self) -> str:
        return f"the end of {self.log_file}:\n{log_tail(self.log_file)}"

    async def stop(self) -> None:
        """Kill the server and everything it started, and wait until all of it is gone."""
        process, self._process = self._process, None
        self._key_file.unlink(missing_ok=True)
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
        deadline = time.monotonic() + self.config.stop_seconds
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
            await asyncio.sleep(0.02)
