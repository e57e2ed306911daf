"""For notebooks and scripts: ``mua.load_config``, ``mua.evaluate``, ``mua.open_run``; see ``docs/python_api.md``.

The package itself imports nothing of this before it is asked for.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar, overload

import mua.config.load
from mua.config.schema import ExperimentConfig
from mua.observe.output import output_of, prepare_output
from mua.store.queries import Order, TrajectoryFilter, count_trajectories, list_trajectories, trajectory_ids
from mua.store.trajectories import read_trajectories
from mua.types import Json, Trajectory
from mua.view.terminal import show
from mua.view.viewed_runs import ViewedRun, opened_runs

Overrides: TypeAlias = Mapping[str, Any] | Sequence[str]
"""``{"trainer.steps": 3}``, or as on the command line: ``["trainer.steps=3"]``."""
Result = TypeVar("Result")
_CHUNK = 64


def load_config(file: str | PathLike[str], overrides: Overrides = ()) -> ExperimentConfig:
    """A configuration from its file or a recipe's name, validated.

    Raises :class:`ConfigError`, whose message has a line for each thing that is wrong.
    """
    if isinstance(overrides, Mapping):  # JSON is YAML
        dumped = {key: json.dumps(value, default=fspath, allow_nan=False) for key, value in overrides.items()}
        overrides = [f"{key}={text}" for key, text in dumped.items()]
    return mua.config.load.load_config(Path(file), overrides)


def evaluate(config: ExperimentConfig | str | PathLike[str], overrides: Overrides = ()) -> Json:
    """Do what ``mua eval`` does and give what it writes as ``evaluation.json``: ``success``, ``kinds``, ``per_task``...

    Called again with the same configuration, it continues: what is scored already is not played again. ``overrides``
    are for a file's name. Raises :class:`MuaError`.
    """
    if not isinstance(config, ExperimentConfig):
        config = load_config(config, overrides)
    elif overrides:
        raise TypeError("overrides are for a file; give a loaded configuration its values when it is loaded")
    from mua.trainer.evaluation.evaluator import evaluated, servable

    def run() -> Json:
        with output_of(config):
            if not config.model.shrink:
                prepare_output(config, "config-eval.yaml")
                return evaluated(servable(config))
            from workbench.shrink import prepare_shrunk

            return evaluated(servable(prepare_shrunk(config, "config-eval.yaml")))

    return _outside_of_loops(run)


def open_run(place: str | PathLike[str], run: str | None = None) -> OpenRun:
    """What a run left behind, or leaves while it goes on: its output folder, store file or ``postgresql://`` URL.

    ``run`` names one of several in a store. Raises :class:`MuaError` where there is none.
    """
    return OpenRun(fspath(place), run)


class OpenRun:
    """One run, opened for reading alone. A context manager; :meth:`close` does the same."""

    def __init__(self, place: str, run: str | None = None) -> None:
        self._stack, self._place = ExitStack(), place
        try:
            tell = lambda line: print(line, file=sys.stderr)  # noqa: E731
            self._run: ViewedRun = self._stack.enter_context(opened_runs([place], tell=tell)).get(run)
        except BaseException:
            self._stack.close()
            raise

    @property
    def id(self) -> str:
        """By which its store knows it."""
        return self._run.id

    @property
    def config(self) -> Json:
        """The configuration of its last start, secrets masked."""
        return self._run.config

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One mapping per step, in order, each with its ``step`` and the metrics that were logged then; read anew as
        the run goes on. Empty where ``metrics.jsonl`` is not on this machine."""
        return [dict(line) for line in self._run.metric_lines()]

    def curve(self, metric: str) -> dict[int, float]:
        """One metric by step; only steps that logged a finite value."""
        return {line["step"]: line[metric] for line in self._run.metric_lines() if line.get(metric) is not None}

    @property
    def trajectories(self) -> Trajectories:
        """All of them, those of evaluations too."""
        return Trajectories(self._run, TrajectoryFilter(run=self.id))

    def show(self, trajectory: str) -> None:
        """Print one as a conversation, with mask, advantages and verdict, as ``mua show`` does."""
        show(self._place, {}, run=self.id, name=trajectory, sample=None, model=None, as_json=False)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<run {self.id} of {self._run.store.name}>"


class Trajectories:
    """Trajectories of a run under a filter. Nothing is read before it is asked for, and a few at a time then."""

    def __init__(self, run: ViewedRun, chosen: TrajectoryFilter) -> None:
        self._run, self._chosen = run, chosen

    def where(self, **filters: Any) -> Trajectories:
        """Those that fit as well: ``step``, ``round`` (0: training), ``domain``, ``task``, ``kind``, ``outcome``,
        ``success``, ``scored``, ``tool_error``, ``min_reward``, ``text``, ``kept`` (with tokens), ...

        Raises :class:`TypeError` for another name; see :class:`mua.store.queries.TrajectoryFilter`.
        """
        if "run" in filters:
            raise TypeError("where() chooses within one run; open another one with open_run")
        return Trajectories(self._run, replace(self._chosen, **filters))

    def rows(self, limit: int | None = None, order: Order = "newest") -> list[dict[str, Any]]:
        """A flat mapping for each, with its ``id`` and without messages and tokens: what a data frame is made of."""
        with self._run.store.read() as connection:
            return list(list_trajectories(connection, self._chosen, limit, order=order))

    def ids(self) -> list[str]:
        """In the order in which they are iterated over."""
        with self._run.store.read() as connection:
            return trajectory_ids(connection, self._chosen)

    def __len__(self) -> int:
        with self._run.store.read() as connection:
            return count_trajectories(connection, self._chosen, None)

    def __iter__(self) -> Iterator[Trajectory]:
        """Raises :class:`MuaError` at one whose tokens were pruned; ``where(kept=True)`` leaves those out."""
        names = self.ids()
        for at in range(0, len(names), _CHUNK):
            yield from self._read(names[at : at + _CHUNK])

    @overload
    def __getitem__(self, which: str | int) -> Trajectory: ...
    @overload
    def __getitem__(self, which: slice) -> list[Trajectory]: ...
    def __getitem__(self, which: str | int | slice) -> Trajectory | list[Trajectory]:
        """By id, position or slice. Raises :class:`KeyError` or :class:`IndexError` for one that is not among them."""
        names = self.ids()
        if isinstance(which, slice):
            return self._read(names[which])
        if isinstance(which, str) and which not in names:
            raise KeyError(which)
        return self._read([which if isinstance(which, str) else names[which]])[0]

    def _read(self, names: Sequence[str]) -> list[Trajectory]:
        with self._run.store.read() as connection:
            return list(read_trajectories(connection, names))

    def __repr__(self) -> str:
        return f"<{len(self)} trajectories: {self._chosen.shown()}>"


def _outside_of_loops(function: Callable[[], Result]) -> Result:
    """Call it in a thread of its own where an event loop runs in this one, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function()
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()
