"""What an episode's result depends on, as digests: which policy, under which setting, on which task.

Results are reused only where all three are the same. Settings that change how fast, not what (concurrency, deadlines,
retries), are no part of it: a run may be continued with others.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import mua
from mua.config.schema import ContextConfig, ExperimentConfig
from mua.environment.protocol import Task
from mua.types import Json
from mua.utils.errors import ModelError
from mua.utils.masking import masked_tree

_OPERATIONAL = frozenset(
    {
        "concurrency", "max_retries", "max_instances", "workers", "isolation", "requests_per_minute",
        "tokens_per_minute", "cache", "fallbacks", "api_key", "structured_output", "price_per_million_in",
        "price_per_million_out",
    }
)  # fmt: skip
_SPEED = ("_seconds", "_faults")
_SELECTION = frozenset({"name", "mix", "difficulties"})
"""Which tasks are chosen; each is known by its own digest."""
_BLOCK, _BLOCKS = 1 << 16, 64


def setting_of(config: ExperimentConfig) -> Json:
    """Everything of the configuration that a result depends on, the policy apart; credentials masked."""
    rollout = config.rollout.model_dump(mode="json", exclude={"temperature"})
    environment = config.environment.model_dump(mode="json", exclude=set(_SELECTION))
    setting = {
        "mua": mua.__version__,
        "seed": config.seed,
        "temperature": config.evaluation.temperature,
        "environment": environment,
        "rollout": rollout,
        "user": config.user.model_dump(mode="json"),
        "judge": None if config.judge is None else config.judge.model_dump(mode="json"),
    }
    if config.agent is not None:  # by its command; what its program says is not looked into
        setting["agent"] = config.agent.model_dump(mode="json", exclude={"host", "port"})
    if config.context != ContextConfig():
        setting["context"] = config.context.model_dump(mode="json")
    return _without_speed(masked_tree(setting))


def policy_of(config: ExperimentConfig) -> Json:
    """Who is evaluated: a checkpoint by the digest of its files, an endpoint by address, model and request fields."""
    policy = config.evaluation.policy
    if policy.endpoint is not None and policy.kind == "endpoint":
        return {"kind": "endpoint", **_without_speed(masked_tree(policy.endpoint.model_dump(mode="json")))}
    model = config.model
    return {
        "kind": "engine",
        "path": str(model.path),
        "weights": folder_digest(model.path),
        "dtype": config.engine.dtype or model.dtype,
        "thinking": model.thinking,
        "deterministic": config.engine.deterministic,
    }


def folder_digest(folder: Path) -> str:
    """Digest of a model folder's configuration, tokenizer and weights.

    Of a file over 4 MiB its size and 64 KiB at 64 places are read, evenly spread: a training step changes nearly every
    value, so two checkpoints differ there, and 64 GB of weights cost milliseconds. Raises
    :class:`ModelError` where there is no folder.
    """
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".jinja", ".txt"))
    except OSError as error:
        raise ModelError(f"model.path: {folder}: {error.strerror}") from None
    total = hashlib.sha256()
    for path in files:
        total.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            size = path.stat().st_size
            spread = [index * (size - _BLOCK) // (_BLOCKS - 1) for index in range(_BLOCKS)]
            for start in spread if size > _BLOCK * _BLOCKS else range(0, size, _BLOCK):
                file.seek(start)
                total.update(file.read(_BLOCK))
    return total.hexdigest()[:16]


def task_digest(task: Task) -> str:
    """Changes whenever anything the task holds does."""
    return json_digest(task.data)


def json_digest(value: Any) -> str:
    """16 hexadecimal digits of canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def policy_digest(policy: Json) -> str:
    """Of what is the policy's own: the same files at another place are the same policy."""
    return json_digest({key: value for key, value in policy.items() if key != "path"})


def _without_speed(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_speed(inner)
            for key, inner in value.items()
            if key not in _OPERATIONAL and not key.endswith(_SPEED)
        }
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value
