"""``docs/metrics.md``, and the lines of ``mua metrics``, written from the catalogue."""

from __future__ import annotations

from collections.abc import Iterator

from mua.observe.catalogue import CATALOGUE, GROUPS, STANDS_FOR, Metric, described, near
from mua.types import Json
from mua.utils.errors import MuaError

HEADER = """\
# Metrics

Every name that a run logs. This page is generated from `mua/observe/catalogue.py` by `make docs`; edit the catalogue,
not the page. `mua metrics NAME` prints one in the terminal.

`<output>/metrics.jsonl` has a line for each step, counted from 0, and `<output>/evaluations.jsonl` one for each policy
that was evaluated, at the number of steps it had taken. TensorBoard (`<output>/tensorboard`) has the same points, with
histograms, texts of episodes and the hyperparameters beside. `null` stands for a value that is not finite. What did not
occur (a kind of fault, a tool that nobody called) is left out.

*Normal* is what a run that learns usually shows, not a law: domains differ, and a change over steps says more than a
value.

## Other trackers

`observe.wandb: {project: …}` and `observe.mlflow: {experiment: …}` send scalars, histograms, texts and
hyperparameters to [Weights & Biases](https://docs.wandb.ai) and [MLflow](https://mlflow.org) as well, where their
package is installed (they are no dependencies of this one); a configuration that names one that is not is refused. A
thread of its own talks to each: training never waits for it. What a service did not take for a passing fault is tried
again in order, 256 calls wait at most, the end of a run waits a minute, and what was dropped is counted in the log. The
service is told how a run ended (finished; killed, where it was asked to leave; failed). A run that goes on from a
checkpoint goes on there too (`<output>/wandb_run`, `mlflow_run`), but neither takes points back: steps that are taken
again stand twice. Where Weights & Biases cannot be reached or has no key, the log says so and the run is written to
`<output>/wandb` for `wandb sync`; `WANDB_MODE` goes before `observe.wandb.mode`.

Tests run against stand-ins of both packages. By hand: a server of MLflow 3.17.2 that was killed and started again in
the middle had all 60 steps in order and once, and the run as failed; wandb 0.31.0 without a key, and with one but
without a network, kept its run offline (the package itself tries for 90 seconds). Not run: against the server of
Weights & Biases.

## The log

Each command that works in an output folder keeps `<output>/logs/<command>.log`, such as `train.log`: time, level,
place, and what ended it with its traceback. Other ranks have `train-rank-<n>.log` once there is a warning or an
error; `mua engines`, and `mua sample` with `--logs FOLDER`, have a file per process, `<command>-<host>-<pid>.log`.
SGLang's logs stand beside them. The terminal shows warnings, progress and results.
"""


def metrics_page() -> str:
    """The whole page as Markdown, ending in one newline."""
    return "\n".join([HEADER, *_groups(), *_words()]).rstrip() + "\n"


def entry(metric: Metric) -> Json:
    """One entry as plain JSON."""
    found = {name: getattr(metric, name) for name in ("name", "group", "kind", "unit", "meaning", "normal")}
    return found | {"otherwise": metric.otherwise}


def text_of(metric: Metric) -> str:
    """One entry for a terminal."""
    parts = [("unit", metric.unit), ("", metric.meaning), ("normal", metric.normal), ("otherwise", metric.otherwise)]
    return "\n".join([metric.name, *(f"  {word}: {said}" if word else f"  {said}" for word, said in parts if said)])


def line_of(metric: Metric) -> str:
    """One entry as a line of a list."""
    return f"{metric.name:<52} {metric.meaning}"


def asked_for(name: str | None) -> list[Metric]:
    """All entries without a ``name``, else the one it is of, or those whose names begin with it.

    Raises :class:`MuaError` with near names where there is none.
    """
    if name is None:
        return [*CATALOGUE]
    exact = described(name)
    found = [exact] if exact is not None else [metric for metric in CATALOGUE if metric.name.startswith(name)]
    if not found:
        others = near(name)
        meant = f"; did you mean {', '.join(others[:5])}?" if others else "; `mua metrics` lists all"
        raise MuaError(f"no metric is called {name}{meant}")
    return found


def _groups() -> Iterator[str]:
    for group, about in GROUPS.items():
        yield f"## `{group}/`\n\n{about}\n"
        yield "| name | unit | meaning | normal | when it is not |\n| --- | --- | --- | --- | --- |"
        for metric in CATALOGUE:
            if metric.group == group:
                cells = (f"`{metric.name}`", metric.unit, metric.meaning, metric.normal, metric.otherwise)
                yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        yield ""


def _words() -> Iterator[str]:
    yield "## Words in names\n\n| word | stands for |\n| --- | --- |"
    yield "| `{domain}`, `{tool}`, `{kind}`, `{layer}` | a domain, a tool, a kind of what is counted, a layer |"
    yield "| `{moment}` | `rollout_begin`, `rollout_end`, and so for `train`, `sync`, `save` |"
    for word, values in STANDS_FOR.items():
        yield f"| `{{{word}}}` | {', '.join(f'`{value}`' for value in values)} |"
