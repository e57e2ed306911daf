"""From a base policy that knows nothing of shops to one that helps a shop's customers, on a laptop.

    mua demo [--seeds 1,2,3] [--controls] [key.path=value ...]

For each seed: a few conversations of a scripted agent that keeps to the policy, a supervised cold start on them from
``tools/base`` (the package brings it), reinforcement learning against SGLang rollouts, and an evaluation of both
on the test split, by kind of wish. Beside it what policies that deserve nothing earn there; with ``--controls`` also
more supervised fine-tuning on the same conversations for the time that reinforcement learning took, and reinforcement
learning whose rewards are dealt at random. Leaves ``runs/demo/report.html``, ``summary.json``, ``reward.png``,
TensorBoard logs and a store of all episodes. Everything runs through the same commands a person would type; each is
printed before it runs.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

from rich.table import Table

from environments.kit.demonstrate import write_conversations
from mua.observe.metrics_log import METRICS_FILE, read_metrics
from mua.observe.safe_output import SafeConsole
from mua.types import Json
from mua.utils.source_state import shipped
from workbench.commands import mua, say
from workbench.demo_report import Kind, Section, write_report

ROOT = Path("runs/demo")
CONFIG, SFT = "demo", "demo-sft"
"""Recipes."""
BASE = shipped("tools/base")
REPORT = ROOT / "report.html"
CONVERSATIONS = {
    "track": 3,
    "cancel": 1,
    "redirect": 5,
    "return": 4,
    "refused_by_status": 12,
    "refused_final_sale": 2,
    "refused_stranger": 1,
}
"""Demonstrations of the cold start by kind: every rule of the shop is shown, too seldom to serve most wishes."""
PERSONAS = ["brief"]
REFUSE_ALL = "refuse all"


@dataclass(slots=True)
class Result:
    """What one seed reached on the test split."""

    seed: int
    kinds: dict[str, Json]
    """Kind -> whether it is to be ``granted``, success ``before`` and ``after``, and their intervals."""
    sft_success: float
    """Of all test tasks, before; with its interval, and the same after."""
    sft_interval: list[float]
    rl_success: float
    rl_interval: list[float]
    steps: int
    seconds: float
    seconds_by_stage: dict[str, float]
    controls: dict[str, float] = field(default_factory=dict)
    """Mean over kinds of the success of others."""
    controls_by_kind: dict[str, dict[str, float]] = field(default_factory=dict)

    def mean(self, stage: str, *, granted: bool = False) -> float:
        """Over kinds, or over those that are to be granted."""
        return fmean(kind[stage] for kind in self.kinds.values() if kind["granted"] or not granted)


def demonstrate(seeds: Sequence[int], overrides: Sequence[str] = (), *, controls: bool = False) -> None:
    """The whole of it in the current folder; ``overrides`` are of the recipe ``demo``.

    Those of ``model`` and ``megatron`` hold for the cold start too, those of ``model``, ``engine`` and ``evaluation``
    for the evaluations.

    Leaves with the status of a command that fails.
    """
    canned = canned_by_kind()
    results = []
    for seed in seeds:
        results.append(run_seed(seed, canned, overrides))
        write_summary(results)
    picture = draw(seeds)
    load_last(seeds[-1])
    report(results, picture)
    if controls:
        for result in results:
            result.controls_by_kind |= trained_controls(result, overrides)
            result.controls |= {name: fmean(kinds.values()) for name, kinds in result.controls_by_kind.items()}
            write_summary(results)
        report(results, picture)


def run_seed(seed: int, canned: Mapping[str, Mapping[str, float]], overrides: Sequence[str]) -> Result:
    """Everything for one seed."""
    folder = ROOT / f"seed-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    times = [time.monotonic()]
    say(f"seed {seed}: {sum(CONVERSATIONS.values())} conversations of a scripted agent")
    build(folder, seed)
    times.append(time.monotonic())
    say(f"seed {seed}: supervised cold start")
    sft = [f"model.path={BASE}", f"sft.data={folder}/conversations.jsonl", f"output={folder}/sft"]
    mua("sft", SFT, *sft, f"seed={seed}", *of_sections(overrides, "model", "megatron"))
    before = evaluated(folder / "sft" / "hf", folder / "before", seed, overrides)
    times.append(time.monotonic())
    say(f"seed {seed}: reinforcement learning against SGLang rollouts")
    mua("train", CONFIG, f"model.path={folder}/sft/hf", f"output={folder}/rl", f"seed={seed}", *overrides)
    times.append(time.monotonic())
    after = evaluated(folder / "rl" / "hf", folder / "after", seed, overrides)
    times.append(time.monotonic())
    return result_of(seed, folder, before, after, times, canned)


def build(folder: Path, seed: int) -> None:
    """The demonstrations, on shops that no split contains."""
    from environments.help_desk import DOMAIN
    from environments.help_desk.demonstrations import of_each_rule

    folder.mkdir(parents=True)
    talks = of_each_rule(CONVERSATIONS, seed, DOMAIN.system_prompt("short"), PERSONAS)
    write_conversations(folder / "conversations.jsonl", talks)


def evaluated(policy: Path, output: Path, seed: int, overrides: Sequence[str]) -> Json:
    """Success of a policy on the test split, by ``mua eval``."""
    say(f"seed {seed}: {policy} on the test split")
    where = [f"model.path={policy}", f"output={output}", f"seed={seed}"]
    test = [*where, "evaluation.split=test", "evaluation.tasks=null"]
    mua("eval", CONFIG, *test, *of_sections(overrides, "evaluation", "engine", "model"))
    found: Json = json.loads((output / "evaluation.json").read_text())
    return found


def of_sections(overrides: Sequence[str], *sections: str) -> list[str]:
    """Those that say how the machine computes, or how the policy is evaluated, hold for more than one command."""
    return [override for override in overrides if override.partition(".")[0] in sections]


def result_of(
    seed: int,
    folder: Path,
    before: Json,
    after: Json,
    times: Sequence[float],
    canned: Mapping[str, Mapping[str, float]],
) -> Result:
    """The summary of one seed."""
    from environments.help_desk.tasks import GRANTED

    kinds = {
        name: {
            "granted": name in GRANTED,
            **_stage("before", before["kinds"][name]),
            **_stage("after", after["kinds"][name]),
        }
        for name in before["kinds"]
    }
    stages = ("build", "sft and test", "rl", "test")
    seconds = {stage: round(b - a, 1) for stage, (a, b) in zip(stages, itertools.pairwise(times), strict=True)}
    means = {name: fmean(by_kind.values()) for name, by_kind in canned.items()}
    best = max((name for name in canned if name != REFUSE_ALL), key=lambda name: means[name])
    chosen = {REFUSE_ALL: canned[REFUSE_ALL], f"best canned: {best}": canned[best]}
    return Result(
        seed,
        kinds,
        *_whole(before),
        *_whole(after),
        steps=sum(1 for _ in (folder / "rl" / "metrics.jsonl").open()),
        seconds=round(times[-1] - times[0], 1),
        seconds_by_stage=seconds,
        controls={name: fmean(by_kind.values()) for name, by_kind in chosen.items()},
        controls_by_kind={name: dict(by_kind) for name, by_kind in chosen.items()},
    )


def _stage(name: str, found: Json) -> Json:
    return {name: found["mean"], f"{name}_interval": [found["low"], found["high"]], "tasks": found["episodes"]}


def _whole(found: Json) -> tuple[float, list[float]]:
    return found["success"]["mean"], [found["success"]["low"], found["success"]["high"]]


# Those beside it.


def canned_by_kind() -> dict[str, dict[str, float]]:
    """What policies that deserve nothing earn on the test split: name -> kind -> success."""
    from environments.help_desk import DOMAIN
    from environments.kit.canned import play_canned

    async def played() -> dict[str, dict[str, list[float]]]:
        found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in DOMAIN.canned()}
        for name, canned in DOMAIN.canned().items():
            for task in DOMAIN.tasks("test"):
                episode = await play_canned(DOMAIN, task, 0, canned, PERSONAS)
                found[name][task.data["kind"]].append(episode.evaluation.success)
        return found

    say("policies that deserve nothing, on the test split")
    return {name: {kind: fmean(all_) for kind, all_ in kinds.items()} for name, kinds in asyncio.run(played()).items()}


def trained_controls(result: Result, overrides: Sequence[str]) -> dict[str, dict[str, float]]:
    """More supervised fine-tuning for the time of the reinforcement learning, and learning from shuffled rewards."""
    seed, folder = result.seed, ROOT / f"seed-{result.seed}"
    say(f"seed {seed}, control: more supervised fine-tuning on the same conversations")
    steps = steps_within(result.seconds_by_stage["rl"], folder / "sft")
    more = [f"model.path={folder}/sft/hf", f"sft.data={folder}/conversations.jsonl", f"output={folder}/more-sft"]
    mua("sft", SFT, *more, f"trainer.steps={steps}", f"seed={seed + 1000}")
    say(f"seed {seed}, control: reinforcement learning from rewards that are dealt at random")
    dealt = [f"model.path={folder}/sft/hf", f"output={folder}/shuffled", "algorithm.shuffle_rewards=true"]
    mua("train", CONFIG, *dealt, f"seed={seed}", *overrides)
    found = {}
    for name, stage in (("more SFT", "more-sft"), ("shuffled rewards", "shuffled")):
        kinds = evaluated(folder / stage / "hf", folder / f"{stage}-test", seed, overrides)["kinds"]
        found[name] = {kind: part["mean"] for kind, part in kinds.items()}
    return found


def steps_within(seconds: float, run: Path) -> int:
    """So many steps of supervised fine-tuning, each as long as those of ``run`` were, take ``seconds``."""
    steps = list(read_metrics(run / METRICS_FILE))
    return math.ceil(len(steps) * seconds / sum(step["time/train_seconds"] for step in steps))


# What is left to see.


def draw(seeds: Sequence[int]) -> Path:
    """The reward curves of all seeds in one picture."""
    from workbench.reward_curve import plot_reward_curve

    files = {f"seed {seed}": ROOT / f"seed-{seed}" / "rl" / "metrics.jsonl" for seed in seeds}
    return plot_reward_curve(files, ROOT / "reward.png")


def load_last(seed: int) -> None:
    """Load the last checkpoint with transformers, as it is."""
    from transformers import AutoModelForCausalLM

    folder = ROOT / f"seed-{seed}"
    policy = AutoModelForCausalLM.from_pretrained(max((folder / "rl" / "checkpoints").glob("step_*")))
    print(f"transformers loads it: {type(policy).__name__}, {sum(p.numel() for p in policy.parameters()):,} parameters")


def write_summary(results: Iterable[Result]) -> None:
    (ROOT / "summary.json").write_text(json.dumps({"seeds": [asdict(result) for result in results]}, indent=2) + "\n")


def report(results: Sequence[Result], picture: Path) -> None:
    """The tables, a failure next to a success, the report as one file, and where everything lies."""
    from environments.help_desk.tasks import GRANTED

    sections = [section_of(result) for result in results]
    for section in sections:
        SafeConsole(width=120).print(table_of(section))
    last = ROOT / f"seed-{results[-1].seed}"
    pairs = write_report(REPORT, sections, picture, last, sorted(GRANTED), "help_desk")
    for shown in (pairs[-1].left, pairs[-1].right) if pairs else ():
        say(f"{pairs[-1].title}, {shown.title}")
        mua("show", str(last / "after"), shown.trajectory["id"])
    print(f"\nreport        {REPORT}: open it in a browser; it says where to go next")
    print(f"reward curve  {picture}\nsummary       {ROOT / 'summary.json'}")
    print(f"TensorBoard   tensorboard --logdir {ROOT}\nepisodes      mua view {ROOT}/seed-*/rl")


def section_of(result: Result) -> Section:
    """Success by kind on the test split, with 95 % intervals: before, after, and the others."""
    others = list(result.controls_by_kind)
    kinds = []
    for name, kind in result.kinds.items():
        cells = ["{:.3f} ({:.3f} to {:.3f})".format(kind[of], *kind[f"{of}_interval"]) for of in ("before", "after")]
        cells += [f"{result.controls_by_kind[other].get(name, 0):.3f}" for other in others]
        label = f"{name}{'' if kind['granted'] else ' (to be refused)'}"
        kinds.append(Kind(label, kind["tasks"], cells, kind["after"]))
    means = []
    for label, granted in (("mean over kinds", False), ("mean over granted kinds", True)):
        own = [result.mean(stage, granted=granted) for stage in ("before", "after")]
        theirs = [
            fmean(v for k, v in by.items() if result.kinds[k]["granted"] or not granted)
            for by in result.controls_by_kind.values()
        ]
        means.append((label, [f"{value:.3f}" for value in (*own, *theirs)]))
    title = f"seed {result.seed}: success on the test split, {result.steps} steps, {result.seconds:.0f} s"
    return Section(title, ["after SFT", "after RL", *others], kinds, means)


def table_of(section: Section) -> Table:
    """A section for the terminal."""
    table = Table("kind of wish", "tasks", *section.head, title=section.title)
    for kind in section.kinds:
        table.add_row(kind.name, str(kind.tasks), *kind.cells)
    table.add_section()
    for label, cells in section.means:
        table.add_row(label, "", *cells)
    return table
