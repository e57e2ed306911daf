from mua.cli.api import evaluate as evaluate
from mua.cli.api import load_config as load_config
from mua.cli.api import open_run as open_run

__version__: str
__all__ = ["__version__", "evaluate", "load_config", "open_run"]
