"""The sections ``store``, ``offline`` and ``observe``: what a run leaves behind, and what is learned from it later."""

from __future__ import annotations

from typing import Literal

from pydantic import SecretStr

from mua.config.section import NonNegative, Positive, PositiveFloat, Section


class StoreConfig(Section):
    """The database of a run: tasks, trajectories, requests, tool calls, scores, steps (docs/store.md)."""

    enabled: bool = True
    """Keep a store. Off, a run has its trace files and metrics alone."""
    url: SecretStr | None = None
    """A PostgreSQL database, ``postgresql://USER:PASSWORD@HOST:PORT/DATABASE``, best as ``${ENV_VAR}``; libpq's own
    variables and ``~/.pgpass`` serve too. None: SQLite, in ``<output>/store.sqlite``, which processes of one machine
    share; samplers on other machines need PostgreSQL."""
    write_seconds: PositiveFloat = 1.0
    """How long records are gathered before they are written in one transaction."""
    queue_megabytes: Positive = 256
    """Records in memory that wait to be written; when they are more, episodes wait."""
    outage_seconds: PositiveFloat = 600.0
    """How long a run waits for a database that does not answer, before it ends with status 75."""
    busy_seconds: PositiveFloat = 30.0
    """How long a transaction on SQLite waits for another process's."""
    take_finished: bool = True
    """A run that continues takes groups that had ended when it was left, of policies that are still its own and within
    ``trainer.max_staleness``, as they are, instead of rolling them out again. In deterministic mode the result is the
    same; elsewhere short episodes are a little more frequent in the step that was interrupted."""
    flush_seconds: PositiveFloat = 120.0
    """Deadline of writing what a checkpoint needs to be there before it."""
    keep_experts_steps: NonNegative | None = None
    """Steps whose expert choices are kept, the newest; older ones are dropped as the run goes on. Never those that a
    checkpoint still needs. None keeps all."""
    keep_arrays_steps: NonNegative | None = None
    """The same of tokens, log-probabilities, weights and advantages. Rows of what happened stay."""
    keep_successes: bool = True
    """Keep the tokens of successful training episodes all the same, to train on them later."""
    keep_failed_attempts: bool = True
    """Keep messages and tokens of episodes that could not be scored."""


class StoredSource(Section):
    """Episodes that a store holds, to train on."""

    store: str
    """Output folder of a run, its ``store.sqlite``, or a PostgreSQL URL (the password best as ``${ENV_VAR}``, or in
    ``~/.pgpass``)."""
    run: str | None = None
    """Id of the run whose episodes are taken; None: the only one of the store."""
    domains: list[str] = []
    """Only episodes of these domains; empty: all."""
    min_version: NonNegative = 0
    """Only episodes whose oldest sampled token is of this policy version or a newer one."""


class OfflineConfig(StoredSource):
    """Reinforcement learning on stored groups instead of new episodes: ``mua train`` then starts no engines."""

    max_uses: Positive = 1
    """Steps of this run that train on a group, at most (AgentRL: max_trained_count)."""
    apart: Positive = 1
    """Steps between two of them, at least (AgentRL: retrained_interval)."""
    recorded_teacher: bool = False
    """With algorithm.distillation: take the teacher's log-probabilities that were stored, and ask no teacher."""


class StoredDemonstrations(StoredSource):
    """Episodes to imitate, by the very tokens that were sampled."""

    success: bool = True
    """Successful ones alone; False: all that were scored."""
    min_reward: float | None = None
    """Only those of at least this reward."""
    max_per_task: Positive | None = None
    """So many of one task, the first of them; None: all. Tasks that succeed often otherwise outweigh the rare ones."""
    evaluations: bool = False
    """Episodes of the run's evaluations too. What is trained on them can no longer be evaluated by their tasks."""


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
