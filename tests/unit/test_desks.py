"""What holds at every service desk: its expert serves all kinds of people, the test split has its own wordings, and a
verdict costs little.

Not covered: what is particular to a desk (test_help_desk.py, test_retail.py, test_airline.py, test_telecom.py;
telecom's expert serves all kinds there), and what every domain must keep (tests/contract).
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import environments
from environments.kit.scripted import grammar_of
from mua.environment.protocol import Transcript
from mua.environment.registry import get_domain
from mua.users.personas import PERSONAS
from tests.desk_support import at_its_end, with_persona

DESKS = ("airline", "help_desk", "retail", "telecom")
EVERY = {"airline": 3, "help_desk": 16, "retail": 2}
"""One task in so many: those that are served make some seconds together."""
OWN = ("want", "tell", "change", "gives")
"""What customers say of their wishes, rather than small talk."""


@pytest.mark.parametrize("persona", PERSONAS)
@pytest.mark.parametrize("name", EVERY)
def test_the_expert_serves_every_kind_of_person(name: str, persona: str):
    for task in get_domain(name).tasks("test")[sum(map(ord, persona)) % EVERY[name] :: EVERY[name]]:
        found = with_persona(task, persona, 3)
        assert found.evaluation.success, (task.id, found.evaluation.details, found.messages)
        assert found.ended, task.id


@pytest.mark.parametrize("name", DESKS)
def test_the_test_split_speaks_in_words_that_training_never_uses(name: str):
    rules = grammar_of(Path(environments.__file__).parent / name)
    own = {rule: set(wordings) for rule, wordings in rules["test"].items() if rule.startswith(OWN)}
    assert own.keys() == {rule for rule in rules["train"] if rule.startswith(OWN)}
    assert not [rule for rule, wordings in own.items() if wordings & set(rules["train"][rule])]


@pytest.mark.parametrize("name", DESKS)
def test_an_evaluation_is_cheap(name: str):
    """An order of magnitude above what it takes; a verdict is due after every episode."""
    task = max(get_domain(name).tasks("test"), key=lambda one: len(one.data["actions"]))
    environment, found = at_its_end(task)
    environment.evaluate(Transcript(found.messages))
    began = time.process_time()
    for _ in range(20):
        environment.evaluate(Transcript(found.messages))
    assert (time.process_time() - began) / 20 < 0.1
