"""Which placement is fastest for a configuration, by simulation (:mod:`mua.launch.plan.simulation`).

    in turns     every GPU holds trainer and engine, and one of them works           staleness 0
    at once      every GPU holds trainer and engine, and both work                   staleness >= 1
    separate     some GPUs train, the others generate                                staleness >= 1

All with the same number of GPUs, the same tasks and the same model of an engine. What a GPU does in a second follows
from its datasheet and from the shares in the section ``cluster``, which are assumptions: the comparison is as good as
they are. :meth:`SimulatedPlacement.at` tells what another utilisation in training would change. ``at once`` takes the
GPU's time to be shared without loss, which is the best that can be hoped for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Self

from mua.config.schema import ExperimentConfig, MegatronConfig
from mua.launch.plan.compute import GPUS, bubble, episode_tokens, forward_flops
from mua.launch.plan.gpu_memory import EngineBytes, engine_bytes, reference_bytes
from mua.launch.plan.layout import gpus_per_node
from mua.launch.plan.links import plan_sync
from mua.launch.plan.planner import Plan, memory_options, stage_plans
from mua.launch.plan.simulation import Setting, SimulatedEpisode, SimulatedTurn, mean_metrics, settled, simulate
from mua.megatron.architecture import Architecture, Workload
from mua.megatron.layouts import is_proven, problems
from mua.rollout.scheduler import StepDemand
from mua.utils.seeds import derived_seed

STEPS = 5
"""Of a simulation, without those in which it settles."""
_PAUSE_SPREAD = 1.0
"""Standard deviation of the logarithm of a pause: most are short, a few long."""
_MIXED = 0.5
"""Speed of each where trainer and engine share a GPU's time."""


@dataclass(frozen=True)
class SimulatedPlacement:
    """One way to divide the GPUs, and what the simulation says of it."""

    name: str
    staleness: int
    trainer_gpus: int
    engine_gpus: int
    generation_seconds: float
    """Of a step's episodes on these engines if nothing else took time: groups start as long as staleness allows, and
    batches are taken as soon as they are there."""
    training_seconds: float
    """Of a step's batch on these GPUs, log-probabilities included, if nothing else ran on them."""
    sync_seconds: float
    step_seconds: float
    waiting: float
    """Share of the step in which the trainer waits for episodes."""
    generating: float
    """Share of their time in which engines have requests."""
    slots_used: float
    lag_mean: float
    """Of a trained token in policy versions."""
    lag_max: float
    setting: Setting = field(repr=False)

    @property
    def efficiency(self) -> float:
        """max(generation, training) / step."""
        return max(self.generation_seconds, self.training_seconds) / self.step_seconds

    def at(self, faster: float) -> float:
        """Seconds of a step if the trainer were so many times as fast."""
        old = self.setting
        new = replace(old, score_seconds=old.score_seconds / faster, train_seconds=old.train_seconds / faster)
        return _means(new)["time/step_seconds"]

    def as_json(self) -> dict[str, Any]:
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "setting"}
        return numbers | {"efficiency": self.efficiency}


def compare_placements(plan: Plan, staleness: Sequence[int] = (1, 2)) -> list[SimulatedPlacement]:
    """The placements of ``plan``'s GPUs that fit; of separate ones the fastest split. The fastest first.

    Of a configuration whose placement is separate, only that.
    """
    if plan.config.placement == "separate":
        return sorted((_separate(plan, plan.config, stale) for stale in staleness), key=lambda one: one.step_seconds)
    found, splits = [_colocated(plan, 0)], list(_splits(plan))
    for stale in staleness:
        found.append(_colocated(plan, stale))
        if separate := [_separate(plan, config, stale) for config in splits]:
            found.append(min(separate, key=lambda one: one.step_seconds))
    return sorted(found, key=lambda one: one.step_seconds)


def mean_episode_tokens(config: ExperimentConfig) -> int:
    """``cluster.episode_tokens`` or, as there must be room for longer ones, half of ``rollout.max_tokens``."""
    return config.cluster.episode_tokens or config.rollout.max_tokens // 2


