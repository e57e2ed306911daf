"""What the ranks of a group tell each other: values, and errors, so that none goes on or waits where another failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import distributed

Value = TypeVar("Value")


def gathered(value: Value, group: distributed.ProcessGroup | None = None) -> list[Value]:
    """Every rank's ``value``, in order of the group's ranks (None: all ranks); collective."""
    box: list[Value] = [value] * distributed.get_world_size(group)
    if len(box) > 1:
        distributed.all_gather_object(box, value, group=group)
    return box


def raise_together(
    error: Exception | None, group: distributed.ProcessGroup | None = None, *, naming: bool = False
) -> None:
    """Raise on every rank if any has an ``error``: its own, or the first of the others; collective.

    Args:
        naming: say of another rank's error which rank's it is.
    """
    told = gathered(None if error is None else (type(error), str(error)), group)
    if error is not None:
        raise error
    for rank, found in enumerate(told):
        if found is not None:
            kind, text = found
            number = rank if group is None else distributed.get_global_rank(group, rank)
            raise kind(f"rank {number} failed: {text}" if naming else text)


@contextmanager
def together(group: distributed.ProcessGroup | None = None) -> Iterator[None]:
    """A block without communication, whose error on one rank is raised by all of the group; collective at its end."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    raise_together(failure, group)
