"""Units of one kind as multiples of each other, by sympy's table of units, exactly.

Only units that are proportional to each other: no temperatures, and no currencies. A year and a month are no fixed
time, and are left out.
"""

from __future__ import annotations

from decimal import Decimal
from functools import cache
from typing import Any

_PREFIXED = {
    "m": ("meter", "kcmµun"), "g": ("gram", "kmµun"), "l": ("liter", "cmdµ"), "s": ("second", "mµun"),
    "Hz": ("hertz", "kMG"), "N": ("newton", "kmM"), "J": ("joule", "kmMG"), "W": ("watt", "kmMG"),
    "Pa": ("pascal", "khMG"), "V": ("volt", "kmµM"), "A": ("ampere", "mµk"), "Ω": ("ohm", "kmM"),
    "C": ("coulomb", "mµ"), "F": ("farad", "mµunp"), "T": ("tesla", "mµ"), "mol": ("mole", "mµk"),
}  # fmt: skip
_PREFIXES = {"G": 9, "M": 6, "k": 3, "h": 2, "d": -1, "c": -2, "m": -3, "u": -6, "µ": -6, "n": -9, "p": -12}
_NAMED = {
    "min": "minute", "h": "hour", "d": "day", "ft": "foot", "in": "inch", "yard": "yard", "yd": "yard",
    "mi": "mile", "lb": "pound", "bar": "bar", "tonne": "tonne", "t": "tonne",
}  # fmt: skip
_LITERS = {"mL": "ml", "cL": "cl", "dL": "dl"}


def ratio(unit: str, other: str) -> tuple[Decimal, Decimal] | None:
    """Numerator and denominator of how many ``other`` one ``unit`` is; None where neither is a multiple of the other.

    Units as :func:`unit_of` gives them, with a power (``m^2``), or divided (``km / h``).
    """
    ours, theirs = _size(unit), _size(other)
    if ours is None or theirs is None or ours[1] != theirs[1]:
        return None
    found = ours[0] / theirs[0]
    return Decimal(int(found.p)), Decimal(int(found.q))


@cache
def _size(unit: str) -> tuple[Any, Any] | None:
    """The unit in units of SI, a rational number, and its dimensions."""
    import sympy

    size, dimensions, sign = sympy.Integer(1), dict[Any, int](), 1
    for part in unit.split(" "):
        if part in ("*", "/"):
            sign = -1 if part == "/" else 1
            continue
        name, _, power = part.partition("^")
        found = _one(name)
        if found is None or len(power) > 2:
            return None
        times = sign * int(power or 1)
        size *= found[0] ** times
        for dimension, count in found[1].items():
            dimensions[dimension] = dimensions.get(dimension, 0) + times * count
        sign = 1
    kept = frozenset((dimension, count) for dimension, count in dimensions.items() if count)
    return (size, kept) if isinstance(size, sympy.Rational) and kept else None


def _one(name: str) -> tuple[Any, dict[Any, int]] | None:
    from sympy import Rational
    from sympy.physics import units
    from sympy.physics.units.systems.si import SI, dimsys_SI

    name, exponent = _LITERS.get(name, name), 0
    quantity = _NAMED.get(name)
    if quantity is None:
        symbol = next((s for s in (name, name[1:]) if s in _PREFIXED and (s == name or name[0] in _PREFIXED[s][1])), "")
        if not symbol:
            return None
        quantity = _PREFIXED[symbol][0]
        exponent = _PREFIXES[name[0]] if symbol != name else 0
    unit = getattr(units, quantity)
    dimension = dimsys_SI.get_dimensional_dependencies(SI.get_quantity_dimension(unit))
    size = SI.get_quantity_scale_factor(unit) * Rational(10) ** exponent
    return size, {one: int(count) for one, count in dimension.items()}
