"""Engine fixtures, handed to every test module by conftest.py, and the helpers behind them.

``tiny_qwen3_folder`` and ``other_qwen3_folder`` are Hugging Face folders of two random float32 Qwen3 models of one
shape (no tokenizer is needed: the engine takes and gives ids). ``engine_pool`` is one running server on the
first, shared by the whole session, because a start takes 10 to 20 seconds.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from mua.config.schema import EngineConfig
from mua.engine.pool import EnginePool
from tests.forked_engines import FORKER, ask
from tools.kit import random_qwen3

STOP_ID = 2
VOCAB = 512
CONTEXT = 2048


def write_qwen3(folder: Path, seed: int, *, tied: bool = False) -> Path:
    """Save a random Qwen3 with 140k parameters: 2 layers, hidden 64, 4 query and 2 key-value heads.

    It has no end token of its own, which SGLang would stop at unasked: what a test leaves endless stays so.
    """
    random_qwen3(
        folder, seed, vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied, eos_token_id=None, pad_token_id=0, bos_token_id=None, initializer_range=0.15,
    )  # fmt: skip
    return folder


def cpu_engine_config(**changes: object) -> EngineConfig:
    """A small engine for tests: a small KV cache, and deadlines that are short but for that of the start."""
    fields: dict[str, object] = {"dtype": "float32", "memory_fraction": 0.5, "max_total_tokens": 32768}
    # The first start of a fresh environment compiles every module it imports.
    fields |= {"start_seconds": 600.0, "stop_seconds": 10.0, "health_seconds": 5.0}
    return EngineConfig(**(fields | changes))  # type: ignore[arg-type]


def make_pool(log_folder: Path, **changes: object) -> EnginePool:
    """A pool that is not started yet."""
    return EnginePool(
        cpu_engine_config(**changes), dtype="float32", context_length=CONTEXT, seed=1, log_folder=log_folder
    )


@pytest.fixture(scope="session")
def tiny_qwen3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("qwen3") / "seed0", 0)


@pytest.fixture(scope="session")
def other_qwen3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("qwen3") / "seed1", 1)


@pytest.fixture
def forked_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that this process starts are forked from one interpreter, which takes a third of the time."""
    monkeypatch.setattr("mua.engine.server.start_process", partial(ask, FORKER.address(os.environ)))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine_pool(tiny_qwen3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EnginePool]:
    """One running engine. Tests that use it run on the session loop and leave its weights as they choose."""
    pool = make_pool(tmp_path_factory.mktemp("engine-logs"))
    await pool.start(tiny_qwen3_folder)
    yield pool
    await pool.stop()
