"""``mua doctor preflight``: what would make a run fail after an hour, found in its first minute, on all of its ranks.

    every rank                 rendezvous ─► all-reduce ──────────────────────────────┐
    first rank of each node    versions, GPUs, limits, clock, ports, shared folder ───┤ gathered
    rank 0                     endpoint, disk ────────────────────────────────────────┴► table, exit status

Alone (no torchrun) it checks the machine it runs on.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tenacity import Retrying, stop_after_delay, wait_fixed

from mua.config.environment import NO_DOMAIN
from mua.config.schema import ExperimentConfig
from mua.launch.checks import Check, Start, Verb, failure, ok, run_check
from mua.launch.checks.configuration import run_checks
from mua.launch.checks.node import RunNode, compare_nodes, run_stage
from mua.observe.provenance import capture_environment, node_name
from mua.utils.collective import gathered
from mua.utils.errors import MuaError

RENDEZVOUS_SECONDS = 300.0
"""Ranks of a large job load their files at very different speed."""
FOLDER_SECONDS = 30.0
CONNECT_SECONDS = 10.0
SKEW_WARNING, SKEW_FAILURE = 1.0, 30.0
"""Seconds between the clocks of two nodes: logs no longer line up; certificates and credentials begin to fail."""
_ROUNDS = 5


def preflight(
    config: ExperimentConfig | None, capture: Path | None = None, *, verb: Verb | None = None, as_json: bool = False
) -> None:
    """Run every check and print the table on rank 0. ``capture``: folder for what each node runs with.

    Args:
        verb: what is to run; None: what the configuration is for.

    Raises:
        MuaError: a check failed.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    start = None
    if config is not None:
        recorded_only = config.sft is not None and config.environment.name == NO_DOMAIN
        told: Verb = "eval" if config.evaluation.policy.kind == "endpoint" else "sft" if recorded_only else "train"
        start = Start(config, verb or told)
    node = RunNode.here(config, start is None or start.has_model)
    if config is not None and node.has_model and "WORLD_SIZE" in os.environ and world != config.megatron.world_size:
        raise MuaError(f"{world} ranks were started, but the section megatron makes {config.megatron.world_size}")
    checks = run_stage("node", node) if os.environ.get("LOCAL_RANK", "0") == "0" else []
    if capture is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        recorded = lambda: ok(f"recorded in {capture_environment(capture).parent}")  # noqa: E731
        checks += run_check("environment", recorded)
    if start is not None and node.rank == 0:  # what one place answers for all
        checks += [*run_stage("asked", start), *run_checks(start)]
    found = [(node_name(), check) for check in checks]
    if world > 1:
        found = _checked_together(config, found)
    if node.rank == 0:
        shown = [{"node": at} | asdict(check) for at, check in found]
        print(json.dumps(shown, indent=2) if as_json else "\n".join(check_table(found)), flush=True)
    if failed := sum(check.state == "failure" for _, check in found):
        raise MuaError(f"preflight: {failed} failed")


def check_table(found: Sequence[tuple[str, Check]]) -> list[str]:
    """Lines for people: what several nodes found alike stands once, with their names where not all did."""
    nodes = list(dict.fromkeys(node for node, _ in found))
    alike: dict[Check, list[str]] = {}
    for node, check in found:
        alike.setdefault(check, []).append(node)
    order = {"failure": 0, "warning": 1, "ok": 2}
    lines = sorted(alike.items(), key=lambda item: order[item[0].state])
    once = {check.name for check in alike if sum(other.name == check.name for other in alike) == 1}
    return [
        check.line() + ("" if len(at) == len(nodes) or check.name in once else f"  [{', '.join(at)}]")
        for check, at in lines
    ]


Found = list[tuple[str, Check]]


def _checked_together(config: ExperimentConfig | None, found: Found) -> Found:
    """The checks that need all ranks, and everybody's results on every rank."""
    try:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=RENDEZVOUS_SECONDS))
    except Exception as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        fix = "do all nodes reach that address? is the network interface right (GLOO_SOCKET_IFNAME)?"
        return [*found, (node_name(), Check("rendezvous", "failure", f"{where}: {type(error).__name__}: {error}", fix))]
    try:
        names = gathered(node_name())
        mine = [*run_check("all-reduce", _all_reduce), *run_check("clocks", lambda: _clocks(names))]
        mine += run_check("ports", lambda: _ports(names))
        if config is not None:
            mine += run_check("shared folder", lambda: _shared_folder(config.output, names))
        found += [(node_name(), check) for check in mine if check.text]
        everybody = [pair for rank in gathered(found) for pair in rank]
        return everybody + [(node_name(), check) for check in compare_nodes(everybody)]
    except Exception as error:
        failed = Check("collectives", "failure", f"{type(error).__name__}: {error}", "see other ranks")
        return [*found, (node_name(), failed)]
    finally:
        dist.destroy_process_group()


