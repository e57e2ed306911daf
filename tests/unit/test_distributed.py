"""The helper that tests run ranks with: order, what stays and what does not, failures, deadlines, the parent's end.

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

from tests.distributed import RanksFailed, run_distributed, run_on_workers
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


def pids_of(found: list[tuple[int, int, int, float]]) -> list[int]:
    return [pid for _, _, pid, _ in found]


def test_ranks_stay_for_calls_of_their_size() -> None:
    two, one = run_on_workers(2, identity, 0), run_on_workers(1, identity, 0)
    assert pids_of(run_on_workers(2, identity, 5)) == pids_of(two)
    assert not set(pids_of(one)) & set(pids_of(two))
    assert not set(pids_of(run_distributed(identity, 2, 0))) & set(pids_of(two))


def many_groups() -> tuple[list[float], int, int]:
    """Sums over groups that are made and ended again and again; how many groups and threads there are then."""
    found = []
    for _ in range(20):
        pair = dist.new_group([0, 1], group_desc="PAIR")
        alone = [dist.new_group([rank], group_desc="ALONE") for rank in (0, 1)][dist.get_rank()]
        unnamed = dist.new_group([0, 1])
        for group in (pair, alone, unnamed):
            total = torch.tensor(1.0)
            dist.all_reduce(total, group=group)
            found.append(float(total))
        dist.destroy_process_group(pair)
        dist.destroy_process_group(unnamed)
    dist.new_group([0, 1])  # ends with the call
    return found, len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/task"))


def test_named_groups_are_made_once_and_others_end_with_their_call() -> None:
    calls = [run_on_workers(2, many_groups)[0] for _ in range(3)]
    assert [sums for sums, _, _ in calls] == [[2.0, 1.0, 2.0] * 20] * 3
    assert len({groups for _, groups, _ in calls}) == 1
    assert calls[1][2] == calls[2][2], "a rank's threads grow with its calls"


def test_a_failing_rank_is_quoted_and_the_next_call_has_other_ranks() -> None:
    before = pids_of(run_on_workers(2, identity, 0))
    with pytest.raises(RanksFailed, match="rank 1 has had enough"):
        run_on_workers(2, fail_on, 1)
    assert not any(alive(pid) for pid in before)
    assert not set(before) & set(pids_of(run_on_workers(2, identity, 0)))


def test_a_rank_that_does_not_answer_is_named_and_killed() -> None:
    before = pids_of(run_on_workers(1, identity, 0))
    with pytest.raises(RanksFailed, match=r"ranks \[0\] did not answer in time"):
        run_on_workers(1, sleep_on, 0, seconds=0.5)
    assert not any(alive(pid) for pid in before)
    assert len(run_on_workers(1, identity, 0)) == 1


@pytest.mark.parametrize(
    "how", [pytest.param("leaves", marks=pytest.mark.grid), pytest.param("is killed", marks=pytest.mark.slow)]
)
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
