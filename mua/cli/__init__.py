"""The command line: one verb, one function. Each loads its configuration and calls the part that does the work.

What a person is meant to read is one line on standard error and exit status 2 or 75 (``mua/utils/errors.py``); a bug
keeps its traceback and leaves with 1. ``MUA_TRACEBACK=1`` shows every traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, ParamSpec, TypeVar

import typer

import mua
import mua.config.load
from mua.config.load import config_file, dump_config, load_config, read_config
from mua.config.schema import ExperimentConfig
from mua.observe.logs import logging_to
from mua.observe.output import CONFIG_FILE, output_of, prepare_output
from mua.observe.safe_output import SafeStream, safe_output
from mua.trainer.preempt import Preemption
from mua.utils.errors import INTERRUPTED, MISTAKE, PASSING, ConfigError, Preempted, describe_error, exit_status
from mua.utils.masking import mask_secrets, masked_tree

if TYPE_CHECKING:
    from mua.launch.checks.configuration import Checked
    from mua.store.queries import TrajectoryFilter

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def argument(metavar: str, help: str, complete: Callable[[str], list[str]] | None = None) -> Any:
    return typer.Argument(metavar=metavar, help=help, show_default=False, autocompletion=complete)


def option(flag: str, help: str) -> Any:
    return typer.Option(flag, help=help)


def _keys(incomplete: str) -> list[str]:
    """For completion: keys of the configuration, section by section."""
    from mua.config.section import all_keys

    depth = incomplete.count(".") + 1
    found = dict.fromkeys(".".join(key) for key in all_keys(ExperimentConfig) if len(key) <= depth)
    inner = {key.rpartition(".")[0] for key in map(".".join, all_keys(ExperimentConfig))}
    return [f"{key}." if key in inner else f"{key}=" for key in found if key.startswith(incomplete)]


def _domain_names(incomplete: str) -> list[str]:
    from mua.environment.registry import domain_names

    return [name for name in domain_names() if name.startswith(incomplete)]


ConfigFile = Annotated[
    Path,
    argument(
        "CONFIG",
        "configuration file (YAML), or a recipe's name: mua recipes",
        lambda incomplete: [r.name for r in mua.config.load.recipes() if r.name.startswith(incomplete)],
    ),
]
Overrides = Annotated[list[str] | None, argument("KEY=VALUE", "overrides, such as trainer.steps=10", _keys)]

app = typer.Typer(
    name="mua",
    help="Reinforcement learning of multi-turn agents that use tools and talk with users.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _group(name: str, help: str, *, alone: bool = False) -> typer.Typer:
    """A command that holds others; ``alone``: it does something by itself, too."""
    made = typer.Typer(help=help, no_args_is_help=not alone)
    app.add_typer(made, name=name)
    return made


config_app = _group("config", "Look at a configuration, and at everything that can be configured.")
convert_app = _group("convert", "Checkpoints to Hugging Face folders and back.")
doctor_app = _group("doctor", "Check a machine, a job, and that the parts agree with each other.", alone=True)
env_app = _group("env", "Environments: what there is, and tools to make and try one.")
launch_app = _group("launch", "Submit a run to a cluster.")
store_app = _group("store", "Look at what happened in runs, export it, check it.")

OnlyCheck = Annotated[bool, option("--check", "validate only; do not run; status 2 where something is wrong")]
AsJson = Annotated[bool, option("--json", "print JSON")]
RunVerb = Literal["train", "sft", "eval", "rollout"]
StartVerb = Literal["train", "sft", "eval", "rollout", "gateway", "sync", "engines"]
Force = Annotated[bool, option("--force", "replace the target whatever it holds")]
STATUS_FILE = "MUA_STATUS_FILE"
"""Names a file that rank 0 leaves its exit status in, because torchrun turns every status but 0 into 1."""


def verb(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Turn what a person is meant to read into lines and an exit status; see :mod:`mua.utils.errors`."""

    @functools.wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with safe_output():
            try:
                return function(*args, **kwargs)
            except KeyboardInterrupt:
                print("mua: interrupted", file=sys.stderr)
                raise typer.Exit(INTERRUPTED) from None
            except Preempted as error:
                print(f"mua: {error}; the run is not finished, the same command continues it", file=sys.stderr)
                raise typer.Exit(PASSING) from None
            except Exception as error:
                lines = list(describe_error(error))
                if not lines or os.environ.get("MUA_TRACEBACK") == "1":
                    raise
                who = f"mua (rank {rank})" if (rank := os.environ.get("RANK", "0")) != "0" else "mua"
                print(mask_secrets("\n".join(f"{who}: {line}" for line in lines)), file=sys.stderr)
                raise typer.Exit(exit_status(error)) from None

    return run


