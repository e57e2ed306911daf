"""The typed configuration of every command. The docstring under a field is its documentation.

``docs/configuration.md`` is generated from the sections (``make docs``), some of which lie in modules of their own.
Nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, model_validator

from mua.config.agent_section import AgentConfig
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
from mua.config.context_section import ContextConfig
from mua.config.environment import NO_DOMAIN, EndpointConfig, EnvironmentConfig, JudgeConfig, LlmConfig, UserConfig
from mua.config.megatron import CriticOptimizerConfig, MegatronConfig, OptimizerConfig
from mua.config.samplers_section import SamplersConfig
from mua.config.section import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section
from mua.config.store_section import OfflineConfig, StoreConfig, StoredDemonstrations
from mua.types import Json

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
    thinking: bool = False
    """Whether the chat template lets the model reason before it answers."""
    max_length: Positive = 40960
    """Longest context in tokens, prompt included, in training and generation."""
    hf_config: Annotated[Path, Field(strict=False)] | None = None
    """A config.json to plan with where ``path`` is not there, so that ``mua plan`` needs no download."""
    fp32_lm_head: bool = False
    """Compute the output layer's product in float32, from bfloat16 weights, in trainer and engines alike."""
    shrink: bool = False
    """Replace the policy by a tiny random one of the same family, and every budget by one a laptop can pay, but keep
    the parallel layout; what was replaced is printed. To try a recipe without its GPUs."""


class RolloutConfig(Section):
    """Budgets of one episode and how it is sampled."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature; training divides the logits by the same value."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 switches it off. Training refuses less, see ``unreproduced``."""
    top_k: int = -1
    """Sample among the k likeliest tokens only; -1 switches it off. Training refuses others, see ``unreproduced``."""
    min_p: Fraction = 0.0
    """Sample among tokens of at least this share of the likeliest one's probability; 0 switches it off. Training
    refuses more, see ``unreproduced``."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Taken from the logits of tokens that the turn holds already, before the temperature. Training refuses others than
    0, see ``unreproduced``."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Likewise, times how often the turn holds the token."""
    unreproduced: bool = False
    """Train although ``top_p``, ``top_k``, ``min_p`` or a penalty makes the policy sample from another distribution
    than the trainer computes (docs/algorithms.md says what each does to the ratios)."""
    max_turns: Positive = 30
    """Assistant turns (generations) in one episode."""
    max_tool_calls: Positive = 60
    """Tool calls in one episode."""
    final_turn: bool = False
    """Give the policy one more turn, without tools, when ``max_turns`` or ``max_tool_calls`` is used up: it is told so
    by ``final_request``, and its text goes to the user."""
    final_request: str = "You have no more turns and can call no more tools. Give your final answer now."
    """The user's message in the policy's context that asks for it; no user is asked, and ``forced`` marks it."""
    max_turn_tokens: Positive = 1024
    """New tokens in one assistant turn."""
    max_tokens: Positive = 32768
    """Length of one segment; the episode ends as ``length`` when the next turn no longer fits. Where it is not set, it
    is at most what ``model.max_length`` and ``megatron.max_tokens_per_microbatch`` hold; ``mua sft`` ignores it."""
    max_malformed: NonNegative = 2
    """Malformed or unknown tool calls answered with an error observation before the episode ends as malformed."""
    generate_seconds: PositiveFloat = 600.0
    """Deadline of one assistant turn. A turn that the policy wrote on and on until then ends as ``length``; one that
    the engine was too slow for is unscored (``mua/rollout/agent.py`` has the rule)."""
    user_seconds: PositiveFloat = 600.0
    """Deadline of one utterance of the user, as the episode sees it."""
    episode_seconds: PositiveFloat = 3600.0
    """Deadline of the whole episode; past it the outcome is ``timeout``."""
    max_retries: NonNegative = 3
    """Fresh tries after an infrastructure fault before the trajectory is given up (unscored)."""
    concurrency: Positive = 64
    """Episodes in flight at once."""

    @property
    def truncations(self) -> Json:
        """Settings that let only some tokens be sampled, whose log-probabilities stay those of all."""
        settings: Json = {"top_p": (self.top_p, 1.0), "top_k": (self.top_k, -1), "min_p": (self.min_p, 0.0)}
        return {name: value for name, (value, off) in settings.items() if value != off}

    @property
    def penalties(self) -> Json:
        """Settings that change the logits before they are sampled from, and so the log-probabilities too."""
        settings = {"presence_penalty": self.presence_penalty, "frequency_penalty": self.frequency_penalty}
        return {name: value for name, value in settings.items() if value}

    @property
    def other_distribution(self) -> str:
        """In words, by which settings the policy samples from another distribution than the trainer computes; empty
        where it does not."""
        settings = self.truncations | self.penalties
        if not settings:
            return ""
        shown = ", ".join(f"rollout.{name} {value:g}" for name, value in settings.items())
        return (
            f"{shown}: the policy samples from another distribution than softmax(logits / temperature), which the "
            f"trainer computes; the engine's log-probabilities are of {self.sampling(self.temperature)['logprobs_of']}"
        )

    def sampling(self, temperature: float) -> Json:
        """How an episode is sampled at ``temperature``; ``logprobs_of`` names the distribution that its
        log-probabilities are of, as SGLang 0.5.23 computes them (``srt/layers/sampler.py``)."""
        logits = "(logits - penalties)" if self.penalties else "logits"
        of = f"softmax({logits} / temperature)" if temperature else f"softmax({logits.strip('()')})"
        truncated = self.truncations if temperature else {}
        return {"temperature": temperature, **truncated, **self.penalties, "logprobs_of": of}


