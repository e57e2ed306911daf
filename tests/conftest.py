"""Fixtures every test module may use; an engine is started only when a test asks for one."""

from engine_fixtures import engine_pool, other_qwen3_folder, tiny_qwen3_folder
from hypothesis import HealthCheck, settings

__all__ = ["engine_pool", "other_qwen3_folder", "tiny_qwen3_folder"]

# A test's wall time says nothing on a busy machine; pytest's timeout is the bound. And every run draws the same
# examples, so that no change fails for another's. `--hypothesis-profile=search` draws others each time.
busy = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", busy, max_examples=1000)
settings.register_profile("mua", busy, derandomize=True, database=None)
settings.load_profile("mua")
