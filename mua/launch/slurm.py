"""``mua launch slurm``: the batch script of ``slurm/train.sbatch`` with its head filled in, and its submission.

Between the script's lines ``# >>> head`` and ``# <<< head`` stand Slurm's options and the settings that the rest reads;
here they are replaced by those of a configuration. With ``--engines-only`` it is ``slurm/engines.sbatch``: a job whose
nodes join the engines of a run.

    engine.nodes 0                    one kind of node: every node trains
    engine.nodes N                    one job, the last N of its nodes have engines alone
    engine.nodes N, slurm.engine_*    a heterogeneous job: the engines' component has other nodes
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mua.config.load import Reading, read_config
from mua.config.schema import ExperimentConfig, SlurmConfig
from mua.utils.errors import ConfigError, MuaError
from mua.utils.masking import hidden_texts, masked_tree, referred, secret_parts
from mua.utils.source_state import shipped

Verb = Literal["train", "sft", "engines"]


@dataclass(frozen=True)
class JobNodes:
    """The nodes of a job."""

    trainers: int
    ranks: int
    """Trainer ranks on each of them."""
    engines: int = 0
    """Nodes with engines alone."""
    apart: bool = False
    """Whether these are a component of their own, of a heterogeneous job."""


def place_job(config: ExperimentConfig, verb: str = "train") -> JobNodes:
    """Nodes of the job, and ranks on each; ``verb`` is of the command line.

    Raises:
        ConfigError: the layout's ranks do not fill so many nodes and GPUs, or its engines have no GPUs.
    """
    from mua.engine.cluster import engine_problem  # brings aiohttp

    slurm, engine, separate = config.slurm, config.engine, config.placement == "separate"
    alone = 0 if verb == "sft" else engine.nodes
    apart = bool(slurm.engine_partition or slurm.engine_gpus_per_node is not None or slurm.engine_extra)
    if verb == "engines" and not separate:
        raise ConfigError("--engines-only: nodes join the engines of runs with placement: separate; set it")
    if apart and not engine.nodes and verb != "engines":
        raise ConfigError("slurm.engine_*: these are for nodes that have engines alone; set engine.nodes")
    key = "engine_gpus_per_node" if slurm.engine_gpus_per_node is not None else "gpus_per_node"
    gpus = getattr(slurm, key)
    if (alone or verb == "engines") and gpus and (problem := engine_problem(engine, gpus, f"slurm.{key}")):
        raise ConfigError(problem)
    if verb == "engines":
        return JobNodes(0, 1, slurm.nodes or alone or 1)
    beside = engine.count * engine.tensor_parallel if separate and not alone and verb == "train" else 0
    gpus = slurm.gpus_per_node - beside if slurm.gpus_per_node else 0
    if slurm.gpus_per_node and gpus < 1:
        raise ConfigError(
            f"placement separate: engine.count {engine.count} x engine.tensor_parallel {engine.tensor_parallel} leave "
            f"none of slurm.gpus_per_node {slurm.gpus_per_node} to train with; lower engine.count, or set engine.nodes"
        )
    world = config.megatron.world_size
    nodes = slurm.nodes - alone if slurm.nodes else (-(-world // gpus) if gpus else 1)
    if nodes < 1:
        raise ConfigError(
            f"slurm.nodes {slurm.nodes}: engine.nodes {alone} of them have engines alone, which leaves none to train"
        )
    layout = f"the layout of the section megatron has {world} ranks"
    if gpus and nodes * gpus != world:
        fits = ", ".join(f"{world // size} x {size}" for size in range(1, 9) if world % size == 0)
        named = f"{gpus} GPUs beside engines" if beside else f"slurm.gpus_per_node {gpus}"
        raise ConfigError(
            f"slurm.nodes {nodes} x {named} are {nodes * gpus} GPUs, but {layout}; nodes x GPUs could be {fits}, or "
            "change megatron.data_parallel"
        )
    if world % nodes:
        raise ConfigError(f"slurm.nodes {nodes}: {layout}, which {nodes} nodes cannot share evenly")
    return JobNodes(nodes, world // nodes, alone, apart and alone > 0)


PENDING_USER = {
    "MUA_USER_BASE_URL": "http://mua-user.invalid/v1",
    "MUA_USER_MODEL": "pending",
    "MUA_USER_API_KEY": "mua-user-key.invalid",
}
"""Stand in, while the configuration is checked, for what the job learns from ``slurm.user_address``."""
_ADVICE = "or name the address file of slurm/serve_user.sbatch in slurm.user_address"
SUBMIT_SECONDS = 120.0
CORES_PER_RANK = 8
"""Asked for where nodes are shared: a rank's threads, its share of an engine's processes and of the environments."""

_HEAD = re.compile(r"(?<=# >>> head\n).*?(?=# <<< head\n)", re.DOTALL)
_SETTING = re.compile(r'^: "\$\{(\w+):=', re.MULTILINE)
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}|infinite|unlimited", re.IGNORECASE)


@dataclass(frozen=True)
class SlurmJob:
    """What is to be submitted."""

    config: ExperimentConfig
    path: Path
    """The configuration file, as the job reads it."""
    overrides: Sequence[str]
    verb: Verb = "train"

    @property
    def template(self) -> Path:
        """The script that is filled in."""
        return shipped(f"slurm/{'engines' if self.verb == 'engines' else 'train'}.sbatch")

    @property
    def script(self) -> Path:
        """Where the script is written."""
        return self.logs / ("engines.sbatch" if self.verb == "engines" else "job.sbatch")

    @property
    def logs(self) -> Path:
        """Folder of everything the job says."""
        return self.config.output.absolute() / "slurm"


def render(job: SlurmJob) -> str:
    """The batch script.

    Raises:
        ConfigError: the layout does not fit the nodes, or a secret would stand in the script or on its command line.
    """
    if not job.template.is_file():
        raise MuaError(f"{job.template}: not there; install the package again, where the nodes see it too")
    template = job.template.read_text(encoding="utf-8")
    text, replaced = _HEAD.subn(lambda _: "\n".join(_head(job, template)) + "\n", template)
    if replaced != 1:
        raise MuaError(f"{job.template}: expected one block between '# >>> head' and '# <<< head'")
    shown = "\n".join([text, *submission(job)])  # scripts are kept by Slurm, and command lines are seen by everybody
    masked = masked_tree(job.config.model_dump(mode="json"))
    for key, secret in hidden_texts(masked, job.config.model_dump()):
        if any(part in shown for part in [*secret_parts(secret)] or [secret]):
            raise ConfigError(
                f"{key}: the secret would stand in the job's script or command line; export it in the environment "
                f"and write ${{NAME}} for it in the configuration file"
            )
    return text


def submit(job: SlurmJob, text: str) -> str:
    """Hand the script to sbatch; the job's number.

    Raises:
        MuaError: there is no sbatch here, or it refused; with its own words.
    """
    if shutil.which("sbatch") is None:
        raise MuaError("sbatch: not found; run this where jobs are submitted, or print the script with --dry-run")
    job.script.parent.mkdir(parents=True, exist_ok=True)
    job.script.write_text(text, encoding="utf-8")
    done = subprocess.run(submission(job), capture_output=True, text=True, timeout=SUBMIT_SECONDS, check=False)
    if done.returncode:
        why = done.stderr.strip() or f"exit status {done.returncode}"
        shared = (
            "; for a part of each node set slurm.exclusive: false" if re.search(r"exclusive|mem", why, re.I) else ""
        )
        raise MuaError(f"sbatch refused the job: {why}{shared}")
    return done.stdout.strip().partition(";")[0]


def submission(job: SlurmJob) -> list[str]:
    """sbatch's command line."""
    return ["sbatch", "--parsable", str(job.script), str(job.path.absolute()), *job.overrides]


