"""A past step once more, from the checkpoint before it and the store: the same gradients, bit for bit.

Not covered: several ranks, a critic, experts, filters.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e_support import mua, refused

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_step_is_replayed_bit_for_bit_and_other_settings_show(trained: Path, tmp_path: Path) -> None:
    told = mua("replay", trained, "2", "algorithm.divide_by_std=false", "--json", cwd=tmp_path)
    found = json.loads(told[told.index("{") :])
    assert found["same_gradients"] is True
    assert found["gradients"]["stored"] == found["gradients"]["replayed"]
    assert found["same_batch"] is True
    assert found["changed"]["overrides"] == ["algorithm.divide_by_std=false"]
    assert "algorithm.* and critic.value_clip alone" in refused("replay", trained, "2", "seed=3", cwd=tmp_path)
    assert "step 9" in refused("replay", trained, "9", cwd=tmp_path)