class EngineConfig(Section):
    """The SGLang servers."""

    count: Positive = 1
    """Servers on every node of the trainer, or with ``nodes`` on every engine node."""
    nodes: NonNegative = 0
    """With placement separate: machines that have engines only, each with a process of ``mua engines``. A run waits for
    so many at its start; more may join and any may leave while it runs. 0: the trainer's nodes have the engines."""
    address: str | None = None
    """By which engine nodes reach the trainer's first node. None: MASTER_ADDR, or what this machine's name stands for,
    or the loopback address where no other node has engines."""
    transport: Literal["colocated", "broadcast"] | None = None
    """How weights reach the engines; None: as ``placement`` needs it. colocated: a rank of each node hands its engines
    memory they share (shared memory on CPU, CUDA IPC handles on GPU). broadcast: trainer ranks and all engine ranks
    form process groups (gloo or NCCL), which takes engines with GPUs of their own."""
    broadcast_roots: Positive = 2
    """Trainer ranks that broadcast weights, each its share through a process group with all engine ranks."""
    load: Literal["auto", "slices", "tensors"] = "auto"
    """What a colocated engine rank is handed. slices: its own part of every parameter. tensors: whole Hugging Face
    tensors, of which it keeps its part, whatever the engine does with its weights. auto: slices where the policy's
    family has a table of SGLang's parameters and engine.extra does not change their layout; the log says which."""
    tensor_parallel: Positive = 1
    """GPUs (on CPU: processes) of one server."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Defaults to model.dtype."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of the device's memory for weights and KV cache (SGLang's mem_fraction_static)."""
    max_total_tokens: Positive | None = None
    """Cap of the KV cache in tokens; None lets SGLang decide by memory."""
    max_running_requests: Positive = 64
    """Requests one server decodes together; more wait."""
    radix_cache: bool = True
    """Prefix caching between turns and episodes."""
    deterministic: bool = False
    """Per-request sampling seeds and batch-invariant numerics, for bit-for-bit repetition."""
    routed_experts: bool = False
    """Record which experts each token was routed to (mixture-of-experts policies), for megatron.routing_replay."""
    memory_saver: bool = False
    """Release engine memory between rollouts with torch_memory_saver (GPU)."""
    start_seconds: PositiveFloat = 600.0
    """Deadline of a server's start, model loading included."""
    stop_seconds: PositiveFloat = 30.0
    """Time a server gets to stop before it is killed."""
    leave_seconds: PositiveFloat = 20.0
    """Time that requests get to end on an engine node which was asked to leave; what still runs then goes on elsewhere
    from what it has. Shorter than what the cluster leaves between the signal and the kill (Slurm's KillWait: 30 s)."""
    health_seconds: PositiveFloat = 10.0
    """Interval of the health watch."""
    control_seconds: PositiveFloat = 60.0
    """How long an engine may stay silent before it is restarted: the deadline of one control request (pause, flush,
    memory, a bucket of weights, which gets a second more for every 50 MB), and of three health probes in a row."""
    max_restarts: NonNegative = 3
    """Restarts of one server before the run gives up."""
    bucket_bytes: Positive = 512 * 1024 * 1024
    """Upper bound of one weight-sync bucket."""
    extra: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Native SGLang server arguments, passed through (``schedule_policy: lpm``)."""


class ClusterConfig(Section):
    """The machines ``mua plan`` plans for, with the engines on the trainer's GPUs; nothing else reads this section."""

    gpu: Literal["A100-80", "H100", "H200", "B200"] = "H200"
    """Type of GPU; ``mua/launch/plan/compute.py`` has the table of memory, bandwidth and speed."""
    gpus_per_node: Positive | None = None
    """GPUs of one machine; None: as many as the layout needs, divided by ``nodes``."""
    nodes: Positive = 1
    """Machines."""
    nvlink_gigabytes_per_second: NonNegativeFloat | None = 450.0
    """Bandwidth of one GPU to others of its machine, one direction (NVLink 4: 450). None or 0: there is no NVLink, and
    the plan is made with PCIe 5.0 x16 (55) and says so."""
    network_gigabytes_per_second: PositiveFloat = 50.0
    """Bandwidth of one GPU to other machines, one direction (one 400 Gb/s adapter a GPU: 50)."""
    host_gigabytes: PositiveFloat = 2048.0
    """Memory of one machine; a plan refuses what is to wait there and does not fit."""
    reserve_gigabytes: NonNegativeFloat = 6.0
    """Memory of each GPU that no tensor uses: CUDA contexts of trainer and engine, NCCL's buffers, fragmentation."""
    train_mfu: Annotated[float, Field(gt=0, le=1)] = 0.35
    """Assumed share of the GPU's peak that training and scoring reach in model FLOPs: recomputation does not count as
    work, and a pipeline's bubble comes on top."""
    rollout_mfu: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Assumed share of the GPU's peak in model FLOPs while episodes run: decoding, users and tools included."""
    episode_tokens: Positive | None = None
    """Expected tokens of one episode; None plans with the worst case, rollout.max_tokens."""
    sampled_share: Fraction = 0.25
    """Expected share of an episode's tokens that the policy samples; the rest is prompt, user and tools."""
    prefill_mfu: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Assumed share of the GPU's peak that an engine reaches in model FLOPs while it takes in prompts. This key and
    those below are read by ``mua plan --placements`` alone."""
    decode_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Assumed share of the memory's bandwidth that an engine reaches while it decodes: the time of an iteration is what
    it reads, weights and KV cache, over that."""
    episode_turns: Positive = 12
    """Expected turns of the policy in one episode."""
    length_spread: NonNegativeFloat = 0.5
    """How much episodes differ in length: standard deviation of the logarithm of their sampled tokens."""
    pause_seconds: NonNegativeFloat = 2.0
    """Mean seconds between two turns, in tools or with the user."""
    switch_seconds: NonNegativeFloat = 2.0
    """Seconds in which engines give their memory back, and once more in which they take it back, with
    engine.memory_saver."""


