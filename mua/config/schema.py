"""The typed configuration of every command. The docstring under a field is its documentation.

``docs/configuration.md`` is generated from the sections (``make docs``), some of which lie in modules of their own.
Nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, model_validator

from mua.config.algorithm import (
    AlgorithmConfig,
    BalanceFilter,
    CurriculumConfig,
    DistillationConfig,
    GroupFilter,
    MinimumTurnsFilter,
    OverlongFilter,
    RangeFilter,
    RefillConfig,
    ShapingConfig,
)
from mua.config.environment import NO_DOMAIN, EndpointConfig, EnvironmentConfig, JudgeConfig, LlmConfig, UserConfig
from mua.config.megatron import ClusterConfig, CriticConfig, EngineConfig, MegatronConfig, OptimizerConfig
from mua.config.rollout import (
    AgentConfig,
    ContextConfig,
    EvaluationConfig,
    PolicyConfig,
    PolicyEndpointConfig,
    RolloutConfig,
    SamplersConfig,
)
from mua.config.section import Fraction, HookPath, NonNegative, OrHook, Positive, PositiveFloat, Section
from mua.config.storage import ObserveConfig, OfflineConfig, StoreConfig, StoredDemonstrations

__all__ = [
    "AlgorithmConfig", "BalanceFilter", "ClusterConfig", "ContextConfig", "CriticConfig", "CurriculumConfig",
    "DistillationConfig", "ENGINE_RESERVE", "EndpointConfig", "EngineConfig", "EnvironmentConfig", "EvaluationConfig",
    "ExperimentConfig", "GroupFilter", "JudgeConfig", "LlmConfig", "MegatronConfig", "MinimumTurnsFilter",
    "ModelConfig", "ObserveConfig", "OfflineConfig", "OptimizerConfig", "OverlongFilter", "PolicyConfig",
    "PolicyEndpointConfig", "RangeFilter", "RefillConfig", "RolloutConfig", "Section", "SftConfig",
    "ShapingConfig", "SlurmConfig", "StoreConfig", "StoredDemonstrations", "TrainerConfig", "UserConfig",
]  # fmt: skip

ENGINE_RESERVE = 8
"""Tokens of its context that SGLang does not take as input (6 in 0.5.23), and a margin."""


class ModelConfig(Section):
    """The policy."""

    path: Annotated[Path, Field(strict=False)]
    """Hugging Face folder: config.json, safetensors, tokenizer files."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Parameter and activation type; with bfloat16 the optimizer keeps float32 main weights."""
    chat_family: Annotated[Literal["qwen2.5", "qwen3"], OrHook] | None = None
    """How conversations are rendered. None: as the model type in config.json says. Or a hook: a class of your own."""
    thinking: bool = False
    """Whether the chat template lets the model reason before it answers."""
    max_length: Positive = 40960
    """Longest context in tokens, prompt included, in training and generation."""
    hf_config: Annotated[Path, Field(strict=False)] | None = None
    """A config.json to plan with where ``path`` is not there, so that ``mua plan`` needs no download."""
    fp32_lm_head: bool = False
    """Compute the output layer's product in float32, from bfloat16 weights, in trainer and engines alike."""
    init_control_tokens: Literal["off", "mean"] = "off"
    """What becomes of a control token of the chat family that the model has never trained: its row equals others, or is
    far shorter. The log names them at load. ``mean`` starts them from the mean of the ordinary tokens that spell them,
    at the median norm, in the trainer; fine-tuning then teaches where to write them."""
    shrink: bool = False
    """Replace the policy by a tiny random one of the same family, and every budget by one a laptop can pay, but keep
    the parallel layout; what was replaced is printed. To try a recipe without its GPUs."""


