"""Grammars: what a speaker says. The grammars of the domains are tested with their customers (test_retail.py, ...)."""

from __future__ import annotations

import random

import pytest

from environments.kit.language.voice import Voice
from mua.utils.errors import MuaError

GRAMMAR = {
    "train": {"tell": ["{value}. [it|that] is mine.", "{greet} , {value} ."], "greet": ["hello"], "round": ["{round}"]},
    "test": {"tell": ["look for {value}!"]},
    "always": {"bye": ["bye."]},
}


def said(rule: str, split: str = "train", **values: str) -> set[str]:
    return {Voice(GRAMMAR, split, random.Random(seed)).say(rule, **values) for seed in range(40)}


@pytest.mark.parametrize("value", ["ada.cole@post.com", "mia_li_3668", "w1234567"])
def test_an_identifier_keeps_its_letters_and_a_sentence_begins_with_a_capital(value: str) -> None:
    assert said("tell", value=value) == {f"{value}. It is mine.", f"{value}. That is mine.", f"Hello, {value}."}


def test_a_word_at_the_beginning_has_a_capital() -> None:
    assert "Tomorrow. It is mine." in said("tell", value="tomorrow")


def test_a_split_has_wordings_of_its_own_and_validation_those_of_training() -> None:
    assert said("tell", "test", value="x") == {"Look for x!"}
    assert said("bye", "test") == {"Bye."}
    assert said("tell", "validation", value="7") == said("tell", value="7")


@pytest.mark.parametrize(("rule", "told"), [("round", "circle"), ("nothing", "no rule 'nothing'")])
def test_a_grammar_that_cannot_be_spoken_is_refused(rule: str, told: str) -> None:
    with pytest.raises(MuaError, match=told):
        said(rule)
