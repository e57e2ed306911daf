"""What an exported policy says of itself: its model card and its generation settings.

The base model's card describes another model. What stands here is read from what the run recorded: its configuration,
its evaluations, its report. No path, address or secret of it is told, as cards are published.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mua.config.schema import ExperimentConfig
from mua.config.tree import parse
from mua.observe.metrics_log import EVALUATIONS_FILE, read_metrics
from mua.observe.output import REPORT_FILE
from mua.types import Json
from mua.utils.errors import ConfigError
from mua.utils.source_state import installed_version
from mua.utils.strict_json import JsonError, is_number, read_file, read_json

log = logging.getLogger(__name__)

CARD, GENERATION = "README.md", "generation_config.json"
TAG = "mua"
"""A tag of every card that is written here."""
_MOST_BYTES = 1 << 20
_KEPT = ("license", "license_name", "license_link", "language")
"""Of the base's front matter: what holds for whatever is made of it."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_CACHE = re.compile(r"models--([A-Za-z0-9][\w.-]*?)--([A-Za-z0-9][\w.-]*)")
_EVALUATED = re.compile(r"eval/(?:(?P<domain>.+)/)?(?P<held_out>held_out_)?(?P<split>\w+)_success")
_VERSIONS = ("mua", "megatron-core", "torch", "sglang", "transformers")


@dataclass(frozen=True)
class ExportedPolicy:
    """Whose policy is exported."""

    config: ExperimentConfig
    """The run's."""
    step: int
    """Steps that the policy has learned from."""
    provenance: Json
    stop_token_ids: tuple[int, ...] = ()
    """Those of the chat family, a turn's end first."""

    @property
    def domains(self) -> list[str]:
        """Those of the run."""
        return [name for name in self.config.environment.shares if name]


