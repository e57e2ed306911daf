"""What a job's script leaves running when it ends, on a cluster whose Slurm ends nothing but the script: nothing.

Real: ``slurm/train.sbatch`` and ``slurm/engines.sbatch``. Stand-ins: srun, which passes SIGUSR1 on and is killed by
SIGTERM, and the other programs of Slurm. Not covered: Slurm, ``mua`` and its engines (``tests/slurm``), the user's
address, lost nodes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.timeout(60)

SCRIPTS = Path(__file__).parents[2] / "slurm"
STUBBORN = "STUBBORN_ENGINES"
"""A variable: engines that do not leave when they are asked to."""
SRUN = f"""\
#!{sys.executable} -IS
import os, pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: None if "{STUBBORN}" in os.environ else sys.exit(0))
here = pathlib.Path(os.environ["MUA_LOGS"])
if "engines" in sys.argv:
    (here / "engines-started").touch()
    while True:
        time.sleep(60)
while not (here / "engines-started").exists() and "sample" not in sys.argv:
    time.sleep(0.01)
pathlib.Path(os.environ["MUA_STATUS_FILE"]).write_text(os.environ["STATUS"])
"""
SCONTROL = """\
#!/bin/bash
case $1 in
  show) [ "$2" = node ] && echo "NodeName=$3 NodeAddr=127.0.0.1 " || tr ',' '\\n' <<<"$3" ;;
  requeue) touch "$MUA_LOGS/requeued" ;;
esac
"""


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a script of a job of the nodes n1 and n2; whatever the test leaves is killed."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "squeue": "#!/bin/bash\necho n1,n2\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def start(script: str, **variables: str) -> subprocess.Popen[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MUA"))}
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1,n2", "SLURM_JOB_NUM_NODES": "2"}
        ours = {
            "MUA_ROOT": str(SCRIPTS.parent), "MUA_LOGS": str(tmp_path), "MUA_PREFLIGHT": "0", "STATUS": "0",
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
        }  # fmt: skip
        return subprocess.Popen(
            ["bash", SCRIPTS / script, "two-nodes.yaml"], cwd=tmp_path, env=clean | slurm | ours | variables,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    yield start
    for process in _left(tmp_path):
        process.kill()


def _left(folder: Path) -> dict[psutil.Process, list[str]]:
    """Processes that a script in ``folder`` has started, and itself, with their command lines."""
    found = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get("MUA_LOGS") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found[process] = process.cmdline()
        except psutil.Error:
            continue
    return found


def _ended(job: subprocess.Popen[str], folder: Path) -> tuple[int, str]:
    """The script's status and what it said, where nothing else of it runs any more."""
    status = job.wait()  # what is left may hold the pipe open
    assert list(_left(folder).values()) == []
    return status, job.communicate()[0]


def _until_it_sleeps(job: subprocess.Popen[str], folder: Path) -> None:
    while not [command for command in _left(folder).values() if command[:1] == ["sleep"]]:
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.01)


def test_engines_are_asked_to_leave_when_the_run_has_ended(
    submit: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    status, said = _ended(submit("train.sbatch", MUA_ENGINE_NODES="1"), tmp_path)
    assert (status, "finished" in said, "have not left" in said) == (0, True, False)


def test_engines_that_do_not_leave_are_ended(submit: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    job = submit("train.sbatch", MUA_ENGINE_NODES="1", MUA_LEAVE_SECONDS="1", **{STUBBORN: "1"})
    status, said = _ended(job, tmp_path)
    assert (status, "engines have not left: ended" in said) == (0, True)


def test_engines_that_wait_for_their_next_start_leave_at_once(
    submit: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / "srun").write_text("#!/bin/bash\nexit 1\n")
    job = submit("engines.sbatch", MUA_ENGINE_SECONDS="1000")
    _until_it_sleeps(job, tmp_path)
    job.send_signal(signal.SIGUSR1)
    while not (tmp_path / "requeued").exists():
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.01)
    job.terminate()
    assert _ended(job, tmp_path)[0] == 75


def test_a_script_that_waits_for_its_requeue_leaves_nothing(
    submit: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    job = submit("sample.sbatch", STATUS="75")
    _until_it_sleeps(job, tmp_path)
    assert (tmp_path / "requeued").exists()
    job.terminate()  # as Slurm does
    assert _ended(job, tmp_path)[0] == 75