def _all_reduce() -> Check:
    """The sum is right, and how fast it was: bytes x 2 (n - 1) / n / seconds, the bus bandwidth of nccl-tests."""
    cuda, ranks = torch.cuda.is_available(), dist.get_world_size()
    numbers = torch.full((64 << 20 if cuda else 1 << 20,), float(dist.get_rank() + 1), device="cuda" if cuda else "cpu")
    dist.all_reduce(numbers)
    right = bool((numbers == ranks * (ranks + 1) / 2).all())
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        dist.all_reduce(numbers)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    if not right:
        fix = "a link or a GPU corrupts data; try NCCL_DEBUG=INFO and NCCL_P2P_DISABLE=1"
        return failure("", f"rank {dist.get_rank()} got a wrong sum", fix)
    if dist.get_rank():
        return ok("")
    bandwidth = numbers.numel() * 4 * 2 * (ranks - 1) / ranks / min(seconds) / 1e9
    return ok(f"{ranks} ranks, {'NCCL' if cuda else 'gloo'}, {bandwidth:.2f} GB/s")


def _clocks(names: Sequence[str]) -> Check:
    """The middle of several differences, each taken right after a barrier."""
    rounds = []
    for _ in range(_ROUNDS):
        dist.barrier()
        rounds.append(gathered(time.time()))
    offsets = [statistics.median(row[rank] - row[0] for row in rounds) for rank in range(len(names))]
    worst = max(range(len(names)), key=lambda rank: abs(offsets[rank]))
    if dist.get_rank():
        return ok("")
    text = f"{max(offsets) - min(offsets):.2f} s apart at most"
    fix = f"set the clock of {names[worst]} (chrony, ntpd)"
    if abs(offsets[worst]) > SKEW_WARNING:
        return Check("", "failure" if abs(offsets[worst]) > SKEW_FAILURE else "warning", text, fix)
    return ok(text)


def _ports(names: Sequence[str]) -> Check:
    """Every node listens on a free port, and every other node reaches it: engines and weights travel so."""
    first = names.index(node_name()) == dist.get_rank()
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen(len(names))
        port = listener.getsockname()[1]
        address = (node_name(), socket.gethostbyname(socket.gethostname()), port) if first else None
        unreached = []
        for node, host, port in filter(None, gathered(address)):
            if first and node != node_name():
                try:
                    socket.create_connection((host, port), CONNECT_SECONDS).close()
                except OSError as error:
                    unreached.append(f"{node} ({host}:{port}): {error}")
        dist.barrier()
    if not first:
        return ok("")
    if unreached:
        return failure("", f"not reached: {'; '.join(unreached)}", "open ports between the nodes")
    return ok("nodes reach each other on free ports")


def _shared_folder(folder: Path, names: Sequence[str]) -> Check:
    """A file that each node writes is seen by all others."""
    box = [uuid.uuid4().hex]
    dist.broadcast_object_list(box, src=0)
    first = names.index(node_name()) == dist.get_rank()
    meeting = folder / f".preflight-{box[0]}"
    trouble = ""
    if first:
        try:
            meeting.mkdir(parents=True, exist_ok=True)
            (meeting / node_name()).write_text(box[0], encoding="utf-8")
        except OSError as error:
            trouble = f"cannot write into {folder}: {error.strerror}"
    dist.barrier()
    unseen, deadline = sorted(set(names)) if first and not trouble else [], time.monotonic() + FOLDER_SECONDS
    while unseen:  # attribute caches of network file systems need some time
        for node in tuple(unseen):
            with suppress(OSError):
                if (meeting / node).read_text(encoding="utf-8") == box[0]:
                    unseen.remove(node)
        if not unseen or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    dist.barrier()
    if first:
        (meeting / node_name()).unlink(missing_ok=True)
    if dist.get_rank() == 0 and meeting.exists():
        for attempt in Retrying(stop=stop_after_delay(FOLDER_SECONDS), wait=wait_fixed(0.1), reraise=True):
            with attempt:
                meeting.rmdir()
    fix = "output must lie in a folder that all nodes share"
    if trouble or unseen:
        text = trouble or f"{node_name()} does not see what {', '.join(unseen)} wrote into {folder}"
        return failure("", text, fix)
    return ok(f"{folder} is seen by all nodes" if first else "")
