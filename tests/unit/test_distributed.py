"""The helper that tests run ranks with: order, fresh groups, failures, deadlines, and that nothing outlives its parent.

Does not cover what the ranks run; that is what the tests using it are for.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RanksFailed, _Workers, run_distributed, run_on_workers
from tests.process_support import alive

Runner = Callable[..., list[Any]]
RUNNERS = pytest.mark.parametrize("run", [run_distributed, run_on_workers])


def identity(offset: int) -> tuple[int, int, int, float]:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), os.getpid(), float(total)


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} has had enough")
    dist.barrier()


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


@RUNNERS
def test_results_come_in_order_of_rank(run: Runner) -> None:
    results = run(identity, 3, 10) if run is run_distributed else run(3, identity, 10)
    assert [(rank, world, total) for rank, world, _, total in results] == [(rank, 3, 33.0) for rank in range(3)]


def test_workers_stay_and_serve_groups_of_any_size() -> None:
    workers = _Workers()  # those of the other tests are replaced after some calls
    try:
        pids = [workers.run(world, identity, (0,), 240.0)[0][2] for world in (2, 1, 3, 2)]
    finally:
        workers.stop()
    assert len(set(pids)) == 1
    assert run_distributed(identity, 1, 0)[0][2] != pids[0]


def test_a_failing_rank_is_quoted_and_the_next_call_works() -> None:
    with pytest.raises(RanksFailed, match="rank 1 has had enough"):
        run_on_workers(2, fail_on, 1)
    assert len(run_on_workers(2, identity, 0)) == 2


def test_a_rank_that_does_not_answer_is_named_and_killed() -> None:
    with pytest.raises(RanksFailed, match=r"ranks \[0\] did not answer in time"):
        run_on_workers(1, sleep_on, 0, seconds=5.0)
    assert len(run_on_workers(2, identity, 0)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["leaves", "is killed"])
def test_workers_end_with_their_parent(how: str) -> None:
    script = (
        "from tests.distributed import run_on_workers\nfrom tests.unit.test_distributed import identity\n"
        "if __name__ == '__main__':\n"
        "    print(*[r[2] for r in run_on_workers(2, identity, 0)], flush=True)\n"
        f"    {'import time; time.sleep(600)' if how == 'is killed' else 'pass'}\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(text) for text in parent.stdout.readline().split()]
        if how == "is killed":
            parent.send_signal(signal.SIGKILL)
        parent.wait(120)
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"workers {pids} live on"
        time.sleep(0.05)
    assert len(pids) == 2