@contextlib.contextmanager
def _told(as_json: bool) -> Iterator[Callable[[Any], None]]:
    """A block whose lines for people go to standard error where JSON is asked for; what is given to its value is then
    all that stands on standard output."""
    results: list[Any] = []
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield results.append
    if as_json and os.environ.get("RANK", "0") == "0":
        for result in results:
            print(json.dumps(result, indent=2, default=str))


def command(group: typer.Typer, name: str | None = None) -> Callable[[Callable[Parameters, Result]], object]:
    """Make a function a :func:`verb` of ``group``, by its own name unless another is given."""
    return lambda function: group.command(name)(verb(function))


def _checked(path: Path, overrides: list[str] | None, verb: StartVerb, only: bool, as_json: bool) -> ExperimentConfig:
    """The configuration of a run that all checks passed which need no model; ``only``: they are printed, and that is
    all."""
    if as_json and not only and verb in ("train", "sft", "engines", "gateway"):
        raise ConfigError("--json: prints what --check finds; give both")
    if os.environ.get("RANK", "0") != "0":  # the first rank looks for all of them
        return _read(path, overrides, verb)
    from mua.launch.checks.configuration import check_start

    found = check_start(path, overrides or (), verb)
    if only:
        _report(found, as_json)
    config = found.refuse()
    for line in found.problems("warning"):
        print(f"mua warning: {line}", file=sys.stderr)
    return config


def _report(found: Checked, as_json: bool) -> NoReturn:
    """Print what the checks found, and leave."""
    print(json.dumps(found.as_json(), indent=2) if as_json else found.table())
    raise typer.Exit(MISTAKE if found.problems() else 0)


def _read(path: Path, overrides: list[str] | None, verb: str) -> ExperimentConfig:
    """As ``verb`` reads it."""
    return read_config(path, overrides or (), ExperimentConfig, verb).required()


@contextlib.contextmanager
def _run(config: ExperimentConfig, record: str) -> Iterator[ExperimentConfig]:
    """A block with the configuration of a run; no other run writes into its output meanwhile.

    It is recorded in the output folder, which proves that writable before anything starts.
    """
    with output_of(config), logging_to(config.output, sys.argv[1] if len(sys.argv) > 1 else "run"):
        if config.model.shrink:
            from workbench.shrink import prepare_shrunk

            config = prepare_shrunk(config, record)
        else:
            prepare_output(config, record)
        yield config


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, option("--version", "Print the version and leave.")] = False) -> None:
    if version:
        print(f"mua {mua.__version__}")
        raise typer.Exit


@command(app, "train")
def train_command(
    config: ConfigFile, overrides: Overrides = None, check: OnlyCheck = False, as_json: AsJson = False
) -> None:
    """Train a policy by reinforcement learning."""
    with Preemption() as preemption, _run(_checked(config, overrides, "train", check, as_json), CONFIG_FILE) as loaded:
        if loaded.offline is not None:
            import mua.trainer.from_store

            mua.trainer.from_store.train_offline(loaded, preemption)
            return
        import mua.trainer.rl

        mua.trainer.rl.train(loaded, preemption)


@command(app)
def engines(
    config: ConfigFile,
    overrides: Overrides = None,
    host: Annotated[str | None, option("--host", "address of this machine")] = None,
    rejoin: Annotated[bool, option("--rejoin", "when the run is lost, wait for it")] = False,
    check: OnlyCheck = False,
    as_json: AsJson = False,
) -> None:
    """Give this machine's engines to a running mua train of the same configuration (placement: separate)."""
    with Preemption() as preemption:
        loaded = _checked(config, overrides, "engines", check, as_json)
        if loaded.model.shrink:
            from workbench.shrink import shrunk

            loaded, _ = shrunk(loaded)
        import mua.engine.remote_worker

        with logging_to(loaded.output, "engines", one_of_many=True):
            mua.engine.remote_worker.give_engines(loaded, lambda: preemption.requested, address=host, rejoin=rejoin)


@command(app)
def sample(
    store: Annotated[str, argument("URL", "store of a run that has samplers.enabled: its URL, file or output folder")],
    overrides: Overrides = None,
    run: Annotated[str | None, option("--run", "id of the run; by default the newest that goes on")] = None,
    config: Annotated[Path | None, option("--config", "the run's configuration, where it has secrets")] = None,
    wait: Annotated[float, option("--wait", "seconds to wait for a run, and for one to be started again")] = 1800.0,
    logs: Annotated[Path | None, option("--logs", "keep a log in logs/ of this folder")] = None,
) -> None:
    """Roll out episodes for a running mua train, from any machine; as many as like, for as long as they like."""
    kept = contextlib.nullcontext() if logs is None else logging_to(logs, "sample", one_of_many=True)
    with Preemption() as preemption, kept:
        import mua.rollout.rollout_worker

        work = mua.rollout.rollout_worker.sample(
            store, lambda: preemption.requested, run=run, config=config, overrides=overrides or (), wait_seconds=wait
        )
        asyncio.run(work)


