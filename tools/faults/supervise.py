"""One run under faults, and whoever looks after it: Slurm, and a person where the run asks for one.

::

    attempt ends with 0 ─────────────────────────── the run is finished
    by a signal, or with 75 (a fault may pass) ──── the same command again
    with 2 on a full disk ───────────────────────── a person makes room; the same command again
    with 2 on a damaged checkpoint ──────────────── a person takes what the message offers
    with anything else, or no progress ──────────── the run has failed
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from tools import kit
from tools.faults.draw import BEGINNING, ENDS, Fault, Kind, Mode, Phase
from tools.faults.inject import Clock, Effect, Scene, User, strike
from tools.faults.watch import Place, Watch, left_in
from tools.faults.workshop import DOMAINS, OVERRIDES

SILENT_SECONDS = 300.0
"""Longer than any wait of the run's own: without progress for so long it hangs."""
LEFT_SECONDS = 30.0
"""In which everything that an attempt has started must be gone after it."""
_VICTIM_SECONDS = 40.0
"""How long a fault waits for its victim to be there."""
_POLL_S = 0.003
_PASSING = os.EX_TEMPFAIL
_FULL = re.compile(r"no space left|is the disk full|quota", re.IGNORECASE)
_OFFER = re.compile(r"run: (mv .+) and then the same command again")
_WENT_ON = "the run went on"
_KILLERS = (Kind.KILL_TRAINER, Kind.CHECKPOINT, Kind.STOP_TRAINER)


class RunFailed(Exception):
    """What a run under faults did that it must not do."""


@dataclass
class Struck:
    """A fault that has happened."""

    fault: Fault
    place: Place
    seconds: float
    """Since the run began."""
    done: str
    position: float
    """Where the run was on the way of an undisturbed one, in its seconds."""
    survived: str = _WENT_ON
    lost: float = 0.0

    @property
    def answered(self) -> bool:
        """Whether it ended an attempt."""
        return self.survived != _WENT_ON


@dataclass
class Pace:
    """When an undisturbed run reached each place, in seconds since its start, and its last: its end."""

    reached: dict[tuple[int, int], float] = field(default_factory=dict)
    end: float = 0.0

    def length(self, phase: Phase, step: int) -> float:
        """Seconds that ``phase`` takes."""
        key = (0, Phase.START.order) if phase in BEGINNING else (step, phase.order)
        begin = self.at(key)
        return min((at for at in (*self.reached.values(), self.end) if at > begin), default=begin) - begin

    def at(self, key: tuple[int, int]) -> float:
        """When the place, or the last one before it, was reached."""
        return max((at for place, at in self.reached.items() if place <= key), default=0.0)

    def position(self, place: Place, now: float) -> float:
        """Of a run that is at ``place``."""
        if place.phase is Phase.RESUME:
            return self.at((place.step, Phase.ROLLOUT.order))
        return self.at(place.key) + min(now - place.at, self.length(place.phase, place.step))


