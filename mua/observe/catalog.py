"""Every metric that a run logs: what it means, its unit, what is normal, and what to do when it is not.

``metrics.yaml`` holds the entries; a name is looked up by :func:`described`. ``{word}`` in a name stands for what
differs between runs: a domain, a tool, a kind. ``docs/metrics.md`` is made of it (``mua metrics docs``).
A name that is not here is an error where :data:`STRICT` is set, as tests set it, and said once elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml

from mua.observe.timeline import EngineActivity, TrainerPhase
from mua.types import Json, Outcome, Provenance
from mua.utils.errors import MuaError

STRICT = "MUA_STRICT_METRICS"
"""Variable of the environment: ``1`` makes a name that the catalog lacks an error."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One name, or family of names."""

    name: str
    meaning: str
    unit: str = ""
    normal: str = ""
    otherwise: str = ""
    """What to do when it is not as it should be; empty where nothing follows from the figure alone."""
    kind: Literal["scalar", "histogram", "text"] = "scalar"

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]

    def as_json(self) -> Json:
        return asdict(self) | {"group": self.group}

    def __str__(self) -> str:
        """For a terminal."""
        parts = [("unit", self.unit), ("", self.meaning), ("normal", self.normal), ("otherwise", self.otherwise)]
        return "\n".join([self.name, *(f"  {word}: {said}" if word else f"  {said}" for word, said in parts if said)])


_DATA: Any = yaml.safe_load(Path(__file__).with_name("metrics.yaml").read_text(encoding="utf-8"))
GROUPS: Mapping[str, str] = _DATA["groups"]
CATALOG = tuple(Metric(name, **texts) for name, texts in _DATA["metrics"].items())
_FREE = {
    "domain": ".+",
    "tool": ".+",
    "kind": "[a-z0-9_]+",
    "layer": "[0-9]+",
    "moment": "(?:rollout|train|sync|save)_(?:begin|end)",
}
"""Words that stand for what a run brings, as patterns."""
_OF_AN_UPDATE = {
    "grad_norm", "lr", "skipped", "num_microbatches", "padding_share", "merged_share", "imbalance_tokens",
    "imbalance_flops", "microbatch_imbalance_tokens", "microbatch_imbalance_flops", "utilization",
    "forward_backward_seconds", "optimizer_seconds",
}  # fmt: skip
STANDS_FOR: Mapping[str, Sequence[str]] = {
    "split": ("train", "validation", "test"),
    "outcome": tuple(Outcome),
    "provenance": tuple(kind.name.lower() for kind in Provenance if kind is not Provenance.SAMPLED),
    "figure": (
        "mean", "std", "min", "max",
        "train_rollout_logprob_abs_diff", "train_rollout_logprob_abs_diff_max", "train_rollout_kl_k3",
        "token_mult_prob_error",
    ),
    "of_policy": tuple(sorted(_OF_AN_UPDATE)),
    "of_moe": ("load_max_over_mean", "load_min_over_mean", "load_entropy", "aux_loss", "z_loss"),
    "phase": (*TrainerPhase, "train", "read", "validate"),
    "activity": tuple(EngineActivity),
    "part": (
        "start", "generating", "engine_slot", "tools", "user", "scoring", "other", "stop", "begin", "load", "end",
        "resume",
    ),
    "what": ("allocated", "reserved", "free"),
    "count": (
        "rewrites", "rewrites_by_tokens", "rewrites_by_turns", "rewrites_by_repetition", "tokens_before",
        "tokens_after", "notes_tokens", "results_cut", "requests", "retried", "appended", "forked", "rewritten",
        "started", "overridden", "told", "own_reward", "judge_score",
    ),
}  # fmt: skip
"""Words that stand for one of these."""


@lru_cache(maxsize=4096)
def described(name: str) -> Metric | None:
    """The entry that ``name`` is of, if there is one; of families the most particular."""
    return next((metric for pattern, metric in _patterns() if pattern.fullmatch(name)), None)


@cache
def _patterns() -> list[tuple[re.Pattern[str], Metric]]:
    found = []
    for metric in sorted(CATALOG, key=lambda m: ("{" in m.name, -len(re.sub(r"\{\w+\}", "", m.name)))):
        parts = re.split(r"\{(\w+)\}", metric.name)
        parts[::2] = map(re.escape, parts[::2])
        parts[1::2] = (_FREE.get(word) or "|".join(map(re.escape, STANDS_FOR[word])) for word in parts[1::2])
        found.append((re.compile("".join(f"(?:{part})" for part in parts)), metric))
    return found


def unknown(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that the catalog lacks."""
    return [name for name in names if described(name) is None]


def asked_for(name: str | None) -> list[Metric]:
    """All entries without a ``name``, else the one it is of, or those whose names begin with it.

    Raises :class:`MuaError` with near names where there is none.
    """
    if name is None:
        return [*CATALOG]
    exact = described(name)
    found = [exact] if exact is not None else [metric for metric in CATALOG if metric.name.startswith(name)]
    if not found:
        names = [metric.name for metric in CATALOG]
        others = [known for known in names if name in known] or get_close_matches(name, names, 5, 0.5)
        meant = f"; did you mean {', '.join(others[:5])}?" if others else "; `mua metrics` lists all"
        raise MuaError(f"no metric is called {name}{meant}")
    return found


HEADER = """\
# Metrics

Every name that a run logs. This page is generated from `mua/observe/metrics.yaml` by `make docs`; edit that file, not
the page. `mua metrics NAME` prints one in the terminal.

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
    """``docs/metrics.md``, ending in one newline."""
    return "\n".join([HEADER, *_page_parts()]).rstrip() + "\n"


def _page_parts() -> Iterator[str]:
    for group, about in GROUPS.items():
        yield f"## `{group}/`\n\n{about}\n"
        yield "| name | unit | meaning | normal | when it is not |\n| --- | --- | --- | --- | --- |"
        for metric in CATALOG:
            if metric.group == group:
                cells = (f"`{metric.name}`", metric.unit, metric.meaning, metric.normal, metric.otherwise)
                yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        yield ""
    yield "## Words in names\n\n| word | stands for |\n| --- | --- |"
    yield "| `{domain}`, `{tool}`, `{kind}`, `{layer}` | a domain, a tool, a kind of what is counted, a layer |"
    yield "| `{moment}` | `rollout_begin`, `rollout_end`, and so for `train`, `sync`, `save` |"
    for word, values in STANDS_FOR.items():
        yield f"| `{{{word}}}` | {', '.join(f'`{value}`' for value in values)} |"
