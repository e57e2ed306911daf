"""Small models of the project's own that ``mua serve`` serves: random ones, and one that speaks like a customer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from mua.engine.server import free_port
from mua.types import Json
from mua.users.personas import GREETING
from tests.e2e_support import running, until
from tools.tiny import SMALL, build_policy

PROMPT = "You are a customer. $persona $tool_rules At the end write $stop.\n"
"""``user.prompt`` of users that are too small for ours."""


@dataclass(frozen=True)
class Served:
    """A server that answers."""

    url: str
    key: str
    address: Path
    processes: tuple[psutil.Process, ...]
    log: Path

    def section(self, **settings: object) -> Json:
        """``user.llm`` or ``judge.llm`` for it."""
        patient = {"request_seconds": 240.0, "total_seconds": 280.0}
        return {"base_url": self.url, "api_key": self.key, "model": "tiny", "max_tokens": 24} | patient | settings


@contextmanager
def serving(model: Path, folder: Path, *flags: str) -> Iterator[Served]:
    """``mua serve`` in deterministic mode, with the memory it takes by itself; it leaves with status 0."""
    folder.mkdir(parents=True, exist_ok=True)
    address = folder / "address"
    fixed = ["--enable-deterministic-inference", "--dtype=float32", "--random-seed=1", *flags]
    extra = [f"--extra={flag}" for flag in fixed]
    port = f"--port={free_port()}"
    with running("serve", model, address, port, "--name=tiny", *extra, cwd=folder, own_engine=True) as process:
        until(address.exists, process, "the address")
        told = dict(line.split("=", 1) for line in address.read_text().splitlines())
        assert told["MUA_USER_MODEL"] == "tiny"
        here = psutil.Process(process.pid)
        processes = (here, *here.children(recursive=True))
        yield Served(told["MUA_USER_BASE_URL"], told["MUA_USER_API_KEY"], address, processes, folder / "stderr")
        process.terminate()
        assert process.wait(60) == 0
    assert not address.exists()


def random_model(folder: Path, conversations: Iterable[Sequence[Json]], context: int) -> Path:
    """A Qwen3 of 2 layers, hidden 64, with a tokenizer trained on what is said there."""
    build_policy(folder, conversations, 1, 512, SMALL | {"max_position_embeddings": context})
    return folder


def as_customer(messages: Sequence[Json], persona: str) -> list[Json]:
    """A conversation as the model that plays its user sees it (mua/users/llm.py), without the agent's tools."""
    prompt = PROMPT.replace("$persona", persona).replace("$tool_rules", "").replace("$stop", "###STOP###")
    turned: list[Json] = [{"role": "system", "content": prompt}, {"role": "user", "content": GREETING}]
    roles: Mapping[str, str] = {"user": "assistant", "assistant": "user"}
    spoken = [m for m in messages if m["role"] in roles and not m.get("tool_calls")]
    return turned + [{"role": roles[m["role"]], "content": m["content"]} for m in spoken]


def customers(count: int) -> Iterator[list[Json]]:
    """Conversations of the help desk's scripted expert and customer, from the customer's side."""
    from environments.help_desk import DOMAIN
    from environments.kit.demonstrate import demonstrate

    tasks = list(DOMAIN.tasks("train"))
    for index, task in enumerate(random.Random(1).sample(tasks, count)):
        yield as_customer(asyncio.run(demonstrate(DOMAIN, task, index)).messages, DOMAIN.persona(task))
