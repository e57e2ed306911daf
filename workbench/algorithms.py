"""What can be chosen under ``algorithm`` in a configuration, a line each: ``mua algorithms``."""

from __future__ import annotations

from pathlib import Path

import yaml

LISTING: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
"""Key of the section ``algorithm`` -> value, or key of a section in it -> one line."""
