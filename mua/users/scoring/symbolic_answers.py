r"""Answers that are mathematics: expressions, equations, intervals, sets, matrices, in LaTeX or plain.

math-verify and sympy do the work in processes of their own (:mod:`symbolic_worker` says by which rules),
because both may compute without end. What cannot be decided within the processor time of one comparison is wrong: that
is a property of the answer, and not of how busy the machine is.

::

    compare() ──► queue ──► a thread per process ──► one message out, one in
                               │ dead by its own timer (processor time), by memory: decided as "cannot be compared"
                               └ silent for long by the clock: killed, and a fault of the machine

Processes start when they are first needed and belong to no event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from mua.config.section import NonNegativeFloat, Positive, PositiveFloat, Section
from mua.environment.endpoint.services import Services
from mua.types import Json
from mua.users.scoring.scorer import AnswerScore, Question, Scorer, accepted_texts, options_of
from mua.users.scoring.written_numbers import read_number
from mua.utils.errors import EnvironmentFault

LONGEST = 1_000
"""Characters of an expression that is compared."""
_KEPT = 10_000
"""Comparisons that are remembered."""
_UNREADABLE = "scorer 'symbolic' cannot read the right answer as mathematics"
_PROBE = "z_{9}"
"""Compares with every reference that can be worked with."""


class SymbolicOptions(Section):
    """Options of scorer ``symbolic``."""

    relative: NonNegativeFloat = 1e-6
    """Largest difference of two constants as a share of the reference; two whole numbers must be equal."""
    absolute: NonNegativeFloat = 0.0
    """Largest difference that is right in any case."""
    cpu_seconds: PositiveFloat = 3.0
    """Processor time of one comparison; one that takes longer is wrong."""
    wall_seconds: PositiveFloat = 50.0
    """The same by the clock, after which the machine is to blame and the episode is tried again."""
    workers: Positive = 2
    """Processes; each takes about 120 MiB and, when it starts, two seconds."""


class SymbolicScorer(Scorer):
    """Mathematics."""

    def __init__(self, options: Mapping[str, Any], _services: Services) -> None:
        read = options_of(SymbolicOptions, options, "symbolic")
        self._pool = ComparisonPool(read.workers, read.cpu_seconds, read.wall_seconds)
        self._rules: Json = {"relative": read.relative, "absolute": read.absolute}
        self._known: dict[tuple[str, str], Json] = {}

    def check(self, question: Question) -> None:
        """Its length; what sympy makes of it is :meth:`check_together`'s to say."""
        if max(map(len, accepted_texts(question))) > LONGEST:
            raise question.wrong(f"scorer 'symbolic' compares at most {LONGEST} characters")

    def check_together(self, questions: Sequence[Question]) -> None:
        """Have sympy read every different reference that is no plain number: some milliseconds each."""
        asked: dict[str, Question] = {}
        for question in questions:
            for text in accepted_texts(question):
                if read_number(text) is None:
                    asked.setdefault(text, question)
        if not asked:
            return
        try:
            for question, found in zip(asked.values(), self._pool.read(asked, self._rules), strict=True):
                if found.get("unreadable"):
                    raise question.wrong(_UNREADABLE)
                if "why" in found:
                    raise question.wrong(f"scorer 'symbolic' cannot work with the right answer ({found['why']})")
        finally:
            self._pool.close()

    async def score(self, answer: str, question: Question) -> AnswerScore:
        why = "not equal"
        if len(answer) > LONGEST:
            return AnswerScore.of(False, why=f"longer than {LONGEST} characters")
        for text in accepted_texts(question):
            found = await self._compared(answer, text)
            if found.get("unreadable"):
                raise question.wrong(_UNREADABLE)
            if found.get("equal"):
                return AnswerScore.of(True, reference=text)
            if "why" in found and "why" in await self._compared(_PROBE, text):
                raise question.wrong(f"scorer 'symbolic' cannot work with the right answer ({found['why']})")
            why = found.get("why", why)
        return AnswerScore.of(False, why=why)

    async def close(self) -> None:
        self._pool.close()

    async def _compared(self, answer: str, reference: str) -> Json:
        if (found := self._known.get((answer, reference))) is None:
            found = await self._pool.compare(answer, reference, self._rules)
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[answer, reference] = found
        return found


# ---- processes that compare

