"""SGLang beside the trainer: log-probabilities, memory released and resumed under probes, weights, two steps of RL.

The commands run as a person would run them, in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import yaml

from mua.engine import SamplingParams
from mua.types import Generation, TrainSequence
from tools.gpu_checks.child import ENGINE, Found, Place, Skip, absent
from tools.gpu_checks.parity import FLOAT32, MARGIN, scored
from tools.gpu_checks.policies import VOCABULARY, learner, random_policy, sequences

ROOT = Path(__file__).resolve().parents[2]
POLICY = ROOT / "tools/base"
"""Two million parameters and a tokenizer."""
NO_GPU = Path(__file__).with_name("no_gpu")
PROBED_SECONDS = (30.0, 2.0)
"""How long memory stays released under probes: on a GPU, on a CPU."""
DIFFERENCE = {"bfloat16": 0.05, "float32": 1e-3}
"""Nats between engine and trainer, on average over sampled tokens, of the demonstration's policy."""
TAGS = ["kv_cache", "weights"]


def engine(place: Place) -> Found:
    needs_sglang(place)
    return asyncio.run(_engine(place))


def needs_sglang(place: Place) -> None:
    """On a CPU the servers find a torch_memory_saver that does nothing, so that what calls it runs."""
    for package in ("sglang", *(["torch_memory_saver"] if place.cuda else [])):
        if absent(package):
            raise Skip(f"{package} is not installed")
    if not place.cuda:
        os.environ["PYTHONPATH"] += os.pathsep + str(NO_GPU)


def _told_overrides() -> list[str]:
    """What the command line says of engines, as overrides: of the section ``engine``, or else of ``engine.extra``."""
    from mua.config.schema import EngineConfig

    entries = os.environ.get(ENGINE, "").split()
    known = EngineConfig.model_fields
    return [f"engine.{entry}" if entry.partition("=")[0] in known else f"engine.extra.{entry}" for entry in entries]


def _told_settings() -> tuple[dict[str, Any], dict[str, Any]]:
    """The same, as values of the section ``engine``, and of ``engine.extra``."""
    settings: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for override in _told_overrides():
        key, _, value = override.removeprefix("engine.").partition("=")
        into = extra if key.startswith("extra.") else settings
        into[key.removeprefix("extra.")] = yaml.safe_load(value)
    return settings, extra


def told() -> str:
    """What to say of engines that are not as they come."""
    return f"engines with {entries}" if (entries := os.environ.get(ENGINE, "")) else ""


async def _engine(place: Place) -> Found:
    """As a colocated step goes: generate, release, train with probes on, resume, sync, generate."""
    from mua.config.schema import EngineConfig
    from mua.engine.pool import EnginePool

    found, dtype = Found(told()), place.pick("bfloat16", "float32")
    model = random_policy(place.work / "policy", place, scale=place.pick(4, 1), layers=place.pick(8, 2))
    settings, extra = _told_settings()
    usual: dict[str, Any] = {
        "dtype": dtype, "transport": "colocated", "memory_saver": True, "memory_fraction": place.pick(0.3, 0.5),
        "max_total_tokens": place.pick(None, 4096), "health_seconds": place.pick(2.0, 0.3), "max_running_requests": 16,
    }  # fmt: skip
    config = EngineConfig(**usual | settings, extra=extra)
    pool = EnginePool(config, dtype=dtype, context_length=2048, seed=1, log_folder=place.work / "logs")
    try:
        with learner(place.work / "policy", dtype) as built:
            began = asyncio.get_running_loop().time()
            await pool.start(place.work / "policy")
            found.add("start", asyncio.get_running_loop().time() - began, "s")
            await _alike(pool, built, model, found)
            before = await _greedy(pool)
            await _released(pool, built, place, found)
            report = await pool.update_weights(built.weights(), 1)
            found.add("sync", report.bytes / 1e6, "MB")
            found.add("pause of a sync", report.pause_seconds, "s")
            await pool.resume_memory(["kv_cache"])
            after = await _greedy(pool)
            found.expect(
                [g.ids.tolist() for g in after] == [g.ids.tolist() for g in before],
                "after resume and sync it samples other tokens",
            )
            found.expect({g.version for g in after} == {1}, "tokens after the sync carry another version")
            different = await pool.verify_weights(built.weights())
            found.expect(not different, f"the engine's weights differ from the trainer's in {', '.join(different[:4])}")
            restarts = pool.metrics()["engine/restarts"]
            found.expect(restarts == 0, f"the engine was restarted {restarts:.0f} times")
    finally:
        await pool.stop()
        for log in sorted((place.work / "logs").glob("*.log")):
            print(log.read_text(errors="replace")[-8000:])
    return found