class TrainerConfig(Section):
    """The loop."""

    steps: Positive
    """Optimizer steps (batches) of the run."""
    max_staleness: NonNegative = 0
    """Policy versions a trajectory's first token may lag behind the step that trains on it. 0 is synchronous."""
    deterministic: bool = False
    """Bit-for-bit repeatable on CPU: seeded requests, fixed order of groups, deterministic engine."""
    save_every: NonNegative = 10
    """Steps between checkpoints; 0 saves only the last."""
    keep: Positive = 2
    """Checkpoints kept."""
    async_save: bool = False
    """Write checkpoints in the background, from a copy of weights and optimizer state in host memory."""
    resume: bool = True
    """Continue from the newest whole checkpoint in the output folder, if there is one."""
    evaluate_every: NonNegative = 0
    """Steps between evaluations on ``evaluation.split``; 0 never."""
    evaluate_first: bool = False
    """Evaluate before the first step too."""
    export: Literal["last", "best"] = "last"
    """Whose weights the run leaves in ``<output>/hf`` and plays ``evaluation.report_split`` with: those after the last
    step, or those of ``checkpoints/best``, the best by ``evaluation.split``."""
    min_scored_share: Fraction = 0.5
    """Least share of a step's episodes that could be scored. Where users, judges or tools fail more often, the step
    trains on nothing, because the rest is no fair sample; of no episode at all no step learns."""
    max_unscored_steps: Positive = 2
    """Steps in a row with too few scored episodes (see min_scored_share) after which the run ends with an error that
    names the commonest reason. The first ends it where that reason does not pass by itself (a refused key), and with
    ``deterministic``, where a fault must not change what is learned."""
    max_skipped_steps: Positive = 5
    """Steps in a row that changed nothing, because their gradient norm was not finite, after which the run ends. One
    may be an accident of a batch; more are weights, data or a learning rate that time does not fix."""
    after_step: HookPath | None = None
    """A hook that rank 0 calls after each step with its metrics and groups; what it gives is logged with the step."""
    silence_seconds: PositiveFloat = 120.0
    """With several ranks: how long those that wait for rank 0 bear its silence. It gives ten signs of life in that
    time, however long a rollout takes."""