def submission_note(job: SlurmJob, number: str) -> str:
    """What a person wants to know after the submission."""
    logs, followed = job.logs / number, [f"{job.logs / number}.log"]
    if job.verb != "engines":
        followed.append(str(logs / "attempt-0" / job.verb / "rank-00000.log"))
    return f"""\
job      {number}
logs     {logs}
follow   tail -F {shlex.join(followed)}
state    squeue --job {number}
leave    scancel --signal=USR1 --batch {number}   (saves, and comes back if slurm.requeue)
cancel   scancel {number}"""


def _head(job: SlurmJob, template: str) -> Iterator[str]:
    """Options and the settings that ``template`` has."""
    nodes, slurm = place_job(job.config, job.verb), job.config.slurm
    name = _word("name", job.config.name) + ("-engines" if job.verb == "engines" else "")
    options = [
        f"--job-name={name}", f"--signal=B:USR1@{slurm.signal_minutes * 60}", "--open-mode=append",
        f"--output={_option_path(job.logs)}/%j.log", f"--chdir={_option_path(Path.cwd())}",
    ]  # fmt: skip
    engines = list(_engine_component(slurm, nodes.engines, job.config.engine.count)) if nodes.engines else []
    if nodes.trainers:
        options += _component(slurm, nodes.trainers + (0 if nodes.apart else nodes.engines), nodes.ranks)
    if nodes.apart:
        options.append("hetjob")
    if nodes.apart or not nodes.trainers:
        options += engines
    if nodes.engines:
        options.append("--no-kill")  # a dead engine node does not end the job
    yield from (f"#SBATCH {option}" for option in options)
    settings = {
        "MUA_ROOT": shipped(),
        "VENV": slurm.venv or Path(sys.prefix),
        "MUA_SETUP": referred("; ".join(slurm.setup)),  # a shell fills in the secrets, on the node
        "MUA_VERB": job.verb,
        "MUA_RANKS_PER_NODE": nodes.ranks,
        "MUA_ENGINE_NODES": 0 if nodes.apart else nodes.engines,
        "MUA_CHECKPOINTS": job.config.output.absolute() / "checkpoints",
        "MUA_REQUEUE": int(slurm.requeue),
        "MUA_MAX_FAULTS": slurm.max_faults,
        "MUA_PREFLIGHT": int(slurm.preflight),
        "MUA_CONTAINER_IMAGE": slurm.container_image or "",
        "MUA_CONTAINER_MOUNTS": ",".join(slurm.container_mounts),
        "MUA_USER_ADDRESS": slurm.user_address.absolute() if slurm.user_address else "",
        "MUA_USER_SECONDS": int(slurm.user_seconds),
    }
    known = _SETTING.findall(template)
    for name, value in settings.items():
        if name in known:
            yield f"{name}={shlex.quote(str(value))}"
    yield f"MUA_LOGS={shlex.quote(str(job.logs))}/$SLURM_JOB_ID"


