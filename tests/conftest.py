"""Fixtures every test module may use (an engine starts when a test asks for one), and how tests are shared out."""

import re

import pytest
from engine_fixtures import engine_pool, other_qwen3_folder, tiny_qwen3_folder
from hypothesis import HealthCheck, settings

__all__ = ["engine_pool", "other_qwen3_folder", "tiny_qwen3_folder"]

# A test's wall time says nothing on a busy machine; pytest's timeout is the bound. And every run draws the same
# examples, so that no change fails for another's. `--hypothesis-profile=search` draws others each time.
busy = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", busy, max_examples=1000)
settings.register_profile("mua", busy, derandomize=True, database=None)
settings.load_profile("mua")

GROUPS = {
    "engine": r"tests/(e2e/|parity/test_engine|unit/test_engine_(requests|faults))",
    "ranks": r"tests/(parity/|unit/test_(megatron|distributed|offload))",
}
"""What shares an engine, a fine-tuned policy or ranks stays in one of pytest-xdist's processes, the longest first."""


def group_of(path: str) -> str:
    """The process-mates of the tests in the file ``path``: those of its group, or of its file."""
    return next((name for name, pattern in GROUPS.items() if re.match(pattern, path)), path)


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks in its own
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the groups, so that no process is left with the longest of them at the end."""
    order = [*GROUPS]
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item.nodeid)))
    items.sort(key=lambda item: order.index(name) if (name := group_of(item.nodeid)) in order else len(order))
