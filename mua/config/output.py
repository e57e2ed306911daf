"""The folder a run writes into."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megatron_bridge.atomic import replace_text
from mua.config.load import dump_config
from mua.config.schema import ExperimentConfig
from mua.errors import ConfigError
from mua.observe.lock import only_run

CONFIG_FILE = "config.yaml"


@contextmanager
def output_of(config: ExperimentConfig) -> Iterator[None]:
    """A block in which this run alone writes into ``config.output``, which is made; see :mod:`mua.observe.lock`.

    Only the leading rank holds the lock: the others write what it tells them to. Raises :class:`ConfigError` when the
    folder is in use or cannot be written into.
    """
    with ExitStack() as stack:
        if int(os.environ.get("RANK", "0")) == 0:
            try:
                config.output.mkdir(parents=True, exist_ok=True)
                stack.enter_context(only_run(config.output))
            except OSError as error:
                raise _not_writable(config, error) from None
        yield


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
        raise _not_writable(config, error) from None
    return file


def _not_writable(config: ExperimentConfig, error: OSError) -> ConfigError:
    return ConfigError(f"output: cannot write into {config.output}: {error.strerror}")


def find_config(checkpoint: Path) -> Path:
    """The ``config.yaml`` of the run a checkpoint lies in: in its folder or the nearest folder above it."""
    if not checkpoint.exists():
        raise ConfigError(f"{checkpoint}: no such checkpoint")
    for folder in (checkpoint, *checkpoint.resolve().parents):
        if (folder / CONFIG_FILE).is_file():
            return folder / CONFIG_FILE
    raise ConfigError(f"{checkpoint}: no {CONFIG_FILE} in this folder or above it; name the run's file with --config")
