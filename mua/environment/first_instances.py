"""One instance of each domain with all its extra tools, tried before a run: do their names go together?"""

from __future__ import annotations

from typing import get_args

from mua.config.schema import ExperimentConfig
from mua.environment.endpoint.services import Services
from mua.environment.manager import EnvironmentManager
from mua.environment.protocol import Split
from mua.environment.selection import Selection
from mua.utils.errors import MuaError

_SPLITS: tuple[Split, ...] = get_args(Split)


async def domain_faults(config: ExperimentConfig) -> dict[str, str]:
    """What is wrong with each domain that cannot be opened, on its first task."""
    faults = {}
    services = Services.from_config(config.user, config.judge)
    for name, domain in Selection.from_config(config.environment, services).domains.items():
        task = next((task for split in _SPLITS for task in domain.tasks(split)[:1]), None)
        manager = EnvironmentManager(domain, config.environment)
        try:
            if task is not None:
                async with manager.instance(task, 0):
                    pass
        except MuaError as error:
            faults[name] = str(error)
        finally:
            await manager.close()
    await services.close()
    return faults