async def _alike(pool: Any, built: Any, model: torch.nn.Module, found: Found) -> None:
    """What the engine says of the tokens it samples, the trainer says too, but for what rounding costs.

    How much that is depends on the policy; transformers shows it, on the same tokens.
    """
    params = SamplingParams(temperature=1.0, max_new_tokens=48, stop_token_ids=())
    prompts = [sequence.ids.tolist() for sequence in sequences((5, 40, 77, 130))]
    sampled = await _generated(pool, prompts, params)
    whole = [np.array([*prompt, *one.ids], dtype=np.int32) for prompt, one in zip(prompts, sampled, strict=True)]
    zeros = [np.zeros(len(ids), np.float32) for ids in whole]
    given = [TrainSequence(ids, none, none, none, none) for ids, none in zip(whole, zeros, strict=True)]
    ours = built.log_probabilities(given, 1.0)
    off = np.concatenate([
        np.abs(values[len(prompt) :] - one.logprobs) for prompt, one, values in zip(prompts, sampled, ours, strict=True)
    ])  # fmt: skip
    exact = scored(model, whole)
    rounded = scored(model.bfloat16(), whole)
    loses = float(np.mean([np.abs(a - b).mean() for a, b in zip(exact, rounded, strict=True)]))
    most = FLOAT32 if pool.config.dtype == "float32" else MARGIN * loses
    found.add("engine and trainer differ by", float(off.mean()), f"of {most:.2g} nats on average")
    found.add("at most", float(off.max()), "nats")
    found.expect(
        float(off.mean()) < most,
        f"log-probabilities of engine and trainer differ by {off.mean():.3g} nats, {most:.3g} are rounding",
    )


async def _greedy(pool: Any) -> list[Generation]:
    params = SamplingParams(temperature=0.0, max_new_tokens=24, stop_token_ids=())
    prompts = [sequence.ids.tolist() for sequence in sequences((9, 33), VOCABULARY, seed=3)]
    return await _generated(pool, prompts, params)


async def _generated(pool: Any, prompts: Sequence[list[int]], params: SamplingParams) -> list[Generation]:
    work = [pool.generate(p, params, session=str(i), deadline_s=120.0) for i, p in enumerate(prompts)]
    return list(await asyncio.gather(*work))


