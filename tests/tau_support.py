"""Where tests find the official tau-bench data, which is no part of the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("MUA_TAU_BENCH") or Path(__file__).parents[2] / "shared/data/tau-bench")


def official(domain: str) -> Path:
    """The folder of ``retail`` or ``airline``; skips the test where it is absent."""
    folder = FOLDER / domain
    if not folder.is_dir():
        pytest.skip(f"needs tau-bench's data in {folder}; set MUA_TAU_BENCH to the folder that holds {domain}/")
    return folder
