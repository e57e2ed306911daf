"""How ranks wait for rank 0: as long as it lives, and no longer. Real processes, gloo and stores.

Not covered: NCCL; torchrun; a whole run with two ranks, which is ``tests/e2e/test_two_ranks.py``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from distributed import run_distributed

from mua.trainer.ranks import Calls, lost_rank
from mua.utils.errors import RankLost
from mua.utils.ports import free_port

RANKS = 3
ALONE_SECONDS, COLLECTIVE_SECONDS = 3.0, 2.0

RANK = """
import time
from datetime import timedelta
from mua.cli import app, main, verb

@app.command()
@verb
def wait(silence_seconds: float):
    import torch.distributed as dist
    from mua.trainer.ranks import Calls

    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    calls = Calls(dist.new_group(backend="gloo"), silence_seconds)
    calls.announce("ready")
    print("ready", flush=True)
    if dist.get_rank() == 0:
        time.sleep(600)
    calls.announce(None)

main()
"""


def _slow_rank_0() -> list[str]:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    calls = Calls(group, silence_seconds=120.0)
    heard = []
    for call in range(3):
        if dist.get_rank() == 0 and call == 1:
            time.sleep(ALONE_SECONDS)
        heard.append(calls.announce(f"call {call}" if dist.get_rank() == 0 else None))
    calls.close()
    return heard


def test_a_rollout_may_take_longer_than_any_collective() -> None:
    assert run_distributed(_slow_rank_0, RANKS) == [["call 0", "call 1", "call 2"]] * RANKS


@contextmanager
def ranks(silence_seconds: float) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that have met once; rank 0 then works alone for minutes, and holds the store."""
    common = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, "wait", str(silence_seconds)],
            env=os.environ | common | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "silence_seconds", "said"),
    [(signal.SIGKILL, 60.0, "rank 0 is gone ("), (signal.SIGSTOP, 3.0, "rank 0 gave no sign of life for 3 s")],
    ids=["killed", "stopped"],
)
def test_a_rank_0_that_is_gone_ends_the_others_with_one_line(
    number: signal.Signals, silence_seconds: float, said: str
) -> None:
    with ranks(silence_seconds) as (first, *others):
        first.send_signal(number)
        for rank, process in enumerate(others, start=1):
            _, err = process.communicate(timeout=120)
            assert process.returncode == 75, err
            (line,) = err.splitlines()
            assert line.startswith(f"mua (rank {rank}): {said}")
            assert line.endswith(("look at its log", "and its machine"))


LEADER = """
import subprocess, sys
from datetime import timedelta
from mua.cli import app, main, verb
from mua.trainer import ranks

@app.command()
@verb
def meet(program: str):
    import torch.distributed as dist
    from mua.config.schema import MegatronConfig
    from mua.trainer.ranks import naming_lost_ranks

    ranks.ensure_processes(MegatronConfig(data_parallel=2))
    with naming_lost_ranks():
        dist.init_process_group("gloo", timeout=timedelta(seconds=600))
        box = ["hello"]
        dist.broadcast_object_list(box, src=0)
        dist.barrier()
        dist.destroy_process_group()  # as runs do: threads of a group that is left may abort the interpreter at its end
    print("met")

sys.argv[:] = [sys.argv[0], "meet", sys.argv[1]]
ranks._start_rank = lambda rank: ranks._started.append(
    subprocess.Popen([sys.executable, "-c", sys.argv[2]], env=ranks.os.environ | {"RANK": str(rank)})
)
main()
"""
COMES = """
import torch.distributed as dist
dist.init_process_group("gloo")
box = [None]
dist.broadcast_object_list(box, src=0)
assert box == ["hello"]
dist.barrier()
dist.destroy_process_group()
"""


def lead(program: str) -> subprocess.CompletedProcess[str]:
    """A rank 0 that meets one other rank, which runs ``program``."""
    command = [sys.executable, "-c", LEADER, program]
    return subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )


def test_ranks_meet_at_the_store_that_rank_0_serves() -> None:
    met = lead(COMES)
    assert (met.returncode, met.stdout) == (0, "met\n"), met.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        pytest.param("import os; os.kill(os.getpid(), 9)", id="before"),
        pytest.param(f"{COMES.partition('box')[0]}\nimport os; os.kill(os.getpid(), 9)", id="after"),
    ],
)
def test_a_rank_that_never_comes_ends_the_others_soon(program: str) -> None:
    lost = lead(program)
    assert lost.returncode == 75, lost.stderr
    (line,) = [line for line in lost.stderr.splitlines() if line.startswith("mua")]
    assert line.startswith("mua: rank 1 ended with status -9; look at its log (")
    assert "Traceback" not in lost.stderr


def _silent_rank_0(folder: str) -> str:
    """Rank 0 gives no more signs of life; the store, a file, stays."""
    calls = Calls(dist.new_group(backend="gloo"), silence_seconds=1.0)
    done = Path(folder) / "done"
    if dist.get_rank() == 0:
        calls.close()
        while not done.exists():
            time.sleep(0.05)
        return ""
    with pytest.raises(RankLost) as error:
        calls.announce(None)
    done.touch()
    return str(error.value)


def test_silence_is_noticed_where_the_store_outlives_rank_0(tmp_path: Path) -> None:
    _, said = run_distributed(_silent_rank_0, 2, str(tmp_path))
    assert said.startswith("rank 0 gave no sign of life for 1 s (trainer.silence_seconds)")


def _killed_in_a_collective(folder: str) -> str:
    """The last rank closes its connections while the others are in a collective."""
    if dist.get_rank() == RANKS - 1:
        dist.barrier()  # the others have all joined the group
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{folder}/other", rank=0, world_size=1)
        return ""
    try:
        for _ in range(100):
            dist.barrier()
    except RuntimeError as error:
        lost = lost_rank(error)
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{folder}/{os.getpid()}", rank=0, world_size=1)
        return str(lost)
    return "nothing"


def test_a_collective_that_lost_a_rank_says_so(tmp_path: Path) -> None:
    *others, _ = run_distributed(_killed_in_a_collective, RANKS, str(tmp_path))
    for said in others:
        assert said.startswith("another rank is gone or does not answer; look at its log (")


def test_an_error_of_the_program_is_no_lost_rank() -> None:
    assert lost_rank(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert lost_rank(ValueError("Connection closed by peer")) is None
