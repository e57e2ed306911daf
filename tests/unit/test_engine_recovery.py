"""What a pool does about engines that die, hang or do not start, at every moment of a step.

The engines are small HTTP servers that answer, hang or die when told to. Not covered: SGLang's own behavior
(``test_engine_faults.py``), engines on other machines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_stand_in import Source, StandInServer, stand_in_pool

from mua.engine import SamplingParams
from mua.engine.engine_handle import EngineGone, EngineState
from mua.engine.pool import EnginePool
from mua.utils.errors import EngineError

pytestmark = pytest.mark.timeout(60)
LOAD, END = "/update_weights_from_tensor", "/end_weight_update"
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
IMPATIENT = {"control_seconds": 0.3, "max_restarts": 99}
"""For engines that hang. A busy machine may make one that does not look so too, and costs it a restart."""
FAULTS = [("die", {}), ("hang", IMPATIENT)]


def at(wanted: str, fault: str, *, request: int = 1, lives: int = 1) -> Callable[[str, int], str | None]:
    """``fault`` at the ``request``-th request for ``wanted`` of each of the first ``lives``."""
    seen: dict[int, int] = {}

    def decide(path: str, life: int) -> str | None:
        if path != wanted or life > lives:
            return None
        seen[life] = seen.get(life, 0) + 1
        return fault if seen[life] == request else None

    return decide


async def until(look: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not look():
            await asyncio.sleep(0.01)


def states(pool: EnginePool) -> list[EngineState]:
    return [engine.state for engine in pool._engines]


async def test_an_update_waits_for_an_engine_that_died_before_it() -> None:
    server, source = StandInServer(), Source()
    async with stand_in_pool([server]) as pool:
        await pool.start(Path("m"))
        await pool.update_weights(source, 1)
        await server.stop()
        report = await pool.update_weights(source, 2)
        assert (report.tensors, pool.version, states(pool)) == (4, 2, [EngineState.SERVING])
        assert server.lives == 2
        # Once more where the pause, and not the watch, finds it dead: the first bucket is put together before that.
        assert source.made in (2, 3)


@pytest.mark.parametrize(("fault", "changes"), FAULTS)
@pytest.mark.parametrize(
    ("path", "request_number"),
    [("/pause_generation", 1), ("/begin_weight_update", 1), (LOAD, 1), (LOAD, 4), (END, 1)],
)
async def test_weights_that_reached_no_engine_are_sent_again(
    fault: str, changes: dict[str, object], path: str, request_number: int
) -> None:
    server, source = StandInServer(), Source()
    async with stand_in_pool([server], **changes) as pool:
        await pool.start(Path("m"))
        server.on_request = at(path, fault, request=request_number)
        report = await pool.update_weights(source, 1)
        assert (report.tensors, pool.version, states(pool)) == (4, 1, [EngineState.SERVING])
        assert server.lives >= 2
        assert server.controls[-7:] == ["/begin_weight_update", *[LOAD] * 4, END, "/continue_generation"]


@pytest.mark.parametrize(("fault", "changes"), FAULTS)
async def test_the_other_engine_serves_on_and_the_restarted_one_is_filled_later(
    fault: str, changes: dict[str, object]
) -> None:
    servers, source = [StandInServer(0), StandInServer(1)], Source()
    async with stand_in_pool(servers, **changes) as pool:
        await pool.start(Path("m"))
        servers[1].on_request = at(LOAD, fault, request=2)
        await pool.update_weights(source, 3)
        assert (source.made, states(pool)[0], servers[0].lives) == (1, EngineState.SERVING, 1)
        await until(pool.awaiting_weights.is_set)
        assert states(pool)[1] is EngineState.AWAITING
        await pool.update_weights(source, 3, only_awaiting=True)
        assert states(pool) == [EngineState.SERVING] * 2


async def test_an_engine_that_is_back_before_its_update_ends_is_not_killed_again() -> None:
    servers, source = [StandInServer(0), StandInServer(1)], Source()
    async with stand_in_pool(servers, control_seconds=1.5) as pool:
        await pool.start(Path("m"))
        servers[0].on_request = at(LOAD, "die")
        servers[1].on_request = at(LOAD, "hang")
        await pool.update_weights(source, 1)
        assert source.made == 2
        await until(lambda: states(pool)[1] is not EngineState.STARTING and servers[1].lives == 2)
        assert [server.lives for server in servers] == [2, 2]


async def test_an_update_that_fails_does_not_kill_what_the_watch_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch is the first to end the engine, and starts it while the update that lost it ends it too."""
    server, source = StandInServer(), Source()
    failed = asyncio.Event()
    stop, start = server.stop, server.start

    async def stop_while_another_asks() -> None:
        if server.lives == 1:
            await failed.wait()
        await stop()

    async def start_slowly(model_path: Path) -> None:
        await start(model_path)
        await asyncio.sleep(0.2)
        if not server.running:
            raise EngineError("it was killed while it started")

    monkeypatch.setattr(server, "stop", stop_while_another_asks)
    async with stand_in_pool([server], max_restarts=1) as pool:
        await pool.start(Path("m"))
        monkeypatch.setattr(server, "start", start_slowly)
        (engine,) = pool._engines
        server.running = False
        engine.suspect.set()
        await until(lambda: engine.state is EngineState.STOPPED)
        killing = asyncio.create_task(pool._kill([engine]))
        await until(lambda: engine.stops == 2)
        failed.set()
        await killing
        await pool.update_weights(source, 1)
        assert (server.lives, engine.restarts, states(pool)) == (2, 1, [EngineState.SERVING])


