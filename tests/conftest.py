"""Fixtures every test module may use; an engine is started only when a test asks for one."""

from engine_fixtures import engine_pool, other_qwen3_folder, tiny_qwen3_folder
from hypothesis import settings

__all__ = ["engine_pool", "other_qwen3_folder", "tiny_qwen3_folder"]

# A test's wall time says nothing on a busy machine; pytest's timeout is the bound.
settings.register_profile("mua", deadline=None)
settings.load_profile("mua")