class CriticConfig(Section):
    """The critic of ``algorithm.advantage: gae``: the policy's architecture and first weights with a scalar output."""

    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    value_clip: PositiveFloat | None = 0.5
    """How far a value may move from its old one before a token's gradient ends, in units of reward; None: no bound."""
    warmup_steps: NonNegative = 0
    """Steps at the beginning of a run in which the critic learns and the policy does not."""


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


class PolicyEndpointConfig(EndpointConfig):
    """The policy that ``mua eval`` evaluates, where it is no checkpoint of ours; needs native tool calls."""

    request_seconds: PositiveFloat = 300.0
    """Deadline of one request; ``rollout.generate_seconds`` bounds a turn, retries included."""
    max_retries: NonNegative = 5
    """Retries of one request on 408, 409, 429, 5xx, dropped connections and replies that cannot be read."""
    concurrency: Positive = 64
    """Requests in flight at once; the rest wait."""
    send_reasoning: bool = True
    """Give the policy's ``reasoning_content`` back with its messages, as models that reason between tool calls expect;
    turn it off for endpoints that refuse unknown fields."""

    @property
    def endpoints(self) -> tuple[EndpointConfig, ...]:
        """Only itself: another endpoint would be another policy."""
        return (self,)


class PolicyConfig(Section):
    """The policy that ``mua eval`` evaluates."""

    kind: Literal["engine", "endpoint"] = "engine"
    """``engine``: the checkpoint ``model.path``, served here; ``endpoint``: whatever answers at ``endpoint``, in which
    case the sections ``model`` and ``trainer`` may be left out."""
    endpoint: PolicyEndpointConfig | None = None
    """Needed when kind is ``endpoint``."""

    @model_validator(mode="after")
    def _kind_has_its_section(self) -> Self:
        if self.kind == "endpoint" and self.endpoint is None:
            raise ValueError("kind 'endpoint' needs the section evaluation.policy.endpoint")
        return self


