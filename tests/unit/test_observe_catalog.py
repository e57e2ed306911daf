"""Every metric has an entry in the catalog, the page is made of it, and `mua metrics` explains one.

The scan sees names that stand in the source as texts; that what runs log is known too is proven by all tests that
train, because ``tests/conftest.py`` makes an unknown name an error. Not covered: whether what is said to be normal is.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mua.cli import app
from mua.observe.catalog import CATALOG, GROUPS, STANDS_FOR, STRICT, described, join_updates, metrics_page
from mua.observe.metrics_log import MetricsWriter, read_metrics

ROOT = Path(__file__).parents[2]
NOT_METRICS = {"tools/list", "tools/call", "tools/base"}
"""Methods of MCP, and a folder."""
NAME = re.compile(rf"({'|'.join(GROUPS)})/(\w|\.\+|/)+")
NO_METRICS_IN = ("mua/compat/", "mua/launch/", "mua/observe/catalog.py", "mua/environment/mcp/")


def examples() -> set[str]:
    """The catalog's names, with each word replaced by what it may stand for."""
    found = set()
    for metric in CATALOG:
        words = re.findall(r"\{(\w+)\}", metric.name)
        free = {"layer": ["00"], "moment": ["train_end"]}
        for values in itertools.product(*(STANDS_FOR.get(word, free.get(word, ["x"])) for word in words)):
            name = metric.name
            for word, value in zip(words, values, strict=True):
                name = name.replace(f"{{{word}}}", value, 1)
            found.add(name)
    return found


def texts(tree: ast.AST) -> Iterator[str]:
    """Every text of a program as a pattern; what is filled in stands for anything."""
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield re.escape(node.value)
        elif isinstance(node, ast.JoinedStr):
            yield "".join(re.escape(str(p.value)) if isinstance(p, ast.Constant) else ".+" for p in node.values)


def test_every_name_in_the_source_is_explained() -> None:
    known, lacking, seen = examples(), set(), 0
    for path in (ROOT / "mua").rglob("*.py"):
        where, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        if where.startswith(NO_METRICS_IN) or not NAME.search(text):
            continue
        for pattern in set(texts(ast.parse(text))):
            plain = pattern.replace("\\", "")
            if NAME.fullmatch(plain) and plain not in NOT_METRICS:
                seen += 1
                pattern += ".*" if pattern.endswith(("/", "_")) else "(/.+)?"  # the beginning of names
                if described(plain) is None and not any(re.fullmatch(pattern, name) for name in known):
                    lacking.add(f"{where}: {plain}")
    assert seen > 100
    assert lacking == set()


def test_entries_are_whole_and_of_at_most_twelve_groups() -> None:
    assert len(GROUPS) <= 12
    assert {metric.group for metric in CATALOG} == set(GROUPS)
    names = [metric.name for metric in CATALOG]
    assert len(names) == len(set(names))
    assert [m.name for m in CATALOG if not m.meaning.endswith((".", ")"))] == []
    assert {word for name in names for word in re.findall(r"\{(\w+)\}", name)} <= {
        *STANDS_FOR, "domain", "tool", "kind", "layer", "moment",
    }  # fmt: skip


def test_every_metric_of_an_update_says_how_several_are_joined() -> None:
    families = ("train/critic/{", "train/critic/moe/", "train/fresh/", "train/stale/")  # as train/ of the same name
    silent = [metric.name for metric in CATALOG if metric.group == "train" and not metric.updates]
    assert all(name.startswith(families) for name in silent)
    assert not [metric.name for metric in CATALOG if metric.updates and metric.group != "train"]


UPDATES = [
    {"train/tokens": 10.0, "train/entropy": 1.0, "train/grad_norm": 1.0, "train/lr": 2.0, "train/skipped": 1.0,
     "train/ratio_max": 1.23, "train/moe/load_min_over_mean": 0.2, "train/critic/moe/layers/03/load_max_over_mean": 3.0,
     "train/critic/forward_backward_seconds": 2.0, "train/fresh/tokens": 1.0, "train/fresh/token_mult_prob_error": 9.0,
     "train/fresh/train_rollout_logprob_abs_diff_max": 0.5, "train/opd_reverse_kl": 1.0},
    {"train/tokens": 30.0, "train/entropy": 2.0, "train/grad_norm": 3.0, "train/lr": 1.0, "train/skipped": 0.0,
     "train/ratio_max": 1.1, "train/moe/load_min_over_mean": 0.1, "train/critic/moe/layers/03/load_max_over_mean": 2.0,
     "train/critic/forward_backward_seconds": 3.0, "train/fresh/tokens": 3.0, "train/fresh/token_mult_prob_error": 1.0,
     "train/fresh/train_rollout_logprob_abs_diff_max": 0.25, "train/of_a_hook": 5.0},
]  # fmt: skip


def test_updates_are_joined_as_the_catalog_says() -> None:
    assert join_updates(UPDATES) == {
        "train/tokens": 40.0, "train/entropy": 1.75, "train/grad_norm": 2.0, "train/lr": 1.0, "train/skipped": 0.5,
        "train/ratio_max": 1.23, "train/moe/load_min_over_mean": 0.1, "train/opd_reverse_kl": 1.0,
        "train/critic/moe/layers/03/load_max_over_mean": 3.0, "train/critic/forward_backward_seconds": 5.0,
        "train/fresh/tokens": 4.0, "train/fresh/token_mult_prob_error": 3.0,
        "train/fresh/train_rollout_logprob_abs_diff_max": 0.5, "train/of_a_hook": 5.0,
    }  # fmt: skip
    (one, *_) = UPDATES
    assert join_updates([one]) == one
    assert join_updates([]) == {}
    assert join_updates([{"train/tokens": 0.0, "train/grad_norm": 0.0, "train/loss": 0.0}])["train/loss"] == 0.0


def test_the_committed_page_is_current() -> None:
    page = metrics_page()
    assert (ROOT / "docs/metrics.md").read_text(encoding="utf-8") == page, "run `make docs` and commit the page"
    assert [metric.name for metric in CATALOG if f"| `{metric.name}` |" not in page] == []


def test_a_name_without_an_entry_is_an_error_in_tests_and_said_once_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as metrics:
        with pytest.raises(LookupError, match=r"lacks the metrics train/los$"):
            metrics.log(0, {"train/los": 1.0, "train/loss": 1.0})
        monkeypatch.delenv(STRICT)
        for step in range(2):
            metrics.log(step, {"train/los": 1.0})
    assert [line["train/los"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1.0, 1.0]
    assert caplog.text.count("does not explain: train/los") == 1


def test_the_command_explains_one_finds_several_and_helps_with_a_wrong_one() -> None:
    def said(*words: str, status: int = 0) -> str:
        result = CliRunner().invoke(app, ["metrics", *words])
        assert result.exit_code == status, result.output
        return result.output + (result.stderr if status else "")

    assert "nats per token" in said("train/entropy")
    assert said("judge/llm/").count("\njudge/llm/") > 5
    assert len(said().splitlines()) == len(CATALOG)
    (entry,) = json.loads(said("time/wait_seconds", "--json"))
    assert (entry["name"], entry["group"], entry["unit"]) == ("time/{phase}_seconds", "time", "s")
    assert said("docs") == metrics_page()
    assert "did you mean train/entropy" in said("entropy", status=2)
