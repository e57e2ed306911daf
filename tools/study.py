"""A study: policies of two million parameters trained in stages, every stage evaluated alike, over several seeds.

    python -m tools.study configs/studies/retail.yaml [--seeds 1 2 3] [key.path=value ...]

A study file names a configuration and the stages that start from one another's weights; the first start from the
study's model or, without one, from a tokenizer of their own conversations and random weights. Every stage is evaluated
on held-out tasks by ``mua eval``. A stage that is done is not repeated, so a killed study goes on where it was. Leaves
``summary.json``, ``report.md`` and reward curves under ``runs/studies/<name>``.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mua.config.load import load_config
from mua.config.schema import ExperimentConfig
from mua.config.section import Positive, Section
from mua.environment.selection import Selection
from mua.observe.metrics_log import METRICS_FILE, read_metrics
from mua.types import Json
from mua.utils.errors import ConfigError
from tools import kit
from tools.tiny import build_policy
from workbench.commands import mua, say
from workbench.conversations import conversations
from workbench.demonstrate import write_conversations

ROOT = Path("runs/studies")


class Demonstrations(Section):
    """Conversations of scripted experts with the scripted users that the configuration names."""

    count: Positive
    config: str = ""
    """Whose domains they are about; empty: the study's configuration."""
    loose: float = 0.5
    """How often the expert departs from the prescribed way: what is left to learn."""
    successful: bool = False
    """Only those that earned success."""
    practice: int = 0
    """So many practice shops (``environment.options.practice``) share the count; 0: the training split."""


class Stage(Section):
    """One run of ``mua sft`` or ``mua train`` from the weights of another."""

    kind: Literal["sft", "rl"]
    after: str = ""
    """Whose weights it starts from; empty: random ones."""
    seed: int | None = None
    """A stage with a seed of its own is made once, and what starts from it does so in every seed."""
    demonstrations: Demonstrations | None = None
    """Of kind sft."""
    overrides: list[str] = Field(default=[], alias="with")
    """``key.path=value`` for this stage alone."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if (self.kind == "sft") != (self.demonstrations is not None):
            raise ValueError("a stage of kind sft needs demonstrations, one of kind rl has none")
        return self


class Study(Section):
    """Stages and what to compare."""

    name: str
    config: str
    """Configuration of reinforcement learning and of the evaluation."""
    overrides: list[str] = Field(default=[], alias="with")
    """``key.path=value`` for both."""
    seeds: list[int] = Field(default=[1], min_length=1)
    model: str = ""
    """Hugging Face folder whose weights and tokenizer the first stages start from; empty: random ones, their own."""
    vocabulary: Positive = 768
    """Of the tokenizer that is made where there is no model."""
    stages: dict[str, Stage]
    compare: list[Annotated[list[str], Field(min_length=2, max_length=2)]] = Field(default=[])
    """Pairs of stages; reported is the second less the first."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        seen: set[str] = set()
        for name, stage in self.stages.items():
            if stage.after and stage.after not in seen:
                raise ValueError(f"stages.{name}.after: {stage.after!r} is no stage before it")
            if not stage.after and stage.kind == "rl":
                raise ValueError(f"stages.{name}: random weights learn nothing from reward; start after a stage of sft")
            seen.add(name)
        if unknown := {name for pair in self.compare for name in pair} - seen:
            raise ValueError(f"compare: no stage is named {sorted(unknown)[0]!r}")
        return self


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("study", type=Path)
    parser.add_argument("overrides", nargs="*", help="key.path=value, for reinforcement learning and evaluation")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of the study's")
    arguments = parser.parse_intermixed_args()
    study = load_study(arguments.study)
    overrides = [*study.overrides, *arguments.overrides]
    config = load_config(Path(study.config), overrides)
    seeds = arguments.seeds or study.seeds
    for seed in seeds:
        runs = SeedRuns(study, config, overrides, seed)
        for name in study.stages:
            runs.finish(name)
    report(study, seeds)


def load_study(path: Path) -> Study:
    """Raises :class:`ConfigError` naming file, line and key for what is no study."""
    return load_config(path, schema=Study)


