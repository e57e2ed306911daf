"""The folder a run writes into."""

from __future__ import annotations

from pathlib import Path

from mua.config.load import dump_config
from mua.config.schema import ExperimentConfig
from mua.errors import ConfigError
from mua.observe.files import replace_text

CONFIG_FILE = "config.yaml"


def prepare_output(config: ExperimentConfig, name: str = CONFIG_FILE) -> Path:
    """Make ``config.output``, prove that files can be written there, and leave the configuration in it (masked).

    Gives the path of the written file. A verb that does not make checkpoints passes another ``name``, because
    ``config.yaml`` is what :func:`find_config` takes the checkpoints of the folder to be made with. Raises
    :class:`ConfigError` with the operating system's reason.
    """
    file = config.output / name
    try:
        replace_text(file, dump_config(config))  # all ranks of a run come here at once
    except OSError as error:
        raise ConfigError(f"output: cannot write into {config.output}: {error.strerror}") from None
    return file


def find_config(checkpoint: Path) -> Path:
    """The ``config.yaml`` of the run a checkpoint lies in: in its folder or the nearest folder above it."""
    if not checkpoint.exists():
        raise ConfigError(f"{checkpoint}: no such checkpoint")
    for folder in (checkpoint, *checkpoint.resolve().parents):
        if (folder / CONFIG_FILE).is_file():
            return folder / CONFIG_FILE
    raise ConfigError(f"{checkpoint}: no {CONFIG_FILE} in this folder or above it; name the run's file with --config")
