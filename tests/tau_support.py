"""Where tests find the official tau-bench data, which is no part of the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from environments._tau import OfficialDomain
from mua.config.schema import EnvironmentConfig
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Task
from mua.environment.registry import get_domain
from tests.desk_support import SPLITS

FOLDER = Path(os.environ.get("MUA_TAU_BENCH") or Path(__file__).parents[2] / "shared/data/tau-bench")


def official(domain: str) -> Path:
    """The folder of ``retail`` or ``airline``; skips the test where it is absent."""
    folder = FOLDER / domain
    if not folder.is_dir():
        pytest.skip(f"needs tau-bench's data in {folder}; set MUA_TAU_BENCH to the folder that holds {domain}/")
    return folder


SMALL = Path(__file__).parent / "data/tau2"
"""Folders of a few tasks each in tau2-bench's form, made by this project: retail, airline, telecom."""


def official_tau2(domain: str) -> Path:
    """tau2-bench's own folder ``data/tau2/domains/<domain>``; skips the test where it is absent."""
    named = os.environ.get("MUA_TAU2_BENCH")
    folder = Path(named) / domain if named else None
    if folder is None or not folder.is_dir():
        pytest.skip("needs tau2-bench's data; set MUA_TAU2_BENCH to its data/tau2/domains")
    return folder


def over(name: str, folder: Path, services: Services | None = None, **options: object) -> OfficialDomain:
    """The domain over a folder of tau-bench's or tau2-bench's."""
    config = EnvironmentConfig.model_validate({"name": name, "data": folder, "options": options})
    domain = get_domain(name).configured(config, services or Services())  # type: ignore[attr-defined]
    assert isinstance(domain, OfficialDomain)
    return domain


def tasks_of(domain: OfficialDomain) -> list[Task]:
    return [task for split in SPLITS for task in domain.tasks(split)]
