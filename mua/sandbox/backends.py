"""The commands that start a sandbox, for each backend; inside, all run ``inside.py`` and speak its protocol.

============ ================================== =============================== ===================================
backend      what keeps a program in            memory and processes            gone when our process is killed
============ ================================== =============================== ===================================
bubblewrap   namespaces of a user of its own    counted by ``inside.py``        with its parent, and with its input
docker       a container of ``image``           and by the container's cgroup   with its input (``--rm``)
apptainer    a container of ``image``           counted by ``inside.py``        with its input
============ ================================== =============================== ===================================
"""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mua.config.tools import SandboxConfig
from mua.utils.errors import ConfigError

MIB = 1024 * 1024
PYTHON = "/usr/bin/python3"
BOOT = """\
import json, os, sys
text = b""
while not text.endswith(b"\\n"):
    text += os.read(0, 65536) or sys.exit("no program came")
exec(compile(json.loads(text), "inside.py", "exec"))
"""
"""Takes the program that runs inside from the first line of its input, which shows it to nobody and fits any image."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
_VARIABLES = {
    "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/work", "LANG": "C.UTF-8", "TMPDIR": "/tmp", "PYTHONHASHSEED": "0",
}  # fmt: skip
_OF_CLIENTS = ("HOME", "PATH", "XDG_RUNTIME_DIR", "TMPDIR", "DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT",
               "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY", "APPTAINER_CACHEDIR", "APPTAINER_TMPDIR")  # fmt: skip
_PROCESSORS = ("x86_64", "aarch64")


@dataclass(frozen=True, slots=True)
class Launch:
    """How one sandbox is started and ended."""

    command: list[str]
    variables: dict[str, str]
    """Of the program that starts the sandbox, never of the sandbox."""
    end: list[str] | None = None
    """What ends it where killing the command is not enough."""
    inherits: tuple[int, ...] = ()
    """File descriptors that the command needs."""


def check_backend(config: SandboxConfig) -> None:
    """Raises :class:`ConfigError` where ``config.backend`` cannot be used on this machine."""
    where = "environment.tools.sandbox"
    if sys.platform != "linux" or platform.machine() not in _PROCESSORS:
        raise ConfigError(f"{where}: sandboxes need Linux on {' or '.join(_PROCESSORS)}")
    _program(config)
    if config.backend == "bubblewrap":
        if not Path(PYTHON).exists():
            raise ConfigError(f"{where}: backend bubblewrap needs {PYTHON}; install Debian's package python3")
        if os.geteuid() == 0 and shutil.which("setpriv") is None:
            raise ConfigError(
                f"{where}: started as root, backend bubblewrap needs setpriv; install Debian's package util-linux"
            )


def launch(config: SandboxConfig, info: int) -> Launch:
    """How to start one sandbox; bubblewrap writes the number of its first process to the file descriptor ``info``.

    Raises :class:`ConfigError` without the backend's program.
    """
    program = _program(config)
    if config.backend == "bubblewrap":
        return bubblewrap(program, config, info)
    return docker(program, config) if config.backend == "docker" else apptainer(program, config)


def _program(config: SandboxConfig) -> str:
    name = {"bubblewrap": "bwrap"}.get(config.backend, config.backend)
    if (found := shutil.which(name)) is None:
        packages = {"bubblewrap": "install the package bubblewrap", "docker": "install Docker",
                    "apptainer": "install Apptainer"}  # fmt: skip
        raise ConfigError(
            f"environment.tools.sandbox: backend {config.backend} needs the program {name}, which is not on PATH; "
            f"{packages[config.backend]}, or set another backend"
        )
    return found


def _limits(config: SandboxConfig, *, counted: bool = True) -> str:
    """For ``inside.py``; ``counted``: whether the kernel counts the user's processes for this sandbox alone."""
    return json.dumps({
        "cpu": config.cpu_seconds, "memory": config.memory_mib * MIB, "disk": config.disk_mib * MIB,
        "processes": config.processes if counted else None, "files": config.files,
    })  # fmt: skip


