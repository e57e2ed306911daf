"""What an exported policy says of itself: its model card and its generation settings.

The base model's card describes another model. What stands here is read from what the run recorded: its configuration,
its evaluations, its report. No path, address or secret of it is told, as cards are published.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.repocard import metadata_load

from mua.config.schema import ExperimentConfig
from mua.observe.metrics_log import EVALUATIONS_FILE, read_metrics
from mua.observe.output import REPORT_FILE
from mua.types import Json
from mua.utils.source_state import installed_version
from mua.utils.strict_json import JsonError, is_number, read_file, read_json

log = logging.getLogger(__name__)

CARD, GENERATION = "README.md", "generation_config.json"
TAG = "mua"
"""A tag of every card that is written here."""
_KEPT = ("license", "license_name", "license_link", "language")
"""Of the base's front matter: what holds for whatever is made of it."""
_HUB_CACHE = re.compile(r"models--([A-Za-z0-9][\w.-]*?)--([A-Za-z0-9][\w.-]*)")
_EVALUATED = re.compile(r"eval/(?:(?P<domain>.+)/)?(?P<held_out>held_out_)?(?P<split>\w+)_success")
_VERSIONS = ("mua", "megatron-core", "torch", "sglang", "transformers")
_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("this folder")
model = AutoModelForCausalLM.from_pretrained("this folder")
```

The policy was trained with its own chat template, a system prompt and the tools of its domains; other prompts and tools
have not been evaluated. `mua eval` and `mua env play --as user` run it as it was trained."""


def exported_texts(
    config: ExperimentConfig, step: int, provenance: Json, stop_token_ids: Sequence[int]
) -> dict[str, str]:
    """The files that stand in an export instead of the base's, by name.

    Args:
        step: steps that the policy has learned from.
        provenance: of the run: git commit and versions of packages, where they are known.
        stop_token_ids: those of the chat family, a turn's end first.
    """
    return {CARD: model_card(config, step, provenance), GENERATION: generation_config(config, stop_token_ids)}


_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "min_p": "min_p", "max_turn_tokens": "max_new_tokens"}
"""Keys of ``rollout`` under transformers' names."""


def generation_config(config: ExperimentConfig, stop_token_ids: Sequence[int]) -> str:
    """``generation_config.json``: the base's, with what the run chose instead, and a turn's end among the tokens that
    end a text. SFT samples nothing, so it chooses nothing."""
    rollout = config.rollout.model_dump(include=config.rollout.model_fields_set)
    chosen: Json = {name: rollout[key] for key, name in _SAMPLING.items() if key in rollout}
    chosen |= {"top_k": max(rollout["top_k"], 0)} if "top_k" in rollout else {}
    if "temperature" in config.evaluation.model_fields_set:
        chosen["temperature"] = config.evaluation.temperature
    chosen |= {"do_sample": bool(chosen["temperature"])} if "temperature" in chosen else {}
    chosen = {} if config.sft else chosen
    found, shape = (_json(config.model.path / name) for name in (GENERATION, "config.json"))
    made: Json = {"transformers_version": installed_version("transformers")} | found | chosen
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if not _is_token(made.setdefault(key, shape.get(key))):
            del made[key]
    known: Any = made.get("eos_token_id", [])
    ends = [*dict.fromkeys([*stop_token_ids, *(known if isinstance(known, list) else [known])])]
    made |= {"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {}
    if chosen.get("do_sample") is False:
        made = {key: value for key, value in made.items() if key not in ("temperature", "top_p", "top_k", "min_p")}
    return json.dumps(made, indent=2, allow_nan=False) + "\n"


def model_card(config: ExperimentConfig, step: int, provenance: Json) -> str:
    """``README.md`` of an export, with the front matter that the Hugging Face Hub reads."""
    before, after = _evaluations(config.output, 0, "first"), _evaluations(config.output, step, "final")
    domains, base, sft = list(config.environment.shares), _base_id(config.model.path), config.sft is not None
    results = [
        EvalResult(
            task_type="text-generation",
            task_name="Multi-turn tool use",
            dataset_type="/".join(domains),
            dataset_name=tasks,
            dataset_split=split,
            metric_type="success",
            metric_value=round(mean, 4),
            metric_name=f"success, {shown}",
        )
        for tasks, (split, mean, shown) in after.items()
    ]
    matter = ModelCardData(
        base_model=base,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[TAG, "sft" if sft else "reinforcement-learning", "tool-use", "multi-turn"],
        model_name=config.name,
        eval_results=results or None,
        **{key: value for key, value in _base_matter(config.model.path).items() if key in _KEPT},
    )
    kinds = [kind for kind in _json(config.model.path / "config.json").get("architectures") or () if _simple(kind)]
    path = config.model.path  # an earlier run's export is called by that run's folder
    name = base or (path.parent if path.name == "hf" else path).name or "a model without a name"
    how, within = (
        ("Supervised fine-tuning", "on recorded conversations")
        if sft
        else ("Reinforcement learning", "in " + ", ".join(f"`{_code(domain)}`" for domain in domains))
    )
    summary = (
        f"{how} of `{_code(name)}`{f' ({_plain(kinds[0])})' if kinds else ''} as an agent that talks with users and "
        f"calls tools, {step:,} steps {within}."
    )
    making = "\n".join(f"- {line}" for line in _making(config, provenance))
    parts = [f"---\n{matter.to_yaml()}\n---", f"# {_plain(config.name)}", summary, "## Evaluation"]
    parts += [*_evaluation(config, before, after), "## How it was made", making, "## Use", _USE]
    return "\n\n".join(parts) + "\n"


_Successes = dict[str, tuple[str, float, str]]
"""By tasks, in words: the split, the mean of success, and mean and interval in words."""


def _evaluations(run: Path, step: int, part: str) -> _Successes:
    """Success of the policy after ``step`` steps, from the run's evaluations and the ``part`` of its report."""
    known: dict[str, Any] = {}
    for line in read_metrics(run / EVALUATIONS_FILE) if (run / EVALUATIONS_FILE).is_file() else ():
        known |= line if line.get("step") == step else {}
    reported = _json(run / REPORT_FILE).get(part)
    known |= reported if isinstance(reported, dict) and reported.get("step") == step else {}
    found: _Successes = {}
    for name in known:
        values = [known.get(f"{name}{end}") for end in ("", "_low", "_high")]
        if (match := _EVALUATED.fullmatch(name)) and all(map(is_number, values)):
            everything = "domains not trained on" if match["held_out"] else "all domains trained on"
            mean, low, high = map(float, values)  # type: ignore[arg-type]
            shown = f"{mean:.3f} ({low:.3f} to {high:.3f})"
            found[f"{match['domain'] or everything}, {match['split']}"] = match["split"], mean, shown
    return found


def _evaluation(config: ExperimentConfig, before: _Successes, after: _Successes) -> Iterator[str]:
    if not after:
        yield "This policy was not evaluated by its run. `mua eval` measures it on held-out tasks."
        return
    settings = config.evaluation
    yield (
        f"Share of tasks that the environment's own check calls solved, with {100 * settings.level:g} % intervals over "
        f"tasks; episodes per task: {settings.samples}, at temperature {settings.temperature:g}."
    )
    rows = [f"| {_plain(tasks)} | {before[tasks][2] if tasks in before else ''} | {shown} |"
            for tasks, (_, _, shown) in after.items()]  # fmt: skip
    yield "\n".join(["| tasks | before training | this policy |", "| --- | --- | --- |", *rows])
    if config.trainer.export == "best" and any(split == settings.split for split, _, _ in after.values()):
        yield f"The step was chosen by success on `{settings.split}`, so that split's numbers flatter it."


def _making(config: ExperimentConfig, provenance: Json) -> Iterator[str]:
    algorithm, optimizer, model = config.algorithm, config.optimizer, config.model
    if config.sft:
        source = Path(str(config.sft.data or (config.sft.stored.store if config.sft.stored else "")))
        yield f"conversations of `{_code(source.name)}`, {config.sft.batch_size} per step"
    else:
        mixed = ", ".join(f"`{_code(name)}` {weight:g}" for name, weight in config.environment.mix.items())
        yield "tasks of the split `train`" + (f", drawn by weight: {mixed}" if mixed else "")
        yield f"user: {_plain(config.user.kind)}" + (f" (`{_code(config.user.llm.model)}`)" if config.user.llm else "")
        yield (
            f"{algorithm.groups_per_step} groups of {algorithm.group_size} episodes per step; advantage "
            f"{algorithm.advantage}, loss {algorithm.loss}, clip {algorithm.clip_low} and {algorithm.clip_high}, "
            f"KL coefficient {algorithm.kl_coefficient}"
        )
        if stale := config.trainer.max_staleness:
            yield f"at most {stale} steps of staleness, correction {algorithm.correction}"
    yield f"learning rate {optimizer.learning_rate}, schedule {optimizer.schedule}"
    yield f"{model.dtype}, contexts of at most {model.max_length} tokens; seed {config.seed}"
    versions: Mapping[str, str | None] = provenance.get("versions") or {}
    yield ", ".join(f"{name} {versions[name]}" for name in _VERSIONS if versions.get(name)) or "versions unknown"
    if git := provenance.get("git"):
        yield f"commit `{_code(str(git.get('commit')))}`" + (", with changes" if git.get("dirty") else "")


def _base_id(base: Path) -> str | None:
    """The base's name on the Hub, where it can be told: from the Hub's cache, or from the card of an earlier export."""
    for part in reversed(base.parts):
        if found := _HUB_CACHE.fullmatch(part):
            return "/".join(found.groups())
    matter = _base_matter(base)
    named = matter.get("base_model") if TAG in matter.get("tags", ()) else None
    return named if isinstance(named, str) and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", named) else None


def _base_matter(base: Path) -> Json:
    """The front matter of the base's card; nothing of one that cannot be read, as it is somebody else's text."""
    try:
        found = metadata_load(base / CARD)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return {key: value for key, value in (found or {}).items() if _simple(value)}


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


def _json(path: Path) -> Json:
    """An object that the base or the run has as a file, if any. One that cannot be read is told of in the log: it is
    no reason to lose an export."""
    if not path.exists():
        return {}
    try:
        if isinstance(found := read_json(read_file(path)), dict):
            return found
        reason = "no JSON object"
    except (JsonError, OSError) as error:
        reason = str(error)
    log.warning("%s: cannot be read (%s): the export says nothing of it", path, reason)
    return {}


def _plain(text: str) -> str:
    """``text`` as Markdown of one line that means nothing else."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    """``text`` for between backticks."""
    return " ".join(text.replace("`", "'").replace("|", "/").split())
