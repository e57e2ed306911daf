"""What every section of the configuration is built from, and which keys a section has."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic_core import core_schema

KeyPath: TypeAlias = tuple[str, ...]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What every chat template and every OpenAI-compatible endpoint takes as the name of a function."""
Fraction = Annotated[float, Field(ge=0, le=1)]
HOOK_PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
"""An import path (docs/hooks.md)."""


def check_hook_path(value: str) -> str:
    """``value``; raises ValueError where it is no ``package.module:name``."""
    if not re.fullmatch(HOOK_PATH, value):
        raise ValueError(f"{value!r} is no import path: write package.module:name")
    return value


HookPath = Annotated[str, AfterValidator(check_hook_path)]


class OrHook:
    """Beside its choices a key takes the import path of a hook: ``Annotated[Literal["grpo", "gspo"], OrHook]``."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """A text with ``:`` is a path; what else there is must be one of the choices."""
        return core_schema.no_info_wrap_validator_function(
            lambda value, choices: (
                check_hook_path(value) if isinstance(value, str) and ":" in value else choices(value)
            ),
            handler(source),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """For editors."""
        return {"anyOf": [handler(schema["schema"]), {"type": "string", "pattern": f"^{HOOK_PATH}$"}]}


class Section(BaseModel):
    """Base of every section: unknown keys, lossy conversions and keys that nobody reads are errors."""

    READS: ClassVar[Mapping[str, Mapping[str, Sequence[str]]]] = {}
    """What each option of the section reads: by its key and value, the other keys. ``hook`` stands for every import
    path, ``set`` for whatever is not the default of an option without choices. A key that is named here and has another
    value than its default is refused unless an option that is itself read reads it."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        strict=True,
        allow_inf_nan=False,
    )

    def is_set(self, key: str) -> bool:
        """Whether ``key`` has another value than its default."""
        return bool(getattr(self, key) != self.default(key))

    def default(self, key: str) -> Any:
        """Of a key that need not be set."""
        return type(self).model_fields[key].get_default(call_default_factory=True)

    def choice(self, option: str) -> str:
        """The value of ``option``, a dotted key, as :attr:`READS` names it."""
        *above, key = option.split(".")
        section: Section = attrgetter(".".join(above))(self) if above else self
        value = getattr(section, key)
        if isinstance(value, str):
            return "hook" if ":" in value else value
        return "set" if section.is_set(key) else "not set"

    def why_unread(self, key: str) -> str | None:
        """Who would read ``key``; None where somebody does."""
        readers: dict[str, list[str]] = {}
        for option, choices in self.READS.items():
            for choice, keys in choices.items():
                if key in keys:
                    readers.setdefault(option, []).append(choice)
        unread = []
        for option, wanted in readers.items():
            if self.choice(option) not in wanted:
                named = "" if wanted == ["set"] else f" {', '.join(wanted)}"
                unread.append(f"{option}{named} ({option} is {self.choice(option)})")
            elif (reason := self.why_unread(option)) is None:
                return None
            else:
                unread.append(f"{option}, which is read only with {reason}")
        return " or ".join(unread) or None

    @model_validator(mode="after")
    def _reads_what_is_set(self, info: ValidationInfo) -> Self:
        """A line for each key that nobody reads."""
        if (info.context or {}).get("rules") is False:
            return self
        named = dict.fromkeys(key for choices in self.READS.values() for keys in choices.values() for key in keys)
        reasons = {key: reason for key in named if self.is_set(key) and (reason := self.why_unread(key)) is not None}
        if reasons:
            lines = []
            for key, reason in reasons.items():
                default = self.default(key)
                otherwise = "" if isinstance(default, Section) else f", or set it to {json.dumps(default)}"
                lines.append(f"{key} is read only with {reason}; leave {key} out{otherwise}")
            raise ValueError("\n".join(lines))
        return self


def all_keys(schema: type[Section], above: KeyPath = ()) -> Iterator[KeyPath]:
    """Every key of the schema, sections before what they hold."""
    for name, field in schema.model_fields.items():
        yield (*above, name)
        for inner in sections_of(field.annotation):
            yield from all_keys(inner, (*above, name))


def alternatives(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (types.UnionType, Union, list):
        return tuple(inner for branch in get_args(annotation) for inner in alternatives(branch))
    return (annotation,)


def sections_of(annotation: Any) -> list[type[Section]]:
    """Every section a field may hold: the members of a union in their order, one elsewhere, none for a plain value."""
    return [t for t in alternatives(annotation) if isinstance(t, type) and issubclass(t, Section)]


def tag_of(section: type[Section]) -> tuple[str, str] | None:
    """The key and value by which a member of a union is known, such as ``("kind", "range")``; None for others."""
    for name, field in section.model_fields.items():
        if get_origin(field.annotation) is Literal and field.is_required() and len(get_args(field.annotation)) == 1:
            return name, str(get_args(field.annotation)[0])
    return None


def fields_of(section: KeyPath, schema: type[Section], data: Any = None) -> list[tuple[str, Any]]:
    """What a section has: names and types.

    Args:
        section: its path; places in lists are numbers.
        schema: what the path begins in.
        data: what is configured, which says which member of a union stands at a place.
    """
    inner: list[type[Section]] = []
    for name in section:
        if isinstance(data, dict):
            data = data.get(name)
        else:
            data = data[int(name)] if isinstance(data, list) and name.isdigit() and int(name) < len(data) else None
        if name.isdigit():  # a place in a list of sections, whose members the name before it gave
            schema = _member(inner, data)
            continue
        field = schema.model_fields.get(name)
        inner = sections_of(field.annotation) if field else []
        if not inner:
            return []
        schema = _member(inner, data)
    return [(name, field.annotation) for name, field in schema.model_fields.items()]


def _member(members: list[type[Section]], data: Any) -> type[Section]:
    """The one whose tag ``data`` has; the first where it has none of them."""
    if isinstance(data, dict):
        for member in members:
            tag = tag_of(member)
            if tag is not None and data.get(tag[0]) == tag[1]:
                return member
    return members[0]
