"""Many episodes at once against a slow user: how much longer than the slowest of them alone?

    python -m tools.bench.episodes [--episodes 256] [--latency 1.5] [--turns 6] [--domain help_desk] [--goal 1.1]

The user is an OpenAI-compatible endpoint in another process that answers every request after ``--latency`` seconds and
ends the conversation with its last of ``--turns`` utterances. The policy plays the task's gold moves, then talks until
the user ends; it comes as token ids through the episode runner, as an engine's would, with no time of its own. First
some episodes run alone; then all run at once, with all else alike. Exit status 1 if the time of all, by that of the
slowest one alone, is above ``--goal``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from mua.config.schema import ExperimentConfig
from mua.engine import SamplingParams
from mua.environment.domain import Domain
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Move, Task
from mua.environment.registry import get_domain
from mua.environment.selection import Selection
from mua.environment.user import STOP_SIGNAL
from mua.rollout.runner import EpisodeRunner, Placed, without_gc_pauses
from mua.tokens.chat_family import ChatFamily, load_family
from mua.tokens.codec import fixed
from mua.types import Generation, Int32Array, Outcome, Provenance, Trajectory
from tools import kit
from workbench.tokenizer import train_tokenizer

ALONE = 3
"""Episodes that run alone, one after the other; the slowest counts."""


class ScriptedPolicy:
    """Token ids of the gold moves, session by session. Implements :class:`mua.engine.Sampler`."""

    def __init__(self, family: ChatFamily, moves: Sequence[Sequence[Move]]) -> None:
        """``moves[i]`` are those of the episodes whose ordinal is ``i``."""
        self._family = family
        self._moves = moves
        self._turns: defaultdict[str, int] = defaultdict(int)
        self._ids = lru_cache(maxsize=None)(self._encoded)

    def forget(self) -> None:
        """All episodes begin again."""
        self._turns.clear()

    def _encoded(self, text: str) -> Int32Array:
        return self._family.codec.encode([fixed(text + self._family.end_of_turn, Provenance.SAMPLED)])[0]

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str, deadline_s: float
    ) -> Generation:
        moves, turn = self._moves[int(session.split("/")[0])], self._turns[session]
        self._turns[session] += 1
        move = moves[turn] if turn < len(moves) else "Is there anything else I can do for you?"
        text = move if isinstance(move, str) else _call(*move)
        ids = self._ids(text)
        zeros = np.zeros(len(ids), np.float32)
        return Generation(ids, zeros, "stop", 0, zeros.astype(np.int32), cached_tokens=0)


def _call(name: str, arguments: dict[str, object]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True)
class Measured:
    """One way of running them."""

    seconds: float
    cpu_seconds: float
    """Of this process: the client's side."""
    requests: float
    """Of the user's endpoint."""
    slowest: float
    """Seconds of the slowest of these episodes."""
    queued: float
    """Seconds that the event loop's thread was ready to run and other processes had the cores."""


async def measure(config: ExperimentConfig, family: ChatFamily, domain: Domain, tasks: Sequence[Task]) -> Measured:
    """Run one episode of each of ``tasks``, all at once; every one must end well."""
    services = Services.from_config(config.user, None)
    policy = ScriptedPolicy(family, [domain.gold(task) for task in tasks])
    runner = EpisodeRunner(config, Selection({domain.name: domain}, config.environment), family, policy, services)
    ended: list[float] = []
    started, cpu, queued = time.perf_counter(), time.process_time(), queued_seconds()

    def note(placed: Placed, trajectory: Trajectory) -> None:
        if trajectory.outcome is not Outcome.USER_STOP or trajectory.attempts > 1:
            raise SystemExit(f"{trajectory.task_id} ended as {trajectory.outcome}: {trajectory.error}")
        ended.append(time.perf_counter() - started)

    episodes = [Placed(task, ordinal, 0) for ordinal, task in enumerate(tasks)]
    await runner.each(episodes, temperature=1.0, on_trajectory=note)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    queued = queued_seconds() - queued
    requests = services.metrics()["user/llm/requests"]
    await runner.close()
    await services.close()
    return Measured(seconds, cpu, requests, max(ended), queued)


