"""Tool server ``sandbox``: programs of a policy, in Python or for the shell, in a sandbox of their rollout alone.

::

    start of the server ──► one sandbox, proven to hold its limits ──► calls, files kept ──► end of the server: gone

One server serves one rollout (``isolation: session``, the default). Whatever a program does is a result, also where the
sandbox ends with it, at once or between two calls: the next call gets a fresh one and is told so. What no program
brought about, a sandbox that does not start, is an :class:`EnvironmentFault`.

============ ================================== =============================== ===================================
backend      what keeps a program in            memory besides rlimits          gone when our process is killed
============ ================================== =============================== ===================================
bubblewrap   namespaces of a user of its own    the first process, and a        with its parent, and with its input
                                                cgroup where we can make one
docker       a container of ``image``           the same, by Docker's cgroup    with its input (``--rm``)
apptainer    a container of ``image``           as with bubblewrap              with its input
============ ================================== =============================== ===================================
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Literal, Self

from pydantic import model_validator

from environments.servers.serving import ServedTool, ToolError, serve
from mua.environment.blame import Blame, blame
from mua.types import ToolSchema
from mua.users.scoring.sandbox import (
    BOOT,
    VARIABLES,
    Launch,
    ProgramKind,
    Sandbox,
    SandboxLimits,
    SandboxResult,
    bubblewrap,
    ending,
    in_group,
    limits_text,
)  # fmt: skip
from mua.utils.errors import ConfigError, EnvironmentFault

FRESH = "[a fresh sandbox: the files of the one before are gone]"
_ARGUMENTS: dict[ProgramKind, tuple[str, str]] = {
    "python": ("code", "A whole program; what it prints is the result."),
    "shell": ("command", "Run by bash in the working folder; what it prints is the result."),
}
_DOES: dict[ProgramKind, str] = {
    "python": "Run a Python program in a sandbox and get what it prints. Variables are not kept between calls",
    "shell": "Run a shell command in a sandbox and get what it prints",
}
_OF_CLIENTS = ("HOME", "PATH", "XDG_RUNTIME_DIR", "TMPDIR", "DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT",
               "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY", "APPTAINER_CACHEDIR", "APPTAINER_TMPDIR")  # fmt: skip


class SandboxSettings(SandboxLimits):
    """Where the programs of a rollout run, and what they may use."""

    backend: Literal["bubblewrap", "docker", "apptainer"] = "bubblewrap"
    """What keeps programs in: namespaces of this machine's system, or a container of ``image``."""
    image: str = ""
    """Docker: an image that is on the machine; Apptainer: a SIF file or folder. It needs Python 3.9 or later as
    ``python3``, and ``sh``. Bubblewrap takes none: it shows the system of this machine."""
    network: bool = False
    """Whether programs reach the network; Docker alone can, because the others would share the network of this machine
    with the ports of its engines."""

    @model_validator(mode="after")
    def _fits_its_backend(self) -> Self:
        if self.backend == "bubblewrap" and self.image:
            raise ValueError("image belongs to the backends docker and apptainer; leave it out, or set backend")
        if self.backend != "bubblewrap" and not self.image:
            raise ValueError(f"backend {self.backend} needs image; it takes what is on the machine and pulls none")
        if self.image.startswith("-"):
            raise ValueError(f"image {self.image!r} is no name of an image")
        if self.network and self.backend != "docker":
            raise ValueError(
                f"network: with backend {self.backend} programs would share this machine's network, and so reach the "
                "ports of its engines; set it to false, or take backend docker"
            )
        return self