def draw_episode(config: ExperimentConfig, ordinal: int, sample: int) -> SimulatedEpisode:
    """Of the mean length, turns and pauses that ``cluster`` expects, log-normally spread; within ``rollout``'s budgets.

    An episode that is f times as long as the mean has sqrt(f) times the turns, each of which is sqrt(f) times as long.
    """
    cluster, budgets = config.cluster, config.rollout
    chance = random.Random(derived_seed("episode", ordinal, sample))
    spread = cluster.length_spread
    longer = chance.lognormvariate(-spread * spread / 2, spread) ** 0.5
    count = max(1, min(round(cluster.episode_turns * longer), budgets.max_turns))
    whole = mean_episode_tokens(config)
    sampled = whole * cluster.sampled_share / cluster.episode_turns * longer
    given = whole * (1 - cluster.sampled_share)
    turns, room = [], budgets.max_tokens
    for number in range(count):
        # Half of what is given is the first prompt: instructions and tools.
        prompt = round(given / 2 if number == 0 else given / 2 / max(1, cluster.episode_turns - 1))
        own = min(round(sampled * chance.uniform(0.5, 1.5)), budgets.max_turn_tokens)
        if prompt + own > room:
            break
        room -= prompt + own
        pause = cluster.pause_seconds * chance.lognormvariate(-(_PAUSE_SPREAD**2) / 2, _PAUSE_SPREAD)
        turns.append(SimulatedTurn(prompt, max(1, own), pause))
    return SimulatedEpisode(turns, shared=turns[0].prompt if turns else 0)


@dataclass(frozen=True)
class GpuSpeed:
    """Implements :class:`EngineSpeed` for one server: what it reads over the bandwidth it reaches,
    and its operations over the speed it reaches; the longer of the two."""

    weights: int
    """Bytes on one GPU."""
    expert_share: float
    """Share of them that belongs to routed experts."""
    chosen: float
    """Share of the experts that a token meets."""
    token: int
    """Bytes of KV cache of one token on one GPU."""
    bandwidth: float
    """Bytes per second that one GPU reads."""
    flops: float
    """Operations per second of the server."""
    work: Workload

    @classmethod
    def of(cls, architecture: Architecture, config: ExperimentConfig, engine: EngineBytes) -> Self:
        a, cluster = architecture, config.cluster
        gpu = GPUS[cluster.gpu]
        return cls(
            weights=engine.weights,
            expert_share=a.expert_parameters / a.parameters,
            chosen=a.top_k / a.experts if a.experts else 1.0,
            token=engine.token,
            bandwidth=gpu.bandwidth * cluster.decode_share,
            flops=gpu.flops * cluster.prefill_mfu * config.engine.tensor_parallel,
            work=Workload.of(a),
        )

    def iteration(self, running: int, context: float) -> float:
        # Experts are taken as chosen at random.
        met = 1 - self.expert_share * (1 - self.chosen) ** running
        reading = (self.weights * met + context * self.token) / self.bandwidth
        return max(reading, (running * self.work.per_token + context * self.work.per_pair) / self.flops)

    def prefill(self, tokens: int) -> float:
        return self.work.operations([(0, tokens)]) / self.flops


def _setting(plan: Plan, config: ExperimentConfig, engine: EngineBytes, engines: int, staleness: int) -> Setting:
    """What all placements share; ``config`` has the trainer's layout."""
    algorithm, work, cluster = config.algorithm, plan.compute, config.cluster
    world = config.megatron.world_size
    speed = world * GPUS[cluster.gpu].flops * cluster.train_mfu * (1 - bubble(config))
    mean = mean_episode_tokens(config)
    # Operations per token at the length that is simulated, not at the longest.
    of_length = forward_flops(plan.architecture, 1, mean) / forward_flops(plan.architecture, 1, episode_tokens(config))
    return Setting(
        StepDemand(algorithm.groups_per_step, STEPS + 2 + 2 * staleness, staleness),
        algorithm.group_size,
        partial(draw_episode, config),
        GpuSpeed.of(plan.architecture, config, engine),
        engines=engines,
        slots=config.engine.max_running_requests,
        cache_tokens=engine.tokens,
        concurrency=max(config.rollout.concurrency, work.episodes * (staleness + 1)),
        score_seconds=work.score_flops / work.tokens * of_length / speed,
        train_seconds=work.train_flops / work.tokens * of_length / speed,
        sync_seconds=plan.sync.seconds,
    )


def _colocated(plan: Plan, staleness: int) -> SimulatedPlacement:
    config = plan.config
    setting = _setting(plan, config, plan.engine, plan.servers, staleness)
    if staleness == 0 and config.engine.memory_saver:
        setting = replace(setting, released=True, switch_seconds=config.cluster.switch_seconds)
    elif staleness:
        setting = replace(setting, together=_MIXED)
    return _simulated("at once" if staleness else "in turns", setting, plan.gpus, plan.gpus)


