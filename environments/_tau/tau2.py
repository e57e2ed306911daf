"""Tasks of tau2-bench as tasks of this project.

``evaluation_criteria.reward_basis`` says what the reward is made of; all of it has to hold:

=================  =====================================================================================
``DB``             final database equals gold, the user's device included
``COMMUNICATE``    every ``communicate_info`` was told the user: our statements
``ACTION``         every gold action was called, with the arguments that ``compare_args`` names (all if absent)
``NL_ASSERTION``   every assertion holds in the judge's eyes; without assertions nothing is asked
``ENV_ASSERTION``  functions over the final state give ``assert_value``; telecom has them, elsewhere it is refused
                   unless left out by option
=================  =====================================================================================

Official evaluation compares the arguments of the *call* where ``compare_args`` is absent, so that a call without any
matches every gold call; here those of the gold call are compared.
"""

from __future__ import annotations

from typing import Any

from environments._tau.tasks import graded
from mua.environment.protocol import Split, Task
from mua.types import Json
from mua.utils.errors import ConfigError

BASES = ("DB", "COMMUNICATE", "ACTION", "NL_ASSERTION", "ENV_ASSERTION")
_LABELS = {
    "reason_for_call": "Why you write",
    "known_info": "What you know",
    "unknown_info": "What you do not know",
    "task_instructions": "How you behave",
}


def task_of_tau2(domain: str, split: Split, entry: Json, where: str) -> Task:
    """One task. ``initialization`` keeps ``initial_state`` for the desk, which knows the tables."""
    criteria: Json = entry.get("evaluation_criteria") or {}
    basis = _basis(criteria, where)
    actions = [_action(action) for action in criteria.get("actions") or []]
    info = [[text] for text in criteria.get("communicate_info") or []]
    data: Json = {
        **graded(actions),
        "instruction": _instruction(entry.get("user_scenario") or {}),
        "actions": actions,
        "statements": info if "COMMUNICATE" in basis else [],
        "communicate_info": info,
        "basis": [name for name in basis if _asks(name, criteria)],
        "nl_assertions": list(criteria.get("nl_assertions") or []),
        "env_assertions": [_assertion(one) for one in criteria.get("env_assertions") or []],
    }
    if initial := _initial(entry.get("initial_state") or {}, where):
        data["initialization"] = initial
    if entry.get("user_tools") is not None:
        data["user_tools"] = [str(name) for name in entry["user_tools"]]
    return Task(str(entry["id"]), domain, split, data)


def _basis(criteria: Json, where: str) -> list[str]:
    if not criteria:
        raise ConfigError(f"{where}: has no evaluation_criteria, so that there is nothing to judge by")
    basis = list(criteria.get("reward_basis") or ("DB", "COMMUNICATE"))
    if unknown := [name for name in basis if name not in BASES]:
        raise ConfigError(f"{where}: reward_basis names {unknown[0]!r}; known: {', '.join(BASES)}")
    return basis


def _action(action: Json) -> Json:
    kept = {"name": action["name"], "arguments": action["arguments"]}
    if action.get("requestor") == "user":
        kept["requestor"] = "user"
    if action.get("compare_args") is not None:
        kept["compare_args"] = action["compare_args"]
    return kept


def _assertion(one: Json) -> Json:
    kept = {"env_type": one["env_type"], "func_name": one["func_name"], "arguments": one["arguments"]}
    return {**kept, "assert_value": one.get("assert_value", True)}


def _asks(name: str, criteria: Json) -> bool:
    """Whether this part of the basis asks for anything in this task.

    Official evaluation looks at the database only where gold actions or assertions are listed, be it an empty list.
    """
    if name == "DB":
        return criteria.get("actions") is not None or criteria.get("env_assertions") is not None
    lists = {"NL_ASSERTION": "nl_assertions", "ENV_ASSERTION": "env_assertions"}
    return name not in lists or bool(criteria.get(lists[name]))


def _initial(state: Json, where: str) -> Json:
    if state.get("message_history"):
        raise ConfigError(f"{where}: begins in the middle of a conversation (message_history), which is not supported")
    given: Json = state.get("initialization_data") or {}
    data, user_data = given.get("agent_data") or {}, given.get("user_data") or {}
    actions = state.get("initialization_actions") or []
    if not (data or user_data or actions):
        return {}
    return {"data": data, "actions": actions, **({"user_data": user_data} if user_data else {})}


def _instruction(scenario: Json) -> str:
    """The user's page: persona and instructions, one labelled paragraph each."""
    parts = [f"Your character: {scenario['persona']}"] if scenario.get("persona") else []
    instructions: Any = scenario.get("instructions") or ""
    if isinstance(instructions, str):
        return "\n\n".join([*parts, instructions])
    parts += [f"{label}: {instructions[key]}" for key, label in _LABELS.items() if instructions.get(key)]
    return "\n\n".join(parts)
