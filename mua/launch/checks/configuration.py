"""What can be known about a run before anything of it is built; see :mod:`mua.launch.checks`.

Nothing is written, no endpoint is asked and no weight is read.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from mua.config.environment import NO_DOMAIN
from mua.config.load import Reading, read_config
from mua.config.messages import Problem
from mua.config.schema import EnvironmentConfig, ExperimentConfig
from mua.launch.checks import CHECKS, Check, Start, State, Verb, failure, is_key, listed, ok, raised, run_check, warning
from mua.utils.errors import TOOL_SERVERS, ConfigError, MuaError, find_missing, one_line
from mua.utils.hooks import check_hooks, is_hook
from mua.utils.masking import mask_secrets

OPTIMIZER_BYTES = 12
"""Of one parameter in a checkpoint: Adam's two moments and the main weight, float32 each."""
LONGER_CONTEXT = ("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "SGLANG_IS_IN_CI")
"""Variables with which SGLang serves contexts longer than a model says it has."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LOCAL_FOLDERS = ("models", "runs", "data", "checkpoints", "tools", "out", "output", ".", "..", "/")
_NETWORK_LOCAL = ("127.0.0.1", "localhost", "::1", "0.0.0.0")
_PLAYED = ("environment", "evaluation", "user", "judge")


def _plays(start: Start) -> bool:
    return start.plays


def _trains(start: Start) -> bool:
    return start.verb in ("train", "sft")


def _is_checkpoint(start: Start) -> bool:
    """Whether ``mua eval`` is to evaluate a checkpoint of training."""
    return start.verb == "eval" and (start.config.model.path / "manifest.json").is_file()


def _reads_config(start: Start) -> bool:
    """Whether ``model.path`` is a Hugging Face folder."""
    return start.has_model and not _is_checkpoint(start)


# ---- domains, users, tools


@listed("hooks", *_PLAYED, "algorithm", "agent", "model", "trainer")
def check_hook_paths(start: Start) -> Iterator[Check]:
    """Every hook exists and has the signature of its kind."""
    yield from raised(lambda: check_hooks(start.config))


@listed("domain", *_PLAYED, applies=_plays)
def check_domains(start: Start) -> Iterator[Check]:
    """Every domain is known and takes its settings."""
    from mua.environment.registry import domain_names, get_domain
    from mua.environment.selection import Selection

    config, known = start.config, domain_names()
    key = "environment.mix" if config.environment.mix else "environment.name"
    wanted = dict.fromkeys(config.environment.shares, key)
    wanted |= dict.fromkeys([name for name in config.evaluation.domains if name not in wanted], "evaluation.domains")
    if start.verb == "eval" and config.evaluation.domains:
        wanted = {name: key for name, key in wanted.items() if name in config.evaluation.domains}
    unknown = [name for name in wanted if name not in known and not is_hook(name)]
    for name in unknown:
        parts = [part.strip() for part in re.split(r"[,+ ]+", name) if part.strip()]
        names = {other.rpartition("/")[2]: other for other in known} | {other: other for other in known}
        near = difflib.get_close_matches(name.lower().replace("-", "_").strip(), names, n=1, cutoff=0.5)
        text = f"unknown environment {name!r}; known: {', '.join(known)}"
        hint = f"did you mean {names[near[0]]!r}?" if near else "mua env list shows all"
        if name == NO_DOMAIN and wanted[name] == "environment.name":
            text = f"required by mua {start.verb}, but not set"
            hint = "name a domain, such as retail: mua env list shows all"
        elif len(parts) > 1 and all(part in known for part in parts):
            shares = ", ".join(f"{part}: 1" for part in parts)
            hint = f"several domains are a mix: environment.mix={{{shares}}}"
        yield failure(wanted[name], text, hint)
    if unknown:
        return
    for name in wanted:
        get_domain(name)
    for environment, services in _selections(start):
        Selection.from_config(environment, services)
    yield ok(", ".join(wanted))


def _selections(start: Start) -> Iterator[tuple[EnvironmentConfig, Any]]:
    """The environments that a run opens, each with clients of user and judge that no one is asked with, and no cache is
    opened for."""
    from mua.environment.endpoint.services import Services
    from mua.environment.selection import environment_of

    def without_cache(section: Any) -> Any:
        if section is None or section.llm is None:
            return section
        return section.model_copy(update={"llm": section.llm.model_copy(update={"cache": None})})

    config, names = start.config, start.config.evaluation.domains
    services = Services.from_config(without_cache(config.user), without_cache(config.judge))
    try:
        if start.verb == "eval" and names:
            yield environment_of(names, config.environment, config.evaluation), services
            return
        yield config.environment, services
        held_out = [name for name in names if name not in config.environment.shares]
        if start.verb == "train" and config.evaluated_splits and held_out:
            yield environment_of(held_out, config.environment, config.evaluation), services
    finally:
        asyncio.run(services.close())


@listed("user", "user", "agent", "context", "evaluation", applies=_plays)
def check_users(start: Start) -> Iterator[Check]:
    """The user's files, personas and factory are there, and the agent that plays in the policy's name."""
    from mua.users.personas import load_prompt, personas_named

    config, user, agent = start.config, start.config.user, start.config.agent
    yield from raised(lambda: personas_named(user.personas))
    yield from raised(lambda: load_prompt(user.prompt))
    if user.kind == "replay" and user.replay is not None and not user.replay.is_file():
        yield failure("user.replay", f"{user.replay} is no file", "give a trace file (JSON lines)")
    if agent is None:
        return
    if agent.command and shutil.which(agent.command[0]) is None:
        text = f"there is no program {agent.command[0]!r}"
        yield failure("agent.command", text, "give its path, or put it on PATH")
    if not start.has_model:
        yield failure("agent", "an agent of its own plays with a checkpoint through the engine, no other policy")
    if config.context.strategy != "off" or config.context.stop_on_repetition is not None:
        yield failure("context", "an agent of its own keeps its context itself", "leave the section out")


@listed("tools", "environment", applies=_plays)
def check_tools(start: Start) -> Iterator[Check]:
    """Programs and folders of tool servers, and the package that they need."""
    servers = start.config.environment.mcp
    if servers and (missing := find_missing(TOOL_SERVERS)):
        yield failure("environment.mcp", missing)
    for place, server in enumerate(servers):
        key, beside = f"environment.mcp.{place}", str((server.cwd or Path()) / server.command)
        if server.cwd is not None and not server.cwd.is_dir():
            yield failure(f"{key}.cwd", f"there is no folder {server.cwd}")
        elif server.command and not any(map(shutil.which, (server.command, beside))):
            text = f"server {server.name!r}: there is no program {server.command!r}"
            yield failure(f"{key}.command", text, "give its path, or put it on PATH")


@listed("endpoints", "user", "judge", "algorithm", "offline")
def check_addresses(start: Start) -> Iterator[Check]:
    """Addresses that can be ones, and models that have a name. Nobody is asked."""
    config = start.config
    for name, endpoint in start.endpoints.items():
        yield from _address(f"{name}.base_url", endpoint.base_url, start)
        if not endpoint.model.strip():
            yield failure(f"{name}.model", "is empty", "name a model that the endpoint serves")
    teacher = config.algorithm.distillation
    if start.verb == "train" and teacher is not None and not (config.offline and config.offline.recorded_teacher):
        yield from _address("algorithm.distillation.base_url", teacher.base_url, start)
    yield ok(", ".join(start.endpoints))


def _address(key: str, url: str, start: Start) -> Iterator[Check]:
    shown = mask_secrets(url) or "an empty text"
    try:
        address = urlsplit(url)
        host, _ = address.hostname, address.port
    except ValueError as error:
        yield failure(key, f"{shown!r} is no address: {error}", "write http://HOST:PORT/v1")
        return
    if address.scheme not in ("http", "https") or not host:
        yield failure(key, f"{shown!r} is no address", "write http://HOST:PORT/v1, or export the variable it takes")
    elif address.path.rstrip("/").endswith("/completions"):
        yield warning(key, "ends in /completions, which is added to it", "it usually ends in /v1")
    elif host in _NETWORK_LOCAL and start.launched:
        text = f"{shown} is the node that trainer rank 0 runs on, whichever that becomes"
        fix = "export MUA_USER_BASE_URL, or name the address file of slurm/serve_user.sbatch in slurm.user_address"
        yield warning(key, text, fix)


@listed("recordings", "sft", "offline", "environment")
def check_recordings(start: Start) -> Iterator[Check]:
    """What is learned from is there."""
    config, sft = start.config, start.config.sft if start.verb == "sft" else None
    if start.verb == "sft" and sft is None:
        yield failure("sft", "required by mua sft, but not set", "give sft.data a file, or sft.stored a store")
        return
    if sft is not None:
        yield from _recorded("sft.data", sft.data)
        yield from _recorded("sft.validation", sft.validation)
        if sft.short_first_steps >= config.trainer.steps:
            text = f"{sft.short_first_steps} of {config.trainer.steps} steps use the shortest conversations alone"
            yield warning("sft.short_first_steps", text)
    stored, offline = sft.stored if sft else None, config.offline if start.offline else None
    for key, source in (("sft.stored.store", stored), ("offline.store", offline)):
        if source is not None and "://" not in source.store and not Path(source.store).exists():
            fix = "give a run's output folder, its store.sqlite or a URL"
            yield failure(key, f"{source.store} does not exist", fix)
    data = config.environment.data
    if start.plays and data is not None and not data.exists():
        yield failure("environment.data", f"{data} does not exist")


def _recorded(key: str, place: Path | float | None) -> Iterator[Check]:
    if not isinstance(place, Path):
        return
    if not place.exists():
        fix = "give a file of conversations (docs/sft.md lists the forms)"
        if not place.suffix and (hub := hub_name(place)) is not None:
            fix = f"download it: hf download --repo-type dataset {hub} --local-dir data/{place.name}"
        yield failure(key, f"{place} does not exist", fix)
    elif place.is_file() and place.stat().st_size == 0:
        yield failure(key, f"{place} is empty")
    elif not os.access(place, os.R_OK):
        yield failure(key, f"{place} cannot be read by this user")


# ---- the policy


@listed("model", "model", applies=lambda start: start.has_model)
def check_model(start: Start) -> Iterator[Check]:
    """The folder holds a model of a family that is known here, with weights and a tokenizer."""
    from mua.megatron.architecture import architecture_of
    from mua.tokens.chat_family import family_class, family_of_folder, has_chat_template, template_advice

    model, folder = start.config.model, start.config.model.path
    if model.shrink:
        architecture_of(model)
        return
    if _is_checkpoint(start):
        yield ok(f"{folder}, a checkpoint")
        return
    if missing := _no_folder(folder):
        yield missing
        return
    problems = list(raised(lambda: architecture_of(model)))
    yield from (failure("model.path", f"{folder}: {check.advice.removeprefix('model: ')}") for check in problems)
    yield from _weights(folder)
    if (folder / "adapter_config.json").is_file():
        text = f"{folder} has an adapter_config.json, and no adapter is applied to the weights"
        yield warning("model.path", text, "merge the adapter into them first (merge_and_unload of peft)")
    if not (folder / "tokenizer.json").is_file():
        fix = "copy the tokenizer's files from the checkpoint it was made of"
        yield failure("model.path", f"{folder} has no tokenizer.json", fix)
    try:
        family = family_of_folder(folder) if model.chat_family is None else family_class(model.chat_family)
    except MuaError as error:
        yield failure("model.path", str(error), "docs/families.md lists what can be trained")
        return
    if not has_chat_template(folder):
        yield failure("model.path", template_advice(folder, family))
    elif not problems:
        yield ok(f"{folder}, chat family {family.name}")


def _no_folder(folder: Path) -> Check | None:
    if (folder / "config.json").is_file():
        return None
    if folder.is_file():
        return failure("model.path", f"{folder} is a file", "give the folder that holds config.json")
    if folder.is_dir():
        inside = next((f"; its folder {one.parent.name} has one" for one in folder.glob("*/config.json")), "")
        text = f"{folder} has no config.json, so it is no Hugging Face model folder{inside}"
        return failure("model.path", text, "give the folder that holds config.json, weights and tokenizer")
    fix = "give a Hugging Face model folder: config.json, *.safetensors, tokenizer files"
    if (hub := hub_name(folder)) is not None:
        target = folder if folder.parts[0] in _LOCAL_FOLDERS else Path("models") / folder.name
        change = "" if target == folder else f", and set model.path={target}"
        fix = f"download it: hf download {hub} --local-dir {target}{change}"
    return failure("model.path", f"{folder} does not exist", fix)


def hub_name(folder: Path) -> str | None:
    """What a relative path that is not there may be called on the Hugging Face Hub; None where nothing suggests it."""
    if not _HUB_NAME.fullmatch(str(folder)):
        return None
    if folder.parts[0] not in _LOCAL_FOLDERS:
        return str(folder)
    return f"Qwen/{folder.name}" if folder.name.startswith("Qwen") else None


def _weights(folder: Path) -> Iterator[Check]:
    """The files that the index names are there, and are no pointers to what was not downloaded."""
    index, files = folder / "model.safetensors.index.json", list(folder.glob("*.safetensors"))
    if index.is_file():
        try:
            told = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            yield failure("model.path", f"{index} cannot be read ({one_line(error)})", "download it again")
            return
        if missing := [name for name in told if not (folder / str(name)).is_file()]:
            text = f"{folder} lacks {len(missing)} of {len(told)} weight files, such as {missing[0]}"
            yield failure("model.path", text, "download the rest")
            return
    elif not files:
        yield failure("model.path", f"{folder} has no *.safetensors", "convert or download the weights as safetensors")
    for path in files:
        with path.open("rb") as file:
            if file.read(40).startswith(b"version https://git-lfs"):
                yield failure("model.path", f"{path} is a pointer of Git LFS", "run git lfs pull in the folder")
                return


@listed("context", "model", "engine", applies=_reads_config)
def check_context(start: Start) -> Iterator[Check]:
    """The engine's context is one that the model has."""
    from megatron_bridge.hf_config import read_hf_config

    folder, length = start.config.model.path, start.config.model.max_length
    if not (folder / "config.json").is_file() or start.config.model.shrink:
        return
    longest = longest_context(read_hf_config(folder))
    if longest is None or length <= longest:
        yield ok(f"model.max_length {length} of {longest}")
        return
    text = f"{length} exceeds the {longest} positions that {folder / 'config.json'} has (max_position_embeddings)"
    if not start.has_engines:
        yield warning("model.max_length", text, "longer conversations meet positions the model never saw")
    elif "json_model_override_args" in start.config.engine.extra or any(map(os.environ.get, LONGER_CONTEXT)):
        yield warning("model.max_length", text)
    else:
        yield failure("model.max_length", f"{text}, so that no engine starts", f"set it to {longest} at most")


def longest_context(hf_config: Mapping[str, Any]) -> int | None:
    """The longest context that SGLang serves a model with (``get_context_length`` of 0.5.23): its positions, times the
    factor of its rotary scaling where that is not counted in already; None where config.json names none."""
    from megatron_bridge.hf_config import context_length, rotary_parameters

    length, rope = context_length(hf_config), rotary_parameters(hf_config)
    counted = "original_max_position_embeddings" in rope or rope["rope_type"] == "llama3"
    return length and int(length * (1 if counted else rope.get("factor", 1)))


# ---- layout and schedule


@listed("layout", "model", "megatron", "engine", applies=_reads_config)
def check_divisions(start: Start) -> Iterator[Check]:
    """The model divides over trainer ranks and engine ranks, and a run has proven the layout."""
    from mua.launch.plan.layout import engine_problems
    from mua.megatron.architecture import architecture_of
    from mua.megatron.layouts import check_layout, problems

    config, model, layout = start.config, start.config.model, start.config.megatron
    if not model.shrink and _no_folder(model.path) and model.hf_config is None:
        yield from raised(lambda: check_layout(layout)) if start.trains else ()
        return
    try:
        architecture = architecture_of(model)
    except MuaError:  # which the check of the model tells
        return
    # A small policy (model.shrink) takes its sizes from the layout.
    if start.trains and not model.shrink and (found := list(problems(architecture, layout))):
        yield from (failure("", line) for line in found)
    elif start.trains:
        yield from raised(lambda: check_layout(layout, moe=architecture.experts > 0))
    if start.has_engines and not model.shrink:
        yield from (failure("", line) for line in engine_problems(architecture, config))


@listed(
    "machines", "megatron", "engine", "placement", "slurm",
    applies=lambda start: start.has_model and (start.trains or start.launched),
)  # fmt: skip
def check_machines(start: Start) -> Iterator[Check]:
    """There are GPUs for the ranks of the layout and for the engines."""
    from mua.engine.cluster import check_trainer_machine, local_ranks, visible_gpus
    from mua.engine.server import refuse_expandable_segments
    from mua.launch.slurm import place_job

    config, verb = start.config, start.verb
    if start.launched:
        gpus, tp = config.slurm.gpus_per_node, config.megatron.tensor_parallel
        if gpus and start.trains and tp > gpus:
            text = f"{tp} spans nodes of {gpus} GPUs (slurm.gpus_per_node); its collectives run in every layer"
            fix = f"set it to {gpus} at most, and use megatron.pipeline_parallel"
            yield failure("megatron.tensor_parallel", text, fix)
        yield from raised(lambda: place_job(config, verb))
        if start.has_engines and gpus and config.placement == "colocated":
            yield from _engines_on(gpus, config, f"slurm.gpus_per_node {gpus}")
        return
    here, world = visible_gpus(), config.megatron.world_size if start.trains else 1
    given = os.environ.get("WORLD_SIZE")
    if start.trains and given is not None and given != str(world):
        text = f"the layout needs {world} processes (tensor x pipeline x context x data parallel), {given} were started"
        yield failure("megatron", text, "change megatron.data_parallel or the launcher")
    elif start.trains and given is None and here and world > here:
        text = f"the layout needs {world} processes with a GPU each, and this machine shows {here}"
        yield failure("megatron", text, "lower its sizes, or start it on more machines (mua launch slurm)")
    elif verb == "train" and not start.offline:
        ranks = local_ranks() if given is not None else world
        yield from raised(lambda: check_trainer_machine(config, ranks, here))
        if here and config.placement == "colocated":
            yield from _engines_on(here, config, f"this machine, which shows {here}")
    if start.has_engines and verb == "train":
        yield from raised(lambda: refuse_expandable_segments(config.engine))


def _engines_on(gpus: int, config: ExperimentConfig, where: str) -> Iterator[Check]:
    count, tp = config.engine.count, config.engine.tensor_parallel
    if count * tp > gpus:
        text = f"engine.count {count} x engine.tensor_parallel {tp} need {count * tp} GPUs, more than {where}"
        fix = f"set engine.count to {gpus // tp}" if tp <= gpus else f"set engine.tensor_parallel to {gpus} at most"
        yield failure("engine.count" if tp <= gpus else "engine.tensor_parallel", text, fix)
    elif free := gpus - count * tp:
        yield ok(f"{free} GPUs of {where} generate nothing")


@listed("schedule", "optimizer", "critic", "trainer", "algorithm", "rollout", "evaluation", applies=_trains)
def check_schedule(start: Start) -> Iterator[Check]:
    """The learning rate's course fits the steps of the run, and what is measured is what may be."""
    config, trainer = start.config, start.config.trainer
    policy, critic = config.optimizer_steps if start.verb == "train" else (trainer.steps, None)
    for section, optimizer, steps in (
        ("optimizer", config.optimizer, policy), ("critic.optimizer", config.critic.optimizer, critic),
    ):  # fmt: skip
        if steps is None or optimizer.warmup_steps < steps:
            continue
        text = f"{optimizer.warmup_steps} leaves none of the run's {steps} optimizer steps"
        if optimizer.schedule == "constant":
            yield warning(f"{section}.warmup_steps", f"{text} at the full learning rate")
        else:
            fix = f"lower it, or set {section}.schedule to constant"
            yield failure(f"{section}.warmup_steps", f"{text} to decay in", fix)
    if start.verb != "train":
        return
    if config.rollout.other_distribution and not config.rollout.allow_truncated_sampling and not start.offline:
        key = next(iter([*config.rollout.truncations, *config.rollout.penalties]))
        fix = "switch it off for training, or set rollout.allow_truncated_sampling to true (docs/algorithms.md)"
        yield failure(f"rollout.{key}", config.rollout.other_distribution, fix)
    if trainer.evaluate_every > trainer.steps:
        text = f"{trainer.evaluate_every} is beyond the run's {trainer.steps} steps"
        yield warning("trainer.evaluate_every", text)
    evaluation = config.evaluation
    evaluates = trainer.evaluate_first or trainer.evaluate_every > 0
    if evaluates and evaluation.split == "test" and not evaluation.test_in_training:
        text = "training would evaluate itself on the test split, which is then no test any more"
        fix = (
            "set evaluation.split to validation, and evaluation.report_split to test for numbers before the first step "
            "and after the last (evaluation.test_in_training: true allows it all the same)"
        )
        yield failure("evaluation.split", text, fix)


# ---- folders, tasks, template


@listed("output", "output", applies=lambda start: start.verb != "engines")
def check_output(start: Start) -> Iterator[Check]:
    """The output folder is there, or can be made, and can be written into."""
    folder = start.config.output
    above = _existing(folder)
    if not above.is_dir():
        yield failure("output", f"{above} is a file", "choose another folder")
    elif not os.access(above, os.W_OK | os.X_OK):
        yield failure("output", f"{above} cannot be written into by this user", "choose another folder")
    else:
        yield ok(str(folder))


def _existing(folder: Path) -> Path:
    """The folder, or the nearest around it that is there."""
    folder = folder.absolute()
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder


def checkpoint_bytes(config: ExperimentConfig) -> int:
    """Bytes of one checkpoint of the policy, by the parameters that its config.json makes."""
    from mua.megatron.architecture import architecture_of

    weight = 4 if config.model.dtype == "float32" else 2
    return architecture_of(config.model).parameters * (OPTIMIZER_BYTES + weight)


@listed("disk", "output", "model", "trainer", applies=lambda start: _trains(start) and not start.config.model.shrink)
def check_disk(start: Start) -> Iterator[Check]:
    """Room for the checkpoints that are kept and the one being written."""
    config, folder = start.config, _existing(start.config.output)
    if not os.access(folder, os.W_OK | os.X_OK):  # which the check of the output tells
        return
    try:
        one = checkpoint_bytes(config)
    except MuaError:  # which the check of the model tells
        return
    free, needed = shutil.disk_usage(folder).free, one * (config.trainer.keep + 1)
    text = f"{free / 1e9:.3g} GB free at {config.output}; a checkpoint is about {one / 1e9:.3g} GB"
    if free < one:
        yield failure("output", text, "make room, or choose another folder: not even one fits")
    elif free < needed:
        fix = f"trainer.keep {config.trainer.keep} and the one being written need {needed / 1e9:.3g} GB"
        yield warning("output", text, fix)
    else:
        yield ok(text)


@listed("tasks", *_PLAYED, on="late", applies=lambda start: start.plays and start.verb in ("train", "eval", "rollout"))
def check_tasks(start: Start) -> Iterator[Check]:
    """The splits that are played have tasks."""
    from mua.environment.selection import Selection

    config, evaluation, counts = start.config, start.config.evaluation, []
    for number, (environment, services) in enumerate(_selections(start)):
        selection = Selection.from_config(environment, services)
        wanted: dict[Literal["train", "validation", "test"], str] = {}
        if start.verb == "eval":
            wanted[evaluation.split] = "evaluation.split"
        elif number == 0:
            wanted["train"] = "environment"
        for split in config.evaluated_splits if start.verb == "train" else ():
            wanted.setdefault(split, f"evaluation.{'split' if split == evaluation.split else 'report_split'}")
        for split, key in wanted.items():
            parts = dict(
                zip(environment.shares, (len(tasks) for _, tasks in selection.shared_tasks(split)), strict=True)
            )
            counts += [f"{name}: {count} {split}" for name, count in parts.items()]
            empty = [name for name, count in parts.items() if not count]
            if empty and (split == "train" or number > 0 or len(empty) == len(parts)):
                of = f" of difficulty {', '.join(environment.difficulties)}" if environment.difficulties else ""
                yield failure(key, f"{', '.join(empty)} has no {split} tasks{of}", "choose another split or domain")
    yield ok(", ".join(counts))


@listed(
    "chat template", "model", on="late",
    applies=lambda start: _reads_config(start) and not start.config.model.shrink,
)  # fmt: skip
def check_template(start: Start) -> Iterator[Check]:
    """The folder's own chat template renders as the family does, in the mode that is asked for."""
    from mua.tokens.chat_family import load_family_of

    try:
        family = load_family_of(start.config.model)
    except MuaError as error:
        yield failure("model.path", str(error))
        return
    yield ok(f"that of {family.name}")


# ---- what a command does with them


def run_checks(start: Start) -> list[Check]:
    """Every check of a start that applies, in order; of one that found nothing one line ``ok``."""
    found: list[Check] = []
    for stage in ("start", "late"):
        if stage == "late" and (start.wrong or any(check.state == "failure" for check in found)):
            break
        for one in CHECKS:
            if one.on == stage and one.applies(start) and not one.reads & start.wrong:
                mine = run_check(one.name, partial(one.check, start), "warning")
                found += [check for check in mine if check.state != "ok"] or mine[:1] or [Check(one.name, "ok", "")]
    return found


@dataclass(frozen=True)
class Checked:
    """A configuration, and all that is known about starting it."""

    reading: Reading[ExperimentConfig]
    checks: list[Check]

    def problems(self, state: State = "failure") -> list[Problem]:
        """What is wrong, or with ``warning`` what is odd, with the place of each key."""
        found = [] if state == "warning" else list(self.reading.problems)
        for check in self.checks:
            if check.state == state:
                text = f"{check.text}; {check.fix}" if check.fix else check.text
                named = check.key or next(iter(re.findall(r"\b[a-z_]+(?:\.[a-z_0-9]+)+\b", check.text)), "")
                found.append(Problem(self.reading.place(named if is_key(named) else "name"), check.key, text))
        return found

    def refuse(self) -> ExperimentConfig:
        """The configuration.

        Raises:
            ConfigError: all that is wrong, a line each.
        """
        if problems := self.problems():
            raise ConfigError("\n".join(dict.fromkeys(map(str, problems))))
        assert self.reading.config is not None, "a configuration without problems is one"
        return self.reading.config

    def as_json(self) -> dict[str, Any]:
        """For programs: whether the run can start, what is wrong and odd, and every check by name."""
        return {
            "ok": not self.problems(),
            "problems": [asdict(problem) for problem in self.problems()],
            "warnings": [asdict(problem) for problem in self.problems("warning")],
            "checks": [asdict(check) for check in self.checks],
        }

    def table(self) -> str:
        """For people."""
        problems = dict.fromkeys(f"failure  {problem}" for problem in self.problems())
        warnings = dict.fromkeys(f"warning  {problem}" for problem in self.problems("warning"))
        fine = [check.line().rstrip() for check in self.checks if check.state == "ok"]
        return "\n".join([*problems, *warnings, *fine, f"failures: {len(problems)}, warnings: {len(warnings)}"])


def check_start(path: Path, overrides: Sequence[str], verb: Verb) -> Checked:
    """Read a configuration and check what ``verb`` would start here.

    Raises:
        ConfigError: a file cannot be read or is no YAML.
    """
    return check_reading(read_config(path, overrides, ExperimentConfig, verb), verb)


def check_reading(reading: Reading[ExperimentConfig], verb: Verb, *, launched: bool = False) -> Checked:
    """Check what was read; ``launched``: of a job that is to be submitted."""
    config = reading.config or reading.partial
    if config is None:
        return Checked(reading, [])
    return Checked(reading, run_checks(Start(config, verb, launched, reading.wrong)))


def check_service(model: Path, tensor_parallel: int) -> list[Check]:
    """What ``mua serve`` needs of a model folder; SGLang knows more families than can be trained here."""
    from mua.engine.cluster import visible_gpus

    if missing := _no_folder(model):
        return [missing]
    found = list(_weights(model))
    if not (model / "tokenizer_config.json").is_file() and not (model / "tokenizer.json").is_file():
        found.append(failure("", f"{model} has no tokenizer", "copy tokenizer.json and tokenizer_config.json into it"))
    try:
        heads = json.loads((model / "config.json").read_text(encoding="utf-8")).get("num_attention_heads")
    except (OSError, ValueError, AttributeError) as error:
        return [*found, failure("", f"{model / 'config.json'} cannot be read ({one_line(error)})")]
    if tensor_parallel < 1 or (isinstance(heads, int) and heads % tensor_parallel):
        text = f"{tensor_parallel} does not divide the model's {heads} attention heads"
        found.append(failure("", f"--tensor-parallel {text}", "choose a divisor"))
    if (gpus := visible_gpus()) and tensor_parallel > gpus:
        found.append(failure("", f"--tensor-parallel {tensor_parallel} needs so many GPUs, this machine shows {gpus}"))
    return found