@command(app)
def sft(config: ConfigFile, overrides: Overrides = None, check: OnlyCheck = False, as_json: AsJson = False) -> None:
    """Fine-tune a policy on recorded conversations."""
    with Preemption() as preemption, _run(_checked(config, overrides, "sft", check, as_json), CONFIG_FILE) as loaded:
        import mua.trainer.sft

        mua.trainer.sft.fine_tune(loaded, preemption)


@command(app)
def demo(
    overrides: Overrides = None,
    seeds: Annotated[str, option("--seeds", "one run for each, such as 1,2,3")] = "1",
    controls: Annotated[bool, option("--controls", "also train the two control policies")] = False,
) -> None:
    """Train a tiny policy in the current folder and show what it learned: some minutes on two cores."""
    try:
        numbers = [int(seed) for seed in re.split(r"[,\s]+", seeds.strip())]
    except ValueError:
        raise ConfigError(f"--seeds: {seeds!r} are not whole numbers, such as 1,2,3") from None
    import workbench.demo

    workbench.demo.demonstrate(numbers, overrides or (), controls=controls)


@command(app)
def recipes(
    name: Annotated[str | None, argument("NAME", "print this one's file")] = None, as_json: AsJson = False
) -> None:
    """List the recipes, whose names stand wherever CONFIG is asked for."""
    if name is not None:
        print(config_file(Path(name)).read_text(encoding="utf-8"), end="")
        return
    found = mua.config.load.recipes()
    if as_json:
        print(json.dumps([{"name": one.name, "about": one.about, "file": str(one.path)} for one in found], indent=2))
        return
    for one in found:
        print(f"{one.name:<22} {one.about}")


@command(app)
def files(
    name: Annotated[str | None, argument("NAME", "print where this one lies; . is all")] = None, as_json: AsJson = False
) -> None:
    """List what the package brings beside code: recipes, job scripts, pins. With a name: where that lies."""
    from mua.utils.source_state import FOLDERS, shipped, shipped_files

    if name is not None and name.rstrip("/") not in (".", *FOLDERS, *shipped_files()):
        raise ConfigError(f"{name}: the package brings no such file; mua files lists those it does")
    found = shipped_files() if name is None else [str(shipped(name))]
    print(json.dumps(found, indent=2) if as_json else "\n".join(found))


