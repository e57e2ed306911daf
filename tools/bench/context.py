"""Searches longer than the window: what rewriting contexts does for success, before and after training.

    python -m tools.bench.context [--seeds 1 2 3] [--strategies wide off discard_tool_results digest] [--split test]

One tiny policy learns from an expert of the domain ``qa`` whose episodes ran under every strategy, so that it has read
conversations as each of them leaves them; each strategy then trains it by rewards, once for each seed. Before and after
that it is evaluated on the test split under the strategy. What is done is not done again: a killed bench goes on
where it was. Leaves everything under ``runs/context`` and prints the tables of docs/benchmarks/context.md.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

import numpy as np

import mua
from environments.qa.own import other_tasks, question
from environments.qa.world import page_of, read, world, world_key
from mua.algorithms.advantage import Floats
from mua.config.load import load_config
from mua.config.schema import ExperimentConfig
from mua.engine.sampler import SamplingParams
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Task
from mua.environment.selection import Selection
from mua.rollout.runner import EpisodeRunner
from mua.tokens.chat_family import ChatFamily
from mua.tokens.family_loading import load_family
from mua.trainer.evaluation.estimators import percentile_interval
from mua.trainer.evaluation.recording import recording
from mua.types import Generation, Json, Outcome, Trajectory
from mua.utils.errors import MuaError
from tools import kit
from tools.tiny import build_policy
from workbench.commands import mua as run_mua
from workbench.commands import say

ROOT = Path("runs/context")
CONFIG, SFT = "configs/tiny-context.yaml", "configs/tiny-context-sft.yaml"
STRATEGIES = ("off", "discard_tool_results", "digest")
PRACTICE = 40
"""Worlds that the expert searches; none is that of a split."""
VOCABULARY = 1152
SHAPE = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Of the policy, where it differs from :data:`tools.tiny.POLICY`."""
WIDE = 2048
"""Tokens of a window in which nothing overflows."""
TRAINED = {
    "wide": ("context.strategy=off", f"rollout.max_tokens={WIDE}", f"model.max_length={WIDE + 64}"),
    **{name: (f"context.strategy={name}",) for name in (*STRATEGIES, "summarise")},
}
"""What reinforcement learning is done under. One question is all that a user says here, so that ``summarise`` leaves of
an episode what ``digest`` does."""
HASTE = 0.4
"""Share of the pages on the way after which a hasty expert answers with the name found there."""
EPISODES, HASTY_EPISODES = 1_200, 500
"""Of the experts, under each strategy."""
DRILLS = 8_000
"""Conversations in which names are read off pages."""


@dataclass(frozen=True)
class Stage:
    """A part of the cold start."""

    start: str
    """What it begins with: ``init`` or another stage."""
    data: str
    """``drills``, or whose episodes: ``expert`` or ``hasty``."""
    settings: Sequence[str]


STAGES: Mapping[str, Stage] = {
    "reader": Stage("init", "drills", ("sft.short_first_steps=150", "trainer.steps=400", "sft.batch_size=24")),
    "reader-2": Stage("reader", "drills", ("trainer.steps=400", "sft.batch_size=24", "seed=2")),
    "reader-3": Stage("reader-2", "drills", ("trainer.steps=700", "sft.batch_size=24", "seed=3")),
    "searcher": Stage("reader-3", "expert", ("optimizer.learning_rate=2e-3", "trainer.steps=300", "sft.batch_size=8")),
    "searcher-2": Stage(
        "searcher", "expert", ("optimizer.learning_rate=2e-3", "trainer.steps=600", "sft.batch_size=8", "seed=2")
    ),
    "hasty": Stage("searcher-2", "hasty", ("optimizer.learning_rate=5e-4", "trainer.steps=60", "sft.batch_size=8")),
}
"""Drills teach to read names off pages, episodes to search; the last ones end too early: for rewards to put right."""


# ---- the expert


@dataclass
class _Search:
    """How far one episode is."""

    known: list[str]
    """Names on the chain so far."""
    opened: int = 0
    """Of them, those whose page was opened."""