START_SECONDS = 120.0
_ROOT = Path(__file__).resolve().parents[3]
_MOST_COMPARISONS = 5_000
"""After so many a process is replaced: sympy's caches grow."""


class MathProcess:
    """One process. Used by one thread at a time."""

    def __init__(self) -> None:
        """Raises :class:`EnvironmentFault` when it does not start."""
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        path = os.pathsep.join(dict.fromkeys([str(_ROOT), *(one for one in sys.path if one)]))
        self._line, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mua.users.scoring.symbolic_worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
                pass_fds=[theirs.fileno()],
                env=kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip
        self.compared = 0
        if not self._line.poll(START_SECONDS) or self._answer() != "ready":
            self.end()
            raise EnvironmentFault(
                "scorer 'symbolic': its process does not start; what it printed stands above, on standard error"
            )

    def ask(self, request: Json, seconds: float) -> Json | None:
        """The answer to ``request``; None if the process ended over it. Raises TimeoutError after ``seconds``."""
        self.compared += 1
        with suppress(OSError):
            self._line.send_bytes(json.dumps(request).encode())
        if not self._line.poll(seconds):
            raise TimeoutError
        return self._answer()

    def _answer(self) -> Any:
        try:
            return json.loads(self._line.recv_bytes())
        except (EOFError, OSError):
            return None

    def end(self) -> int:
        """Kill it. How it had ended before: an exit status, negative for a signal."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0 if self._line.poll() else 0.0)
        self.process.kill()
        return self.process.wait()


class ComparisonPool:
    """Up to ``workers`` processes; see the module's docstring."""

    def __init__(self, workers: int, cpu_seconds: float, wall_seconds: float) -> None:
        """``cpu_seconds``: processor time of one comparison; ``wall_seconds``: by the clock, for a busy machine."""
        self._workers, self._cpu, self._wall = workers, cpu_seconds, wall_seconds
        self._threads: ThreadPoolExecutor | None = None
        self._idle: list[MathProcess] = []
        self._all: set[MathProcess] = set()

    async def compare(self, answer: str, reference: str, rules: Json) -> Json:
        """``{"equal": bool}``, ``{"unreadable": True}`` for a reference that is no mathematics, or ``{"why": text}``
        where the answer cannot be compared. Raises :class:`EnvironmentFault` for what is no fault of the answer."""
        request: Json = {"answer": answer, "reference": reference, "rules": rules, "seconds": self._cpu}
        return await asyncio.wrap_future(self._running().submit(self._compared, request))

    def read(self, references: Iterable[str], rules: Json) -> Iterator[Json]:
        """What :meth:`compare` says of each reference whatever the answer is, in order; blocks."""
        requests = [{"answer": None, "reference": one, "rules": rules, "seconds": self._cpu} for one in references]
        return self._running().map(self._compared, requests)

    def _running(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._workers, thread_name_prefix="compare")
        return self._threads

    def close(self) -> None:
        """Kill the processes; comparisons under way raise. The pool may be used again."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)
        self._idle.clear()
        while self._all:
            process = self._all.pop().process
            process.kill()
            process.wait()

    def _compared(self, request: Json) -> Json:
        threads, ended = self._threads, 0
        for _ in range(2):  # a process may end by what came before
            if threads is None or self._threads is not threads:
                raise EnvironmentFault("scorer 'symbolic' is closed")
            try:
                process = self._idle.pop()
            except IndexError:
                process = MathProcess()
            self._all.add(process)
            answer = None
            try:
                answer = process.ask(request, self._wall)
            except TimeoutError:
                raise EnvironmentFault(
                    f"scorer 'symbolic': no verdict within {self._wall:g} s by the clock; the machine is too busy: "
                    "raise environment.scorer.options.wall_seconds, or lower workers"
                ) from None
            finally:
                if answer is not None and self._threads is threads and process.compared < _MOST_COMPARISONS:
                    self._idle.append(process)
                else:
                    self._all.discard(process)
                    ended = process.end()
            if answer is not None:
                return answer
            if ended == -signal.SIGPROF:
                return {"why": f"the comparison takes more than {self._cpu:g} s of processor time"}
        if ended == -signal.SIGKILL:
            raise EnvironmentFault("scorer 'symbolic': its process was killed twice; is the machine out of memory?")
        return {"why": "the comparison crashes"}