async def test_an_engine_that_dies_again_while_it_is_filled_is_filled_after_its_next_start() -> None:
    servers, source = [StandInServer(0), StandInServer(1)], Source()
    async with stand_in_pool(servers) as pool:
        await pool.start(Path("m"))
        await pool.update_weights(source, 1)
        servers[1].on_request = at(LOAD, "die", lives=2)
        await pool._engines[1].stop()
        await until(pool.awaiting_weights.is_set)
        await pool.update_weights(source, 1, only_awaiting=True)
        assert states(pool)[0] is EngineState.SERVING
        # Started again before the update looked for another engine, it is filled by that same update.
        await until(lambda: servers[1].lives == 3 and states(pool)[1] in {EngineState.AWAITING, EngineState.SERVING})
        await pool.update_weights(source, 1, only_awaiting=True)
        assert states(pool) == [EngineState.SERVING] * 2


async def test_restarts_that_are_used_up_name_the_log_the_key_and_the_reason() -> None:
    server = StandInServer()
    async with stand_in_pool([server], max_restarts=2) as pool:
        await pool.start(Path("m"))
        server.on_request = at(LOAD, "die", lives=9)
        with pytest.raises(EngineError, match=r"max_restarts = 2 restarts .*see engine-0\.log, fix"):
            await pool.update_weights(Source(), 1)
        assert server.lives == 3
        assert pool.failure is not None


async def test_an_engine_that_does_not_start_again_ends_the_wait_of_an_update() -> None:
    server = StandInServer()
    async with stand_in_pool([server], max_restarts=2) as pool:
        await pool.start(Path("m"))
        server.starts = False
        await pool._engines[0].stop()
        with pytest.raises(EngineError, match="it does not start"):
            await pool.update_weights(Source(), 1)


async def test_an_engine_that_hangs_in_rollout_is_found_by_its_probes() -> None:
    server = StandInServer()
    async with stand_in_pool([server], **IMPATIENT) as pool:
        await pool.start(Path("m"))
        server.on_request = lambda path, life: "hang" if life == 1 else None
        await until(lambda: server.lives >= 2)


async def test_an_update_does_not_hide_an_engine_that_hangs() -> None:
    """The probe that runs into a control operation is answered by nobody, and is not called healthy."""
    server = StandInServer()
    async with stand_in_pool([server], health_seconds=60, control_seconds=0.3) as pool:
        await pool.start(Path("m"))
        server.on_request = lambda path, life: "hang"
        async with pool._engines[0].control:
            assert not await pool._probe(pool._engines[0])
        assert server.asked == ["/model_info"]


async def test_released_engines_are_not_made_to_generate_and_those_that_die_wait_for_the_memory() -> None:
    servers, source = [StandInServer(0), StandInServer(1)], Source()
    async with stand_in_pool(servers) as pool:
        await pool.start(Path("m"))
        await pool.update_weights(source, 1)
        await pool.release_memory(["kv_cache", "weights"])
        asked = len(servers[0].asked)
        await pool._engines[1].stop()
        await until(lambda: servers[0].asked[asked:].count("/model_info") >= 3)
        assert set(servers[0].asked[asked:]) == {"/model_info"}
        assert servers[1].lives == 1
        await pool.resume_memory(["weights"])
        await pool.update_weights(source, 2)
        assert servers[1].lives == 1, "the trainer still has what was the cache"
        await pool.resume_memory(["kv_cache"])
        await until(pool.awaiting_weights.is_set)
        await pool.update_weights(source, 2, only_awaiting=True)
        assert states(pool) == [EngineState.SERVING] * 2
        assert not any(engine.released for engine in pool._engines)


