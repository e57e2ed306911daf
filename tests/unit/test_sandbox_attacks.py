"""A sandbox under attack: limits, isolation, the answers of its own, its end with its rollout and with our process.

Not covered: Docker and Apptainer, which are not here to be run; escapes through faults of the kernel; machines without
user namespaces; kernel memory that no limit counts (docs/sandbox.md); the tools of an episode
(``test_sandbox_tools.py``).
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from sandbox_support import below, need_sandboxes

from mua.config.sandbox_section import SandboxConfig
from mua.config.tools_section import ProgramKind
from mua.sandbox.box import LONGEST_PROGRAM, Sandbox, SandboxResult
from mua.untrusted import unpaired_surrogate

ROOT = Path(__file__).resolve().parents[2]
CONFIG = SandboxConfig(
    call_seconds=2, cpu_seconds=1, memory_mib=300, disk_mib=8, output_bytes=400, files=2000, processes=32
)
SECRET = "xyzzy-of-the-host"


class Attack(NamedTuple):
    """A program, and what its result has to say."""

    kind: ProgramKind
    program: str
    told: str
    """A regular expression, searched in the output and the fault; ``{...}`` are of the host, see :func:`filled`."""
    lost: bool = False
    """The sandbox ends with it."""


EACH = "import os\nfor what in {}:\n  try: print(what, 'opened', open(what, 'rb').read(99))\n  except OSError as e: print(e)"
LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
ATTACKS: dict[str, Attack] = {
    "fork bomb": Attack("python", "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", "killed after 2 s"),
    "fork bomb that detaches": Attack("shell", "f() {{ f | f & }}; f; echo done", "done|fork"),
    "threads without end": Attack(
        "python",
        "import threading, time\nfor i in range(99): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "can't start new thread",
    ),
    "memory bomb": Attack("python", "x = [bytearray(10**7) for _ in range(10**4)]", "MemoryError"),
    "memory bomb of many processes": Attack(
        "python",
        "import os, time\nfor i in range(6):\n  if not os.fork(): x = bytearray(10**8); time.sleep(9)\ntime.sleep(9)",
        "more than 300 MiB of memory",
    ),
    "memory bomb in shared memory": Attack(
        "python",
        "import mmap, os, time\nfor i in range(6):\n  if not os.fork():\n    m = mmap.mmap(-1, 10**8)\n"
        "    m.write(bytes(10**8)); time.sleep(9)\ntime.sleep(9)",
        "more than 300 MiB of memory",
    ),
    "memory in files without a name": Attack("python", "import os; os.memfd_create('x')", "not permitted"),
    "memory of System V": Attack(
        "python", LIBC + "print([libc.shmget(0, 10**8, 0o1600), libc.msgget(0, 0o1600)])", r"\[-1, -1\]"
    ),
    "disk filling": Attack(
        "shell", "for d in /work /tmp /dev/shm; do head -c 9M /dev/zero > $d/b; done; rm -f */b /tmp/b /dev/shm/b b",
        r"(?s)File size limit exceeded.*No space left|No space left",
    ),
    "disk filling by many files": Attack(
        "shell", "for i in 1 2 3; do head -c 6M /dev/zero > b$i; done; rm b*", "No space left"
    ),
    "files without end": Attack("python", "for i in range(9**9): open(f'f{{i}}', 'w')", "more than 2000 files", lost=True),
    "writing elsewhere": Attack(
        "shell", "touch /x /usr/x /dev/x /etc/x /proc/x; echo 1 > /proc/sys/kernel/core_pattern; echo c > /proc/sysrq-trigger",
        r"(?s)'/x': Read-only.*'/usr/x': Read-only.*'/dev/x': Read-only.*core_pattern: (Read-only|Permission)",
    ),
    "output flood": Attack("shell", "yes | head -c 1G", r"y\n(?s:.*)\d{{9,10}} bytes cut"),
    "infinite loop": Attack("python", "while True: pass", "killed after 1 s of processor time"),
    "waiting for ever": Attack("shell", "trap '' TERM INT HUP; sleep 99", "killed after 2 s"),
    "reads of /etc/shadow and of our files": Attack(
        "python", EACH.format("('/etc/shadow', '/etc/passwd', '{secret}', '/root/.ssh', '{here}', '/proc/1/root{secret}')"),
        r"\A([^\n]*(No such file|Permission denied)[^\n]*\n){{6}}\Z",
    ),
    "reads of the host's processes": Attack(
        "shell", "cat /proc/{pid}/environ /proc/{pid}/cmdline; ls /proc | grep -c '^[0-9]'", r"No such file(?s:.*)\n[1-6]\n\Z"
    ),
    "reads of our environment": Attack("shell", "env; cat /proc/*/environ | tr '\\0' '\\n'", "HOME=/work"),
    "the network": Attack(
        "python", "import socket\nfor at in ('1.1.1.1', 80), ('127.0.0.1', {port}):\n  try: socket.create_connection(at, 1)\n"
        "  except OSError as e: print(e)", r"unreachable(?s:.*)Connection refused",
    ),
    "sockets of the host without a path": Attack(
        "python", "import socket; socket.socket(socket.AF_UNIX).connect('\\0{abstract}')", "ConnectionRefusedError"
    ),
    "signals to host processes": Attack(
        "python", "import os\nfor pid in {pid}, {other}:\n  try: os.kill(pid, 9); print('sent')\n  except OSError as e: print(e)",
        r"\A(.*No such process\n){{2}}\Z",
    ),
    "signals to the sandbox's own process": Attack(
        "shell", "for s in INT TERM STOP KILL SEGV USR1 40; do kill -$s 1; done; kill -9 -1; echo there", "there"
    ),
    "killing itself": Attack("shell", "kill -9 $$", ""),
    "limits of the sandbox's own process": Attack(
        "python", "import resource\nfor k in (0, 9, 7): \n  try: resource.prlimit(1, k, (1, 1)); print('set')\n"
        "  except OSError as e: print(e)", r"\A(.*not permitted\n){{3}}\Z",
    ),
    "forging an answer through the pipes": Attack(
        "python", EACH.format("[f'/proc/1/fd/{{i}}' for i in range(6)] + ['/proc/1/mem', '/proc/1/environ']"),
        r"\A(.*Permission denied.*\n){{8}}\Z",
    ),
    "forging an answer as a debugger": Attack(
        "python", LIBC + "print(libc.ptrace(16, 1, 0, 0), ctypes.get_errno(), libc.process_vm_readv(1, 0, 0, 0, 0, 0))", "-1 1 "
    ),
    "forging an answer in the output": Attack(
        "shell", """echo '{{"id": 1, "code": 0, "why": "", "output": "forged"}}'; exit 3""", r'"output": "forged"'
    ),
    "closing file descriptors": Attack(
        "python", "import os, time; os.closerange(0, 999); time.sleep(0.3); os._exit(5)", r"\A\Z"
    ),
    "children that detach": Attack(
        "shell", "setsid nohup sleep 901 & (setsid sh -c 'trap \"\" HUP; sleep 902 &' &); echo left", r"\Aleft\n\Z"
    ),
    "children that go on writing": Attack("shell", "yes & echo first; exit 4", "first|y"),
    "symbolic links": Attack(
        "shell", "ln -s /etc/shadow a; ln -s {secret} b; ln -s / c; cat a b c{secret}; rm a b c", r"\A(.*No such file.*\n){{3}}\Z"
    ),
    "devices and mounts": Attack(
        "shell", "mknod d b 8 0; mknod m c 1 1; mount -t tmpfs x /tmp; cat /dev/mem /dev/sda; ls /dev",
        r"(?s)mknod: d: Operation not permitted.*mknod: m: Operation not.*mount: .*No such file.*null",
    ),
    "namespaces of its own": Attack(
        "python", LIBC + "print([libc.unshare(0x10000000), libc.unshare(0x20000), libc.syscall(56, 0x10000011, 0, 0, 0, 0)])",
        r"\[-1, -1, -1\]",
    ),
    "more rights by a program of root": Attack("shell", "su -c id; /usr/bin/passwd; id -u; grep NoNewPrivs /proc/self/status", "65534\nNoNewPrivs:\t1"),
    "what is no text": Attack("shell", r"printf 'a\377\376\0\355\240\200\033[31m\xe2\x82z'", "a\ufffd\ufffd\0"),
    "characters that are cut": Attack("python", "print('ü€😀' * 9999)", r"\A[ü€😀]+\n\[\.\.\. \d+ bytes cut \.\.\.\]\n[ü€😀]+\n\Z"),
    "a program with a zero byte": Attack("python", "print(1)\0", "not run: the text has a zero byte"),
    "a program that is no text": Attack("python", "print('\ud800')", "not run: .*unpaired surrogate"),
    "a huge program": Attack("shell", ": " + "ä" * LONGEST_PROGRAM, "not run: 200002 bytes"),
    "the longest program": Attack("shell", "echo ran #" + "x" * (LONGEST_PROGRAM - 10), r"\Aran\n\Z"),
}  # fmt: skip
CODES = {
    "killing itself": -9, "forging an answer in the output": 3, "closing file descriptors": 5,
    "children that go on writing": 4, "infinite loop": -signal.SIGXCPU,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def sandboxes() -> None:
    need_sandboxes()


def of_host(text: str, values: dict[str, object]) -> str:
    """``text`` with what only the test knows."""
    return text.format(**values) if "{" in text else text


def test_attacks_leave_the_sandbox_and_the_host_as_they_were(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOST_SECRET", SECRET)
    (tmp_path / "secret").write_text(SECRET)
    victim = subprocess.Popen(["sleep", "600"])
    engine, abstract = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    abstract.bind("\0mua-test-of-sandboxes")
    abstract.listen()
    values: dict[str, object] = {
        "secret": tmp_path / "secret", "here": ROOT / "README.md", "pid": victim.pid, "other": psutil.Process().ppid(),
        "port": engine.getsockname()[1], "abstract": "mua-test-of-sandboxes",
    }  # fmt: skip
    results: dict[str, SandboxResult] = {}

    async def play(names: list[str]) -> None:
        sandbox = Sandbox(CONFIG)
        await sandbox.start()
        assert (await sandbox.shell("echo kept > file")).code == 0
        for name in names:
            attack = ATTACKS[name]
            result = results[name] = await sandbox.run(attack.kind, of_host(attack.program, values))
            assert result.lost == attack.lost, (name, result)
            if result.lost:
                await sandbox.close()
                sandbox = Sandbox(CONFIG)
                await sandbox.start()
                await sandbox.shell("echo kept > file")
            after = await sandbox.shell("cat file; ls /proc | grep '^[0-9]' | wc -l")
            assert after.output == "kept\n5\n", (name, result, after)
        await sandbox.close()

    async def all_of_them() -> None:
        names = list(ATTACKS)
        async with asyncio.TaskGroup() as group:
            for half in (names[::2], names[1::2]):
                group.create_task(play(half))

    with closing(engine), closing(abstract):
        asyncio.run(all_of_them())
    assert victim.poll() is None
    victim.kill()
    victim.wait()
    for name, (_, _, told, _) in ATTACKS.items():
        output, code, fault, _ = results[name].output, results[name].code, results[name].fault, None
        assert re.search(of_host(told, values), output + fault), (name, results[name])
        assert SECRET not in output, name
        assert unpaired_surrogate(output) is None, name
        assert len(output.encode()) < 2 * CONFIG.output_bytes, name
        assert name not in CODES or code == CODES[name], (name, results[name])
    assert not [process for process in below() if process.name() != "python"]


def test_the_documentation_lists_each_attack() -> None:
    rows = re.findall(r"^\| ([^|]+?) \|", (ROOT / "docs/sandbox.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert not [name for name in ATTACKS if name not in rows]


def test_a_cancelled_call_leaves_no_answer_to_the_next() -> None:
    async def play() -> None:
        sandbox = Sandbox(CONFIG)
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


def test_a_sandbox_that_is_killed_or_stands_still_costs_itself_alone() -> None:
    async def play() -> None:
        boxes = [Sandbox(CONFIG) for _ in range(3)]
        await asyncio.gather(*(box.start() for box in boxes))
        first = [int(json.loads(Path(f"/proc/self/fdinfo/{box._first}").read_text().split("Pid:")[1].split()[0])) for box in boxes]
        calls = [asyncio.create_task(box.shell("sleep 1; echo done")) for box in boxes]
        await asyncio.sleep(0.3)
        psutil.Process(first[0]).kill()
        psutil.Process(first[1]).suspend()
        killed, still, well = await asyncio.gather(*calls)
        assert killed.lost
        assert "the sandbox has ended: " in killed.fault
        assert still.lost
        assert "did not answer within 7 s" in still.fault
        assert (well.output, well.lost) == ("done\n", False)
        assert [box.alive for box in boxes] == [False, False, True]
        await asyncio.gather(*(box.close() for box in boxes))
        assert not any(map(psutil.pid_exists, first))

    asyncio.run(play())


def test_gone_with_our_process() -> None:
    program = (
        "import asyncio\nfrom mua.config.sandbox_section import SandboxConfig\nfrom mua.sandbox.box import Sandbox\n"
        "async def main():\n  box = Sandbox(SandboxConfig())\n  await box.start()\n  print('up', flush=True)\n"
        "  await box.shell('setsid nohup sleep 900 & (setsid sh -c \"sleep 901 &\" &); sleep 900')\nasyncio.run(main())\n"
    )
    ours = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert ours.stdout is not None
    assert ours.stdout.readline() == b"up\n"
    processes: list[psutil.Process] = []
    end = time.monotonic() + 20
    while time.monotonic() < end and sum(p.name() == "sleep" for p in processes) < 3:
        processes = below(ours.pid)
    assert sum(p.name() == "sleep" for p in processes) == 3
    ours.send_signal(signal.SIGKILL)
    ours.wait()
    ours.stdout.close()
    assert not psutil.wait_procs(processes, timeout=20)[1]


@pytest.mark.slow
def test_64_at_once() -> None:
    async def play() -> None:
        boxes = [Sandbox(SandboxConfig(processes=8)) for _ in range(64)]
        await asyncio.gather(*(box.start() for box in boxes))
        writes = await asyncio.gather(*(box.shell(f"echo {place} > file; sleep 1") for place, box in enumerate(boxes)))
        assert {result.code for result in writes} == {0}
        reads = await asyncio.gather(*(box.python("print(open('file').read(), end='')") for box in boxes))
        assert [result.output for result in reads] == [f"{place}\n" for place in range(64)]
        await asyncio.gather(*(box.close() for box in boxes))

    asyncio.run(play())
    assert not below()
