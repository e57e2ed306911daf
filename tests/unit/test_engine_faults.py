"""What happens when a server dies, hangs, cannot start, or its owner is killed. Real processes, real signals.

Every moment of a step: ``test_engine_recovery.py``, on stand-ins. Not covered: GPU servers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
from engine_fixtures import CONTEXT, cpu_engine_config, make_pool
from safetensors.torch import load_file

from mua.engine import SamplingParams
from mua.engine.engine_handle import EngineGone, EnginePlace, Server
from mua.engine.pool import EnginePool
from mua.engine.server import SglangServer, engine_server
from mua.engine.weight_transfer import WeightGenerator
from mua.utils.errors import DeadlineExceeded, EngineError
from tests.tensor_source import TensorSource

pytestmark = pytest.mark.timeout(900)  # a busy machine
ENDLESS = SamplingParams(temperature=1.0, max_new_tokens=CONTEXT - 64, stop_token_ids=())
SHORT = SamplingParams(temperature=0.0, max_new_tokens=4, stop_token_ids=())


def server(log_folder: Path, **changes: object) -> SglangServer:
    return engine_server(
        cpu_engine_config(**changes), dtype="float32", context_length=CONTEXT, seed=1, index=0, log_folder=log_folder
    )


async def test_a_missing_model_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"nowhere is not a model folder"):
        await server(tmp_path).start(tmp_path / "nowhere")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_engines")
async def test_a_server_that_exits_shows_the_end_of_its_log(tmp_path: Path, tiny_qwen3_folder: Path) -> None:
    broken = server(tmp_path, extra={"no_such_argument": 3})
    with pytest.raises(EngineError, match=r"(?s)exited while starting.*engine-0\.log.*no-such-argument"):
        await broken.start(tiny_qwen3_folder)
    assert not broken.running


ANSWERS = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def starts(*programs: str) -> Callable[[SglangServer, Path], list[str]]:
    """A server's command lines, one after the other, as Python programs that get the port."""
    left = list(programs)
    return lambda self, _: [sys.executable, "-c", left.pop(0), str(self.port)]


