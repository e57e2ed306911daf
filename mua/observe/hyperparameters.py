"""What a run was set to, flat: for tables that compare runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from mua.config.load import dump_config
from mua.config.schema import ExperimentConfig

ALWAYS = (
    "seed", "model.path", "model.dtype", "optimizer.learning_rate", "optimizer.schedule", "algorithm.advantage",
    "algorithm.loss", "algorithm.group_size", "algorithm.groups_per_step", "algorithm.minibatches", "algorithm.epochs",
    "algorithm.kl_coefficient", "rollout.temperature", "trainer.steps", "trainer.max_staleness",
)  # fmt: skip
"""Told whatever they are; of the rest what differs from its default."""
_LONGEST = 200


def hyperparameters(config: ExperimentConfig) -> dict[str, str | int | float | bool]:
    """By key, secrets masked; lists and what is longer than a table's cell as short text, null as ``null``."""
    masked = dict(_flat(yaml.safe_load(dump_config(config))))
    changed = {key for key, _ in _flat(config.model_dump(mode="json", exclude_defaults=True))}
    return {key: _plain(value) for key, value in masked.items() if key in changed or key in ALWAYS}


def _flat(tree: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from _flat(value, f"{above}.{name}" if above else str(name))
    else:
        yield above, tree


def _plain(value: Any) -> str | int | float | bool:
    if isinstance(value, bool | int | float):
        return value
    text = "null" if value is None else str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
