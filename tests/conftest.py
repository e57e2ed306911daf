"""Fixtures every test module may use; an engine is started only when a test asks for one."""

from engine_fixtures import engine_pool, other_qwen3_folder, tiny_qwen3_folder

__all__ = ["engine_pool", "other_qwen3_folder", "tiny_qwen3_folder"]
