"""Fixtures every test module may use (an engine starts when a test asks for one), and how tests are shared out."""

import gc
import os
import re
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Three processes of tests share two cores with engines and trainers. OpenMP's threads wait for one another spinning,
# which on busy cores takes five times as long; read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A metric that docs/metrics.md does not explain is an error, in the runs that tests start too.
os.environ.setdefault("MUA_STRICT_METRICS", "1")

from engine_fixtures import engine_pool, forked_engines, other_qwen3_folder, tiny_qwen3_folder

from tests.postgres_support import postgres
from tests.rotation import current

__all__ = ["engine_pool", "forked_engines", "other_qwen3_folder", "postgres", "tiny_qwen3_folder"]

# A test's wall time says nothing on a busy machine; pytest's timeout is the bound. And every run draws the same
# examples, so that no change fails for another's. `--hypothesis-profile=search` draws others each time.
busy = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", busy, max_examples=1000)
settings.register_profile("mua", busy, derandomize=True, database=None, max_examples=50)
settings.load_profile("mua")

RUNS = "critic|distillation|evaluation|make_|ports|refill|shrunk_recipe|two_nodes|variants|zero_learning_rate"
GROUPS = {
    "slurm": r"tests/slurm/",
    "kills": r"tests/e2e/test_(engine_lost|preempt|replay|resume|samplers|two_ranks)",
    "runs": rf"tests/e2e/test_({RUNS})",
    "users": r"tests/e2e/test_users",
    "store": r"tests/unit/test_store",
    "engine": r"tests/(e2e/|parity/test_engine|unit/test_engine_(requests|faults|keys))",
    "ranks": r"tests/(parity/|unit/test_(megatron|distributed|offload|bridge_reshard|trainer_(calls|gae)))",
}
"""What shares an engine, a fine-tuned policy or ranks stays in one of pytest-xdist's processes, the longest first.
End-to-end tests share a policy, in several groups: making it again costs less than waiting for the longest group."""


def group_of(nodeid: str) -> str:
    """The tests that share a process with ``nodeid``: those of its group, or of its file."""
    return next((name for name, pattern in GROUPS.items() if re.match(pattern, nodeid)), nodeid.split("::")[0])


def pytest_configure() -> None:
    """A shell's background jobs ignore Ctrl-C; what tests start and interrupt would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rotate", action="store_true", help="of the slow tests only those of this landing")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the groups, so that no process is left with the longest of them at the end."""
    if config.getoption("--rotate"):
        taken = set(current().taken)
        left = [i for i in items if _is_slow(i) and i.nodeid.split("::")[0] not in taken]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]
    order = [*GROUPS]
    items.sort(key=lambda item: order.index(name) if (name := group_of(item.nodeid)) in order else len(order))


def _is_slow(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(mark) for mark in ("slow", "slurm"))


def pytest_collection_finish() -> None:
    """What is imported by now stays: no garbage collection looks at it again, of which each would take a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deals out groups as they are above. The marks of ``--dist loadgroup`` are lost with pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)
