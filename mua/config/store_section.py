"""The section ``store``: where everything that happens in a run is kept, and what of it for how long."""

from __future__ import annotations

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
