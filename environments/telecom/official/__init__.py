"""tau2-bench's telecom under ``environment.data``: its folder, both sides' tools, what its tasks begin with and assert.

::

    folder                      here
    db.toml                     tables plans, customers, lines, bills, devices (:mod:`.records`)
    user_db.toml                table user: the phone (device) and its surroundings; optional
    main_policy.md              the policy, with tech_support_manual.md, or tech_support_workflow.md for the
                                option ``policy: workflow``
    tasks.json                  tasks; initialization functions and assertions are checked by name when it is read
    split_tasks.json            :mod:`environments._tau.folder`

Either database may be JSON instead (``db.json``), and every file may end in ``.gz``. The reward is tau2-bench's, of the
parts that a task's ``reward_basis`` names (:mod:`environments._tau.folder`); options are those of
:mod:`environments._tau` and ``policy``.

The user by rules follows the scenario, does what the agent names by a tool's name, and says what the phone shows
(:mod:`.user`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from environments._tau.domain import OPTIONS, OfficialDomain
from environments._tau.folder import (
    OfficialData,
    check_folder,
    find,
    found,
    read_json,
    read_text,
    task_of_tau2,
    tau2_tasks,
)
from environments.kit.options import choices_in, read_options
from environments.kit.overlay import Base
from environments.telecom.official.desk import TelecomDesk, base_of_lists
from environments.telecom.official.user import DirectedUser
from mua.config.schema import EnvironmentConfig
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Split, Task
from mua.environment.user import User
from mua.types import Json
from mua.utils.errors import ConfigError
from mua.utils.strict_json import MAX_FILE_DEPTH, deeper

POLICIES = {"manual": "tech_support_manual.md", "workflow": "tech_support_workflow.md"}
"""Values of the option ``policy``, and the file that goes with the main policy."""
SHORT_PROMPT = "You are the support of a phone company."


def official_telecom(config: EnvironmentConfig, services: Services) -> OfficialDomain:
    """The domain over ``config.data``; raises :class:`ConfigError` for what cannot be had."""
    assert config.data is not None
    options = read_options("telecom", {**OPTIONS, "policy": "manual"}, config)
    policy, *_ = choices_in("policy", options["policy"], tuple(POLICIES))
    data = load_telecom(config.data, POLICIES[policy], str(options["split"]) or None)
    desk = TelecomDesk(data.base, reward=config.reward)
    return TelecomOfficial("telecom", data, desk, SHORT_PROMPT, services).under(config)


def load_telecom(folder: Path, manual: str = POLICIES["manual"], split: str | None = None) -> OfficialData:
    """Read ``folder``; raises :class:`ConfigError` that names the file and what is wrong with it."""
    check_folder("telecom", folder)
    policy = {"main_policy": found(folder, "main_policy.md"), "tech_support_policy": found(folder, manual)}
    whole = "\n".join(f"<{name}>\n{read_text(path)}\n</{name}>" for name, path in policy.items())
    return OfficialData(folder, "tau2", _base(folder), whole, tau2_tasks("telecom", folder, split, telecom_task))


def telecom_task(domain: str, split: Split, entry: Json, where: str) -> Task:
    """A task of tau2-bench, with the kind of trouble that its id names: ``[mms_issue]...``."""
    task = task_of_tau2(domain, split, entry, where)
    kind, bracket, _ = task.id.removeprefix("[").partition("]")
    if task.id.startswith("[") and bracket:
        task.data["kind"] = kind
    return task


class TelecomOfficial(OfficialDomain):
    """tau2-bench's telecom, whose user has a phone."""

    def scripted_user(self, task: Task, seed: int) -> User:
        return DirectedUser(task.data["instruction"], self.name, seed)


def _base(folder: Path) -> Base:
    path = _either(folder, "db")
    if path is None:
        raise ConfigError(f"{folder}: has no db.toml (or db.json), which tau2-bench's telecom needs")
    lists, user_path = _records(path), _either(folder, "user_db")
    user = _records(user_path) if user_path is not None else {}
    try:
        return base_of_lists(lists, user)
    except ValueError as error:
        raise ConfigError(f"{path} and {user_path or 'no user_db.toml'}: {error}") from error


def _either(folder: Path, name: str) -> Path | None:
    return find(folder, f"{name}.toml") or find(folder, f"{name}.json")


def _records(path: Path) -> Mapping[str, Any]:
    value = _toml(path) if ".toml" in path.suffixes else read_json(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must be an object of lists of records")
    return value


def _toml(path: Path) -> Any:
    try:
        value = tomllib.loads(read_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is no TOML: {error}") from error
    if deeper(value, MAX_FILE_DEPTH):
        raise ConfigError(f"{path}: nested too deeply")
    return value