def _engine_component(slurm: SlurmConfig, nodes: int, engines: int) -> Iterator[str]:
    """The options of nodes with engines alone: those of the trainer's nodes but for the keys ``engine_*``."""
    own: dict[str, Any] = {"partition": slurm.engine_partition, "gpus_per_node": slurm.engine_gpus_per_node}
    changes = {name: value for name, value in own.items() if value is not None}
    changes |= {"extra": slurm.engine_extra} if slurm.engine_extra else {}
    return _component(slurm.model_copy(update=changes), nodes, engines, "engine_")


def _component(slurm: SlurmConfig, nodes: int, processes: int, prefix: str = "") -> Iterator[str]:
    """The options of alike nodes, on each of which ``processes`` share the cores."""
    if slurm.time and not _TIME.fullmatch(slurm.time):
        raise ConfigError(f"slurm.time: {slurm.time!r} is not a time of Slurm's, such as 24:00:00 or 2-00:00:00")
    words = {name: getattr(slurm, name) for name in ("partition", "account", "qos")}
    options = {
        "nodes": nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": slurm.gpus_per_node,
        "cpus-per-task": slurm.cpus_per_task or (None if slurm.exclusive else CORES_PER_RANK * processes),
        **{name: _word(f"slurm.{name}", value) for name, value in words.items() if value},
        "time": slurm.time,
    }
    yield from (f"--{name}={value}" for name, value in options.items() if value)
    yield "--requeue" if slurm.requeue else "--no-requeue"
    if slurm.exclusive:
        yield "--exclusive"
        if not any(option.startswith("--mem") for option in slurm.extra):
            yield "--mem=0"  # all that a node has
    for option in slurm.extra:
        if not option.startswith("-") or "\n" in option:
            raise ConfigError(f"slurm.{prefix}extra: {option!r} is not an option of sbatch, such as --constraint=h200")
        yield option


def _word(key: str, value: str) -> str:
    """A value that needs no quotes in an #SBATCH line."""
    word = re.sub(r"\s+", "-", value.strip())
    if not re.fullmatch(r"[\w.,:/@%+=-]+", word):
        raise ConfigError(f"{key}: {value!r} holds characters that an #SBATCH line cannot carry")
    return word


def _option_path(path: Path) -> str:
    """``path`` for an #SBATCH line, where percent signs are patterns and spaces separate."""
    text = str(path).replace("%", "%%")
    return f'"{text}"' if " " in text else text


def read_job(path: Path, overrides: Sequence[str], verb: Verb) -> Reading[ExperimentConfig]:
    """The configuration as the job will read it: what it learns from ``slurm.user_address`` may be missing here.

    Raises:
        ConfigError: a file cannot be read or is no YAML.
    """
    pending = {name: value for name, value in PENDING_USER.items() if name not in os.environ}
    os.environ.update(pending)
    try:
        reading = read_config(path, overrides, ExperimentConfig, verb)
    finally:
        for name in pending:
            del os.environ[name]
    if pending and (reading.config is None or reading.config.slurm.user_address is None):
        reading = read_config(path, overrides, ExperimentConfig, verb)  # nothing tells the job: defaults count
        advised = [replace(one, text=f"{one.text}, {_ADVICE}") if "MUA_USER_" in one.text else one
                   for one in reading.problems]  # fmt: skip
        reading = replace(reading, problems=advised)
    return reading