class EvaluationConfig(Section):
    """How a policy is evaluated."""

    policy: PolicyConfig = PolicyConfig()
    """Of ``mua eval``; in training it is always the policy being trained."""
    domains: list[str] = []
    """Domains and gyms that ``mua eval`` goes over; empty: those of ``environment``. Training evaluates them besides
    its own: those it does not train on are held out, with metrics of their own."""
    options: dict[str, str | int | float | bool] = {}
    """Settings of those of ``domains`` that are not in ``environment``, with their owner: ``{turtle.max_words: 5}``."""
    split: Literal["train", "validation", "test"] = "validation"
    """Which tasks; the splits are disjoint. Training evaluates itself on ``validation``: it refuses ``test`` here
    unless ``test_in_training`` is set."""
    test_in_training: bool = False
    """Let training evaluate on the test split as it goes. What is tuned, stopped or chosen by such numbers is no longer
    evaluated by them; for numbers of a report there is ``report_split``."""
    report_split: Literal["train", "validation", "test"] | None = None
    """Tasks that training plays for the report alone: before its first step, and after its last with the policy that
    ``trainer.export`` chooses. Nothing is decided by them; the numbers stand in ``<output>/report.json``."""
    tasks: Positive | None = None
    """So many tasks of the split, of each domain: a sample in the proportions of kinds and difficulties, always the
    same, with every kind where there is room for it. None takes all."""
    samples: Positive = 1
    """Episodes of each task. pass^k and pass@k are reported for every k up to this, 8 at most."""
    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""
    level: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Level of the confidence intervals."""
    resamples: Positive = 2000
    """Bootstrap resamples behind every interval."""
    outputs: list[Literal["json", "markdown", "plots"]] = ["json", "markdown", "plots"]
    """What ``mua eval`` writes: ``evaluation.json`` (which ``mua compare`` reads), ``report.md``, pictures."""

    @model_validator(mode="after")
    def _options_have_owners(self) -> Self:
        if self.options and not self.domains:
            raise ValueError("evaluation.options needs evaluation.domains, whose settings they are")
        return self


class WandbConfig(Section):
    """A run at Weights & Biases; its package must be installed, and its own login made."""

    project: str
    """Made where it is not there."""
    entity: str | None = None
    """Team or user; None: the one who logged in."""
    name: str | None = None
    """Of the run; None: ``name`` of the configuration."""
    mode: Literal["online", "offline"] = "online"
    """``offline`` writes into ``<output>/wandb``, for ``wandb sync`` later."""


class MlflowConfig(Section):
    """A run at an MLflow server, or in its files; its package must be installed."""

    experiment: str
    """Made where it is not there."""
    tracking_uri: str | None = None
    """Server, or a file such as ``sqlite:///runs/mlflow.db``, with texts and histograms in ``mlflow_artifacts`` beside
    ``output``; None: what ``MLFLOW_TRACKING_URI`` says."""
    name: str | None = None
    """Of the run; None: ``name`` of the configuration."""


class ObserveConfig(Section):
    """What a run leaves behind."""

    tensorboard: bool = True
    """Write scalars, histograms, texts of episodes and hyperparameters for TensorBoard under ``<output>/tensorboard``;
    ``metrics.jsonl`` is always written."""
    wandb: WandbConfig | None = None
    """Send the same to Weights & Biases."""
    mlflow: MlflowConfig | None = None
    """Send the same to MLflow."""
    texts: NonNegative = 100
    """Steps of a run, evenly spread, whose episodes are logged as texts too: one that succeeded, one that did not."""
    traces: bool | None = None
    """One JSON line a trajectory, under ``<output>/traces`` and, of evaluations within training, under
    ``<output>/evaluations``. None: where the run keeps no store, from which ``mua store export`` writes the same lines,
    and of ``mua eval``."""
    progress: bool = True
    """Progress bars on a terminal, a line every half minute elsewhere."""


class SlurmConfig(Section):
    """How ``mua launch slurm`` asks for nodes; its options of the same names come before these."""

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
    def _nothing_of_ours_at_an_endpoint(cls, data: Any) -> Any:
        """Who evaluates a policy behind an endpoint has no model folder and trains nothing."""
        here = data
        for key in ("evaluation", "policy", "kind"):
            here = here.get(key) if isinstance(here, dict) else None
        if here != "endpoint":
            return data
        return {"model": {"path": "none"}, "trainer": {"steps": 1}, **data}

    @model_validator(mode="before")
    @classmethod
    def _transport_by_placement(cls, data: Any) -> Any:
        """``engine.transport`` where it is not set."""
        engine = data.get("engine", {}) if isinstance(data, dict) else None
        transport = "broadcast" if isinstance(data, dict) and data.get("placement") == "separate" else "colocated"
        if isinstance(engine, EngineConfig) and engine.transport is None:
            return data | {"engine": engine.model_copy(update={"transport": transport})}
        if isinstance(engine, dict) and engine.get("transport") is None:
            return data | {"engine": engine | {"transport": transport}}
        return data

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_played(cls, data: Any) -> Any:
        """Who only learns from recordings names no domain."""
        recorded = isinstance(data, dict) and (data.get("sft") or data.get("offline"))
        return {"environment": {"name": NO_DOMAIN}, **data} if recorded else data

    @model_validator(mode="before")
    @classmethod
    def _episodes_fit(cls, data: Any, info: ValidationInfo) -> Any:
        """``rollout.max_tokens`` where it is not set, and where no episode is played: what fits the model's context
        and a micro-batch."""
        if not isinstance(data, dict):
            return data
        sections = [data.get(name) or {} for name in ("model", "megatron", "rollout")]
        if not all(isinstance(section, dict) for section in sections):
            return data
        model, megatron, rollout = sections
        length = model.get("max_length", ModelConfig.model_fields["max_length"].default)
        budget = megatron.get(
            "max_tokens_per_microbatch", MegatronConfig.model_fields["max_tokens_per_microbatch"].default
        )
        given = rollout.get("max_tokens", RolloutConfig.model_fields["max_tokens"].default)
        plays = (info.context or {}).get("verb") != "sft"
        if not all(type(number) is int for number in (length, budget, given)) or (plays and "max_tokens" in rollout):
            return data
        fits = min(given, length - ENGINE_RESERVE, budget)
        return data if fits in (given, rollout.get("max_tokens")) or fits < 1 else (
            data | {"rollout": rollout | {"max_tokens": fits}}
        )  # fmt: skip

    @model_validator(mode="after")
    def _sections_go_together(self, info: ValidationInfo) -> Self:
        """All rules that are broken at once, a line each."""
        if (info.context or {}).get("rules") is False:
            return self
        rules = (
            self._extra_tools_have_domains, self._agents_judge_has_an_endpoint, self._samplers_have_a_store,
            self._placed, self._possible, self._can_learn,
        )  # fmt: skip
        if found := [problem for rule in rules for problem in rule()]:
            raise ValueError("\n".join(found))
        return self

    def _extra_tools_have_domains(self) -> Iterator[str]:
        known = [*self.environment.shares, *self.evaluation.domains]
        named = {f"mcp.{place}": server.domains for place, server in enumerate(self.environment.mcp)}
        for key, domains in named.items():
            if unknown := [name for name in domains if name not in known]:
                yield (
                    f"environment.{key}.domains: {unknown[0]!r} is no domain of this run; there are {', '.join(known)}"
                )

    def _agents_judge_has_an_endpoint(self) -> Iterator[str]:
        if self.agent is not None and self.agent.judge is not None and self.judge is None:
            yield ("agent.judge asks the endpoint of judge.llm; add the section judge")

    def _samplers_have_a_store(self) -> Iterator[str]:
        if self.samplers.enabled and not self.store.enabled:
            yield ("samplers.enabled needs store.enabled: true: samplers lease their episodes from the store")
        if self.samplers.enabled and self.offline is not None:
            yield ("samplers.enabled has no use with the section offline, which rolls nothing out")

    def _placed(self) -> Iterator[str]:
        engine = self.engine
        if self.placement == "colocated":
            if engine.nodes:
                yield (f"engine.nodes {engine.nodes} needs placement separate; it is colocated")
            return
        if engine.transport == "colocated":
            yield (
                "placement separate needs engine.transport broadcast or null: engines on GPUs of their own share no "
                "memory with the trainer"
            )
        for key, value in (("engine.memory_saver", engine.memory_saver), ("megatron.offload", self.megatron.offload)):
            if value:
                yield (
                    f"{key} has no use with placement separate, where trainer and engines share no GPU; set it to false"
                )

    def _possible(self) -> Iterator[str]:
        if self.rollout.max_tokens + ENGINE_RESERVE > self.model.max_length:
            yield (
                f"rollout.max_tokens {self.rollout.max_tokens} must stay {ENGINE_RESERVE} below model.max_length "
                f"{self.model.max_length}, because SGLang keeps some of its context to itself; lower the first or "
                "raise the second"
            )
        context, longest = self.context, self.rollout.max_tokens
        if context.takes_notes and (1 - context.share) * longest <= context.summary_tokens:
            yield (
                f"context.summary_tokens {context.summary_tokens} does not fit: from context.share {context.share:g} "
                f"on {(1 - context.share) * longest:.0f} of rollout.max_tokens {longest} are left, less the "
                "instruction; lower one of the first two or raise the last"
            )
        if self.rollout.max_tokens > self.megatron.max_tokens_per_microbatch:
            yield (
                f"rollout.max_tokens {self.rollout.max_tokens} does not fit a packed micro-batch of "
                f"megatron.max_tokens_per_microbatch {self.megatron.max_tokens_per_microbatch}; raise that or shorten "
                "the episodes"
            )
        if self.algorithm.groups_per_step % self.algorithm.minibatches:
            yield (
                f"algorithm.minibatches {self.algorithm.minibatches} must divide "
                f"algorithm.groups_per_step {self.algorithm.groups_per_step}"
            )
        if self.megatron.routing_replay != "off" and not self.engine.routed_experts:
            yield ("megatron.routing_replay needs engine.routed_experts: true")
        if self.megatron.virtual_pipeline and self.megatron.pipeline_parallel == 1:
            yield ("megatron.virtual_pipeline needs megatron.pipeline_parallel above 1")
        for name, optimizer in (("optimizer", self.optimizer), ("critic.optimizer", self.critic.optimizer)):
            yield from self._optimizer_fits(name, optimizer)
            if optimizer.min_learning_rate > optimizer.learning_rate:
                yield (
                    f"{name}.min_learning_rate {optimizer.min_learning_rate} exceeds "
                    f"{name}.learning_rate {optimizer.learning_rate}"
                )
        if self.algorithm.skip_zero_advantage and self.algorithm.kl_coefficient:
            yield (
                "algorithm.skip_zero_advantage needs algorithm.kl_coefficient 0: the KL term trains every trajectory"
            )
        if self.trainer.max_staleness and (self.engine.memory_saver or self.megatron.offload):
            yield (
                "engine.memory_saver and megatron.offload need trainer.max_staleness 0: above it engines and trainer "
                "work at the same time, so neither can give its memory back"
            )
        if self.trainer.deterministic and self.trainer.max_staleness:
            yield ("trainer.deterministic needs trainer.max_staleness 0: arrival order decides what is stale")
        if self.trainer.deterministic and self.algorithm.refill.oversample:
            yield ("trainer.deterministic needs algorithm.refill.oversample 0: it trains on what ends first")
        if self.engine.deterministic and self.rollout.min_p:
            yield ("engine.deterministic needs rollout.min_p 0: SGLang's seeded draw knows no min_p")
        if self.trainer.deterministic and not self.engine.deterministic:
            yield ("trainer.deterministic needs engine.deterministic: true")
        if self.trainer.deterministic and self.user.asks_model:
            yield ("trainer.deterministic needs a scripted or replayed user, not a language model")

    def _offline_fits(self, offline: OfflineConfig) -> Iterator[str]:
        """Without engines nothing is evaluated or refilled, and who sampled is never the policy that is trained."""
        trainer, algorithm = self.trainer, self.algorithm
        needs_engines = {
            "trainer.evaluate_every": trainer.evaluate_every, "trainer.evaluate_first": trainer.evaluate_first,
            "evaluation.report_split": self.evaluation.report_split, "algorithm.refill": algorithm.refill.on,
        }  # fmt: skip
        if found := [name for name, on in needs_engines.items() if on]:
            yield (f"{found[0]} needs engines, which a run with the section offline does not start; leave it "
                             "out, and use mua eval on the result")  # fmt: skip
        if not algorithm.sees_sampler and not algorithm.uncorrected:
            yield (
                f"offline trains on what other policies sampled, and with algorithm.correction {algorithm.correction}, "
                f"old_logprobs {algorithm.old_logprobs} and loss {algorithm.loss} no gradient depends on how they "
                "sampled it: set algorithm.correction to truncate, mask or band, or old_logprobs to engine, or loss to "
                "cross_entropy; algorithm.uncorrected: true trains without a correction"
            )
        if offline.recorded_teacher and algorithm.distillation is None:
            yield ("offline.recorded_teacher needs the section algorithm.distillation")

    def _optimizer_fits(self, name: str, optimizer: OptimizerConfig) -> Iterator[str]:
        """Where its state lies and in which types, with the model and the distributed optimizer."""
        key = "precision_aware" if optimizer.precision_aware else "cpu_offload_fraction"
        if not (optimizer.precision_aware or optimizer.cpu_offload_fraction):
            return
        if not self.megatron.distributed_optimizer:
            yield (f"{name}.{key} needs megatron.distributed_optimizer: true")
        if self.model.dtype != "bfloat16":
            yield (f"{name}.{key} needs model.dtype bfloat16: {self.model.dtype} weights are the main ones")
        if optimizer.cpu_offload_fraction and self.megatron.fp8_param_gather:
            yield (f"{name}.cpu_offload_fraction does not go with megatron.fp8_param_gather")
        if (optimizer.main_grads_dtype == "float32") != self.megatron.grad_reduce_in_fp32:
            yield (
                f"{name}.main_grads_dtype {optimizer.main_grads_dtype} needs megatron.grad_reduce_in_fp32 "
                f"{str(not self.megatron.grad_reduce_in_fp32).lower()}: a precision-aware optimizer takes gradients as "
                "they were summed"
            )

    def _can_learn(self) -> Iterator[str]:
        algorithm = self.algorithm
        carry = algorithm.refill.carry_versions
        if carry and not algorithm.refill.oversample:
            yield (
                "algorithm.refill.carry_versions needs algorithm.refill.oversample above 0: otherwise every group that "
                "starts is waited for"
            )
        if (self.trainer.max_staleness or carry) and not algorithm.sees_sampler and not algorithm.uncorrected:
            older = f"algorithm.refill.carry_versions {carry}" if carry else (
                f"trainer.max_staleness {self.trainer.max_staleness}"
            )  # fmt: skip
            yield (
                f"{older} trains on what older policies sampled, and with "
                f"algorithm.correction {algorithm.correction}, algorithm.old_logprobs {algorithm.old_logprobs} and "
                f"algorithm.loss {algorithm.loss} no gradient depends on how they sampled it: set algorithm.correction "
                "to truncate, mask or band (with algorithm.old_logprobs recompute), or algorithm.old_logprobs to "
                f"engine (with a loss other than reinforce), or {older.split()[0]} to 0; algorithm.uncorrected: true "
                "trains without a correction"
            )
        if self.offline is not None:
            yield from self._offline_fits(self.offline)
        if self.trainer.export == "best" and not self.trainer.evaluate_every:
            yield ("trainer.export best needs trainer.evaluate_every above 0: evaluations say which is best")
        if algorithm.advantage != "gae":
            return
        needed = {"score": "sum", "credit": "equal", "sign_clamp": None, "skip_zero_advantage": False}
        for key, value in needed.items():
            if getattr(algorithm, key) != value:
                yield (
                    f"algorithm.{key} must be {'null' if value is None else str(value).lower()} with "
                    "algorithm.advantage gae, which gives each token its advantage by the rewards of its own and later "
                    "turns and has its critic learn from every trajectory"
                )
        if self.critic.warmup_steps >= self.trainer.steps:
            yield (
                f"critic.warmup_steps {self.critic.warmup_steps} leaves the policy none of the trainer.steps "
                f"{self.trainer.steps}"
            )
