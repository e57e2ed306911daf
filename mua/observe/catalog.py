"""Every metric that a run logs: what it means, its unit, what is normal, and what to do when it is not.

``metrics.yaml`` holds the entries; a name is looked up by :func:`described`. ``{word}`` in a name stands for what
differs between runs: a domain, a tool, a kind. ``docs/metrics.md`` is made of it (``mua metrics docs``).
A name that is not here is an error where :data:`STRICT` is set, as tests set it, and said once elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
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


def metrics_page() -> str:
    """``docs/metrics.md``, ending in one newline."""
    lines = [Path(__file__).with_name("metrics_page.md").read_text(encoding="utf-8")]
    for group, about in GROUPS.items():
        lines.append(f"## `{group}/`\n\n{about}\n")
        lines.append("| name | unit | meaning | normal | when it is not |\n| --- | --- | --- | --- | --- |")
        for metric in CATALOG:
            if metric.group == group:
                cells = (f"`{metric.name}`", metric.unit, metric.meaning, metric.normal, metric.otherwise)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    lines.append("## Words in names\n\n| word | stands for |\n| --- | --- |")
    lines.append("| `{domain}`, `{tool}`, `{kind}`, `{layer}` | a domain, a tool, a kind of what is counted, a layer |")
    lines.append("| `{moment}` | `rollout_begin`, `rollout_end`, and so for `train`, `sync`, `save` |")
    for word, values in STANDS_FOR.items():
        lines.append(f"| `{{{word}}}` | {', '.join(f'`{value}`' for value in values)} |")
    return "\n".join(lines).rstrip() + "\n"
