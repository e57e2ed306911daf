"""Our estimators and losses beside those of verl and TRL, on random inputs, as a table in markdown.

    python -m tools.bench.algorithms                 # installs both into a temporary folder
    python -m tools.bench.algorithms --site FOLDER   # where they were installed before

Both packages are installed without their dependencies (``pip install --no-deps --target``), from PyPI; torch,
transformers and numpy are ours. Modules that they import and that these functions never call (ray, datasets ...) are
stood in for. Ours is the way of a training step: trajectories, ``make_batch``, ``adjusted``, ``PolicyLoss``; gradients
are those with respect to the log-probability of every trained token. Everything is float64.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import subprocess
import sys
import tempfile
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from mua.algorithms.batch import adjust_batch, make_batch
from mua.algorithms.gae import clipped_value_loss, gae
from mua.algorithms.losses import PolicyLoss, TokenTensors
from mua.algorithms.objectives import kl_estimate
from mua.config.schema import AlgorithmConfig
from mua.types import Group, Outcome, Provenance, Segment, TrainBatch, Trajectory
from tools import kit

PACKAGES = ("verl==0.9.1", "trl==1.16.0")
NEEDED = ("accelerate", "tensordict", "pyvers", "cloudpickle", "omegaconf", "antlr4-python3-runtime==4.9.3")
STOOD_IN = (
    *("ray", "codetiming", "hydra", "pyarrow", "datasets", "peft", "torchdata", "wandb", "transfer_queue", "pandas"),
)
"""Imported by the packages, used by none of the functions that are compared."""
SAME = 1e-6
"""Largest difference that counts as agreement: :mod:`mua.types` keeps weights and advantages in float32."""
LOW, HIGH, DUAL = 0.2, 0.28, 3.0


class _StandIn(types.ModuleType):
    """A module that has whatever is asked of it."""

    __version__ = "99.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *a, **k: None}) if name[:1].isupper() else _anything
        setattr(self, name, made)
        return made


def _anything(*given: Any, **named: Any) -> Any:
    """Serves as a function, and as a decorator with or without arguments."""
    return given[0] if len(given) == 1 and callable(given[0]) and not named else _anything


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in STOOD_IN:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextmanager
def installed(site: Path | None) -> Iterator[Path]:
    """The folder that holds the packages, behind everything else on the path; a temporary one without ``site``."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = site or Path(temporary)
        if site is None:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
            subprocess.run([*pip, *PACKAGES, *NEEDED], check=True)
        sys.path.append(str(folder))
        sys.meta_path.append(_StandInFinder())
        yield folder


# ---- inputs, the same for everybody


@dataclass(frozen=True)
class Samples:
    """Random rollouts as rows, ``[B, T]``, with holes where tools and users speak; float64."""

    mask: Tensor
    old: Tensor
    current: Tensor
    behavior: Tensor
    reference: Tensor
    scores: list[float]
    index: np.ndarray
    """The group of each row, in order."""

    @property
    def trained(self) -> Tensor:
        return self.mask.bool()

    @property
    def token_scores(self) -> Tensor:
        """The score on each row's last trained token, as verl gives it."""
        places = torch.zeros_like(self.mask)
        for row, score in enumerate(self.scores):
            places[row, int(self.trained[row].nonzero()[-1])] = score
        return places


def samples(seed: int, sizes: Sequence[int] = (4, 4, 2, 6), length: int = 24) -> Samples:
    """Groups of these sizes; no score of a group is like all others'."""
    g = torch.Generator().manual_seed(seed)
    rows = sum(sizes)

    def normal(scale: float, around: Tensor | float) -> Tensor:
        return around + scale * torch.randn(rows, length, generator=g, dtype=torch.float64)

    mask = (torch.rand(rows, length, generator=g) < 0.6).double()
    mask[:, 3] = 1  # nobody says nothing
    mask[:, 0] = 0
    behavior = -normal(1.0, 2.0).abs()
    old = normal(0.3, behavior)
    scores = torch.rand(rows, generator=g, dtype=torch.float64).tolist()
    index = np.repeat(np.arange(len(sizes)), sizes)
    return Samples(mask, old, normal(0.3, old), behavior, normal(0.5, old), scores, index)