def queued_seconds() -> float:
    """How long this thread has waited for a core so far (Linux: the second number of schedstat, nanoseconds)."""
    file = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    return int(file.read_text().split()[1]) / 1e9 if file.is_file() else 0.0


def experiment(url: str, domain: str, model: Path, episodes: int) -> ExperimentConfig:
    """The defaults, but for what the number of episodes needs."""
    return ExperimentConfig.model_validate(
        {
            "name": "bench",
            "output": "unused",
            "model": {"path": str(model)},
            "environment": {"name": domain, "max_instances": episodes},
            "user": {"kind": "llm", "check": "off", "llm": {"base_url": url, "model": "user", "concurrency": episodes}},
            "rollout": {"concurrency": episodes},
            "trainer": {"steps": 1},
        }
    )


# ---- the user's endpoint, in a process of its own


def serve(latency: float, turns: int) -> None:
    """Answer chats until standard input ends; the port is printed."""
    from aiohttp import web

    async def answer(request: web.Request) -> web.Response:
        messages = (await request.json())["messages"]
        await asyncio.sleep(latency)
        said = sum(message["role"] == "assistant" for message in messages)
        text = "I see, go on." if said + 1 < turns else STOP_SIGNAL
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": 100, "completion_tokens": 5}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

    asyncio.run(run())


@contextmanager
def endpoint(latency: float, turns: int) -> Iterator[str]:
    """The address of a user in another process."""
    command = [sys.executable, "-m", __spec__.name, "--serve", f"--latency={latency}", f"--turns={turns}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
        finally:
            server.stdin.close()


# ---- the comparison


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--latency", type=float, default=1.5, help="seconds of one utterance")
    parser.add_argument("--turns", type=int, default=6, help="utterances of the user in one episode")
    parser.add_argument("--domain", default="help_desk")
    parser.add_argument("--goal", type=float, default=1.1)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.latency, options.turns)
    domain = get_domain(options.domain)
    pool = domain.tasks("train")
    tasks = [pool[i % len(pool)] for i in range(options.episodes)]
    with tempfile.TemporaryDirectory() as folder, endpoint(options.latency, options.turns) as url:
        train_tokenizer([domain.system_prompt("full")] * 20, Path(folder), vocab_size=600)
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
        family = load_family(Path(folder), thinking=False)
        config = experiment(url, options.domain, Path(folder), options.episodes)
        alone = [asyncio.run(measure(config, family, domain, [task])) for task in [tasks[0], *tasks[:ALONE]]][1:]
        with without_gc_pauses():
            together = asyncio.run(measure(config, family, domain, tasks))
    slowest = max(one.seconds for one in alone)
    report(options.episodes, slowest, together)
    if together.seconds > options.goal * slowest:
        raise SystemExit(f"above the goal of {options.goal:g}")
    return None


def report(episodes: int, slowest: float, together: Measured) -> None:
    print(f"slowest of {ALONE} episodes, each alone   {slowest:8.3f} s")
    print(f"{episodes} episodes at once               {together.seconds:8.3f} s")
    print(f"ratio                              {together.seconds / slowest:8.3f}")
    print(f"to the slowest of those at once    {together.seconds / together.slowest:8.3f}")
    print(f"waited for a core meanwhile        {together.queued:8.3f} s")
    print(f"ratio without that wait, at best   {(together.seconds - together.queued) / slowest:8.3f}")
    print(f"CPU of the client, all episodes    {together.cpu_seconds:8.3f} s")
    print(f"CPU of the client, one exchange    {1e3 * together.cpu_seconds / together.requests:8.2f} ms")
    print(f"requests to the user               {together.requests:8.0f}")


if __name__ == "__main__":
    main()