class Expert:
    """Opens page after page along a question's chain, and knows of the pages what stands in the prompt; in the place of
    an engine (:class:`mua.engine.sampler.Sampler`).

    Its notes are the question that is left: what was found out stands in the place of what asked for it.
    """

    def __init__(self, family: ChatFamily, tasks: Mapping[int, Task], instruction: str, haste: float = 0.0) -> None:
        """``tasks``: by the ordinal of the episodes. ``haste``: share of pages on the way after which it answers."""
        self._family, self._tasks, self._instruction, self._haste = family, tasks, instruction, haste
        self._searches: dict[str, _Search] = {}

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str, deadline_s: float
    ) -> Generation:
        """The next turn, or notes."""
        data = self._tasks[int(session.split("/")[0])].data
        search = self._searches.setdefault(session, _Search([data["start"]]))
        text, chain = self._family.decode(prompt_ids), data["chain"]
        if search.opened == len(search.known):
            value = read(text.rpartition("<tool_response>")[2].strip(), chain[search.opened - 1])
            if value is None:
                raise MuaError(f"{data['question']}: the page of {search.known[-1]} is not in the prompt")
            search.known.append(value)
        found = search.known[-1]
        message: Json = {"role": "assistant", "content": ""}
        if text.rpartition("<|im_start|>user")[2].strip().startswith(self._instruction):
            left = chain[len(search.known) - 1 :]
            message["content"] = question(found, left, data["world"]) if left else f"It is {found}."
        elif len(search.known) > len(chain) or (search.opened and self._tires(session, search)):
            message["content"] = f"<answer>{found}</answer>"
        else:
            search.opened += 1
            call = {"name": "open_page", "arguments": json.dumps({"title": found})}
            message["tool_calls"] = [{"id": f"call_{search.opened}", "type": "function", "function": call}]
        ids, _ = self._family.codec.encode(self._family.demonstration(message))
        cut = len(ids) > params.max_new_tokens
        ids, count = ids[: params.max_new_tokens], min(len(ids), params.max_new_tokens)
        nothing = np.zeros(count, np.float32)
        return Generation(ids, nothing, "length" if cut else "stop", 0, np.zeros(count, np.int32), 0)

    def _tires(self, session: str, search: _Search) -> bool:
        """Whether it answers after this page; the same whenever it is asked."""
        return random.Random(f"haste/{session.split('/')[0]}/{search.opened}").random() < self._haste


async def _demonstrate(config: ExperimentConfig, strategies: Sequence[str], count: int, haste: float) -> Json:
    """The expert's episodes under every strategy in turn, ``count`` of each, in the run's store; what they are like."""
    tasks = other_tasks("train", PRACTICE, plain=True)
    shuffled = random.Random(f"context bench {haste}").sample(range(len(tasks)), count)
    found: dict[str, list[Trajectory]] = {}
    with recording(config) as recorder:
        for place, strategy in enumerate(strategies):
            setting = under(config, strategy, WIDE if strategy == "off" else config.rollout.max_tokens)
            services = Services.from_config(setting.user, setting.judge)
            selection = Selection.from_config(setting.environment, services)
            family = load_family(setting.model.path, thinking=setting.model.thinking)
            chosen = {place + len(strategies) * n: tasks[i] for n, i in enumerate(shuffled)}
            expert = Expert(family, chosen, setting.context.instruction, haste)
            runner = EpisodeRunner(setting, selection, family, expert, services, recorder=recorder)
            try:
                ended = [runner.trajectory(task, ordinal, 0, temperature=1.0) for ordinal, task in chosen.items()]
                found[strategy] = await asyncio.gather(*ended)
            finally:
                await runner.close()
                await services.close()
    return {strategy: _shape(trajectories) for strategy, trajectories in found.items()}


def under(config: ExperimentConfig, strategy: str, window: int) -> ExperimentConfig:
    """``config`` with this strategy and this ``rollout.max_tokens``."""
    context = config.context.model_copy(update={"strategy": strategy})
    rollout = config.rollout.model_copy(update={"max_tokens": window})
    return config.model_copy(update={"context": context, "rollout": rollout})


def _shape(trajectories: Sequence[Trajectory]) -> Json:
    lengths = [len(segment) for t in trajectories for segment in t.segments]
    return {
        "episodes": len(trajectories),
        "success": float(np.mean([t.success for t in trajectories])),
        "segments": float(np.mean([len(t.segments) for t in trajectories])),
        "tokens of a segment": [int(q) for q in np.quantile(lengths, [0, 0.5, 0.95, 1])],
        "outcomes": {str(o): sum(t.outcome == o for t in trajectories) for o in {t.outcome for t in trajectories}},
    }


