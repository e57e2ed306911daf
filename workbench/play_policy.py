"""A person as the user of a trained policy: ``mua env play DOMAIN --as user --policy POLICY``.

The episode is one of an evaluation, with the person in the user's place: same prompts, tools, budgets and sampling, and
the environment's own verdict. A checkpoint is served here by SGLang; anything else that answers may be named by its URL
or by the address file of ``mua serve``.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import ValidationError

from megatron_bridge.hf_config import context_length, read_hf_config, weights_dtype
from mua.config.load import dump_config, load_config
from mua.config.schema import ExperimentConfig
from mua.environment.domain import Domain
from mua.environment.protocol import Split
from mua.environment.selection import Selection
from mua.observe.output import find_config
from mua.rollout.runner import Placed, evaluation_places
from mua.trainer.evaluation.evaluator import play_at_endpoint, play_on_engine, servable
from mua.types import Json, Outcome, Trajectory
from mua.users.factory import Placement
from mua.utils.errors import ConfigError, MuaError
from workbench.play import PersonUser, Terminal, differences, pick

Result = TypeVar("Result")
PATIENCE = 24 * 3600.0
"""Seconds that a person may think."""
_TOKENS = 32_768
"""Of KV cache on a CPU, at most: one conversation."""


def play_policy(
    name: str, data: Path | None, policy: str, model: str | None, task: str | None, split: Split, seed: int
) -> Trajectory:
    """Play one task of the domain ``name`` as its user, on standard input and output.

    Args:
        policy: a checkpoint, a model folder, the URL of an endpoint, or the address file of ``mua serve``.
        model: what the endpoint calls the policy.
        task: its id; None takes the ``seed``-th of ``split``.

    Raises:
        ConfigError: there is no such domain, task or policy, or the domain has no user.
        MuaError: the episode could not be scored.
    """
    terminal = Terminal(sys.stdin, sys.stdout)
    with tempfile.TemporaryDirectory(prefix="mua-play-") as folder:
        config = played_config(name, data, policy, model, Path(folder))
        domain = Selection.from_config(config.environment).domains[name]
        if getattr(domain, "user_in_tools", False):
            raise ConfigError(f"domain {name!r}: its user is part of a game that tools play; choose one with a user")
        chosen = pick(domain, task, split, seed)
        terminal.line(f"task {chosen.id} ({chosen.split}), seed {seed}; policy {policy}")
        terminal.title("You are the user; say what you want first (/help tells what to type)")
        terminal.line(domain.persona(chosen).strip())
        play = play_at_endpoint if config.evaluation.policy.kind == "endpoint" else play_on_engine
        if play is play_on_engine:
            terminal.line("(the policy's engine starts: half a minute on a CPU)")
        (place,) = evaluation_places(chosen, 1)
        found: list[Trajectory] = []

        def ended(_: Placed, trajectory: Trajectory) -> None:
            found.append(trajectory)

        play(servable(config), [place._replace(sample=seed)], ended, None)
    show_verdict(terminal, found[0], domain)
    return found[0]


def played_config(name: str, data: Path | None, policy: str, model: str | None, output: Path) -> ExperimentConfig:
    """The configuration of the policy's own run, if it can be found, with a person as the user of domain ``name``."""
    endpoint = endpoint_of(policy, model)
    base = _of_run(Path(policy)) if endpoint is None else {}
    environment = base.get("environment") or {}
    if environment.get("name") != name and name not in (environment.get("mix") or {}):
        environment = {}
    rollout = (base.get("rollout") or {}) | {
        "user_seconds": PATIENCE,
        "episode_seconds": PATIENCE,
        "max_retries": 0,
    }
    evaluation: Json = {
        "policy": {"kind": "engine"},
        "temperature": (base.get("evaluation") or {}).get("temperature", 0.0),
    }
    if endpoint is not None:
        evaluation["policy"] = {"kind": "endpoint", "endpoint": endpoint | {"max_retries": 1}}  # a person waits
    made: Json = {
        "name": "play",
        "output": str(output),
        "environment": environment | {"name": name, "mix": {}, "data": data and str(data), "workers": 1},
        "user": {"kind": f"{__name__}:{person.__name__}"},
        "rollout": rollout,
        "evaluation": evaluation,
        "trainer": {"steps": 1},
        "store": {"enabled": False},
        "observe": {"progress": False, "traces": False, "tensorboard": False},
    }
    if endpoint is None:
        made["model"] = (base.get("model") or _shape(Path(policy))) | {"path": policy, "shrink": False}
        made["engine"] = _one_engine(base.get("engine") or {}, made["model"]["max_length"])
    try:
        return ExperimentConfig.model_validate(made)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"--policy {policy}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def endpoint_of(policy: str, model: str | None) -> Json | None:
    """The endpoint that ``policy`` names, as in the configuration; None where it is a folder."""
    if policy.startswith(("http://", "https://")):
        if model is None:
            raise ConfigError("--model: missing; the name by which the endpoint of --policy knows the model")
        return {"base_url": policy, "model": model}
    path = Path(policy)
    if path.is_file():
        lines = dict(line.split("=", 1) for line in path.read_text(encoding="utf-8").splitlines() if "=" in line)
        told = {key: lines.get(f"MUA_USER_{key.upper()}") for key in ("base_url", "model", "api_key")}
        if None in told.values():
            raise ConfigError(f"--policy {policy}: not an address file of mua serve, nor a folder, nor a URL")
        return told | ({"model": model} if model else {})
    if not path.is_dir():
        raise ConfigError(f"--policy {policy}: no such folder; name a checkpoint, a model folder or an endpoint's URL")
    return None


