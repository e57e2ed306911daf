"""Answers that are numbers, compared by value (:mod:`mua.users.scoring.written_numbers` reads them)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any, Literal, Self

from pydantic import model_validator

from mua.config.section import NonNegativeFloat, Section
from mua.environment.endpoint.services import Services
from mua.users.scoring.scorer import ReadScorer, options_of
from mua.users.scoring.written_numbers import EXACT, Ratio, WrittenNumber, near, ratio, read_number
from mua.utils.errors import ConfigError


class NumericOptions(Section):
    """Options of scorer ``numeric``."""

    relative: NonNegativeFloat = 1e-6
    """Largest difference as a share of the reference."""
    absolute: NonNegativeFloat = 0.0
    """Largest difference that is right in any case."""
    exact_integers: bool = True
    """Two whole numbers must be equal, whatever ``relative`` says; ``absolute`` still holds."""
    percent: Literal["fraction", "ignore", "either"] = "fraction"
    """``fraction``: 50% is 0.5; ``ignore``: 50% is 50; ``either``: a percent sign on one side only may mean both."""
    decimal: Literal["point", "comma"] = "point"
    """What separates decimals; the other one separates thousands."""
    units: Literal["same", "ignore", "required"] = "same"
    """``same``: two units must agree, and one that is missing is taken for granted; ``required``: it may not be missing
    where the reference has one; ``ignore``: units do not count."""
    convert: bool = False
    """Units of one kind are converted: 5 km are 5000 m. Needs sympy (extra ``tools``)."""

    @model_validator(mode="after")
    def _units_count(self) -> Self:
        if self.convert and self.units == "ignore":
            raise ValueError("convert: units are ignored (units: ignore), so that none is converted; leave one out")
        return self


class NumericScorer(ReadScorer[WrittenNumber]):
    """A number, compared by value."""

    what = "a number for scorer 'numeric'"

    def __init__(self, options: Mapping[str, Any], _services: Services) -> None:
        self.options = options_of(NumericOptions, options, "numeric")
        if self.options.convert and importlib.util.find_spec("sympy") is None:
            raise ConfigError("environment.scorer.options.convert: needs sympy: install the extra 'tools' (mua[tools])")
        self._point = "," if self.options.decimal == "comma" else "."

    def equal(self, given: WrittenNumber, reference: WrittenNumber) -> bool:
        """Whether both are the same number under the options."""
        options, times = self.options, (Decimal(1), Decimal(1))
        whole = options.exact_integers and given.whole and reference.whole
        counts = options.units != "ignore" and reference.unit and (given.unit or options.units == "required")
        if counts and given.unit != reference.unit:
            found = ratio(given.unit, reference.unit) if options.convert else None
            if found is None:
                return False
            times, whole = found, False
        relative = 0.0 if whole else options.relative
        for top, bottom in self._readings(given, reference):
            converted = EXACT.multiply(top, times[0]), EXACT.multiply(bottom, times[1])
            if any(near(converted, one, relative, options.absolute) for one in self._readings(reference, given)):
                return True
        return False

    def read(self, text: str) -> WrittenNumber | None:
        return _read(text, self._point)

    def _readings(self, number: WrittenNumber, other: WrittenNumber) -> list[Ratio]:
        """What ``number`` may mean beside ``other``."""
        plain = (number.top, number.bottom)
        if self.options.percent == "ignore":
            return [plain]
        hedged = self.options.percent == "either" and number.percent and not other.percent
        return [plain, number.as_fraction()] if hedged else [number.as_fraction()]


_read = lru_cache(maxsize=4096)(read_number)
