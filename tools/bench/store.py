"""What recording into the store costs a rollout: pairs of the same episodes, with the store and without, in turns.

    python -m tools.bench.store [--policy MODEL] [--pairs 15] [--store URL] [--goal 0.02]

Episodes of `configs/demo.yaml` (help desk, scripted customers) by the real runner. Without ``--policy`` the gold moves
are played as token ids that take no time to make: of such a rollout the store's share is largest. With it the policy
plays in a real SGLang, whose prefix cache knows all prompts after a first round that does not count. With the store,
the time includes that until the last record is committed. Processor time is that of this process, writer's thread
included; with ``--policy`` also that of its engine. The interval is that between order statistics of the pairs, of at
least 95 %, whatever the distribution. Exit status 1 if the median of the wall time is above ``--goal``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
from scipy.stats import binom

from mua.config.load import load_config
from mua.config.schema import ExperimentConfig
from mua.engine import Sampler
from mua.engine.pool import EnginePool
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Task
from mua.environment.selection import Selection
from mua.rollout.runner import EpisodeRunner, without_gc_pauses
from mua.store.database import Store
from mua.store.recorder import Recorder
from mua.store.starts import begin_part
from mua.store.writer import Writer
from mua.tokens.chat_family import load_family
from tools import kit
from tools.bench.episodes import ScriptedPolicy
from workbench.tokenizer import train_tokenizer

RECIPE = kit.ROOT / "configs" / "demo.yaml"


@dataclass(frozen=True)
class Round:
    """One way of rolling the episodes out."""

    seconds: float
    cpu_seconds: float
    tokens: int
    """Sampled."""
    writer_seconds: float
    """Processor time of the writer's thread; 0 without a store."""


class Bench:
    """Rolls the same groups out, with a store or without."""

    def __init__(self, config: ExperimentConfig, selection: Selection, sampler: Sampler, store: Store) -> None:
        self._config, self._selection, self._sampler, self._store = config, selection, sampler, store
        self._family = load_family(config.model.path, thinking=config.model.thinking)
        self._services = Services()
        self._rounds = 0

    async def round(self, tasks: Sequence[Task], recorded: bool) -> Round:
        """A group of each of ``tasks``, all at once as the configuration lets them."""
        if isinstance(self._sampler, ScriptedPolicy):
            self._sampler.forget()
        if not recorded:
            began, cpu = time.perf_counter(), cpu_seconds()
            tokens = await self._play(tasks, None)
            return Round(time.perf_counter() - began, cpu_seconds() - cpu, tokens, 0.0)
        self._rounds += 1
        run, part, _ = begin_part(
            self._store, self._config.output / str(self._rounds), "bench", {}, {}, from_step=0, seconds=60.0
        )  # fmt: skip
        with Writer.of(self._store, self._config.store) as writer:
            began, cpu = time.perf_counter(), cpu_seconds()
            tokens = await self._play(tasks, Recorder(writer, run, part))
            await asyncio.to_thread(writer.flush, 120.0)
            return Round(time.perf_counter() - began, cpu_seconds() - cpu, tokens, writer.figures.cpu_seconds)

    async def _play(self, tasks: Sequence[Task], recorder: Recorder | None) -> int:
        runner = EpisodeRunner(
            self._config, self._selection, self._family, self._sampler, self._services, recorder=recorder
        )
        size = self._config.algorithm.group_size

        async def group(ordinal: int, task: Task) -> int:
            if recorder is not None:
                recorder.opened(ordinal, task.domain, task.id, size, 0, task.split)
            made = await runner.group(task, ordinal, size, temperature=1.0)
            if recorder is not None:
                recorder.completed(made)
            if faulty := [t.error for t in made.trajectories if t.error]:
                raise SystemExit(f"{task.id}: {faulty[0]}")
            return sum(int(s.loss_mask.sum()) for t in made.trajectories for s in t.segments)

        try:
            return sum(await asyncio.gather(*(group(ordinal, task) for ordinal, task in enumerate(tasks))))
        finally:
            await runner.close()


def cpu_seconds() -> float:
    """Of this process and those it has started, which are alive."""
    total = time.process_time()
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


