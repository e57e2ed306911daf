"""The folder a run writes into."""

from __future__ import annotations

import os
from pathlib import Path

from mua.config.load import dump_config
from mua.config.schema import ExperimentConfig
from mua.errors import ConfigError

CONFIG_FILE = "config.yaml"


def prepare_output(config: ExperimentConfig, name: str = CONFIG_FILE) -> Path:
    """Make ``config.output``, prove that files can be written there, and leave the configuration in it (masked).

    Gives the path of the written file. A verb that does not make checkpoints passes another ``name``, because
    ``config.yaml`` is what :func:`find_config` takes the checkpoints of the folder to be made with. Raises
    :class:`ConfigError` with the operating system's reason.
    """
    # All ranks of a run come here at once, some of them on other machines: each writes a file of its own.
    folder, rank = config.output, os.environ.get("RANK", "0")
    new = folder / f".{name}.{rank}-{os.getpid()}.new"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        new.write_text(dump_config(config), encoding="utf-8")
        return new.replace(folder / name)
    except OSError as error:
        raise ConfigError(f"output: cannot write into {folder}: {error.strerror}") from None


def find_config(checkpoint: Path) -> Path:
    """The ``config.yaml`` of the run a checkpoint lies in: in its folder or the nearest folder above it."""
    if not checkpoint.exists():
        raise ConfigError(f"{checkpoint}: no such checkpoint")
    for folder in (checkpoint, *checkpoint.resolve().parents):
        if (folder / CONFIG_FILE).is_file():
            return folder / CONFIG_FILE
    raise ConfigError(f"{checkpoint}: no {CONFIG_FILE} in this folder or above it; name the run's file with --config")
