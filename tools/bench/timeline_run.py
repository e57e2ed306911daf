"""`mua` with every request to the engines noted, and trainer and engines on cores of their own; for the benchmark.

    python -m tools.bench.timeline_run REQUESTS.jsonl ARGUMENTS OF mua

Every line: when a request began and ended, how long it waited for an engine, its tokens. Seconds of one clock.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import psutil

from mua import cli
from mua.engine.pool import EnginePool

TRAINER_CORE, ENGINE_CORE = 1, 0


def main() -> None:
    noted = Path(sys.argv.pop(1))
    start, generate = EnginePool.start, EnginePool.generate

    async def started(pool: EnginePool, *arguments: Any) -> None:
        await start(pool, *arguments)
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            pin(process, ENGINE_CORE if any("sglang" in word for word in process.cmdline()) else TRAINER_CORE)

    async def generated(pool: EnginePool, prompt: Any, *arguments: Any, **named: Any) -> Any:
        began = monotonic()
        found = await generate(pool, prompt, *arguments, **named)
        line = {
            "began": began, "ended": monotonic(), "waited": found.waited, "prompt": len(prompt),
            "cached": found.cached_tokens, "sampled": len(found.ids),
        }  # fmt: skip
        print(json.dumps(line), file=file)
        return found

    EnginePool.start, EnginePool.generate = started, generated  # type: ignore[assignment, method-assign]
    noted.parent.mkdir(parents=True, exist_ok=True)
    with noted.open("a") as file:  # which further ranks, running the same command, open too
        cli.main()


def pin(process: psutil.Process, core: int) -> None:
    """All its threads."""
    for thread in process.threads():
        os.sched_setaffinity(thread.id, {core})


if __name__ == "__main__":
    main()
