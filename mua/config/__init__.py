"""The typed configuration: schema, loading, and the messages for what is wrong. Imports nothing heavy."""

from mua.config.load import dump_config, load_config
from mua.config.schema import ExperimentConfig, Section

__all__ = ["ExperimentConfig", "Section", "dump_config", "load_config"]
