"""Policies that deserve nothing at the shop's desk; see :mod:`mua.environment.canned`."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping

from environments.retail.expert import ASK
from environments.retail.reading import noted
from environments.retail.words import PRODUCTS
from mua.environment.canned import Canned, Glance, echo, end_at_once, says, write_at_random
from mua.environment.protocol import Move
from mua.types import Json

CANNED: Mapping[str, Canned] = {}