class RolloutSandbox:
    """The sandbox of one rollout, replaced where a program ended it."""

    def __init__(self, settings: SandboxSettings) -> None:
        launch = {"bubblewrap": bubblewrap, "docker": docker, "apptainer": apptainer}[settings.backend]
        self._new = partial(Sandbox, settings, settings.backend, launch)
        self._sandbox: Sandbox | None = None
        self._lost = False

    async def start(self) -> None:
        """Start the first one. Raises :class:`ConfigError` and :class:`EnvironmentFault`."""
        sandbox = self._new()
        await sandbox.start()
        self._sandbox = sandbox
        await sandbox.prove_limit()

    async def run(self, kind: ProgramKind, text: str) -> str:
        """Run a program. Raises :class:`ToolError` where it did not end well."""
        if self._sandbox is not None and not self._sandbox.alive:  # a program that was left running may have ended it
            await self.close()
            self._lost = True
        if self._sandbox is None:  # whether another one starts decides whose fault that was (``ended``)
            self._sandbox = self._new()
            await self._sandbox.start()
        result = await self._sandbox.run(kind, text)
        told = f"{FRESH}\n{told_of(result)}" if self._lost else told_of(result)
        self._lost = result.lost
        if result.lost:
            await self.close()
        if result.code != 0 or result.fault:
            code = "lost" if result.lost else "limit" if result.fault else "exit_status"
            raise ToolError(told) if blame("sandbox", [code]) is Blame.POLICY else EnvironmentFault(told)
        return told

    async def close(self) -> None:
        """End the sandbox, and everything in it."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.close()


def told_of(result: SandboxResult) -> str:
    """What the policy reads: the output, and how the program ended where that was not well."""
    end = ""
    if result.fault:
        end = f"[{result.fault}]"
    elif result.code:
        end = f"[{ending(result.code)}]"
    if result.lost:
        end += " [its files are gone; the next call gets a fresh one]"
    if not result.output:
        return end or "(no output)"
    return result.output if not end else f"{result.output.removesuffix('\n')}\n{end}"


@asynccontextmanager
async def sandbox_tools(settings: SandboxSettings) -> AsyncIterator[Sequence[ServedTool]]:
    """The tools ``python`` and ``shell`` with their sandbox."""
    box = RolloutSandbox(settings)
    try:
        await box.start()
        yield [_tool(kind, settings, box) for kind in _ARGUMENTS]
    finally:
        await box.close()


def _tool(kind: ProgramKind, settings: SandboxSettings, box: RolloutSandbox) -> ServedTool:
    argument, about = _ARGUMENTS[kind]
    network = "with access to the network" if settings.network else "without network"
    said = (
        f"{_DOES[kind]}. It is {network}; files in /work stay until the conversation ends. A call may take "
        f"{settings.call_seconds:g} s, {settings.memory_mib} MiB of memory and {settings.disk_mib} MiB of files."
    )
    form = {"type": "object", "properties": {argument: {"type": "string", "description": about}},
            "required": [argument], "additionalProperties": False}  # fmt: skip

    async def run(**arguments: str) -> str:
        return await box.run(kind, arguments[argument])

    return ServedTool(ToolSchema(kind, said, form), run)


def docker(config: SandboxLimits, _info: int) -> Launch:
    """A container without rights, whose memory holds its folders too; the image has to be there."""
    assert isinstance(config, SandboxSettings)
    client, variables = _client("docker")
    name = f"mua-sandbox-{random.SystemRandom().getrandbits(64):016x}"
    memory = f"{config.memory_mib + 2 * config.disk_mib + 64}m"
    folder = f"rw,exec,nosuid,nodev,uid=65534,gid=65534,mode=1777,size={config.disk_mib}m"
    command = [client, "run", "--rm", "--interactive", "--name", name, "--pull", "never", "--log-driver", "none",
               "--network", "bridge" if config.network else "none", "--read-only", "--cap-drop", "ALL",
               "--security-opt", "no-new-privileges", "--user", "65534:65534", "--hostname", "sandbox",
               "--memory", memory, "--memory-swap", memory, "--pids-limit", str(config.processes + 1),
               "--shm-size", "1m", "--tmpfs", f"/work:{folder}", "--tmpfs", f"/tmp:{folder}", "--workdir", "/work",
               "--entrypoint", "python3"]  # fmt: skip
    for key, value in VARIABLES.items():
        command += ["--env", f"{key}={value}"]
    command += ["--", config.image, "-I", "-c", BOOT, limits_text(config, counted=False)]
    return Launch(command, variables, [client, "kill", name])


def apptainer(config: SandboxLimits, _info: int) -> Launch:
    """A container that sees no folder of the machine; its own folders are as large as ``sessiondir max size``."""
    assert isinstance(config, SandboxSettings)
    program, variables = _client("apptainer")
    command = [program, "exec", "--userns", "--containall", "--cleanenv", "--no-init", "--no-eval", "--no-home",
               "--no-mount", "bind-paths,hostfs", "--drop-caps", "all", "--net", "--network", "none",
               "--scratch", "/work", "--pwd", "/work"]  # fmt: skip
    for key, value in VARIABLES.items():
        command += ["--env", f"{key}={value}"]
    command += [config.image, "python3", "-I", "-c", BOOT, limits_text(config)]
    return in_group(config, Launch(command, variables))


def _client(name: str) -> tuple[str, dict[str, str]]:
    """A client of containers, and what it needs of our variables: one like APPTAINERENV_X would go into the container.

    Raises :class:`ConfigError` where it is not there.
    """
    if (found := shutil.which(name)) is None:
        raise ConfigError(f"backend {name} needs the program {name}, which is not on PATH; install it")
    return found, {key: os.environ[key] for key in _OF_CLIENTS if key in os.environ}


if __name__ == "__main__":
    serve("sandbox", SandboxSettings, sandbox_tools)