@command(app, "eval")
def evaluate_command(
    config: ConfigFile,
    overrides: Overrides = None,
    matrix: Annotated[Path | None, option("--matrix", "file of policies and users, all to be evaluated")] = None,
    check: OnlyCheck = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a policy on held-out tasks; run again, it continues where it stopped."""
    if matrix is not None:
        from workbench.matrix_config import load_cells

        base, cells = load_cells(config, overrides or [], matrix)
        with output_of(base), _told(as_json) as tell:
            import mua.trainer.evaluation.evaluator
            import workbench.matrix

            tell(result := workbench.matrix.evaluate_matrix(base, cells))
        every = [cell for row in result["cells"].values() for cell in row.values() if "unscored" in cell]
        mua.trainer.evaluation.evaluator.require_complete(base, every)
        return
    with _run(_checked(config, overrides, "eval", check, as_json), "config-eval.yaml") as loaded:
        import mua.trainer.evaluation.evaluator

        with _told(as_json) as tell:
            tell(result := mua.trainer.evaluation.evaluator.evaluate(loaded))
        mua.trainer.evaluation.evaluator.require_complete(loaded, [result])


@command(app)
def compare(
    first: Annotated[Path, argument("RUN_A", "output folder of mua eval")],
    second: Annotated[Path, argument("RUN_B", "output folder of mua eval")],
    out: Annotated[Path | None, option("--out", "folder to write into; by default RUN_B")] = None,
    allow_missing: Annotated[
        bool, option("--allow-missing", "compare although unscored episodes are no random sample")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two evaluations on the tasks they share: difference, interval, paired test."""
    import workbench.compare

    folder = second if second.is_dir() else second.parent
    with _told(as_json) as tell:
        tell(workbench.compare.compare(first, second, out or folder, allow_missing=allow_missing))


@command(app)
def replay(
    run: Annotated[Path, argument("RUN", "output folder of a run")],
    step: Annotated[int, argument("STEP", "which step, counted from 0")],
    overrides: Overrides = None,
    store: Annotated[str | None, option("--store", "its store, where that is not in the folder")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a past step once more from the store: the same gradients, or what other settings would have changed."""
    import mua.trainer.replay

    found = mua.trainer.replay.replay(run, step, overrides or (), store=store)
    if found is None:  # another rank than the first
        return
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        import workbench.replay_table

        workbench.replay_table.show_replay(found)
    if found["same_gradients"] is False or not found["within_tolerance"]:
        raise typer.Exit(1)


@command(app)
def rollout(config: ConfigFile, overrides: Overrides = None, check: OnlyCheck = False, as_json: AsJson = False) -> None:
    """Run episodes without training and print one as a conversation."""
    with _run(_checked(config, overrides, "rollout", check, as_json), "config-rollout.yaml") as loaded:
        import workbench.rollout

        with _told(as_json) as tell:
            tell(workbench.rollout.show_rollout(loaded))


@command(app)
def conversations(
    config: ConfigFile,
    out: Annotated[Path, argument("OUT", "file of JSON lines to write")],
    overrides: Overrides = None,
    agent: Annotated[Literal["expert", "policy"], option("--agent", "who plays")] = "expert",
    count: Annotated[int, option("--count", "conversations to write")] = 1000,
    seed: Annotated[int, option("--seed", "expert: seed of tasks and users")] = 1,
    loose: Annotated[float, option("--loose", "expert: how often it departs from the prescribed way, 0 to 1")] = 0.0,
    keep: Annotated[Literal["successful", "all"], option("--keep", "expert: which are written")] = "successful",
    samples: Annotated[int, option("--samples", "policy: episodes of each task")] = 4,
    per_task: Annotated[int, option("--per-task", "policy: conversations kept of one task, the best")] = 1,
    tasks: Annotated[int | None, option("--tasks", "policy: the first so many tasks of each domain; else all")] = None,
    minutes: Annotated[float | None, option("--minutes", "policy: deadline of playing")] = None,
    as_json: AsJson = False,
) -> None:
    """Write conversations for mua sft: of the domains' experts, or of a policy's successes against the users."""
    loaded = load_config(config, overrides or ())
    import workbench.collect
    import workbench.conversations

    with _told(as_json) as tell:
        if agent == "policy":
            seconds = None if minutes is None else 60 * minutes
            wanted = workbench.collect.Wanted(count, samples, per_task, tasks, seconds)
            report = workbench.conversations.by_policy(loaded, out, wanted)
        else:
            report = workbench.conversations.by_experts(
                loaded, out, count, seed=seed, loose=loose, keep_failures=keep == "all"
            )
        print(f"{out}: {report['written']} conversations")
        tell(report)


@command(app)
def gateway(config: ConfigFile, overrides: Overrides = None, check: OnlyCheck = False, as_json: AsJson = False) -> None:
    """Serve the policy to agents by OpenAI's interface, with a task's tools and user, until Ctrl-C or SIGTERM."""
    from mua.rollout.interactive import interactive_config

    checked = _checked(config, overrides, "gateway", check, as_json)
    with Preemption() as preemption, _run(checked, "config-gateway.yaml") as loaded:
        from mua.rollout.service import RolloutService

        def leave() -> None:
            if preemption.requested:
                raise KeyboardInterrupt

        with RolloutService(interactive_config(loaded), leave) as service:
            service.serve_sessions(lambda path: print(f"sessions are opened as {path} tells", flush=True))


@command(convert_app, "megatron-to-hf")
def convert_megatron_to_hf(
    checkpoint: Annotated[Path, argument("CHECKPOINT", "checkpoint folder, of mua or of Megatron-LM (torch_dist)")],
    hf_out: Annotated[Path, argument("HF_OUT", "folder to write")],
    source: Annotated[Path | None, option("--source", "config.json and tokenizer, for Megatron-LM's")] = None,
    dtype: Annotated[Literal["float32", "bfloat16"] | None, option("--dtype", "by default the checkpoint's")] = None,
    shard_gib: Annotated[float, option("--shard-gib", "size of one weight file, at most")] = 5.0,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write the weights of a checkpoint as a Hugging Face folder; ours are links where the file system has them."""
    import mua.megatron.offline

    with _told(as_json) as tell:
        mua.megatron.offline.convert_to_hf(checkpoint, hf_out, source, dtype, int(shard_gib * 2**30), force)
        tell({"written": hf_out, "from": checkpoint})


@command(convert_app, "run")
def convert_every_step(
    run: Annotated[Path, argument("RUN", "output folder of mua train or mua sft")],
    out: Annotated[Path | None, option("--out", "where the model folders go; by default RUN/hf-steps")] = None,
    source: Annotated[Path | None, option("--source", "config.json and tokenizer, for Megatron-LM's")] = None,
    as_json: AsJson = False,
) -> None:
    """Write every checkpoint of a run that is not converted yet as a Hugging Face folder; status 1 if one is faulty."""
    import workbench.convert_run

    with _told(as_json) as tell:
        found = workbench.convert_run.convert_run(run, out, source)
        faults = found["faults"]
        counts = f"{found['converted']} converted, {found['already']} were there already, {len(faults)} failed"
        print(f"{found['written']}: {counts}")
        for fault in faults:
            print(f"mua: {fault}", file=sys.stderr)
        tell(found)
    if faults:
        raise typer.Exit(1)


@command(convert_app, "verify")
def convert_verify(
    folder: Annotated[Path, argument("FOLDER", "model or checkpoint folder")], as_json: AsJson = False
) -> None:
    """Check that a model folder fits a known family, and compare every byte with its checksums."""
    import mua.megatron.offline

    with _told(as_json) as tell:
        tell({"folder": folder, "intact": True} | mua.megatron.offline.verify(folder))


@command(app)
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    as_json: AsJson = False,
    every_rank: Annotated[bool, option("--every-rank", "not only the first rank of each stage")] = False,
) -> None:
    """Say what a configuration needs of its cluster, without starting anything; status 1 if it does not fit."""
    loaded = load_config(config, overrides or ())
    import mua.launch.plan.planner

    policy = None
    if loaded.model.shrink:
        from workbench.shrink import shrunk

        loaded, policy = shrunk(loaded)
    planned = mua.launch.plan.planner.make_plan(loaded, policy, every_rank=every_rank)
    if as_json:
        print(json.dumps(planned.as_json(), indent=2))
    else:
        import workbench.plan_tables

        workbench.plan_tables.show_plan(planned)
    if planned.faults():
        raise typer.Exit(1)


@command(app, "serve")
def serve_command(
    model: Annotated[Path, argument("MODEL", "Hugging Face folder")],
    address_file: Annotated[Path, argument("ADDRESS_FILE", "written when the server answers")],
    host: Annotated[str, option("--host", "address that others reach this machine by")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port")] = 30000,
    name: Annotated[str | None, option("--name", "model name in requests; by default the folder's")] = None,
    tensor_parallel: Annotated[int, option("--tensor-parallel", "GPUs of the server")] = 1,
    extra: Annotated[list[str] | None, option("--extra", "argument of sglang.launch_server; repeatable")] = None,
) -> None:
    """Serve a model with OpenAI's chat interface, for simulated users and judges."""
    from mua.launch.checks.configuration import check_service

    if wrong := check_service(model, tensor_parallel):
        raise ConfigError("\n".join(one.advice for one in wrong))
    from mua.launch.serve import Service, serve

    named = name or model.resolve().name
    serve(Service(model, address_file, host, port, named, tensor_parallel, extra=extra or ()))


@command(launch_app, "slurm")
def launch_slurm(
    config: ConfigFile,
    overrides: Overrides = None,
    fine_tune: Annotated[bool, option("--sft", "run mua sft instead of mua train")] = False,
    engines_only: Annotated[bool, option("--engines-only", "nodes that join the engines of a run")] = False,
    dry_run: Annotated[bool, option("--dry-run", "print the script, submit nothing")] = False,
    unchecked: Annotated[bool, option("--unchecked", "submit whatever the checks find")] = False,
    check: OnlyCheck = False,
    as_json: AsJson = False,
) -> None:
    """Submit a training run to Slurm; the configuration's section slurm asks for the nodes."""
    import mua.launch.slurm as slurm
    from mua.launch.checks.configuration import check_reading

    verb: Literal["train", "sft", "engines"] = "engines" if engines_only else "sft" if fine_tune else "train"
    found = check_reading(slurm.read_job(config, overrides or (), verb), verb, launched=True)
    if check:
        _report(found, as_json)
    loaded = found.reading.required() if unchecked or dry_run else found.refuse()
    problems = [] if unchecked else found.problems()
    for line in [*(f"mua warning: {one}" for one in found.problems("warning")), *(f"mua: {one}" for one in problems)]:
        print(line, file=sys.stderr)
    job = slurm.SlurmJob(loaded, config_file(config), overrides or (), verb)
    text = slurm.render(job)
    if dry_run:
        print(text, end="")
        print("# submit with:", shlex.join(slurm.submission(job)))
    elif as_json:
        print(json.dumps({"job": slurm.submit(job, text), "logs": str(job.logs), "script": str(job.script)}, indent=2))
    else:
        print(slurm.submission_note(job, slurm.submit(job, text)))
    if problems:
        raise typer.Exit(MISTAKE)


@command(env_app, "list")
def env_list(as_json: AsJson = False) -> None:
    """Show every registered domain and gym: tasks by split, tools, where it runs."""
    import workbench.domains as listing

    found = listing.entries()
    print(json.dumps([entry.as_json() for entry in found], indent=2) if as_json else listing.table(found))


@command(env_app, "servers")
def env_servers(config: ConfigFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Open a session with each server of environment.mcp and show its tools; status 1 if one fails."""
    loaded = load_config(config, overrides or ())
    from mua.environment.mcp.inspection import inspected, server_table

    found = inspected(loaded)
    print(json.dumps([asdict(one) for one in found], indent=2) if as_json else server_table(found))
    if any(one.fault for one in found):
        raise typer.Exit(1)


@command(env_app, "new")
def env_new(
    name: Annotated[str, argument("NAME", "such as book_shop")],
    gym: Annotated[bool, option("--gym", "a game with the tool interact")] = False,
    into: Annotated[Path | None, option("--into", "a project's folder; by default the current one")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a small domain that works, and its test, to be changed into another one, into the current project."""
    import workbench.scaffold

    found = workbench.scaffold.scaffold(name, gym, into)
    print(json.dumps([str(path) for path in found], indent=2) if as_json else "\n".join(map(str, found)))
    if any(path.name == "pyproject.toml" for path in found):
        print("pip install -e . in that project registers it, once; mua env list then shows it", file=sys.stderr)


@command(env_app, "play")
def env_play(
    name: Annotated[str, argument("NAME", "domain, see mua env list", _domain_names)],
    task: Annotated[str | None, option("--task", "id of a task; by default --seed picks one")] = None,
    split: Annotated[Literal["train", "validation", "test"], typer.Option("--split")] = "test",
    seed: Annotated[int, option("--seed", "picks the task and the user's wording")] = 0,
    role: Annotated[Literal["agent", "user"], option("--as", "whom you play")] = "agent",
    data: Annotated[Path | None, option("--data", "folder with official data (environment.data)")] = None,
    policy: Annotated[str | None, option("--policy", "with --as user: checkpoint, folder, URL or address file")] = None,
    model: Annotated[str | None, option("--model", "what the endpoint of --policy calls the model")] = None,
) -> None:
    """Be the agent, or the user, of one task in the terminal; ends with the verdict and the difference."""
    if policy is not None:
        if role != "user":
            raise ConfigError("--policy: a policy plays the agent; add --as user")
        import workbench.play_policy

        workbench.play_policy.play_policy(name, data, policy, model, task, split, seed)
        return
    import workbench.play
    from mua.config.schema import EnvironmentConfig

    workbench.play.play(EnvironmentConfig(name=name, data=data), task, split, seed, role)


@command(env_app, "replay")
def env_replay(
    name: Annotated[str, argument("NAME", "domain that loads official data")],
    recorded: Annotated[list[Path], argument("RECORDED...", "recordings (.jsonl or .jsonl.gz)")],
    data: Annotated[Path, typer.Option("--data", help="folder with the official data", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Run recorded calls of the official tools through ours; exit status 1 if anything disagrees."""
    from workbench.recordings import replay_files

    found = replay_files(name, data, recorded)
    if as_json:
        print(json.dumps(asdict(found), indent=2, default=str))
    else:
        print(*found.lines(), sep="\n")
    if found.disagreements:
        raise typer.Exit(1)


@command(app)
def algorithms(as_json: AsJson = False) -> None:
    """List what the section algorithm of a configuration can choose from."""
    from workbench.algorithms import LISTING

    if as_json:
        print(json.dumps(LISTING, indent=2))
        return
    for key, values in LISTING.items():
        print(f"algorithm.{key}")
        for name, line in values.items():
            print(f"  {name:<20} {line}")


StoreTable = Literal["runs", "steps", "tasks", "trajectories"]
StorePlace = Annotated[str, argument("STORE", "output folder of a run, file, or postgresql://USER@HOST/DATABASE")]
RunId = Annotated[str | None, option("--run", "a run's id")]
Only = Annotated[
    list[str] | None, option("--only", "a filter as in the page's address, such as success=false; may be repeated")
]


@command(app, "view")
def view_command(
    places: Annotated[list[str], argument("RUN...", "output folders, store files, or postgresql://USER@HOST/DATABASE")],
    export: Annotated[Path | None, option("--export", "write one HTML file with everything instead of serving")] = None,
    only: Only = None,
    most: Annotated[int | None, option("--most", "trajectories in the file, at most")] = None,
    megabytes: Annotated[float, option("--megabytes", "of trajectories in the file, at most")] = 20.0,
    host: Annotated[str, option("--host", "address to listen on")] = "127.0.0.1",
    port: Annotated[int, option("--port", "0: any that is free")] = 0,
    model: Annotated[Path | None, option("--model", "folder with the tokenizer; by default the run's")] = None,
) -> None:
    """Look at runs in a browser, live, or as one file."""
    from mua.view.page_answers import Answers
    from mua.view.viewed_runs import opened_runs

    given = _filters(only)
    if given and export is None:
        raise ConfigError("--only: chooses the trajectories of an --export; the page has filters of its own")
    with opened_runs(places, model=model, tell=lambda line: print(line, file=sys.stderr)) as viewed:
        answers = Answers(viewed)
        if export is None:
            from mua.view.web import serve

            serve(answers, host, port, lambda url: print(f"{url}\nCtrl-C ends it", flush=True))
            return
        from mua.view.html_page import export_page

        made = export_page(answers, export, only=given, most=most, megabytes=megabytes)
    sample = f", a sample of {made.of:,} (--megabytes, --most, --only)" if made.trajectories < made.of else ""
    pruned = f"; the tokens or messages of {made.pruned:,} are pruned" if made.pruned else ""
    print(f"{export}: {made.trajectories:,} trajectories{sample}, {made.bytes / 2**20:.1f} MiB{pruned}")


@command(app, "show")
def show_command(
    place: Annotated[str, argument("RUN", "output folder, store file, or postgresql://USER@HOST/DATABASE")],
    trajectory: Annotated[str | None, argument("TRAJECTORY", "its id; without one the newest that fits")] = None,
    only: Only = None,
    sample: Annotated[int | None, option("--sample", "draw one with this seed")] = None,
    run: RunId = None,
    model: Annotated[Path | None, option("--model", "folder with the tokenizer; by default the run's")] = None,
    as_json: AsJson = False,
) -> None:
    """Print one trajectory of a run, with mask, advantages and verdict."""
    from mua.view.terminal import show

    show(place, _filters(only), run=run, name=trajectory, sample=sample, model=model, as_json=as_json)


@command(app)
def diagnose(
    place: Annotated[str, argument("RUN", "output folder, store file, or postgresql://USER@HOST/DATABASE")],
    run: RunId = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a run is healthy, ill (status 1) or undecided, what happened first, and what to try."""
    from mua.observe.diagnosis.verdict import diagnosed
    from mua.view.run_evidence import evidence_of

    with evidence_of(place, run) as (name, seen):
        found = diagnosed(name, seen)
    print(json.dumps(found.to_json(), indent=2) if as_json else "\n".join(found.lines(shlex.quote(place))))
    if found.verdict == "ill":
        raise typer.Exit(1)


@command(app)
def timeline(
    run: Annotated[Path, argument("RUN", "output folder of mua train")],
    skip: Annotated[int, option("--skip", "steps at the beginning that the means leave out")] = 1,
    as_json: AsJson = False,
) -> None:
    """Show where the time of a run's steps went: trainer, engines, episodes, and every step as a bar."""
    import workbench.timeline

    found = workbench.timeline.means(run, skip)
    print(json.dumps(found, indent=2) if as_json else workbench.timeline.timeline(run, skip))


def _filters(only: list[str] | None) -> dict[str, str]:
    pairs = [text.partition("=") for text in only or ()]
    for name, equals, _ in pairs:
        if not equals:
            raise ConfigError(f"--only {name}: write NAME=VALUE, such as success=false")
    return {name: value for name, _, value in pairs}


def _chosen(run: str | None, only: list[str] | None) -> TrajectoryFilter:
    from mua.view.trajectory_lists import filter_of

    return filter_of(run, _filters(only))


@command(store_app, "ls")
def store_ls(
    store: StorePlace,
    table: Annotated[StoreTable, argument("[runs|steps|tasks|trajectories]", "what")] = "runs",
    run: RunId = None,
    only: Only = None,
    limit: Annotated[int, option("--limit", "rows")] = 50,
    as_json: AsJson = False,
) -> None:
    """List runs, steps, tasks or trajectories."""
    import workbench.stored

    workbench.stored.list_table(store, table, _chosen(run, only), limit, as_json)


@command(store_app, "export")
def store_export(
    store: StorePlace,
    out: Annotated[Path, argument("OUT", "file to write, .jsonl (as trace files) or .parquet")],
    run: RunId = None,
    only: Only = None,
    as_json: AsJson = False,
) -> None:
    """Write trajectories into a file; status 1 where some are left out, because they are damaged or pruned."""
    import workbench.stored

    if workbench.stored.export(store, _chosen(run, only), out, as_json):
        raise typer.Exit(1)


@command(store_app, "import")
def store_import(
    store: StorePlace,
    traces: Annotated[list[Path], argument("TRACES...", "trace files, or folders of them")],
    run: Annotated[str, typer.Option("--run", help="id of the run that is made", show_default=False)],
    config: Annotated[Path | None, option("--config", "config.yaml that the traces were made with")] = None,
    as_json: AsJson = False,
) -> None:
    """Bring trace files, or what export wrote, into a store, which is made if it is not there."""
    import workbench.stored

    with _told(as_json) as tell:
        tell({"run": run, "trajectories": workbench.stored.import_traces(store, traces, run, config)})


@command(store_app, "verify")
def store_verify(store: StorePlace, as_json: AsJson = False) -> None:
    """Check every reference, blob, hash and count; status 1 where something is wrong."""
    import workbench.stored

    if workbench.stored.verify_store(store, as_json):
        raise typer.Exit(1)


@command(store_app, "prune")
def store_prune(
    store: StorePlace,
    run: RunId = None,
    keep_experts_steps: Annotated[int | None, option("--keep-experts-steps", "see store.keep_experts_steps")] = None,
    keep_arrays_steps: Annotated[int | None, option("--keep-arrays-steps", "see store.keep_arrays_steps")] = None,
    keep_successes: Annotated[bool, typer.Option(help="see store.keep_successes")] = True,
    keep_failed_attempts: Annotated[bool, typer.Option(help="see store.keep_failed_attempts")] = True,
    output: Annotated[Path | None, option("--output", "the run's folder, where STORE is not: its checkpoints")] = None,
    checkpoints: Annotated[bool, typer.Option(help="keep what the run's checkpoints may need")] = True,
    dry_run: Annotated[bool, option("--dry-run", "only say what would be dropped")] = False,
    as_json: AsJson = False,
) -> None:
    """Drop tokens and expert choices of old steps; rows, messages and texts stay."""
    from mua.config.storage import StoreConfig

    rules = StoreConfig(
        keep_experts_steps=keep_experts_steps, keep_arrays_steps=keep_arrays_steps, keep_successes=keep_successes,
        keep_failed_attempts=keep_failed_attempts,
    )  # fmt: skip
    import workbench.stored

    workbench.stored.prune_store(store, run, rules, dry_run, as_json, output=output, checkpoints=checkpoints)


@command(store_app, "migrate")
def store_migrate(store: StorePlace, as_json: AsJson = False) -> None:
    """Bring the schema of an older store to this program's version."""
    import workbench.stored

    with _told(as_json) as tell:
        tell({"schema_version": workbench.stored.migrate_store(store)})


@command(config_app, "show")
def config_show(config: ConfigFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print a configuration with everything it extends and every default, secrets masked."""
    loaded = load_config(config, overrides or ())
    if as_json:
        print(json.dumps(masked_tree(loaded.model_dump(mode="json")), indent=2, ensure_ascii=False))
    else:
        print(dump_config(loaded), end="")


@command(config_app, "schema")
def config_schema() -> None:
    """Print a JSON Schema of configuration files, for editors (docs/checks.md)."""
    from mua.config.docs import editor_schema

    print(json.dumps(editor_schema(), indent=2, ensure_ascii=False))


@command(config_app, "docs")
def config_docs() -> None:
    """Print docs/configuration.md, generated from the schema."""
    from mua.config.docs import configuration_page

    print(configuration_page(), end="")


@command(app, "metrics")
def metrics_command(
    name: Annotated[str | None, argument("[NAME]", "a metric's name, the beginning of several, or docs")] = None,
    as_json: AsJson = False,
) -> None:
    """Explain what a run logs: meaning, unit, what is normal, what to do when it is not."""
    from mua.observe.catalog import asked_for, metrics_page

    if name == "docs":
        print(metrics_page(), end="")
        return
    found = asked_for(name)
    if as_json:
        print(json.dumps([metric.as_json() for metric in found], indent=2))
    else:
        print("\n".join(str(metric) if name else f"{metric.name:<52} {metric.meaning}" for metric in found))


@doctor_app.callback(invoke_without_command=True)
@verb
def doctor(context: typer.Context, as_json: AsJson = False) -> None:
    """Check a machine, a job, and that the parts agree with each other. Alone: this machine."""
    if context.invoked_subcommand is None:
        import mua.launch.preflight

        mua.launch.preflight.preflight(None, as_json=as_json)


@command(doctor_app, "preflight")
def doctor_preflight(
    config: ConfigFile,
    overrides: Overrides = None,
    capture: Annotated[Path | None, option("--capture", "folder for a record of what each node runs with")] = None,
    verb: Annotated[RunVerb | None, option("--for", "what is to run; by default what CONFIG is for")] = None,
    as_json: AsJson = False,
) -> None:
    """Find before a run what would make it fail; under torchrun on all of its ranks."""
    import mua.launch.preflight

    loaded = _read(config, overrides, verb or "train")
    mua.launch.preflight.preflight(loaded, capture, verb=verb, as_json=as_json)


@command(doctor_app, "sync")
def doctor_sync(config: ConfigFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Compare every tensor of the trainer with the engine's after a weight sync."""
    with (
        _run(_checked(config, overrides, "sync", False, False), "config-doctor.yaml") as loaded,
        _told(as_json) as tell,
    ):
        import mua.trainer.rl

        tell(mua.trainer.rl.check_sync(loaded))


def main() -> None:
    """Entry point of the ``mua`` command."""
    # torch's warnings about a lost connection are stacks of C++, which would bury the line that says what was lost.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # OpenMP's threads spin for milliseconds while they wait for one another: on cores that engines, users or another
    # run need as well, steps of two threads take five times as long. So few rounds cost nothing on quiet cores.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    status: str | int | None = 1
    safe: Any = SafeStream(sys.stderr)
    sys.stderr = safe  # for tracebacks
    try:
        for word in sys.argv[1:]:
            key, _, value = word.removeprefix("--").partition("=")
            if word.startswith("--") and "." in key and key.split(".")[0] in ExperimentConfig.model_fields:
                text = f"keys of the configuration have no dashes: {key}={value or 'VALUE'}"
                print(f"mua: {word}: {text}", file=sys.stderr)
                raise SystemExit(MISTAKE)
        app()
    except SystemExit as leaving:
        status = leaving.code
        raise
    finally:
        if (file := os.environ.get(STATUS_FILE)) and os.environ.get("RANK", "0") == "0":
            Path(file).write_text(f"{status or 0}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