@pytest.mark.parametrize(
    "killed",
    [
        pytest.param("import os; os.kill(os.getpid(), 9)", id="server"),
        pytest.param("import os; os.kill(os.getppid(), 9)", id="guardian"),
        pytest.param("import sys; sys.exit('Rank 0 scheduler died (exit code: -9)')", id="scheduler"),
    ],
)
async def test_a_server_that_is_killed_while_it_starts_is_started_again(
    tmp_path: Path, tiny_qwen3_folder: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    monkeypatch.setattr(SglangServer, "command", starts(killed, ANSWERS))
    started = server(tmp_path)
    await started.start(tiny_qwen3_folder)
    assert started.running
    await started.stop()


async def test_a_server_whose_scheduler_raises_is_not_started_again_at_once(
    tmp_path: Path, tiny_qwen3_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang kills itself then; a launcher may start the whole command again, as the fault may be the machine's."""
    killed = "import os; os.kill(os.getpid(), 9)"
    raises = f"print('Scheduler hit an exception: Traceback', flush=True); {killed}"
    for programs in ((raises, ANSWERS), (killed, killed, killed)):  # nor is one that is killed at every start
        monkeypatch.setattr(SglangServer, "command", starts(*programs))
        with pytest.raises(EngineError, match="exited while starting") as raised:
            await server(tmp_path).start(tiny_qwen3_folder)
        assert raised.value.passing


async def test_the_start_deadline_is_named_and_nothing_is_left(tmp_path: Path, tiny_qwen3_folder: Path) -> None:
    late = server(tmp_path, start_seconds=2.0)
    others = engine_processes()
    with pytest.raises(EngineError, match=r"not ready within engine\.start_seconds = 2"):
        await late.start(tiny_qwen3_folder)
    assert not late.running
    assert not engine_processes() - others


def engine_processes() -> set[int]:
    """Process ids of the engines under this process: other tests share one for the whole session."""
    return {process.pid for process in psutil.Process().children(recursive=True) if runs_sglang(process)}


def runs_sglang(process: psutil.Process) -> bool:
    try:
        return "sglang" in " ".join(process.cmdline())
    except psutil.Error:  # another test's child that has just ended
        return False


@pytest.mark.parametrize("name", ["port", "api_key", "admin-api-key", "config"])
def test_arguments_that_mua_owns_cannot_be_passed_through(tmp_path: Path, name: str) -> None:
    with pytest.raises(EngineError, match=rf"engine\.extra\.{name}"):
        server(tmp_path, extra={name: 1})


def test_pass_through_arguments_reach_the_command(tmp_path: Path) -> None:
    command = server(tmp_path, extra={"schedule_policy": "lpm", "enable_metrics": True, "log_requests": False}).command(
        Path("m")
    )
    assert command[command.index("--schedule-policy") + 1] == "lpm"
    assert "--enable-metrics" in command
    assert "--log-requests" not in command


def test_a_server_does_not_take_itself_for_a_trainer_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "ROLE_NAME"}
    for name in [*names, "MY_RANK"]:
        monkeypatch.setenv(name, "1")
    inherited = server(tmp_path)._environment()
    assert inherited["MY_RANK"] == "1"
    assert not names & inherited.keys()


class Weights(TensorSource):
    """The tensors of a model folder, as often as they are asked for. ``fault`` strikes once, at the second bucket."""

    def __init__(self, folder: Path) -> None:
        super().__init__(load_file(folder / "model.safetensors"), bucket_bytes=2**16)
        self.fault: Callable[[], object] | None = None

    def buckets(self, engines: Sequence[EnginePlace], groups: int = 0) -> WeightGenerator:
        for number, bucket in enumerate(super().buckets(engines, groups)):
            if number == 1 and self.fault is not None:
                fault, self.fault = self.fault, None
                fault()
            yield bucket


async def refill(pool: EnginePool, weights: Weights) -> None:
    """Fill restarted engines with the current version until all serve, as the trainer does while it waits."""
    async with asyncio.timeout(300):
        while pool.metrics()["engine/serving"] < len(pool._engines):
            if pool.awaiting_weights.is_set():
                await pool.update_weights(weights, pool.version, only_awaiting=True)
            await asyncio.sleep(0.1)


async def spoken(pool: EnginePool) -> list[list[int]]:
    """What each engine says with certainty, and proof that it serves the pool's version."""
    found = [await pool.generate([9, 8, 7], SHORT, session=f"{pool.version} {i}", deadline_s=60) for i in range(2)]
    assert {generation.version for generation in found} == {pool.version}
    return [generation.ids.tolist() for generation in found]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_engines")
async def test_a_run_outlives_faults_of_both_its_engines_at_every_moment(
    tmp_path: Path, tiny_qwen3_folder: Path, other_qwen3_folder: Path
) -> None:
    """Two engines, so that what is left of a fault is seen too; every fault costs a start, so both are hit at once."""
    base, other = Weights(tiny_qwen3_folder), Weights(other_qwen3_folder)
    changes = {"count": 2, "max_restarts": 9, "control_seconds": 6.0, "health_seconds": 2.0}
    async with make_pool(tmp_path, memory_saver=False, **changes) as pool:
        await pool.start(tiny_qwen3_folder)
        await pool.update_weights(other, 1)
        first, second = (engine.server for engine in pool._engines)
        said = await spoken(pool)
        assert said[0] == said[1]

        # In a rollout: one is killed, one is stopped. Requests fail or wait; nothing is served before
        # the weights are back.
        running = [
            asyncio.create_task(pool.generate([9, 8, 7], ENDLESS, session=str(i), deadline_s=120)) for i in range(4)
        ]
        while pool.metrics()["engine/running"] < 4:
            await asyncio.sleep(0.01)
        kill(first)
        freeze(second)
        async with asyncio.timeout(300):
            await asyncio.to_thread(pool.awaiting_weights.wait, 300)
        while pool.metrics()["engine/running"]:
            await asyncio.sleep(0.01)
        for request in running:
            request.cancel()
        # Those that saw both die have failed; the others waited to be asked again, of an engine that has the weights.
        for result in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(result, EngineError | asyncio.CancelledError), result
        with pytest.raises(DeadlineExceeded):
            await pool.generate([9], SHORT, session="s", deadline_s=0.3)
        with pytest.raises(EngineError, match="serve version 1"):
            await pool.update_weights(other, 2, only_awaiting=True)
        await refill(pool, other)
        assert await spoken(pool) == said

        # In the middle of a weight update: one is killed, one is stopped. All is sent again to whoever is back first.
        base.fault = lambda: (kill(first), freeze(second))
        report = await pool.update_weights(base, 2)
        assert base.fault is None
        assert base.made == 2
        assert report.tensors == len(base.tensors)
        await refill(pool, base)
        fresh = await spoken(pool)
        assert fresh[0] == fresh[1] != said[0]

        # While the trainer has the memory: both are killed, and return for the update, which is a broadcast this time.
        # Whoever is back first is killed in the middle of it.
        pool.config = pool.config.model_copy(update={"memory_saver": True, "transport": "broadcast"})
        base.alignment = other.alignment = 1
        await pool.release_memory(["kv_cache", "weights"])
        kill(first)
        kill(second)
        async with asyncio.timeout(60):
            while pool.engines_up():
                await asyncio.sleep(0.1)
        await pool.resume_memory(["weights"])
        sent, other.fault = other.made, lambda: [kill(engine.server) for engine in pool._engines if engine.up]
        await pool.until_up()
        with pytest.raises(EngineGone):
            await pool.update_weights(other, 3)
        await pool.until_up()
        await pool.update_weights(other, 3)
        assert other.made == sent + 2
        await pool.resume_memory(["kv_cache"])
        await refill(pool, other)
        assert await spoken(pool) == said

        # Once more than it may.
        assert sum(engine.restarts for engine in pool._engines) in (7, 8)
        pool.config = pool.config.model_copy(update={"max_restarts": pool._engines[0].restarts})
        kill(first)
        async with asyncio.timeout(60):
            while pool.failure is None:
                await asyncio.sleep(0.1)
        with pytest.raises(EngineError, match=r"engine 0 failed again after engine\.max_restarts = \d.*engine-0\.log"):
            await pool.update_weights(base, 4)


def kill(running: Server) -> None:
    """kill -9 of the HTTP process, the guardian's only child."""
    launcher_of(running).kill()


def freeze(running: Server) -> None:
    """SIGSTOP of everything below the guardian."""
    launcher = launcher_of(running)
    for process in [launcher, *launcher.children(recursive=True)]:
        process.suspend()


def launcher_of(running: Server) -> psutil.Process:
    assert isinstance(running, SglangServer)
    assert running._process is not None
    (launcher,) = psutil.Process(running._process.pid).children()
    return launcher


OWNER = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = {path!r}
from engine_fixtures import make_pool

async def main():
    await make_pool(Path({logs!r})).start(Path({model!r}))
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_orphan_when_the_owner_dies(tmp_path: Path, tiny_qwen3_folder: Path, number: signal.Signals) -> None:
    script = tmp_path / "owner.py"
    here = [str(Path(__file__).parents[up]) for up in (1, 2)]
    script.write_text(textwrap.dedent(OWNER.format(path=here, logs=str(tmp_path), model=str(tiny_qwen3_folder))))
    owner = subprocess.Popen(
        [sys.executable, str(script)], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        tree = descendants_when_loading(psutil.Process(owner.pid))
        os.kill(owner.pid, number)
        owner.wait(30)
        _, alive = psutil.wait_procs(tree, timeout=60)
        assert not alive
    finally:
        owner.kill()
        owner.wait()


def descendants_when_loading(owner: psutil.Process) -> list[psutil.Process]:
    """The whole tree, once the server has started its own children."""
    for _ in range(3000):
        tree = owner.children(recursive=True)
        if len(tree) >= 4:
            return tree
        psutil.wait_procs([owner], timeout=0.1)
    raise AssertionError("the server never started its scheduler")
