"""A sandbox under attack: limits, isolation, and its end with its rollout and with our process.

Not covered: Docker and Apptainer, escapes through faults of the kernel, machines without user namespaces, more than
eight sandboxes at once, the link of a sandbox to an episode's tools.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mua.config.sandbox_section import SandboxConfig
from mua.errors import EnvironmentFault
from mua.sandbox.bubble import Sandbox

CONFIG = SandboxConfig(call_seconds=3, memory_mib=300, disk_mib=8, output_characters=300)


@pytest.fixture(scope="module", autouse=True)
def bubblewrap() -> None:
    if shutil.which("bwrap") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "install", "-y", "-q", "bubblewrap"], check=False, capture_output=True, timeout=120)
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed, and cannot be")

    async def starts() -> None:
        sandbox = Sandbox(CONFIG)
        await sandbox.start()
        await sandbox.close()

    try:
        asyncio.run(starts())
    except EnvironmentFault as error:
        pytest.skip(f"no namespaces here: {error}")


def test_attacks_in_one_rollout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOST_SECRET", "xyzzy")
    secret = tmp_path / "secret"
    secret.write_text("plugh")

    async def play() -> None:
        sandbox, other = Sandbox(CONFIG), Sandbox(CONFIG)
        await asyncio.gather(sandbox.start(), other.start())
        try:
            assert (
                await sandbox.shell("echo kept > file; setsid nohup sleep 900 & env; cat /proc/*/environ")
            ).code == 0
            seen = await sandbox.shell(f"cat file; env; cat /proc/*/environ; cat {secret}; ls /root; touch /usr/x /x")
            assert seen.output.startswith("kept")
            assert "xyzzy" not in seen.output
            assert "plugh" not in seen.output
            assert not Path("/usr/x").exists()
            assert not Path("/x").exists()
            assert (await other.shell("cat file")).code != 0
            assert "sleep" not in (await sandbox.shell("cat /proc/*/comm")).output
            assert (
                "unreachable"
                in (await sandbox.python("import socket; socket.create_connection(('1.1.1.1', 80))")).output
            )
            assert (
                "No space left" in (await sandbox.shell("for i in 1 2 3; do head -c 6M /dev/zero > b$i; done")).output
            )
            assert "Cannot fork" in (await sandbox.shell("for i in $(seq 200); do sleep 2 & done")).output
            assert "MemoryError" in (await sandbox.python("bytearray(10**9)")).output
            endless = await sandbox.shell("yes")
            assert endless.code is None
            assert "3 s" in endless.fault
            assert "bytes cut" in endless.output
            assert len(endless.output) < 400
            assert (await sandbox.shell("cat file")).output == "kept\n"
            assert "zero byte" in (await sandbox.shell("a\0b")).fault
        finally:
            await asyncio.gather(sandbox.close(), other.close())
        assert (await sandbox.shell("true")).fault == "the sandbox has ended"

    asyncio.run(play())


def test_what_kills_the_sandbox_costs_that_sandbox_alone() -> None:
    spread = "import os,time\nfor i in range(6):\n  if not os.fork(): x=bytearray(10**8); time.sleep(9)\ntime.sleep(9)"

    async def play() -> None:
        boxes = [Sandbox(CONFIG) for _ in range(8)]
        await asyncio.gather(*(box.start() for box in boxes))
        try:
            memory, killed = await asyncio.gather(boxes[0].python(spread), boxes[1].shell("kill -9 -1; echo no"))
            assert "300 MiB" in memory.fault
            assert killed.fault
            others = await asyncio.gather(*(box.shell("echo alive") for box in boxes[2:]))
            assert [one.output for one in others] == ["alive\n"] * 6
        finally:
            await asyncio.gather(*(box.close() for box in boxes))

    asyncio.run(play())


def test_gone_with_our_process() -> None:
    program = (
        "import asyncio\nfrom mua.config.sandbox_section import SandboxConfig\nfrom mua.sandbox.bubble import Sandbox\n"
        "async def main():\n  box = Sandbox(SandboxConfig())\n  await box.start()\n  print('up', flush=True)\n"
        "  await box.shell('setsid nohup sleep 900 & sleep 900')\nasyncio.run(main())\n"
    )
    ours = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert ours.stdout is not None
    assert ours.stdout.readline() == b"up\n"
    below: list[psutil.Process] = []
    end = time.monotonic() + 20
    while time.monotonic() < end and not any(p.name() == "sleep" for p in below):
        below = psutil.Process(ours.pid).children(recursive=True)
    assert any(p.name() == "sleep" for p in below)
    ours.send_signal(signal.SIGKILL)
    ours.wait()
    ours.stdout.close()
    assert not psutil.wait_procs(below, timeout=20)[1]