def bubblewrap(bwrap: str, config: SandboxConfig, info: int) -> Launch:
    """Nothing of the machine but its system, read-only, is in it.

    Started as root, each sandbox gets a user id of its own that exists nowhere else, so that the kernel's limit on
    processes counts (it exempts root) and no sandbox owns a file of the machine. By ``setpriv``, because Python changes
    users only in a copy of itself, which takes long where it is large.
    """
    command = [bwrap, "--info-fd", str(info), "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534",
               "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv", "--hostname", "sandbox",
               "--cap-drop", "ALL"]  # fmt: skip
    for path in _SYSTEM:
        if Path(path).is_symlink():
            command += ["--symlink", os.readlink(path), path]
        elif Path(path).exists():
            command += ["--ro-bind", path, path]
    size = str(config.disk_mib * MIB)
    command += ["--proc", "/proc", "--dev", "/dev", "--size", "1048576", "--tmpfs", "/dev/shm"]
    command += ["--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", "/work", "--chdir", "/work"]
    for name, value in _VARIABLES.items():
        command += ["--setenv", name, value]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", PYTHON, "-I", "-c", BOOT, _limits(config)]
    user, group = (_unused(Path(f"/proc/self/{kind}_map")) for kind in ("uid", "gid"))
    if os.geteuid() == 0 and user is not None and group is not None:
        identity = ["--reuid", str(user), "--regid", str(group), "--clear-groups"]
        command = [str(shutil.which("setpriv")), *identity, "--", *command]
    return Launch(command, {}, inherits=(info,))


def _unused(ids: Path) -> int | None:
    """An id that nobody else has, of those that there are here; None in a namespace of one id, whose root is limited.

    A container without root on its host has some ten thousand ids, in which two sandboxes may rarely meet.
    """
    ranges = [tuple(map(int, line.split())) for line in ids.read_text(encoding="ascii").splitlines()]
    first, _, count = max(ranges, key=lambda one: one[2])
    if count >= 1 << 31:
        return random.SystemRandom().randrange(1 << 20, 1 << 30)
    low = max(first, 1)
    return random.SystemRandom().randrange(low, first + count) if first + count > low else None


def docker(client: str, config: SandboxConfig) -> Launch:
    """A container without rights, whose memory holds its folders too; the image has to be there."""
    name = f"mua-sandbox-{random.SystemRandom().getrandbits(64):016x}"
    memory = f"{config.memory_mib + 2 * config.disk_mib + 64}m"
    folder = f"rw,exec,nosuid,nodev,uid=65534,gid=65534,mode=1777,size={config.disk_mib}m"
    command = [client, "run", "--rm", "--interactive", "--name", name, "--pull", "never", "--log-driver", "none",
               "--network", "bridge" if config.network else "none", "--read-only", "--cap-drop", "ALL",
               "--security-opt", "no-new-privileges", "--user", "65534:65534", "--hostname", "sandbox",
               "--memory", memory, "--memory-swap", memory, "--pids-limit", str(config.processes + 1),
               "--shm-size", "1m", "--tmpfs", f"/work:{folder}", "--tmpfs", f"/tmp:{folder}", "--workdir", "/work",
               "--entrypoint", "python3"]  # fmt: skip
    for key, value in _VARIABLES.items():
        command += ["--env", f"{key}={value}"]
    command += ["--", config.image, "-I", "-c", BOOT, _limits(config, counted=False)]
    return Launch(command, _of_client(os.environ), [client, "kill", name])


def apptainer(program: str, config: SandboxConfig) -> Launch:
    """A container that sees no folder of the machine; its own folders are as large as ``sessiondir max size``."""
    command = [program, "exec", "--userns", "--containall", "--cleanenv", "--no-init", "--no-eval", "--no-home",
               "--no-mount", "bind-paths,hostfs", "--drop-caps", "all", "--net", "--network", "none",
               "--scratch", "/work", "--pwd", "/work"]  # fmt: skip
    for key, value in _VARIABLES.items():
        command += ["--env", f"{key}={value}"]
    command += [config.image, "python3", "-I", "-c", BOOT, _limits(config)]
    return Launch(command, _of_client(os.environ))


def _of_client(variables: Mapping[str, str]) -> dict[str, str]:
    """What a client of containers needs of ours; a variable such as APPTAINERENV_X would go into the container."""
    return {name: variables[name] for name in _OF_CLIENTS if name in variables}