async def _released(pool: Any, built: Any, place: Place, found: Found) -> None:
    """Memory is away for a while, the health watch goes on, and the trainer fills what is free."""
    free = _free(place)
    await pool.release_memory(TAGS)
    if place.cuda:
        freed = _free(place) - free
        found.add("released", freed / 2**30, "GiB")
        found.expect(
            freed > 0.1 * torch.cuda.get_device_properties(0).total_memory, "the engine released hardly any memory"
        )
        taken = torch.full((freed // 2,), 7, dtype=torch.uint8, device="cuda")  # what a stray write would change
    await asyncio.sleep(PROBED_SECONDS[0] if place.cuda else PROBED_SECONDS[1])
    if place.cuda:
        found.expect(bool((taken == 7).all()), "memory that the engine released was written to")
        del taken
        torch.cuda.empty_cache()
    found.add("released under probes for", PROBED_SECONDS[0] if place.cuda else PROBED_SECONDS[1], "s")
    found.expect(pool.engines_up() == 1, f"the engine is not up after its memory was released: {pool.describe()}")
    await pool.resume_memory(["weights"])


def _free(place: Place) -> int:
    if not place.cuda:
        return 0
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def doctor_sync(place: Place) -> Found:
    """``mua doctor sync`` of a small policy that is trained in help_desk."""
    needs_sglang(place)
    found = Found(told())
    said = command("doctor", "sync", str(ROOT / "configs/demo.yaml"), *overrides(place))
    line = next((line for line in said.splitlines() if line.startswith("sync: ")), "")
    found.expect(
        line.endswith("every tensor in every engine equals the trainer's"), f"doctor sync says: {said[-300:]!r}"
    )
    found.message = "; ".join([*filter(None, [found.message]), line])
    return found


def rl(place: Place) -> Found:
    """``mua train`` for two steps, colocated: the engine's memory released while the trainer trains, the trainer's
    offloaded while episodes run."""
    needs_sglang(place)
    found = Found(told())
    sizes = ["algorithm.groups_per_step=4", "algorithm.group_size=4"]
    if not place.cuda:
        sizes = ["algorithm.groups_per_step=2", "algorithm.group_size=2"]
        sizes += ["rollout.max_turns=3", "rollout.max_turn_tokens=24"]
    steps = ["trainer.steps=2", "trainer.save_every=1", "trainer.evaluate_every=0", "trainer.export=last"]
    off = ["algorithm.skip_zero_advantage=false", "megatron.offload=true", "optimizer.warmup_steps=0"]
    command("train", str(ROOT / "configs/demo.yaml"), *overrides(place), *sizes, *steps, *off)
    lines = [json.loads(line) for line in (place.work / "run/metrics.jsonl").read_text().splitlines()]
    found.expect([line["step"] for line in lines] == [0, 1], f"the run has {len(lines)} steps, not 2")
    for line in lines:
        for name in ("rollout/reward/mean", "train/grad_norm", "train/loss"):
            value = line.get(name)
            found.expect(value is not None and math.isfinite(value), f"step {line['step']}: {name} is {value}")
    last = lines[-1]
    off = last.get("train/train_rollout_logprob_abs_diff", math.inf)
    found.expect(off < DIFFERENCE[place.pick("bfloat16", "float32")], f"engine and trainer differ by {off:.3g} nats")
    found.add("train/train_rollout_logprob_abs_diff", float(off), "nats")
    for name in ("time/step_seconds", "engine/sync/pause_seconds", *(n for n in last if n.startswith("time/"))):
        if last.get(name) and name.endswith("_seconds") and "episode" not in name:
            found.add(name, float(last[name]), "s")
    found.expect((place.work / "run/hf/model.safetensors").is_file(), "the run left no policy in hf/")
    return found


def overrides(place: Place) -> list[str]:
    return [
        f"model.path={POLICY}", f"output={place.work / 'run'}", f"model.dtype={place.pick('bfloat16', 'float32')}",
        "engine.memory_saver=true", f"engine.memory_fraction={place.pick(0.3, 0.5)}", "engine.max_total_tokens=16384",
        "engine.max_running_requests=16", "rollout.concurrency=16", "megatron.threads=1",
        *_told_overrides(),
    ]  # fmt: skip


class _Shown(io.StringIO):
    """Keeps what is written and shows it at once, so that the log of a check that is killed has it."""

    def __init__(self, shown: TextIO) -> None:
        super().__init__()
        self._shown = shown

    def write(self, text: str) -> int:
        self._shown.write(text)
        self._shown.flush()
        return super().write(text)


def command(*arguments: str) -> str:
    """What ``mua arguments`` prints; raises with its own lines where it does not end well."""
    import mua.cli

    print("$ mua", *arguments, flush=True)
    sys.argv, status, said, complained = ["mua", *arguments], 0, _Shown(sys.stdout), _Shown(sys.stdout)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        try:
            mua.cli.main()
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    if status:
        lines = [line for line in complained.getvalue().splitlines() if line.startswith("mua: ")]
        raise RuntimeError(f"mua {arguments[0]} ended with status {status}: {' '.join(lines[-3:])}")
    return said.getvalue()
