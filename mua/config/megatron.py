"""The sections ``megatron``, ``optimizer``, ``critic``, ``engine`` and ``cluster``: layout, options and memory.

Options are named as Megatron-Core names them. What does not go together is refused here where the configuration alone
decides it, and in :mod:`mua.megatron.settings` where the machine does.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from mua.config.section import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section

RecomputeModule: TypeAlias = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"]
OffloadModule: TypeAlias = Literal[
    "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"
]


class MegatronConfig(Section):
    """Parallel layout, options and memory of the trainer. An option that is None takes what the machine has."""

    implementation: Literal["auto", "transformer_engine", "local"] = "auto"
    """Whose transformer layers: Transformer Engine's, Megatron's local ones, or (auto) the former where Transformer
    Engine and a CUDA device are there."""
    tensor_parallel: Positive = 1
    """Ranks a layer's matrices are split over."""
    pipeline_parallel: Positive = 1
    """Ranks the layers are split over."""
    virtual_pipeline: Positive | None = None
    """Model chunks of one pipeline rank (interleaved schedule); None: one."""
    context_parallel: Positive = 1
    """Ranks one sequence is split over."""
    expert_parallel: Positive = 1
    """Ranks the experts are spread over."""
    expert_tensor_parallel: Positive | None = None
    """Ranks one expert's matrices are split over; None: as tensor_parallel."""
    data_parallel: Positive = 1
    """Replicas of the model, each with its own micro-batches."""
    first_stage_layers: Positive | None = None
    """Layers of the first pipeline stage, where the layers do not divide evenly; None: as the others."""
    last_stage_layers: Positive | None = None
    """Layers of the last pipeline stage; None: as the others."""
    distributed_optimizer: bool = True
    """Split the optimizer's state over the data-parallel ranks."""
    max_tokens_per_microbatch: Positive = 32768
    """Token budget of one packed micro-batch; padding for context parallelism is not counted."""
    merge_prefixes: bool = False
    """Compute what several trajectories begin with once: micro-batches become trees of their common prefixes. Loss and
    gradients stay the same; balancing losses of experts count a shared token once."""
    balance: Literal["flops", "tokens"] = "flops"
    """What is balanced over micro-batches and data-parallel ranks: estimated operations, attention's square of the
    length included, or tokens alone. The loss does not depend on it; balancing losses of experts, made for each
    micro-batch, do."""
    moe_aux_loss: NonNegativeFloat = 0.0
    """Coefficient of the experts' load-balancing loss, averaged over the batch's tokens; 0 switches it off."""
    routing_replay: Literal["off", "check", "replay"] = "off"
    """``replay`` sends each token to the experts the engine chose (needs engine.routed_experts); ``check`` only reports
    how often the trainer chose the same."""
    moe_z_loss: NonNegativeFloat = 0.0
    """Coefficient of the mean squared log-normalizer of the router's logits; 0 switches it off."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass instead of kept: none, those of recompute_modules, or all."""
    recompute_modules: list[RecomputeModule] = Field(default=["mlp"])
    """What ``recompute: selective`` computes again: ``mlp`` (of dense layers), ``moe`` (a whole layer of experts with
    its exchange of tokens), ``moe_act`` (the experts' activation function; needs Transformer Engine), ``layernorm``,
    ``shared_experts``, ``core_attn`` (worth little: no scores are kept)."""
    offload_activations: list[OffloadModule] = Field(default=[])
    """Inputs of these modules wait in pinned host memory for the backward pass (Megatron's
    fine_grained_activation_offloading; needs Transformer Engine). It goes with pipelines and selective recompute."""
    rope_fusion: bool | None = None
    """Fused rotary embedding (apply_rope_fusion). None: with Transformer Engine."""
    swiglu_fusion: bool | None = None
    """Fused SwiGLU (bias_swiglu_fusion), which keeps its input only. None: on GPUs."""
    moe_permute_fusion: bool | None = None
    """Fused permutation of tokens around experts. None: with Transformer Engine."""
    moe_router_fusion: bool | None = None
    """Fused choice of experts, which cannot replay the engine's. None: with Transformer Engine and without
    routing_replay."""
    gradient_accumulation_fusion: bool | None = None
    """Add weights' gradients up inside the product that makes them. None: where NVIDIA's Apex is installed with its
    kernel, which Megatron's output layer asks for with either implementation."""
    overlap_grad_reduce: bool | None = None
    """Sum gradients over data-parallel ranks while the backward pass goes on. None: on GPUs."""
    overlap_param_gather: bool | None = None
    """Gather the distributed optimizer's weights while the next step's forward pass goes on; whatever else reads
    weights waits for them. None: on GPUs, with overlap_grad_reduce."""
    ddp_bucket_size: Positive | None = None
    """Parameters of one bucket that is summed or gathered at once. None: Megatron's 40,000,000, or 1,000,000 for each
    data-parallel rank if that is more. Without overlap_grad_reduce there is one bucket."""
    grad_reduce_in_fp32: bool = True
    """Keep and sum gradients in float32; else in the model's type."""
    tp_comm_overlap: bool = False
    """Overlap tensor-parallel communication with the products of Transformer Engine's linear layers. Its buffers have
    one size, so that every micro-batch is padded to max_tokens_per_microbatch."""
    cuda_graphs: bool = False
    """Replay the MLPs of dense layers as CUDA graphs (cuda_graph_impl local, module mlp), every micro-batch padded to
    max_tokens_per_microbatch. Attention and routers depend on a micro-batch's boundaries and stay outside."""
    fp8: Literal["e4m3", "hybrid"] | None = None
    """Products of linear layers in float8 with blockwise scales (Transformer Engine, Hopper or later; a bfloat16
    model). e4m3 everywhere, or e5m2 for gradients (hybrid). Micro-batches are padded to multiples of 128 tokens."""
    fp8_param_gather: bool = False
    """Keep the weights of linear layers in float8, and gather them so; needs the distributed optimizer."""
    offload: bool = False
    """Move weights, gradients and optimizer state to pinned host memory while the engines roll out (GPU)."""
    threads: Positive | None = None
    """CPU threads of each trainer process; None leaves torch's default."""

    @property
    def world_size(self) -> int:
        """Trainer processes this layout needs."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.data_parallel

    @property
    def one_length(self) -> bool:
        """Whether all micro-batches are padded to the token budget."""
        return self.tp_comm_overlap or self.cuda_graphs

    @property
    def token_multiple(self) -> int:
        """What the tokens of one rank's part of a micro-batch are a multiple of: of a block of scales in float8."""
        return 128 if self.fp8 else 1

    @model_validator(mode="after")
    def _options_go_together(self) -> Self:
        """One line for the first rule that is broken."""
        needs_engine = {
            "fp8": self.fp8, "tp_comm_overlap": self.tp_comm_overlap, "offload_activations": self.offload_activations,
            "rope_fusion": self.rope_fusion, "moe_permute_fusion": self.moe_permute_fusion,
            "moe_router_fusion": self.moe_router_fusion,
        }  # fmt: skip
        for key, value in needs_engine.items():
            if value and self.implementation == "local":
                raise ValueError(f"{key} needs Transformer Engine: set implementation to auto, or leave {key} out")
        offloaded, full = set(self.offload_activations), self.recompute == "full"
        inside = next(iter(sorted(offloaded & {"expert_fc1", "moe_act"})), None) if "moe" in self.recomputed else None
        length = "tp_comm_overlap" if self.tp_comm_overlap else "cuda_graphs"
        rules = {
            "moe_router_fusion does not go with routing_replay: the fused router takes nobody's choices":
                self.moe_router_fusion and self.routing_replay != "off",
            "fp8_param_gather needs fp8 and distributed_optimizer: true":
                self.fp8_param_gather and not (self.fp8 and self.distributed_optimizer),
            "overlap_param_gather needs distributed_optimizer: true; without it nothing is gathered":
                self.overlap_param_gather and not self.distributed_optimizer,
            "overlap_param_gather needs overlap_grad_reduce, whose buckets it gathers; set it to true or null":
                self.overlap_param_gather and self.overlap_grad_reduce is False,
            "offload_activations does not go with recompute: full, which keeps nothing that could wait elsewhere":
                offloaded and full,
            "offload_activations attn_proj needs core_attn too: what the one takes in the other gave out":
                "attn_proj" in offloaded and "core_attn" not in offloaded,
            f"offload_activations {inside} lies inside recompute_modules moe; leave one out": inside is not None,
            "tp_comm_overlap needs tensor_parallel above 1": self.tp_comm_overlap and self.tensor_parallel == 1,
            f"{length} needs context_parallel 1: sequences are padded one by one there, to no common length":
                self.one_length and self.context_parallel > 1,
            f"{length} does not go with merge_prefixes, whose micro-batches may exceed max_tokens_per_microbatch":
                self.one_length and self.merge_prefixes,
            "cuda_graphs replays MLPs; recompute them no more (recompute none, or recompute_modules without mlp)":
                self.cuda_graphs and (full or "mlp" in self.recomputed),
        }  # fmt: skip
        for problem, broken in rules.items():
            if broken:
                raise ValueError(problem)
        return self

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Modules of selective recomputation; none otherwise."""
        return tuple(self.recompute_modules) if self.recompute == "selective" else ()


_STATE_DTYPES = ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Keys of the types of a precision-aware optimizer, which may be lower than float32."""


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    READS = {
        "schedule": dict.fromkeys(("linear", "cosine"), ("min_learning_rate",)),
        "precision_aware": {"set": _STATE_DTYPES},
    }

    learning_rate: NonNegativeFloat = 1e-6
    """Peak learning rate, reached after the warm-up."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Where the linear and cosine schedules end."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up, over trainer.steps; a step without anything to learn from takes
    its place in it too."""
    warmup_steps: NonNegative = 0
    """Optimizer steps of linear rise: step n, from 0, has (n + 1) / warmup_steps of the peak."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    beta1: Fraction = 0.9
    """Decay of the first moment."""
    beta2: Fraction = 0.95
    """Decay of the second moment."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    clip_grad: NonNegativeFloat = 1.0
    """Global gradient-norm bound; 0 switches clipping off."""
    precision_aware: bool = False
    """Let Transformer Engine's fused Adam keep its state in the types below (use_precision_aware_optimizer); with
    float32 weights it keeps only what bfloat16 ones lack of them. Needs the distributed optimizer and bfloat16."""
    main_params_dtype: Literal["float32", "float16"] = "float32"
    """Type of the main weights of a precision-aware optimizer."""
    main_grads_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which it takes gradients; bfloat16 needs megatron.grad_reduce_in_fp32 false."""
    exp_avg_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Type of its first moment."""
    exp_avg_sq_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Type of its second moment."""
    cpu_offload_fraction: Fraction = 0.0
    """Share of the weights whose main copies and moments stay in pinned host memory, where the CPU updates them
    (Megatron's HybridDeviceOptimizer). Needs the distributed optimizer and a bfloat16 model."""

    @property
    def state_dtypes(self) -> dict[str, str]:
        """Those that may be lower than float32, by key."""
        return {key: getattr(self, key) for key in _STATE_DTYPES}

    @model_validator(mode="after")
    def _state_is_possible(self) -> Self:
        low = [key for key in _STATE_DTYPES if self.is_set(key)]
        if low and self.cpu_offload_fraction:
            raise ValueError(f"{low[0]} must be float32 with cpu_offload_fraction: its optimizer keeps float32 state")
        return self


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW and its schedule, for the critic."""

    learning_rate: NonNegativeFloat = 1e-5
    """Peak learning rate; a critic learns a new task, so it is larger than a policy's."""


class CriticConfig(Section):
    """The critic of ``algorithm.advantage: gae``: the policy's architecture and first weights with a scalar output."""

    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    value_clip: PositiveFloat | None = 0.5
    """How far a value may move from its old one before a token's gradient ends, in units of reward; None: no bound."""
    warmup_steps: NonNegative = 0
    """Steps at the beginning of a run in which the critic learns and the policy does not."""


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
    """Type of GPU; ``mua/launch/plan/planner.py`` has the table of memory, bandwidth and speed."""
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
    those below are read by ``tools/bench/placements.py`` alone."""
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
