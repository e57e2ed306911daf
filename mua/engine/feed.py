"""The weight source under the names by which :mod:`mua.trainer.policy` still asks for it; goes with them."""

from __future__ import annotations

from mua.engine.source import TrainerSource as TrainerFeed
from mua.engine.weights import WeightSource as Feed

__all__ = ["Feed", "TrainerFeed"]
