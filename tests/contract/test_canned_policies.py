"""Policies that deserve nothing, on test tasks of every domain and gym, each under its ceiling.

Not covered: more than 15 test tasks of a domain (``tools/bench/canned.py`` plays them all); domains whose tasks come
from a folder or package (``needs_data``), whose rewards are not ours; and a policy that nobody has thought of.
"""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean as mean
from statistics import pstdev
from typing import TypeAlias

import pytest

from environments.kit.canned import CEILING, SHARE_OF_EXPERT, Attacked, play_canned
from environments.kit.demonstrate import demonstrate
from mua.environment.registry import domain_names, get_domain
from mua.environment.selection import stratified

ROOT = Path(__file__).parents[2]
OURS = [name for name in domain_names() if not getattr(get_domain(name), "needs_data", False)]

MOST = [pytest.param(15, marks=pytest.mark.slow), 3]
"""So many tasks of the test split, and fewer in ``make test``, each kind by its share."""


Earned: TypeAlias = tuple[float, bool]
"""The reward of an episode, and its success."""
PLAYED: dict[tuple[str, str, str], Earned] = {}
"""Every episode of this session, by domain, policy and task: none is played twice."""


def earned(name: str, policy: str, most: int) -> list[Earned]:
    """What ``policy`` gets in a domain; the expert, where it names none."""
    domain = get_domain(name)
    tasks = stratified(domain.tasks("test"), most)

    async def play() -> None:
        """All on one loop: making one costs more than most episodes."""
        for task in tasks:
            if (name, policy, task.id) not in PLAYED:
                canned = domain.canned()[policy] if policy else None  # type: ignore[attr-defined]
                found = await (play_canned(domain, task, 0, canned) if canned else demonstrate(domain, task, 0))
                PLAYED[name, policy, task.id] = (found.reward, found.evaluation.success)

    asyncio.run(play())
    return [PLAYED[name, policy, task.id] for task in tasks]


def policies() -> list[tuple[str, str]]:
    attacked = [(name, domain) for name in OURS if isinstance(domain := get_domain(name), Attacked)]
    return [(name, policy) for name, domain in attacked for policy in domain.canned()]


@pytest.mark.parametrize("name", OURS)
def test_every_domain_brings_five_of_them(name: str):
    domain = get_domain(name)
    assert isinstance(domain, Attacked)
    assert len(domain.canned()) >= 5


@pytest.mark.parametrize("most", MOST)
@pytest.mark.parametrize(("name", "policy"), policies())
def test_a_policy_that_deserves_nothing_earns_nothing(name: str, policy: str, most: int):
    domain = get_domain(name)
    assert isinstance(domain, Attacked)
    canned = domain.canned()[policy]
    played = earned(name, policy, most)
    values = [reward if name.startswith("gyms/") else float(success) for reward, success in played]
    ceiling = canned.chance + CEILING
    if name.startswith("gyms/"):
        share = SHARE_OF_EXPERT * mean([reward for reward, _ in earned(name, "", most)])
        ceiling = max(share, ceiling if canned.chance else 0.0)
    if len(played) < len(domain.tasks("test")):  # two standard errors of a sample's mean
        ceiling += 2 * pstdev(values) / math.sqrt(len(played))
    found = mean(values)
    assert found <= ceiling, f"{policy} earns {found:.3f} in {name}; at most {ceiling:.3f}. {canned.reason}"


SAID = """
import asyncio, hashlib, json
from environments.kit.canned import play_canned
from mua.environment.registry import get_domain
from tests.contract.test_canned_policies import policies

for name, policy in policies()[::3]:
    domain = get_domain(name)
    said = asyncio.run(play_canned(domain, domain.tasks("test")[0], 0, domain.canned()[policy])).messages
    print(name, policy, hashlib.sha256(json.dumps(said).encode()).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a busy machine
def test_every_process_plays_them_alike():
    def lines(seed: str) -> list[str]:
        changed = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", SAID], env=changed, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert lines("1") == lines("2")
