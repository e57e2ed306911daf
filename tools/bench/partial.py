"""What is sampled twice when engines leave in the middle of turns: turns that go on, and turns that start again.

    python -m tools.bench.partial [--turns 48] [--seeds 1 2 3]

Two real engines with a random tiny policy and turns of drawn lengths. At drawn intervals one of the engines is told to
give up what it runs, as when it leaves at the end of ``engine.leave_seconds``. Once what it had sampled is kept; once
it is thrown away and only the turn starts again. A restarted episode would lose its earlier turns too. The same seeds
draw the same turns and intervals; every turn must come out the same, which is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from mua.config.schema import EngineConfig
from mua.engine import SamplingParams
from mua.engine import pool as pools
from mua.engine.engine_handle import EngineClient
from mua.engine.pool import EnginePool
from mua.types import Generation
from tools import kit

LONGEST, SLOTS, INTERVAL = 250, 8, (1.5, 4.0)


@dataclass
class Cost:
    sampled: int = 0
    """Tokens that engines sampled."""
    wanted: int = 0
    """Tokens of the turns."""
    broken: int = 0
    """Turns that were given up with something sampled."""
    seconds: float = 0.0


async def play(pool: EnginePool, seed: int, turns: int, *, keep: bool) -> tuple[Cost, list[list[int]]]:
    """All turns, and what they cost."""
    draw, cost, real = random.Random(seed), Cost(), EngineClient.generate
    pools._OWN_ENGINES_PER_REQUEST = 1000

    async def generate(client: EngineClient, *arguments: Any) -> Generation:
        found = await real(client, *arguments)
        cost.sampled += len(found.ids)
        if found.finish == "abort" and len(found.ids):
            cost.broken += 1
            if not keep:
                nothing = np.zeros(0, np.int32)
                return replace(found, ids=nothing, logprobs=nothing.astype(np.float32), versions=nothing)
        return found

    async def turn(index: int, length: int) -> list[int]:
        params = SamplingParams(1.0, length, (), seed=index)
        prompt = list(range(5, 5 + 10 + index % 40))
        found = await pool.generate(prompt, params, session=f"{seed}/{index}", deadline_s=900)
        cost.wanted += len(found.ids)
        return found.ids.tolist()

    async def leave() -> None:
        while True:
            await asyncio.sleep(draw.uniform(*INTERVAL))
            await draw.choice(pool._engines).abort()

    lengths = [int(LONGEST ** draw.uniform(0.7, 1.0)) for _ in range(turns)]
    EngineClient.generate = generate  # type: ignore[method-assign, assignment]
    began, leaving = monotonic(), asyncio.create_task(leave())
    try:
        found = await asyncio.gather(*(turn(index, length) for index, length in enumerate(lengths)))
    finally:
        leaving.cancel()
        EngineClient.generate = real  # type: ignore[method-assign]
    cost.seconds = monotonic() - began
    return cost, list(found)


async def measure(seeds: Sequence[int], turns: int) -> str:
    """The table."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kit.random_qwen3(
            folder / "model", 0, vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=2048,
            eos_token_id=None, pad_token_id=0, bos_token_id=None, initializer_range=0.15,
        )  # fmt: skip
        config = EngineConfig(
            count=2, dtype="float32", memory_fraction=0.4, max_total_tokens=32768, deterministic=True,
            max_running_requests=SLOTS, start_seconds=600, stop_seconds=10,
        )  # fmt: skip
        async with EnginePool(config, dtype="float32", context_length=2048, seed=1, log_folder=folder) as pool:
            await pool.start(folder / "model")
            for seed in seeds:
                kept, ours = await play(pool, seed, turns, keep=True)
                again, theirs = await play(pool, seed, turns, keep=False)
                if ours != theirs:
                    raise SystemExit(f"seed {seed}: a turn that went on is not the one that started again")
                rows.append(
                    (seed, kept.wanted, kept.broken, kept.sampled, again.broken, again.sampled,
                     f"{1 - kept.sampled / again.sampled:.0%}", f"{1 - kept.seconds / again.seconds:.0%}")
                )  # fmt: skip
    names = ("seed", "tokens of the turns", "broken, going on", "sampled, going on", "broken, starting again",
             "sampled, starting again", "tokens saved", "time saved")  # fmt: skip
    return kit.table(names, rows)


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--turns", type=int, default=48)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments: argparse.Namespace = parser.parse_args()
    print(asyncio.run(measure(arguments.seeds, arguments.turns)))


if __name__ == "__main__":
    main()