def _separate(plan: Plan, config: ExperimentConfig, staleness: int) -> SimulatedPlacement:
    """``config`` has the layout of the trainer's GPUs; the others generate."""
    engine_gpus = plan.gpus - config.megatron.world_size
    free = plan.gpu.memory - plan.reserve
    engine = engine_bytes(plan.architecture, config, free)
    setting = _setting(plan, config, engine, engine_gpus // config.engine.tensor_parallel, staleness)
    setting = replace(setting, sync_seconds=plan_sync(plan.architecture, config).seconds)
    return _simulated("separate", setting, config.megatron.world_size, engine_gpus)


def _means(setting: Setting) -> dict[str, float]:
    return mean_metrics(settled(simulate(setting), setting.demand.staleness))


def _simulated(name: str, setting: Setting, trainer_gpus: int, engine_gpus: int) -> SimulatedPlacement:
    found, staleness = _means(setting), setting.demand.staleness
    free = replace(
        setting,
        score_seconds=0.0,
        train_seconds=0.0,
        sync_seconds=0.0,
        switch_seconds=0.0,
        released=False,
        together=1.0,
    )
    # Nothing overlaps with a step that is trained in turns; its generation alone is what the step waits for.
    alone = found["time/wait_seconds"] if staleness == 0 else _means(free)["time/step_seconds"]
    step = found["time/step_seconds"]
    return SimulatedPlacement(
        name=name,
        staleness=staleness,
        trainer_gpus=trainer_gpus,
        engine_gpus=engine_gpus,
        generation_seconds=alone,
        training_seconds=(setting.score_seconds + setting.train_seconds) * found["policy/tokens"],
        sync_seconds=setting.sync_seconds,
        step_seconds=step,
        waiting=found["time/wait_seconds"] / step,
        generating=found["time/engine_generating"],
        slots_used=found["time/engine_slots_used"],
        lag_mean=found["mismatch/version_lag/mean"],
        lag_max=found["mismatch/version_lag/max"],
        setting=setting,
    )


def _splits(plan: Plan) -> Iterator[ExperimentConfig]:
    """The configuration with fewer data-parallel (and, where they need them, expert-parallel) ranks and engines on the
    other GPUs: whole nodes, or a part of the only one. As far as the layout is a proven one and fits the memory."""
    config, layout = plan.config, plan.config.megatron
    for data in range(1, layout.data_parallel):
        for expert in dict.fromkeys((layout.expert_parallel, layout.expert_parallel // 2, layout.expert_parallel // 4)):
            changed = layout.model_copy(update={"data_parallel": data, "expert_parallel": expert})
            rest = plan.gpus - changed.world_size
            if expert < 1 or any(problems(plan.architecture, changed)) or rest % config.engine.tensor_parallel:
                continue
            if (own := _apart(config, changed, rest)) is None:
                continue
            if is_proven(changed, moe=plan.architecture.experts > 0) and fits(plan, own):
                yield own
                break


def _apart(config: ExperimentConfig, layout: MegatronConfig, rest: int) -> ExperimentConfig | None:
    """``config`` with placement separate: the trainer in ``layout``, engines on the ``rest`` of the GPUs."""
    per_node, tp = gpus_per_node(config), config.engine.tensor_parallel
    if rest % per_node and config.cluster.nodes > 1:
        return None
    nodes, on_one = (rest // per_node, per_node) if config.cluster.nodes > 1 else (0, rest)
    engine = {"nodes": nodes, "count": on_one // tp, "transport": "broadcast", "memory_saver": False}
    parts = {"placement": "separate", "megatron": layout, "engine": config.engine.model_copy(update=engine)}
    return config.model_copy(update=parts)


def fits(plan: Plan, config: ExperimentConfig) -> bool:
    """Whether a trainer alone on its GPUs has room, in the layout of ``config``."""
    layout = config.megatron
    firsts = range(0, layout.world_size, layout.world_size // layout.pipeline_parallel)
    needed = max(
        stage.rank.bytes.total + reference_bytes(stage.rank, config) + stage.activations[layout.recompute].total
        for stage in stage_plans(plan.architecture, config, firsts, memory_options(plan.architecture, config))
    )
    return needed + plan.reserve <= plan.gpu.memory