@dataclass(frozen=True)
class SeedRuns:
    """All stages of one seed, each in a folder of its own."""

    study: Study
    config: ExperimentConfig
    overrides: Sequence[str]
    seed: int

    def finish(self, name: str) -> None:
        """Bring a stage to its end, evaluation included, from wherever it stands."""
        folder, stage = self._folder(name), self.study.stages[name]
        if stage.seed not in (None, self.seed):
            replace(self, seed=stage.seed).finish(name)
            return
        done, meant = folder / "stage.json", self._meant(name)
        if done.exists():
            if json.loads(done.read_text())["stage"] != meant:
                raise ConfigError(f"{folder} was made by another form of the stage {name!r}; move it away")
            return
        say(f"{self.study.name}, seed {self.seed}: {name}")
        folder.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        if stage.kind == "sft":
            self._fine_tune(name, folder)
        else:
            self._reinforce(name, folder)
        weights, out = f"model.path={folder}/run/hf", f"output={folder}/evaluation"
        mua("eval", self.study.config, weights, out, *self._common())
        done.write_text(json.dumps({"stage": meant, "seconds": time.monotonic() - started}, indent=2) + "\n")

    def _fine_tune(self, name: str, folder: Path) -> None:
        stage, data = self.study.stages[name], folder / "conversations.jsonl"
        assert stage.demonstrations is not None, "the study was checked"
        if not data.exists():
            kept = list(self._conversations(stage.demonstrations))
            if not (stage.after or self.study.model):
                build_policy(folder / "init", kept, self.seed, self.study.vocabulary)
            write_conversations(data, kept)
        first = self.study.model or folder / "init"
        start = self._folder(stage.after) / "run" / "hf" if stage.after else first
        about = _of_the_domains(self._taught(stage.demonstrations))
        mua("sft", "configs/tiny-sft.yaml", *about, f"model.path={start}", f"output={folder}/run",
            f"sft.data={data}", f"seed={self.seed}", *stage.overrides)  # fmt: skip

    def _reinforce(self, name: str, folder: Path) -> None:
        stage = self.study.stages[name]
        mua("train", self.study.config, f"model.path={self._folder(stage.after)}/run/hf", f"output={folder}/run",
            "trainer.evaluate_first=false", "trainer.evaluate_every=0", "trainer.export=last",
            *self._common(), *stage.overrides)  # fmt: skip

    def _taught(self, wanted: Demonstrations) -> ExperimentConfig:
        return load_config(Path(wanted.config), []) if wanted.config else self.config

    def _conversations(self, wanted: Demonstrations) -> Iterator[list[Json]]:
        """About the training split, or an equal share about each practice shop where some are asked for."""
        taught, shops = self._taught(wanted), range(1, wanted.practice + 1) or [0]
        environment, personas = taught.environment, taught.user.personas
        for shop in shops:
            options = {**environment.options, **({"practice": shop} if shop else {})}
            selection = Selection.from_config(environment.model_copy(update={"options": options}))
            made = conversations(selection, self.seed, wanted.loose, personas, successful=wanted.successful)
            yield from itertools.islice(made, wanted.count // len(shops))

    def _common(self) -> list[str]:
        return [*self.overrides, f"seed={self.seed}"]

    def _meant(self, name: str) -> Json:
        """What decides a stage's outcome: its definition, those it starts from, and the overrides of the study."""
        stage = self.study.stages[name]
        before = self._meant(stage.after) if stage.after else self.study.model or None
        return {"after": before, "common": list(self.overrides), **stage.model_dump(mode="json", exclude={"after"})}

    def _folder(self, name: str) -> Path:
        return folder_of(self.study, self.seed, name)


def _of_the_domains(config: ExperimentConfig) -> list[str]:
    """What supervised training must share with a configuration of reinforcement learning."""
    shares = ", ".join(f"{name}: {share}" for name, share in config.environment.shares.items())
    return [
        f"model.max_length={config.model.max_length}",
        f"megatron.max_tokens_per_microbatch={config.megatron.max_tokens_per_microbatch}",
        'environment.name=""', f"environment.mix={{{shares}}}",
    ]  # fmt: skip


def folder_of(study: Study, seed: int, stage: str) -> Path:
    """Where a stage lies."""
    own = study.stages[stage].seed
    return ROOT / study.name / f"seed-{seed if own is None else own}" / stage


def report(study: Study, seeds: Sequence[int]) -> None:
    """Write and print what the study found."""
    from mua.trainer.evaluation.report import interval_text, markdown_table
    from workbench.compare import difference, load_result, paired

    found = {n: [load_result(folder_of(study, s, n) / "evaluation") for s in seeds] for n in study.stages}
    domains = sorted(found[next(iter(found))][0]["domains"])
    rows = [
        [name, str(seed), interval_text(result["success"]), f"{_rewards(result):.3f}",
         *(interval_text(result["domains"][domain]["success"]) for domain in domains)]
        for name, results in found.items()
        for seed, result in zip(seeds, results, strict=True)
    ]  # fmt: skip
    head = ["stage", "seed", "success", "reward", *(domains if len(domains) > 1 else [])]
    pages = ["Success on held-out tasks (interval: bootstrap over tasks), mean reward of an episode:",
             markdown_table(head, [row[: len(head)] for row in rows])]  # fmt: skip
    if len(seeds) > 1:
        means = [[name, over_seeds([r["success"]["mean"] for r in results]), over_seeds([_rewards(r) for r in results]),
                  over_seeds(_training_rewards(study, seeds, name))]
                 for name, results in found.items()]  # fmt: skip
        pages += [f"Means over {len(seeds)} seeds (interval: Student's t over seeds); training reward of the "
                  "second half of the steps:",
                  markdown_table(["stage", "success", "reward", "training reward"], means)]  # fmt: skip
    compared = []
    for first, second in study.compare:
        apart = [difference(paired(a, b)[0]) for a, b in zip(found[first], found[second], strict=True)]
        gains = [d["difference"]["mean"] for d in apart]
        rewards = [_rewards(b) - _rewards(a) for a, b in zip(found[first], found[second], strict=True)]
        each = "; ".join(f"{interval_text(d['difference'])}, p {d['p_value']:.3g}" for d in apart)
        trained = [_training_rewards(study, seeds, name) for name in (first, second)]
        training = [b - a for a, b in zip(*trained, strict=True)] if all(trained) else []
        compared.append([f"{second} less {first}", over_seeds(gains), over_seeds(rewards), over_seeds(training), each])
    if compared:
        pages += ["Differences (of each seed, in success: paired bootstrap over tasks, and a paired test):",
                  markdown_table(["", "success", "reward", "training reward", "of each seed"], compared)]  # fmt: skip
    folder = ROOT / study.name
    (folder / "report.md").write_text(f"# {study.name}\n\n" + "\n\n".join(pages) + "\n", encoding="utf-8")
    summary = {"seeds": list(seeds), "stages": {n: [_kept(r) for r in results] for n, results in found.items()}}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print("\n\n".join(["", *pages, f"report        {folder / 'report.md'}"]))
    for picture in _draw(study, seeds):
        print(f"reward curve  {picture}")


def over_seeds(values: Sequence[float]) -> str:
    """Mean with Student's interval of 95 % over seeds; of one seed the value alone, of none nothing."""
    from scipy.stats import t

    if not values:
        return ""
    mean = fmean(values)
    if len(values) < 2:
        return f"{mean:.3f}"
    half = t.ppf(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return f"{mean:.3f} ({mean - half:.3f} to {mean + half:.3f})"


def _training_rewards(study: Study, seeds: Sequence[int], name: str) -> list[float]:
    """Of each seed; of far more episodes than are evaluated, by policies that still learn. None of supervised stages.

    Stages of one seed meet the same tasks in the same order, so their differences are paired.
    """
    if study.stages[name].kind != "rl":
        return []
    runs = [read_metrics(folder_of(study, seed, name) / "run" / METRICS_FILE) for seed in seeds]
    curves = [[line["reward/mean"] for line in run if "reward/mean" in line] for run in runs]
    return [fmean(curve[len(curve) // 2 :]) for curve in curves]


def _rewards(result: Json) -> float:
    return fmean(task["reward"] for task in result["per_task"] if task["episodes"])


def _kept(result: Json) -> Json:
    parts = {name: part["success"] for name, part in result["domains"].items()}
    return {"success": result["success"], "reward": _rewards(result), "domains": parts}


def _draw(study: Study, seeds: Sequence[int]) -> Iterator[Path]:
    from workbench.reward_curve import plot_reward_curve

    for name, stage in study.stages.items():
        if stage.kind == "rl":
            files = {f"seed {seed}": folder_of(study, seed, name) / "run" / METRICS_FILE for seed in seeds}
            yield plot_reward_curve(files, ROOT / study.name / f"{name}.png", title=f"Training reward, {name}")


if __name__ == "__main__":
    main()
