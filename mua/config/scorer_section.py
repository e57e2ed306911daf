"""The section ``environment.scorer``: how an answer is found in a text, and compared with the reference."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from mua.config.section import Section

AnswerForm: TypeAlias = Literal["boxed", "tag", "json", "line", "code", "number", "whole"]
_KEY = re.compile(r"[A-Za-z_][\w-]{0,63}")


class ScorerConfig(Section):
    """How an answer is scored (docs/scorers.md)."""

    name: str = "exact"
    """``exact``, ``numeric``, ``date``, ``symbolic``, ``fuzzy``, ``f1``, ``list``, ``choice``, ``code``, ``judge``, or
    a factory of your own as ``package.module:function``."""
    options: dict[str, Any] = {}
    """Settings of the scorer; docs/scorers.md lists them."""
    forms: list[AnswerForm] = []
    """Forms in which an answer is looked for, in this order; the first that is there decides. Empty: those that the
    scorer prefers."""
    tag: str = "answer"
    """Name of the XML tag of form ``tag``."""
    key: str = "answer"
    """Key of a JSON object that form ``json`` looks for."""
    several: Literal["every", "last", "joined"] = "every"
    """What counts when the text holds several different answers of the form: ``every`` one has to be right, the
    ``last`` one alone counts, or all are ``joined`` as the lines of one answer, for scorer ``list``."""
    longest: Annotated[int, Field(gt=0, le=200_000)] = 2_000
    """Longest answer in characters; a longer one is none. Code may have 50 times as many."""

    @model_validator(mode="after")
    def _names_can_be_found(self) -> Self:
        for key, value in (("tag", self.tag), ("key", self.key)):
            if not _KEY.fullmatch(value):
                raise ValueError(f"{key} {value!r}: at most 64 letters, digits, - and _, of which a letter comes first")
        if len(set(self.forms)) < len(self.forms):
            raise ValueError("forms: a form stands there twice; name each once")
        return self