class Supervisor:
    """Has one run of ``mode`` survive ``faults`` in ``folder``, whose ``disk`` is a file system of its own."""

    def __init__(
        self,
        folder: Path,
        config: Path,
        mode: Mode,
        faults: Sequence[Fault],
        pace: Pace | None = None,
        on_strike: Callable[[Struck], None] = lambda _: None,
    ) -> None:
        self.folder, self.output = folder, folder / "disk" / "out"
        self.struck: list[Struck] = []
        self.attempts = 0
        self.reached = Pace()
        self._config, self._mode, self._pace = config, mode, pace or Pace()
        self._waiting = list(faults)
        self._on_strike = on_strike
        self._clock = Clock(folder / "clock")
        self._user = User(folder.parent) if mode is Mode.STALE else None
        self._later: list[tuple[float, Callable[[], None], bool]] = []
        self._effect: Effect | None = None
        self._effect_since = 0.0
        self._ending = False
        """Whether the attempt has been struck by something that it cannot outlive."""
        self._started = 0.0

    def run(self) -> None:
        """Return when the run is finished and nothing of it runs any more. Raises :class:`RunFailed`."""
        self._started = monotonic()
        if self._user is not None:
            self._user.start()
        try:
            while not self._attempt():
                if self.attempts > 2 * len(self.struck) + 3:
                    raise RunFailed(f"{self.attempts} attempts for {len(self.struck)} faults")
            self._count_lost()
            deadline = monotonic() + LEFT_SECONDS
            while left := left_in(self.folder):
                if monotonic() > deadline:
                    raise RunFailed(f"still running: {[' '.join(process.cmdline())[:120] for process in left]}")
                time.sleep(0.1)
        finally:
            self._end()

    @property
    def seconds(self) -> float:
        return monotonic() - self._started

    # ---- one attempt

    def _attempt(self) -> bool:
        """Whether the run was finished by this attempt."""
        self.attempts += 1
        log = self.folder / f"attempt-{self.attempts}.log"
        with log.open("w") as said:
            trainer = subprocess.Popen(
                [sys.executable, "-m", "mua.cli", "train", str(self._config), *OVERRIDES[self._mode]],
                cwd=self.folder, env=self._variables(), stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                start_new_session=True,
            )  # fmt: skip
        try:
            status = self._watch(trainer, log)
        finally:
            if trainer.poll() is None:
                os.killpg(trainer.pid, signal.SIGKILL)
                trainer.wait()
            self._do_later(lambda _, outlasts: not outlasts)
        if status:
            self._answer(status, log.read_text(errors="replace"))
        return status == 0

    def _watch(self, trainer: subprocess.Popen[bytes], log: Path) -> int:
        watch = Watch(self.output, log, self._moved)
        scene = Scene(
            self.output.parent, self.output, self._clock, self._user, trainer,
            later=lambda seconds, action: self._later.append((monotonic() + seconds, action, False)),
            whenever=lambda seconds, action: self._later.append((monotonic() + seconds, action, True)),
        )  # fmt: skip
        self._effect, self._ending = None, False
        try:
            while (status := trainer.poll()) is None:
                watch.look()
                now = monotonic()
                self._do_later(lambda at, _: at <= monotonic())
                self._strike(scene, watch.place)
                if now - watch.place.at > SILENT_SECONDS:
                    raise RunFailed(f"no progress for {SILENT_SECONDS:g} s in {watch.place}")
                time.sleep(_POLL_S)
        finally:
            for taken in scene.held:
                taken.close()
        return status

    def _answer(self, status: int, said: str) -> None:
        """Do something about the end of an attempt, and note it with the fault behind it."""
        lines = said.strip().splitlines() or ["it said nothing"]
        message = " ".join(line for line in lines if line.startswith("mua")) or lines[-1]
        if not self.struck:
            raise RunFailed(f"it ended with status {status} before anything struck it: {message}")
        disk, checkpoint = self._last(Kind.DISK), self._last(Kind.CHECKPOINT)
        if status == 2 and disk is not None and _FULL.search(message):
            disk.survived = "room was made, the same command again"
        elif status == 2 and checkpoint is not None and (offer := _OFFER.search(message)):
            subprocess.run(["sh", "-euc", offer[1]], cwd=self.folder, check=True)
            anew = "begin the run anew" in message
            checkpoint.survived = f"{'a new beginning' if anew else 'the checkpoint before'}, offered by name"
        elif status == _PASSING or status < 0:
            why = f"status {status}" if status > 0 else signal.Signals(-status).name
            self._cause(status).survived = f"the same command again ({why})"
        else:
            raise RunFailed(f"attempt {self.attempts} ended with status {status}: {message}")

    def _cause(self, status: int) -> Struck:
        """Which fault ended the attempt: of a trainer that was killed, the one that did it; otherwise the last."""
        killers = [struck for struck in self.struck if struck.fault.kind in _KILLERS and not struck.answered]
        return killers[-1] if killers and status < 0 else self.struck[-1]

    def _last(self, kind: Kind) -> Struck | None:
        """The last fault of a kind."""
        return next((struck for struck in reversed(self.struck) if struck.fault.kind is kind), None)

    def _variables(self) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
        paths = [str(self._clock.folder), str(DOMAINS), str(kit.ROOT), *filter(None, [clean.get("PYTHONPATH")])]
        user = {} if self._user is None else {"MUA_USER_BASE_URL": self._user.url}
        return clean | user | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}

    # ---- faults

    def _moved(self, place: Place) -> None:
        self.reached.reached.setdefault(place.key, monotonic() - self._started)

    def _strike(self, scene: Scene, place: Place) -> None:
        """Go on with the next fault if it is time for it."""
        if not self._waiting or self._ending:
            return
        fault, now = self._waiting[0], monotonic()
        if self._effect is None:
            if not self._is_time(fault, place, now):
                return
            self._effect, self._effect_since = strike(fault, scene), now
        if (done := next(self._effect)) is not None:
            self._note(fault, place, done)
        elif now - self._effect_since > _VICTIM_SECONDS:
            self._waiting.pop(0)
            self._effect = None

    def _is_time(self, fault: Fault, place: Place, now: float) -> bool:
        if place.key == (fault.step, fault.phase.order) or (place.phase in BEGINNING and fault.phase in BEGINNING):
            return now >= place.at + fault.moment * self._pace.length(place.phase, place.step)
        if fault.phase in BEGINNING:
            return place.step > fault.step  # there was no beginning to strike
        return place.key > fault.key and place.phase not in BEGINNING

    def _note(self, fault: Fault, place: Place, done: str) -> None:
        self._waiting.pop(0)
        self._effect, self._ending = None, fault.kind in ENDS
        position = self._pace.position(place, monotonic())
        self.struck.append(Struck(fault, place, self.seconds, done, position))
        self._on_strike(self.struck[-1])

    def _count_lost(self) -> None:
        """Seconds from one fault to the next that an undisturbed run would not have needed to get as far."""
        self.reached.end = self.seconds
        points = [(struck.seconds, struck.position) for struck in self.struck] + [(self.seconds, self._pace.end)]
        for struck, (seconds, position) in zip(self.struck, points[1:], strict=True):
            struck.lost = (seconds - struck.seconds) - (position - struck.position)

    # ---- what is done a while later

    def _do_later(self, is_due: Callable[[float, bool], bool]) -> None:
        due = [entry for entry in self._later if is_due(entry[0], entry[2])]
        self._later = [entry for entry in self._later if entry not in due]
        for _, action, _ in due:
            action()

    # ---- the end

    def _end(self) -> None:
        if self._user is not None:
            self._user.stop()
        for process in left_in(self.folder):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
