"""UserRL's tau records: tasks of tau-bench by their users, instructions, gold calls and outputs.

They hold no database and no policy: those are tau-bench's own, read by the inner domains from a folder each, ``retail``
and ``airline``, in the folder that the option ``tau_bench`` names or else beside the records. What UserRL had a model
say first (``obs``) is not taken over: here the user inside the tool speaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from environments.gyms._shared.official import Dealt, has_records, load_records, own_data
from environments.gyms._shared.records import TauRecord
from mua.config.schema import EnvironmentConfig
from mua.environment.protocol import Environment, Isolation, Move, PromptStyle, Split, Task, Transcript
from mua.environment.user import User
from mua.utils.errors import ConfigError

if TYPE_CHECKING:
    from environments._tau import OfficialDomain

SPLITS: tuple[Split, ...] = get_args(Split)


def own_records(config: EnvironmentConfig) -> Dealt | None:
    """The records that ``environment.data`` names; None where it has none, but tau-bench's own files."""
    path = own_data("tau", config)
    return load_records("tau", path) if path is not None and has_records("tau", path) else None


def databases(config: EnvironmentConfig, named: str) -> Path:
    """The folder of tau-bench's data: ``named`` (the option ``tau_bench``), or where the records are."""
    path = own_data("tau", config)
    assert path is not None, "own_records has found records there"
    return Path(named) if named else path if path.is_dir() else path.parent


def domains_of(records: Dealt) -> list[str]:
    """The domains that the records are of."""
    return sorted({one.domain for found in records.values() for one in found if isinstance(one, TauRecord)})


class OverRecords:
    """An inner domain that serves records in the place of tau-bench's own tasks."""

    isolation: Isolation = "inline"

    def __init__(self, domain: OfficialDomain, records: Dealt, *, skip_noop: bool = False) -> None:
        """``skip_noop`` leaves out what doing nothing solves; ConfigError for a record not of the domain's form."""
        self.name = domain.name
        self._domain = domain
        self._tasks = {split: self._made(split, records[split], skip_noop) for split in SPLITS}

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks[split]

    def environment(self) -> Environment:
        return self._domain.environment()

    def system_prompt(self, style: PromptStyle) -> str:
        return self._domain.system_prompt(style)

    def persona(self, task: Task) -> str:
        return self._domain.persona(task)

    def scripted_user(self, task: Task, seed: int) -> User:
        return self._domain.scripted_user(task, seed)

    def gold(self, task: Task) -> Sequence[Move]:
        return self._domain.gold(task)

    def _made(self, split: Split, records: Sequence[object], skip_noop: bool) -> tuple[Task, ...]:
        own = [one for one in records if isinstance(one, TauRecord) and one.domain == self.name]
        tasks = [_task(self.name, split, record) for record in own]
        for task in tasks:
            self._domain.desk.check(task)
        return tuple(task for task in tasks if not (skip_noop and self._earns_idling(task)))

    def _earns_idling(self, task: Task) -> bool:
        from environments._tau.domain import OfficialEnvironment

        environment = OfficialEnvironment(self._domain.desk)
        environment.reset(task, 0)
        return environment.evaluate(Transcript([])).success


def _task(domain: str, split: Split, record: TauRecord) -> Task:
    from environments._tau.folder import task_of

    actions = [{"name": action.name, "arguments": action.kwargs} for action in record.task.actions]
    told = {"instruction": record.task.instruction, "outputs": list(record.task.outputs)}
    return task_of(domain, split, {"id": record.id, "actions": actions, **told}, f"record {record.id}")


def checked_folder(name: str, base: Path) -> Path:
    """The folder of an inner domain's data; ConfigError where there is none."""
    if not (base / name).is_dir():
        raise ConfigError(
            f"environment.data: the tau records name users and orders of tau-bench's {name}, which they do not hold; "
            f"put tau-bench's data into {base / name}, or name the folder that has {name}/ in options.tau_bench"
        )
    return base / name