async def pairs(bench: Bench, tasks: Sequence[Task], number: int) -> list[tuple[Round, Round]]:
    """Rounds without the store and with it; which comes first changes from pair to pair."""
    found = []
    for _ in range(2):
        await bench.round(tasks, recorded=True)  # warms up
    for pair in range(number):
        order = (False, True) if pair % 2 == 0 else (True, False)
        made = {}
        for recorded in order:
            with without_gc_pauses():
                made[recorded] = await bench.round(tasks, recorded)
        found.append((made[False], made[True]))
        each = (f"{one.seconds:.3f} s, {one.cpu_seconds:.3f} s of processors" for one in found[-1])
        print(f"pair {pair + 1}: {'; '.join(each)}", file=sys.stderr, flush=True)
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Order statistics around the median that hold it with a probability of at least 95 %; the extremes where there
    are too few values for that."""
    ordered, n = sorted(values), len(values)
    low = max((k for k in range(n // 2) if binom.cdf(k, n, 0.5) <= 0.025), default=0)
    return ordered[low], ordered[n - 1 - low]


def report(found: Sequence[tuple[Round, Round]], episodes: int) -> str:
    """The table."""
    rows = []
    for name, of in (("wall time", lambda r: r.seconds), ("processor time", lambda r: r.cpu_seconds)):
        ratios = [of(on) / of(off) for off, on in found]
        low, high = interval(ratios)
        off, on = (1e3 * median(of(pair[i]) for pair in found) / episodes for i in (0, 1))
        rows.append((name, f"{off:.2f} ms", f"{on:.2f} ms", f"{median(ratios):.4f} ({low:.4f} to {high:.4f})"))
    off, on = (sorted(pair[i].tokens for pair in found) for i in (0, 1))
    written = 1e3 * median(on.writer_seconds for _, on in found) / episodes
    return "\n".join([
        kit.table((f"{len(found)} pairs, an episode", "without", "with the store", "ratio: median (interval)"), rows),
        "",
        f"{episodes} episodes a round; sampled tokens {off[0]} to {off[-1]} without, {on[0]} to {on[-1]} with; "
        f"of the writer's thread {written:.2f} ms per episode; {kit.machine()}",
    ])  # fmt: skip


@asynccontextmanager
async def engine(config: ExperimentConfig) -> AsyncIterator[EnginePool]:
    """The configuration's engines, with the weights of its model."""
    pool = EnginePool(
        config.engine, dtype=config.model.dtype, context_length=config.model.max_length, seed=config.seed,
        log_folder=config.output / "logs", fp32_lm_head=config.model.fp32_lm_head,
    )  # fmt: skip
    await pool.start(config.model.path)
    try:
        yield pool
    finally:
        await pool.stop()


async def measure(folder: Path, policy: Path | None, groups: int, number: int, url: str | None) -> tuple[str, float]:
    """The table, and the median ratio of the wall time."""
    model = policy or folder / "model"
    config = load_config(RECIPE, [f"model.path={model}", f"output={folder / 'out'}"])
    (folder / "out").mkdir()
    selection = Selection.from_config(config.environment, Services())
    (domain,) = selection.domains.values()
    tasks = domain.tasks("train")[:groups]
    with Store.open(url or folder / "store.sqlite") as store:
        if policy is None:
            train_tokenizer([domain.system_prompt("full")] * 20, model, vocab_size=600)
            (model / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
            family = load_family(model, thinking=False)
            scripted = ScriptedPolicy(family, [domain.gold(task) for task in tasks])
            found = await pairs(Bench(config, selection, scripted, store), tasks, number)
        else:
            async with engine(config) as pool:
                found = await pairs(Bench(config, selection, pool, store), tasks, number)
    episodes = groups * config.algorithm.group_size
    return report(found, episodes), median(on.seconds / off.seconds for off, on in found)


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--policy", type=Path, help="model folder of a policy for the help desk")
    parser.add_argument("--groups", type=int, default=24, help="of a round, of 8 episodes each")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--store", help="URL of an empty PostgreSQL database; by default SQLite")
    parser.add_argument("--goal", type=float, default=0.02)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table, ratio = asyncio.run(measure(Path(folder), options.policy, options.groups, options.pairs, options.store))
    print(table)
    if ratio > 1 + options.goal:
        raise SystemExit(f"above the goal of {options.goal:.0%}")


if __name__ == "__main__":
    main()
