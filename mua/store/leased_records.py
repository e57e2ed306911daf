"""Records of episodes that a sampler has leased: the result is written by whoever still holds the lease, or not."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from sqlalchemy.engine import Connection

from mua.store.leases import EpisodeLease, deliver, key_of
from mua.store.recorder import EpisodeRecord, Recorder
from mua.store.tables import texts
from mua.store.trajectories import EpisodeKey
from mua.store.writer import Call, Insert, Write, Writer, execute
from mua.types import Json


class LeasedRecorder(Recorder):
    """Of one sampler at one start of a run. Safe in threads."""

    def __init__(self, writer: Writer, run_id: str, part: int, sampler: str) -> None:
        super().__init__(writer, run_id, part, sampler=sampler)
        self._leases: dict[tuple[int, int], EpisodeLease] = {}
        self._tries: dict[str, int] = {}
        self._guard = threading.Lock()
        self.delivered = 0
        self.refused = 0
        """Results that were not written: their lease was lost."""

    def took(self, leases: Iterable[EpisodeLease]) -> None:
        """These are held from now on."""
        with self._guard:
            for lease in leases:
                self._leases[lease.place] = lease
                self._tries[lease.token] = 0

    def held(self) -> list[EpisodeLease]:
        """The leases whose results are not written yet."""
        with self._guard:
            return list(self._leases.values())

    def lost(self, lease: EpisodeLease) -> None:
        """The lease is no longer held: its result is written, or another has it, or its group is cancelled."""
        with self._guard:
            if self._leases.get(lease.place) is lease:
                del self._leases[lease.place]
            self._tries.pop(lease.token, None)

    def episode(self, ordinal: int, sample: int, sampling: Json, *, evaluation: bool) -> EpisodeRecord:
        """The record of the next try of a leased episode."""
        assert not evaluation, "evaluations are not leased"
        with self._guard:
            lease = self._leases[ordinal, sample]
            attempt = self._tries[lease.token] = self._tries[lease.token] + 1
        return LeasedEpisodeRecord(self, key_of(lease, attempt), sampling, lease)

    def settled(self, lease: EpisodeLease, written: bool) -> None:
        """The result of ``lease`` was written, or refused."""
        self.delivered += written
        self.refused += not written
        self.lost(lease)


class LeasedEpisodeRecord(EpisodeRecord):
    """One try at one leased episode."""

    def __init__(self, recorder: LeasedRecorder, key: EpisodeKey, sampling: Json, lease: EpisodeLease) -> None:
        super().__init__(recorder, key, sampling)
        self._of, self._lease = recorder, lease

    def _as_result(self, made: list[Write]) -> list[Write]:
        def write(connection: Connection) -> None:
            if written := deliver(connection, self._lease, self.key.trajectory_id):
                execute(connection, result)
            self._of.settled(self._lease, written)

        # Later records count on the texts being there, whether this one is delivered or not.
        bodies: list[Write] = []
        result: list[Write] = []
        for one in made:
            (bodies if isinstance(one, Insert) and one.table is texts else result).append(one)
        return [*bodies, Call(write)]
