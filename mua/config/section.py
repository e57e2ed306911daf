"""What every section of the configuration is built from, and which keys a section has."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, TypeAlias, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field

KeyPath: TypeAlias = tuple[str, ...]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of every section: unknown keys and lossy conversions are errors."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        strict=True,
        allow_inf_nan=False,
    )


def all_keys(schema: type[Section], above: KeyPath = ()) -> Iterator[KeyPath]:
    """Every key of the schema, sections before what they hold."""
    for name, field in schema.model_fields.items():
        yield (*above, name)
        if inner := section_of(field.annotation):
            yield from all_keys(inner, (*above, name))


def section_of(annotation: Any) -> type[Section] | None:
    """The section a field holds (``X`` in ``X``, ``X | None``, ``list[X]``), or None for a field with a plain value."""
    return next((t for t in alternatives(annotation) if isinstance(t, type) and issubclass(t, Section)), None)


def alternatives(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (types.UnionType, Union, list):
        return tuple(inner for branch in get_args(annotation) for inner in alternatives(branch))
    return (annotation,)


def fields_of(section: KeyPath, schema: type[Section]) -> list[tuple[str, Any]]:
    for name in section:
        if name.isdigit():  # a place in a list of sections
            continue
        field = schema.model_fields.get(name)
        inner = section_of(field.annotation) if field else None
        if inner is None:
            return []
        schema = inner
    return [(name, field.annotation) for name, field in schema.model_fields.items()]
