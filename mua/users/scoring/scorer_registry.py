"""Scorers by name, and those of one's own by ``package.module:function``.

A factory takes the options of the configuration and the run's language models, and gives a
:class:`mua.users.scoring.scorer.Scorer`. Modules are imported when their scorer is asked for.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Mapping
from typing import Any

from mua.config.environment import ScorerConfig
from mua.environment.endpoint.services import Services
from mua.users.scoring.scorer import Grader, Scorer
from mua.utils.errors import ConfigError
from mua.utils.hooks import call_hook, check_attributes, is_hook

SCORERS: Mapping[str, str] = {
    "exact": "mua.users.scoring.text_answers:exact",
    "numeric": "mua.users.scoring.numeric_answers:numeric",
    "date": "mua.users.scoring.date_answers:day",
    "symbolic": "mua.users.scoring.symbolic_answers:symbolic",
    "fuzzy": "mua.users.scoring.text_answers:fuzzy",
    "f1": "mua.users.scoring.text_answers:f1",
    "list": "mua.users.scoring.list_answers:several",
    "choice": "mua.users.scoring.choice_answers:choice",
    "code": "mua.users.scoring.code_answers:code",
    "judge": "mua.users.scoring.judged_answers:judge",
}
"""Name -> factory."""
_NEEDS = {"symbolic": ("math_verify", "math-verify")}
_KEY = "environment.scorer.name"


def grader(config: ScorerConfig, services: Services | None = None) -> Grader:
    """What finds and scores answers under ``config``; :class:`ConfigError` for what cannot be had."""
    return Grader(make_scorer(config.name, config.options, services or Services()), config)


def make_scorer(name: str, options: Mapping[str, Any], services: Services) -> Scorer:
    """The scorer ``name``; raises as :func:`grader`."""
    if name in _NEEDS and importlib.util.find_spec(_NEEDS[name][0]) is None:
        raise ConfigError(f"{_KEY}: scorer {name!r} needs {_NEEDS[name][1]}: install the extra 'tools' (mua[tools])")
    path = SCORERS.get(name, name)
    if not is_hook(path):
        near = difflib.get_close_matches(name, SCORERS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{_KEY}: unknown scorer {name!r}; known: {', '.join(sorted(SCORERS))}, or package.module:function{hint}"
        )
    scorer: Scorer = call_hook(_KEY, path, options, services)
    check_attributes(_KEY, path, scorer)
    return scorer