@dataclass(frozen=True)
class Success:
    """Success of one policy on one set of tasks."""

    split: str
    domain: str | None
    """None: all that the run trains on, or, if ``held_out``, all others."""
    held_out: bool
    mean: float
    low: float
    high: float

    @property
    def tasks(self) -> str:
        """What it is of, in words."""
        of = self.domain or ("domains not trained on" if self.held_out else "all domains trained on")
        return f"{of}, {self.split}"

    @property
    def shown(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


def exported_texts(exported: ExportedPolicy) -> dict[str, str]:
    """The files that stand in an export instead of the base's, by name."""
    return {CARD: model_card(exported), GENERATION: generation_config(exported)}


def generation_config(exported: ExportedPolicy) -> str:
    """``generation_config.json``: the base's, with what the run was told to sample with instead, and a turn's end among
    the tokens that end a text. SFT samples nothing."""
    config = exported.config
    found, shape = (_json(config.model.path / name) or {} for name in (GENERATION, "config.json"))
    told = {} if config.sft else config.rollout.model_dump(include=config.rollout.model_fields_set)
    names = {"temperature": "temperature", "top_p": "top_p", "min_p": "min_p", "max_turn_tokens": "max_new_tokens"}
    sampling = {name: told[key] for key, name in names.items() if key in told}
    sampling |= {"top_k": max(told["top_k"], 0)} if "top_k" in told else {}
    if "temperature" in config.evaluation.model_fields_set and not config.sft:
        sampling["temperature"] = config.evaluation.temperature
    sampling |= {"do_sample": bool(sampling["temperature"])} if "temperature" in sampling else {}
    made = {"transformers_version": installed_version("transformers")} | found | sampling
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if not _is_token(made.setdefault(key, shape.get(key))):
            del made[key]
    ends = made.get("eos_token_id", [])
    ends = dict.fromkeys([*exported.stop_token_ids, *(ends if isinstance(ends, list) else [ends])])
    made |= {"eos_token_id": [*ends] if len(ends) > 1 else next(iter(ends))} if ends else {}
    if sampling.get("do_sample") is False:
        made = {key: value for key, value in made.items() if key not in ("temperature", "top_p", "top_k", "min_p")}
    return json.dumps(made, indent=2, allow_nan=False) + "\n"


def model_card(exported: ExportedPolicy) -> str:
    """``README.md`` of an export, with the front matter that the Hugging Face Hub reads."""
    before, after = evaluations(exported)
    matter: Json = {key: value for key, value in _base_matter(exported.config.model.path).items() if key in _KEPT}
    if base := _base_id(exported.config.model.path):
        matter["base_model"] = base
    matter |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    matter["tags"] = [TAG, "sft" if exported.config.sft else "reinforcement-learning", "tool-use", "multi-turn"]
    if after:
        results = [
            {
                "task": {"type": "text-generation", "name": "Multi-turn tool use"},
                "dataset": {"name": one.tasks, "type": "/".join(exported.domains) or "mua", "split": one.split},
                "metrics": [{"type": "success", "value": round(one.mean, 4), "name": f"success, {one.shown}"}],
            }
            for one in after
        ]
        matter["model-index"] = [{"name": exported.config.name, "results": results}]
    front = yaml.safe_dump(matter, sort_keys=False, allow_unicode=True, width=1000)
    parts = ["# " + _plain(exported.config.name), *_summary(exported)]
    parts += ["## Evaluation", *_evaluation(exported, before, after)]
    parts += ["## How it was made", "\n".join(f"- {line}" for line in _making(exported)), "## Use", _USE]
    return f"---\n{front}---\n\n" + "\n\n".join(parts) + "\n"


_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("this folder")
model = AutoModelForCausalLM.from_pretrained("this folder")
```

The policy was trained with its own chat template, a system prompt and the tools of its domains; other prompts and tools
have not been evaluated. `mua eval` and `mua env play --as user` run it as it was trained."""


def evaluations(exported: ExportedPolicy) -> tuple[list[Success], list[Success]]:
    """Of the run's first policy and of this one, from the run's report and evaluations."""
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    measured = exported.config.output / EVALUATIONS_FILE
    for line in read_metrics(measured) if measured.is_file() else ():
        for known, step in ((before, 0), (after, exported.step)):
            known |= line if line.get("step") == step else {}
    report = _json(exported.config.output / REPORT_FILE) or {}
    for part, known, step in (("first", before, 0), ("final", after, exported.step)):
        said = report.get(part)
        if isinstance(said, dict) and said.get("step") == step:
            known |= said
    return list(_successes(before)), list(_successes(after))


def _successes(metrics: Mapping[str, Any]) -> Iterator[Success]:
    for name in metrics:
        if found := _EVALUATED.fullmatch(name):
            values = [metrics.get(f"{name}{end}") for end in ("", "_low", "_high")]
            numbers = [float(value) for value in values if value is not None and is_number(value)]
            if len(numbers) == len(values):
                yield Success(found["split"], found["domain"], bool(found["held_out"]), *numbers)


def _summary(exported: ExportedPolicy) -> Iterator[str]:
    shape = _json(exported.config.model.path / "config.json") or {}
    kinds = [_plain(str(kind)) for kind in shape.get("architectures") or () if isinstance(kind, str)]
    lies = exported.config.model.path  # an earlier run's export is called by that run's folder
    lies = lies.parent if lies.name == "hf" and lies.parent.name else lies
    base = _base_id(exported.config.model.path) or lies.name or "a model without a name"
    sft = exported.config.sft is not None
    how = "Supervised fine-tuning" if sft else "Reinforcement learning"
    within = "recorded conversations" if sft else ", ".join(f"`{_code(name)}`" for name in exported.domains)
    yield (
        f"{how} of `{_code(base)}`{f' ({kinds[0]})' if kinds else ''} as an agent that talks with users and calls "
        f"tools, {exported.step:,} steps {'on' if sft else 'in'} {within}."
    )


def _evaluation(exported: ExportedPolicy, before: list[Success], after: list[Success]) -> Iterator[str]:
    if not after:
        yield "This policy was not evaluated by its run. `mua eval` measures it on held-out tasks."
        return
    settings = exported.config.evaluation
    yield (
        f"Share of tasks that the environment's own check calls solved, with {100 * settings.level:g} % intervals over "
        f"tasks; {settings.samples} episode{'s' if settings.samples > 1 else ''} per task at temperature "
        f"{settings.temperature:g}."
    )
    first = {one.tasks: one.shown for one in before}
    rows = [f"| {_plain(one.tasks)} | {first.get(one.tasks, '')} | {one.shown} |" for one in after]
    yield "\n".join(["| tasks | before training | this policy |", "| --- | --- | --- |", *rows])
    if exported.config.trainer.export == "best" and any(one.split == settings.split for one in after):
        yield f"The step was chosen by success on `{settings.split}`, so that split's numbers flatter it."


def _making(exported: ExportedPolicy) -> Iterator[str]:
    config, algorithm = exported.config, exported.config.algorithm
    if sft := config.sft:
        source = sft.data or (sft.stored.store if sft.stored else "")
        yield f"conversations of `{_code(Path(source).name)}`, {sft.batch_size} per step"
    else:
        mixed = ", ".join(f"`{_code(name)}` {weight:g}" for name, weight in config.environment.mix.items())
        yield "tasks of the split `train`" + (f", drawn by weight: {mixed}" if mixed else "")
        llm = config.user.llm
        yield f"user: {_plain(config.user.kind)}" + (f" (`{_code(llm.model)}`)" if llm else "")
        yield (
            f"{algorithm.groups_per_step} groups of {algorithm.group_size} episodes per step; advantage "
            f"{algorithm.advantage}, loss {algorithm.loss}, clip {algorithm.clip_low} and {algorithm.clip_high}, "
            f"KL coefficient {algorithm.kl_coefficient}"
        )
        if stale := config.trainer.max_staleness:
            yield f"at most {stale} steps of staleness, correction {algorithm.correction}"
    yield f"learning rate {config.optimizer.learning_rate}, schedule {config.optimizer.schedule}"
    yield f"{config.model.dtype}, contexts of at most {config.model.max_length} tokens; seed {config.seed}"
    versions = exported.provenance.get("versions") or {}
    yield ", ".join(f"{name} {versions[name]}" for name in _VERSIONS if versions.get(name)) or "versions unknown"
    if git := exported.provenance.get("git"):
        yield f"commit `{_code(str(git.get('commit')))}`" + (", with changes" if git.get("dirty") else "")


def _base_id(base: Path) -> str | None:
    """The base's name on the Hub, where it can be told: from the Hub's cache, or from the card of an earlier export."""
    for part in reversed(base.parts):
        if found := _HUB_CACHE.fullmatch(part):
            return "/".join(found.groups())
    matter = _base_matter(base)
    named, tags = matter.get("base_model"), matter.get("tags")
    ours = isinstance(tags, list) and TAG in tags
    return named if ours and isinstance(named, str) and _HUB_ID.fullmatch(named) else None


def _base_matter(base: Path) -> Json:
    """The front matter of the base's card; nothing of one that cannot be read, as it is somebody else's text."""
    try:
        text = read_file(base / CARD)[:_MOST_BYTES].decode("utf-8", errors="replace")
        found = re.match(r"---\r?\n(.*?)\r?\n---\r?\n", text, re.DOTALL)
        data = parse(found[1], CARD).data if found else {}
    except (OSError, ConfigError):
        return {}
    return {key: value for key, value in data.items() if _simple(value)}


def _simple(value: Any) -> bool:
    """Whether it is a text of one line, or a list of such."""
    if isinstance(value, list):
        return all(isinstance(item, str) and _simple(item) for item in value)
    return isinstance(value, str) and value.isprintable() and len(value) <= 500


def _is_token(value: Any) -> bool:
    """Whether it is a token's id, or several."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, int) and _is_token(item) for item in value)
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _json(path: Path) -> Json | None:
    """An object that the base or the run has as a file, if any. One that cannot be read is told of in the log: it is
    no reason to lose an export."""
    if not path.exists():
        return None
    try:
        if isinstance(found := read_json(read_file(path)), dict):
            return found
        reason = "no JSON object"
    except (JsonError, OSError) as error:
        reason = str(error)
    log.warning("%s: cannot be read (%s): the export says nothing of it", path, reason)
    return None


def _plain(text: str) -> str:
    """``text`` as Markdown of one line that means nothing else."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    """``text`` for between backticks."""
    return " ".join(text.replace("`", "'").replace("|", "/").split())
