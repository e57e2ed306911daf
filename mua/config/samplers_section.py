"""The section ``samplers``: processes that roll out episodes of training apart from the trainer."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mua.config.section import PositiveFloat, Section


class SamplersConfig(Section):
    """Processes of ``mua sample``, which lease episodes of training from the store, on this machine or on others
    (docs/samplers.md)."""

    enabled: bool = False
    """Episodes of training are leased from the store. False: the trainer's process rolls all of them out."""
    inside: bool = True
    """The trainer's process rolls out too, as one sampler more."""
    lease_seconds: PositiveFloat = 60.0
    """How long an episode belongs to a sampler that is silent; then others may have it."""
    heartbeat_seconds: PositiveFloat = 10.0
    """How often a sampler renews its leases and learns which of them it has lost."""
    poll_seconds: PositiveFloat = 0.2
    """How often a sampler that has room asks for episodes, and the trainer for those that have ended; four times as
    often while there lately were some."""
    load: PositiveFloat = 1.0
    """Requests that run or wait at the engines for each that they can run at once, above which no sampler starts
    another episode."""
    other_code: Literal["refuse", "warn"] = "refuse"
    """What a sampler does whose sources or libraries are not the trainer's, though of the same version of mua: another
    commit, changed files, another transformers. They may make other episodes."""
    start_seconds: PositiveFloat = 1800.0
    """How long the trainer waits while no sampler is alive, before it ends with status 75."""
    leave_seconds: PositiveFloat = 120.0
    """How long a sampler that was asked to leave goes on with the episodes it has; then others may have them."""
    address: str = "127.0.0.1"
    """Address of rank 0's machine at which samplers reach the engines; one that other machines see, for samplers
    there."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Its port; 0 takes a free one."""

    @model_validator(mode="after")
    def _renewed_in_time(self) -> Self:
        if 3 * self.heartbeat_seconds > self.lease_seconds:
            raise ValueError(
                f"lease_seconds {self.lease_seconds:g} must be three times heartbeat_seconds "
                f"{self.heartbeat_seconds:g} at least, so that one late heartbeat loses no lease"
            )
        return self
