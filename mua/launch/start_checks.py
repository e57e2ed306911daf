"""What can be known about a run before anything of it is built: one list, for every verb, preflight and launches.

::

    mua VERB CONFIG            ─┐                                  ┌─► a failure refuses, all of them at once
    mua VERB CONFIG --check    ─┤                                  ├─► a table, or JSON
    mua launch slurm CONFIG    ─┼─► read_start ─► checked(start) ──┤   failures refuse the submission
    mua doctor preflight       ─┘                                  └─► lines of the node's table

Nothing is written, no endpoint is asked and no weight is read. The checks that read much (all tasks of a domain, the
tokenizer) come last, and only where all others found nothing: the run reads the same afterwards.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from mua.config.environment import NO_DOMAIN
from mua.config.load import Reading, read_config
from mua.config.messages import Problem
from mua.config.schema import EndpointConfig, EnvironmentConfig, ExperimentConfig
from mua.launch.checks import Check, State
from mua.utils.errors import ConfigError, MuaError, one_line
from mua.utils.masking import mask_credentials
from mua.utils.optional_deps import TOOL_SERVERS, advice, lacking

Verb: TypeAlias = Literal["train", "sft", "eval", "rollout", "gateway", "sync", "engines"]
OPTIMIZER_BYTES = 12
"""Of one parameter in a checkpoint: Adam's two moments and the main weight, float32 each."""
LONGER_CONTEXT = ("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "SGLANG_IS_IN_CI")
"""Variables with which SGLang serves contexts longer than a model says it has."""
_KEY = re.compile(r"([a-z_]+(?:\.[\w/-]+)*): ")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LOCAL_FOLDERS = ("models", "runs", "data", "checkpoints", "tools", "out", "output", ".", "..", "/")
_NETWORK_LOCAL = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


@dataclass(frozen=True)
class Start:
    """What is to be started."""

    config: ExperimentConfig
    verb: Verb
    gpus_per_node: int | None = None
    """Of a job that is to be submitted; None: on this machine, whose GPUs count."""
    wrong: frozenset[str] = frozenset()
    """Sections of the configuration that are wrong by themselves: ``config`` has defaults there."""

    @property
    def launched(self) -> bool:
        """Whether it is to run on other machines."""
        return self.gpus_per_node is not None

    @property
    def offline(self) -> bool:
        """Whether stored groups are trained on."""
        return self.verb == "train" and self.config.offline is not None

    @property
    def plays(self) -> bool:
        """Whether episodes are played."""
        return self.verb in ("train", "eval", "rollout", "gateway", "sync") and not self.offline

    @property
    def has_model(self) -> bool:
        """Whether the policy is a folder of ours, and no endpoint."""
        return self.verb != "eval" or self.config.evaluation.policy.kind == "engine"

    @property
    def trains(self) -> bool:
        """Whether the section ``megatron`` is used."""
        return self.verb in ("train", "sft", "sync")

    @property
    def has_engines(self) -> bool:
        """Whether SGLang servers are started."""
        return self.has_model and (self.plays or self.verb == "engines")


def failure(key: str, text: str, fix: str = "", *, name: str = "") -> Check:
    """A check that failed."""
    return Check(name, "failure", text, fix, key)


def warning(key: str, text: str, fix: str = "") -> Check:
    """A check that found something odd, which may be meant."""
    return Check("", "warning", text, fix, key)


@dataclass(frozen=True)
class Listed:
    """One entry of the list."""

    name: str
    check: Callable[[Start], Iterator[Check]]
    reads: frozenset[str]
    """Sections that decide about its result."""
    applies: Callable[[Start], bool]
    last: bool = False
    """Whether it reads much, and is made only where the others found nothing."""


def checked(start: Start, *, everything: bool = True) -> list[Check]:
    """Every check that applies, in order; of one that found nothing one line ``ok``.

    ``everything`` makes those that read much too.
    """
    found: list[Check] = []
    for listed in CHECKS:
        if not listed.applies(start) or listed.reads & start.wrong:
            continue
        if listed.last and (not everything or start.wrong or any(check.state == "failure" for check in found)):
            continue
        mine = list(_guarded(listed, start))
        problems = [check for check in mine if check.state != "ok"]
        found += problems or mine[:1] or [Check(listed.name, "ok", "")]
    return found


def _guarded(listed: Listed, start: Start) -> Iterator[Check]:
    """Its checks with its name. What it raises for people is a failure; a fault of the check itself refuses no run."""

    def named(check: Check) -> Check:
        return Check(listed.name, check.state, mask_credentials(check.text), mask_credentials(check.fix), check.key)

    try:
        yield from map(named, listed.check(start))
    except MuaError as error:
        yield from map(named, _failures(error))
    except Exception as error:
        missing = advice(error)  # a login node that only submits needs no torch
        why = f"cannot be made here: {missing}" if missing else f"failed itself: {mask_credentials(one_line(error))}"
        yield Check(listed.name, "warning", f"the check of {listed.name} {why}")


def _failures(error: MuaError) -> Iterator[Check]:
    """One for each line of its message, with the key that the line begins with."""
    for line in str(error).splitlines():
        key = match[1] if (match := _KEY.match(line)) and _is_key(match[1]) else ""
        yield failure(key, line[len(key) + 2 :] if key else line)


def _is_key(text: str) -> bool:
    return text.partition(".")[0] in ExperimentConfig.model_fields


# ---- domains, users, tools


def _domains(start: Start) -> Iterator[Check]:
    """Every domain is known and takes its settings."""
    from mua.environment.registry import domain_names, get_domain

    config, known = start.config, domain_names()
    key = "environment.mix" if config.environment.mix else "environment.name"
    wanted = dict.fromkeys(config.environment.shares, key)
    wanted |= dict.fromkeys([name for name in config.evaluation.domains if name not in wanted], "evaluation.domains")
    if start.verb == "eval" and config.evaluation.domains:
        wanted = {name: key for name, key in wanted.items() if name in config.evaluation.domains}
    unknown = [name for name in wanted if name not in known]
    for name in unknown:
        yield _unknown_domain(wanted[name], name, start, known)
    if unknown:
        return
    for name in wanted:
        get_domain(name)
    for environment, services in _selections(start):
        from mua.environment.selection import Selection

        Selection.from_config(environment, services)
    yield Check("", "ok", ", ".join(wanted))


def _unknown_domain(key: str, name: str, start: Start, known: Sequence[str]) -> Check:
    import difflib

    verb = f"mua {start.verb}"
    if name == NO_DOMAIN and key == "environment.name":
        return failure(key, f"required by {verb}, but not set", "name a domain, such as retail: mua env list shows all")
    parts = [part.strip() for part in re.split(r"[,+ ]+", name) if part.strip()]
    if len(parts) > 1 and all(part in known for part in parts):
        shares = ", ".join(f"{part}: 1" for part in parts)
        return failure(key, f"unknown environment {name!r}", f"several domains are a mix: environment.mix={{{shares}}}")
    by_end = {other.rpartition("/")[2]: other for other in known}
    plain = name.lower().replace("-", "_").strip()
    near = by_end.get(plain) or next(iter(difflib.get_close_matches(plain, [*known, *by_end], n=1, cutoff=0.5)), None)
    hint = f"did you mean {by_end.get(near, near)!r}?" if near else "mua env list shows all"
    return failure(key, f"unknown environment {name!r}; known: {', '.join(known)}", hint)


@contextmanager
def _services(config: ExperimentConfig) -> Iterator[Any]:
    """Clients of user and judge that no one is asked with, and no cache is opened for."""
    import asyncio

    from mua.environment.endpoint.services import Services

    def bare(section: Any) -> Any:
        return section if section is None or section.llm is None else section.model_copy(
            update={"llm": section.llm.model_copy(update={"cache": None})}
        )  # fmt: skip

    services = Services.from_config(bare(config.user), bare(config.judge))
    try:
        yield services
    finally:
        asyncio.run(services.close())


def _selections(start: Start) -> Iterator[tuple[EnvironmentConfig, Any]]:
    """The environments that a run opens, each with the services it gets."""
    from mua.environment.selection import environment_of

    config = start.config
    with _services(config) as services:
        names = config.evaluation.domains
        if start.verb == "eval" and names:
            yield environment_of(names, config.environment, config.evaluation), services
            return
        yield config.environment, services
        held_out = [name for name in names if name not in config.environment.shares]
        if start.verb == "train" and config.evaluated_splits and held_out:
            yield environment_of(held_out, config.environment, config.evaluation), services


def _users(start: Start) -> Iterator[Check]:
    """The user's files, personas and factory are there, and the agent that plays in the policy's name."""
    from mua.users.factory import find_factory
    from mua.users.personas import load_prompt, personas_named

    config = start.config
    user = config.user
    for made in (lambda: personas_named(user.personas), lambda: load_prompt(user.prompt)):
        yield from _raised(made)
    if user.kind == "replay" and user.replay is not None and not user.replay.is_file():
        yield failure("user.replay", f"{user.replay} is no file", "give a trace file (JSON lines)")
    if ":" in user.kind:
        yield from _raised(lambda: find_factory(user.kind))
    if config.agent is not None:
        from mua.rollout.gateway.launch import check_agent

        agent = config.agent
        yield from _raised(lambda: check_agent(agent))
        if not start.has_model:
            yield failure("agent", "an agent of its own plays with a checkpoint through the engine, no other policy")
        if config.context.strategy != "off" or config.context.stop_on_repetition is not None:
            yield failure("context", "an agent of its own keeps its context itself", "leave the section out")


def _tools(start: Start) -> Iterator[Check]:
    """Programs and folders of tool servers, and the package that they need."""
    if start.config.environment.mcp and (missing := lacking(TOOL_SERVERS)):
        yield failure("environment.mcp", missing)
    for place, server in enumerate(start.config.environment.mcp):
        key = f"environment.mcp.{place}"
        if server.cwd is not None and not server.cwd.is_dir():
            yield failure(f"{key}.cwd", f"there is no folder {server.cwd}")
        elif server.command:
            places = (server.command, str((server.cwd or Path()) / server.command))
            if not any(map(shutil.which, places)):
                text = f"server {server.name!r}: there is no program {server.command!r}"
                yield failure(f"{key}.command", text, "give its path, or put it on PATH")


def _raised(call: Callable[[], object]) -> Iterator[Check]:
    """The failure that ``call`` raises, if it does, so that others are found too."""
    try:
        call()
    except MuaError as error:
        yield from _failures(error)


# ---- the policy


def _model(start: Start) -> Iterator[Check]:
    """The folder holds a model of a family that is known here, with weights and a tokenizer."""
    from mua.megatron.architecture import architecture_of
    from mua.tokens.family_loading import family_of_folder, has_chat_template, template_advice

    model, folder = start.config.model, start.config.model.path
    if model.shrink:
        architecture_of(model)
        return
    if _is_checkpoint(start):
        yield Check("", "ok", f"{folder}, a checkpoint")
        return
    if missing := _no_folder(folder):
        yield missing
        return
    problems = list(_raised(lambda: architecture_of(model)))
    yield from (failure("model.path", f"{folder}: {check.advice.removeprefix('model: ')}") for check in problems)
    yield from _weights(folder)
    if not (folder / "tokenizer.json").is_file():
        fix = "copy the tokenizer's files from the checkpoint it was made of"
        yield failure("model.path", f"{folder} has no tokenizer.json", fix)
    try:
        family = family_of_folder(folder)
    except MuaError as error:
        yield failure("model.path", str(error), "docs/families.md lists what can be trained")
        return
    if not has_chat_template(folder):
        yield failure("model.path", template_advice(folder, family))
    elif not problems:
        yield Check("", "ok", f"{folder}, chat family {family.name}")


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
    hub = hub_name(folder)
    if hub is not None:
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


def _is_checkpoint(start: Start) -> bool:
    """Whether ``mua eval`` is to evaluate a checkpoint of training."""
    return start.verb == "eval" and (start.config.model.path / "manifest.json").is_file()


def _weights(folder: Path) -> Iterator[Check]:
    """The files that the index names are there, and are no pointers to what was not downloaded."""
    index = folder / "model.safetensors.index.json"
    names = [path.name for path in folder.glob("*.safetensors")]
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
    elif not names:
        other = next(iter([*folder.glob("*.bin"), *folder.glob("*.gguf"), *folder.glob("*.pt")]), None)
        text = f"{folder} has no *.safetensors" + (f", only {other.name}" if other else "")
        yield failure("model.path", text, "convert or download the weights as safetensors")
        return
    for name in names:
        with (folder / name).open("rb") as file:
            if file.read(40).startswith(b"version https://git-lfs"):
                yield failure(
                    "model.path", f"{folder / name} is a pointer of Git LFS", "run git lfs pull in the folder"
                )
                return


def _template(start: Start) -> Iterator[Check]:
    """The folder's own chat template renders as the family does, in the mode that is asked for."""
    from mua.tokens.family_loading import load_family

    model = start.config.model
    try:
        family = load_family(model.path, thinking=model.thinking)
    except MuaError as error:
        yield failure("model.path", str(error))
        return
    yield Check("", "ok", f"that of {family.name}")


def _context(start: Start) -> Iterator[Check]:
    """The engine's context is one that the model has."""
    from megatron_bridge.hf_config import read_hf_config

    folder, length = start.config.model.path, start.config.model.max_length
    if not (folder / "config.json").is_file() or start.config.model.shrink:
        return
    longest = longest_context(read_hf_config(folder))
    if longest is None or length <= longest:
        yield Check("", "ok", f"model.max_length {length} of {longest}")
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
    keys = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
    lengths = [hf_config[key] for key in keys if isinstance(hf_config.get(key), int)]
    rope = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    counted = "original_max_position_embeddings" in rope or rope.get("rope_type") == "llama3"
    factor = 1 if counted else rope.get("factor") or 1
    return int(factor * max(lengths)) if lengths else None


# ---- layout and schedule


def _layout(start: Start) -> Iterator[Check]:
    """The model divides over trainer ranks and engine ranks, and a run has proven the layout."""
    from mua.launch.plan.layout import engine_problems
    from mua.megatron.architecture import architecture_of
    from mua.megatron.layouts import check_layout, problems

    config = start.config
    if not config.model.shrink and _no_folder(config.model.path) and config.model.hf_config is None:
        if start.trains:
            yield from _raised(lambda: check_layout(config.megatron))
        return
    try:
        architecture = architecture_of(config.model)
    except MuaError:  # which the check of the model tells
        return
    if config.model.shrink:
        from mua.megatron.architecture import Architecture

        assert isinstance(architecture, Architecture)  # the small policy takes its sizes from the layout
        yield from _raised(lambda: check_layout(config.megatron, moe=architecture.experts > 0)) if start.trains else ()
        return
    if start.trains:
        found = [failure("", line) for line in problems(architecture, config.megatron)]
        found = found or list(_raised(lambda: check_layout(config.megatron, moe=architecture.experts > 0)))
        yield from found
    if start.has_engines:
        yield from (failure("", line) for line in engine_problems(architecture, config))


def _machines(start: Start) -> Iterator[Check]:
    """There are GPUs for the ranks of the layout and for the engines."""
    yield from _of_job(start) if start.launched else _of_this_machine(start)


def _of_job(start: Start) -> Iterator[Check]:
    from mua.launch.job_nodes import placement

    config, gpus = start.config, start.gpus_per_node
    tp = config.megatron.tensor_parallel
    if gpus and start.trains and tp > gpus:
        text = f"{tp} spans nodes of {gpus} GPUs (slurm.gpus_per_node); its collectives run in every layer"
        yield failure("megatron.tensor_parallel", text, f"set it to {gpus} at most, and use megatron.pipeline_parallel")
    verb = "engines" if start.verb == "engines" else "sft" if start.verb == "sft" else "train"
    yield from _raised(lambda: placement(config, verb))  # type: ignore[arg-type]
    if start.has_engines and gpus and config.placement == "colocated":
        yield from _engines_on(gpus, config, f"slurm.gpus_per_node {gpus}")


def _of_this_machine(start: Start) -> Iterator[Check]:
    from mua.engine.placement import check_trainer_machine, local_ranks, visible_gpus

    config, gpus = start.config, visible_gpus()
    world = config.megatron.world_size if start.trains else 1
    given = os.environ.get("WORLD_SIZE")
    if start.trains and given is not None and given != str(world):
        text = f"the layout needs {world} processes (tensor x pipeline x context x data parallel), {given} were started"
        yield failure("megatron", text, "change megatron.data_parallel or the launcher")
    elif start.trains and given is None and gpus and world > gpus:
        text = f"the layout needs {world} processes with a GPU each, and this machine shows {gpus}"
        yield failure("megatron", text, "lower its sizes, or start it on more machines (mua launch slurm)")
    elif start.verb == "train" and not start.offline:
        ranks = local_ranks() if given is not None else world
        yield from _raised(lambda: check_trainer_machine(config, ranks, gpus))
        if gpus and config.placement == "colocated":
            yield from _engines_on(gpus, config, f"this machine, which shows {gpus}")
    if start.has_engines and start.verb == "train":
        from mua.engine.allocator import refuse_expandable_segments

        yield from _raised(lambda: refuse_expandable_segments(config.engine))


def _engines_on(gpus: int, config: ExperimentConfig, where: str) -> Iterator[Check]:
    count, tp = config.engine.count, config.engine.tensor_parallel
    if count * tp > gpus:
        text = f"engine.count {count} x engine.tensor_parallel {tp} need {count * tp} GPUs, more than {where}"
        fix = f"set engine.count to {gpus // tp}" if tp <= gpus else f"set engine.tensor_parallel to {gpus} at most"
        yield failure("engine.count" if tp <= gpus else "engine.tensor_parallel", text, fix)


def _schedule(start: Start) -> Iterator[Check]:
    """The learning rate's course fits the steps of the run, and what is measured is what may be."""
    config = start.config
    policy, critic = config.optimizer_steps if start.verb == "train" else (config.trainer.steps, None)
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
    if config.rollout.other_distribution and not config.rollout.unreproduced and not start.offline:
        key = next(iter([*config.rollout.truncations, *config.rollout.penalties]))
        fix = (
            "switch it off for training (mua eval may have it), or set rollout.unreproduced to true; "
            "docs/algorithms.md says what becomes of the ratios"
        )
        yield failure(f"rollout.{key}", config.rollout.other_distribution, fix)
    every = config.trainer.evaluate_every
    if every > config.trainer.steps:
        yield warning("trainer.evaluate_every", f"{every} is beyond the run's {config.trainer.steps} steps")
    evaluates = config.trainer.evaluate_first or every > 0
    if evaluates and config.evaluation.split == "test" and not config.evaluation.test_in_training:
        text = (
            "training would evaluate itself on the test split, and what it is tuned, stopped or chosen by is no test "
            "any more"
        )
        fix = (
            "set evaluation.split to validation, and evaluation.report_split to test for numbers before the first step "
            "and after the last (evaluation.test_in_training: true allows it all the same)"
        )
        yield failure("evaluation.split", text, fix)


# ---- endpoints, data, folders


def _endpoints(start: Start) -> Iterator[Check]:
    """Addresses that can be ones, and models that have a name. Nobody is asked."""
    config = start.config
    asked: dict[str, EndpointConfig] = {}
    for name, llm in config.language_models().items() if start.plays else ():
        asked[name] = llm
        asked |= {f"{name}.fallbacks.{place}": other for place, other in enumerate(llm.fallbacks)}
    if not start.has_model and (policy := config.evaluation.policy.endpoint) is not None:
        asked["evaluation.policy.endpoint"] = policy
    for name, endpoint in asked.items():
        yield from _address(f"{name}.base_url", endpoint.base_url, start)
        if not endpoint.model.strip():
            yield failure(f"{name}.model", "is empty", "name a model that the endpoint serves")
    teacher = config.algorithm.distillation
    if start.verb == "train" and teacher is not None and not (config.offline and config.offline.recorded_teacher):
        yield from _address("algorithm.distillation.base_url", teacher.base_url, start)
    yield Check("", "ok", ", ".join(asked))


def _address(key: str, url: str, start: Start) -> Iterator[Check]:
    try:
        address = urlsplit(url)
        host, _ = address.hostname, address.port
    except ValueError as error:
        yield failure(key, f"{mask_credentials(url)!r} is no address: {error}", "write http://HOST:PORT/v1")
        return
    if address.scheme not in ("http", "https") or not host:
        shown = mask_credentials(url) or "an empty text"
        yield failure(key, f"{shown!r} is no address", "write http://HOST:PORT/v1, or export the variable it takes")
    elif address.path.rstrip("/").endswith("/completions"):
        yield warning(key, "ends in /completions, which is added to it", "it usually ends in /v1")
    elif host in _NETWORK_LOCAL and start.launched:
        text = f"{mask_credentials(url)} is the node that trainer rank 0 runs on, whichever that becomes"
        fix = "export MUA_USER_BASE_URL, or name the address file of slurm/serve_user.sbatch in slurm.user_address"
        yield warning(key, text, fix)


def _recordings(start: Start) -> Iterator[Check]:
    """What is learned from is there."""
    config, sft = start.config, start.config.sft
    if start.verb == "sft":
        if sft is None:
            yield failure("sft", "required by mua sft, but not set", "give sft.data a file, or sft.stored a store")
            return
        for key, place in (("sft.data", sft.data), ("sft.validation", sft.validation)):
            if isinstance(place, Path):
                yield from _recorded(key, place)
        if sft.short_first_steps >= config.trainer.steps:
            text = f"{sft.short_first_steps} of {config.trainer.steps} steps use the shortest conversations alone"
            yield warning("sft.short_first_steps", text)
    sources = {"sft.stored.store": sft.stored if sft and start.verb == "sft" else None,
               "offline.store": config.offline if start.offline else None}  # fmt: skip
    for key, source in sources.items():
        if source is not None and "://" not in source.store and not Path(source.store).exists():
            yield failure(
                key, f"{source.store} does not exist", "give a run's output folder, its store.sqlite or a URL"
            )
    data = config.environment.data
    if start.plays and data is not None and not data.exists():
        yield failure("environment.data", f"{data} does not exist")


def _recorded(key: str, place: Path) -> Iterator[Check]:
    if not place.exists():
        fix = "give a file of conversations (docs/sft.md lists the forms)"
        if not place.suffix and (hub := hub_name(place)) is not None:
            fix = f"download it: hf download --repo-type dataset {hub} --local-dir data/{place.name}"
        yield failure(key, f"{place} does not exist", fix)
    elif place.is_file() and place.stat().st_size == 0:
        yield failure(key, f"{place} is empty")
    elif not os.access(place, os.R_OK):
        yield failure(key, f"{place} cannot be read by this user")


def _output(start: Start) -> Iterator[Check]:
    """The output folder is there, or can be made, and can be written into."""
    folder = start.config.output
    above = _existing(folder)
    if not above.is_dir():
        yield failure("output", f"{above} is a file", "choose another folder")
    elif not os.access(above, os.W_OK | os.X_OK):
        yield failure("output", f"{above} cannot be written into by this user", "choose another folder")
    else:
        yield Check("", "ok", str(folder))


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


def _disk(start: Start) -> Iterator[Check]:
    """Room for the checkpoints that are kept and the one being written."""
    config = start.config
    if not os.access(_existing(config.output), os.W_OK | os.X_OK):  # which the check of the output tells
        return
    try:
        one = checkpoint_bytes(config)
    except MuaError:  # which the check of the model tells
        return
    free = shutil.disk_usage(_existing(config.output)).free
    needed = one * (config.trainer.keep + 1)
    text = f"{free / 1e9:.3g} GB free at {config.output}; a checkpoint is about {one / 1e9:.3g} GB"
    state: State = "failure" if free < one else "warning" if free < needed else "ok"
    fix = {
        "failure": "make room, or choose another folder: not even one fits",
        "warning": f"trainer.keep {config.trainer.keep} and the one being written need {needed / 1e9:.3g} GB",
    }
    yield Check("", state, text, fix.get(state, ""), "output" if state != "ok" else "")


def _tasks(start: Start) -> Iterator[Check]:
    """The splits that are played have tasks."""
    from mua.environment.selection import Selection

    config, counts = start.config, []
    for number, (environment, services) in enumerate(_selections(start)):
        selection = Selection.from_config(environment, services)
        wanted: dict[Literal["train", "validation", "test"], str] = {}
        if start.verb == "eval":
            wanted[config.evaluation.split] = "evaluation.split"
        elif number == 0:
            wanted["train"] = "environment"
        if start.verb == "train":
            for split in config.evaluated_splits:
                wanted.setdefault(split, "evaluation.split" if split == config.evaluation.split else
                                  "evaluation.report_split")  # fmt: skip
        for split, key in wanted.items():
            parts = selection.shared_tasks(split)
            for name, (_, tasks) in zip(environment.shares, parts, strict=True):
                counts.append(f"{name}: {len(tasks)} {split}")
            empty = [name for name, (_, tasks) in zip(environment.shares, parts, strict=True) if not tasks]
            all_needed = split == "train" or number > 0
            if empty and (all_needed or len(empty) == len(parts)):
                of = f" of difficulty {', '.join(environment.difficulties)}" if environment.difficulties else ""
                yield failure(key, f"{', '.join(empty)} has no {split} tasks{of}", "choose another split or domain")
    yield Check("", "ok", ", ".join(counts))


def _reads_config(start: Start) -> bool:
    """Whether ``model.path`` is a Hugging Face folder."""
    return start.has_model and not _is_checkpoint(start)


_PLAYED = frozenset({"environment", "evaluation", "user", "judge"})
CHECKS: tuple[Listed, ...] = (
    Listed("domain", _domains, _PLAYED, lambda s: s.plays),
    Listed("user", _users, frozenset({"user", "agent", "context", "evaluation"}), lambda s: s.plays),
    Listed("tools", _tools, frozenset({"environment"}), lambda s: s.plays),
    Listed("endpoints", _endpoints, frozenset({"user", "judge", "algorithm", "offline"}), lambda s: True),
    Listed("recordings", _recordings, frozenset({"sft", "offline", "environment"}), lambda s: True),
    Listed("model", _model, frozenset({"model"}), lambda s: s.has_model),
    Listed("context", _context, frozenset({"model", "engine"}), _reads_config),
    Listed("layout", _layout, frozenset({"model", "megatron", "engine"}), _reads_config),
    Listed("machines", _machines, frozenset({"megatron", "engine", "placement", "slurm"}),
           lambda s: s.has_model and (s.trains or s.launched)),
    Listed("schedule", _schedule, frozenset({"optimizer", "critic", "trainer", "algorithm", "rollout", "evaluation"}),
           lambda s: s.verb in ("train", "sft")),
    Listed("output", _output, frozenset({"output"}), lambda s: s.verb != "engines"),
    Listed("disk", _disk, frozenset({"output", "model", "trainer"}),
           lambda s: s.verb in ("train", "sft") and not s.config.model.shrink),
    Listed("tasks", _tasks, _PLAYED, lambda s: s.plays and s.verb in ("train", "eval", "rollout"), last=True),
    Listed("chat template", _template, frozenset({"model"}),
           lambda s: s.has_model and not s.config.model.shrink and not _is_checkpoint(s), last=True),
)  # fmt: skip
"""The list. Preflight and launches use it too; what needs the machines of a run is in :mod:`mua.launch.checks`."""


@dataclass(frozen=True)
class Checked:
    """A configuration, and all that is known about starting it."""

    reading: Reading[ExperimentConfig]
    checks: list[Check]

    def problems(self) -> list[Problem]:
        """What is wrong, with the place of each key."""
        return [*self.reading.problems, *(self._problem(check) for check in self.checks if check.state == "failure")]

    def warnings(self) -> list[Problem]:
        """What is odd."""
        return [self._problem(check) for check in self.checks if check.state == "warning"]

    def _problem(self, check: Check) -> Problem:
        text = f"{check.text}; {check.fix}" if check.fix else check.text
        named = check.key or next(iter(re.findall(r"\b[a-z_]+(?:\.[a-z_0-9]+)+\b", check.text)), "")
        return Problem(self.reading.place(named) if _is_key(named) else self.reading.place("name"), check.key, text)

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

        def plain(problem: Problem) -> dict[str, str]:
            return {"at": problem.at, "key": problem.key, "text": problem.text}

        return {
            "ok": not self.problems(),
            "problems": [plain(problem) for problem in self.problems()],
            "warnings": [plain(problem) for problem in self.warnings()],
            "checks": [
                {"name": check.name, "state": check.state, "key": check.key, "text": check.text, "fix": check.fix}
                for check in self.checks
            ],
        }

    def table(self) -> str:
        """For people."""
        problems = [f"failure  {problem}" for problem in self.problems()]
        warnings = [f"warning  {problem}" for problem in self.warnings()]
        fine = [check.line().rstrip() for check in self.checks if check.state == "ok"]
        said = list(dict.fromkeys([*problems, *warnings]))
        count = f"failures: {len(set(problems))}, warnings: {len(set(warnings))}"
        return "\n".join([*said, *fine, count])


def check_start(path: Path, overrides: Sequence[str], verb: Verb, *, everything: bool = True) -> Checked:
    """Read a configuration and check what ``verb`` would start here.

    Raises:
        ConfigError: a file cannot be read or is no YAML.
    """
    return check_reading(read_config(path, overrides, ExperimentConfig, verb), verb, everything=everything)


def check_reading(
    reading: Reading[ExperimentConfig], verb: Verb, *, everything: bool = True, gpus_per_node: int | None = None,
    config: ExperimentConfig | None = None,
) -> Checked:  # fmt: skip
    """Check what was read. ``config`` takes the place of the one read, where options changed it; ``gpus_per_node`` are
    those of a job that is to be submitted."""
    config = config or reading.config or reading.partial
    if config is None:
        return Checked(reading, [])
    return Checked(reading, checked(Start(config, verb, gpus_per_node, reading.wrong), everything=everything))


def check_service(model: Path, tensor_parallel: int) -> list[Check]:
    """What ``mua serve`` needs of a model folder; SGLang knows more families than can be trained here."""
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
    from mua.engine.placement import visible_gpus

    if (gpus := visible_gpus()) and tensor_parallel > gpus:
        found.append(failure("", f"--tensor-parallel {tensor_parallel} needs so many GPUs, this machine shows {gpus}"))
    return found
