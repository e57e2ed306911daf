"""What policies that deserve nothing earn on the test split, beside the expert: docs/benchmarks/canned.md.

python -m tools.bench.canned [--write] [DOMAIN ...]
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from pathlib import Path
from statistics import fmean

from environments.kit.canned import CEILING, SHARE_OF_EXPERT, Attacked, Canned, play_canned
from environments.kit.demonstrate import demonstrate
from mua.environment.domain import Domain
from mua.environment.registry import domain_names, get_domain
from mua.rollout.episode import EpisodeResult
from mua.trainer.evaluation.report import markdown_table
from tools import kit

PAGE = Path("docs/benchmarks/canned.md")


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE}")
    parser.add_argument("domains", nargs="*")
    arguments = parser.parse_args()
    blocks = []
    for name in arguments.domains or domain_names():
        domain = get_domain(name)
        if isinstance(domain, Attacked) and domain.tasks("test"):
            blocks.append(_section(name, domain, domain.canned()))
            print(blocks[-1], flush=True)
    if arguments.write:
        PAGE.write_text(kit.with_part(PAGE, "policies", "\n".join(blocks).rstrip(), by=Path(__file__)))


def _section(name: str, domain: Domain, canned: Mapping[str, Canned]) -> str:
    gym = name.startswith("gyms/")
    expert = asyncio.run(_earned((demonstrate(domain, task, 0) for task in domain.tasks("test")), gym))
    rows = [_row(domain, policy, one, expert, gym) for policy, one in canned.items()]
    kind = "mean reward" if gym else "success"
    tasks = len(domain.tasks("test"))
    policies = markdown_table(("policy", kind, "ceiling"), rows)
    return f"## {name}\n\n{tasks} tasks; the expert: {kind} {expert:.3f}.\n\n{policies}\n"


def _row(domain: Domain, policy: str, canned: Canned, expert: float, gym: bool) -> list[str]:
    played = (play_canned(domain, task, 0, canned) for task in domain.tasks("test"))
    earned = asyncio.run(_earned(played, gym))
    ceiling = SHARE_OF_EXPERT * expert if gym else CEILING
    if canned.chance:
        ceiling = max(ceiling, canned.chance + CEILING)
    return [f"{policy}{f' ({canned.reason})' if canned.reason else ''}", f"{earned:.3f}", f"{ceiling:.3f}"]


async def _earned(episodes: Iterable[Awaitable[EpisodeResult]], gym: bool) -> float:
    found = [await episode for episode in episodes]
    return fmean(one.reward if gym else one.evaluation.success for one in found)


if __name__ == "__main__":
    main()