def batch_of(given: Samples, config: AlgorithmConfig) -> TrainBatch:
    """Our batch of these rows, before the trainer has scored it."""
    groups: list[Group] = []
    for row, (score, group) in enumerate(zip(given.scores, given.index.tolist(), strict=True)):
        trained = given.trained[row].numpy()
        zeros = np.zeros(len(trained), dtype=np.int32)
        logprobs = np.where(trained, given.behavior[row].numpy(), 0).astype(np.float32)
        provenance = np.where(trained, Provenance.SAMPLED, Provenance.TOOL).astype(np.uint8)
        segment = Segment(zeros, provenance, logprobs, np.where(trained, 0, -1).astype(np.int32), zeros)
        if group == len(groups):
            groups.append(Group(group, str(group), []))
        member = Trajectory(str(group), group, row, [segment], [score], score, score > 0.5, Outcome.USER_STOP)
        groups[-1].trajectories.append(member)
    return make_batch(groups, config, 1.0)


def scored(batch: TrainBatch, given: Samples) -> TrainBatch:
    """With the trainer's and the reference's log-probabilities."""
    sequences = []
    for row, sequence in enumerate(batch):
        old, reference = (values[row, : len(sequence)].numpy() for values in (given.old, given.reference))
        sequences.append(replace(sequence, old_logprobs=old, reference_logprobs=reference))
    return replace(batch, sequences=sequences)


def our_advantages(given: Samples, config: AlgorithmConfig) -> Tensor:
    return torch.cat([torch.from_numpy(s.advantages[s.trained]) for s in batch_of(given, config)]).double()


def our_loss(given: Samples, config: AlgorithmConfig) -> Tensor:
    """The loss and its gradient for every trained token, in one vector."""
    batch, _ = adjust_batch(scored(batch_of(given, config), given), config, 0)

    def flat(name: str) -> Tensor:
        return torch.cat([torch.from_numpy(getattr(s, name)[s.trained]).double() for s in batch])

    number = torch.cat([torch.full((int(s.trained.sum()),), i) for i, s in enumerate(batch)])
    tokens = TokenTensors(
        flat("weights"), flat("advantages"), flat("behavior_logprobs"), given.old[given.trained],
        flat("reference_logprobs"), sequence=number, sequences=len(batch),
    )  # fmt: skip
    logprobs = given.current[given.trained].clone().requires_grad_()
    loss = PolicyLoss(config)(logprobs, torch.zeros_like(logprobs), tokens).loss
    return with_gradient(loss, logprobs)


def with_gradient(loss: Tensor, logprobs: Tensor, trained: Tensor | None = None) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, logprobs)
    gradient = gradient if trained is None else gradient[trained]
    return torch.cat([loss.detach().reshape(1), gradient])


# ---- what is compared


@dataclass(frozen=True)
class Row:
    """One comparison."""

    what: str
    whose: str
    difference: float
    note: str = ""

    def line(self) -> str:
        verdict = "same" if self.difference <= SAME else "**differs**"
        return kit.row(self.what, self.whose, f"{self.difference:.1e}", verdict, self.note)


Compared = tuple[str, Callable[[Samples], Tensor], Callable[[Samples], Tensor], str]
"""What, ours, theirs, why they may differ."""


def rows_of(whose: str, compared: Sequence[Compared], seeds: Sequence[int]) -> Iterator[Row]:
    """The largest difference of each over the seeds."""
    for what, ours, theirs, note in compared:
        gaps = []
        for seed in seeds:
            given = samples(seed)
            gaps.append(float((ours(given) - theirs(given)).abs().max()))
        yield Row(what, whose, max(gaps), note)