class SftConfig(Section):
    """Supervised fine-tuning."""

    data: Annotated[Path, Field(strict=False)] | None = None
    """Conversations: a file of JSON lines, one JSON array, either gzipped, Parquet or Arrow, or a folder of them, as
    ``Dataset.save_to_disk`` writes it too. A record is in OpenAI form (``{"messages": [...], "tools": [...]}``), in
    ShareGPT form (``{"conversations": [...], "system": ..., "tools": ...}``), a prompt and its completion, or an
    instruction and its output (docs/sft.md). Either this or ``stored``."""
    stored: StoredDemonstrations | None = None
    """Episodes of a store to learn from instead, by the tokens that were sampled."""
    batch_size: Positive = 64
    """Conversations in one optimizer step."""
    train_on: Literal["all", "last"] = "all"
    """Which assistant turns carry loss."""
    overlong: Literal["refuse", "skip"] = "refuse"
    """What becomes of a conversation longer than model.max_length: an error, or left out and counted in the log. None
    is cut: a conversation without its end teaches to stop anywhere."""
    validation: Annotated[Path, Field(strict=False)] | Annotated[float, Field(gt=0, lt=1)] | None = None
    """Conversations whose loss is measured and not trained on: a place like ``data``, or the share of ``data`` to hold
    out, drawn by content and ``seed``, copies of a conversation together."""
    validate_every: Positive = 50
    """Steps between measurements of the validation loss; the last step always has one."""
    short_first_steps: NonNegative = 0
    """Steps at the beginning that use only the shortest quarter of the conversations. A policy with random weights
    learns to copy from short contexts much sooner than from long ones."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.data is None) == (self.stored is None):
            raise ValueError("give either data, a file of conversations, or stored, episodes of a store")
        return self


class SlurmConfig(Section):
    """How ``mua launch slurm`` asks for nodes."""

    nodes: Positive | None = None
    """Nodes of the job, with those of ``engine.nodes``; None: as many as the layout's ranks fill, and those."""
    gpus_per_node: NonNegative = 8
    """GPUs of one node, one rank on each; 0 on a cluster without GPUs, where nodes share the ranks evenly."""
    exclusive: bool = True
    """Ask for whole nodes: all their cores and all their memory. False: for ``cpus_per_task`` cores and the cluster's
    default of memory (``--mem`` in ``extra``), where a site does not grant whole nodes or a run needs less than one."""
    cpus_per_task: Positive | None = None
    """Cores of one node's part of the job, shared by its ranks, engines and environments; None: 8 for each rank. Of
    whole nodes, the least that a node must have."""
    partition: str | None = None
    """Partition; None: the cluster's default."""
    account: str | None = None
    """Account the job is charged to."""
    qos: str | None = None
    """Quality of service."""
    time: str | None = None
    """Time limit in Slurm's forms, such as ``24:00:00`` or ``2-00:00:00``; None: the partition's."""
    signal_minutes: Positive = 5
    """Minutes before the time limit at which the run is told to save and leave. Loading, one optimizer step and one
    checkpoint have to fit."""
    requeue: bool = True
    """Come back after the time limit, a node's failure or a fault, and continue from the newest checkpoint."""
    max_faults: NonNegative = 3
    """Faults (exit statuses 75, 1 or none) without a new checkpoint between them after which the job gives up."""
    preflight: bool = True
    """Run ``mua doctor preflight`` on all ranks first."""
    setup: list[str] = []
    """Shell commands on every node before the virtual environment, such as ``module load cuda``."""
    venv: Annotated[Path, Field(strict=False)] | None = None
    """Virtual environment on the nodes; None: the one ``mua launch`` runs in."""
    container_image: str | None = None
    """Image for clusters with pyxis (``srun --container-image``)."""
    container_mounts: list[str] = []
    """``SOURCE:TARGET[:FLAGS]`` for ``srun --container-mounts``. The checkout, the environment and the folders of the
    configuration must be visible under their own paths."""
    user_address: Annotated[Path, Field(strict=False)] | None = None
    """Address file that ``slurm/serve_user.sbatch`` leaves. The job waits for it and sets MUA_USER_BASE_URL,
    MUA_USER_MODEL and MUA_USER_API_KEY, which the configuration names as ``${MUA_USER_BASE_URL}``."""
    user_seconds: PositiveFloat = 1800.0
    """Deadline of that wait."""
    extra: list[str] = []
    """Further options of sbatch, such as ``--constraint=h200``."""
    engine_partition: str | None = None
    """Partition of the nodes that have engines alone (``engine.nodes``). Any of the three keys ``engine_*`` makes these
    nodes a component of their own in a heterogeneous job; without them they are the last nodes of one job."""
    engine_gpus_per_node: NonNegative | None = None
    """GPUs of one of these nodes; None: ``gpus_per_node``."""
    engine_extra: list[str] = []
    """Options of sbatch for these nodes instead of ``extra``."""