# ---- the runs


@dataclass(frozen=True)
class Bench:
    """Where things are, and what is done with them."""

    root: Path
    split: str
    overrides: Sequence[str]
    """Of reinforcement learning and of evaluations."""

    @property
    def start(self) -> Path:
        return self.root / [*STAGES][-1] / "hf"

    def prepare(self) -> None:
        """Tokenizer, drills, experts, cold start."""
        if not (self.root / "init" / "config.json").exists():
            say("a tokenizer, random weights")
            build_policy(self.root / "init", _corpus(), 1, VOCABULARY, SHAPE)
        drills = self.root / "drills.jsonl"
        drills.write_text("".join(f"{json.dumps({'messages': drill})}\n" for drill in _drills()))
        self._once("expert", lambda: self._demonstrated("expert", EPISODES, 0.0))
        self._once("hasty-expert", lambda: self._demonstrated("hasty-expert", HASTY_EPISODES, HASTE))
        sources = {
            "drills": [f"sft.data={drills}", "sft.stored=null"],
            "expert": [f"sft.stored.store={self.root / 'expert'}"],
            "hasty": [f"sft.stored.store={self.root / 'hasty-expert'}", "sft.stored.success=false"],
        }
        for name, stage in STAGES.items():
            weights = self.root / (f"{stage.start}/hf" if stage.start != "init" else stage.start)
            given = [f"model.path={weights}", f"output={self.root / name}", *sources[stage.data], *stage.settings]
            self._once(name, lambda: run_mua("sft", SFT, *given))  # noqa: B023 - called at once

    def reinforced(self, strategy: str, seed: int) -> Json:
        """Reinforcement learning under ``strategy``; how the policy did before and after it."""
        name = f"{self.split}/{strategy}/seed-{seed}"
        given = [f"model.path={self.start}", f"output={self.root / name}", *TRAINED[strategy]]
        given += [f"evaluation.report_split={self.split}", f"seed={seed}"]
        self._once(name, lambda: run_mua("train", CONFIG, *given, *self.overrides))
        with mua.open_run(self.root / name) as run:
            return {label: list(run.trajectories.where(round=place)) for place, label in ((1, "before"), (2, "after"))}

    def done(self, strategy: str, seed: int) -> bool:
        return (self.root / self.split / strategy / f"seed-{seed}" / "done").exists()

    def _demonstrated(self, name: str, count: int, haste: float) -> None:
        given = [
            f"model.path={self.root / 'init'}",
            f"output={self.root / name}",
            f"environment.options.practice={PRACTICE}",
        ]
        config = load_config(Path(CONFIG), given)
        say("the expert's episodes under every strategy")
        found = asyncio.run(_demonstrate(config, STRATEGIES, count, haste))
        (self.root / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")

    def _once(self, name: str, work: Callable[[], None]) -> None:
        """A mark is left behind work that was done, in its folder."""
        mark = self.root / name / "done"
        if not mark.exists():
            began = time.monotonic()
            work()
            mark.write_text(f"{time.monotonic() - began:.0f} s\n")


def _drills() -> Iterator[list[Json]]:
    """Parts of a practice world's pages, one fact to ten, and every question that they answer, with its answer."""
    draw = random.Random("context bench drills")
    worlds = [world_key(number, plain=True) for number in range(PRACTICE)]
    for _ in range(DRILLS):
        key, left = draw.choice(worlds), draw.randint(1, 10)
        told, asked = list[str](), list[str]()
        while left > 0:
            one = draw.choice(list(world(key).values()))
            head, *facts = page_of(one, key, 0).text.removesuffix(".").split(". ")
            shown = draw.sample(facts, min(left, draw.randint(1, len(facts))))
            left -= len(shown)
            told += [f"{sentence}." for sentence in (head, *shown)]
            known = [(name, value) for name, value in one.facts.items() if any(value in text for text in shown)]
            asked += [f"{question(one.name, [name], key)} {value}" for name, value in known]
        draw.shuffle(asked)
        yield [{"role": "user", "content": " ".join(told)}, {"role": "assistant", "content": "\n".join(asked)}]


def _corpus() -> Iterator[list[Json]]:
    """What the tokenizer is made of: pages, questions and calls of practice worlds."""
    for number in range(0, PRACTICE, 2):
        key = world_key(number, plain=True)
        yield from ([{"content": page_of(one, key, 0).text}] for one in world(key).values())
    for task in other_tasks("train", PRACTICE, plain=True):
        call = json.dumps({"name": "open_page", "arguments": {"title": task.data["start"]}})
        answer = f"<answer>{task.data['reference']}</answer>"
        yield [{"content": text} for text in (task.data["question"], answer, call) * 2]


# ---- the tables


def tables(bench: Bench, strategies: Sequence[str], seeds: Sequence[int]) -> str:
    """Of whatever is there."""
    kinds = {task.id: task.data["kind"] for task in other_tasks(bench.split, 0, plain=True)}
    rows, shapes = [], []
    for strategy, label, found in _judgements(bench, strategies, seeds):
        by_kind = [_success(found, {task for task, of in kinds.items() if of == kind}) for kind in KINDS]
        rows.append((strategy, label, _success(found, kinds), *by_kind))
        episodes = [episode for one in found for episode in one]
        shares = (f"{np.mean([e.outcome == outcome for e in episodes]):.2f}" for outcome in ENDS)
        shapes.append((strategy, label, len(episodes), *shares, f"{np.mean([len(e.segments) for e in episodes]):.2f}"))
    head = ("strategy", "policy", "success", *KINDS)
    ends = ("strategy", "policy", "episodes", "cut by the window", "malformed", "segments per episode")
    return f"{kit.table(head, rows)}\n\n{kit.table(ends, shapes)}\n\n{_gains(bench, strategies, seeds)}"


KINDS = ("1 hops", "2 hops", "3 hops", "4 hops")
ENDS = (Outcome.LENGTH, Outcome.MALFORMED)
Judged: TypeAlias = list[list[Trajectory]]
"""Episodes of one evaluation or of several."""


def _judgements(bench: Bench, strategies: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[str, str, Judged]]:
    """Strategy, what was evaluated, its evaluations."""
    for strategy in strategies:
        found = {seed: bench.reinforced(strategy, seed) for seed in seeds if bench.done(strategy, seed)}
        if found:
            yield strategy, "cold start", [one["before"] for one in found.values()]
            yield strategy, f"after RL, {len(found)} seeds", [one["after"] for one in found.values()]
        if len(found) > 1:
            for seed, one in found.items():
                yield strategy, f"after RL, seed {seed}", [one["after"]]


def _gains(bench: Bench, strategies: Sequence[str], seeds: Sequence[int]) -> str:
    """Of each seed what training brought, the difference paired over tasks."""
    rows = []
    for strategy in strategies:
        for seed in filter(lambda seed: bench.done(strategy, seed), seeds):
            found = bench.reinforced(strategy, seed)
            before, after = (_by_task([found[name]]) for name in ("before", "after"))
            rows.append((strategy, seed, _text(np.array([after[task] - before[task] for task in before]))))
    return kit.table(("strategy", "seed", "after less before, all tasks"), rows)


def _success(found: Judged, tasks: Collection[str]) -> str:
    """Success of ``tasks``, each the mean of its episodes; bootstrap over tasks."""
    return _text(np.array([share for task, share in _by_task(found).items() if task in tasks]))


def _by_task(found: Judged) -> dict[str, float]:
    successes = defaultdict[str, list[bool]](list)
    for episode in itertools.chain.from_iterable(found):
        if episode.scored:
            successes[episode.task_id].append(episode.success)
    return {task: fmean(all_) for task, all_ in sorted(successes.items())}


def _text(values: Floats) -> str:
    interval = percentile_interval(values, level=0.95, resamples=10_000, seed=1)
    return f"{interval.mean:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--strategies", nargs="+", default=["wide", *STRATEGIES], choices=TRAINED)
    parser.add_argument("--split", default="test", choices=["validation", "test"], help="what is evaluated on")
    parser.add_argument("--only-tables", action="store_true", help="of what is there; train nothing")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("overrides", nargs="*", help=f"overrides of {CONFIG}, key=value")
    arguments = parser.parse_intermixed_args()
    bench = Bench(arguments.root, arguments.split, arguments.overrides)
    if not arguments.only_tables:
        bench.prepare()
        for seed, strategy in itertools.product(arguments.seeds, arguments.strategies):
            bench.reinforced(strategy, seed)
    print(tables(bench, arguments.strategies, arguments.seeds))


if __name__ == "__main__":
    main()
