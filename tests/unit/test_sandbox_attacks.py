"""A sandbox under attack: limits, isolation, the answers of its own, its end with its rollout and with our process.

With MUA_DOCKER_IMAGE, an image with Python, bash and ps that Docker has, the attacks run in its containers too. Not
covered: Apptainer; escapes through faults of the kernel; machines without
user namespaces; kernel memory that no limit counts (docs/sandbox.md); the tools of an episode
(``test_sandbox_tools.py``).
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml
from mcp_support import own_server
from sandbox_support import below, need_sandboxes

from environments.servers.sandbox import FRESH, SandboxSettings
from mua.config.environment import McpServerConfig
from mua.environment.mcp.servers import Lease, ToolServers
from mua.environment.protocol import ToolResult
from mua.users.scoring import sandbox as box_module
from mua.users.scoring.sandbox import LONGEST_PROGRAM, Launch, ProgramKind, Sandbox, SandboxLimits
from mua.utils.strict_json import unpaired_surrogate

ROOT = Path(__file__).resolve().parents[2]
CONFIG = SandboxSettings(
    call_seconds=30, cpu_seconds=30, memory_mib=300, disk_mib=8, output_bytes=2000, files=2000, processes=32
)
SHORT = CONFIG.model_copy(update={"call_seconds": 1.0})
SECRET = "xyzzy-of-the-host"


@dataclass(frozen=True)
class Attack:
    """A program, and what its result has to say."""

    kind: ProgramKind
    program: str
    told: str
    """A regular expression, searched in the result."""
    code: int | None = None
    """Exit status; None: any."""
    lost: bool = False
    """Whether the sandbox ends with it."""
    endless: bool = False
    """Whether only the deadline ends it."""


ATTACKS = {
    **{
        name: Attack(**attack)
        for name, attack in yaml.safe_load((ROOT / "tests/data/sandbox_attacks.yaml").read_text("utf-8")).items()
    },
    "a program with a zero byte": Attack("python", "print(1)\0", "not run: the text has a zero byte"),
    "a program that is no text": Attack("python", "print('\ud800')", "unpaired surrogate"),
    "a huge program": Attack("shell", ": " + "ä" * LONGEST_PROGRAM, "not run: 200002 bytes"),
    "the longest program": Attack("shell", "echo ran #" + "x" * (LONGEST_PROGRAM - 10), r"\Aran\n\Z"),
}


@pytest.fixture(scope="module", autouse=True)
def sandboxes() -> None:
    need_sandboxes()


def withstood(attack: Attack, result: ToolResult, of_host: Callable[[str], str]) -> bool:
    """Whether the result of an attack is what it has to be."""
    said = re.search(of_host(attack.told), result.text)
    text = SECRET not in result.text and unpaired_surrogate(result.text) is None
    short = len(result.text.encode()) < 3 * CONFIG.output_bytes
    ends = {None: "", 0: ""}.get(attack.code, f"exit status {attack.code}")
    if attack.code is not None and attack.code < 0:
        ends = f"killed by {signal.Signals(-attack.code).name}"
    return bool(said) and text and short and ends in result.text


async def call(lease: Lease, kind: ProgramKind, program: str) -> ToolResult:
    return await lease.call(kind, {"code" if kind == "python" else "command": program})


DOCKER = {"backend": "docker", "image": os.environ.get("MUA_DOCKER_IMAGE", "")}
needs_docker = pytest.mark.skipif(not DOCKER["image"], reason="MUA_DOCKER_IMAGE names no image")
BACKENDS = [pytest.param({}, id="bubblewrap"), pytest.param(DOCKER, id="docker", marks=needs_docker)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_attacks_leave_the_sandbox_and_the_host_as_they_were(
    backend: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOST_SECRET", SECRET)
    (tmp_path / "secret").write_text(SECRET)
    victim = subprocess.Popen(["sleep", "600"])
    engine, abstract = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    abstract.bind("\0mua-test-of-sandboxes")
    abstract.listen()
    values = {
        "secret": tmp_path / "secret", "here": ROOT / "README.md", "pid": victim.pid, "other": psutil.Process().ppid(),
        "port": engine.getsockname()[1], "abstract": "mua-test-of-sandboxes",
    }  # fmt: skip

    def of_host(text: str) -> str:
        return re.sub("@([a-z]+)@", lambda found: str(values[found[1]]), text)

    results: dict[str, ToolResult] = {}

    async def play(names: list[str], config: SandboxSettings) -> None:
        given = config.model_dump(exclude_defaults=True)
        server = own_server("sandbox", given, result_chars=400_000, call_seconds=120)
        servers = ToolServers([McpServerConfig.model_validate(server)])
        lease = await servers.open()
        assert await call(lease, "shell", "echo kept > file") == ToolResult("(no output)")
        for name in names:
            attack = ATTACKS[name]
            result = results[name] = await call(lease, attack.kind, of_host(attack.program))
            if attack.lost:
                assert "the next call gets a fresh one" in result.text, (name, result)
                assert (await call(lease, "shell", "echo kept > file")).text.startswith(FRESH), name
            after = await call(lease, "shell", "cat file; set -- /proc/[0-9]*; echo $#")
            assert after.text == "kept\n2\n", (name, result, after)
        lease.close()
        await servers.close()

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as group:
            for endless, given in ((True, SHORT), (False, CONFIG)):
                config = given.model_copy(update=backend)
                names = [name for name, attack in ATTACKS.items() if attack.endless is endless]
                group.create_task(play(names, config))

    with closing(engine), closing(abstract):
        asyncio.run(all_of_them())
    assert victim.poll() is None
    victim.kill()
    victim.wait()
    assert [name for name, attack in ATTACKS.items() if not withstood(attack, results[name], of_host)] == [], results
    assert not {process.name() for process in below()} & {"bwrap", "setpriv", "bash", "sleep", "yes"}


@pytest.mark.parametrize("groups", ["/sys/fs/cgroup", "/nowhere"])
def test_memory_is_limited_with_a_control_group_and_without(groups: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_module, "GROUPS", Path(groups))

    async def play() -> list[Path]:
        sandbox = Sandbox(CONFIG)
        await sandbox.start()
        made = list(Path(groups).rglob(f"mua-sandbox-{os.getpid()}-*"))
        for name in ("memory of processes without their first thread", "memory bomb of many processes"):
            result = await sandbox.run("python", ATTACKS[name].program)
            assert "more than 300 MiB of memory" in result.fault, (name, result)
        assert (await sandbox.run("python", "print(len(bytearray(2 * 10**8)))")).output == "200000000\n"
        await sandbox.close()
        return made

    assert not [group for group in asyncio.run(play()) if group.exists()]


def test_a_control_group_is_made_by_either_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tree of files in place of the kernel's, which makes the files of a group itself."""
    told = tmp_path / "cgroup"
    monkeypatch.setattr(box_module, "GROUPS", tmp_path)
    monkeypatch.setattr(box_module, "OWN_GROUPS", told)
    for line, parent, limit in (
        ("7:memory:/job/1", "memory/job/1", "memory.limit_in_bytes"), ("0::/app/run.scope", "app", "memory.max")
    ):  # fmt: skip
        (tmp_path / parent / "mua-sandbox-4194304-left").mkdir(parents=True)
        told.write_text(f"1:name=systemd:/x\n{line}\n")
        launch = box_module.in_group(CONFIG, Launch(["run"], {}))
        assert launch.group is not None
        assert launch.group.parent == tmp_path / parent
        assert (launch.group / limit).read_text() == str((300 + 2 * 8 + 64) << 20)
        assert launch.command[:2] + launch.command[3:] == ["/bin/sh", "-c", str(launch.group), "run"]
        assert not (tmp_path / parent / "mua-sandbox-4194304-left").exists()
    told.write_text("0::/\n")
    assert box_module.in_group(CONFIG, Launch(["run"], {})) == Launch(["run"], {})