def _of_run(policy: Path) -> Json:
    try:
        found = find_config(policy)
    except ConfigError:  # a model from elsewhere
        return {}
    config: Json = yaml.safe_load(dump_config(load_config(found)))
    return config


def _shape(policy: Path) -> Json:
    """The section ``model`` of a model folder that no run of ours made."""
    path = policy / "config.json"
    if not path.is_file():
        raise ConfigError(f"--policy {policy}: neither a checkpoint of a run nor a model folder (no config.json)")
    shape = read_hf_config(policy)
    dtype, longest = weights_dtype(shape), min(context_length(shape) or _TOKENS, _TOKENS)
    return {"max_length": longest, "dtype": dtype if dtype in ("float32", "bfloat16") else "bfloat16"}


def _one_engine(engine: Json, longest: int) -> Json:
    """One engine for one conversation, as the run had many."""
    own = {"count": 1, "nodes": 0, "max_running_requests": 1}
    from mua.engine.server import has_cuda

    return engine | own | ({} if has_cuda() else {"max_total_tokens": max(longest, 1024), "tensor_parallel": 1})


def person(placement: Placement) -> PersonUser:
    """The factory of ``user.kind``: whoever sits at the terminal."""
    return PersonUser(Terminal(sys.stdin, sys.stdout), waited=typed)


async def typed(ask: Callable[[], Result]) -> Result:
    """What ``ask`` gives, in a thread of its own: while a person thinks, the event loop looks after engines.

    The thread ends with the process: nobody can end a read.
    """
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[Result] = loop.create_future()

    def settle(found: Result | None, error: BaseException | None) -> None:
        if answered.done():  # nobody waits any more
            return
        if error is not None:
            answered.set_exception(error)
        else:
            answered.set_result(cast(Result, found))

    def work() -> None:
        found, fault = None, None
        try:
            found = ask()
        except Exception as error:
            fault = error
        loop.call_soon_threadsafe(settle, found, fault)

    threading.Thread(target=work, name="terminal", daemon=True).start()
    return await answered


def show_verdict(terminal: Terminal, played: Trajectory, domain: Domain) -> None:
    """What the agent did unseen, and the verdict. Raises :class:`MuaError` for an unscored episode."""
    terminal.title("what the agent did")
    for message in played.messages:
        for call in message.get("tool_calls") or ():
            called: dict[str, Any] = call.get("function") or {}
            terminal.show("agent calls", f"{called.get('name')} {called.get('arguments')}")
        if message.get("role") == "tool":
            terminal.show("tool", str(message.get("content")))
    last = played.messages[-1] if played.messages else {}
    if played.outcome == Outcome.LENGTH and last.get("role") == "assistant" and last.get("content"):
        terminal.show("agent, cut off", str(last["content"]))  # it never reached the person
    terminal.title("verdict")
    if not played.scored:
        raise MuaError(f"the episode ended as {played.outcome} and is not scored: {played.error}")
    success = "success" if played.success else "no success"
    terminal.line(f"reward {round(played.reward, 4):g}, {success}; it ended as {played.outcome}")
    for line in differences(played.details):
        terminal.line(f"  {line}")