class ExperimentConfig(Section):
    """One experiment: what ``mua train``, ``mua sft``, ``mua eval`` and ``mua rollout`` read."""

    READS = {"algorithm.advantage": {"gae": ("critic",)}}

    name: str
    """Name of the experiment, for people."""
    output: Annotated[Path, Field(strict=False)]
    """Folder for checkpoints, logs and traces."""
    seed: int = 1
    """Seed of everything random: order of tasks, environments, users and, where they are deterministic, engines."""
    placement: Literal["colocated", "separate"] = "colocated"
    """Where the engines of a training run are. colocated: on the trainer's GPUs. separate: on GPUs of their own, behind
    those of a node's trainer ranks or on ``engine.nodes``, so that they generate while the trainer trains."""
    model: ModelConfig
    environment: EnvironmentConfig
    user: UserConfig = UserConfig()
    judge: JudgeConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    agent: AgentConfig | None = None
    context: ContextConfig = ContextConfig()
    engine: EngineConfig = EngineConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    megatron: MegatronConfig = MegatronConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    critic: CriticConfig = CriticConfig()
    cluster: ClusterConfig = ClusterConfig()
    trainer: TrainerConfig
    sft: SftConfig | None = None
    evaluation: EvaluationConfig = EvaluationConfig()
    observe: ObserveConfig = ObserveConfig()
    slurm: SlurmConfig = SlurmConfig()
    store: StoreConfig = StoreConfig()
    samplers: SamplersConfig = SamplersConfig()
    offline: OfflineConfig | None = None
    """Train on the groups of a store instead of new episodes (docs/store.md)."""

    def language_models(self) -> dict[str, LlmConfig]:
        """The models of user and judge that this experiment asks, by the name of their section."""
        user = self.user.llm if self.user.asks_model else None
        judge = self.judge.llm if self.judge is not None else None
        return {name: llm for name, llm in (("user.llm", user), ("judge.llm", judge)) if llm is not None}

    @property
    def optimizer_steps(self) -> tuple[int, int | None]:
        """Of the policy in a run of reinforcement learning, and of the critic, if there is one."""
        algorithm, steps = self.algorithm, self.trainer.steps
        each = algorithm.epochs * algorithm.minibatches
        if algorithm.advantage != "gae":
            return steps * each, None
        return (steps - self.critic.warmup_steps) * each, steps * each

    @property
    def writes_traces(self) -> bool:
        """Whether training leaves its episodes as trace files."""
        return not self.store.enabled if self.observe.traces is None else self.observe.traces

    @property
    def evaluated_splits(self) -> list[Literal["train", "validation", "test"]]:
        """The splits that training plays tasks of to judge itself: as it goes, and for its report."""
        trainer, chosen = self.trainer, self.evaluation
        going = [chosen.split] if trainer.evaluate_every > 0 or trainer.evaluate_first else []
        return going + [split for split in (chosen.report_split,) if split is not None and split not in going]

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any, info: ValidationInfo) -> Any:
        """What follows from other keys, where it is not set."""
        if not isinstance(data, dict):
            return data
        kind: Any = data
        for key in ("evaluation", "policy", "kind"):
            kind = kind.get(key) if isinstance(kind, dict) else None
        if kind == "endpoint":  # who evaluates a policy behind an endpoint has no model folder and trains nothing
            data = {"model": {"path": "none"}, "trainer": {"steps": 1}, **data}
        if data.get("sft") or data.get("offline"):  # who only learns from recordings names no domain
            data = {"environment": {"name": NO_DOMAIN}, **data}
        engine, transport = data.get("engine", {}), "broadcast" if data.get("placement") == "separate" else "colocated"
        if isinstance(engine, EngineConfig) and engine.transport is None:
            data = data | {"engine": engine.model_copy(update={"transport": transport})}
        elif isinstance(engine, dict) and engine.get("transport") is None:
            data = data | {"engine": engine | {"transport": transport}}
        # Where rollout.max_tokens is not set, or no episode is played: what fits the context and a micro-batch.
        sections = [data.get(name) or {} for name in ("model", "megatron", "rollout")]
        if not all(isinstance(section, dict) for section in sections):
            return data
        keys = ("max_length", "max_tokens_per_microbatch", "max_tokens")
        kinds: tuple[type[Section], ...] = (ModelConfig, MegatronConfig, RolloutConfig)
        numbers: list[Any] = [
            section.get(key, kind.model_fields[key].default)
            for section, key, kind in zip(sections, keys, kinds, strict=True)
        ]
        length, budget, given = numbers
        plays, rollout = (info.context or {}).get("verb") != "sft", sections[2]
        if not all(type(number) is int for number in (length, budget, given)) or (plays and "max_tokens" in rollout):
            return data
        fits = min(given, length - ENGINE_RESERVE, budget)
        if fits < 1 or fits in (given, rollout.get("max_tokens")):
            return data
        return data | {"rollout": rollout | {"max_tokens": fits}}

    @model_validator(mode="after")
    def _sections_go_together(self, info: ValidationInfo) -> Self:
        """All rules that are broken at once, a line each."""
        if (info.context or {}).get("rules") is False:
            return self
        rules = (self._played, self._placed, self._fits, self._trained, self._sees_its_sampler, self._has_a_critic)
        if found := [problem for rule in rules for problem in rule()]:
            raise ValueError("\n".join(found))
        return self

    def _played(self) -> Iterator[str]:
        """Tools, judges and samplers have what they ask."""
        known = [*self.environment.shares, *self.evaluation.domains]
        named = {f"mcp.{place}": server.domains for place, server in enumerate(self.environment.mcp)}
        for key, domains in named.items():
            if unknown := [name for name in domains if name not in known]:
                there = ", ".join(known)
                yield f"environment.{key}.domains: {unknown[0]!r} is no domain of this run; there are {there}"
        if self.agent is not None and self.agent.judge is not None and self.judge is None:
            yield "agent.judge asks the endpoint of judge.llm; add the section judge"
        if self.samplers.enabled and not self.store.enabled:
            yield "samplers.enabled needs store.enabled: true: samplers lease their episodes from the store"
        if self.samplers.enabled and self.offline is not None:
            yield "samplers.enabled has no use with the section offline, which rolls nothing out"

    def _placed(self) -> Iterator[str]:
        """Engines and trainer on the same GPUs or on different ones."""
        engine, offload = self.engine, self.megatron.offload
        if self.trainer.max_staleness and (engine.memory_saver or offload):
            yield "engine.memory_saver and megatron.offload need trainer.max_staleness 0: else both sides work at once"
        if self.placement == "colocated":
            if engine.nodes:
                yield f"engine.nodes {engine.nodes} needs placement separate; it is colocated"
            return
        if engine.transport == "colocated":
            yield "placement separate needs engine.transport broadcast or null: no memory is shared with the trainer"
        for key, value in (("engine.memory_saver", engine.memory_saver), ("megatron.offload", offload)):
            if value:
                yield f"{key} has no use with placement separate, where no GPU is shared; set it to false"

    def _fits(self) -> Iterator[str]:
        """Lengths."""
        context, longest, budget = self.context, self.rollout.max_tokens, self.megatron.max_tokens_per_microbatch
        if longest + ENGINE_RESERVE > self.model.max_length:
            yield (
                f"rollout.max_tokens {longest} must stay {ENGINE_RESERVE} below model.max_length "
                f"{self.model.max_length}, because SGLang keeps some of its context to itself; lower the first or "
                "raise the second"
            )
        if context.takes_notes and (1 - context.share) * longest <= context.summary_tokens:
            yield (
                f"context.summary_tokens {context.summary_tokens} does not fit: from context.share {context.share:g} "
                f"on {(1 - context.share) * longest:.0f} of rollout.max_tokens {longest} are left"
            )
        if longest > budget:
            yield (
                f"rollout.max_tokens {longest} does not fit a packed micro-batch of megatron.max_tokens_per_microbatch "
                f"{budget}; raise that or shorten the episodes"
            )

    def _trained(self) -> Iterator[str]:
        """Optimizer, pipeline, determinism."""
        algorithm, megatron, trainer, engine = self.algorithm, self.megatron, self.trainer, self.engine
        groups, parts = algorithm.groups_per_step, algorithm.minibatches
        if groups % parts:
            yield f"algorithm.minibatches {parts} must divide algorithm.groups_per_step {groups}"
        if megatron.routing_replay != "off" and not engine.routed_experts:
            yield "megatron.routing_replay needs engine.routed_experts: true"
        if megatron.virtual_pipeline and megatron.pipeline_parallel == 1:
            yield "megatron.virtual_pipeline needs megatron.pipeline_parallel above 1"
        yield from self._optimizer_fits("optimizer", self.optimizer)
        yield from self._optimizer_fits("critic.optimizer", self.critic.optimizer)
        for key in ("moe_aux_loss", "moe_z_loss"):
            if algorithm.skip_zero_advantage and getattr(megatron, key):
                yield f"algorithm.skip_zero_advantage needs megatron.{key} 0: that loss trains every token"
        if trainer.export == "best" and not trainer.evaluate_every:
            yield "trainer.export best needs trainer.evaluate_every above 0: evaluations say which is best"
        if engine.deterministic and self.rollout.min_p:
            yield "engine.deterministic needs rollout.min_p 0: SGLang's seeded draw knows no min_p"
        if not trainer.deterministic:
            return
        if trainer.max_staleness:
            yield "trainer.deterministic needs trainer.max_staleness 0: arrival order decides what is stale"
        if algorithm.refill.oversample:
            yield "trainer.deterministic needs algorithm.refill.oversample 0: it trains on what ends first"
        if not engine.deterministic:
            yield "trainer.deterministic needs engine.deterministic: true"
        if self.user.asks_model:
            yield "trainer.deterministic needs a scripted or replayed user, not a language model"

    def _optimizer_fits(self, name: str, optimizer: OptimizerConfig) -> Iterator[str]:
        """Its schedule; where its state lies and in which types, with the model and the distributed optimizer."""
        low, high, reduced = optimizer.min_learning_rate, optimizer.learning_rate, self.megatron.grad_reduce_in_fp32
        if low > high:
            yield f"{name}.min_learning_rate {low} exceeds {name}.learning_rate {high}"
        if not (optimizer.precision_aware or optimizer.cpu_offload_fraction):
            return
        key = "precision_aware" if optimizer.precision_aware else "cpu_offload_fraction"
        if not self.megatron.distributed_optimizer:
            yield f"{name}.{key} needs megatron.distributed_optimizer: true"
        if self.model.dtype != "bfloat16":
            yield f"{name}.{key} needs model.dtype bfloat16: {self.model.dtype} weights are the main ones"
        if optimizer.cpu_offload_fraction and self.megatron.fp8_param_gather:
            yield f"{name}.cpu_offload_fraction does not go with megatron.fp8_param_gather"
        if (optimizer.main_grads_dtype == "float32") != reduced:
            needed = str(not reduced).lower()
            yield f"{name}.main_grads_dtype {optimizer.main_grads_dtype} needs megatron.grad_reduce_in_fp32 {needed}"

    def _sees_its_sampler(self) -> Iterator[str]:
        """Who sampled is not always the policy that is trained."""
        algorithm, offline, stale = self.algorithm, self.offline, self.trainer.max_staleness
        carry = algorithm.refill.carry_versions
        older = (
            f"algorithm.refill.carry_versions {carry}" if carry else
            f"trainer.max_staleness {stale}" if stale else "offline" if offline else ""
        )  # fmt: skip
        if older and not algorithm.sees_sampler and not algorithm.allow_off_policy:
            yield (
                f"{older} trains on what other policies sampled, and with algorithm.correction {algorithm.correction}, "
                f"algorithm.old_logprobs {algorithm.old_logprobs} and algorithm.loss {algorithm.loss} no gradient "
                "depends on how they sampled it: set algorithm.correction to truncate, mask or band (with "
                "algorithm.old_logprobs recompute), or algorithm.old_logprobs to engine (with a loss other than "
                "reinforce), or algorithm.allow_off_policy to true"
            )
        if not older and algorithm.is_set("correction_decay"):
            yield (
                "algorithm.correction_decay narrows the band for tokens of older policies, and every token is of the "
                "newest; set trainer.max_staleness above 0, or leave it out"
            )
        if offline is None:
            return
        needs_engines = {
            "trainer.evaluate_every": self.trainer.evaluate_every,
            "trainer.evaluate_first": self.trainer.evaluate_first,
            "evaluation.report_split": self.evaluation.report_split,
            "algorithm.refill": algorithm.refill.on,
        }
        if found := [name for name, on in needs_engines.items() if on]:
            yield f"{found[0]} needs engines, which a run with the section offline does not start; leave it out"
        if offline.recorded_teacher and algorithm.distillation is None:
            yield "offline.recorded_teacher needs the section algorithm.distillation"

    def _has_a_critic(self) -> Iterator[str]:
        if self.algorithm.advantage != "gae":
            return
        warmup, steps = self.critic.warmup_steps, self.trainer.steps
        if warmup >= steps:
            yield f"critic.warmup_steps {warmup} leaves the policy none of the trainer.steps {steps}"