def test_the_documentation_lists_each_attack() -> None:
    rows = re.findall(r"^\| ([^|]+?) \|", (ROOT / "docs/sandbox.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert not [name for name in ATTACKS if name not in rows]


def test_processor_time_is_limited_for_each_process() -> None:
    async def play() -> None:
        sandbox = Sandbox(CONFIG.model_copy(update={"cpu_seconds": 1}))
        await sandbox.start()
        result = await sandbox.run("python", "while True: pass")
        assert (result.code, result.fault) == (-signal.SIGXCPU, "killed after 1 s of processor time")
        await sandbox.close()

    asyncio.run(play())


def test_a_cancelled_call_leaves_no_answer_to_the_next() -> None:
    async def play() -> None:
        # A call that goes on in spite of its cancellation would hold the next one up for longer than a test may take.
        sandbox = Sandbox(CONFIG.model_copy(update={"call_seconds": 400.0}))
        await sandbox.start()
        for number in range(3):
            call = asyncio.create_task(sandbox.shell("echo old; sleep 0.2; echo old; sleep 60"))
            await asyncio.sleep(0.1 * number)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert (await sandbox.shell(f"echo new {number}")).output == f"new {number}\n"
            assert "sleep" not in (await sandbox.shell("cat /proc/*/comm")).output
        await sandbox.close()
        assert (await sandbox.shell("true")).fault == "the sandbox has ended"

    asyncio.run(play())


def first_process(box: Sandbox) -> psutil.Process:
    """Process 1 of a sandbox, as the host sees it."""
    told = Path(f"/proc/self/fdinfo/{box._first}").read_text(encoding="utf-8")
    return psutil.Process(int(told.partition("Pid:")[2].split()[0]))


def test_a_sandbox_that_is_killed_or_stands_still_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_module, "_GRACE", 1.0)

    async def play() -> None:
        boxes = [Sandbox(CONFIG.model_copy(update={"call_seconds": 3.0})) for _ in range(3)]
        await asyncio.gather(*(box.start() for box in boxes))
        first = [first_process(box) for box in boxes]
        calls = [asyncio.create_task(box.shell("sleep 1; echo done")) for box in boxes]
        await asyncio.sleep(0.3)
        first[0].kill()
        first[1].suspend()
        killed, still, well = await asyncio.gather(*calls)
        assert killed.lost
        assert "the sandbox has ended: " in killed.fault
        assert still.lost
        assert "did not answer within 4 s" in still.fault
        assert (well.output, well.lost) == ("done\n", False)
        assert [box.alive for box in boxes] == [False, False, True]
        await asyncio.gather(*(box.close() for box in boxes))
        assert not [one for one in first if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]

    asyncio.run(play())


PROGRAM = """
import asyncio
from environments.servers.sandbox import RolloutSandbox, SandboxSettings
async def main():
    box = RolloutSandbox(SandboxSettings(**{settings}))
    await box.start()
    print("up", flush=True)
    await box.run("shell", 'setsid nohup sleep {seconds} & (setsid sh -c "sleep {seconds} &" &); sleep {seconds}')
asyncio.run(main())
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_gone_with_our_process(backend: dict[str, str]) -> None:
    seconds = 10_000 + os.getpid()
    program = PROGRAM.format(settings=backend, seconds=seconds)

    def sleeping() -> int:
        return sum(one.info["cmdline"] == ["sleep", str(seconds)] for one in psutil.process_iter(["cmdline"]))

    ours = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert ours.stdout is not None
    assert ours.stdout.readline() == b"up\n"
    for wanted in (3, 0):
        end = time.monotonic() + 20
        while sleeping() != wanted and time.monotonic() < end:
            time.sleep(0.05)
        assert sleeping() == wanted
        ours.send_signal(signal.SIGKILL)
        ours.wait()
    ours.stdout.close()


@pytest.mark.slow
def test_64_at_once() -> None:
    async def play() -> None:
        boxes = [Sandbox(SandboxLimits(processes=8)) for _ in range(64)]
        await asyncio.gather(*(box.start() for box in boxes))
        writes = await asyncio.gather(*(box.shell(f"echo {place} > file; sleep 1") for place, box in enumerate(boxes)))
        assert {result.code for result in writes} == {0}
        reads = await asyncio.gather(*(box.run("python", "print(open('file').read(), end='')") for box in boxes))
        assert [result.output for result in reads] == [f"{place}\n" for place in range(64)]
        await asyncio.gather(*(box.close() for box in boxes))

    asyncio.run(play())
    assert not [process for process in below() if process.name() == "bwrap"]
