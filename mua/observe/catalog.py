"""Every metric that a run logs: what it means, its unit, what is normal, and what to do when it is not.

``metrics.yaml`` holds the entries; a name is looked up by :func:`described`. ``{word}`` in a name stands for what
differs between runs: a domain, a tool, a kind. ``docs/metrics.md`` is made of it (``mua metrics docs``).
A name that is not here is an error where :data:`STRICT` is set, as tests set it, and said once elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cache, lru_cache
from operator import mul
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
    updates: Literal["sum", "max", "min", "mean", "tokens", "last", "once", ""] = ""
    """How the values of a step's updates are joined (:func:`join_updates`); empty of what no update has."""

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]

    def as_json(self) -> Json:
        return asdict(self) | {"group": self.group}

    def __str__(self) -> str:
        """For a terminal."""
        parts = [("unit", self.unit), ("", self.meaning), ("several updates", self.updates), ("normal", self.normal)]
        parts.append(("otherwise", self.otherwise))
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
        "token_mult_prob_error", "tokens",
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


_JOINS: dict[str, Callable[[Sequence[float], Sequence[float]], float]] = {
    "sum": lambda values, _: sum(values),
    "max": lambda values, _: max(values),
    "min": lambda values, _: min(values),
    "last": lambda values, _: values[-1],
    "mean": lambda values, _: sum(values) / len(values),
    "tokens": lambda values, tokens: sum(map(mul, values, tokens)) / (sum(tokens) or 1.0),
}


def join_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a step from those of its updates, each joined as its entry's :attr:`Metric.updates` says.

    ``train/critic/``, ``train/fresh/`` and ``train/stale/`` join as ``train/`` does. A mean weighs each update by the
    ``tokens`` beside its name, or else by ``train/tokens``. What the catalog lacks is a mean by tokens.
    """
    joined = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        entries = (described(name), described(re.sub("^train/(critic|fresh|stale)/", "train/", name)))
        how = next((entry.updates for entry in entries if entry is not None and entry.updates), "tokens")
        beside = f"{name.rpartition('/')[0]}/tokens"
        having = [update for update in updates if name in update]
        tokens = [update.get(beside, update.get("train/tokens", 1.0)) for update in having]
        joined[name] = _JOINS[how]([update[name] for update in having], tokens)
    return joined


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


def metrics_page() -> str:
    """``docs/metrics.md``, ending in one newline."""
    lines = [Path(__file__).with_name("metrics_page.md").read_text(encoding="utf-8")]
    for group, about in GROUPS.items():
        lines.append(f"## `{group}/`\n\n{about}\n")
        columns = {
            "name": "name",
            "unit": "unit",
            "meaning": "meaning",
            "normal": "normal",
            "otherwise": "when it is not",
        }
        if group == "train":
            columns["updates"] = "several updates"
        lines.append("| " + " | ".join(columns.values()) + " |\n" + "| --- " * len(columns) + "|")
        for metric in (metric for metric in CATALOG if metric.group == group):
            cells = [str(getattr(metric, column)).replace("|", "\\|") for column in columns]
            lines.append(" | ".join([f"| `{cells[0]}`", *cells[1:]]) + " |")
        lines.append("")
    lines.append("## Words in names\n\n| word | stands for |\n| --- | --- |")
    lines.append("| `{domain}`, `{tool}`, `{kind}`, `{layer}` | a domain, a tool, a kind of what is counted, a layer |")
    lines.append("| `{moment}` | `rollout_begin`, `rollout_end`, and so for `train`, `sync`, `save` |")
    for word, values in STANDS_FOR.items():
        lines.append(f"| `{{{word}}}` | {', '.join(f'`{value}`' for value in values)} |")
    return "\n".join(lines).rstrip() + "\n"