async def test_the_only_engine_returns_for_the_update_without_the_memory_that_is_still_away() -> None:
    server, source = StandInServer(), Source()
    async with stand_in_pool([server]) as pool:
        await pool.start(Path("m"))
        await pool.release_memory(["kv_cache", "weights"])
        await pool._engines[0].stop()
        await pool.resume_memory(["weights"])
        with pytest.raises(EngineGone, match="no engine is up"):
            await pool.update_weights(source, 1)
        assert server.lives == 1, "the trainer still has the memory"
        await pool.until_up()
        await pool.update_weights(source, 1)
        assert server.lives == 2
        assert pool._engines[0].released == {"kv_cache"}
        await pool.resume_memory(["kv_cache"])
        assert server.controls[-1] == RESUME
        assert not pool.released


async def test_what_was_running_stays_paused_until_all_memory_is_back() -> None:
    """An engine that went on before would run the retracted requests on memory that is the trainer's."""
    server, source = StandInServer(), Source()
    server.on_request = at("/generate", "hang")
    async with stand_in_pool([server], health_seconds=60) as pool:
        await pool.start(Path("m"))
        running = asyncio.create_task(pool.generate([1], SamplingParams(1.0, 8, ()), session="s", deadline_s=60))
        await until(lambda: "/generate" in server.asked)
        server.asked.clear()
        await pool.release_memory(["kv_cache", "weights"])
        assert server.controls == ["/pause_generation", "/flush_cache", RELEASE]
        server.asked.clear()
        await pool.resume_memory(["weights"])
        await pool.update_weights(source, 1)
        assert server.controls == [RESUME, "/begin_weight_update", *[LOAD] * 4, END]
        await pool.resume_memory(["kv_cache"])
        assert server.controls[-2:] == [RESUME, "/continue_generation"]
        running.cancel()


async def test_memory_is_not_the_trainers_before_an_engine_that_is_starting_has_released_it() -> None:
    servers, slow = [StandInServer(0), StandInServer(1)], asyncio.Event()
    begin = servers[1].start

    async def start(model_path: Path) -> None:
        if servers[1].lives:
            await slow.wait()
        await begin(model_path)

    servers[1].start = start  # type: ignore[method-assign]
    async with stand_in_pool(servers) as pool:
        await pool.start(Path("m"))
        await servers[1].stop()
        await until(lambda: pool._engines[1].state is EngineState.STARTING)
        release = asyncio.create_task(pool.release_memory(["kv_cache", "weights"]))
        await until(lambda: pool.released)
        await asyncio.sleep(0.1)
        assert not release.done()
        slow.set()
        await release
        assert [engine.released for engine in pool._engines] == [{"kv_cache", "weights"}] * 2


@pytest.mark.parametrize(("fault", "changes"), FAULTS)
@pytest.mark.parametrize("path", [RELEASE, RESUME])
async def test_an_engine_that_fails_to_move_its_memory_is_replaced(
    fault: str, changes: dict[str, object], path: str
) -> None:
    server, source = StandInServer(), Source()
    async with stand_in_pool([server], **changes) as pool:
        await pool.start(Path("m"))
        server.on_request = at(path, fault)
        await pool.release_memory(["kv_cache", "weights"])
        await pool.resume_memory(["weights"])
        await pool.until_up()
        await pool.update_weights(source, 1)
        await pool.resume_memory(["kv_cache"])
        assert server.lives >= 2
        assert (states(pool), pool.released) == ([EngineState.SERVING], False)


async def test_only_the_engine_at_fault_uses_up_a_restart() -> None:
    servers = [StandInServer(0), StandInServer(1)]
    async with stand_in_pool(servers) as pool:
        await pool.start(Path("m"))
        with contextlib.suppress(ZeroDivisionError):
            async with pool._idle(pool._engines) as targets:
                targets.lose(pool._engines[1], EngineGone("gone"))
                raise ZeroDivisionError
        await until(lambda: [server.lives for server in servers] == [2, 2])
        assert [engine.restarts for engine in pool._engines] == [0, 1]
