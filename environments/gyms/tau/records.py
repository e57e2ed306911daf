"""UserRL's tau records: tasks of tau-bench by their users, instructions, gold calls and outputs.

They hold no database and no policy: those are tau-bench's own, read by the inner domains from a folder each, ``retail``
and ``airline``, in the folder that the option ``tau_bench`` names or else beside the records. What UserRL had a model
say first (``obs``) is not taken over: here the user inside the tool speaks.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from environments.gyms._shared.official import Dealt, has_records, load_records, own_data
from environments.gyms._shared.records import TauRecord
from mua.config.schema import EnvironmentConfig
from mua.environment.protocol import Split, Task
from mua.utils.errors import ConfigError

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


def tasks_of(domain: str, records: Dealt) -> dict[Split, tuple[Task, ...]]:
    """The tasks that the records of a domain make; ConfigError for one that is not of the domain's form."""
    from environments._tau.folder import task_of

    def made(split: Split, record: TauRecord) -> Task:
        actions = [{"name": action.name, "arguments": action.kwargs} for action in record.task.actions]
        told = {"instruction": record.task.instruction, "outputs": list(record.task.outputs)}
        return task_of(domain, split, {"id": record.id, "actions": actions, **told}, f"record {record.id}")

    return {
        split: tuple(made(split, one) for one in records[split] if isinstance(one, TauRecord) and one.domain == domain)
        for split in SPLITS
    }


def checked_folder(name: str, base: Path) -> Path:
    """The folder of an inner domain's data; ConfigError where there is none."""
    if not (base / name).is_dir():
        raise ConfigError(
            f"environment.data: the tau records name users and orders of tau-bench's {name}, which they do not hold; "
            f"put tau-bench's data into {base / name}, or name the folder that has {name}/ in options.tau_bench"
        )
    return base / name