def verl_advantages() -> list[Compared]:
    """Estimators of ``verl.trainer.ppo.core_algos``."""
    core = importlib.import_module("verl.trainer.ppo.core_algos")

    def theirs(name: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Callable[[Samples], Tensor]:
        def of(given: Samples) -> Tensor:
            scores = given.token_scores.to(dtype)
            found, _ = getattr(core, f"compute_{name}")(scores, given.mask.to(dtype), index=given.index, **settings)
            return found[given.trained].double()

        return of

    def ours(**settings: Any) -> Callable[[Samples], Tensor]:
        return lambda given: our_advantages(given, AlgorithmConfig(**settings))

    def bessel(given: Samples) -> Tensor:
        """REINFORCE++ with our whitening brought to verl's unbiased variance."""
        n = int(given.mask.sum())
        return ours(advantage="reinforce_plus_plus")(given) * ((n - 1) / n) ** 0.5

    def equal(given: Samples) -> Samples:
        """Two groups of eight that agree; in float32 their mean is not quite what they all have."""
        return replace(given, scores=[0.7] * len(given.scores), index=np.repeat([0, 1], len(given.scores) // 2))

    def alone(given: Samples) -> Samples:
        return replace(given, index=np.arange(len(given.scores)))

    grpo, plus = "grpo_outcome_advantage", "reinforce_plus_plus_baseline_outcome_advantage"
    return [
        ("GRPO", ours(), theirs(grpo), ""),
        ("Dr. GRPO", ours(divide_by_std=False), theirs(grpo, norm_adv_by_std_in_grpo=False), ""),
        ("RLOO", ours(advantage="rloo"), theirs("rloo_outcome_advantage"), ""),
        ("REINFORCE++ with group baseline", ours(advantage="reinforce_plus_plus"), theirs(plus),
         "verl whitens with the unbiased variance (n - 1), we with that of the batch"),
        ("the same, ours times sqrt((n - 1) / n)", bessel, theirs(plus), "nothing else is different"),
        ("GRPO in float32, 8 scores of 0.7 a group", lambda g: ours()(equal(g)),
         lambda g: theirs(grpo, torch.float32)(equal(g)),
         "ours is exactly 0 by a comparison of the scores; verl divides the rounding of the mean by 1e-6"),
        ("GRPO, groups of one", lambda g: ours()(alone(g)), lambda g: theirs(grpo)(alone(g)),
         "without a peer ours is 0, verl's the score itself"),
    ]  # fmt: skip


def verl_losses() -> list[Compared]:
    """Losses, aggregations, estimators and corrections of verl: value and gradient."""
    ours = our_signed_loss
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    workers = importlib.import_module("verl.workers.config")
    correction = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")

    def theirs(name: str, aggregation: str = "token-mean", weights: Any = None, **settings: Any) -> Any:
        bounds = {"clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_ratio_c": 1e9, "rollout_n": 1}
        config = workers.ActorConfig(
            strategy="fsdp", ppo_micro_batch_size_per_gpu=1, loss_agg_mode=aggregation, **(bounds | settings)
        )

        def of(given: Samples) -> Tensor:
            current = given.current.clone().requires_grad_()
            advantages = torch.tensor(given.scores).double()[:, None].expand_as(current)
            weigh = None if weights is None else weights(given)
            loss, _ = core.get_policy_loss_fn(name)(
                given.old, current, advantages, given.mask, aggregation, config, weigh
            )
            return with_gradient(loss, current, given.trained)

        return of

    def truncated(level: str, threshold: str | float) -> Callable[[Samples], Tensor]:
        def of(given: Samples) -> Tensor:
            ratio = given.old - given.behavior.float().double()  # what an engine reports is float32
            found, _ = correction.compute_rollout_correction_weights(ratio, given.mask, level, threshold)
            return found

        return of

    def kl(name: str, theirs: str) -> Compared:
        def value(estimate: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Samples], Tensor]:
            def of(given: Samples) -> Tensor:
                current = given.current.clone().requires_grad_()
                return with_gradient((estimate(current, given.reference) * given.mask).sum(), current, given.trained)

            return of

        return (
            f"KL estimator {name}",
            value(lambda p, ref: kl_estimate(name, p - ref)),
            value(lambda p, ref: core.kl_penalty(p, ref, theirs)),
            "",
        )

    aggregations = {
        "token_mean": "token-mean",
        "sequence_mean": "seq-mean-token-mean",
        "sequence_sum": "seq-mean-token-sum",
        "constant": "seq-mean-token-sum-norm",
    }
    found: list[Compared] = [
        (f"PPO clip, {own}", ours(aggregation=own, aggregation_constant=24.0), signed(theirs("vanilla", other)),
         "verl divides by the padded length, here 24" if own == "constant" else "")
        for own, other in aggregations.items()
    ]  # fmt: skip
    return [
        *found,
        ("PPO dual clip", ours(dual_clip=DUAL), signed(theirs("vanilla", clip_ratio_c=DUAL)), ""),
        ("GSPO", ours(loss="gspo", aggregation="sequence_mean"), signed(theirs("gspo", "seq-mean-token-mean")), ""),
        ("CISPO", ours(loss="cispo"), signed(theirs("cispo")), ""),
        ("SAPO", ours(loss="sapo", clip_low=1.05, clip_high=1.0, aggregation="sequence_mean"), signed(theirs("sapo")),
         "verl's aggregates by sequence whatever is configured"),
        ("TIS by token, at most 1.2", ours(correction="truncate", correction_high=1.2),
         signed(theirs("vanilla", weights=truncated("token", 1.2))), ""),
        ("TIS by sequence, at most 1.2", ours(correction="truncate", correction_level="sequence", correction_high=1.2),
         signed(theirs("vanilla", weights=truncated("sequence", 1.2))), ""),
        ("ICEPOP, [0.8, 1.2]", ours(correction="mask", correction_low=0.8, correction_high=1.2),
         signed(theirs("vanilla", weights=truncated("token", "0.8_1.2"))), ""),
        kl("k1", "k1"),
        kl("k2", "k2"),
        kl("k3", "k3"),
        ("GAE, returns, lambda 0.9", _our_returns, lambda given: _verl_returns(core, given),
         "undiscounted: verl's discount is by token, ours by turn"),
        ("value loss, clip 0.2", lambda given: _value_loss(_our_value_loss, given),
         lambda given: _value_loss(lambda *v: core.compute_value_loss(*v, 0.2)[0], given), ""),
    ]  # fmt: skip


def signed(of: Callable[[Samples], Tensor]) -> Callable[[Samples], Tensor]:
    """With scores as advantages of both signs."""
    return lambda given: of(replace(given, scores=[2 * score - 1 for score in given.scores]))


def our_signed_loss(**settings: Any) -> Callable[[Samples], Tensor]:
    """Ours with advantages that are the scores, several steps a batch so that old is not current."""
    bounds: dict[str, Any] = {"clip_low": LOW, "clip_high": HIGH, "epochs": 2, "advantage": "none"}
    return signed(lambda given: our_loss(given, AlgorithmConfig(**(bounds | settings))))


def _values(given: Samples) -> Tensor:
    """Made-up values of the tokens."""
    return given.reference / 4


def _our_returns(given: Samples) -> Tensor:
    found = []
    for row in range(len(given.scores)):
        trained = given.trained[row]
        values = _values(given)[row][trained].numpy()
        rewards = given.token_scores[row][trained].numpy()
        advantages = gae(rewards, values, np.ones_like(values), 0.9)
        found.append(torch.from_numpy(advantages + values))
    return torch.cat(found)


def _verl_returns(core: Any, given: Samples) -> Tensor:
    _, returns = core.compute_gae_advantage_return(given.token_scores, _values(given), given.mask, 1.0, 0.9)
    return torch.as_tensor(returns)[given.trained]


def _value_loss(of: Callable[..., Tensor], given: Samples) -> Tensor:
    values = given.current.clone().requires_grad_()
    return with_gradient(of(values, given.reference, given.old, given.mask), values, given.trained)


def _our_value_loss(values: Tensor, returns: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return (clipped_value_loss(values, old, returns, 0.2)[0] * mask).sum() / mask.sum()


class _Alone:
    """accelerate's interface to one process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, values: Tensor) -> Tensor:
        return values

    def reduce(self, values: Tensor, reduction: str) -> Tensor:
        return values


def trl_losses() -> list[Compared]:
    """``GRPOTrainer._compute_loss`` of TRL over made-up log-probabilities: value and gradient."""
    ours = our_signed_loss
    trainer = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer

    def theirs(loss: str, level: str = "token", delta: float | None = None, high: float = HIGH, **more: Any) -> Any:
        arguments = types.SimpleNamespace(
            delta=delta, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, use_bias_correction_kl=False,
            steps_per_generation=1,
        )  # fmt: skip
        fields = {
            "loss_type": loss, "importance_sampling_level": level, "args": arguments, "epsilon_low": LOW,
            "epsilon_high": high, "beta": 0.0, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
            "use_vllm": False, "vllm_importance_sampling_correction": False, "max_completion_length": 24,
            "_entropy_bonus_enabled": False, "aux_loss_enabled": False, "current_gradient_accumulation_steps": 1,
            "model": types.SimpleNamespace(training=True), "accelerator": _Alone(),
            "_metrics": {"train": defaultdict(list)},
        } | more  # fmt: skip

        def of(given: Samples) -> Tensor:
            current = given.current.clone().requires_grad_()
            ids = torch.zeros_like(given.mask).long()
            made = types.SimpleNamespace(
                **fields, _get_per_token_logps_and_entropies=lambda *a, **k: (current, torch.zeros_like(current), None)
            )
            inputs = {
                "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids,
                "completion_mask": given.mask, "advantages": torch.tensor(given.scores).double(),
                "old_per_token_logps": given.old, "ref_per_token_logps": given.reference,
                "num_items_in_batch": given.mask.sum(),
            }  # fmt: skip
            return with_gradient(trainer._compute_loss(made, None, inputs), current, given.trained)

        return of

    penalty = {"kl_coefficient": 0.3, "aggregation": "sequence_mean"}
    dual = "TRL holds the ratio of every token to at most delta; the same for A < 0 while delta > 1 + clip_high"
    return [
        ("PPO clip, sequence_mean (grpo)", ours(aggregation="sequence_mean"), signed(theirs("grpo")), ""),
        ("PPO clip, token_mean (dapo)", ours(), signed(theirs("dapo")), ""),
        ("PPO clip, constant (dr_grpo)", ours(aggregation="constant", aggregation_constant=24.0),
         signed(theirs("dr_grpo")), ""),
        ("dual clip (delta)", ours(dual_clip=1.5), signed(theirs("dapo", delta=1.5)), dual),
        ("GRPO with KL in the loss", ours(**penalty), signed(theirs("grpo", beta=0.3)), ""),
        ("GSPO", ours(loss="gspo", aggregation="sequence_mean"), signed(theirs("grpo", "sequence")),
         "TRL has one loss per sequence, we one per token (GSPO-token): the same sum"),
        ("CISPO", ours(loss="cispo", clip_low=1.0, clip_high=HIGH), signed(theirs("cispo", high=1 + HIGH)),
         "TRL's bound is on the ratio itself, 1 + clip_high; no lower one"),
        ("SAPO", ours(loss="sapo", clip_low=1.05, clip_high=1.0, aggregation="sequence_mean"), signed(theirs("sapo")),
         ""),
    ]  # fmt: skip


def main(
    site: Annotated[Path | None, typer.Option(help="Folder with both packages; none: a temporary one.")] = None,
    seeds: Annotated[int, typer.Option(help="Random inputs to compare on.")] = 5,
) -> None:
    """Print the table."""
    with installed(site):
        chosen = range(1, seeds + 1)
        versions = {name: metadata.version(name) for name in ("verl", "trl")}
        rows = [
            *rows_of("verl", verl_advantages(), chosen),
            *rows_of("verl", verl_losses(), chosen),
            *rows_of("TRL", trl_losses(), chosen),
        ]
    print(f"verl {versions['verl']}, trl {versions['trl']}, torch {torch.__version__}, {seeds} random inputs\n")
    print(kit.head("what", "beside", "largest difference", "", "why"), *(row.line() for row in rows), sep="\n")


if __name__ == "__main__":
    typer.run(main)
